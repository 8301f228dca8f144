"""Decoding through Mosaic: interpreted anywhere, on a Hopper GPU, lowered for CUDA, and what it refuses.

Interpret mode does not know all of Mosaic, so `interpreted` gives it other words for the same: layouts of registers are
left out, and products, of which one operand is in registers, are those of `jnp`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import unchecked
from cuda_lowering import kernels
from random_pages import attend_to_pages, check_attention, write_pages

from tca_jax.pallas_kernels.backends import can_run
from tca_jax.pallas_kernels.kv import CODES, Pages, empty
from tca_jax.pallas_kernels.paged_attention import mosaic, mosaic_shares
from tca_jax.pallas_kernels.paged_attention.mosaic_shares import MosaicPagedConfig

needs_hopper = pytest.mark.skipif(not can_run("mosaic"), reason="needs a Hopper GPU")

#: Rows' first and newest positions, and for each cache its kept tokens by row and head, and its windows by row, which
#: begin on pages of any size.
CASES = {
    "an odd length": ([350], [350], [([[70, 9]], [(256, 351)])]),
    "rows that are ragged, or have no query or no tokens before it": (
        [230, -1, 5, 64],
        [230, -2, 5, 63],
        [([[130, 9], [64, 0], [0, 0], [3, 3]], [(0, 231), (0, 0), (0, 6), (0, 64)])],
    ),
    "rows that share a cache": (
        [263, 257, 256],
        [263, 257, 256],
        [([[200, 61]], [(0, 256)]), ([[0, 3], [17, 64], [65, 0]], [(256, 264), (256, 258), (256, 257)])],
    ),
    "what lies left of the window or behind the query": ([200], [203], [([[0, 5]], [(0, 210)])]),
}


def _case(name, group, head_dim, dtype, *, page=64, window=128):
    first, newest, caches = CASES[name]
    rng = np.random.default_rng(0)
    options = {"page": page, "head_dim": head_dim, "outside": 50.0, "dtype": dtype}
    written = [write_pages(rng, kept, windows, **options) for kept, windows in caches]
    heads = written[0].pages.kept.shape[1] * group
    q = jnp.asarray(rng.standard_normal((len(first), 1, heads, head_dim)), dtype)
    expected = attend_to_pages(q, written, first, newest, page=page, window=window)
    return (q, tuple(cache.pages for cache in written), jnp.array(first), jnp.array(newest)), expected


class _Transposed:
    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, _):
        return self.ref[...].T


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels in interpret mode; nothing that was traced so outlives the test."""
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")

    def multiply(a, b, _):
        return jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def iotas(shape):
        return tuple(jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))

    for name, other in {"_multiply": multiply, "iotas": iotas, "transposed": _Transposed}.items():
        monkeypatch.setattr(mosaic, name, other)
    monkeypatch.setattr(mosaic.plgpu, "layout_cast", lambda x, layout: x)
    function = unchecked(mosaic.paged_attention)
    return jax.jit(
        functools.partial(function, interpret=params.InterpretGPUParams()), static_argnames=("window", "config")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "group", "head_dim", "dtype", "config"),
    [
        ("an odd length", 4, 64, jnp.bfloat16, MosaicPagedConfig(64, 2, programs=2, merged=2)),
        (
            "rows that are ragged, or have no query or no tokens before it",
            7,
            64,
            jnp.float16,
            MosaicPagedConfig(64, 1, programs=3, merged=2),
        ),
        ("rows that share a cache", 1, 64, jnp.bfloat16, MosaicPagedConfig(64, 3, programs=8, merged=4)),
        ("what lies left of the window or behind the query", 16, 128, jnp.bfloat16, MosaicPagedConfig(64, 2, 2, 1)),
    ],
)
def test_interpreted_it_equals_the_definition(name, group, head_dim, dtype, config, interpreted):
    arguments, expected = _case(name, group, head_dim, dtype)
    out, lse = interpreted(*arguments, window=128, config=config)
    assert out.dtype == dtype
    check_attention((out, lse), expected, 1e-2)


def test_loops_over_rows_deal_tiles_as_unrolled_ones(monkeypatch):
    plan = mosaic_shares.Plan(6, 2, 1, 64, 128, (1,), MosaicPagedConfig(64, 1, programs=5))
    tokens = np.random.default_rng(0).integers(0, 300, (6, 2))
    table = jnp.asarray(tokens, jnp.int32)

    def runs(row):
        return lambda head: [mosaic_shares.Run(0, row, table[row, head], 0)]

    tiles = -(-tokens.ravel() // 64)
    ends = np.cumsum(tiles)
    for unrolled in (64, 4, 1):
        monkeypatch.setattr(mosaic_shares, "_UNROLLED", unrolled)
        shares = [[int(x) for x in mosaic_shares.share_of(plan, runs, jnp.int32(program))] for program in range(5)]
        for program, (begin, end, region, base) in enumerate(shares):
            assert (begin, end) == (ends[-1] * program // 5, ends[-1] * (program + 1) // 5)
            assert base <= begin < base + tiles[region]
            assert base == ends[region] - tiles[region]


@needs_hopper
@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "page", "tile", "stages"),
    [
        (1, 64, jnp.float16, 64, 64, 6),
        (4, 128, jnp.bfloat16, 128, 128, 3),
        (7, 128, jnp.bfloat16, 128, 64, 6),
        (8, 64, jnp.bfloat16, 256, 128, 6),
        (16, 128, jnp.float16, 256, 64, 1),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name, group, head_dim, dtype, page, tile, stages):
    arguments, expected = _case(name, group, head_dim, dtype, page=page, window=256)
    for programs in (1, 7, 132):
        config = MosaicPagedConfig(tile, stages, programs)
        check_attention(mosaic.paged_attention(*arguments, window=256, config=config), expected, 2e-2)


def _avals(batch, heads, kv_heads, head_dim, *, page=128, dtype=jnp.bfloat16, queries=1, caches=1):
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pool = jax.eval_shape(lambda: empty((1600, page, head_dim), dtype))
    pages = Pages(
        pool, pool, integers((batch, kv_heads, 193)), integers((batch, kv_heads)), *[integers((batch,))] * 2, 9
    )
    q = jax.ShapeDtypeStruct((batch, queries, heads, head_dim), jnp.bfloat16 if dtype == CODES else dtype)
    return q, (pages,) * caches, integers((batch,)), integers((batch,))


@pytest.mark.parametrize(
    "avals",
    [
        pytest.param(_avals(1, 32, 8, 128), id="one row"),
        pytest.param(_avals(8, 32, 8, 128, caches=2), id="two caches"),
        pytest.param(_avals(3, 28, 4, 64, dtype=jnp.float16), id="a group of 7"),
        pytest.param(_avals(1, 7, 1, 128, page=64), id="fewer heads than a tile has rows"),
        pytest.param(_avals(32, 8, 8, 128, page=256), id="more regions than are unrolled"),
    ],
)
def test_lowers_for_cuda_as_two_kernels(avals):
    assert kernels("mosaic", functools.partial(mosaic.paged_attention, window=4096), *avals) == 2


@pytest.mark.parametrize("page", [64, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_default_tiles_divide_the_page_and_fit_the_shared_memory(page, head_dim):
    config = mosaic.default_config(page, head_dim)
    assert page % config.tile == 0
    assert 4 * config.tile * head_dim * config.stages == 192 * 1024


@pytest.mark.parametrize(
    ("avals", "message"),
    [
        (_avals(1, 8, 2, 128, queries=2), "takes one query a row, not 2"),
        (_avals(1, 8, 2, 128, dtype=jnp.float32), "takes all in bfloat16 or in float16, not .*float32"),
        (_avals(1, 8, 2, 128, dtype=CODES), "takes all in bfloat16 or in float16, not .*float8_e4m3fn"),
        (_avals(1, 8, 2, 256), "not d = 256, 4 query heads"),
        (_avals(1, 8, 2, 128, page=32), "and pages of 32"),
        (_avals(1, 57, 1, 128), "57 query heads a KV head"),
    ],
)
def test_what_it_cannot_do_is_refused(avals, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(unchecked(mosaic.paged_attention), window=4096), *avals)
