"""Calibration over a mesh: profiles, preferences and patterns are those that one device finds."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
from meshes import lm_of, mesh_of, needs_8_devices, with_tca
from tiny import TCA, random_prompt

import tca_jax
from tca_jax.calibration import layer_preferences, search_patterns
from tca_jax.calibration.readings import Reading

pytestmark = needs_8_devices

TEXT = random_prompt(0, 120)
SHAPES = {"1x2": (1, 2), "2x4": (2, 4)}


def on_mesh(shape) -> tca_jax.LM:
    """Heads lie in another order than the model's own, as a method before has left them."""
    lm = with_tca(lm_of(mesh_of(shape)))
    own = tuple(range(lm.config.num_kv_heads))
    assert shape[1] == 4 or lm.head_orders != (own,) * lm.config.num_layers
    return lm


def calibrated(lm: tca_jax.LM, config=TCA, **options) -> tca_jax.Profile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a random model answers nothing: what is measured is the same all the same
        return tca_jax.calibrate(lm, [TEXT, TEXT[:90]], config, **options)


@pytest.mark.parametrize("probes", [None, "text"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_profile_is_that_of_one_device(shape, probes):
    one, many = (calibrated(lm, probes=probes) for lm in (lm_of(), on_mesh(shape)))
    np.testing.assert_allclose(many.scores, one.scores, atol=1e-5)
    np.testing.assert_array_equal(many.candidates, one.candidates)
    assert many.fingerprint == one.fingerprint
    if probes:
        assert many.probes["fallback"] == one.probes["fallback"]
        assert many.probes["need"] == pytest.approx(one.probes["need"], abs=1e-3)
        np.testing.assert_allclose(many.probe_scores, one.probe_scores, atol=2e-3)
        np.testing.assert_array_equal(many.prefill_candidates, one.prefill_candidates)


def test_a_profile_of_one_device_runs_on_a_mesh():
    profile = calibrated(lm_of(), probes=None)
    one, many = lm_of().with_profile(profile), lm_of(mesh_of((1, 2))).with_profile(profile)
    answers = [tca_jax.generate(lm, TEXT, max_new_tokens=10, stop_token_ids=()).tokens for lm in (one, many)]
    assert answers[0] == answers[1]


def test_preferences_are_those_of_one_device():
    one, many = (layer_preferences(lm, TEXT, observation=8) for lm in (lm_of(), on_mesh((1, 2))))
    np.testing.assert_allclose(many, one, atol=1e-5)


def test_patterns_are_those_of_one_device():
    one, many = (search_patterns(lm, TEXT, first_query=40) for lm in (lm_of(), on_mesh((1, 2))))
    for of_one, of_many in zip(one, many, strict=True):
        assert [each[:3] for each in of_many] == [each[:3] for each in of_one]
        np.testing.assert_allclose([each[3] for each in of_many], [each[3] for each in of_one], atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_draws_go_by_the_number_that_a_head_has_in_the_model(shape):
    config = dataclasses.replace(TCA, density="random")
    one, many = (calibrated(lm, config, probes="text") for lm in (lm_of(), on_mesh(shape)))
    np.testing.assert_allclose(many.scores, one.scores, atol=1e-5)
    np.testing.assert_allclose(many.probe_scores, one.probe_scores, atol=2e-3)
    other = calibrated(lm_of(), dataclasses.replace(config, seed=1), probes=None)
    assert np.abs(other.scores - one.scores).max() > 1e-3  # so they matter


def test_what_heads_would_give_back_is_what_it_is_on_one_device():
    """The derivatives that find heads, which a random model's profile does not depend on."""
    rows, queries = np.array([[0, 3, 14, 2], [1, 0, 0, 5]], np.int32), np.linspace(0, 1, 32, dtype=np.float32)
    found = []
    for lm in (lm_of(), on_mesh((1, 2)), on_mesh((2, 4))):
        reading = Reading(lm, TEXT, 90, 32, TCA, lambda: None)
        found.append((reading.losses(rows), reading.relief(queries)))
    for losses, relief in found[1:]:
        np.testing.assert_allclose(losses, found[0][0], atol=2e-4)
        np.testing.assert_allclose(relief, found[0][1], atol=2e-4)
    assert np.abs(found[0][1]).max() > 0.01
