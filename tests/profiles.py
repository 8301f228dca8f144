"""A profile with awkward numbers, for tests of what is saved."""

from __future__ import annotations

import numpy as np

from tca_jax.calibration.profile import Profile
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, sigma=0.7, tau=0.1 + 0.2, reserve=3, seed=3)


def make_profile(seed: int = 0, **overrides) -> Profile:
    """A profile of 3 layers x 2 KV heads with readings and two rows a head; one row where `candidates` come alone."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.integers(0, 15, (2, 3, 2)), axis=0)
    fields = {
        "candidates": rows[1],
        "prefill_candidates": overrides.get("candidates", rows[0]),
        "scores": rng.random((3, 2, 15)).astype(np.float32),
        "readings": np.array([["sparse", "blocks"], ["sparse", "sparse"], ["dense", "sparse"]]),
        "reading_worth": rng.random((3, 2)).astype(np.float32),
        "keeping_worth": rng.random((3, 2)).astype(np.float32),
        "losses": {
            "inside": {"full": 0.1 + 0.2, "row0": 0.75, "chosen": 0.5},
            "answers": {"full": 0.5, "row0": 7.0, "chosen": 1 / 3},
        },
        "probes": {"counted": {"facts": 120, "copy": 0}, "kept": 0.1 + 0.2, "attended": None},
        "config": CONFIG,
        "fingerprint": "ab" * 32,
        "model_name": "tiny",
        "sources": ({"tokens": 100, "sha256": "cd" * 32}, {"tokens": 7, "sha256": "ef" * 32}),
    }
    return Profile(**{**fields, **overrides})
