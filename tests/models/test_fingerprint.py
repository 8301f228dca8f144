"""The fingerprint follows the checkpoint, not the dtype it is loaded in."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from random_decoders import random_decoder
from safetensors.numpy import load_file, save_file

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.loading import checkpoint_folder
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import _checksum, fingerprint
from tca_jax.models.params import load_checkpoint, load_decoder, save_decoder
from tca_jax.models.rope import RopeConfig

# (family, RoPE type, options, fingerprint) of checkpoints that `golden_values` fills
GOLDEN = (
    (
        "llama",
        "llama3",
        {"attention_bias": True, "mlp_bias": True},
        "f77a6e243b3e6d3fa94ad699f496f1786eb7f5193f2416cc8663bc83bfe4fd5f",
    ),
    ("qwen2", "yarn", {}, "d2af1b5fa6dc57cc6d5807a4641c9c5663677fe374c0f46d0184f2a8ddfcc67c"),
    ("qwen3", "dynamic", {}, "9f593293367463dd0fdfeafecc5a780597528b50240ec23dc01da9b690525145"),
)


@pytest.fixture
def decoder(config_entries: Any) -> Decoder:
    config = ModelConfig.from_hf(config_entries("qwen2"))
    return random_decoder(config)


def test_it_is_that_of_the_checkpoints_tensors(decoder: Decoder, tmp_path: Path) -> None:
    save_decoder(tmp_path, decoder, "float32")
    config = dataclasses.asdict(decoder.config)
    del config["dtype_name"]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(load_file(tmp_path / "model.safetensors").items()):
        held = tensor.T if name.endswith("proj.weight") or name == "lm_head.weight" else tensor
        digest.update(f"{name} {held.shape}".encode() + np.asarray(_checksum(jnp.asarray(held)), "<u4").tobytes())
    assert fingerprint(decoder) == digest.hexdigest()


def golden_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The same on every machine: integers over a power of two, some of them below float16's normal range."""
    place = np.arange(math.prod(shape), dtype=np.uint64) + zlib.crc32(name.encode())
    values = (place * 2654435761 % 2**32).astype(np.float64) / 2**32 - 0.5
    values[::7] /= 2**14
    return values.astype(np.float32).reshape(shape)


@pytest.fixture(params=GOLDEN)
def golden(request: pytest.FixtureRequest, config_entries: Any, tmp_path: Path) -> tuple[Path, ModelConfig, str]:
    """A float32 checkpoint, its config, and the fingerprint that it had when fingerprints came up."""
    family, rope_type, options, expected = request.param
    config = ModelConfig.from_hf(config_entries(family, rope_type, **options))
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    values = {name: golden_values(name, tensor.shape) for name, tensor in tensors.items()}
    save_file(values, tmp_path / "model.safetensors")
    return tmp_path, config, expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_fingerprint_is_for_years_and_dtypes(dtype: str, golden: tuple[Path, ModelConfig, str]) -> None:
    """Saved profiles hold these values: should this fail, what has to change is the library."""
    folder, config, expected = golden
    decoder, stored = load_checkpoint(folder, config, dtype)
    assert (stored is None) == (dtype != "float16")  # told while loading, where the weights no longer can
    assert (stored or fingerprint(decoder)) == expected
    assert (fingerprint(decoder) == expected) == (dtype != "float16")


@pytest.mark.parametrize(
    ("stored", "dtype"), [("bfloat16", "float16"), ("float16", "bfloat16"), ("float16", "float32")]
)
def test_weights_give_it_in_half_precision(stored: str, dtype: str, decoder: Decoder, tmp_path: Path) -> None:
    save_decoder(tmp_path, decoder, stored)
    loaded = load_checkpoint(tmp_path, decoder.config, dtype)
    assert loaded.fingerprint is None
    assert fingerprint(loaded.decoder) == fingerprint(load_decoder(tmp_path, decoder.config, jnp.float32))


@dataclasses.dataclass(frozen=True)
class LaterRope(RopeConfig):
    swirl: float = 0.5


@dataclasses.dataclass(frozen=True)
class LaterConfig(ModelConfig):
    softcap: float | None = None


def test_later_options_count_where_used(decoder: Decoder) -> None:
    before = fingerprint(decoder)
    decoder.config = dataclasses.replace(decoder.config, dtype_name="float16")
    assert fingerprint(decoder) == before

    def values(config: Any) -> dict[str, Any]:
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}

    rope = LaterRope(**values(decoder.config.rope))
    later = LaterConfig(**values(decoder.config) | {"rope": rope})
    decoder.config = later
    assert fingerprint(decoder) == before
    decoder.config = dataclasses.replace(later, softcap=30.0)
    capped = fingerprint(decoder)
    decoder.config = dataclasses.replace(later, rope=dataclasses.replace(rope, swirl=0.7))
    assert len({before, capped, fingerprint(decoder)}) == 3


def test_the_shipped_profile_belongs_to_its_model() -> None:
    lm = tca_jax.load("recall-tiny", profile="shipped")
    profile = Profile.load(checkpoint_folder("recall-tiny") / "profile")
    assert profile.fingerprint == fingerprint(lm.decoder)


def test_any_other_weight_has_another_fingerprint(decoder: Decoder) -> None:
    seen = {fingerprint(decoder)}
    kernel = decoder.layers[1].mlp.down.kernel
    kernel[...] = kernel[...].at[17, 5].add(0.01)
    seen.add(fingerprint(decoder))
    kernel[...] = kernel[...].at[jnp.asarray([3, 4])].set(kernel[...][jnp.asarray([4, 3])])
    seen.add(fingerprint(decoder))
    qkv = decoder.layers[0].attention.qkv
    qkv.bias[...] = qkv.bias[...].at[-1, -1, -1].set(1.0)
    seen.add(fingerprint(decoder))
    qkv.kernel[...] = qkv.kernel[...][:, :, jnp.asarray([0, 1, 3, 2])]  # keys and values change places
    seen.add(fingerprint(decoder))
    assert len(seen) == 5
