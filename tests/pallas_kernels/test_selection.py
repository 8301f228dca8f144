"""The reserve, and token selection on every backend: exactly the oracle's tokens, and where they land in the pool."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import qkv
from implementations import implementation, on_every_backend

from tca_jax.pallas_kernels.reserve_tokens import reserve_tokens
from tca_jax.pallas_kernels.select_tokens.xla import source_rows

# --- the reserve ----------------------------------------------------------------------------------

TOKENS = 300
RANKED = np.array([TOKENS, 129, 6, 0], np.int32)
SHAPE = (len(RANKED), 2, TOKENS)
KINDS = ["many sizes", "few values", "all equal", "all zero", "neighbouring floats", "large"]


def draw_scores(kind):
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


@pytest.mark.parametrize("reserve", [0, 1, 100, 10**6])
@pytest.mark.parametrize("kind", KINDS)
def test_reserve_equals_the_oracle(kind, reserve):
    scores = draw_scores(kind)
    marked = reserve_tokens(jnp.asarray(scores), jnp.asarray(RANKED), reserve=reserve)
    for row, head in np.ndindex(*scores.shape[:2]):
        expected = oracle.reserve_tokens(scores[row, head].astype(np.float64), RANKED[row], reserve)
        np.testing.assert_array_equal(marked[row, head], expected)


def test_ranked_tokens_past_the_array_or_negative():
    ranked = np.array([TOKENS + 50, -3])
    marked = reserve_tokens(jnp.ones((2, 1, TOKENS)), jnp.array(ranked), reserve=7)
    np.testing.assert_array_equal(marked[:, 0], (np.arange(TOKENS) < 7) & (ranked[:, None] > 0))


def draw_selection(offsets, tokens, block_size, dtype=jnp.float32):
    """Scores with many ties, and budgets from nothing to whole blocks."""
    rng = np.random.default_rng(0)
    batch, kv_heads = np.shape(offsets)
    _, k, v = qkv(0, batch, tokens, kv_heads, kv_heads, 16)
    scores = rng.integers(0, 6, (batch, kv_heads, tokens)) / 8
    budgets = rng.integers(0, block_size + 1, (batch, kv_heads, tokens // block_size))
    arrays = jnp.asarray(scores, jnp.float32), jnp.asarray(budgets, jnp.int32)
    return *arrays, *(jnp.asarray(x, dtype) for x in (k, v)), jnp.asarray(offsets, jnp.int32)


def check_selection(function, operands, block_size, pool_tokens):
    """The pool has the tokens of highest score of each block, by position, ties to the lower one; zeros elsewhere."""
    pool = function(*operands, block_size=block_size, pool_tokens=pool_tokens)
    scores, budgets, k, v, offsets = (np.asarray(x, np.float32) for x in operands)
    pools = np.zeros((2, pool_tokens, k.shape[-1]), np.float32)
    for row, head in np.ndindex(offsets.shape):
        kept = []
        for block in range(k.shape[1] // block_size):
            own = scores[row, head, block * block_size : (block + 1) * block_size]
            best = np.argsort(-own, kind="stable")[: int(budgets[row, head, block])]
            kept += sorted((block * block_size + best).tolist())
        start = int(offsets[row, head])
        room = max(0, min(len(kept), pool_tokens - start))
        pools[:, start : start + room] = [x[row, kept[:room], head] for x in (k, v)]
        assert int(pool.lengths[row, head]) == len(kept)
    np.testing.assert_array_equal(pool.offsets, offsets)
    for actual, expected, given in zip((pool.k, pool.v), pools, operands[2:4], strict=True):
        assert actual.dtype == given.dtype
        np.testing.assert_array_equal(np.asarray(actual, np.float32), expected)


@on_every_backend("select_tokens")
@pytest.mark.parametrize(
    ("offsets", "tokens", "block_size", "pool_tokens", "dtype"),
    [
        pytest.param([[128, 0], [384, 256]], 45, 8, 520, jnp.bfloat16, id="regions in any order"),
        pytest.param([[64]], 77, 16, 300, jnp.float32, id="one region"),
        pytest.param([[4]], 32, 16, 12, jnp.float16, id="tokens past the pool"),
        pytest.param([[0, 64]], 5, 8, 128, jnp.float32, id="no whole block"),
    ],
)
def test_pool_holds_the_chosen_tokens(offsets, tokens, block_size, pool_tokens, dtype, backend):
    operands = draw_selection(offsets, tokens, block_size, dtype)
    check_selection(implementation("select_tokens", backend), operands, block_size, pool_tokens)


def test_selection_in_other_tiles():
    function = partial(implementation("select_tokens", "triton"), rows=4, cleared=32)
    check_selection(function, draw_selection([[64]], 77, 16), 16, 300)


@on_every_backend("select_tokens")
def test_gaps_are_cleared_around_empty_regions(backend):
    for empty in ([], [0], [1, 2], [0, 1, 2, 3]):  # the first three share an offset: one at most has tokens
        scores, budgets, *rest = draw_selection([[64, 64, 64, 200]], 40, 8)
        filled = {*[i for i in range(3) if i not in empty][:1], 3} - set(empty)
        budgets = budgets * jnp.isin(jnp.arange(4), jnp.array(sorted(filled), int))[:, None]
        check_selection(implementation("select_tokens", backend), (scores, budgets, *rest), 8, 256)


def test_rows_of_a_million_tokens_fit_int32():
    heads, length, capacity = 8, 2**20 + 1, 8
    mask = np.zeros((1, heads, length), bool)
    mask[..., -1] = True
    offsets = capacity * np.arange(heads, dtype=np.int32)
    rows = source_rows(jnp.asarray(mask), jnp.asarray(offsets[None]), pool_tokens=heads * capacity)
    assert rows.dtype == jnp.int32
    np.testing.assert_array_equal(rows[offsets], (length - 1) * heads + np.arange(heads))
    assert int((rows < length * heads).sum()) == heads
