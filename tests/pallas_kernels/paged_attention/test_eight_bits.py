"""Keys and values in eight bits: what they hold, and attention to pages of them on every backend."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import kernels
from implementations import implementation, on_every_backend
from random_pages import attend_to_pages, check_attention, write_pages

from tca_jax.pallas_kernels.kv import CODES, UNPACKED, EightBits, Pages, decode, empty, encode, num_bytes, unpack
from tca_jax.pallas_kernels.paged_attention import triton

PAGE, WINDOW = 16, 32
NOTHING = empty((1, 2), CODES)
#: First and newest positions, queries of a row, and for each cache kept tokens and windows.
CASES = {
    "decoding rows of unequal age": ([23, 90], [23, 90], 1, [([[5, 0], [16, 33]], [(0, 24), (48, 91)])]),
    "some queries, two caches": ([83], [89], 7, [([[33, 0]], [(48, 80)]), ([[0, 18]], [(80, 90)])]),
    "a whole block": ([48], [63], 16, [([[7, 40]], [(16, 64)])]),
}


def rounded(x):
    return np.asarray(decode(encode(jnp.asarray(x, jnp.float32), NOTHING), jnp.float32), np.float64)


def test_vectors_of_any_size_lose_a_sixteenth_at_most_and_their_largest_entries_fill_the_codes():
    sizes = 10.0 ** jnp.arange(-20, 21, 2)
    x = jax.random.normal(jax.random.key(0), (21, 64)) * sizes[:, None]
    stored = encode(x, NOTHING)
    codes = np.concatenate([np.asarray(half, np.float32) for half in unpack(stored.words)], axis=1) * 2.0**UNPACKED
    largest = np.abs(codes).max(axis=1)
    assert ((largest > 208) & (largest <= 448)).all()
    error = np.abs(rounded(x) - np.asarray(x, np.float64))
    assert (error <= np.maximum(np.abs(x) / 16, np.abs(x).max(axis=1, keepdims=True) * 2.0**-17)).all()
    powers = jnp.array([[448.0, 1.0], [449.0, 1.0], [0.875, 0.0], [0.0, 0.0]])
    assert encode(powers, NOTHING).exponents.tolist()[:3] == [0, 1, -9]
    np.testing.assert_array_equal(rounded(powers)[[0, 2, 3]], powers[jnp.array([0, 2, 3])])


def test_to_decode_and_to_encode_again_changes_nothing():
    x = decode(encode(jax.random.normal(jax.random.key(1), (4096, 16)), NOTHING), jnp.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        again = encode(x.astype(dtype), NOTHING)
        np.testing.assert_array_equal(decode(again, jnp.float32), x)


def test_an_array_stays_one_in_its_own_dtype():
    x = jnp.ones((2, 3))
    assert encode(x, jnp.zeros((), jnp.bfloat16)).dtype == jnp.bfloat16
    assert decode(x, jnp.float16).dtype == jnp.float16
    assert num_bytes(10, 128, jnp.bfloat16) == 2560
    assert num_bytes(10, 128, CODES) == sum(leaf.nbytes for leaf in jax.tree.leaves(empty((10, 128), CODES)))


def case(first, newest, columns, caches, *, group=2, head_dim=16, dtype=jnp.float32, seed=0, plain=()):
    """Arguments of `paged_attention` and what they give; caches of numbers `plain` stay in 16 or 32 bits."""
    rng = np.random.default_rng(seed)
    options = {"page": PAGE, "head_dim": head_dim, "outside": 50.0, "dtype": np.float32}
    written = [write_pages(rng, kept, windows, **options) for kept, windows in caches]
    for number, cache in enumerate(written):
        pages = cache.pages
        # Vectors of different sizes: the values' first, which are averaged, differ most.
        sizes = jnp.exp2(jnp.asarray(rng.integers(-6, 4, pages.k.shape[:2]), jnp.float32))[..., None]
        k, v = pages.k, pages.v * sizes
        if number in plain:
            k, v = k.astype(dtype), v.astype(dtype)
        else:
            k, v = (encode(x, NOTHING) for x in (k, v))
        cache.pages = dataclasses.replace(pages, k=k, v=v)
        seen_k, seen_v = (np.asarray(decode(x, jnp.float32), np.float64) for x in (k, v))
        table, c = np.asarray(pages.table), pages.kept_columns
        for (row, head), tokens in cache.kept.items():
            for i in range(tokens.shape[1]):
                where = table[row, head, i // PAGE], i % PAGE
                tokens[:, i] = seen_k[where], seen_v[where]
        for (row, head), tokens in cache.window.items():
            start = int(pages.start[row])
            for p in tokens:
                where = table[row, head, c + (p - start) // PAGE], p % PAGE
                tokens[p] = np.stack([seen_k[where], seen_v[where]])
    kv_heads = len(caches[0][0][0])
    q = jnp.asarray(rng.standard_normal((len(first), columns, kv_heads * group, head_dim)), dtype)
    expected = attend_to_pages(q, written, first, newest, page=PAGE, window=WINDOW)
    return (q, tuple(cache.pages for cache in written), jnp.array(first), jnp.array(newest)), expected


@on_every_backend("paged_attention")
@pytest.mark.parametrize(
    ("name", "group", "head_dim", "dtype", "tolerance"),
    [
        ("decoding rows of unequal age", 1, 64, jnp.float32, 2e-5),
        ("decoding rows of unequal age", 4, 128, jnp.bfloat16, 2e-2),
        ("some queries, two caches", 7, 64, jnp.float16, 5e-3),
        ("a whole block", 4, 128, jnp.bfloat16, 2e-2),
        ("a whole block", 1, 64, jnp.float32, 2e-5),
    ],
)
def test_attention_is_to_the_numbers_that_are_stored(name, group, head_dim, dtype, tolerance, backend):
    arguments, expected = case(*CASES[name], group=group, head_dim=head_dim, dtype=dtype)
    out, lse = implementation("paged_attention", backend)(*arguments, window=WINDOW)
    assert out.dtype == dtype
    check_attention((out, lse), expected, tolerance)


@on_every_backend("paged_attention")
def test_a_cache_in_eight_bits_beside_one_that_is_not(backend):
    arguments, expected = case(*CASES["some queries, two caches"], head_dim=32, plain=(1,))
    assert isinstance(arguments[1][0].k, EightBits)
    assert not isinstance(arguments[1][1].k, EightBits)
    check_attention(implementation("paged_attention", backend)(*arguments, window=WINDOW), expected, 2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("queries", [1, 128])
def test_lowers_for_cuda_as_two_kernels(queries, dtype):
    integers = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pool = jax.eval_shape(lambda: empty((1600, 128, 128), CODES))
    pages = Pages(pool, pool, integers((1, 8, 193)), integers((1, 8)), integers((1,)), integers((1,)), 160)
    q = jax.ShapeDtypeStruct((1, queries, 32, 128), dtype)
    function = partial(triton.paged_attention, window=4096)
    assert kernels("triton", function, q, (pages,), integers((1,)), integers((1,))) == 2
