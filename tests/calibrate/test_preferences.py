"""What is measured of a model for CAKE and DuoAttention, before any prompt."""

import dataclasses

import compressing
import numpy as np
import pytest
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax.calibration import Profile, head_gates, layer_preferences


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def test_preferences_are_the_mean_share_of_each_layer_over_texts(lm):
    texts = [random_prompt(0, 40), random_prompt(1, 64)]
    shares = []
    for ids in texts:
        inputs = compressing.full_attention_inputs(lm, ids)
        layers = np.array([compressing.cake_preference(q, k, 8, 1.5, 0.6) for q, k, _ in inputs])
        shares.append(layers / layers.sum())
    found = layer_preferences(lm, texts, observation=8, tau1=1.5, tau2=0.6)
    np.testing.assert_allclose(found, np.mean(shares, axis=0), rtol=2e-3)
    assert found.sum() == pytest.approx(1)
    lm.with_method("cake", preferences=found)  # fits the model


def test_gates_are_what_heads_are_worth_to_answers_over_the_largest():
    config, worth = tca_jax.TCAConfig(), np.array([[0.5, -0.1], [2.0, 0.0]], np.float32)
    profile = dataclasses.replace(Profile.uniform(config, 2, 2, 0), keeping_worth=worth)
    gates = head_gates(profile)
    np.testing.assert_array_equal(gates, np.array([[0.25, 0], [1, 0]], np.float32))
    assert gates.dtype == np.float32
    tca_jax.methods.get("duoattention", gates=gates)
    nothing = dataclasses.replace(profile, keeping_worth=np.zeros((2, 2), np.float32))
    np.testing.assert_array_equal(head_gates(nothing), np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"'uniform candidate 3' does not know what heads are worth: calibrate with"):
        head_gates(Profile.uniform(config, 2, 2, 3))


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([[1] * 9], {"observation": 9}, r"texts\[0\] has 9 tokens: must have more than observation = 9"),
        ([[1] * 5000], {}, r"texts\[0\] has 5000 tokens: .* at most the 4096 positions"),
        ([[1] * 40], {"observation": 1}, r"observation = 1: must be an integer of at least 2"),
        ([[1] * 40], {"tau1": 0}, r"tau1 = 0: must lie in \(0, 100\]"),
        ([[]], {}, r"texts\[0\]"),
    ],
)
def test_what_is_not_allowed_is_named(lm, texts, options, message):
    with pytest.raises(ValueError, match=message):
        layer_preferences(lm, texts, **options)
