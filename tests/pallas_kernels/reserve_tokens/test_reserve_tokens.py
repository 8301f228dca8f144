"""The reserve against the float64 oracle, on every backend: exactly the same tokens, ties and odd sizes included."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import unchecked
from implementations import implementation, on_every_backend

from tca_jax.pallas_kernels.reserve_tokens import reserve_tokens

TOKENS = 300
RANKED = np.array([TOKENS, 129, 6, 0], np.int32)
SHAPE = (len(RANKED), 2, TOKENS)


def _scores(kind):
    """Scores [B, Hkv, L], NaN past the ranked tokens."""
    rng = np.random.default_rng(0)
    drawn = {
        "many sizes": np.exp(-80 * rng.random(SHAPE)),
        "few values": rng.integers(0, 3, SHAPE) / 7,
        "all equal": np.full(SHAPE, 0.25),
        "all zero": np.where(rng.random(SHAPE) < 0.5, 0.0, -0.0),
        "neighbouring floats": np.float32(1) + rng.integers(0, 5, SHAPE) * np.finfo(np.float32).eps,
        "large": rng.random(SHAPE) * 3e38,
    }[kind].astype(np.float32)
    return np.where(np.arange(TOKENS) < RANKED[:, None, None], drawn, np.nan)


@on_every_backend("reserve_tokens")
@pytest.mark.parametrize("reserve", [0, 1, 100, 10**6])
@pytest.mark.parametrize("kind", ["many sizes", "few values", "all equal", "all zero", "neighbouring floats", "large"])
def test_marks_exactly_the_tokens_of_the_oracle(kind, reserve, backend):
    scores = _scores(kind)
    marked = implementation("reserve_tokens", backend)(jnp.asarray(scores), jnp.asarray(RANKED), reserve=reserve)
    for row, ranked in enumerate(RANKED):
        for head in range(SHAPE[1]):
            expected = oracle.reserve_tokens(scores[row, head].astype(np.float64), ranked, reserve)
            np.testing.assert_array_equal(marked[row, head], expected)


@on_every_backend("reserve_tokens")
@pytest.mark.parametrize("ranked", [TOKENS + 50, -3])
def test_more_ranked_tokens_than_there_are_or_fewer_than_none(ranked, backend):
    scores = jnp.ones((1, 1, TOKENS))
    marked = implementation("reserve_tokens", backend)(scores, jnp.array([ranked]), reserve=7)
    np.testing.assert_array_equal(marked[0, 0], (np.arange(TOKENS) < 7) & (ranked > 0))


@on_every_backend("reserve_tokens")
def test_array_without_tokens_has_no_marks(backend):
    marked = implementation("reserve_tokens", backend)(jnp.ones((1, 2, 0)), jnp.array([0]), reserve=7)
    assert marked.shape == (1, 2, 0)
    assert marked.dtype == bool


def test_shapes_and_reserve_are_checked():
    with pytest.raises(ValueError, match=r"ranked_tokens has shape \(2,\): must be \[B = 1\]"):
        unchecked(reserve_tokens)(jnp.ones((1, 2, 5)), jnp.array([5, 5]), reserve=3)
    with pytest.raises(ValueError, match="reserve = -1: must be at least 0"):
        reserve_tokens(jnp.ones((1, 2, 5)), jnp.array([5]), reserve=-1)
