"""Methods by name: options, pairs, profiles, and equal bytes."""

import numpy as np
import pytest
import tiny

from tca_jax import TCAConfig, methods
from tca_jax.calibration.profile import Profile
from tca_jax.lab.equal_bytes import held_share
from tca_jax.lab.evaluation.method_specs import Builder, parse_methods

CONFIG = TCAConfig(block_size=8, window=16, reserve=0)
SIZES = 2048
READINGS = np.array([["sparse", "blocks"], ["dense", "sparse"]])
WORTH = np.array([[0.1, 2.0], [0.0, 0.5]], np.float32)


@pytest.fixture(scope="module")
def lm():
    return tiny.tiny_lm()


def profile(candidate=2, **fields):
    uniform = Profile.uniform(CONFIG, 2, 2, candidate)
    fields = {"candidates": uniform.candidates, "readings": READINGS, "keeping_worth": WORTH, **fields}
    return Profile(scores=uniform.scores, config=CONFIG, fingerprint=None, model_name="p", **fields)


def build(lm, text, found=None, paper=None):
    (spec,) = parse_methods(text)
    return Builder(lm, found, paper, list).build(spec).lm.method


def build_within(lm, text, share, found=None):
    (spec,) = parse_methods(text)
    return Builder(lm, found, None, list).build_within(spec, share, SIZES)


def test_options_follow_a_colon(lm):
    listed = ("full", "random:share=0.5,window=16,block_size=8", "streaming:window=16+random:share=1")
    specs = parse_methods(", ".join(listed))
    assert tuple(spec.label for spec in specs) == listed
    assert specs[2].parts == (("streaming", {"window": 16}), ("random", {"share": 1}))
    assert build(lm, listed[1]) == methods.get("random", share=0.5, window=16, block_size=8)
    pair = build(lm, "full+random:share=0.5")
    assert (pair.prefill, pair.cache) == (methods.BASELINE.prefill, methods.get("random", share=0.5).cache)


def test_budgets_come_from_the_profiles(lm):
    own, paper = profile(2), profile(5)
    assert build(lm, "tca", own, paper) == own.method()
    assert build(lm, "paper", own, paper) == paper.method()
    assert build(lm, "full+tca", own).cache == own.method().cache
    assert build(lm, "duoattention", own).cache.retrieval == ((False, True), (False, True))
    assert build(lm, "uniform:candidate=3", own).cache.config == CONFIG


def test_heads_become_dense_by_worth(lm):
    own = [[0, 3], [14, 0]]  # the third head is dense and of no worth: it is the first of the profile's to go
    found = profile(candidates=np.array(own), prefill_candidates=np.array(own))
    none, dense = [[0, 0], [0, 0]], [[14, 14], [14, 14]]
    stages = [none, [[0, 3], [0, 0]], own, [[0, 14], [14, 0]], [[0, 14], [14, 14]], dense]
    shares = [held_share(lm.with_method("tca", candidates=rows, config=CONFIG), SIZES) for rows in stages]
    assert shares == sorted(shares)
    for text in ("tca", "full+tca"):
        for rows, share in zip(stages, shares, strict=True):
            method = build_within(lm, text, share + 1e-6, found).lm.method
            assert [list(method.cache.rows(layer, 2)) for layer in range(2)] == rows
            assert method.cache.readings == found.method().cache.readings


def test_methods_without_budget_keep_their_own(lm):
    for text, share, found, reason in (
        ("full", 0.25, None, "no option that moves its budget"),
        ("tca", 0.25, profile(keeping_worth=np.full((2, 2), np.nan)), "does not know what heads are worth"),
        ("tca", 0.01, profile(), "which window, reserve and candidate 0 take of full attention's bytes"),
    ):
        made = build_within(lm, text, share, found)
        assert made.own_budget
        assert reason in made.budget
        assert made.lm.method == build(lm, text, found)
