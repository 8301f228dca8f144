"""Dropped mass and Theorem 1: the bounds hold on random and on extreme inputs."""

import numpy as np
from cases import qkv
from hypothesis import given, settings
from hypothesis import strategies as st

from tca_jax.diagnostics import dropped_mass, error_bounds
from tca_jax.functional import attend
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, num_candidates=4)
EXACT = TCAConfig(block_size=8, window=96, num_candidates=4)


@settings(max_examples=25, deadline=None, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.5, 2.0, 6.0]),
    outlier=st.sampled_from([0.0, 100.0]),
    candidates=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    lengths=st.lists(st.integers(1, 90), min_size=2, max_size=2),
)
def test_theorem_1_bounds_the_error(seed, spread, outlier, candidates, lengths):
    q, k, v = qkv(seed, 2, 90, 4, 2, 8, spread)
    rng = np.random.default_rng(seed)
    v = rng.standard_normal(v.shape).astype(np.float32)
    v[0, rng.integers(90), 0] += outlier
    k[:, rng.integers(90)] *= 3  # a token that some queries look at and others avoid
    lengths, candidates = np.array(lengths, np.int32), np.array(candidates, np.int32)
    sparse, full = (np.asarray(attend(q, k, v, candidates, lengths, config)) for config in (CONFIG, EXACT))
    gamma = dropped_mass(q, k, candidates, lengths, CONFIG)
    bounds = error_bounds(gamma, v, lengths)
    error = np.abs(sparse - full).swapaxes(1, 2)  # [B, Hq, L, d]
    noise = 1e-5 * max(1, outlier)
    assert np.all(error.max(axis=-1) <= np.asarray(bounds.max_norm) + noise)
    assert np.all(error.sum(axis=-1) <= np.asarray(bounds.l1_norm) + 8 * noise)
