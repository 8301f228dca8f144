"""Methods by name: options, pairs, profiles, and equal bytes."""

import dataclasses

import numpy as np
import pytest
from profiles import make_worth_profile

from tca_jax import TCAConfig, methods
from tca_jax.calibration.profile import Profile
from tca_jax.errors import UserError
from tca_jax.lab.evaluation.method_specs import Builder, parse_methods

CONFIG = TCAConfig(block_size=8, window=16, reserve=0)
SIZES = 2048


def profile(candidate=2):
    return dataclasses.replace(Profile.uniform(CONFIG, 2, 2, candidate), model_name="p")


def build(lm, text, found=None, paper=None):
    (spec,) = parse_methods(text)
    return Builder(lm, found, paper, list).build(spec).lm.method


def build_within(lm, text, share, found=None):
    (spec,) = parse_methods(text)
    return Builder(lm, found, None, list).build_within(spec, share, SIZES)


def test_options_follow_a_colon(lm):
    listed = ("full", "random:share=0.5,window=16,block_size=8", "streaming:window=16+random:share=1")
    assert tuple(spec.label for spec in parse_methods(", ".join(listed))) == listed
    assert build(lm, listed[1]) == methods.get("random", share=0.5, window=16, block_size=8)
    pair = build(lm, "full+random:share=0.5")
    assert (pair.prefill, pair.cache) == (methods.BASELINE.prefill, methods.get("random", share=0.5).cache)


def test_budgets_come_from_the_profiles(lm):
    own, paper = profile(2), profile(5)
    assert build(lm, "tca", own, paper) == own.method()
    assert build(lm, "paper", own, paper) == paper.method()
    assert build(lm, "full+tca", own).cache == own.method().cache
    assert build(lm, "uniform:candidate=3", own).cache.config == CONFIG


def test_predicted_worth_comes_from_its_profile(lm):
    found = make_worth_profile()
    weights = found.maps.head_weights.ravel()
    retrieval = build(lm, "duoattention", found).cache.retrieval
    assert np.ravel(retrieval).tolist() == (weights >= np.sort(weights)[2]).tolist()  # half of the heads
    assert build(lm, "worth", found) == found.method()
    assert build(lm, "worth:kept=0.5", found) == found.with_kept(0.5).method()
    within = build_within(lm, "worth", 0.25, found)
    assert within.lm.method == found.with_kept(0.25 - 256 / SIZES).method()
    assert build_within(lm, "worth", 0.1, found).own_budget
    for text, given, message in (
        ("worth", profile(), "--methods worth: needs --profile DIR, from tca-jax calibrate"),
        ("worth:share=0.5", found, r"worth has no option 'share': must be one of"),
        ("full+worth", found, "worth is no part of a pair"),
        ("tca", found, "needs --profile DIR, from tca-jax calibrate --paper"),
    ):
        with pytest.raises(UserError, match=message):
            build(lm, text, given)


def test_methods_without_budget_keep_their_own(lm):
    for text, found in (("full", None), ("tca", profile())):
        made = build_within(lm, text, 0.25, found)
        assert made.own_budget
        assert "no option that moves its budget" in made.budget
        assert made.lm.method == build(lm, text, found)
