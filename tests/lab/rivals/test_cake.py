"""CAKE's layer budgets and preferences; tests/methods/test_compression.py has its selection."""

import compressing
import jax.numpy as jnp
import numpy as np
import pytest
from cases import observed_queries, poison, qkv
from hypothesis import given, settings
from hypothesis import strategies as st

from tca_jax import methods
from tca_jax.lab.rivals.cake import layer_budgets, layer_preference, observed_spread


@settings(max_examples=40, deadline=None, database=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(any), st.integers(0, 500), st.floats(0, 1))
def test_budgets_of_layers_spend_the_total_within_what_layers_hold(preferences, most, share):
    total = int(share * most * len(preferences))
    budgets = layer_budgets(np.array(preferences), total, most)
    assert budgets.sum() == total
    assert (budgets >= 0).all()
    assert (budgets <= most).all()


@settings(max_examples=40, deadline=None, database=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(any), st.integers(0, 500), st.floats(0, 1))
def test_a_layer_of_higher_preference_never_gets_less(preferences, most, share):
    preferences = np.array(sorted(preferences, reverse=True))
    budgets = layer_budgets(preferences, int(share * most * len(preferences)), most)
    assert (np.diff(budgets) <= 0).all()


def test_budgets_are_in_proportion_until_a_layer_is_full():
    preferences = np.array([1.0, 2.0, 5.0])
    assert layer_budgets(preferences, 80, 100).tolist() == [10, 20, 50]
    assert layer_budgets(preferences, 80, 40).tolist() == [15, 25, 40]
    assert layer_budgets(preferences, 120, 40).tolist() == [40, 40, 40]


@pytest.mark.parametrize(("tau1", "tau2"), [(1.0, 1.0), (1.6, 0.4)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (7, 1)])
def test_preferences_equal_the_oracle(heads, kv_heads, tau1, tau2):
    lengths = (40, 67)
    q, k, _ = (poison(x, lengths) for x in qkv(heads, 2, 70, heads, kv_heads, 16, scale=1.0))
    queries = observed_queries(q, lengths, 8)
    spread = np.asarray(observed_spread(*map(jnp.asarray, (queries, k, np.array(lengths)))))
    found = [layer_preference(of_row, tau1, tau2) for of_row in spread]
    wanted = [
        compressing.cake_preference(*(x[row, :length].astype(np.float64) for x in (q, k)), 8, tau1, tau2)
        for row, length in enumerate(lengths)
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


def test_layers_hold_their_part_of_the_capacity_and_shorter_prompts_whole():
    policy = methods.get("cake", preferences=[1, 2, 3, 0], capacity=1128).cache
    for tokens in (128, 700, 1500, 5000, 32768):
        ranked = max(0, tokens // 128 - 1) * 128
        held = [policy.capacities(layer, tokens) for layer in range(4)]
        assert held == [min(part, ranked) for part in (667, 1333, 2000, 0)]


def test_layers_hold_their_part_of_a_share_at_every_length():
    policy = methods.get("cake", preferences=[1, 2, 3, 0], share=0.5).cache
    for blocks in (1, 7, 250):
        held = [policy.num_kept(layer, blocks)[-1] for layer in range(4)]
        assert sum(held) == 4 * 64 * blocks  # what passes the third layer's tokens goes to the others
        assert held[2] == 128 * blocks
        assert held[3] < held[0] < held[1]
