"""Checkpoints read straight into shards: every device gets its part, and nothing else is ever read or held."""

from __future__ import annotations

import collections
import gc
import math
import tracemalloc
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
from safetensors.numpy import load_file, save_file

from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.names import EMBEDDING, HEAD, parameters
from tca_jax.models.params import load_checkpoint, load_decoder, save_decoder
from tca_jax.models.sharding import parameter_sharding, permute_heads, shard_decoder

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")

MESHES = {
    "auto": (("data", "model"), (1, 4), AxisType.Auto),
    "explicit": (("data", "model"), (1, 4), AxisType.Explicit),
    "model first": (("model", "data"), (2, 2), AxisType.Explicit),
    "model alone": (("model",), (4,), AxisType.Auto),
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


@pytest.mark.parametrize("name", MESHES)
def test_weights_and_fingerprint_are_those_of_one_device(name: str, config: ModelConfig, tmp_path: Path) -> None:
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    mesh, alone = mesh_of(name), load_decoder(tmp_path, config, jnp.float32)
    loaded = load_decoder(tmp_path, config, jnp.float32, mesh=mesh)
    assert_equal_weights(loaded, alone)
    assert nnx.graphdef(loaded) == nnx.graphdef(alone)
    for parameter in parameters(loaded):
        assert parameter.variable[...].sharding == parameter_sharding(parameter, mesh)
    with jax.set_mesh(mesh):
        assert fingerprint(loaded) == fingerprint(alone)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_family_loads_onto_a_mesh(family: str, config_entries: Any, tmp_path: Path) -> None:
    config = ModelConfig.from_hf(config_entries(family, num_key_value_heads=4))
    save_decoder(tmp_path, random_decoder(config), jnp.bfloat16)
    alone = load_decoder(tmp_path, config, jnp.bfloat16)
    loaded = load_decoder(tmp_path, config, jnp.bfloat16, mesh=mesh_of("explicit"))
    assert_equal_weights(loaded, alone)
    assert fingerprint(loaded) == fingerprint(alone)


@pytest.mark.parametrize("name", ["explicit", "model first"])
def test_a_fingerprint_is_told_while_loading_where_the_weights_no_longer_can(
    name: str, config: ModelConfig, tmp_path: Path
) -> None:
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    expected = fingerprint(load_decoder(tmp_path, config, jnp.float32))
    decoder, stored = load_checkpoint(tmp_path, config, jnp.float16, mesh=mesh_of(name))
    assert stored == expected != fingerprint(decoder)


def test_another_weight_in_any_devices_part_is_another_fingerprint(config: ModelConfig) -> None:
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
def test_each_part_of_a_tensor_is_read_once_and_alone(
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


def test_a_device_holds_its_own_part_and_never_more_than_a_tensor_beside_it(
    config_entries: Any, tmp_path: Path
) -> None:
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


def test_host_memory_stays_near_one_tensor(config_entries: Any, tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 6, "num_key_value_heads": 4}
    config = ModelConfig.from_hf(config_entries("llama", **shape))
    save_decoder(tmp_path, Decoder(config, rngs=nnx.Rngs(0)), jnp.bfloat16)
    load_decoder(tmp_path, config, jnp.bfloat16, mesh=mesh_of("auto"))  # what is compiled once is not counted
    sizes = [tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values()]
    tracemalloc.start()
    try:
        load_decoder(tmp_path, config, jnp.bfloat16, mesh=mesh_of("auto"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(sizes) > 15 * max(sizes)
    assert max(sizes) <= peak < 2.5 * max(sizes)  # a second one may still be on its way to the devices


def test_a_tied_checkpoint_may_repeat_its_embedding_as_head_but_hold_no_other(
    config_entries: Any, tmp_path: Path
) -> None:
    config = ModelConfig.from_hf(config_entries("qwen2", num_key_value_heads=4))
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {HEAD: tensors[EMBEDDING].copy()}, tmp_path / "model.safetensors")
    load_decoder(tmp_path, config, jnp.float32, mesh=mesh_of("explicit"))
    other = tensors[EMBEDDING].copy()
    other[5, -1] += 1  # in the part of the last device
    save_file(tensors | {HEAD: other}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight' differs from the embedding"):
        load_decoder(tmp_path, config, jnp.float32, mesh=mesh_of("explicit"))


def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_read(config: ModelConfig, tmp_path: Path) -> None:
    mesh = jax.make_mesh((3,), ("model",), (AxisType.Auto,), devices=jax.devices()[:3])
    with pytest.raises(ValueError, match=r"model=3 devices, but the model has 4 KV heads: 1, 2 or 4 fit"):
        load_decoder(tmp_path / "nowhere", config, mesh=mesh)
