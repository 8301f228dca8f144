"""A profile with awkward numbers, for tests of what is saved."""

from __future__ import annotations

import numpy as np

from tca_jax.calibration.profile import Profile
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, sigma=0.7, tau=0.1 + 0.2, reserve=3, seed=3)


def make_profile(seed: int = 0, **overrides) -> Profile:
    """A profile of 3 layers x 2 KV heads with two rows a head; one row where `candidates` are given alone."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.integers(0, 15, (2, 3, 2)), axis=0)
    fields = {
        "candidates": rows[1],
        "prefill_candidates": overrides.get("candidates", rows[0]),
        "scores": rng.random((3, 2, 15)).astype(np.float32),
        "probe_scores": rng.random((3, 2, 15)).astype(np.float32),
        "probes": {"kind": "pairs", "tokens": 120, "need": 0.1 + 0.2, "rounds": 2, "fallback": False, "kept": None},
        "config": CONFIG,
        "fingerprint": "ab" * 32,
        "model_name": "tiny",
        "sources": ({"tokens": 100, "sha256": "cd" * 32}, {"tokens": 7, "sha256": "ef" * 32}),
    }
    return Profile(**{**fields, **overrides})
