"""What is measured of a model for CAKE and DuoAttention, before any prompt."""

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


def test_gates_are_what_the_sparsest_row_drops():
    config = tca_jax.TCAConfig()
    scores = np.random.default_rng(0).uniform(0, 1, (2, 2, 15)).astype(np.float32)
    profile = Profile(
        candidates=np.zeros((2, 2), np.int32),
        scores=scores,
        config=config,
        fingerprint=None,
        model_name="m",
        probe_scores=scores,
    )
    np.testing.assert_array_equal(head_gates(profile), 1 - scores[..., 0])
    with pytest.raises(ValueError, match=r"'uniform candidate 3' has no probe scores: calibrate with probes"):
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
