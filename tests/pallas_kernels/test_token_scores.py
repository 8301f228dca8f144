"""Token scores and block statistics against float64 on every backend."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import last_queries, poison, qkv, regions
from implementations import implementation, on_every_backend

from tca_jax.pallas_kernels.token_scores.triton import TokenScoresConfig


def _check(function, lengths, tokens, heads, kv_heads, head_dim, dtype, block_size):
    arrays = qkv(0, len(lengths), tokens, heads, kv_heads, head_dim, 2.5 * head_dim**-0.25)
    q, k, v = (np.asarray(jnp.asarray(x, dtype), np.float32) for x in arrays)
    keys, q_last = jnp.asarray(poison(k, lengths), dtype), jnp.asarray(last_queries(q, lengths), dtype)
    scores, mass, hhi = function(q_last, keys, jnp.array(lengths, jnp.int32), block_size=block_size)
    blocks = tokens // block_size
    assert mass.shape == hhi.shape == (len(lengths), kv_heads, blocks)
    for row, head, qs, ks, _ in regions(q, k, v, lengths):
        expected = np.zeros(tokens)
        expected[: len(ks)] = oracle.token_scores(qs[-1], ks)
        np.testing.assert_allclose(scores[row, head], expected, rtol=5e-5, atol=1e-9)
        parts = expected[: blocks * block_size].reshape(blocks, block_size)
        sums = parts.sum(axis=1)
        np.testing.assert_allclose(mass[row, head], sums, rtol=5e-5, atol=1e-9)
        shares = np.where(sums > 0, (parts**2).sum(axis=1) / np.where(sums > 0, sums, 1) ** 2, 1 / block_size)
        np.testing.assert_allclose(hhi[row, head], shares, rtol=1e-4)


@on_every_backend("token_scores")
@pytest.mark.parametrize(
    ("lengths", "tokens", "heads", "kv_heads", "head_dim", "dtype", "block_size"),
    [
        pytest.param((75, 1, 40), 75, 6, 2, 16, jnp.float32, 8, id="ragged, a tail past the blocks"),
        pytest.param((64, 33), 64, 7, 1, 64, jnp.bfloat16, 16, id="group of 7"),
        pytest.param((50,), 64, 4, 4, 128, jnp.float16, 32, id="padded"),
        pytest.param((5,), 5, 4, 1, 16, jnp.float32, 8, id="shorter than a block"),
        pytest.param((33,), 48, 20, 1, 16, jnp.float32, 1, id="blocks of one token"),
    ],
)
def test_equals_the_oracle(lengths, tokens, heads, kv_heads, head_dim, dtype, block_size, backend):
    function = implementation("token_scores", backend)
    _check(function, lengths, tokens, heads, kv_heads, head_dim, dtype, block_size)


def test_tile_sizes_do_not_matter():
    config = TokenScoresConfig(keys=16, chunk=32, stages=2, scores=32)
    function = partial(implementation("token_scores", "triton"), config=config)
    _check(function, (75, 1, 40), 75, 6, 2, 16, jnp.float32, 8)


@on_every_backend("token_scores")
def test_hhi_survives_scores_whose_squares_underflow(backend):
    k = np.zeros((1, 16, 1, 16), np.float32)
    k[0, 8:] = 60 / 4  # the first block's scores are exp(-60): their squares are not float32
    score = implementation("token_scores", backend)
    _, mass, hhi = score(jnp.ones((1, 1, 16)), jnp.asarray(k), jnp.array([16]), block_size=8)
    np.testing.assert_allclose(mass[0, 0, 0], np.exp(-60), rtol=1e-4)
    np.testing.assert_allclose(hhi[0, 0], [1 / 8, 1 / 8], rtol=1e-5)


def test_row_of_length_zero_has_no_scores():
    score = implementation("token_scores", "triton")
    scores, mass, hhi = score(jnp.ones((1, 1, 16)), jnp.ones((1, 16, 1, 16)), jnp.array([0]), block_size=8)
    assert not np.any(scores)
    assert not np.any(mass)
    np.testing.assert_allclose(hhi, np.full((1, 1, 2), 1 / 8))
