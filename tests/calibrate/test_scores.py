"""Calibration scores, which the functional fuzz compares with the oracle, and the choice by a threshold."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import poison, qkv

from tca_jax.calibration.scores import calibration_scores, choose_candidates
from tca_jax.methods.candidates import candidate_budgets
from tca_jax.methods.config import TCAConfig

RETAINED = TCAConfig(block_size=8, window=16, num_candidates=4)
COLUMN = TCAConfig(block_size=8, window=16, num_candidates=4, criterion="column_mean")
LENGTHS = np.array([75, 40], np.int32)


@pytest.mark.parametrize("config", [RETAINED, COLUMN], ids=lambda config: config.criterion)
def test_scores_rise_to_one(config):
    q, k, _ = qkv(0, 2, 75, 4, 2, 16)
    scores = np.asarray(calibration_scores(poison(q, LENGTHS), poison(k, LENGTHS), LENGTHS, config))
    assert scores.shape == (2, 2, 5)
    assert np.all(scores[..., -1] == 1)
    assert np.all(scores > 0)
    assert np.all(scores <= 1)
    assert np.all(scores[..., 0] < scores[..., -2])


@pytest.mark.parametrize("config", [RETAINED, COLUMN], ids=lambda config: config.criterion)
def test_text_within_the_window_scores_one_throughout(config):
    q, k, _ = qkv(0, 2, 75, 4, 2, 16)
    scores = calibration_scores(q, k, np.array([23, 1], np.int32), config)
    np.testing.assert_array_equal(scores, np.ones((2, 2, 5)))


def test_retained_mass_counts_queries_past_the_window():
    # All keys equal: every query spreads evenly. Length 25: query 24 alone has a block left of its window.
    q, k = np.ones((1, 32, 1, 4), np.float32), np.zeros((1, 32, 1, 4), np.float32)
    scores = np.asarray(calibration_scores(q, k, np.array([25], np.int32), RETAINED))[0, 0]
    budgets = np.asarray(candidate_budgets(RETAINED, 1))[:, 0]  # of the one ranked block
    assert (budgets[0], RETAINED.reserve_tokens) == (1, 2)
    np.testing.assert_allclose(scores, 1 - (8 - np.maximum(budgets, 2)) / 25, rtol=1e-6)


def test_choice_is_the_sparsest_that_reaches_the_threshold():
    scores = jnp.array([[0.5, 0.92, 0.91, 0.95, 1.0], [0.1, 0.2, 0.3, 0.89, 1.0], [0.9, 0.0, 0.0, 0.0, 1.0]])
    np.testing.assert_array_equal(choose_candidates(scores, 0.9), [1, 4, 0])
