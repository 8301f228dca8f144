"""Calibration over a mesh: profiles are those that one device finds."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from meshes import lm_of, mesh_of, needs_8_devices, with_tca
from sharp_lm import pairs_of
from tiny import CONFIG, TCA, random_prompt

import tca_jax
from tca_jax.calibration.probes import FOLLOWING

pytestmark = needs_8_devices

TEXT = random_prompt(0, 120)
#: All that there is is fetched, so that heads can give back what they lose.
WORTH = dataclasses.replace(
    TCA, reserve=3, observation=6, fetch=100, fetch_stride=4, read_tolerance=0.4, keep_tolerance=0.3
)


def on_mesh(shape):
    lm = with_tca(lm_of(mesh_of(shape)))
    assert lm.head_orders != (tuple(range(lm.config.num_kv_heads)),) * lm.config.num_layers
    return lm


@functools.cache
def sharp(shape=None):
    """A model that looks at few tokens and is sure of what it says."""
    lm = lm_of() if shape is None else on_mesh(shape)
    larger = {(64, 4, 4, 16): 2.5, (64, CONFIG.vocab_size): 4.0}
    return dataclasses.replace(lm, params=jax.tree.map(lambda w: w * larger.get(w.shape, 1), lm.params))


def check_same(many, one):
    for name in ("candidates", "prefill_candidates", "readings"):
        np.testing.assert_array_equal(getattr(many, name), getattr(one, name))
    for name in ("scores", "reading_worth", "keeping_worth"):
        np.testing.assert_allclose(getattr(many, name), getattr(one, name), atol=2e-4)
    assert many.fingerprint == one.fingerprint
    assert many.probes == one.probes
    assert many.losses.keys() == one.losses.keys()
    for name, losses in one.losses.items():
        assert many.losses[name] == pytest.approx(losses, abs=1e-4)


def test_profiles_by_worth_are_those_of_one_device():
    out = tca_jax.generate(sharp(), TEXT[:8], max_new_tokens=392, temperature=1.0, stop_token_ids=())
    text = TEXT[:8] + out.tokens[0]
    pairs = pairs_of(sharp(), text[: len(text) - FOLLOWING])
    one, many = (tca_jax.calibrate(lm, text, WORTH, probes=[pairs]) for lm in (sharp(), sharp((1, 2))))
    check_same(many, one)
    assert 0 < (one.readings != "sparse").sum() < 8
    assert one.candidates.any()
    assert one.probes["counted"]["pairs"] > 0
