"""Arrays of more than 2^31 elements, on a GPU: an index that wraps would read and write elsewhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.lab.benchmarks.common import free_bytes, random_normal
from tca_jax.lab.benchmarks.shares import unequal_candidates
from tca_jax.methods.candidates import region_capacity
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.regions import Regions
from tca_jax.methods.selection import head_budgets
from tca_jax.pallas_kernels.backends import can_run
from tca_jax.pallas_kernels.block_sparse_attention import BlockLists, Columns, block_sparse_attention
from tca_jax.pallas_kernels.kv import Pages
from tca_jax.pallas_kernels.observation_scores import observation_scores
from tca_jax.pallas_kernels.paged_attention import triton as paged_attention_triton
from tca_jax.pallas_kernels.paged_attention import xla as paged_attention_xla
from tca_jax.pallas_kernels.prefill_attention import prefill_attention
from tca_jax.pallas_kernels.reserve_tokens import reserve_tokens
from tca_jax.pallas_kernels.select_tokens import select_tokens
from tca_jax.pallas_kernels.select_tokens import xla as select_tokens_xla
from tca_jax.pallas_kernels.token_scores import token_scores

NEEDED_BYTES = 60e9
pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or free_bytes() < NEEDED_BYTES,
    reason=f"needs an NVIDIA GPU with {NEEDED_BYTES / 1e9:.0f} GB of free memory",
)

PAST = 2**31


@jax.jit
def _relative_error(out, expected):
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected)


def _normal(seed, *shape):
    return random_normal(jax.random.key(seed), shape, jnp.bfloat16)


@partial(jax.jit, static_argnames=("block_size", "window"))
def _block_attention(q, k, v, k_pool, v_pool, offset, prefix, block, *, block_size, window):
    """Attention of a block of queries `[b, G, d]` over the head's k and v `[L, d]` and a prefix of its pool region."""
    rows = block * block_size + jnp.arange(block_size)
    columns = jnp.arange(window + block_size) + block * block_size - window
    pooled = jnp.arange(k_pool.shape[0])
    keys, values = (jnp.concatenate([pool, x[columns]]) for pool, x in ((k_pool, k), (v_pool, v)))
    seen = jnp.concatenate(
        [
            jnp.broadcast_to((pooled >= offset) & (pooled < offset + prefix), (block_size, pooled.size)),
            columns <= rows[:, None],
        ],
        axis=1,
    )
    scores = jnp.einsum("qgd,kd->gqk", q, keys, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("gqk,kd->qgd", weights, values.astype(jnp.float32), precision="highest")


@pytest.mark.parametrize("backend", ["mosaic", "triton"])
def test_prefill_of_a_million_tokens(backend):
    if not can_run(backend):
        pytest.skip(f"this GPU does not run {backend}")
    length, heads, kv_heads, d = 2**20 + 256, 28, 4, 128  # Qwen2.5-7B
    config = TCAConfig()
    b, w = config.block_size, config.window
    q, k, v = _normal(0, 1, length, heads, d), *(_normal(i, 1, length, kv_heads, d) for i in (1, 2))
    assert q.size > PAST
    candidates = unequal_candidates(config, kv_heads, 0.06)
    ranked = config.num_ranked_blocks(length)
    regions = Regions.plan(1, tuple(region_capacity(config, row, ranked) for row in candidates))
    lengths, offsets = jnp.array([length], jnp.int32), jnp.asarray(regions.offsets, jnp.int32)
    scored = token_scores(q[:, -1], k, lengths, block_size=b)
    budgets = head_budgets(scored, jnp.asarray(candidates, jnp.int32), lengths, config)
    selected = (scored.scores, budgets, k, v, offsets)
    pool = select_tokens(*selected, block_size=b, pool_tokens=regions.pool_tokens)
    wanted = select_tokens_xla.select_tokens(*selected, block_size=b, pool_tokens=regions.pool_tokens)
    np.testing.assert_array_equal(pool.lengths, wanted.lengths)
    for head, (offset, count) in enumerate(zip(regions.offsets[0], np.asarray(pool.lengths)[0], strict=True)):
        for actual, expected in ((pool.k, wanted.k), (pool.v, wanted.v)):
            assert bool(jnp.array_equal(actual[offset : offset + count], expected[offset : offset + count])), head
    del wanted
    out = prefill_attention(q, k, v, pool, budgets, lengths, block_size=b, window=w, backend=backend)
    prefixes = np.asarray(budgets).cumsum(axis=-1)
    for block in (w // b + 1, 5000, length // b - 1):  # an element of the second lies past 2^31
        queries = slice(block * b, (block + 1) * b)
        for head in range(kv_heads):
            group = slice(head * heads // kv_heads, (head + 1) * heads // kv_heads)
            prefix = prefixes[0, head, block - w // b - 1]
            expected = _block_attention(
                q[0, queries, group],
                k[0, :, head],
                v[0, :, head],
                pool.k,
                pool.v,
                offsets[0, head],
                prefix,
                block,
                block_size=b,
                window=w,
            )
            assert float(_relative_error(out[0, queries, group], expected)) < 5e-3, (block, head)


def test_block_sparse_attention_of_a_million_tokens():
    length, heads, kv_heads, d, b = 2**20 + 256, 28, 4, 128, 128
    q, k, v = _normal(0, 1, length, heads, d), *(_normal(i, 1, length, kv_heads, d) for i in (1, 2))
    assert q.size > PAST
    distances, tokens = np.array([128, 256, 700, 500_001, 1_048_000]), np.array([3, 640_000, 1_048_700])
    ends = (np.arange(length // b) + 1) * b
    counts = (distances < ends[:, None] + b).sum(axis=-1)
    blocks = BlockLists(
        *(jnp.broadcast_to(jnp.asarray(x, jnp.int32), (1, heads, *x.shape)) for x in (distances[None], counts))
    )
    columns = Columns(
        jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (1, heads, 3)), jnp.full((1, heads), 3, jnp.int32)
    )
    lengths = jnp.array([length], jnp.int32)
    out = block_sparse_attention(q, k, v, blocks, lengths, columns=columns, block_size=b, tile_size=b, backend="triton")
    for tile in (5, 5000, length // b - 1):  # an element of the second lies past 2^31
        rows = slice(tile * b, (tile + 1) * b)
        begins = ends[tile] - distances[: counts[tile]]
        listed = np.unique(np.concatenate([*(begin + np.arange(b) for begin in begins), tokens]))
        listed = listed[(listed >= 0) & (listed < ends[tile])]
        seen = listed <= np.arange(tile * b, (tile + 1) * b)[:, None]
        for head in range(heads):
            keys, values = (x[0, listed, head // (heads // kv_heads)].astype(jnp.float32) for x in (k, v))
            scores = jnp.where(seen, q[0, rows, head].astype(jnp.float32) @ keys.T / d**0.5, -jnp.inf)
            expected = jax.nn.softmax(scores) @ values
            assert float(_relative_error(out[0, rows, head], expected)) < 1e-2, (tile, head)


def test_observation_and_reserve_of_the_last_row_of_a_large_batch():
    batch, length, observed, heads, kv_heads, d = 5, 2**19, 64, 32, 8, 128
    q, k = _normal(0, batch, observed, heads, d), _normal(1, batch, length, kv_heads, d)
    assert (batch - 1) * length * kv_heads * d >= PAST  # where the last row begins
    lengths = jnp.array([1, 300, 70, length, length - 77], jnp.int32)
    scores = observation_scores(q, k, lengths, spread=16, backend="triton")
    for row in range(batch):  # the oracle a row at a time, whose arrays are within 2^31
        rows = slice(row, row + 1)
        expected = observation_scores(q[rows], k[rows], lengths[rows], spread=16, backend="xla")
        np.testing.assert_allclose(scores[rows], expected, rtol=2e-3, atol=1e-3 * float(expected.mean()))
    marked = reserve_tokens(scores, lengths - 1, reserve=512, backend="triton")
    assert bool(jnp.array_equal(marked, reserve_tokens(scores, lengths - 1, reserve=512, backend="xla")))


@pytest.mark.parametrize("queries", [1, 6], ids=["decode", "extend"])
def test_attention_over_a_pool_of_pages_of_that_size(queries):
    batch, heads, kv_heads, d, page, kept, local = 3, 32, 8, 128, 128, 8192, 64
    pages = batch * kv_heads * (kept + local)
    k, v = (_normal(seed, pages, page, d) for seed in (1, 2))
    assert k.size > PAST
    table = jax.random.permutation(jax.random.key(3), pages).reshape(batch, kv_heads, -1).astype(jnp.int32)
    counts = kept * page - 1000 * jnp.arange(batch * kv_heads, dtype=jnp.int32).reshape(batch, kv_heads)
    start = jnp.array([2**20, 128, 0], jnp.int32)
    cache = Pages(k, v, table, counts, start, start + local * page, kept)
    q, first = _normal(0, batch, queries, heads, d), start + (local - 1) * page + 7
    at = first, first + queries - 1
    out, lse = paged_attention_triton.paged_attention(q, (cache,), *at, window=(local - 1) * page)
    for row in range(batch):  # the oracle a row at a time, on pages that lie together
        rows = slice(row, row + 1)
        own = table[row].reshape(-1)
        alone = jnp.arange(own.size, dtype=jnp.int32).reshape(1, kv_heads, -1)
        part = Pages(k[own], v[own], alone, counts[rows], start[rows], cache.end[rows], kept)
        expected = paged_attention_xla.paged_attention(
            q[rows], (part,), *(x[rows] for x in at), window=(local - 1) * page
        )
        assert float(_relative_error(out[rows], expected[0])) < 1e-2, row
        np.testing.assert_allclose(lse[rows], expected[1], atol=1e-3)
