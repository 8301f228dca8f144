"""Calibration over a mesh: budgets are those that one device finds; predicted worth needs one device."""

import dataclasses

import numpy as np
import pytest
from meshes import lm_of, mesh_of, needs_8_devices, with_tca
from tiny import TCA, random_prompt

import tca_jax

pytestmark = needs_8_devices

CONFIG = dataclasses.replace(TCA, criterion="retained_mass")


def test_budgets_are_those_of_one_device():
    text, on_mesh = random_prompt(0, 120), with_tca(lm_of(mesh_of((1, 2))))
    assert on_mesh.head_orders != (tuple(range(on_mesh.config.num_kv_heads)),) * on_mesh.config.num_layers
    one, many = (tca_jax.calibrate(lm, text, CONFIG) for lm in (lm_of(), on_mesh))
    np.testing.assert_array_equal(many.candidates, one.candidates)
    np.testing.assert_allclose(many.scores, one.scores, atol=2e-4)
    assert many.fingerprint == one.fingerprint


def test_predicted_worth_is_refused():
    with pytest.raises(ValueError, match="is on a mesh: load it on one device"):
        tca_jax.calibrate(lm_of(mesh_of((1, 2))), random_prompt(0, 2000), count=2, tokens=512)
