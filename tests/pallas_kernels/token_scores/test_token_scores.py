"""Token scores and block statistics against the oracle."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison, qkv, regions, unchecked
from implementations import implementation, on_every_backend

from tca_jax.pallas_kernels.token_scores import TokenScores, token_scores

LENGTHS = np.array([75, 1, 40], np.int32)


@on_every_backend("token_scores")
@pytest.mark.parametrize(("heads", "dtype"), [(7, jnp.float32), (14, jnp.bfloat16)])
def test_scores_mass_and_hhi_equal_the_oracle(heads, dtype, backend):
    q, k, v = (np.asarray(jnp.asarray(x, dtype), np.float32) for x in qkv(0, 3, 75, heads, 7, 16))
    q_last = jnp.asarray(q[np.arange(3), LENGTHS - 1], dtype)
    score = implementation("token_scores", backend)
    scored = TokenScores(*score(q_last, jnp.asarray(poison(k, LENGTHS), dtype), jnp.asarray(LENGTHS), block_size=8))
    for row, head, qs, ks, _ in regions(q, k, v, LENGTHS):
        expected = np.zeros(75)
        expected[: len(ks)] = oracle.token_scores(qs[-1], ks)
        np.testing.assert_allclose(scored.scores[row, head], expected, rtol=2e-5, atol=1e-9)
        blocks = expected[:72].reshape(9, 8)
        mass = blocks.sum(axis=1)
        np.testing.assert_allclose(scored.mass[row, head], mass, rtol=2e-5, atol=1e-9)
        hhi = np.where(mass > 0, (blocks**2).sum(axis=1) / np.where(mass > 0, mass, 1) ** 2, 1 / 8)
        np.testing.assert_allclose(scored.hhi[row, head], hhi, rtol=5e-5)


def test_hhi_survives_scores_whose_squares_underflow():
    k = np.zeros((1, 16, 1, 1), np.float32)
    k[0, 8:, 0, 0] = 60  # the first block's scores are exp(-60): their squares are not float32
    scored = token_scores(jnp.ones((1, 1, 1)), jnp.asarray(k), jnp.array([16]), block_size=8)
    np.testing.assert_allclose(scored.mass[0, 0, 0], np.exp(-60), rtol=1e-4)
    np.testing.assert_allclose(scored.hhi[0, 0], [1 / 8, 1 / 8], rtol=1e-5)


def test_prompt_shorter_than_a_block_has_no_block_statistics():
    scored = token_scores(jnp.ones((1, 2, 4)), jnp.ones((1, 5, 1, 4)), jnp.array([5]), block_size=8)
    assert scored.mass.shape == scored.hhi.shape == (1, 1, 0)
    np.testing.assert_allclose(scored.scores, np.full((1, 1, 5), 0.2), rtol=1e-6)


def test_shapes_and_blocks_are_checked():
    with pytest.raises(ValueError, match=r"k has shape \(1, 5, 1, 3\)"):
        unchecked(token_scores)(jnp.ones((1, 2, 4)), jnp.ones((1, 5, 1, 3)), jnp.array([5]), block_size=8)
    with pytest.raises(ValueError, match="block_size = 0"):
        token_scores(jnp.ones((1, 2, 4)), jnp.ones((1, 5, 1, 4)), jnp.array([5]), block_size=0)
