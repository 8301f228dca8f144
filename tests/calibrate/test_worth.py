"""Calibration by what heads are worth, end to end: both searches, their bounds, and what a profile says of them."""

import dataclasses
import inspect
import itertools
import re
import warnings

import numpy as np
import pytest
from cases import unchecked
from sharp_lm import broken_lm, make_lm, make_sure_lm, pairs_of, random_ids, text_of

import tca_jax
from tca_jax.calibration import worth
from tca_jax.calibration.probes import FOLLOWING, ProbedText, Segment, probed_texts
from tca_jax.calibration.run import calibrate
from tca_jax.calibration.text_losses import TextLosses
from tca_jax.engine.lm import LM
from tca_jax.errors import least_share
from tca_jax.methods.config import TCAConfig

#: Blocks are all that there is, so that heads can give back what they lose; two heads of four then are enough.
CONFIG = TCAConfig(
    block_size=8, window=16, reserve=3, observation=4, spread=2, fetch=100, read_tolerance=0.25, keep_tolerance=0.35
)
DENSE = CONFIG.num_candidates
SETS = [np.array(bits, bool).reshape(2, 2) for bits in itertools.product([0, 1], repeat=4)]
NONE = SETS[0]


@pytest.fixture(scope="module")
def lm() -> LM:
    return make_sure_lm()


@pytest.fixture(scope="module")
def text(lm) -> list[int]:
    return text_of(lm)


@pytest.fixture(scope="module")
def pairs(lm, text) -> list:
    return pairs_of(lm, text[: len(text) - FOLLOWING])


def quietly(*args, **options) -> tca_jax.Profile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return calibrate(*args, **options)


@pytest.fixture(scope="module")
def profile(lm, text, pairs) -> tca_jax.Profile:
    """Of searches that find what they look for, without a warning."""
    calls = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = calibrate(lm, text, CONFIG, probes=[pairs], progress=lambda *call: calls.append(call))
    done = [of_call for of_call, _ in calls]
    assert done[0] == 0
    assert set(np.diff(done[:-1])) == {1}
    assert all(a <= b for a, b in calls)
    assert calls[-1][0] == calls[-1][1]
    return found


@pytest.fixture(scope="module")
def silent(lm, text) -> tca_jax.Profile:
    """Of copies, which are uninformative for a random model."""
    message = (
        r"no probe is informative for 'tiny': of \d+ answers \(copy\) .* loses \d+ \(5 needed\), so heads that read bl"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        found = unchecked(calibrate)(lm, text, CONFIG, probes="copy")
    line = inspect.currentframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)
    return found


def more_of(profile) -> np.ndarray:
    return profile.readings != "sparse"


# --- what is found --------------------------------------------------------------------------------


def test_the_fewest_heads_read_blocks(lm, text, profile):
    losses = TextLosses(lm, [text], CONFIG, lambda: None)
    full, of_sets = losses.full()[0].mean(), {more.tobytes(): losses.of(more)[0].mean() for more in SETS}
    row0 = of_sets[NONE.tobytes()]
    bound = full + CONFIG.read_tolerance * (row0 - full)
    within = [more for more in SETS if of_sets[more.tobytes()] <= bound]
    fewest = min(within, key=lambda more: more.sum())
    np.testing.assert_array_equal(more_of(profile), fewest)
    assert 0 < fewest.sum() < 4
    singles = [(of_sets[more.tobytes()], more) for more in SETS if more.sum() == 1]
    best = sorted(singles, key=lambda each: each[0])[: fewest.sum()]
    np.testing.assert_array_equal(more_of(profile), np.any([more for _, more in best], axis=0))
    inside = profile.losses["inside"]
    expected = {"full": full, "row0": row0, "chosen": of_sets[more_of(profile).tobytes()]}
    assert inside == pytest.approx(expected, abs=1e-4)


def test_the_fewest_heads_keep_more(lm, text, pairs, profile):
    probed = probed_texts(lm, [text], [pairs], CONFIG)
    objective = worth._KeepingObjective(lm, probed, more_of(profile), CONFIG, ("pairs",), lambda: None)
    excess = {more.tobytes(): objective.excess(more) for more in SETS}
    assert excess[NONE.tobytes()] > 1
    fewest = min(more.sum() for more in SETS if excess[more.tobytes()] <= 1)
    kept = profile.candidates > 0
    assert kept.sum() <= fewest < 4
    assert objective.excess_of(profile.candidates) <= 1
    answers = profile.losses["answers"]
    assert answers["full"] <= worth.KNOWN < answers["row0"]
    assert answers["chosen"] - answers["full"] < (answers["row0"] - answers["full"]) / 2
    assert profile.probes == {"counted": {"pairs": objective.counted["pairs"]}, "kept": None, "attended": None}
    assert profile.probes["counted"]["pairs"] > 0


def test_a_profile_holds_its_sources(lm, text, profile, tmp_path):
    assert (profile.config, profile.model_name, profile.fingerprint) == (CONFIG, "tiny", lm.fingerprint)
    assert [source["tokens"] for source in profile.sources] == [400]
    assert set(profile.losses) == {"inside", "answers", "following"}
    assert np.isnan(profile.scores).all()
    np.testing.assert_array_equal(profile.prefill_candidates, np.where(more_of(profile), profile.candidates, 0))
    assert np.isfinite(profile.reading_worth).all()
    assert profile.reading_worth[more_of(profile)].min() > 0
    assert profile.keeping_worth[profile.candidates > 0].min() > 0
    profile.save(tmp_path)
    assert tca_jax.Profile.load(tmp_path) == profile
    assert lm.with_profile(profile).method == profile.method()


@pytest.mark.integration
def test_short_texts_are_read_densely(lm, text, silent):
    assert set(silent.readings.flat) == {"sparse", "dense"}
    few = dataclasses.replace(CONFIG, fetch=40)
    assert few.num_ranked_blocks(len(text)) > 40
    assert set(quietly(lm, text, few, probes="copy").readings.flat) == {"sparse", "blocks"}


def test_without_losses_no_head_needs_more(lm):
    """Random tokens are foretold as badly by what is kept as by everything."""
    found = quietly(make_lm(), random_ids(400), CONFIG, probes="copy")
    assert (found.readings == "sparse").all()
    assert not found.candidates.any()
    assert found.losses["inside"]["row0"] == found.losses["inside"]["chosen"]


def test_answers_lost_by_falling_probabilities():
    kinds = ("pairs", "pairs", "follow", "facts", "pairs")
    nats = lambda x: np.log(np.array(x, np.float32))  # noqa: E731
    segments = tuple(Segment((0, 1, 2, 3), (False, True, True, True), kind) for kind in kinds)
    full = np.tile(nats([1 / 0.9, 1 / 0.8, 1 / 0.6, 9]), 5)
    full[4:6] = nats(5)  # the second answer is not known
    full[14] = nats(2.5)  # nor is the last token of the fourth, which is known as a whole
    row0 = full + np.repeat(nats([9, 9, 9, 9, 2.1]), 4)  # and the last one is not lost at row 0
    probes = list(worth.counted_columns([ProbedText((0,), segments)], np.array([full.size])))
    answers = worth.Answers(probes, full, row0)
    assert answers.kinds == ["pairs", "facts"]
    np.testing.assert_array_equal(np.flatnonzero(answers.number == 0), [0, 1, 2])
    np.testing.assert_array_equal(np.flatnonzero(answers.number == 1), [12, 13])
    assert answers.lost(full) == 0
    now = full + nats(2)  # half of the probability is no loss yet
    assert answers.lost(now) == pytest.approx(0, abs=1e-6)
    now[[1, 2, 12, 5]] += nats([2, 3, 5, 100])
    assert answers.lost(now) == pytest.approx(np.mean([1 - 1 / 6, 1 - 1 / 5]))
    weights = answers.weights(now)
    np.testing.assert_array_equal(np.flatnonzero(weights), [1, 2, 12])
    assert set(weights[weights > 0]) == {0.5}
    nobody = worth.Answers(probes, full, full)
    assert (nobody.kinds, nobody.lost(now)) == ([], 0.0)


@pytest.mark.integration
def test_five_counted_answers_are_needed(lm, text, pairs):
    def asked(pair, count) -> tca_jax.Profile:
        return quietly(lm, text, CONFIG, probes=[[pair] * count])

    known = next(pair for pair in pairs if asked(pair, 5).probes["counted"] == {"pairs": 5})
    four = asked(known, 4)
    assert four.probes["counted"] == {"pairs": 0}
    assert (four.candidates[more_of(four)] == CONFIG.num_candidates).all()


# --- bounds ---------------------------------------------------------------------------------------


def test_a_kept_share_bounds_the_cache(lm, text, pairs, profile):
    tokens = len(text) - FOLLOWING
    least = tca_jax.Profile.uniform(CONFIG, 2, 2, 0).kept_share(tokens).mean()
    room_for_one = least + (1 - least) / 4
    found = quietly(lm, text, CONFIG, probes=[pairs], kept=room_for_one + 0.01)
    assert found.kept_share(tokens).mean() <= room_for_one + 0.01
    np.testing.assert_array_equal(found.readings, profile.readings)
    assert (found.candidates > 0).sum() == 1
    assert np.argmax(found.candidates) == np.argmax(profile.keeping_worth)
    assert found.probes["kept"] == room_for_one + 0.01
    everything = quietly(lm, text, CONFIG, probes=[pairs], kept=1.0)
    np.testing.assert_array_equal(everything.candidates, profile.candidates)
    np.testing.assert_array_equal(quietly(lm, text, CONFIG, probes=[pairs], kept=least).candidates, 0)


def test_without_probes_the_most_worth_is_kept(lm, text, silent):
    tokens, bound = len(text) - FOLLOWING, 0.6
    assert silent.probes["counted"] == {"copy": 0}
    assert "answers" not in silent.losses
    assert (silent.candidates[more_of(silent)] == DENSE).all()  # and what follows a text may need others
    assert silent.kept_share(tokens).mean() > bound
    with pytest.warns(UserWarning, match=r"keep all tokens, those of most worth first, up to kept = 0\.6;"):
        found = calibrate(lm, text, CONFIG, probes="copy", kept=bound)
    assert found.kept_share(tokens).mean() <= bound
    np.testing.assert_array_equal(found.readings, silent.readings)
    (kept,) = np.argwhere(found.candidates)
    assert silent.keeping_worth[tuple(kept)] == silent.keeping_worth[more_of(silent)].max()


@pytest.mark.integration
def test_an_attended_share_bounds_reading(lm, text, silent):
    full = quietly(lm, text, CONFIG, probes="copy", attended=1.0)
    np.testing.assert_array_equal(full.readings, silent.readings)
    assert full.probes["attended"] == 1.0
    shares = TextLosses(lm, [text], CONFIG, lambda: None)
    shares.of(NONE)
    row0 = shares.shares[..., 0].mean()
    bound = row0 + (1 - row0) / 4 + 0.02  # room for one head
    found = quietly(lm, text, CONFIG, probes="copy", attended=bound)
    assert more_of(found).sum() == 1
    assert np.argmax(more_of(found)) == np.argmax(silent.reading_worth)
    share = tca_jax.prefill(lm.with_profile(found), text).stats.attended_share
    assert share <= bound + 0.01
    least = least_share(row0)
    with pytest.raises(
        ValueError, match=rf"attended = 0\.01: must be at least {least}, the attended share of candidate 0"
    ):
        quietly(lm, text, CONFIG, probes="copy", attended=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kept": 0}, r"kept = 0: must lie in \(0, 1\]"),
        ({"attended": float("nan")}, r"attended = nan: must lie in \(0, 1\]"),
        ({"kept": 0.01}, r"kept = 0\.01: must be at least 0\.\d+, .* of the cache of 144 tokens"),
        ({"probes": "text"}, r"probes = 'text': must be 'facts', 'copy', a list"),
        ({"probes": "facts"}, r"probes = 'facts': tiny was loaded without a tokenizer"),
        ({"probes": [[("q", "a")]]}, r"probes\[0\]: tiny was loaded without a tokenizer"),
        ({"criterion": "retained_mass", "kept": 0.5}, r"kept goes with criterion 'worth', not with 'retained_mass'"),
        ({"criterion": "retained_mass", "probes": "copy"}, r"probes goes with criterion 'worth'"),
    ],
)
def test_wrong_options_are_refused_before_any_work(lm, text, options, message):
    calls = []
    with pytest.raises(ValueError, match=message):
        unchecked(calibrate)(lm, text, CONFIG, **options, progress=lambda *call: calls.append(call))
    assert calls == []


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_loss_above_its_tolerance_is_a_warning(lm, text):
    blind = dataclasses.replace(CONFIG, fetch=1)  # next to nothing is fetched, so nothing helps
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = calibrate(lm, text, blind, probes="copy")
    (said,) = (str(each.message) for each in caught if "loss inside" in str(each.message))
    three = r"\d\.\d{4} under full attention, \d\.\d{4} with candidate 0, \d\.\d{4} as chosen; no single head gives"
    assert re.match(f"the loss inside the texts stays above its tolerance: {three}", said)
    inside = found.losses["inside"]
    assert inside["chosen"] > inside["full"] + CONFIG.read_tolerance * (inside["row0"] - inside["full"])


# --- a model that computes nonsense ----------------------------------------------------------------


def test_nan_names_the_layer(lm, text):
    with pytest.raises(ValueError, match="model 'broken' computes NaN or infinity in the attention of layer 1"):
        calibrate(broken_lm(lm, 1), text, CONFIG)


# --- memory and programs ---------------------------------------------------------------------------


def test_large_texts_wait_in_host_memory(lm, text, pairs, profile, monkeypatch):
    moved = []
    monkeypatch.setattr(worth, "memory_bytes", lambda: 1)
    real = worth.ReadText.to_host
    monkeypatch.setattr(worth.ReadText, "to_host", lambda self: moved.append(self) or real(self))
    assert quietly(lm, text, CONFIG, probes=[pairs]) == profile
    assert len(moved) == 1
