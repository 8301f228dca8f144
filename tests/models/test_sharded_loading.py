"""Checkpoints read straight into shards: every device gets its part, and nothing else is ever read or held."""

from __future__ import annotations

import collections
import gc
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from random_decoders import random_decoder
from reads import Reads
from safetensors.numpy import load_file

from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.names import parameters
from tca_jax.models.params import load_checkpoint, load_decoder, save_decoder
from tca_jax.models.sharding import parameter_sharding, permute_heads, shard_decoder

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")

MESHES = {
    "auto": (("data", "model"), (1, 4), AxisType.Auto),
    "model first": (("model", "data"), (2, 2), AxisType.Explicit),
    "data alone": (("data",), (4,), AxisType.Explicit),
}


def mesh_of(name: str) -> Mesh:
    axes, shape, kind = MESHES[name]
    return jax.make_mesh(shape, axes, (kind,) * len(axes), devices=jax.devices()[:4])


@pytest.fixture
def config(four_kv_heads: ModelConfig) -> ModelConfig:
    return four_kv_heads


def assert_equal_weights(a: Decoder, b: Decoder) -> None:
    jax.tree.map(np.testing.assert_array_equal, nnx.state(a), nnx.state(b))


@pytest.mark.parametrize(
    ("name", "family"), [*((name, "llama") for name in MESHES), ("auto", "qwen2"), ("auto", "qwen3")]
)
def test_weights_and_fingerprint_are_those_of_one_device(
    name: str, family: str, config: ModelConfig, config_entries: Any, tmp_path: Path
) -> None:
    if family != "llama":
        config = ModelConfig.from_hf(config_entries(family, num_key_value_heads=4))
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    mesh, alone = mesh_of(name), load_decoder(tmp_path, config, jnp.float32)
    loaded = load_decoder(tmp_path, config, jnp.float32, mesh=mesh)
    assert_equal_weights(loaded, alone)
    assert nnx.graphdef(loaded) == nnx.graphdef(alone)
    for parameter in parameters(loaded):
        assert parameter.variable[...].sharding == parameter_sharding(parameter, mesh)
    with jax.set_mesh(mesh):
        assert fingerprint(loaded) == fingerprint(alone)


@pytest.mark.parametrize("name", ["auto", "model first"])
def test_rounded_weights_keep_the_stored_fingerprint(name: str, config: ModelConfig, tmp_path: Path) -> None:
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    expected = fingerprint(load_decoder(tmp_path, config, jnp.float32))
    decoder, stored = load_checkpoint(tmp_path, config, jnp.float16, mesh=mesh_of(name))
    assert stored == expected != fingerprint(decoder)


def test_every_shard_counts_in_the_fingerprint(config: ModelConfig) -> None:
    decoder, mesh, seen = random_decoder(config), mesh_of("auto"), set()
    for device in range(4):
        part = nnx.clone(decoder)
        kernel = part.layers[1].attention.qkv.kernel
        kernel[...] = kernel[...].at[3, device, 1, 2].add(1.0)
        assert fingerprint(shard_decoder(part, mesh)) == fingerprint(part)
        seen.add(fingerprint(part))
    orders = ((1, 2, 0, 3), (0, 1, 2, 3))
    moved = permute_heads(shard_decoder(decoder, mesh), orders)
    seen |= {fingerprint(decoder), fingerprint(moved)}  # places count, on whichever device
    assert len(seen) == 6
    assert fingerprint(moved, orders) == fingerprint(decoder)


@pytest.mark.parametrize(("name", "parts"), [("auto", 4), ("model first", 2), ("data alone", 1)])
def test_each_part_of_a_tensor_is_read_once(
    name: str, parts: int, config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, reads = random_decoder(config), Reads()
    save_decoder(tmp_path, decoder, jnp.float32)
    monkeypatch.setattr("tca_jax.models.params.safe_open", reads)
    load_decoder(tmp_path, config, jnp.float32, mesh=mesh_of(name))
    for parameter in parameters(decoder):
        for tensor, shape in parameter.shapes.items():
            split = 1 if parameter.split_axis is None else parts
            assert reads.elements[tensor] == [math.prod(shape) // split] * split, tensor


def bytes_by_device() -> collections.Counter[Any]:
    """Bytes of the buffers of all live arrays, by device."""
    buffers = {}
    for array in jax.live_arrays():
        for part in array.addressable_shards:  # each is an array too, over the same buffer
            buffers[part.device, part.data.unsafe_buffer_pointer()] = part.data.nbytes
    held: collections.Counter[Any] = collections.Counter()
    for (device, _), size in buffers.items():
        held[device] += size
    return held


def test_a_device_holds_its_part_and_a_tensor(config_entries: Any, tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_key_value_heads": 4}
    config = ModelConfig.from_hf(config_entries("llama", **shape))
    save_decoder(tmp_path, Decoder(config, rngs=nnx.Rngs(0)), jnp.bfloat16)
    sizes = [tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values()]
    gc.collect()
    mesh, before = mesh_of("auto"), bytes_by_device()
    most: list[float] = []

    def watch(done: int, total: int) -> None:
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
