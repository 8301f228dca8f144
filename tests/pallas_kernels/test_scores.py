"""Token scores, observation scores, and block scores on every backend, against float64: groups, types, odd lengths."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison
from implementations import implementation, on_every_backend

from tca_jax.pallas_kernels.block_scores import triton
from tca_jax.pallas_kernels.block_scores.triton import BlockScoresConfig
from tca_jax.pallas_kernels.observation_scores import observation_scores
from tca_jax.pallas_kernels.token_scores import token_scores


def operands(lengths, tokens, heads, kv_heads, head_dim, dtype=jnp.float32, *, queries=None, scale=None):
    """Queries, all or the last, NaN where a row has none; keys, NaN past their length; lengths."""
    rng, scale = np.random.default_rng(0), scale or 2.5 * head_dim**-0.25
    q, k = (scale * rng.standard_normal((len(lengths), tokens, n, head_dim)) for n in (heads, kv_heads))
    if queries is None:
        q = poison(q, lengths)
    else:
        q = scale * rng.standard_normal((len(lengths), queries, heads, head_dim))
        for row, length in enumerate(lengths):
            q[row, : max(0, queries - length)] = np.nan
    return jnp.asarray(q, dtype), jnp.asarray(poison(k, lengths), dtype), jnp.array(lengths, jnp.int32)


def regions(q, k, lengths):
    """Yields (row, KV head, its queries `[n, G, d]`, its keys `[length, d]`) in float64, of rows with tokens."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    group = q.shape[2] // k.shape[2]
    for row, head in np.ndindex(len(k), k.shape[2]):
        if length := int(lengths[row]):
            yield row, head, q[row, :, head * group : (head + 1) * group], k[row, :length, head]


@pytest.mark.parametrize(
    ("sizes", "block_size"),
    [
        pytest.param(((75, 1, 40), 75, 6, 2, 16), 8, id="ragged, a tail past the blocks"),
        pytest.param(((64, 33), 64, 7, 1, 64, jnp.bfloat16), 16, id="group of 7"),
        pytest.param(((50,), 64, 4, 4, 128, jnp.float16), 32, id="padded"),
        pytest.param(((5,), 5, 4, 1, 16), 8, id="shorter than a block"),
        pytest.param(((33,), 48, 20, 1, 16), 1, id="blocks of one token"),
    ],
)
def test_token_scores_equal_the_oracle(sizes, block_size):
    q, k, lengths = operands(*sizes, queries=1)
    scores, mass, hhi = token_scores(q[:, 0], k, lengths, block_size=block_size)
    blocks = k.shape[1] // block_size
    assert mass.shape == hhi.shape == (len(k), k.shape[2], blocks)
    for row, head, queries, keys in regions(q, k, lengths):
        expected = np.zeros(k.shape[1])
        expected[: len(keys)] = oracle.token_scores(queries[0], keys)
        np.testing.assert_allclose(scores[row, head], expected, rtol=5e-5, atol=1e-9)
        parts = expected[: blocks * block_size].reshape(blocks, block_size)
        sums = parts.sum(axis=1)
        np.testing.assert_allclose(mass[row, head], sums, rtol=5e-5, atol=1e-9)
        shares = np.where(sums > 0, (parts**2).sum(axis=1) / np.where(sums > 0, sums, 1) ** 2, 1 / block_size)
        np.testing.assert_allclose(hhi[row, head], shares, rtol=1e-4)


def test_hhi_survives_scores_whose_squares_underflow():
    k = np.zeros((2, 16, 1, 16), np.float32)
    k[0, 8:] = 60 / 4  # the first block's scores are exp(-60): their squares are not float32
    _, mass, hhi = token_scores(jnp.ones((2, 1, 16)), jnp.asarray(k), jnp.array([16, 0]), block_size=8)
    np.testing.assert_allclose(mass[0, 0, 0], np.exp(-60), rtol=1e-4)
    np.testing.assert_allclose(hhi[:, 0], np.full((2, 2), 1 / 8), rtol=1e-5)
    assert not np.any(mass[1])  # a row without tokens


OBSERVED, SPREAD = 20, 4


def check_observed(sizes, *, queries=OBSERVED, spread=SPREAD, rtol=5e-5, scale=None):
    q, k, lengths = operands(*sizes, queries=queries, scale=scale)
    expected = np.zeros((len(k), k.shape[2], k.shape[1]))
    for row, head, own, keys in regions(q, k, lengths):
        expected[row, head, : len(keys)] = oracle.observation_scores(own, keys, spread)
    np.testing.assert_allclose(observation_scores(q, k, lengths, spread=spread), expected, rtol=rtol, atol=1e-9)


@pytest.mark.parametrize(
    ("sizes", "queries", "spread"),
    [
        # Longer than the observation, shorter, as long, off the tiles, nothing.
        (((75, 1, OBSERVED, 48, 19, 0), 75, 2, 2, 64, jnp.bfloat16), OBSERVED, SPREAD),
        (((75, 30, 11), 75, 6, 1, 16), OBSERVED, SPREAD),
        (((150, 64), 150, 7, 1, 64), 64, SPREAD),
        (((150, 64), 150, 4, 1, 128, jnp.bfloat16), 100, SPREAD),
        (((75, 19), 75, 2, 1, 16), 1, 1),
        (((30, 11), 30, 2, 1, 16), OBSERVED, 1000),
    ],
)
def test_observation_scores_equal_the_oracle(sizes, queries, spread):
    check_observed(sizes, queries=queries, spread=spread)
    if len(sizes) == 5:  # scores past the range of exp, in float32
        check_observed(sizes, queries=queries, spread=spread, rtol=2e-3, scale=25.0)


def test_score_reaches_the_tokens_that_follow():
    k = np.zeros((1, 48, 1, 16), np.float32)
    k[0, 21] = 8
    scores = observation_scores(jnp.ones((1, 3, 1, 16)), jnp.asarray(k), jnp.array([40]), spread=5, decay=0.5)[0, 0]
    np.testing.assert_allclose(scores[21:26], 0.5 ** np.arange(5), rtol=1e-5)
    assert max(float(scores[:21].max()), float(scores[26:].max())) < 1e-10
    assert not np.any(scores[40:])


def check_block_scores(function, sizes, block_size, stride, tolerance=1e-4, scale=None):
    """By the definition, a sampled query at a time `[B, Hkv, N, N]`; queries, and heads of keys, differ in size."""
    q, k, lengths = operands(*sizes, scale=scale)
    q *= np.random.default_rng(1).choice([0.1, 0.5, 1, 3], (*q.shape[:3], 1)).astype(q.dtype)
    k *= (5.0 ** -np.arange(k.shape[2]))[:, None].astype(k.dtype)
    blocks = -(-k.shape[1] // block_size)
    expected = np.zeros((len(k), k.shape[2], blocks, blocks))
    for row, head, queries, keys in regions(q, k, lengths):
        for tile in range(-(-len(keys) // block_size)):
            for end in range(tile * block_size + stride - 1, (tile + 1) * block_size, stride):
                position = min(end, len(keys) - 1)
                logits = queries[position] @ keys[: position + 1].T / np.sqrt(k.shape[-1])
                seen = np.pad(logits, ((0, 0), (0, blocks * block_size - position - 1)), constant_values=-np.inf)
                shares = oracle.softmax(seen.reshape(len(seen), blocks, block_size).max(axis=-1)).max(axis=0)
                expected[row, head, tile] = np.maximum(expected[row, head, tile], shares)
    scores = function(q, k, lengths, block_size=block_size, stride=stride)
    assert scores.dtype == jnp.float32
    assert float(scores.max()) <= 1 + 1e-5
    if tolerance < np.inf:
        np.testing.assert_allclose(scores, expected, rtol=tolerance, atol=max(1e-5, tolerance / 10))


@on_every_backend("block_scores")
@pytest.mark.parametrize(
    ("sizes", "block_size", "stride"),
    [
        # Off the block, one token, less than a stride, whole blocks, nothing.
        (((75, 1, 3, 48, 16, 17, 0), 75, 4, 2, 64, jnp.bfloat16), 16, 8),
        (((75, 16, 17), 75, 8, 2, 16), 16, 1),
        (((75, 1, 0), 75, 7, 1, 64), 16, 16),
        (((75, 47), 75, 6, 1, 16), 48, 16),
        (((393, 130), 393, 4, 1, 128, jnp.bfloat16), 128, 8),
    ],
)
def test_block_scores_equals_the_oracle(sizes, block_size, stride, backend):
    function, rounds = implementation("block_scores", backend), backend == "triton" and len(sizes) == 6
    check_block_scores(function, sizes, block_size, stride, tolerance=0.05 if rounds else 1e-4)
    if len(sizes) == 5:  # scores past the range of exp, in float32
        check_block_scores(function, sizes, block_size, stride, tolerance=2e-3, scale=25.0)


def test_xla_takes_any_block_size_and_head_dim():
    check_block_scores(implementation("block_scores", "xla"), ((75, 14), 75, 4, 2, 12), 6, 3)


@pytest.mark.parametrize(
    ("config", "block_size", "stride"),
    [
        pytest.param((3, 16, 4, 2), 16, 8, id="off the powers of two and off the number of tiles"),
        pytest.param((4, 16, 4, 3), 32, 8, id="blocks of two tiles of keys"),
        pytest.param((16, 32, 8, 3), 32, 16, id="more tiles than there are"),
    ],
)
def test_block_scores_in_other_tiles(config, block_size, stride):
    function = partial(implementation("block_scores", "triton"), config=BlockScoresConfig(*config))
    check_block_scores(function, ((150, 82, 33, 3), 150, 6, 2, 16), block_size, stride)
    for scale, tolerance in ((None, 0.05), (1e-20, 0.05), (16, np.inf), (300, np.inf)):  # equal logits; large ones
        sizes = (150, 82, 33, 3), 150, 6, 2, 64, jnp.bfloat16
        check_block_scores(function, sizes, block_size, stride, tolerance, scale)


def test_parts_of_the_tiles_do_not_matter(monkeypatch):
    monkeypatch.setattr(triton, "_MOST_BYTES", 4 * 2 * 2 * 8 * 16 * 3)  # three programs of 16 rows
    jax.clear_caches()
    function, sizes = implementation("block_scores", "triton"), ((115, 40), 115, 4, 2, 16)
    function = partial(function, config=BlockScoresConfig(1, 16, 4, 1))
    assert "length=3" in str(jax.make_jaxpr(partial(function, block_size=16, stride=8))(*operands(*sizes)))
    check_block_scores(function, sizes, 16, 8)
    jax.clear_caches()
