"""Paged attention against float64 NumPy on every backend: who sees what, in shared pages and ragged rows."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from implementations import implementation, on_every_backend
from random_pages import attend_to_pages, check_attention, write_pages

from tca_jax.pallas_kernels.paged_attention import paged_attention

PAGE, WINDOW = 16, 32

#: Rows' first and newest positions, and for each cache its kept tokens by row and head, and its windows by row.
CASES = {
    "a whole block": ([48], [63], 16, [([[7, 40]], [(16, 64)])]),
    "the first block, which nothing precedes": ([0], [15], 16, [([[0, 0]], [(0, 16)])]),
    "a query alone in the middle of a block": ([70], [70], 1, [([[0, 5]], [(32, 71)])]),
    "decoding rows of unequal age": (
        [23, 90, 0],
        [23, 90, 0],
        1,
        [([[5, 0], [16, 33], [0, 0]], [(0, 24), (48, 91), (0, 1)])],
    ),
    "an odd number of queries, two caches": (
        [83],
        [89],
        7,
        [([[33, 0]], [(48, 80)]), ([[0, 18]], [(80, 90)])],
    ),
    "later tokens of the block are unseen": ([96], [111], 5, [([[3, 1]], [(64, 112)])]),
    "blocks left of the window are unseen": ([96], [99], 4, [([[3, 1]], [(0, 100)])]),
    "ragged rows, of which one has no query": (
        [16, 50, 32],
        [31, 52, 31],
        16,
        [
            ([[5, 0], [16, 33], [1, 2]], [(0, 16), (16, 48), (0, 32)]),
            ([[0, 3], [17, 16], [1, 0]], [(16, 32), (48, 53), (32, 33)]),
        ],
    ),
    "rows that share a cache": (
        [70, 65, 64, 66],
        [70, 65, 64, 66],
        1,
        [([[20, 61]], [(32, 64)]), ([[0, 3], [17, 16], [1, 0], [2, 2]], [(64, 71), (64, 66), (64, 65), (64, 67)])],
    ),
}


def _case(
    first, newest, columns, caches, *, group=2, head_dim=16, outside=50.0, dtype=jnp.float32, seed=0, window=WINDOW
):
    rng = np.random.default_rng(seed)
    kv_heads = len(caches[0][0][0])
    options = {"page": PAGE, "head_dim": head_dim, "outside": outside, "dtype": dtype}
    written = [write_pages(rng, kept, windows, **options) for kept, windows in caches]
    q = jnp.asarray(rng.standard_normal((len(first), columns, kv_heads * group, head_dim)), dtype)
    expected = attend_to_pages(q, written, first, newest, page=PAGE, window=window)
    return (q, tuple(cache.pages for cache in written), jnp.array(first), jnp.array(newest)), expected


@on_every_backend("paged_attention")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_definition(case, backend):
    arguments, expected = _case(*case)
    check_attention(implementation("paged_attention", backend)(*arguments, window=WINDOW), expected)


@on_every_backend("paged_attention")
@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "tolerance"),
    [
        (1, 64, jnp.float32, 1e-5),
        (4, 128, jnp.bfloat16, 2e-2),
        (7, 64, jnp.bfloat16, 2e-2),
        (20, 16, jnp.float16, 5e-3),
    ],
)
@pytest.mark.parametrize("case", ["an odd number of queries, two caches", "decoding rows of unequal age"])
def test_groups_dimensions_and_types(case, group, head_dim, dtype, tolerance, backend):
    arguments, expected = _case(*CASES[case], group=group, head_dim=head_dim, dtype=dtype)
    out, lse = implementation("paged_attention", backend)(*arguments, window=WINDOW)
    assert out.dtype == dtype
    check_attention((out, lse), expected, tolerance)


@on_every_backend("paged_attention")
def test_queries_at_once_equal_decoding_one_by_one(backend):
    (q, caches, first, newest), _ = _case([83, 70], [89, 75], 7, [([[33, 0], [9, 4]], [(48, 90), (32, 76)])])
    attend = partial(implementation("paged_attention", backend), window=WINDOW)
    together = attend(q, caches, first, newest)
    for column in range(6):
        alone = attend(q[:, column : column + 1], caches, first + column, first + column)
        for actual, expected in zip(together, alone, strict=True):
            np.testing.assert_allclose(actual[:, column], expected[:, 0], atol=1e-5, rtol=1e-5)


def test_window_wider_than_all_that_is_held():
    first, newest, columns, caches = CASES["a query alone in the middle of a block"]
    arguments, _ = _case(first, newest, columns, caches)
    wide = paged_attention(*arguments, window=2**20)
    for actual, expected in zip(wide, paged_attention(*arguments, window=WINDOW), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_window_of_one_page():
    arguments, expected = _case(*CASES["decoding rows of unequal age"], window=PAGE)
    check_attention(paged_attention(*arguments, window=PAGE), expected)


def test_wrong_shapes_and_sizes_are_refused():
    (q, caches, first, newest), _ = _case(*CASES["rows that share a cache"])
    with pytest.raises(ValueError, match=r"caches is empty: must hold at least one Pages"):
        paged_attention(q, (), first, newest, window=WINDOW)
    with pytest.raises(ValueError, match=r"window = 24: must be a positive multiple of the page size, 16"):
        paged_attention(q, caches, first, newest, window=24)
    with pytest.raises(ValueError, match=r"q has 17 queries per row: must be at most the page size, 16"):
        paged_attention(jnp.repeat(q, 17, axis=1), caches, first, newest, window=WINDOW)
    with pytest.raises(ValueError, match=r"caches\[1\] has 4 rows: must divide the 3 rows of queries"):
        paged_attention(q[:3], caches, first[:3], newest[:3], window=WINDOW)
    broken = dataclasses.replace(caches[0], v=caches[0].v[1:])
    with pytest.raises(ValueError, match=r"caches\[0\].v has shape .*: must be \[P = "):
        paged_attention(q, (broken, caches[1]), first, newest, window=WINDOW)
