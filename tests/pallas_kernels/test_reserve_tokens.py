"""The reserve against float64 on every backend: exactly the same tokens, ties and odd sizes included."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from implementations import gpu, implementation, on_every_backend

from tca_jax.pallas_kernels.reserve_tokens.triton import ReserveConfig

TOKENS = 300
RANKED = np.array([TOKENS, 129, 6, 0], np.int32)
SHAPE = (len(RANKED), 2, TOKENS)


def _draw(kind):
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


def _check(function, scores, ranked, reserve):
    marked = function(jnp.asarray(scores), jnp.asarray(ranked), reserve=reserve)
    for row, head in np.ndindex(*scores.shape[:2]):
        expected = oracle.reserve_tokens(scores[row, head].astype(np.float64), ranked[row], reserve)
        np.testing.assert_array_equal(marked[row, head], expected)


@on_every_backend("reserve_tokens")
@pytest.mark.parametrize("reserve", [0, 1, 100, 10**6])
@pytest.mark.parametrize("kind", ["many sizes", "few values", "all equal", "all zero", "neighbouring floats", "large"])
def test_equals_the_oracle(kind, reserve, backend):
    _check(implementation("reserve_tokens", backend), _draw(kind), RANKED, reserve)


@on_every_backend("reserve_tokens")
@pytest.mark.parametrize("ranked", [TOKENS + 50, -3])
def test_ranked_tokens_past_the_array_or_negative(ranked, backend):
    scores = jnp.ones((1, 1, TOKENS))
    marked = implementation("reserve_tokens", backend)(scores, jnp.array([ranked]), reserve=7)
    np.testing.assert_array_equal(marked[0, 0], (np.arange(TOKENS) < 7) & (ranked > 0))


@on_every_backend("reserve_tokens")
def test_array_without_tokens_has_no_marks(backend):
    marked = implementation("reserve_tokens", backend)(jnp.ones((1, 2, 0)), jnp.array([0]), reserve=7)
    assert marked.shape == (1, 2, 0)
    assert marked.dtype == bool


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ReserveConfig(chunk=32, tile=16, bits=4), id="chunks of two tiles"),
        pytest.param(ReserveConfig(chunk=16, tile=16, bits=8), id="chunks of one tile, digits of a byte"),
        pytest.param(ReserveConfig(chunk=512, tile=64, bits=5), id="one chunk, digits that do not divide the bits"),
    ],
)
def test_tiles_and_digits_do_not_matter(config):
    function = partial(implementation("reserve_tokens", "triton"), config=config)
    for kind in ("few values", "many sizes"):
        _check(function, _draw(kind), RANKED, 100)


@on_every_backend("reserve_tokens")
def test_several_chunks_of_default_size(backend):
    scores = np.random.default_rng(0).integers(0, 20, (2, 1, 2500)).astype(np.float32)
    _check(implementation("reserve_tokens", backend), scores, np.array([2500, 1100]), 512)


@gpu
@pytest.mark.parametrize("values", [1, 50, 10**6])
@pytest.mark.parametrize("shape", [(1, 8, 131072), (2, 4, 33000), (1, 2, 2**20 + 7)])
def test_real_sizes_equal_xla(shape, values):
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.exponential(size=values)[rng.integers(0, values, shape)], jnp.float32)
    for reserve in (512, 5000):
        operands = scores, jnp.full(shape[0], shape[2] - 4096)
        marks = [implementation("reserve_tokens", name)(*operands, reserve=reserve) for name in ("triton", "xla")]
        np.testing.assert_array_equal(*marks)
