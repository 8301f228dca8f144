"""Rows: the choice by a threshold, and what rows keep of a prompt."""

import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.calibration.rows import NO_ROW, choose_candidates, kept_share, require_fit
from tca_jax.methods.candidates import candidate_budgets
from tca_jax.methods.checks import least_share
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, num_candidates=4, reserve=3)


def test_choice_is_the_sparsest_that_reaches_the_threshold():
    scores = jnp.array([[0.5, 0.92, 0.91, 0.95, 1.0], [0.1, 0.2, 0.3, 0.89, 1.0], [0.9, 0.0, 0.0, 0.0, 1.0]])
    np.testing.assert_array_equal(choose_candidates(scores, 0.9), [1, 4, 0])


def test_choice_falls_back_to_dense_even_where_rounding_keeps_dense_below():
    np.testing.assert_array_equal(choose_candidates(jnp.array([[[0.5, 0.6, 0.99]]]), 1.0), [[2]])


def test_a_share_that_row_0_alone_passes_is_refused_with_what_it_takes():
    rows = np.zeros((2, 2), np.int32)
    least = kept_share(CONFIG, 400, rows, rows).mean()
    shown = least_share(least)
    with pytest.raises(ValueError, match=rf"kept = 0\.01: must be at least {shown}, .* cache of 400 tokens"):
        require_fit(0.01, 400, CONFIG)
    require_fit(least, 400, CONFIG)
    require_fit(1.0, 5, CONFIG)


def test_a_head_without_a_prefill_row_keeps_what_its_cache_row_allows():
    rows, none = np.arange(5, dtype=np.int32), np.full(5, NO_ROW, np.int32)
    np.testing.assert_array_equal(kept_share(CONFIG, 400, rows, none), kept_share(CONFIG, 400, rows, rows))
    mixed = kept_share(CONFIG, 400, rows, np.array([3, NO_ROW, 0, NO_ROW, NO_ROW], np.int32))
    np.testing.assert_array_equal(mixed[1:], kept_share(CONFIG, 400, rows, rows)[1:])
    assert mixed[0] > kept_share(CONFIG, 400, rows, rows)[0]


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
