"""Extend attention against float64 NumPy on every backend: who sees what, in wrapping rings and ragged rows."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from caches import on_device, random_pool
from implementations import implementation, on_every_backend

from tca_jax.pallas_kernels.extend_attention import extend_attention
from tca_jax.pallas_kernels.kv import Pool, Ring

BLOCK, WINDOW = 16, 32
EMPTY = -1e30  # the log-sum-exp of padding


def _ring(rng, kv_heads, head_dim, slots, newest):
    """All tokens so far `[B, Hkv, T, d]`, and what a ring holds of them; junk in the slots not yet written."""
    tokens = rng.standard_normal((2, len(newest), kv_heads, max(1, *(n + 1 for n in newest)), head_dim))
    ring = rng.standard_normal((2, len(newest), kv_heads, slots, head_dim)) + 30
    for row, last in enumerate(newest):
        for p in range(max(0, last + 1 - slots), last + 1):
            ring[:, row, :, p % slots] = tokens[:, row, :, p]
    return tokens, Ring(*ring)


def _reference(q, pools, tokens, first, newest):
    """The definition, a query at a time in float64."""
    batch, columns, heads, head_dim = q.shape
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], EMPTY)
    for row, column, head in np.ndindex(batch, columns, heads):
        position, kv_head = first[row] + column, head // (heads // tokens.shape[2])
        if position > newest[row]:
            continue
        parts = [tokens[:, row, kv_head, max(0, position // BLOCK * BLOCK - WINDOW) : position + 1]]
        for pool in pools:
            start = pool.offsets[row, kv_head]
            parts.append(np.stack(pool[:2])[:, start : start + pool.lengths[row, kv_head]])
        k, v = np.concatenate(parts, axis=1)
        scores = k @ q[row, column, head] / math.sqrt(head_dim)
        lse[row, column, head] = np.logaddexp.reduce(scores)
        out[row, column, head] = np.exp(scores - lse[row, column, head]) @ v
    return out, lse


def _case(*, first, newest, columns, held=None, grown=None, group=2, kv_heads=2, head_dim=16, slots=48, shared=False):
    """Arguments, options and the expected result."""
    rng = np.random.default_rng(0)
    none = np.zeros((len(first), kv_heads), np.int32)
    pool = random_pool(rng, none if held is None else held, head_dim, outside=50, shared=shared)
    growth = None if grown is None else random_pool(rng, grown, head_dim, outside=50)
    tokens, ring = _ring(rng, kv_heads, head_dim, slots, newest)
    q = rng.standard_normal((len(first), columns, kv_heads * group, head_dim))
    expected = _reference(q, [pool] if growth is None else [pool, growth], tokens, first, newest)
    options = {
        "growth": growth if growth is None else on_device(growth),
        "block_size": BLOCK,
        "window": WINDOW,
        "capacity": int(pool.lengths.max()),
        "growth_capacity": 0 if growth is None else int(growth.lengths.max()),
    }
    arguments = (jnp.asarray(q, jnp.float32), on_device(pool), on_device(ring), jnp.array(first), jnp.array(newest))
    return arguments, options, expected


CASES = {
    "a whole block that passes the ring's end": {"first": [48], "newest": [63], "columns": 16, "held": [[7, 40]]},
    "the first block, which nothing precedes": {"first": [0], "newest": [15], "columns": 16},
    "the middle of a block, a query alone": {"first": [70], "newest": [70], "columns": 1, "held": [[0, 5]]},
    "an odd number of queries": {"first": [83], "newest": [89], "columns": 7, "held": [[33, 0]], "grown": [[0, 18]]},
    "two calls in a block: later tokens are unseen": {"first": [96], "newest": [111], "columns": 5},
    "ragged rows": {
        "first": [16, 50, 32],
        "newest": [31, 52, 40],
        "columns": 16,
        "held": [[5, 0], [16, 33], [1, 2]],
        "grown": [[0, 3], [17, 16], [1, 0]],
    },
    "a row without a query": {
        "first": [48, 48, 0],
        "newest": [50, 47, -1],
        "columns": 9,
        "held": [[5, 9], [4, 3], [8, 8]],
        "grown": [[2, 1], [4, 3], [8, 8]],
    },
    "rows that share their regions": {
        "first": [64, 81, 80],
        "newest": [70, 87, 80],
        "columns": 7,
        "held": [[20, 61]] * 3,
        "grown": [[0, 3], [17, 16], [1, 0]],
        "shared": True,
    },
    "a ring that holds everything": {"first": [16], "newest": [27], "columns": 12, "slots": 32, "grown": [[1, 0]]},
    "a query head a KV head": {"first": [32], "newest": [45], "columns": 14, "group": 1, "held": [[3, 70]]},
    "seven query heads a KV head, d 64": {
        "first": [32],
        "newest": [42],
        "columns": 11,
        "group": 7,
        "head_dim": 64,
        "held": [[9, 70]],
    },
}


@on_every_backend("extend_attention")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_definition(case, backend):
    arguments, options, expected = _case(**case)
    out, lse = implementation("extend_attention", backend)(*arguments, **options)
    np.testing.assert_allclose(out, expected[0], atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5)


@on_every_backend("extend_attention")
def test_queries_at_once_equal_decoding_one_by_one(backend):
    (q, pool, ring, first, newest), options, _ = _case(
        first=[48, 70], newest=[63, 75], columns=16, held=[[5, 40], [0, 9]], grown=[[1, 0], [20, 3]]
    )
    decode = implementation("decode_attention", backend)
    together = implementation("extend_attention", backend)(q, pool, ring, first, newest, **options)
    for row, column in ((0, 0), (0, 15), (1, 0), (1, 5)):
        one = slice(row, row + 1)
        # Decoding has not written the later tokens of the block yet: slots that it masks hold older positions then.
        alone = decode(
            q[one, column],
            *(_rows(cached, one) for cached in (pool, ring)),
            first[one] + column,
            **options | {"growth": _rows(options["growth"], one), "window": WINDOW},
        )
        for actual, expected in zip(together, alone, strict=True):
            np.testing.assert_allclose(actual[one, column], expected, atol=1e-5, rtol=1e-5)


def _rows(cached, rows):
    if isinstance(cached, Ring):
        return Ring(*(x[rows] for x in cached))
    return cached._replace(offsets=cached.offsets[rows], lengths=cached.lengths[rows])


def _nothing(columns):
    pool, ring, zero = jnp.zeros((128, 4)), jnp.zeros((1, 1, 24, 4)), jnp.zeros((1, 1), jnp.int32)
    return jnp.zeros((1, columns, 1, 4)), Pool(pool, pool, zero, zero), Ring(ring, ring), jnp.array([0]), jnp.array([0])


def test_more_queries_than_a_block_are_refused():
    with pytest.raises(ValueError, match="q has 9 queries per row: must be at most block_size = 8"):
        extend_attention(*_nothing(9), block_size=8, window=16, capacity=0)


def test_capacity_past_a_pool_is_refused():
    arguments = _nothing(1)
    with pytest.raises(ValueError, match=r"capacity = 256: must lie in \[0, 128\], the rows of the pool"):
        extend_attention(*arguments, block_size=8, window=16, capacity=256)
    with pytest.raises(ValueError, match=r"growth_capacity = 256: must lie in \[0, 128\], the rows of growth"):
        extend_attention(*arguments, growth=arguments[1], block_size=8, window=16, capacity=0, growth_capacity=256)
    with pytest.raises(ValueError, match="growth_capacity = 1: must be 0 where there is no growth"):
        extend_attention(*arguments, block_size=8, window=16, capacity=0, growth_capacity=1)
