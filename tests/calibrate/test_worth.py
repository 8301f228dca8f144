"""Calibration by what heads are worth, end to end: both searches, their bounds, and what a profile says of them."""

import inspect
import itertools
import warnings

import numpy as np
import pytest
from cases import unchecked
from sharp_lm import broken_lm, make_sure_lm, pairs_of, text_of

import tca_jax
from tca_jax.calibration import worth
from tca_jax.calibration.probes import FOLLOWING, ProbedText, Segment, probed_texts
from tca_jax.calibration.run import calibrate
from tca_jax.calibration.text_losses import TextLosses
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
def lm():
    return make_sure_lm()


@pytest.fixture(scope="module")
def text(lm):
    return text_of(lm)


@pytest.fixture(scope="module")
def pairs(lm, text):
    return pairs_of(lm, text[: len(text) - FOLLOWING])


def quietly(*args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return calibrate(*args, **options)


@pytest.fixture(scope="module")
def profile(lm, text, pairs):
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
def silent(lm, text):
    """Of copies, which are uninformative for a random model."""
    message = (
        r"no probe is informative for 'tiny': of \d+ answers \(copy\) .* loses \d+ \(5 needed\), so heads that read bl"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        found = unchecked(calibrate)(lm, text, CONFIG, probes="copy")
    line = inspect.currentframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)
    return found


def more_of(profile):
    return profile.readings != "sparse"


# --- what is found --------------------------------------------------------------------------------


def test_the_fewest_heads_read_blocks(lm, text, profile):
    losses = TextLosses(lm, [text], CONFIG, lambda: None)
    full, of_sets = losses.full()[0].mean(), {more.tobytes(): losses.of(more)[0].mean() for more in SETS}
    row0, chosen = of_sets[NONE.tobytes()], more_of(profile)
    bound = full + CONFIG.read_tolerance * (row0 - full)
    within = [more for more in SETS if of_sets[more.tobytes()] <= bound]
    np.testing.assert_array_equal(chosen, min(within, key=lambda more: more.sum()))
    assert 0 < chosen.sum() < 4
    expected = {"full": full, "row0": row0, "chosen": of_sets[chosen.tobytes()]}
    assert profile.losses["inside"] == pytest.approx(expected, abs=1e-4)


def test_the_fewest_heads_keep_more(lm, text, pairs, profile):
    probed = probed_texts(lm, [text], [pairs], CONFIG)
    objective = worth._KeepingObjective(lm, probed, more_of(profile), CONFIG, ("pairs",), lambda: None)
    excess = {more.tobytes(): objective.excess(more) for more in SETS}
    assert excess[NONE.tobytes()] > 1
    fewest = min(more.sum() for more in SETS if excess[more.tobytes()] <= 1)
    kept = profile.candidates > 0
    assert kept.sum() <= fewest < 4
    assert objective.excess_of(profile.candidates) <= 1
    np.testing.assert_array_equal(profile.prefill_candidates, np.where(more_of(profile), profile.candidates, 0))
    assert min(profile.reading_worth[more_of(profile)].min(), profile.keeping_worth[kept].min()) > 0
    answers = profile.losses["answers"]
    assert answers["full"] <= worth.KNOWN < answers["row0"]
    assert answers["chosen"] - answers["full"] < (answers["row0"] - answers["full"]) / 2
    assert profile.probes == {"counted": {"pairs": objective.counted["pairs"]}, "kept": None, "attended": None}
    assert profile.probes["counted"]["pairs"] > 0


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


def test_several_texts_count_together(lm, text):
    texts, more = [text, text_of(lm, seed=2)], SETS[6]

    def objectives(*chosen):
        ends = [Segment(tuple(each[-FOLLOWING:]), (True,) * FOLLOWING, "follow") for each in chosen]
        probed = [ProbedText(tuple(each[:-FOLLOWING]), (end,)) for each, end in zip(chosen, ends, strict=True)]
        reading = worth._ReadingObjective(lm, chosen, CONFIG, lambda: None)
        return reading, worth._KeepingObjective(lm, probed, more, CONFIG, (), lambda: None)

    alone, together = [objectives(each) for each in texts], objectives(*texts)
    for number, both in enumerate(together):
        np.testing.assert_allclose(both.gains(NONE), np.mean([own[number].gains(NONE) for own in alone], axis=0), 1e-4)
    assert together[0].loss(more) == pytest.approx(np.mean([own[0].loss(more) for own in alone]))
    rows = together[1].rows(NONE)
    chosen = [own.losses(rows)[1].chosen for own in (together[1], *(own[1] for own in alone))]
    assert chosen[0] == pytest.approx(np.mean(chosen[1:]))
    assert abs(chosen[1] - chosen[2]) > 1e-3


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
    shares = TextLosses(lm, [text], CONFIG, lambda: None)
    shares.of(NONE)
    row0 = shares.shares[..., 0].mean()
    bound = row0 + (1 - row0) / 4 + 0.02  # room for one head
    found = quietly(lm, text, CONFIG, probes="copy", attended=bound)
    assert more_of(found).sum() == 1
    assert np.argmax(more_of(found)) == np.argmax(silent.reading_worth)
    assert found.probes["attended"] == bound
    assert tca_jax.prefill(lm.with_profile(found), text).stats.attended_share <= bound + 0.01
    message = rf"attended = 0\.01: must be at least {least_share(row0)}, the attended share of candidate 0"
    with pytest.raises(ValueError, match=message):
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


def test_nan_names_the_layer(lm, text):
    with pytest.raises(ValueError, match="model 'broken' computes NaN or infinity in the attention of layer 1"):
        calibrate(broken_lm(lm, 1), text, CONFIG)


def test_large_texts_wait_in_host_memory(lm, text, pairs, profile, monkeypatch):
    moved = []
    monkeypatch.setattr(worth, "memory_bytes", lambda: 1)
    real = worth.ReadText.to_host
    monkeypatch.setattr(worth.ReadText, "to_host", lambda self: moved.append(self) or real(self))
    assert quietly(lm, text, CONFIG, probes=[pairs]) == profile
    assert len(moved) == 1
