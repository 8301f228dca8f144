"""The fingerprint follows the checkpoint, not the dtype it is loaded in."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import _checksum, fingerprint
from tca_jax.models.params import load_decoder, save_decoder


@pytest.fixture
def decoder(config_entries: Any) -> Decoder:
    config = ModelConfig.from_hf(config_entries("qwen2"))
    return Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_one_checkpoint_has_one_fingerprint_in_every_loading_dtype(decoder: Decoder, tmp_path: Path) -> None:
    for stored in ("float32", "bfloat16"):
        save_decoder(tmp_path, decoder, stored)
        for dtype in (jnp.float32, jnp.bfloat16):
            assert fingerprint(load_decoder(tmp_path, decoder.config, dtype)) == fingerprint(decoder)
    assert len(fingerprint(decoder)) == 64


def test_it_is_that_of_the_tensors_of_a_checkpoint_however_the_decoder_joins_them(
    decoder: Decoder, tmp_path: Path
) -> None:
    save_decoder(tmp_path, decoder, "float32")
    config = dataclasses.asdict(decoder.config)
    del config["dtype_name"]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(load_file(tmp_path / "model.safetensors").items()):
        held = tensor.T if name.endswith("proj.weight") or name == "lm_head.weight" else tensor
        digest.update(f"{name} {held.shape}".encode() + np.asarray(_checksum(jnp.asarray(held)), "<u4").tobytes())
    assert fingerprint(decoder) == digest.hexdigest()


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


def test_the_config_counts_but_not_its_dtype(decoder: Decoder) -> None:
    before = fingerprint(decoder)
    decoder.config = dataclasses.replace(decoder.config, dtype_name="float16")
    assert fingerprint(decoder) == before
    decoder.config = dataclasses.replace(decoder.config, rms_norm_eps=1e-3)
    assert fingerprint(decoder) != before
