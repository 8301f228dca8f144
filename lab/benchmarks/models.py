"""Models of real size with random weights, made where they lie: what a benchmark needs of a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

import tca_jax
from tca_jax.engine.lm import LM
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.common import random_normal
from tca_jax.lab.benchmarks.shares import Share
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.names import MODEL, Parameter, parameters
from tca_jax.models.projections import LARGEST_CODE, WEIGHTS
from tca_jax.models.rope import RopeConfig
from tca_jax.models.sharding import by_part, check_mesh, parameter_sharding, settled, spec_sharding

_STD = 0.02
_DEVIATIONS = 8  # of codes of eight bits, the largest: none of them is drawn past it

_LLAMA = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_positions=131072,
    tie_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeConfig(
        type="llama3",
        theta=500_000.0,
        original_max_positions=8192,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    dtype_name="bfloat16",
)

#: Architecture of every model, under the names of `common.LAYERS`; "tiny" is for machines without a GPU.
CONFIGS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama3.1-8b": _LLAMA,
        "qwen2.5-7b": dataclasses.replace(
            _LLAMA,
            family="qwen2",
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_layers=28,
            num_heads=28,
            num_kv_heads=4,
            rms_norm_eps=1e-6,
            qkv_bias=True,
            rope=RopeConfig(type="default", theta=1_000_000.0),
        ),
        "llama3.1-70b": dataclasses.replace(
            _LLAMA,
            hidden_size=8192,
            intermediate_size=28672,
            num_layers=80,
            num_heads=64,
        ),
        "tiny": dataclasses.replace(
            _LLAMA,
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rope=RopeConfig(type="default", theta=10_000.0),
            dtype_name="float32",
        ),
    }
)


def random_model(
    name: str,
    key: Array,
    num_layers: int | None = None,
    *,
    max_positions: int | None = None,
    mesh: Mesh | None = None,
    weights: str | None = None,
    kv: str | None = None,
) -> LM:
    """A model of true size with random weights, drawn on the default device in the model's own dtype.

    Nothing but the weights is ever as large as a weight. Weights are normal(0.02), projections into the residual stream
    are divided by sqrt(2 layers), so activations stay finite; there is no tokenizer and no stop token.

    Args:
        name: One of `CONFIGS`.
        key: Random key.
        num_layers: Layers; None for the model's own.
        max_positions: Longest context; None for the model's own.
        mesh: Devices that share the model; each draws its own part of the weights, so their numbers depend on how many
            devices share them.

    Raises:
        ValueError: the name is unknown, or the mesh does not fit the model.
    """
    abstract = abstract_model(name, num_layers, max_positions=max_positions, weights=weights).decoder
    if mesh is not None:
        check_mesh(mesh, abstract.config, name)
    found = parameters(abstract)
    of_codes = LARGEST_CODE / _DEVIATIONS if weights else 1.0
    layers = abstract.config.num_layers
    drawn = {
        parameter.path: parameter.variable.replace(_weight(parameter, one_key, layers, mesh, of_codes))
        for parameter, one_key in zip(found, jax.random.split(key, len(found)), strict=True)
    }
    decoder: Decoder = nnx.merge(nnx.graphdef(abstract), nnx.from_flat_state(drawn))
    return LM.from_decoder(decoder, mesh=mesh, name=name, kv=kv)


def abstract_model(
    name: str,
    num_layers: int | None = None,
    *,
    max_positions: int | None = None,
    weights: str | None = None,
    kv: str | None = None,
) -> LM:
    """A model of true size with shapes for weights, which is all that compilation needs; else as `random_model`."""
    config = config_of(name, num_layers, max_positions=max_positions)
    dtype = jnp.dtype(config.dtype_name)
    stored = WEIGHTS[weights] if weights else dtype
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, param_dtype=stored, rngs=nnx.Rngs(0)))
    return LM.from_decoder(decoder, name=name, kv=kv)


def config_of(name: str, num_layers: int | None = None, *, max_positions: int | None = None) -> ModelConfig:
    """The architecture of a model; arguments and errors are those of `random_model`."""
    if name not in CONFIGS:
        raise UserError(f"model = {name!r}: must be one of {list(CONFIGS)}")
    config = CONFIGS[name]
    return dataclasses.replace(
        config,
        num_layers=num_layers or config.num_layers,
        max_positions=max_positions or config.max_positions,
    )


def under_share(lm: LM, share: Share, config: tca_jax.TCAConfig) -> LM:
    """The model under budgets and readings that are made up for a share, alike in all layers but for what fetches."""
    return lm.with_method(share.method(config, lm.config.num_kv_heads, lm.config.num_layers))


def weight_bytes(lm: LM) -> int:
    """Bytes of weights that a decoding step reads: all but the embedding, of which it reads a row."""
    bytes_ = sum(x.nbytes for x in jax.tree.leaves(lm.params))
    return bytes_ if lm.config.tie_embeddings else bytes_ - lm.decoder.embedding.nbytes


def _weight(parameter: Parameter, key: Array, num_layers: int, mesh: Mesh | None, of_codes: float) -> Array:
    """One parameter by its place in the decoder; `of_codes` is the deviation of codes of eight bits."""
    path, shape, dtype = parameter.path, tuple(parameter.variable.shape), parameter.variable.dtype
    to_residual = path[-2] in ("o", "down") if len(path) > 1 else False
    std = _STD / math.sqrt(2 * num_layers) if to_residual else _STD
    if path[-1] == "scale":
        value = std / of_codes if path[-2] in ("qkv", "o", "gate_up", "down") else 1
        return jnp.full(shape, value, dtype, device=None if mesh is None else parameter_sharding(parameter, mesh))
    std = of_codes if path[-1] == "codes" else std
    return settled(_drawn(key, std, shape=shape, dtype=dtype, spec=parameter.spec, mesh=mesh), parameter, mesh)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "spec", "mesh"))
def _drawn(
    key: Array,
    std: float | Array,
    *,
    shape: tuple[int, ...],
    dtype: Any,
    spec: PartitionSpec,
    mesh: Mesh | None,
) -> Array:
    """Normal numbers; each device draws its part."""
    part = shape if mesh is None else spec_sharding(mesh, spec).shard_shape(shape)

    def on_device(key: Array, std: Array) -> Array:
        if part != shape:
            key = jax.random.fold_in(key, jax.lax.axis_index(MODEL))
        return random_normal(key, part, dtype, std)

    return by_part(on_device, mesh, (PartitionSpec(), PartitionSpec()), spec)(key, std)
