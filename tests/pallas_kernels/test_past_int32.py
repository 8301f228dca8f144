"""Arrays of more than 2^31 elements, on a GPU: an index that wraps would read and write elsewhere."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import implementation

from tca_jax.pallas_kernels.backends import can_run
from tca_jax.pallas_kernels.kv import Pages
from tca_jax.pallas_kernels.prefill_attention import prefill_attention
from tca_jax.pallas_kernels.select_tokens import select_tokens

NEEDED_BYTES = 60e9
PAST = 2**31
LENGTH = 2**20 + 256
HEADS, KV_HEADS, D, B = 28, 4, 128, 128  # Qwen2.5-7B


def _free_bytes():
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or _free_bytes() < NEEDED_BYTES,
    reason=f"needs an NVIDIA GPU with {NEEDED_BYTES / 1e9:.0f} GB of free memory",
)


@partial(jax.jit, static_argnums=(0, 1))
def _normal(seed, shape):
    # In parts: the random bits of the largest arrays would take 15 GB.
    rows = math.prod(shape[:-1])
    parts = math.gcd(rows, 64)
    draw = partial(jax.random.normal, shape=(rows // parts, shape[-1]), dtype=jnp.bfloat16)
    return jax.lax.map(draw, jax.random.split(jax.random.key(seed), parts)).reshape(shape)


def _check(out, q, keys, values, seen, where, tolerance=1e-2):
    """A tile's output `[b, d]` against softmax attention of one head in float32."""
    q, keys, values = (x.astype(jnp.float32) for x in (q, keys, values))
    scores = jnp.where(seen, jnp.matmul(q, keys.T, precision="highest") / D**0.5, -jnp.inf)
    expected = jnp.matmul(jax.nn.softmax(scores), values, precision="highest")
    error = jnp.linalg.norm(out.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
    assert float(error) < tolerance, where


@pytest.mark.parametrize("backend", ["mosaic", "triton"])
def test_prefill_of_a_million_tokens(backend):
    if not can_run(backend):
        pytest.skip(f"this GPU does not run {backend}")
    q, k, v = (_normal(i, (1, LENGTH, heads, D)) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    assert q.size > PAST
    lengths, window = jnp.array([LENGTH], jnp.int32), 4096
    ranked = (LENGTH - window) // B
    share = np.array([0, 3, 9, 40])[None, :, None]  # selected tokens of a block, by head
    budgets = jnp.asarray(share * (np.arange(LENGTH // B) < ranked), jnp.int32)
    totals = (-(-share[0, :, 0] * ranked // 128) * 128).tolist()
    offsets = jnp.asarray(np.cumsum([0, *totals[:-1]])[None], jnp.int32)
    scores = jax.random.uniform(jax.random.key(3), (1, KV_HEADS, LENGTH))
    selected, sizes = (scores, budgets, k, v, offsets), {"block_size": B, "pool_tokens": sum(totals)}
    pool, wanted = (select_tokens(*selected, **sizes, backend=name) for name in ("triton", "xla"))
    for ours, theirs in zip(pool, wanted, strict=True):
        assert bool(jnp.array_equal(ours, theirs))
    out = prefill_attention(q, k, v, pool, budgets, lengths, block_size=B, window=window, backend=backend)
    for block in (window // B + 1, 5000, LENGTH // B - 1):  # an element of the second lies past 2^31
        rows, first = slice(block * B, (block + 1) * B), block * B - window
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            prefix, offset = int(budgets[0, kv, : first // B].sum()), int(offsets[0, kv])
            keys, values = (
                jnp.concatenate([pooled[offset : offset + prefix], x[0, first : rows.stop, kv]])
                for pooled, x in ((pool.k, k), (pool.v, v))
            )
            seen = jnp.arange(-prefix, window + B) <= window + jnp.arange(B)[:, None]
            _check(out[0, rows, head], q[0, rows, head], keys, values, seen, (block, head), 5e-3)


@pytest.mark.parametrize("queries", [1, 6], ids=["decode", "extend"])
def test_attention_over_pages(queries):
    batch, heads, kv_heads, page, kept, local = 3, 32, 8, 128, 8192, 64
    pages = batch * kv_heads * (kept + local)
    k, v = (_normal(seed, (pages, page, D)) for seed in (1, 2))
    assert k.size > PAST
    table = jax.random.permutation(jax.random.key(3), pages).reshape(batch, kv_heads, -1).astype(jnp.int32)
    counts = kept * page - 1000 * jnp.arange(batch * kv_heads, dtype=jnp.int32).reshape(batch, kv_heads)
    start = jnp.array([2**20, 128, 0], jnp.int32)
    cache = Pages(k, v, table, counts, start, start + local * page, kept)
    q, first = _normal(0, (batch, queries, heads, D)), start + (local - 1) * page + 7
    at, window = (first, first + queries - 1), (local - 1) * page
    out, lse = implementation("paged_attention", "triton")(q, (cache,), *at, window=window)
    for row in range(batch):  # the oracle a row at a time, on pages that lie together
        rows, own = slice(row, row + 1), table[row].reshape(-1)
        alone = jnp.arange(own.size, dtype=jnp.int32).reshape(1, kv_heads, -1)
        part = Pages(k[own], v[own], alone, counts[rows], start[rows], cache.end[rows], kept)
        expected = implementation("paged_attention", "xla")(q[rows], (part,), *(x[rows] for x in at), window=window)
        error = jnp.linalg.norm((out[rows] - expected[0]).astype(jnp.float32))
        assert float(error / jnp.linalg.norm(expected[0].astype(jnp.float32))) < 1e-2, row
        np.testing.assert_allclose(lse[rows], expected[1], atol=1e-3)
