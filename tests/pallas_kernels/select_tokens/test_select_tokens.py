"""Token selection: what lands where in the pool, and the index arithmetic at a million tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import qkv, unchecked
from implementations import implementation, on_every_backend

from tca_jax.pallas_kernels.select_tokens import select_tokens, selection_mask
from tca_jax.pallas_kernels.select_tokens.xla import source_rows
from tca_jax.pallas_kernels.tiles import heads_first


@on_every_backend("select_tokens")
def test_regions_hold_the_chosen_tokens_by_position_and_zeros_after(backend):
    _, k, v = qkv(0, 2, 45, 2, 2, 16)
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.random((2, 2, 45)), jnp.float32)
    budgets = jnp.asarray(rng.integers(0, 9, (2, 2, 5)), jnp.int32)
    offsets = np.array([[128, 0], [384, 256]], np.int32)  # any order
    pool = implementation("select_tokens", backend)(
        scores, budgets, jnp.asarray(k), jnp.asarray(v), jnp.asarray(offsets), block_size=8, pool_tokens=512
    )
    mask = np.asarray(selection_mask(scores, budgets, block_size=8))
    np.testing.assert_array_equal(pool.offsets, offsets)
    np.testing.assert_array_equal(pool.lengths, mask.sum(axis=-1))
    np.testing.assert_array_equal(pool.lengths, budgets.sum(axis=-1))
    for row, head in np.ndindex(2, 2):
        start, count = offsets[row, head], int(pool.lengths[row, head])
        np.testing.assert_array_equal(pool.k[start : start + count], k[row, mask[row, head], head])
        np.testing.assert_array_equal(pool.v[start : start + count], v[row, mask[row, head], head])
        assert not np.any(pool.k[start + count : start + 128])


@on_every_backend("select_tokens")
def test_tokens_past_the_pool_are_dropped(backend):
    _, k, v = qkv(0, 1, 16, 1, 1, 16)
    pool = implementation("select_tokens", backend)(
        jnp.ones((1, 1, 16)),
        jnp.full((1, 1, 2), 8),
        jnp.asarray(k),
        jnp.asarray(v),
        jnp.array([[4]]),
        block_size=8,
        pool_tokens=12,
    )
    np.testing.assert_array_equal(pool.k, np.concatenate([np.zeros((4, 16)), k[0, :8, 0]]))
    assert int(pool.lengths[0, 0]) == 16


def test_rows_of_a_million_tokens_fit_where_their_elements_do_not():
    batch, heads, length, dim = 1, 8, 2**20 + 1, 256
    mask = np.zeros((batch, heads, length), bool)
    mask[..., -1] = True
    capacity = 2**20
    offsets = capacity * np.arange(batch * heads, dtype=np.int32).reshape(batch, heads)
    rows = source_rows(jnp.asarray(mask), jnp.asarray(offsets), pool_tokens=batch * heads * capacity)
    assert rows.dtype == jnp.int32
    first = np.asarray(rows[offsets.ravel()], np.int64).reshape(batch, heads)
    expected = (np.arange(batch)[:, None] * length + length - 1) * heads + np.arange(heads)
    np.testing.assert_array_equal(first, expected)
    assert first[-1, -1] * dim > 2**31 > first[-1, -1]
    assert int((rows < batch * heads * length).sum()) == batch * heads


def test_row_layout_keeps_a_groups_rows_of_a_token_together():
    q, _, _ = qkv(0, 2, 5, 6, 2, 3)
    rows = np.asarray(heads_first(jnp.asarray(q), 2, 8)).reshape(2, 2, 8, 3, 3)
    for row, head, position, member in np.ndindex(2, 2, 8, 3):
        expected = q[row, position, head * 3 + member] if position < 5 else np.zeros(3)
        np.testing.assert_array_equal(rows[row, head, position, member], expected)


def test_budgets_must_cover_the_whole_blocks():
    k = jnp.ones((1, 17, 1, 4))
    with pytest.raises(ValueError, match=r"budgets has 3 blocks: must be L // block_size = 17 // 8 = 2"):
        unchecked(select_tokens)(
            jnp.ones((1, 1, 17)),
            jnp.ones((1, 1, 3), int),
            k,
            k,
            jnp.zeros((1, 1), int),
            block_size=8,
            pool_tokens=128,
        )
