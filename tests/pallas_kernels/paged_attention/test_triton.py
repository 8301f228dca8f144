"""Paged attention through Triton: splits, what is never read, transformations, lowering for CUDA."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import abstract_mesh, kernels
from jax.sharding import PartitionSpec
from random_pages import attend_to_pages, write_pages

from tca_jax.pallas_kernels.kv import Pages
from tca_jax.pallas_kernels.paged_attention import triton
from tca_jax.pallas_kernels.paged_attention.chunks import PagedConfig
from tca_jax.pallas_kernels.paged_attention.triton import default_config
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")

INTERPRET = jax.default_backend() != "gpu"
PAGE, WINDOW = 16, 32
SMALL = PagedConfig(queries=16, keys=16, programs=24, warps=4, stages=2, merged=4)

attend = partial(triton.paged_attention, window=WINDOW, interpret=INTERPRET)


def _inputs(first, newest, caches, *, queries=1, group=2, outside=np.nan):
    """Random arguments and what they give; what nobody attends to holds `outside`."""
    rng = np.random.default_rng(0)
    written = [write_pages(rng, *cache, page=PAGE, head_dim=16, outside=outside) for cache in caches]
    q = rng.standard_normal((len(first), queries, written[0].pages.kept.shape[1] * group, 16)).astype(np.float32)
    expected = attend_to_pages(q, written, first, newest, page=PAGE, window=WINDOW)
    return (jnp.asarray(q), tuple(x.pages for x in written), jnp.array(first), jnp.array(newest)), expected


def _check(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("first", "newest", "caches", "queries"),
    [
        pytest.param((90,), (90,), [([[130, 9]], [(48, 91)]), ([[0, 50]], [(80, 80)])], 1, id="decoding"),
        pytest.param((83,), (90,), [([[130, 9]], [(48, 80)]), ([[0, 50]], [(80, 91)])], 8, id="eight queries"),
    ],
)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(None, id="the default"),
        pytest.param(PagedConfig(16, 16, programs=1, warps=4, stages=2), id="a chunk a region"),
        pytest.param(PagedConfig(16, 16, programs=1000, warps=4, stages=2, merged=2), id="a chunk a tile"),
    ],
)
def test_any_split_gives_the_same_and_never_reads_what_is_not_attended_to(first, newest, caches, queries, config):
    arguments, expected = _inputs(first, newest, caches, queries=queries)
    _check(attend(*arguments, config=config), expected)


def test_remainders_of_many_heads_leave_no_chunk_without_a_program():
    arguments, expected = _inputs((0,), (0,), [([[96, 96, 48]], [(0, 1)])])
    config = PagedConfig(16, 16, programs=6, warps=4, stages=2)  # 7, 7 and 4 tiles: in threes, they make 8 chunks
    _check(attend(*arguments, config=config), expected)


def test_tiles_smaller_than_a_page():
    rng = np.random.default_rng(0)
    written = [write_pages(rng, [[70, 3]], [(64, 135)], page=64, head_dim=16, outside=np.nan)]
    q = jnp.asarray(rng.standard_normal((1, 7, 4, 16)), jnp.float32)
    first, newest = (jnp.array([128]), jnp.array([134]))
    expected = attend_to_pages(q, written, first, newest, page=64, window=64)
    out = triton.paged_attention(q, (written[0].pages,), first, newest, window=64, config=SMALL, interpret=INTERPRET)
    _check(out, expected)


def test_row_without_a_query_reads_nothing():
    caches = [([[5, 9], [16, 33]], [(16, 50), (16, 52)])]
    (q, (pages,), *at), _ = _inputs((48, 52), (49, 51), caches, queries=4)
    expected = attend(q, (pages,), *at, config=SMALL)
    lost = pages.v.at[pages.table[1].reshape(-1)].set(jnp.nan)  # were they read, they would spread
    actual = attend(q, (dataclasses.replace(pages, v=lost),), *at, config=SMALL)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.any(actual[0][1])
    assert np.all(np.asarray(actual[1][1]) < -1e29)


def test_scores_far_from_zero_leave_no_trace_of_masked_tokens():
    (q, (pages,), *at), _ = _inputs((48,), (63,), [([[5, 40]], [(16, 64)])], queries=16, outside=0.0)
    single = attend(q[:, 3:4] * 300, (pages,), at[0] + 3, at[0] + 3, config=SMALL)
    for whole, alone in zip(attend(q * 300, (pages,), *at, config=SMALL), single, strict=True):
        np.testing.assert_allclose(whole[:, 3], alone[:, 0], atol=1e-5, rtol=1e-5)


#: Axes that are mapped over rows: all rows' pages lie in one pool.
_ROWS = Pages(None, None, 0, 0, 0, 0, 2)


def _batched(q, pages, first, newest):
    """One row's arguments as a batch of one."""
    rows = {name: getattr(pages, name)[None] for name in ("table", "kept", "start", "end")}
    return q[None], (dataclasses.replace(pages, **rows),), first[None], newest[None]


def test_vmap_over_rows_equals_the_batch():
    (q, (pages,), *at), expected = _inputs((47, 90), (47, 90), [([[5, 0], [16, 17]], [(0, 48), (48, 91)])])
    assert pages.kept_columns == 2

    def one_row(*row):
        return attend(*_batched(*row), config=SMALL)

    out, lse = jax.vmap(one_row, (0, _ROWS, 0, 0))(q, pages, *at)
    _check((out[:, 0], lse[:, 0]), expected)


def _avals(batch, queries, kv_heads, group, head_dim, pages, columns, dtype, rows=None, page=128):
    rows = rows or batch
    q = jax.ShapeDtypeStruct((batch, queries, kv_heads * group, head_dim), dtype)
    pool = jax.ShapeDtypeStruct((pages, page, head_dim), dtype)
    table, kept, at, of_row = (
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in ((rows, kv_heads, sum(columns)), (rows, kv_heads), (batch,), (rows,))
    )
    return q, (Pages(pool, pool, table, kept, of_row, of_row, columns[0]),), at, at


@pytest.mark.parametrize(
    "avals",
    [
        pytest.param((1, 1, 8, 4, 128, 1600, (160, 33), jnp.bfloat16), id="LLaMA, a token"),
        pytest.param((1, 128, 8, 4, 128, 1600, (160, 33), jnp.bfloat16), id="LLaMA, a block"),
        pytest.param((1, 1, 8, 4, 128, 8200, (0, 1025), jnp.bfloat16), id="full attention"),
        pytest.param((16, 1, 4, 7, 128, 2**18, (8192, 33), jnp.float16, 1), id="past 2^31, shared rows"),
        pytest.param((2, 33, 2, 4, 64, 320, (4, 5), jnp.float32), id="float32"),
        pytest.param((1, 128, 1, 1, 256, 320, (4, 5), jnp.bfloat16), id="d 256"),
    ],
)
def test_lowers_for_cuda_as_two_kernels(avals):
    function, arguments = partial(triton.paged_attention, window=4096), _avals(*avals)
    assert kernels("triton", function, *arguments) == 2
    twice = lambda q, caches, *at: function(q, caches * 2, *at)  # noqa: E731
    assert kernels("triton", twice, *arguments) == 2


def test_lowers_for_cuda_under_shard_map_and_vmap():
    avals = _avals(2, 1, 8, 4, 128, 320, (2, 5), jnp.bfloat16)
    function, heads, whole = partial(triton.paged_attention, window=512), PartitionSpec(None, "model"), PartitionSpec()
    sharded = jax.shard_map(
        function,
        mesh=abstract_mesh(model=2),
        in_specs=(
            PartitionSpec(None, None, "model"),
            (Pages(whole, whole, heads, heads, whole, whole, 2),),
            whole,
            whole,
        ),
        out_specs=(PartitionSpec(None, None, "model"),) * 2,
    )
    assert kernels("triton", sharded, *avals) == 2
    rows = jax.vmap(lambda *row: function(*_batched(*row)), (0, _ROWS, 0, 0))
    q, (pages,), *at = avals
    assert kernels("triton", rows, q, pages, *at) == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 28, 64, 500])
def test_default_tiles_are_no_larger_than_the_queries_need_and_fit_a_multiprocessor(rows, head_dim, dtype):
    config, itemsize = default_config(rows, head_dim, 128, dtype), jnp.dtype(dtype).itemsize
    assert 16 <= config.queries <= max(16, 2 * rows - 1, 1)
    assert config.queries & (config.queries - 1) == 0
    assert (config.queries + 2 * config.keys) * head_dim * itemsize <= 227 * 1024


def test_refuses_what_it_does_not_take():
    (q, (pages,), *at), _ = _inputs((47,), (47,), [([[5]], [(16, 48)])])
    with pytest.raises(NotImplementedError, match=r"types \['bfloat16', 'float32'\]"):
        attend(q.astype(jnp.bfloat16), (pages,), *at)
    small = dataclasses.replace(pages, k=pages.k[:, :8], v=pages.v[:, :8])
    with pytest.raises(NotImplementedError, match="pages of 8: must be a power of two from 16"):
        attend(q, (small,), *at)
    odd = dataclasses.replace(pages, k=pages.k[..., :12], v=pages.v[..., :12])
    with pytest.raises(NotImplementedError, match="head dimension 12"):
        attend(q[..., :12], (odd,), *at)
