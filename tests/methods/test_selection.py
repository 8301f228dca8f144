"""Candidate budgets (Eq. 4 and 7), block orders, and the reserve, against the float64 oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import observed_queries, qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import kept_tokens, read_layer

import tca_jax
from tca_jax import methods
from tca_jax.engine.cache import CacheLayout
from tca_jax.methods.base import Heads
from tca_jax.methods.candidates import (
    budget_counts,
    candidate_budgets,
    candidate_distributions,
    eviction_budgets,
    kept_share,
    region_capacity,
)
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.selection import block_density
from tca_jax.pallas_kernels.select_tokens import selection_mask
from tca_jax.pallas_kernels.token_scores import TokenScores

DEFAULT = TCAConfig()
configs = st.builds(
    TCAConfig,
    block_size=st.sampled_from([1, 2, 8, 64, 128]),
    window=st.just(128),
    num_candidates=st.integers(2, 20),
    sigma=st.floats(0.05, 5),
)


@settings(max_examples=40, deadline=None, database=None)
@given(config=configs)
def test_distributions_follow_equation_4(config):
    np.testing.assert_allclose(candidate_distributions(config), oracle.distributions(config), atol=1e-12)


@settings(max_examples=40, deadline=None, database=None)
@given(config=configs, blocks=st.integers(0, 300))
def test_budgets_are_shared_out_by_largest_remainder(config, blocks):
    budgets = np.asarray(candidate_budgets(config, blocks))
    assert budgets.shape == (config.num_candidates + 1, blocks)
    assert budgets.dtype == np.int32
    assert np.all(np.diff(budgets, axis=1) >= 0)
    assert np.all(budgets[-1] == config.block_size)
    counts = budget_counts(config, blocks)
    np.testing.assert_array_equal(counts.sum(axis=1), np.full(len(counts), blocks))
    # Each count is its quota rounded down or up.
    assert np.all(np.abs(counts - blocks * candidate_distributions(config)) < 1 + 1e-9)


def test_tied_remainders_go_to_the_smaller_budget():
    config = TCAConfig(block_size=2, window=2, num_candidates=3, sigma=1e6)  # flat: half the blocks on each budget
    np.testing.assert_allclose(candidate_distributions(config)[:3], 0.5, atol=1e-9)
    exact = TCAConfig(block_size=2, window=2, num_candidates=3, sigma=1e12)
    np.testing.assert_array_equal(budget_counts(exact, 3), [[2, 1]] * 3 + [[0, 3]])


def test_evicted_blocks_keep_the_mean_budgets_floor():
    means = np.array(oracle.distributions(DEFAULT)) @ np.array(oracle.sizes(DEFAULT))
    np.testing.assert_array_equal(eviction_budgets(DEFAULT), np.maximum(1, np.floor(means)))
    assert eviction_budgets(DEFAULT)[-1] == 128
    assert eviction_budgets(TCAConfig(block_size=8, window=8, num_candidates=2, sigma=0.1))[0] == 1


@pytest.mark.parametrize("reserve", [0, 1, 1000])
def test_capacity_of_a_row_and_a_reserve(reserve):
    config = TCAConfig(block_size=8, window=8, num_candidates=30, reserve=reserve)
    for row in range(31):
        most = 0
        for n in range(25):
            most = max(most, min(8 * n, sum(oracle.psi(config, row, n)) + reserve))
            assert region_capacity(config, row, n) == most


@pytest.mark.parametrize("tokens", [5, 23, 24, 40, 333])
@pytest.mark.parametrize("reserve", [0, 3, 1000])
def test_kept_share_counts_budgets_and_reserve(tokens, reserve):
    config = TCAConfig(block_size=8, window=16, num_candidates=4, sigma=0.4, reserve=reserve)
    ranked = config.num_ranked_blocks(tokens)
    for row, budgets in enumerate(np.asarray(candidate_budgets(config, ranked))):
        selected = min(budgets.sum() + reserve, ranked * 8)
        assert kept_share(config, tokens, np.array([row], np.int32))[0] == (selected + tokens - ranked * 8) / tokens


PLAIN = TCAConfig(block_size=8, window=16)


def _scored(scores, block_size=8):
    """Statistics of [B, Hkv, L] scores, as `token_scores` makes them."""
    scores = np.asarray(scores, np.float32)
    blocks = scores[..., : scores.shape[-1] // block_size * block_size]
    blocks = blocks.reshape(*scores.shape[:2], -1, block_size)
    mass = blocks.sum(axis=-1)
    hhi = np.square(blocks / np.where(mass > 0, mass, 1)[..., None]).sum(axis=-1)
    return TokenScores(*map(jnp.asarray, (scores, mass, np.where(mass > 0, hhi, 1 / block_size).astype(np.float32))))


def test_ranked_blocks_can_leave_the_window():
    for config, counts in (
        (PLAIN, {1: 0, 23: 0, 24: 1, 31: 1, 32: 2, 100: 10}),
        (TCAConfig(), {4096 + 127: 0, 4096 + 128: 1, 4096 + 255: 1, 131072: 992}),
    ):
        np.testing.assert_array_equal(config.num_ranked_blocks(jnp.array([*counts])), [*counts.values()])
        assert [config.num_ranked_blocks(length) for length in counts] == [*counts.values()]


def test_presets_and_derived_hyperparameters():
    paper = TCAConfig.paper(window=512)
    assert (paper.window, paper.alpha, paper.tau, paper.density, paper.criterion) == (
        *(512, 0.5, 0.9),
        *("paper", "column_mean"),
    )
    assert (paper.reserve_tokens, paper.num_queries) == (0, 1)  # no reserve: one query scores the blocks
    assert (TCAConfig().reserve_tokens, TCAConfig(window=512, reserve=7).reserve_tokens) == (512, 7)
    assert TCAConfig(observation=9).num_queries == 9
    assert hash(TCAConfig(alpha=np.float64(0.5))) == hash(TCAConfig(alpha=0.5))  # NumPy's numbers, too


def test_massless_blocks_have_a_flat_index():
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


CONFIG = TCAConfig(block_size=8, window=16, reserve=9, observation=6, spread=3)
DENSE = CONFIG.num_candidates


def masks(method, q, k, lengths, config):
    """What the cache keeps, bool [B, Hkv, L]."""
    queries = jnp.asarray(observed_queries(q, lengths, config.num_queries))
    k = jnp.asarray(k)
    selection = method.cache.select(0, Heads.all(k.shape[2]), queries, k, k, jnp.asarray(lengths))
    return np.asarray(selection_mask(selection.scores, selection.budgets, block_size=config.block_size))


@settings(max_examples=25, deadline=None, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 160), min_size=2, max_size=2),
    rows=st.lists(st.integers(0, DENSE), min_size=2, max_size=2),
    reserve=st.sampled_from([1, 9, 70]),
)
def test_prompts_keep_at_most_their_capacity(seed, lengths, rows, reserve):
    config = dataclasses.replace(CONFIG, reserve=reserve)
    method = methods.get("tca", candidates=[rows], config=config)
    q, k, _ = qkv(seed, 2, 160, 2, 2, 8, 2.0)
    kept = masks(method, q, k, np.array(lengths, np.int32), config)
    for longest in (max(lengths), 160):
        capacities = method.cache.capacities(0, longest)
        assert (kept.sum(axis=-1) <= capacities).all()
        assert max(capacities) <= config.num_ranked_blocks(longest) * 8


@pytest.mark.parametrize("traced", [False, True], ids=["a known layer", "a traced layer"])
def test_prompts_attend_to_what_heads_keep(traced):
    lengths, rows = np.array([96, 70, 19], np.int32), (DENSE, 5, 0, DENSE)
    q, k, v = qkv(7, 3, 96, 8, 4, 8)
    method = methods.get("tca", candidates=[rows], config=CONFIG)
    layout = CacheLayout.plan(method.cache, 1, 4, 3, 96, 8)

    @jax.jit
    def read(lengths, qkv, layer):
        return read_layer(method, layout, lengths, qkv, layer=layer if traced else 0)

    (out, _), held = read(lengths, (q, k, v), jnp.int32(0))
    np.testing.assert_array_equal(out, tca_jax.attend(q, k, v, jnp.array(rows), jnp.asarray(lengths), CONFIG))
    queries = observed_queries(q, lengths, CONFIG.num_queries)
    kept = np.asarray(tca_jax.select(queries, k, jnp.array(rows), jnp.asarray(lengths), CONFIG))
    for row, head in np.ndindex(3, 4):
        np.testing.assert_array_equal(kept_tokens(held, row, head)[0], k[row, kept[row, head], head])
