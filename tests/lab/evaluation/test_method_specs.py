"""Methods by name: options, pairs, profiles, and equal bytes."""

import json

import numpy as np
import pytest
import tiny

from tca_jax import TCAConfig, methods
from tca_jax.calibration.profile import Profile
from tca_jax.lab.equal_bytes import CallSizes, held_share
from tca_jax.lab.evaluation.method_specs import Builder, parse_methods
from tca_jax.methods.registry import describe_method

CONFIG = TCAConfig(block_size=8, window=16, reserve=0)


@pytest.fixture(scope="module")
def lm():
    return tiny.tiny_lm()


SIZES = CallSizes(2048, 128)
READINGS = np.array([["sparse", "blocks"], ["dense", "sparse"]])
WORTH = np.array([[0.1, 2.0], [0.0, 0.5]], np.float32)


def profile(candidate=2, **fields):
    uniform = Profile.uniform(CONFIG, 2, 2, candidate)
    fields = {"candidates": uniform.candidates, "readings": READINGS, "keeping_worth": WORTH, **fields}
    return Profile(scores=uniform.scores, config=CONFIG, fingerprint=None, model_name="p", **fields)


def builder(lm, found=None, paper=None):
    return Builder(lm, found, paper, list)


def build(lm, text, **profiles):
    (spec,) = parse_methods(text)
    return builder(lm, **profiles).build(spec).lm.method


def test_options_follow_a_colon():
    specs = parse_methods("full, random:share=0.5,window=16,block_size=8,streaming:window=16+random:share=1")
    assert [spec.label for spec in specs] == [
        "full",
        "random:share=0.5,window=16,block_size=8",
        "streaming:window=16+random:share=1",
    ]
    assert specs[1].parts == (("random", {"share": 0.5, "window": 16, "block_size": 8}),)
    assert specs[2].parts == (("streaming", {"window": 16}), ("random", {"share": 1}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--methods is empty"),
        ("full,full", "names 'full' twice"),
        ("fool", r"--methods fool: 'fool' is not registered: must be one of \[.*'full'"),
        ("random:shares=1", r"random has no option 'shares': must be one of \['block_size', 'seed', 'share'"),
        ("random:share", "'share' must be written as option=value"),
        ("full+random:seeds=1", "random has no option 'seeds'"),
    ],
)
def test_unknown_methods_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_methods(text)


def test_methods_are_those_of_the_registry(lm):
    assert build(lm, "random:share=0.5,window=16,block_size=8") == methods.get(
        "random", share=0.5, window=16, block_size=8
    )
    pair = build(lm, "full+random:share=0.5")
    assert (pair.prefill, pair.cache) == (methods.BASELINE.prefill, methods.get("random", share=0.5).cache)


def test_budgets_come_from_the_profiles(lm):
    own, paper = profile(2), profile(5)
    assert build(lm, "tca", found=own, paper=paper) == own.method()
    assert build(lm, "paper", found=own, paper=paper) == paper.method()
    assert own.method().cache.readings == (("sparse", "blocks"), ("dense", "sparse"))
    assert build(lm, "full+tca", found=own).cache == own.method().cache
    assert build(lm, "duoattention", found=own).cache.retrieval == ((False, True), (False, True))
    assert build(lm, "uniform:candidate=3", found=own).cache.config == CONFIG


def test_all_registered_methods_can_be_built(lm):
    found = profile()
    made = Builder(lm, found, None, lambda: [tiny.random_prompt(0, 400)])
    for spec in parse_methods(",".join(methods.names())):
        assert made.build(spec).lm.method.name == spec.label


def test_missing_profiles_are_refused(lm):
    with pytest.raises(ValueError, match="--methods tca: needs --profile DIR"):
        build(lm, "tca")
    with pytest.raises(ValueError, match="no profile of the paper's hyperparameters"):
        build(lm, "paper", found=profile())


@pytest.mark.parametrize("text", ["tca", "full+tca", "random:window=16,block_size=8"])
def test_equal_bytes_are_held(lm, text):
    (spec,) = parse_methods(text)
    made = [builder(lm, profile(0)).build_within(spec, share, SIZES) for share in (0.5, 0.85)]
    shares = [held_share(each.lm, SIZES) for each in made]
    assert [each.budget for each in made] == ["50% of the bytes", "85% of the bytes"]
    assert not any(each.own_budget for each in made)
    assert 0.25 < shares[0] <= 0.5 < shares[1] <= 0.85


def kept_rows(lm, found, share, text="tca"):
    (spec,) = parse_methods(text)
    made = builder(lm, found).build_within(spec, share, SIZES)
    assert not made.own_budget, made.budget
    assert held_share(made.lm, SIZES) <= share
    return [list(made.lm.method.cache.rows(layer, 2)) for layer in range(2)], made.lm.method


def test_heads_become_dense_by_worth(lm):
    own = [[0, 3], [14, 0]]  # the third head is dense and of no worth: it is the first of the profile's to go
    found = profile(candidates=np.array(own), prefill_candidates=np.array([[0, 3], [14, 0]]))
    stages = [
        [[0, 0], [0, 0]],
        [[0, 3], [0, 0]],
        own,
        [[0, 14], [14, 0]],
        [[0, 14], [14, 14]],
        [[14, 14], [14, 14]],
    ]
    shares = [held_share(lm.with_method("tca", candidates=rows, config=CONFIG), SIZES) for rows in stages]
    assert shares == sorted(shares)
    for rows, share in zip(stages, shares, strict=True):
        assert kept_rows(lm, found, share + 1e-6)[0] == rows
    _, method = kept_rows(lm, found, shares[1] + 1e-6)
    assert method.cache.readings == found.method().cache.readings
    assert kept_rows(lm, found, shares[3] + 1e-6, text="full+tca")[0] == stages[3]
    (spec,) = parse_methods("tca")
    made = builder(lm, found).build_within(spec, shares[0] / 2, SIZES)
    assert "which window, reserve and candidate 0 take of full attention's bytes" in made.budget
    assert made.lm.method == found.method()


def test_methods_without_budget_keep_their_own(lm):
    for text, found, reason in (
        ("full", None, "no option that moves its budget"),
        ("tca", profile(keeping_worth=np.full((2, 2), np.nan)), "does not know what heads are worth"),
    ):
        (spec,) = parse_methods(text)
        made = builder(lm, found).build_within(spec, 0.25, SIZES)
        assert made.own_budget
        assert reason in made.budget
        assert made.lm.method == builder(lm, found).build(spec).lm.method


def test_measured_options_are_remembered(lm):
    (spec,) = parse_methods("cake:block_size=8,window=16,observation=16")
    first, other = (Builder(lm, None, None, lambda seed=seed: [tiny.random_prompt(seed, 400)]) for seed in (0, 1))
    made = describe_method(first.build(spec).lm.method)
    written = json.loads(json.dumps(first.measured))
    assert describe_method(other.build(spec).lm.method) != made
    other.remember(written)
    assert describe_method(other.build(spec).lm.method) == made
    assert other.measured == written
