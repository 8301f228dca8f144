"""Paged attention against float64 on every backend: who sees what, shared pages, ragged rows, eight bits, splits."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import implementation, on_every_backend
from random_pages import attend_to_pages, check_attention, write_pages

from tca_jax.pallas_kernels.kv import CODES, decode, empty, encode
from tca_jax.pallas_kernels.paged_attention.chunks import PagedConfig

PAGE, WINDOW = 16, 32
#: Rows' first and newest positions, queries a row, and for each cache kept tokens by row and head, and windows by row.
DECODING = (
    [23, 90, 0, 70],
    [23, 90, 0, 70],
    1,
    [([[5, 0], [16, 33], [0, 0], [0, 5]], [(0, 24), (48, 91), (0, 1), (32, 71)])],
)
SOME = ([83], [89], 7, [([[33, 0]], [(48, 80)]), ([[0, 18]], [(80, 90)])])
BLOCK = ([48], [63], 16, [([[7, 40]], [(16, 64)])])
SHARED = (
    [70, 65, 64, 66],
    [70, 65, 64, 66],
    1,
    [([[20, 61]], [(32, 64)]), ([[0, 3], [17, 16], [1, 0], [2, 2]], [(64, 71), (64, 66), (64, 65), (64, 67)])],
)
#: A block in the middle, the first one, a part of one, and a row without a query.
BLOCKS = (
    [48, 0, 50, 32],
    [63, 15, 52, 31],
    16,
    [([[7, 40], [0, 0], [16, 33], [1, 2]], [(16, 64), (0, 16), (16, 53), (0, 33)])],
)
#: Of a block, later tokens are there; of a window, blocks left of it.
UNSEEN = ([96, 96], [111, 99], 5, [([[3, 1], [3, 1]], [(64, 112), (0, 100)])])


def _case(
    first, newest, queries, caches, *, group=2, dtype=jnp.float32, eight_bits=(), window=WINDOW, change=None, **options
):
    """Arguments of `paged_attention` and what they give; of the caches numbered `eight_bits`, in eight bits."""
    rng = np.random.default_rng(0)
    options = {"page": PAGE, "head_dim": 16, "outside": 50.0, **options}
    written = [
        write_pages(rng, *cache, **options, dtype=np.float32 if number in eight_bits else dtype)
        for number, cache in enumerate(caches)
    ]
    for number in eight_bits:
        _round(rng, written[number])
    if change:
        change(written[0])
    heads = len(caches[0][0][0]) * group
    q = jnp.asarray(rng.standard_normal((len(first), queries, heads, options["head_dim"])), dtype)
    expected = attend_to_pages(q, written, first, newest, page=options["page"], window=window)
    return (q, tuple(cache.pages for cache in written), jnp.array(first), jnp.array(newest)), expected


def _round(rng, cache):
    """Puts a cache in eight bits: vectors of different sizes, the values' most, which are averaged."""
    pages, page = cache.pages, cache.pages.page_size
    sizes = jnp.exp2(jnp.asarray(rng.integers(-6, 4, pages.k.shape[:2]), jnp.float32))[..., None]
    k, v = (encode(x, empty((1, 2), CODES)) for x in (pages.k, pages.v * sizes))
    cache.pages = dataclasses.replace(pages, k=k, v=v)
    seen = np.stack([np.asarray(decode(x, jnp.float32), np.float64) for x in (k, v)])
    table, c = np.asarray(pages.table), pages.kept_columns
    for at, tokens in cache.kept.items():
        places = np.arange(tokens.shape[1])
        tokens[:] = seen[:, table[at][places // page], places % page]
    for (row, head), tokens in cache.window.items():
        for p in tokens:
            tokens[p] = seen[:, table[row, head, c + (p - int(pages.start[row])) // page], p % page]


@on_every_backend("paged_attention")
@pytest.mark.parametrize(
    ("case", "eight_bits", "group", "head_dim", "dtype", "tolerance"),
    [
        (DECODING, (), 4, 128, jnp.bfloat16, 2e-2),
        (DECODING, (0,), 1, 64, jnp.float32, 2e-5),
        (SOME, (), 7, 64, jnp.float32, 1e-5),
        (SOME, (0, 1), 7, 64, jnp.float16, 5e-3),
        (BLOCKS, (0,), 6, 64, jnp.bfloat16, 2e-2),
        (BLOCKS, (), 2, 16, jnp.float32, 1e-5),
        (SHARED, (), 20, 16, jnp.float16, 5e-3),
        (UNSEEN, (), 2, 16, jnp.float32, 1e-5),
    ],
)
def test_equals_the_oracle(case, eight_bits, group, head_dim, dtype, tolerance, backend):
    arguments, expected = _case(*case, group=group, head_dim=head_dim, dtype=dtype, eight_bits=eight_bits)
    out, lse = implementation("paged_attention", backend)(*arguments, window=WINDOW)
    assert out.dtype == dtype
    check_attention((out, lse), expected, tolerance)


@on_every_backend("paged_attention")
@pytest.mark.parametrize(("window", "same_as"), [(PAGE, PAGE), (2**20, 96)])  # the latter past all tokens
def test_a_window_is_of_any_size(window, same_as, backend):
    arguments, expected = _case(*DECODING, window=same_as)
    check_attention(implementation("paged_attention", backend)(*arguments, window=window), expected)


@on_every_backend("paged_attention")
@pytest.mark.parametrize(("case", "eight_bits"), [(SHARED, ()), (BLOCKS, (0,))])
def test_kept_tokens_have_a_bias(case, eight_bits, backend):
    rng = np.random.default_rng(1)

    def biased(cache):
        pages = cache.pages
        shape = (*pages.kept.shape, pages.kept_columns * PAGE)
        bias = np.where(rng.random(shape) < 0.8, rng.normal(size=shape), -1e30).astype(np.float32)
        past = np.arange(shape[-1]) >= np.asarray(pages.kept)[..., None]
        cache.pages = dataclasses.replace(pages, bias=jnp.asarray(np.where(past, np.nan, bias)))

    options = {"head_dim": 32} if eight_bits else {}
    (q, caches, *rest), expected = _case(*case, eight_bits=eight_bits, change=biased, **options)
    check_attention(implementation("paged_attention", backend)(q, caches, *rest, window=WINDOW), expected, 2e-5)
    caches = tuple(map(_among_others, caches))
    check_attention(implementation("paged_attention", backend)(q, caches, *rest, window=WINDOW), expected, 2e-5)


def _among_others(pages):
    """The same cache, whose rows are the second of three parts of its arrays."""
    parts = pages.table, pages.kept, pages.bias
    table, kept, bias = jax.tree.map(lambda x: jnp.concatenate([x[::-1, ::-1], x, 0 * x]), parts)
    return dataclasses.replace(pages, table=table, kept=kept, bias=bias, part=jnp.int32(1))


SMALL = PagedConfig(queries=16, keys=16, programs=24, warps=4, stages=2, merged=4)
attend = partial(implementation("paged_attention", "triton"), window=WINDOW)
LONG = [([[130, 9]], [(48, 80)]), ([[0, 50]], [(80, 91)])]


@pytest.mark.parametrize(
    ("case", "config", "options"),
    [
        pytest.param(([90], [90], 1, LONG), None, {}, id="the default"),
        pytest.param(([90], [90], 1, LONG), PagedConfig(16, 16, 1, 4, 2), {}, id="a chunk a region"),
        pytest.param(([83], [90], 8, LONG), PagedConfig(16, 16, 1000, 4, 2, merged=2), {}, id="a chunk a tile"),
        # 7, 7 and 4 tiles: in threes, they make 8 chunks.
        pytest.param(([0], [0], 1, [([[96, 96, 48]], [(0, 1)])]), PagedConfig(16, 16, 6, 4, 2), {}, id="remainders"),
        pytest.param(
            ([128], [134], 7, [([[70, 3]], [(64, 135)])]), SMALL, {"page": 64, "window": 64}, id="tiles within pages"
        ),
    ],
)
def test_splits_do_not_matter_and_read_nothing_else(case, config, options):
    arguments, expected = _case(*case, outside=np.nan, **options)
    function = implementation("paged_attention", "triton")
    check_attention(function(*arguments, config=config, window=options.get("window", WINDOW)), expected)


def test_row_without_a_query_reads_nothing():
    caches = [([[5, 9], [16, 33]], [(16, 50), (16, 52)])]
    (q, (pages,), *at), expected = _case([48, 52], [49, 51], 4, caches, outside=np.nan)
    lost = pages.v.at[pages.table[1].reshape(-1)].set(jnp.nan)  # were they read, they would spread
    check_attention(attend(q, (dataclasses.replace(pages, v=lost),), *at, config=SMALL), expected)


def test_large_scores_leave_no_trace_of_masked_tokens():
    (q, (pages,), *at), _ = _case(*BLOCK, outside=0.0)
    single = attend(q[:, 3:4] * 300, (pages,), at[0] + 3, at[0] + 3, config=SMALL)
    for whole, alone in zip(attend(q * 300, (pages,), *at, config=SMALL), single, strict=True):
        np.testing.assert_allclose(whole[:, 3], alone[:, 0], atol=1e-5, rtol=1e-5)
