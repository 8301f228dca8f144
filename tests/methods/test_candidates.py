"""Candidate budgets: Eq. 4 and the largest-remainder form of Eq. 7."""

import itertools

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tca_jax.methods.candidates import (
    budget_count_table,
    budget_counts,
    candidate_budgets,
    candidate_distributions,
    eviction_budgets,
    kept_share,
    region_capacity,
)
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig()
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


@pytest.mark.parametrize("blocks", [0, 1, 5, 32, 1000])
def test_default_budgets_equal_the_oracle(blocks):
    budgets = np.asarray(candidate_budgets(CONFIG, blocks))
    for candidate in range(CONFIG.num_candidates + 1):
        np.testing.assert_array_equal(budgets[candidate], oracle.psi(CONFIG, candidate, blocks))


def test_tied_remainders_go_to_the_smaller_budget():
    config = TCAConfig(block_size=2, window=2, num_candidates=3, sigma=1e6)  # flat: half the blocks on each budget
    np.testing.assert_allclose(candidate_distributions(config)[:3], 0.5, atol=1e-9)
    exact = TCAConfig(block_size=2, window=2, num_candidates=3, sigma=1e12)
    np.testing.assert_array_equal(budget_counts(exact, 3), [[2, 1]] * 3 + [[0, 3]])


def test_table_holds_the_counts_of_every_number_of_blocks():
    table = budget_count_table(CONFIG, 60)
    assert table.shape == (61, 15, 8)
    for blocks in range(61):
        np.testing.assert_array_equal(table[blocks], budget_counts(CONFIG, blocks))
    with pytest.raises(ValueError, match="read-only"):
        table[0, 0, 0] = 1


def test_evicted_blocks_keep_the_floor_of_the_mean_budget():
    means = np.array(oracle.distributions(CONFIG)) @ np.array(oracle.sizes(CONFIG))
    np.testing.assert_array_equal(eviction_budgets(CONFIG), np.maximum(1, np.floor(means)))
    assert eviction_budgets(CONFIG)[-1] == 128
    sparse = TCAConfig(block_size=8, window=8, num_candidates=2, sigma=0.1)
    assert eviction_budgets(sparse)[0] == 1


def test_capacity_covers_every_shorter_prompt():
    config = TCAConfig(block_size=8, window=8, num_candidates=6, reserve=0)
    not_monotone = 0
    for candidate in range(7):
        totals = [sum(oracle.psi(config, candidate, n)) for n in range(41)]
        not_monotone += sum(np.diff(totals) < 0)
        assert region_capacity(config, candidate, 40) == max(totals)
    assert not_monotone  # else the maximum would be idle
    assert region_capacity(config, 0, 0) == 0


@pytest.mark.parametrize("reserve", [0, 1, 1000])
def test_capacity_of_two_rows_is_of_the_larger_budgets_and_the_reserve_and_never_more_than_all_tokens(reserve):
    config = TCAConfig(block_size=8, window=8, num_candidates=30, reserve=reserve)
    psi = [[oracle.psi(config, row, n) for n in range(25)] for row in range(31)]
    crossed = 0
    for cache, prefill in itertools.combinations_with_replacement(range(31), 2):
        most = alone = 0
        for n in range(25):
            most = max(most, min(8 * n, sum(map(max, psi[cache][n], psi[prefill][n])) + reserve))
            alone = max(alone, min(8 * n, max(sum(psi[cache][n]), sum(psi[prefill][n])) + reserve))
            assert region_capacity(config, cache, n, prefill) == region_capacity(config, prefill, n, cache) == most
            crossed += most > alone
    assert bool(crossed) == (reserve < 1000)  # each row is the larger one somewhere


def test_out_of_range_arguments_are_refused():
    with pytest.raises(ValueError, match="num_blocks = -1: must be an integer of at least 0"):
        candidate_budgets(CONFIG, -1)
    for candidate in (-1, 15):
        with pytest.raises(ValueError, match=rf"candidate = {candidate}: must lie in \[0, 14\]"):
            region_capacity(CONFIG, candidate, 3)
        with pytest.raises(ValueError, match=rf"candidate = {candidate}: must lie in \[0, 14\]"):
            region_capacity(CONFIG, 3, 3, candidate)


@pytest.mark.parametrize("tokens", [5, 23, 24, 40, 333])
@pytest.mark.parametrize("reserve", [0, 3, 1000])
def test_the_kept_share_counts_the_larger_budget_at_each_rank_the_reserve_and_what_is_right_of_the_ranked(
    tokens, reserve
):
    config = TCAConfig(block_size=8, window=16, num_candidates=4, sigma=0.4, reserve=reserve)
    ranked = config.num_ranked_blocks(tokens)
    budgets = np.asarray(candidate_budgets(config, ranked))
    for prefill, cache in [(0, 0), (0, 2), (1, 3), (2, 4)]:
        selected = min(np.maximum(budgets[prefill], budgets[cache]).sum() + reserve, ranked * 8)
        share = kept_share(config, tokens, *(np.array([row], np.int32) for row in (cache, prefill)))
        assert share[0] == (selected + tokens - ranked * 8) / tokens
