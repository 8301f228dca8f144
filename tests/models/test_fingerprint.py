"""The fingerprint follows the checkpoint, not the dtype it is loaded in."""

import math
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from random_decoders import random_decoder
from safetensors.numpy import load_file, save_file

from tca_jax.models.config import ModelConfig
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.params import load_checkpoint, save_decoder

# (family, RoPE type, options, fingerprint) of checkpoints that `golden_values` fills
BIASED = {"attention_bias": True, "mlp_bias": True}
GOLDEN = (
    ("llama", "llama3", BIASED, "f77a6e243b3e6d3fa94ad699f496f1786eb7f5193f2416cc8663bc83bfe4fd5f"),
    ("qwen2", "yarn", {}, "d2af1b5fa6dc57cc6d5807a4641c9c5663677fe374c0f46d0184f2a8ddfcc67c"),
    ("qwen3", "dynamic", {}, "9f593293367463dd0fdfeafecc5a780597528b50240ec23dc01da9b690525145"),
)


@pytest.fixture
def decoder(config_entries):
    return random_decoder(ModelConfig.from_hf(config_entries("qwen2")))


def golden_values(name, shape):
    """The same on every machine: integers over a power of two, some of them below float16's normal range."""
    place = np.arange(math.prod(shape), dtype=np.uint64) + zlib.crc32(name.encode())
    values = (place * 2654435761 % 2**32).astype(np.float64) / 2**32 - 0.5
    values[::7] /= 2**14
    return values.astype(np.float32).reshape(shape)


@pytest.fixture(params=GOLDEN)
def golden(request, config_entries, tmp_path):
    """A float32 checkpoint, its config, and the fingerprint that it had when fingerprints came up."""
    family, rope_type, options, expected = request.param
    config = ModelConfig.from_hf(config_entries(family, rope_type, **options))
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    values = {name: golden_values(name, tensor.shape) for name, tensor in tensors.items()}
    save_file(values, tmp_path / "model.safetensors")
    return tmp_path, config, expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_fingerprint_is_for_years_and_dtypes(dtype, golden):
    """Saved profiles hold these values: should this fail, what has to change is the library."""
    folder, config, expected = golden
    decoder, stored = load_checkpoint(folder, config, dtype)
    assert (stored is None) == (dtype != "float16")  # told while loading, where the weights no longer can
    assert (stored or fingerprint(decoder)) == expected
    assert (fingerprint(decoder) == expected) == (dtype != "float16")


@pytest.mark.parametrize(
    ("stored", "dtype"), [("bfloat16", "float16"), ("float16", "bfloat16"), ("float16", "float32")]
)
def test_weights_give_it_in_half_precision(stored, dtype, decoder, tmp_path):
    save_decoder(tmp_path, decoder, stored)
    loaded = load_checkpoint(tmp_path, decoder.config, dtype)
    assert loaded.fingerprint is None
    assert fingerprint(loaded.decoder) == fingerprint(load_checkpoint(tmp_path, decoder.config, jnp.float32).decoder)


def test_any_other_weight_has_another_fingerprint(decoder):
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
