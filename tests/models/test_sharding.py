"""Models on meshes: what a device reads, heads in other places, and meshes that do not fit."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from random_decoders import assert_equal_weights, causal, random_decoder, with_heads, without_zeros

from tca_jax.models import decoder
from tca_jax.models.config import ModelConfig
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.names import parameters
from tca_jax.models.params import load_checkpoint, read_tensor, save_decoder
from tca_jax.models.sharding import check_mesh, mesh_of, shard_decoder, whole_mesh

HEADS = {1: (4, 4), 4: (16, 4), 7: (28, 4)}  # group -> query heads, KV heads
ORDERS = ((2, 0, 3, 1), (1, 3, 0, 2))


def config_of(config_entries, family="llama", group=4, **changes):
    heads, kv_heads = HEADS[group]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    return ModelConfig.from_hf(config_entries(family, **sizes, **changes))


def logits(decoder):
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, decoder.config.vocab_size)
    hidden, _ = decoder(tokens, jnp.broadcast_to(jnp.arange(9), tokens.shape), causal, (None, None))
    return np.asarray(decoder.logits(hidden))


@pytest.mark.parametrize(("family", "group"), [("llama", 1), ("qwen2", 4), ("qwen3", 7)])
def test_results_do_not_depend_on_the_heads_order(family, group, config_entries):
    biased = {"attention_bias": True} if family != "qwen2" else {}
    decoder = random_decoder(config_of(config_entries, family, group, **biased), without_zeros)
    moved = with_heads(decoder, ORDERS)
    np.testing.assert_allclose(logits(moved), logits(decoder), atol=2e-5, rtol=1e-5)
    kernel, old = moved.layers[1].attention.qkv.kernel[...], decoder.layers[1].attention.qkv.kernel[...]
    np.testing.assert_array_equal(kernel[:, 3], old[:, ORDERS[1][3]])
    assert_equal_weights(with_heads(moved, np.argsort(ORDERS, axis=1).tolist()), decoder)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("tokens", "operation"), [(1, "all-reduce"), (16, "all-reduce"), (17, "all-gather")])
def test_the_width_is_gathered_exactly(tokens, operation, dtype, monkeypatch):
    whole = jax.random.normal(jax.random.key(tokens), (1, tokens, 24), dtype)
    whole = whole.at[:, 0, :2].set(jnp.array([jnp.inf, -jnp.inf], dtype))  # zeros of others do not touch them
    monkeypatch.setattr(decoder, "_SMALL_SUM", 16 * 24 * whole.dtype.itemsize)
    split = PartitionSpec(None, None, "model")
    # Each device returns the whole: side by side, as many copies as devices.
    specs = {"mesh": meshes.mesh_of((4,), ("model",)), "in_specs": split, "out_specs": split}
    run = jax.jit(jax.shard_map(lambda part: decoder.gather_width(part), **specs))
    np.testing.assert_array_equal(run(whole), jnp.tile(whole, 4))
    assert operation in run.lower(whole).compile().as_text()


@pytest.mark.parametrize(
    ("shape", "axes", "kind"),
    [
        ((1, 4), ("data", "model"), AxisType.Auto),
        ((2, 2), ("model", "data"), AxisType.Explicit),
        ((2,), ("data",), AxisType.Explicit),
    ],
)
def test_heads_are_exchanged_on_every_mesh(shape, axes, kind, config_entries):
    decoder = random_decoder(config_of(config_entries, "qwen2"), without_zeros)
    mesh = meshes.mesh_of(shape, axes, kind)
    sharded = shard_decoder(decoder, mesh)
    assert {mesh_of(weight) for weight in jax.tree.leaves(nnx.state(sharded))} == {whole_mesh(mesh)}
    assert_equal_weights(sharded, decoder)
    with jax.set_mesh(mesh):
        moved = with_heads(sharded, ORDERS)
    assert_equal_weights(moved, with_heads(decoder, ORDERS))
    for parameter in parameters(moved):
        assert parameter.variable[...].sharding == NamedSharding(whole_mesh(mesh), parameter.spec)  # nothing recompiles


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ({"data": 1, "model": 8}, {}, r"mesh = \(data=1, model=8\): .* tiny has 4 KV heads, .*one of \[1, 2, 4\]"),
        ({"data": 1, "tensor": 2}, {}, r"mesh = \(data=1, tensor=2\): its axes must be 'data' and"),
        ({"model": 4}, {"intermediate_size": 50}, r"model=4 devices, but tiny has .* an inner width of 50 .*\[1, 2\]"),
        ({"model": 4}, {"hidden_size": 33}, r"model=4 devices, but tiny has .* a width of 33: .*\[1\]"),
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
    "auto": ((1, 4),),
    "model first": ((2, 2), ("model", "data"), AxisType.Explicit),
    "data alone": ((4,), ("data",), AxisType.Explicit),
}


@pytest.mark.integration
@pytest.mark.parametrize(("name", "family"), [("auto", "qwen2"), ("model first", "llama"), ("data alone", "qwen3")])
def test_weights_and_fingerprint_are_those_of_one_device(name, family, config, config_entries, tmp_path):
    if family != "llama":
        config = ModelConfig.from_hf(config_entries(family, num_key_value_heads=4))
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    mesh, alone = meshes.mesh_of(*MESHES[name]), load_checkpoint(tmp_path, config, jnp.float32).decoder
    loaded = load_checkpoint(tmp_path, config, jnp.float32, mesh=mesh).decoder
    assert_equal_weights(loaded, alone)
    assert nnx.graphdef(loaded) == nnx.graphdef(alone)
    for parameter in parameters(loaded):
        assert parameter.variable[...].sharding == NamedSharding(whole_mesh(mesh), parameter.spec)
    with jax.set_mesh(mesh):
        assert fingerprint(loaded) == fingerprint(alone)


class Counted:
    """A tensor of an open file, which counts the numbers that are read of it."""

    def __init__(self, shape):
        self.array, self.sizes = np.zeros(shape, np.float32), []

    def __getitem__(self, index):
        self.sizes.append(self.array[index].size)
        return self.array[index]


@pytest.mark.parametrize(("name", "parts"), [("auto", 4), ("model first", 2), ("data alone", 1)])
def test_each_part_of_a_tensor_is_read_once(name, parts, config):
    mesh = whole_mesh(meshes.mesh_of(*MESHES[name]))
    for parameter in parameters(random_decoder(config)):
        split = 1 if parameter.split_axis is None else parts
        for tensor, shape in parameter.shapes.items():
            view = Counted(shape)
            read_tensor(view, shape, parameter.stored_spec, mesh)
            assert view.sizes == [view.array.size // split] * split, tensor
