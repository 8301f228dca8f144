"""The selection arithmetic: block orders, budgets by rank, best tokens of a block."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tca_jax.methods.config import TCAConfig
from tca_jax.methods.selection import block_budgets, block_density
from tca_jax.pallas_kernels.select_tokens import selection_mask
from tca_jax.pallas_kernels.token_scores import TokenScores

CONFIG = TCAConfig(block_size=8, window=16)


def _scored(scores, block_size=8):
    """Statistics of [B, Hkv, L] scores, as `token_scores` makes them."""
    scores = np.asarray(scores, np.float32)
    blocks = scores[..., : scores.shape[-1] // block_size * block_size]
    blocks = blocks.reshape(*scores.shape[:2], -1, block_size)
    mass = blocks.sum(axis=-1)
    hhi = np.square(blocks / np.where(mass > 0, mass, 1)[..., None]).sum(axis=-1)
    return TokenScores(*map(jnp.asarray, (scores, mass, np.where(mass > 0, hhi, 1 / block_size).astype(np.float32))))


def test_ranked_blocks_are_those_that_can_leave_the_window():
    lengths = jnp.array([1, 23, 24, 31, 32, 100])
    np.testing.assert_array_equal(CONFIG.num_ranked_blocks(lengths), [0, 0, 1, 1, 2, 10])
    np.testing.assert_array_equal(
        CONFIG.num_ranked_blocks(lengths), [CONFIG.num_ranked_blocks(int(x)) for x in lengths]
    )


@pytest.mark.parametrize("density", ["concentration", "paper"])
@pytest.mark.parametrize("index", ["hhi", "entropy"])
def test_density_equals_the_oracle(density, index):
    config = TCAConfig(block_size=8, window=16, density=density, index=index, alpha=0.3)
    scores = np.random.default_rng(0).dirichlet(np.full(70, 0.2), size=(2, 3))
    out = block_density(_scored(scores), jnp.array([6, 6]), config)
    for row in range(2):
        for head in range(3):
            np.testing.assert_allclose(out[row, head, :6], oracle.density(scores[row, head], config), rtol=1e-4)
    assert np.all(np.isinf(out[..., 6:]))


def test_paper_order_is_the_other_way_round_for_concentrated_blocks():
    peaked, flat = [0.5] + [0.0] * 7, [0.0625] * 8  # the same mass
    scored = _scored([[peaked + flat + [0.0] * 16]])
    for density, first in (("concentration", 1), ("paper", 0)):  # the index of the lowest
        config = TCAConfig(block_size=8, window=16, density=density, alpha=0.5)
        assert int(jnp.argmin(block_density(scored, jnp.array([2]), config)[0, 0])) == first


def test_index_of_a_massless_block_is_that_of_a_flat_one():
    scored = _scored(np.zeros((1, 1, 32)))
    for index, expected in (("hhi", 0.1 / 8), ("entropy", 0.0)):
        config = TCAConfig(block_size=8, window=16, index=index)
        np.testing.assert_allclose(block_density(scored, jnp.array([2]), config)[0, 0, :2], expected, rtol=1e-6)


def test_blocks_of_one_token_are_fully_concentrated():
    scored = _scored(np.full((1, 1, 4), 0.25), block_size=1)
    for index in ("hhi", "entropy"):
        config = TCAConfig(block_size=1, window=1, index=index, alpha=1.0)
        np.testing.assert_allclose(block_density(scored, jnp.array([3]), config)[0, 0, :3], 1.0)


def test_random_order_depends_on_seed_and_head_alone():
    def draw(batch, blocks, seed):
        config = TCAConfig(block_size=8, window=8, density="random", seed=seed)
        scored = _scored(np.zeros((batch, 2, 8 * blocks)))
        return np.asarray(block_density(scored, jnp.full(batch, 5), config))[..., :5]

    one = draw(1, 6, seed=0)
    np.testing.assert_array_equal(draw(2, 9, seed=0), np.concatenate([one, one]))
    assert not np.array_equal(one, draw(1, 6, seed=1))
    assert not np.array_equal(one[0, 0], one[0, 1])
    assert len(np.unique(one)) == one.size


def test_lowest_density_gets_the_smallest_budget_and_ties_go_to_the_lower_block():
    density = jnp.array([[[0.3, 0.1, 0.1, 0.2, 0.0, 0.0]]])
    counts = jnp.array([[[1, 1, 1, 1]]])  # Psi = 1, 2, 4, 8 over the first four blocks
    np.testing.assert_array_equal(block_budgets(density, jnp.array([4]), counts)[0, 0], [8, 1, 2, 4, 0, 0])


def test_no_ranked_block_gets_no_budget():
    budgets = block_budgets(jnp.zeros((1, 1, 3)), jnp.array([0]), jnp.zeros((1, 1, 4), jnp.int32))
    np.testing.assert_array_equal(budgets, np.zeros((1, 1, 3)))


@settings(max_examples=30, deadline=None, database=None)
@given(seed=st.integers(0, 2**32 - 1), levels=st.integers(1, 20))
def test_mask_keeps_the_best_of_each_block_lowest_position_first(seed, levels):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, (2, 2, 37)).astype(np.float32)  # many ties
    budgets = rng.integers(0, 9, (2, 2, 4)).astype(np.int32)
    expected = np.zeros((2, 2, 37), bool)
    for row, head, block in np.ndindex(2, 2, 4):
        start = 8 * block
        best = np.argsort(-scores[row, head, start : start + 8], kind="stable")
        expected[row, head, start + best[: budgets[row, head, block]]] = True
    np.testing.assert_array_equal(selection_mask(jnp.asarray(scores), jnp.asarray(budgets), block_size=8), expected)
