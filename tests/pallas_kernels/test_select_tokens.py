"""Token selection on every backend: what lands where in the pool, and index arithmetic at a million tokens."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from cases import qkv
from implementations import implementation, on_every_backend

from tca_jax.pallas_kernels.select_tokens.triton import SelectConfig
from tca_jax.pallas_kernels.select_tokens.xla import source_rows


def _operands(offsets, tokens, block_size, dtype=jnp.float32):
    """Scores with many ties, and budgets from nothing to whole blocks."""
    rng = np.random.default_rng(0)
    batch, kv_heads = np.shape(offsets)
    _, k, v = qkv(0, batch, tokens, kv_heads, kv_heads, 16)
    scores = rng.integers(0, 6, (batch, kv_heads, tokens)) / 8
    budgets = rng.integers(0, block_size + 1, (batch, kv_heads, tokens // block_size))
    arrays = jnp.asarray(scores, jnp.float32), jnp.asarray(budgets, jnp.int32)
    return *arrays, *(jnp.asarray(x, dtype) for x in (k, v)), jnp.asarray(offsets, jnp.int32)


def _check(function, operands, block_size, pool_tokens):
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
    operands = _operands(offsets, tokens, block_size, dtype)
    _check(implementation("select_tokens", backend), operands, block_size, pool_tokens)


def test_tile_sizes_do_not_matter():
    function = partial(implementation("select_tokens", "triton"), config=SelectConfig(rows=4, cleared=32))
    _check(function, _operands([[64]], 77, 16), 16, 300)


@on_every_backend("select_tokens")
def test_gaps_are_cleared_around_empty_regions(backend):
    for empty in ([], [0], [1, 2], [0, 1, 2, 3]):  # the first three share an offset: one at most has tokens
        scores, budgets, *rest = _operands([[64, 64, 64, 200]], 40, 8)
        filled = {*[i for i in range(3) if i not in empty][:1], 3} - set(empty)
        budgets = budgets * jnp.isin(jnp.arange(4), jnp.array(sorted(filled), int))[:, None]
        _check(implementation("select_tokens", backend), (scores, budgets, *rest), 8, 256)


def test_rows_of_a_million_tokens_fit_int32():
    batch, heads, length, dim = 1, 8, 2**20 + 1, 256
    mask = np.zeros((batch, heads, length), bool)
    mask[..., -1] = True
    capacity = 8
    offsets = capacity * np.arange(batch * heads, dtype=np.int32).reshape(batch, heads)
    rows = source_rows(jnp.asarray(mask), jnp.asarray(offsets), pool_tokens=batch * heads * capacity)
    assert rows.dtype == jnp.int32
    first = np.asarray(rows[offsets.ravel()], np.int64).reshape(batch, heads)
    expected = (np.arange(batch)[:, None] * length + length - 1) * heads + np.arange(heads)
    np.testing.assert_array_equal(first, expected)
    assert first[-1, -1] * dim > 2**31 > first[-1, -1]
    assert int((rows < batch * heads * length).sum()) == batch * heads
