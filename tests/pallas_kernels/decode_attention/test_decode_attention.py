"""Decode attention against the oracle: ring order, edge of the window, regions of unequal heads."""

import math

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from implementations import implementation, on_every_backend

from tca_jax.pallas_kernels.decode_attention import decode_attention
from tca_jax.pallas_kernels.decode_attention.xla import ring_positions
from tca_jax.pallas_kernels.kv import Pool, Ring

BLOCK, WINDOW, RING, DIM = 8, 16, 24, 16


def _history(seed, batch, kv_heads, tokens):
    """Keys and values of all tokens so far [B, Hkv, T, d]."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((batch, kv_heads, tokens, DIM)).astype(np.float32) for _ in range(2))


def _ring(tokens, positions, slots, junk=50.0):
    """What a ring holds once each row has written its tokens up to its position; junk elsewhere."""
    ring = np.full((*tokens.shape[:2], slots, DIM), junk, np.float32)
    for row, position in enumerate(positions):
        for p in range(position + 1):
            ring[row, :, p % slots] = tokens[row, :, p]
    return jnp.asarray(ring)


def _expected(q, k, v):
    logits = k.astype(np.float64) @ q.astype(np.float64) / math.sqrt(DIM)
    return oracle.softmax(logits) @ v, np.logaddexp.reduce(logits)


@on_every_backend("decode_attention")
@pytest.mark.parametrize("positions", [(0, 5), (23, 24), (31, 32), (33, 71)])
@pytest.mark.parametrize("capacity", [0, 128])
def test_attends_to_the_local_tokens_and_the_region(positions, capacity, backend):
    k, v = _history(0, 2, 2, 72)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 6, DIM)).astype(np.float32)
    k_pool, v_pool = (rng.standard_normal((512, DIM)).astype(np.float32) for _ in range(2))
    offsets, held = np.array([[128, 384], [0, 256]], np.int32), np.array([[3, 128], [0, 40]], np.int32)
    held = held * (capacity > 0)
    out, lse = implementation("decode_attention", backend)(
        jnp.asarray(q),
        Pool(*map(jnp.asarray, (k_pool, v_pool, offsets, held))),
        Ring(_ring(k, positions, RING), _ring(v, positions, RING)),
        jnp.array(positions),
        block_size=BLOCK,
        window=WINDOW,
        capacity=capacity,
    )
    for row, head in np.ndindex(2, 6):
        kv = head // 3
        local = slice(max(0, positions[row] // BLOCK * BLOCK - WINDOW), positions[row] + 1)
        region = slice(offsets[row, kv], offsets[row, kv] + held[row, kv])
        keys = np.concatenate([k[row, kv, local], k_pool[region]])
        values = np.concatenate([v[row, kv, local], v_pool[region]])
        expected, expected_lse = _expected(q[row, head], keys, values)
        np.testing.assert_allclose(out[row, head], expected, atol=1e-5)
        np.testing.assert_allclose(lse[row, head], expected_lse, rtol=1e-5, atol=1e-5)


@on_every_backend("decode_attention")
def test_attends_to_shared_regions_of_the_pool_and_to_a_rows_own_of_growth(backend):
    positions, lengths = (31, 45, 0), np.array([[0, 9], [30, 0], [1, 17]], np.int32)
    k, v = _history(0, 3, 2, 46)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((3, 4, DIM)).astype(np.float32)
    pool = Pool(*_tokens(rng, 256), np.array([[128, 0]] * 3, np.int32), np.array([[21, 100]] * 3, np.int32))
    growth = Pool(*_tokens(rng, 192), np.arange(6, dtype=np.int32)[::-1].reshape(3, 2) * 32, lengths)
    out, lse = implementation("decode_attention", backend)(
        jnp.asarray(q),
        Pool(*map(jnp.asarray, pool)),
        Ring(_ring(k, positions, RING), _ring(v, positions, RING)),
        jnp.array(positions),
        growth=Pool(*map(jnp.asarray, growth)),
        block_size=BLOCK,
        window=WINDOW,
        capacity=128,
        growth_capacity=32,
    )
    for row, head in np.ndindex(3, 4):
        kv = head // 2
        local = slice(max(0, positions[row] // BLOCK * BLOCK - WINDOW), positions[row] + 1)
        keys, values = [k[row, kv, local]], [v[row, kv, local]]
        for held in (pool, growth):
            start = held.offsets[row, kv]
            keys.append(held.k[start : start + held.lengths[row, kv]])
            values.append(held.v[start : start + held.lengths[row, kv]])
        expected, expected_lse = _expected(q[row, head], np.concatenate(keys), np.concatenate(values))
        np.testing.assert_allclose(out[row, head], expected, atol=1e-5)
        np.testing.assert_allclose(lse[row, head], expected_lse, rtol=1e-5, atol=1e-5)


def _tokens(rng, count):
    """Random keys and values."""
    return rng.standard_normal((2, count, DIM)).astype(np.float32)


def test_ring_larger_than_the_history_holds_everything():
    k, v = _history(0, 1, 1, 40)
    q = np.random.default_rng(1).standard_normal((1, 1, DIM)).astype(np.float32)
    pool, zero = jnp.zeros((128, DIM)), jnp.zeros((1, 1), jnp.int32)
    out, _ = decode_attention(
        jnp.asarray(q),
        Pool(pool, pool, zero, zero),
        Ring(_ring(k, [39], 48), _ring(v, [39], 48)),
        jnp.array([39]),
        block_size=BLOCK,
        window=4096,
        capacity=0,
    )
    np.testing.assert_allclose(out[0, 0], _expected(q[0, 0], k[0, 0], v[0, 0])[0], atol=1e-5)


def test_long_regions_are_streamed_in_tiles():
    rng = np.random.default_rng(2)
    k_pool, v_pool = (rng.standard_normal((3072, DIM)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((1, 2, DIM)).astype(np.float32)
    k, v = _history(0, 1, 1, 1)
    out, _ = decode_attention(
        jnp.asarray(q),
        Pool(jnp.asarray(k_pool), jnp.asarray(v_pool), jnp.array([[256]]), jnp.array([[2750]])),
        Ring(_ring(k, [0], RING), _ring(v, [0], RING)),
        jnp.array([0]),
        block_size=BLOCK,
        window=WINDOW,
        capacity=2816,
    )
    for head in range(2):
        keys, values = (np.concatenate([x[256:3006], y[0, 0]]) for x, y in ((k_pool, k), (v_pool, v)))
        np.testing.assert_allclose(out[0, head], _expected(q[0, head], keys, values)[0], atol=1e-5)


def test_ring_slots_know_their_positions():
    np.testing.assert_array_equal(ring_positions(jnp.array([1, 9]), 4), [[0, 1, -2, -1], [8, 9, 6, 7]])


def test_capacity_past_the_pool_is_refused():
    pool, ring, zero = jnp.zeros((128, 4)), jnp.zeros((1, 1, 24, 4)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"capacity = 256: must lie in \[0, 128\]"):
        decode_attention(
            jnp.zeros((1, 1, 4)),
            Pool(pool, pool, zero, zero),
            Ring(ring, ring),
            jnp.array([0]),
            block_size=8,
            window=16,
            capacity=256,
        )
