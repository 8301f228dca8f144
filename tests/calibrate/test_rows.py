"""The choice of rows: by thresholds, and by a share of the cache."""

import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.calibration.rows import choose_cache_rows, choose_candidates, densest_within, kept_share, require_fit
from tca_jax.methods.candidates import candidate_budgets
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, num_candidates=4, reserve=3)


def test_choice_is_the_sparsest_that_reaches_the_threshold():
    scores = jnp.array([[0.5, 0.92, 0.91, 0.95, 1.0], [0.1, 0.2, 0.3, 0.89, 1.0], [0.9, 0.0, 0.0, 0.0, 1.0]])
    np.testing.assert_array_equal(choose_candidates(scores, 0.9), [1, 4, 0])


def test_choice_falls_back_to_dense_even_where_rounding_keeps_dense_below():
    np.testing.assert_array_equal(choose_candidates(jnp.array([[[0.5, 0.6, 0.99]]]), 1.0), [[2]])


def test_the_cache_row_is_the_sparsest_at_or_above_the_prefill_row_that_reaches_the_threshold():
    scores = np.array([[0.9, 0.2, 0.6, 0.4, 1.0], [0.1, 0.2, 0.3, 0.4, 1.0], [0.9, 0.9, 0.9, 0.9, 1.0]], np.float32)
    rows = choose_cache_rows(scores, np.array([1, 0, 0], np.int32), 0.5)
    np.testing.assert_array_equal(rows, [2, 4, 0])
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(choose_cache_rows(scores, np.array([1, 0, 3], np.int32), 0.0), [1, 0, 3])


def test_as_many_heads_are_dense_as_fit_the_worst_probe_scores_first():
    prefill = np.array([[0, 1], [0, 2]], np.int32)
    scores = np.ones((2, 2, 5), np.float32)
    scores[0, 0, 0], scores[0, 1, 1], scores[1, 0, 0], scores[1, 1, 2] = 0.8, 0.1, 0.3, 0.9
    order = [(0, 1), (1, 0), (0, 0), (1, 1)]
    rows, previous = prefill.copy(), 0.0
    for head in [None, *order]:
        if head is not None:
            rows[head] = 4
        share = kept_share(CONFIG, 400, rows, prefill).mean()
        assert share > previous
        for kept in (share, min(1.0, share + 1e-6)):
            np.testing.assert_array_equal(densest_within(kept, 400, scores, prefill, CONFIG), rows)
        previous = share
    np.testing.assert_array_equal(densest_within(1.0, 400, scores, prefill, CONFIG), 4)


def test_rows_that_are_needed_stay_where_they_fit_and_dense_heads_fill_the_rest():
    prefill, needed = np.array([[0, 1], [0, 2]], np.int32), np.array([[0, 3], [4, 2]], np.int32)
    scores = np.ones((2, 2, 5), np.float32)
    scores[0, 0, 0], scores[0, 1, 1], scores[1, 0, 0] = 0.9, 0.1, 0.3
    share = kept_share(CONFIG, 400, needed, prefill).mean()
    np.testing.assert_array_equal(densest_within(share, 400, scores, prefill, CONFIG, needed), needed)
    more = np.array([[0, 4], [4, 2]], np.int32)
    share_of_more = kept_share(CONFIG, 400, more, prefill).mean()
    np.testing.assert_array_equal(densest_within(share_of_more, 400, scores, prefill, CONFIG, needed), more)
    just_less = densest_within(share - 1e-6, 400, scores, prefill, CONFIG, needed)
    np.testing.assert_array_equal(just_less, densest_within(share - 1e-6, 400, scores, prefill, CONFIG))


def test_a_share_that_the_prefill_rows_alone_pass_is_refused_with_what_they_take():
    prefill = np.zeros((2, 2), np.int32)
    least = kept_share(CONFIG, 400, prefill, prefill).mean()
    with pytest.raises(ValueError, match=rf"kept = 0\.01: must be at least {least:.4f}, .* cache of 400 tokens"):
        densest_within(0.01, 400, np.ones((2, 2, 5), np.float32), prefill, CONFIG)
    with pytest.raises(ValueError, match=rf"kept = 0\.01: must be at least {least:.4f}"):
        require_fit(0.01, 400, CONFIG)
    require_fit(least, 400, CONFIG)


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
