"""Profiles with awkward numbers, for tests of what is saved."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from tca_jax.calibration.predicted_worth import SHARES, WorthMaps
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.worth_profile import WorthProfile
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, sigma=0.7, tau=0.1 + 0.2, reserve=3, seed=3)


def make_profile(seed: int = 0, **overrides) -> Profile:
    """A profile of 3 layers x 2 KV heads."""
    rng = np.random.default_rng(seed)
    fields = {
        "candidates": rng.integers(0, 15, (3, 2)),
        "scores": rng.random((3, 2, 15)).astype(np.float32),
        "config": CONFIG,
        "fingerprint": "ab" * 32,
        "model_name": "tiny",
        "sources": ({"tokens": 100, "sha256": "cd" * 32}, {"tokens": 7, "sha256": "ef" * 32}),
    }
    return Profile(**{**fields, **overrides})


def make_worth_profile(layers: int = 2, kv_heads: int = 2, width: int = 32, **overrides) -> WorthProfile:
    """A profile of random maps."""
    rng = np.random.default_rng(0)
    floats = lambda *shape: rng.random(shape).astype(np.float32)  # noqa: E731
    maps = WorthMaps(
        np.asarray(jnp.asarray(floats(layers, kv_heads, width + 1), jnp.bfloat16), np.float32),
        np.sort(floats(len(SHARES)))[::-1].copy(),
        floats(layers, kv_heads),
        floats(layers, kv_heads),
        floats(layers, kv_heads),
    )
    fields = {
        "maps": maps,
        "kept": 0.25,
        "selected": 0.1,
        "kept_table": tuple(
            {"kept": kept, "facts": facts, "copies": math.nan, "following": 0.004}
            for kept, facts in ((0.1, 0.5), (0.25, 0.98), (0.5, 1.0))
        ),
        "reading_table": ({"selected": 0.1, "attended": 0.3, "plain": 0.01, "copy": 0.02, "fact": math.nan},),
        "fingerprint": None,
        "model_name": "tiny",
        "sources": ({"tokens": 512, "sha256": "cd" * 32},) * 2,
    }
    return WorthProfile(**{**fields, **overrides})
