"""Models on meshes: what a device holds and reads, heads in other places, and meshes that do not fit."""

import collections
import contextlib
import dataclasses
import gc
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from random_decoders import assert_equal_weights, random_decoder
from reads import Reads
from safetensors.numpy import load_file

from tca_jax.models import sharding
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.names import parameters
from tca_jax.models.params import load_decoder, save_decoder
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


def loads_on_4_devices(test):
    return needs_4_devices(pytest.mark.integration(test))


def config_of(config_entries, family="llama", group=4, **changes):
    heads, kv_heads = HEADS[group]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    return ModelConfig.from_hf(config_entries(family, **sizes, **changes))


def make(config):
    """A model without zeros: biases and norms are drawn too."""
    return random_decoder(config, lambda rng, shape: rng.standard_normal(shape) / math.sqrt(shape[0]))


def mesh_4(kind="auto", axes=("data", "model"), shape=(1, 4)):
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, axes, (KINDS[kind],) * len(axes), devices=devices)


def logits(decoder):
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, decoder.config.vocab_size)

    def attention(layer, q, k, v, state):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), state

    hidden, _ = decoder(tokens, jnp.broadcast_to(jnp.arange(9), tokens.shape), attention, (None, None))
    return np.asarray(decoder.logits(hidden))


@pytest.mark.parametrize(("family", "group"), [("llama", 1), ("qwen2", 4), ("qwen3", 7)])
def test_results_do_not_depend_on_the_heads_order(family, group, config_entries):
    biased = {"attention_bias": True} if family != "qwen2" else {}
    decoder = make(config_of(config_entries, family, group, **biased))
    moved = permute_heads(decoder, ORDERS)
    np.testing.assert_allclose(logits(moved), logits(decoder), atol=2e-5, rtol=1e-5)
    kernel, old = moved.layers[1].attention.qkv.kernel[...], decoder.layers[1].attention.qkv.kernel[...]
    np.testing.assert_array_equal(kernel[:, 3], old[:, ORDERS[1][3]])
    assert_equal_weights(permute_heads(moved, inverse_orders(ORDERS)), decoder)


def test_orders_must_be_permutations(config_entries):
    with pytest.raises(ValueError, match=r"orders = .*: must be 2 permutations of 4 KV heads"):
        permute_heads(make(config_of(config_entries)), (ORDERS[0], (0, 1, 2, 2)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_device_holds_its_even_part(family, config_entries):
    biased = {"attention_bias": True} if family != "qwen2" else {}
    config, mesh = config_of(config_entries, family, **biased), AbstractMesh((2, 4), ("data", "model"))
    decoder, specs = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), parameter_specs(config)
    state = nnx.state(decoder)

    def local_shape(spec, shape):
        return NamedSharding(mesh, spec).shard_shape(shape)

    for parameter in parameters(decoder):
        shape = parameter.variable.shape
        split = 4 if len(shape) > 1 else 1  # norms, but not the biases of queries, keys and values, are everywhere
        assert math.prod(shape) == math.prod(local_shape(parameter.spec, shape)) * split, parameter.path
        # The tensors of a parameter lie side by side on an axis of their own.
        assert not parameter.layout.widths or parameter.split_axis != len(shape) - 2
    local = jax.tree.map(lambda spec, x: jax.ShapeDtypeStruct(local_shape(spec, x.shape), x.dtype), specs, state)
    part = nnx.merge(device_graphdef(config, jnp.bfloat16, jnp.bfloat16, 4), local)
    for layer in part.layers:
        assert layer.attention.qkv.out_features == (1, 4 + 2, 8) == layer.attention.qkv.kernel.shape[1:]
        assert layer.attention.o.kernel.shape == (4 * 8, 32)
        assert layer.mlp.gate_up.out_features == (2, 12) == layer.mlp.gate_up.kernel.shape[1:]
        assert layer.mlp.down.kernel.shape == (12, 32)
    assert device_graphdef(config, jnp.bfloat16, jnp.bfloat16, 4) is device_graphdef(config, "bfloat16", "bfloat16", 4)


@needs_4_devices
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("tokens", "operation"), [(1, "all-reduce"), (16, "all-reduce"), (17, "all-gather")])
def test_the_width_is_gathered_exactly(tokens, operation, dtype, monkeypatch):
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
def test_heads_are_exchanged_on_every_mesh(axes, shape, kind, config_entries):
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
    ("shape", "changes", "message"),
    [
        ({"data": 1, "model": 8}, {}, r"mesh = \(data=1, model=8\): .* tiny has 4 KV heads: 1, 2 or 4"),
        ({"data": 1, "tensor": 2}, {}, r"mesh = \(data=1, tensor=2\): its axes must be 'data' and"),
        ({"model": 4}, {"intermediate_size": 50}, "model=4 devices, but tiny has an inner width of 50: 1 or 2 fit"),
        ({"model": 4}, {"hidden_size": 33}, "model=4 devices, but tiny has a width of 33: only 1 fits"),
        ({"data": 2, "model": 4}, {}, None),
        ({"data": 5}, {}, None),
    ],
)
def test_meshes_must_divide_the_model(shape, changes, message, config_entries):
    config = dataclasses.replace(config_of(config_entries), **changes)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_mesh(AbstractMesh(tuple(shape.values()), tuple(shape)), config, "tiny")


# --- checkpoints read straight into shards ----------------------------------------------------------

MESHES = {
    "auto": {},
    "model first": {"kind": "explicit", "axes": ("model", "data"), "shape": (2, 2)},
    "data alone": {"kind": "explicit", "axes": ("data",), "shape": (4,)},
}


@loads_on_4_devices
@pytest.mark.parametrize(("name", "family"), [("auto", "qwen2"), ("model first", "llama"), ("data alone", "qwen3")])
def test_weights_and_fingerprint_are_those_of_one_device(name, family, config, config_entries, tmp_path):
    if family != "llama":
        config = ModelConfig.from_hf(config_entries(family, num_key_value_heads=4))
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    mesh, alone = mesh_4(**MESHES[name]), load_decoder(tmp_path, config, jnp.float32)
    loaded = load_decoder(tmp_path, config, jnp.float32, mesh=mesh)
    assert_equal_weights(loaded, alone)
    assert nnx.graphdef(loaded) == nnx.graphdef(alone)
    for parameter in parameters(loaded):
        assert parameter.variable[...].sharding == parameter_sharding(parameter, mesh)
    with jax.set_mesh(mesh):
        assert fingerprint(loaded) == fingerprint(alone)


@loads_on_4_devices
@pytest.mark.parametrize(("name", "parts"), [("auto", 4), ("model first", 2), ("data alone", 1)])
def test_each_part_of_a_tensor_is_read_once(name, parts, config, tmp_path, monkeypatch):
    decoder, reads = random_decoder(config), Reads()
    save_decoder(tmp_path, decoder, jnp.float32)
    monkeypatch.setattr("tca_jax.models.params.safe_open", reads)
    load_decoder(tmp_path, config, jnp.float32, mesh=mesh_4(**MESHES[name]))
    for parameter in parameters(decoder):
        for tensor, shape in parameter.shapes.items():
            split = 1 if parameter.split_axis is None else parts
            assert reads.elements[tensor] == [math.prod(shape) // split] * split, tensor


def bytes_by_device():
    """Bytes of the buffers of all live arrays, by device."""
    buffers = {}
    for array in jax.live_arrays():
        for part in array.addressable_shards:  # each is an array too, over the same buffer
            buffers[part.device, part.data.unsafe_buffer_pointer()] = part.data.nbytes
    held = collections.Counter()
    for (device, _), size in buffers.items():
        held[device] += size
    return held


@loads_on_4_devices
def test_a_device_holds_its_part_and_a_tensor(config_entries, tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_key_value_heads": 4}
    config = ModelConfig.from_hf(config_entries("llama", **shape))
    save_decoder(tmp_path, Decoder(config, rngs=nnx.Rngs(0)), jnp.bfloat16)
    sizes = [tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values()]
    gc.collect()
    mesh, before = mesh_4(), bytes_by_device()
    most = []

    def watch(done, total):
        held = bytes_by_device()
        most.append(max(held[device] - before[device] for device in mesh.devices.flat) - done / 4)

    loaded = load_decoder(tmp_path, config, jnp.bfloat16, watch, mesh)
    assert len(most) == len(sizes)
    assert max(most) <= max(sizes)
    gc.collect()
    after = bytes_by_device()
    held = [after[device] - before[device] for device in mesh.devices.flat]
    assert max(held) <= 1.02 * sum(sizes) / 4  # norms are everywhere
    assert sum(x.nbytes for x in jax.tree.leaves(nnx.state(loaded))) == sum(sizes)
