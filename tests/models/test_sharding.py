"""Models on meshes: who holds what, a device's decoder, heads in other places, and meshes that do not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from random_decoders import random_decoder

from tca_jax.models import sharding
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.names import parameters
from tca_jax.models.sharding import (
    check_mesh,
    device_graphdef,
    inverse_orders,
    mesh_of,
    parameter_sharding,
    parameter_specs,
    permute_heads,
    shard_decoder,
)

HEADS = {1: (4, 4), 4: (16, 4), 7: (28, 4)}  # group -> query heads, KV heads
ORDERS = ((2, 0, 3, 1), (1, 3, 0, 2))
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}

needs_4_devices = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")


def config_of(config_entries: Any, family: str = "llama", group: int = 4, **changes: Any) -> ModelConfig:
    heads, kv_heads = HEADS[group]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    return ModelConfig.from_hf(config_entries(family, **sizes, **changes))


def make(config: ModelConfig) -> Decoder:
    """A model without zeros: biases and norms are drawn too."""
    return random_decoder(config, lambda rng, shape: rng.standard_normal(shape) / math.sqrt(shape[0]))


def mesh_4(kind: str = "auto", axes: tuple[str, ...] = ("data", "model"), shape: tuple[int, ...] = (1, 4)) -> Mesh:
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, axes, (KINDS[kind],) * len(axes), devices=devices)


def logits(decoder: Decoder, cached_attention: Any) -> np.ndarray:
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, decoder.config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(9), tokens.shape)
    sizes = (2, 9, decoder.config.num_kv_heads, decoder.config.head_dim)
    caches = ((jnp.zeros(sizes), jnp.zeros(sizes)),) * decoder.config.num_layers
    attention = cached_attention(positions, jnp.ones_like(positions, bool))
    hidden, _ = decoder(tokens, positions, attention, caches)
    return np.asarray(decoder.logits(hidden))


def assert_equal_weights(a: Decoder, b: Decoder) -> None:
    jax.tree.map(np.testing.assert_array_equal, nnx.state(a), nnx.state(b))


@pytest.mark.parametrize(("family", "group"), [("llama", 1), ("qwen2", 4), ("qwen3", 7)])
def test_results_do_not_depend_on_the_heads_order(
    family: str, group: int, config_entries: Any, cached_attention: Any
) -> None:
    biased = {"attention_bias": True} if family != "qwen2" else {}
    decoder = make(config_of(config_entries, family, group, **biased))
    moved = permute_heads(decoder, ORDERS)
    np.testing.assert_allclose(logits(moved, cached_attention), logits(decoder, cached_attention), atol=2e-5, rtol=1e-5)
    head, place = ORDERS[1][3], 3
    kernel, old = moved.layers[1].attention.qkv.kernel[...], decoder.layers[1].attention.qkv.kernel[...]
    np.testing.assert_array_equal(kernel[:, place], old[:, head])
    assert_equal_weights(permute_heads(moved, inverse_orders(ORDERS)), decoder)


def test_heads_move_in_attention_projections_alone(config_entries: Any) -> None:
    decoder = make(config_of(config_entries, "qwen3", attention_bias=True, mlp_bias=True))
    moved = permute_heads(decoder, ORDERS)
    pairs = zip(parameters(decoder), parameters(moved), strict=True)
    changed = {name for a, b in pairs if not np.array_equal(a.variable[...], b.variable[...]) for name in a.names}
    projections = {f"{part}_proj.weight" for part in "qkvo"} | {f"{part}_proj.bias" for part in "qkv"}
    assert changed == {f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in projections}


def test_orders_must_be_permutations(config_entries: Any) -> None:
    with pytest.raises(ValueError, match=r"orders = .*: must be 2 permutations of 4 KV heads"):
        permute_heads(make(config_of(config_entries)), (ORDERS[0], (0, 1, 2, 2)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_large_parameters_are_split_evenly(family: str, config_entries: Any) -> None:
    config = config_of(config_entries, family)
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    specs = parameter_specs(config)
    state = nnx.state(decoder)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    assert {spec for _, spec in jax.tree.leaves_with_path(specs)} >= {PartitionSpec(), PartitionSpec(None, "model")}
    mesh = AbstractMesh((2, 4), ("data", "model"))
    for parameter in parameters(decoder):
        shape = parameter.variable.shape
        local = NamedSharding(mesh, parameter.spec).shard_shape(shape)
        assert math.prod(shape) == math.prod(local) * (4 if len(shape) > 1 else 1), parameter.path
        # The tensors of a parameter lie side by side on an axis of their own.
        assert not parameter.layout.widths or parameter.split_axis != len(shape) - 2


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_devices_decoder_fits_its_shard(family: str, config_entries: Any) -> None:
    biased = {"attention_bias": True} if family != "qwen2" else {}
    config, mesh = config_of(config_entries, family, **biased), AbstractMesh((2, 4), ("data", "model"))
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    local = jax.tree.map(
        lambda spec, x: jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype),
        parameter_specs(config),
        state,
    )
    part = nnx.merge(device_graphdef(config, jnp.bfloat16, jnp.bfloat16, 4), local)
    for module in (layer.attention for layer in part.layers):
        assert module.qkv.out_features == (1, 4 + 2, 8) == module.qkv.kernel.shape[1:]
        assert module.o.kernel.shape == (4 * 8, 32)
    for module in (layer.mlp for layer in part.layers):
        assert module.gate_up.out_features == (2, 12) == module.gate_up.kernel.shape[1:]
        assert module.down.kernel.shape == (12, 32)
    assert graphdef == nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))  # which knows no mesh
    assert device_graphdef(config, jnp.bfloat16, jnp.bfloat16, 4) is device_graphdef(config, "bfloat16", "bfloat16", 4)


def test_chunks_on_a_mesh_differ(config_entries: Any) -> None:
    def chunks(hidden: int, inner: int, devices: int) -> tuple[int, ...]:
        sizes = {"hidden_size": hidden, "intermediate_size": inner}
        config = dataclasses.replace(config_of(config_entries), num_layers=1, **sizes)
        return sharding._overlapping_chunks(config, devices)

    llama_8b = 7168, 9216, 7680, 8704
    assert chunks(4096, 14336, 2) == chunks(4096, 14336, 4) == llama_8b
    assert chunks(4096, 14336, 1) == (8192,)
    assert chunks(3584, 18944, 4) == tuple(2 * size for size in llama_8b)  # Qwen2.5-7B


@needs_4_devices
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("tokens", "operation"), [(1, "all-reduce"), (16, "all-reduce"), (17, "all-gather")])
def test_the_width_is_gathered_exactly(
    tokens: int, operation: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = jax.random.normal(jax.random.key(tokens), (1, tokens, 24), dtype)
    whole = whole.at[:, 0, :2].set(jnp.array([jnp.inf, -jnp.inf], dtype))  # zeros of others do not touch them
    monkeypatch.setattr(sharding, "_SMALL_SUM", 16 * 24 * whole.dtype.itemsize)
    split = PartitionSpec(None, None, "model")
    # Each device returns the whole: side by side, as many copies as devices.
    gather = jax.shard_map(
        lambda part: sharding.gather_width(part),
        mesh=mesh_4(axes=("model",), shape=(4,)),
        in_specs=split,
        out_specs=split,
    )
    run = jax.jit(gather)
    np.testing.assert_array_equal(run(whole), jnp.tile(whole, 4))
    assert operation in run.lower(whole).compile().as_text()


@needs_4_devices
@pytest.mark.parametrize(
    ("axes", "shape", "kind"),
    [(("data", "model"), (1, 4), "auto"), (("model", "data"), (2, 2), "explicit"), (("data",), (2,), "explicit")],
)
def test_heads_are_exchanged_on_every_mesh(
    axes: tuple[str, ...], shape: tuple[int, ...], kind: str, config_entries: Any
) -> None:
    decoder, mesh = make(config_of(config_entries, "qwen2")), mesh_4(kind, axes, shape)
    sharded = shard_decoder(decoder, mesh)
    assert {mesh_of(weight) for weight in jax.tree.leaves(nnx.state(sharded))} == {mesh}
    assert_equal_weights(sharded, decoder)
    with jax.set_mesh(mesh):
        moved = permute_heads(sharded, ORDERS)
    assert_equal_weights(moved, permute_heads(decoder, ORDERS))
    assert_equal_weights(shard_decoder(decoder, mesh, ORDERS), moved)
    for parameter in parameters(moved):
        assert parameter.variable[...].sharding == parameter_sharding(parameter, mesh)  # nothing recompiles


@pytest.mark.parametrize(
    ("shape", "axes", "changes", "message"),
    [
        (
            (1, 8),
            ("data", "model"),
            {},
            r"mesh = \(data=1, model=8\): .* tiny has 4 KV heads: 1, 2 or 4",
        ),
        (
            (1, 2),
            ("data", "tensor"),
            {},
            r"mesh = \(data=1, tensor=2\): its axes must be 'data' and",
        ),
        ((4,), ("model",), {"intermediate_size": 50}, "model=4 devices, but tiny has an inner width of 50: 1 or 2 fit"),
        ((4,), ("model",), {"hidden_size": 33}, "model=4 devices, but tiny has a width of 33: only 1 fits"),
        ((2, 4), ("data", "model"), {}, None),
        ((5,), ("data",), {}, None),
    ],
)
def test_meshes_must_divide_the_model(
    shape: tuple[int, ...], axes: tuple[str, ...], changes: Any, message: str | None, config_entries: Any
) -> None:
    config = dataclasses.replace(config_of(config_entries), **changes)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_mesh(AbstractMesh(shape, axes), config, "tiny")
