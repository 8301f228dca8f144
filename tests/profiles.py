"""A profile with awkward numbers, for tests of what is saved."""

from __future__ import annotations

import numpy as np

from tca_jax.calibration.profile import Profile
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, sigma=0.7, tau=0.1 + 0.2, seed=3)


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
