"""Models of published shapes with random weights, and budgets of a chosen share."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import tca_jax
from tca_jax import methods
from tca_jax.calibration.predicted_worth import SHARES, WorthMaps
from tca_jax.calibration.worth_profile import WorthProfile
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import mesh_name
from tca_jax.engine.placement import balanced_orders
from tca_jax.errors import require
from tca_jax.lab.benchmarks.common import random_normal
from tca_jax.methods import BASELINE
from tca_jax.methods.base import Method, per_head
from tca_jax.methods.candidates import budget_sizes, candidate_distributions
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.worth import BLOCK
from tca_jax.methods.written import joined, parse_parts
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.names import MODEL, Parameter, parameters
from tca_jax.models.projections import LARGEST_CODE, WEIGHTS, is_quantized
from tca_jax.models.sharding import DATA, axis_size, check_mesh, settled

_STD = 0.02
_DEVIATIONS = 8  # largest e4m3 code over the deviation of random codes
_RANDOM = "random weights"

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "original_max_position_embeddings": 8192,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> ModelConfig:
    """A LLaMA-3 of these sizes, with `more` entries of its config.json."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": head_dim}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 131072}
    llama = {"model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
    return ModelConfig.from_hf({**llama, "rope_theta": 5e5, "rope_scaling": _LLAMA3_ROPE, **sizes, **more})


_QWEN2 = {"model_type": "qwen2", "vocab_size": 152064, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None}
_TINY = {"vocab_size": 256, "rope_theta": 1e4, "rope_scaling": None, "torch_dtype": "float32"}

#: Architectures by the names of --models; "tiny" is for machines without a GPU.
CONFIGS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama3.1-8b": _shape(4096, 14336, 32, 32, 8, 128),
        "qwen2.5-7b": _shape(3584, 18944, 28, 28, 4, 128, **_QWEN2),
        "qwen2.5-1.5b": _shape(1536, 8960, 28, 12, 2, 128, **_QWEN2 | {"vocab_size": 151936}, tie_word_embeddings=True),
        "llama3.1-70b": _shape(8192, 28672, 80, 64, 8, 128),
        "llama3.2-1b": _shape(2048, 8192, 16, 32, 8, 64, tie_word_embeddings=True),
        "tiny": _shape(64, 96, 2, 4, 2, 16, **_TINY),
    }
)


def tca_with(share: float, config: TCAConfig, kv_heads: int, num_layers: int = 1) -> Method:
    """TCA that keeps a mean share of the ranked blocks: all in heads spread over the layers, else candidate 0's."""
    most = kv_heads * num_layers
    shares = candidate_distributions(config) @ budget_sizes(config) / config.block_size  # of candidates, [M + 1]
    dense = round(most * max(0.0, share - shares[0]) / (1 - shares[0]))
    ends = [dense * layer // num_layers for layer in range(num_layers + 1)]
    counts = [end - start for start, end in itertools.pairwise(ends)]
    rows = tuple((config.num_candidates,) * each + (0,) * (kv_heads - each) for each in counts)
    return methods.get("tca", candidates=rows, config=config)


BlockSharesOption = Annotated[
    list[float] | None,
    typer.Option("--block-shares", help="Shares of the ranked blocks that TCA keeps.", min=0.001, max=0.999),
]
WorthOption = Annotated[
    list[float] | None,
    typer.Option("--worth", help="Shares of the tokens that predicted worth keeps; may be repeated.", min=0.01, max=1),
]
MethodsOption = Annotated[
    list[str] | None, typer.Option("--methods", help="Further methods, such as streaming:window=4096; may be repeated.")
]


def named_methods(
    config: TCAConfig,
    shares: Sequence[float],
    kv_heads: int,
    num_layers: int = 1,
    *,
    full: bool = True,
    others: Mapping[str, Method] = MappingProxyType({}),
) -> dict[str, Method]:
    """Methods by the names of rows: full attention, TCA with each share, others."""
    found = {"full": BASELINE} if full else {}
    return {**found, **{f"TCA {each:g}": tca_with(each, config, kv_heads, num_layers) for each in shares}, **others}


def named_models(
    lm: LM, config: TCAConfig, shares: Sequence[float], worth: Sequence[float], tokens: int, **options: Any
) -> dict[str, LM]:
    """A model under `named_methods`, under the profile that it was opened with, and under predicted worth."""
    tested = named_methods(config, shares, lm.config.num_kv_heads, lm.config.num_layers, **options)
    found = {name: balanced(lm.with_method(method), tokens) for name, method in tested.items()}
    own = {} if lm.method == BASELINE else {"profile": lm}
    return {**found, **own, **{f"worth {kept:g}": with_worth(lm, kept, tokens) for kept in worth}}


def balanced(lm: LM, tokens: int, kept: Float[np.ndarray, "layers Hkv"] | None = None) -> LM:
    """On a mesh, the model with KV heads dealt out by kept shares, or capacities: random weights fit any order."""
    if lm.mesh is None or lm.checkpoint_fingerprint != _RANDOM:
        return lm
    if kept is None:
        given = (lm.method.cache.capacities(layer, tokens) for layer in range(lm.config.num_layers))
        kept = np.array([per_head(each, lm.config.num_kv_heads, lm.method.name) for each in given]) / tokens
    return dataclasses.replace(lm, head_orders=balanced_orders(kept, axis_size(lm.mesh, MODEL)))


#: Shares of the tokens that KV heads keep where all heads keep a fifth, largest first: even quantiles of
#: Qwen2.5-Coder-1.5B's profile.
_KEPT = (1, 0.81, 0.53, 0.35, 0.32, 0.26, 0.24, 0.17, 0.12, 0.1, 0.08, 0.05, 0.03, 0.02, 0.02, 0.01, 0, 0, 0)
_SELECTED, _READ = 0.1, 0.16  # shares of the tokens that prompts select, and of the pairs that they read in all


def with_worth(lm: LM, kept: float, tokens: int) -> LM:
    """A model with random weights under predicted worth: random maps whose heads differ as a real model's do."""
    c, random = lm.config, np.random.default_rng(0)
    heads, normal = c.num_layers * c.num_kv_heads, np.vectorize(statistics.NormalDist().cdf)
    shares = np.interp(np.linspace(0, len(_KEPT) - 1, heads), np.arange(len(_KEPT)), _KEPT).clip(1e-4, 1 - 1e-4)
    means = random.permutation(np.vectorize(statistics.NormalDist().inv_cdf)(shares))  # of predictions of deviation 1
    maps = random.standard_normal((c.num_layers, c.num_kv_heads, c.hidden_size + 1)) / math.sqrt(c.hidden_size)
    maps[..., -1] = means.reshape(maps.shape[:2])
    grid = np.linspace(8, -8, 1001)
    thresholds = np.interp(SHARES, normal(means - grid[:, None]).mean(axis=1), grid)
    of_heads = np.ones(maps.shape[:2])
    wide = (x.astype(np.float32) for x in (maps, thresholds, of_heads, of_heads, normal(maps[..., -1])))
    profile = WorthProfile(WorthMaps(*wide), kept, _SELECTED, (), (), None, lm.name)
    found = balanced(lm, tokens, profile.kept_share(tokens)).with_profile(profile)

    def reading(score: float) -> LM:
        read = found.settings.read._replace(score=jnp.full(c.num_layers, score, jnp.float32))
        return dataclasses.replace(found, settings=found.settings._replace(read=read))

    prompt, score = random.integers(0, c.vocab_size, tokens).tolist(), BLOCK / (math.sqrt(_READ - _SELECTED) * tokens)
    # Random weights give all blocks nearly the same score: the first tiles of the prompt read most of theirs.
    for _ in range(2):  # a tile before 1 / score reads its blocks: their pairs fall with its square
        area = tca_jax.prefill(reading(score), [prompt] * axis_size(lm.mesh, DATA)).stats.attended_share
        score *= math.sqrt(max(area - _SELECTED, 0.01) / (_READ - _SELECTED))
    return reading(score)


def describe_shares(config: TCAConfig) -> str:
    """How the notes of tables explain the names of attentions."""
    return (
        "`TCA SHARE`: the cache keeps SHARE of the ranked blocks: as many dense heads as that takes, candidate 0 in "
        f"the others. Window {config.window}, reserve {config.reserve_tokens} tokens per head."
    )


def parse_methods(texts: Sequence[str] | None) -> dict[str, Method]:
    """Registered methods, such as "streaming:window=4096"."""
    parts = {text: joined(parse_parts(text, "--methods"), f"--methods {text}") for text in texts or ()}
    return {text: methods.get(name, **options) for text, (name, options) in parts.items()}


def find_configs(
    names: Sequence[str] | None, *, complete: bool, default: Sequence[str] = ("llama3.1-8b",)
) -> list[str]:
    """Checks names of --models; `complete` models, other than single layers, need a GPU unless they are tiny."""
    for name in names or default:
        require(name in CONFIGS, f"--models {name}: must be one of {list(CONFIGS)}")
        runs, device = not complete or name == "tiny", jax.default_backend()
        require(runs or device == "gpu", f"--models {name}: needs a GPU, this is {device!r}; pass --models tiny")
    return list(names or default)


def open_model(name: str, profile: str | None = None, **options: Any) -> LM:
    """A shape with random weights, whose options are those of `random_model`, or a checkpoint."""
    if name in CONFIGS:
        find_configs([name], complete=True)
        return random_model(name, **options)
    known = "mesh", "dtype", "weights", "kv", "attention"
    return tca_jax.load(name, profile=profile, **{key: options.get(key) for key in known})


def random_model(
    name: str,
    *,
    sizes: Mapping[str, Any] = MappingProxyType({}),  # other fields of its config
    mesh: Mesh | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    kv: str | None = None,
    attention: str | None = None,
) -> LM:
    """A model with normal(0.02) weights, no tokenizer and no stop token."""
    config = dataclasses.replace(CONFIGS[name], **sizes)
    if mesh is not None:
        check_mesh(mesh, config, name)
    wide = jnp.dtype(dtype or config.dtype_name)
    stored = WEIGHTS[weights] if weights else wide
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=wide, param_dtype=stored, rngs=nnx.Rngs(0)))
    found = parameters(abstract)
    code_std = LARGEST_CODE / _DEVIATIONS if weights else 1.0
    drawn = {
        parameter.path: parameter.variable.replace(_weight(parameter, one_key, config.num_layers, mesh, code_std))
        for parameter, one_key in zip(found, jax.random.split(jax.random.key(0), len(found)), strict=True)
    }
    decoder: Decoder = nnx.merge(nnx.graphdef(abstract), nnx.from_flat_state(drawn))
    lm = LM.from_decoder(decoder, mesh=mesh, name=name, kv=kv, attention=attention)
    return dataclasses.replace(lm, checkpoint_fingerprint=_RANDOM)


def weight_bytes(lm: LM) -> int:
    """Bytes of weights that a decoding step reads: all of them, but only a row of an untied embedding."""
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(lm.params))
    return num_bytes if lm.config.tie_embeddings else num_bytes - lm.decoder.embedding.nbytes


def stored_entry(lm: LM) -> dict[str, str]:
    """Entries of a measurement's record for weights and caches in eight bits."""
    weights = {"weights": lm.weights_dtype.name} if is_quantized(lm.weights_dtype) else {}
    attention = {"attention": lm.attention} if lm.attention else {}
    return weights | attention | ({} if lm.kv is None else {"kv": lm.cache_dtype.name})


def mesh_entry(lm: LM) -> dict[str, str]:
    """Entries of a measurement's record for a model's mesh; none without one."""
    return {} if lm.mesh is None else {"mesh": mesh_name(lm.mesh)}


def _weight(parameter: Parameter, key: Array, num_layers: int, mesh: Mesh | None, code_std: float) -> Array:
    """One parameter; `code_std` is the deviation of e4m3 codes."""
    path, shape, dtype = parameter.path, tuple(parameter.variable.shape), parameter.variable.dtype
    module = path[-2] if len(path) > 1 else None
    std = _STD / math.sqrt(2 * num_layers) if module in ("o", "down") else _STD
    if path[-1] == "scale":
        value = std / code_std if module in ("qkv", "o", "gate_up", "down") else 1
        return jnp.full(shape, value, dtype, device=None if mesh is None else NamedSharding(mesh, parameter.spec))
    std = code_std if path[-1] == "codes" else std
    return settled(_drawn(key, std, shape=shape, dtype=dtype, spec=parameter.spec, mesh=mesh), parameter, mesh)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "spec", "mesh"))
def _drawn(
    key: Array, std: float | Array, *, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec, mesh: Mesh | None
) -> Array:
    """Normal numbers; each device draws its part."""
    part = shape if mesh is None else NamedSharding(mesh, spec).shard_shape(shape)

    def on_device(key: Array, std: Any) -> Array:
        if part != shape:
            key = jax.random.fold_in(key, jax.lax.axis_index(MODEL))
        return random_normal(key, part, dtype, std)

    if mesh is None:
        return on_device(key, std)
    return jax.shard_map(on_device, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False)(key, std)
