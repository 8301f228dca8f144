"""A calibration that was interrupted goes on where it was."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
from sharp_lm import make_sure_lm, pairs_of, text_of

import tca_jax
from tca_jax.calibration.journal import Journal
from tca_jax.calibration.probe_losses import ReadText
from tca_jax.calibration.probes import FOLLOWING
from tca_jax.calibration.run import calibrate
from tca_jax.calibration.text_losses import TextLosses
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, reserve=3, fetch=100, read_tolerance=0.25, keep_tolerance=0.2)


@pytest.fixture(scope="module")
def asked():
    """A model, a text, and the probes of it."""
    lm = make_sure_lm()
    text = text_of(lm)
    return lm, text, [pairs_of(lm, text[: len(text) - FOLLOWING])]


def run(asked, config=CONFIG, **options) -> tca_jax.Profile:
    lm, text, pairs = asked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return calibrate(lm, text, config, probes=pairs, **options)


@pytest.fixture(scope="module")
def uninterrupted(asked) -> tuple[tca_jax.Profile, int]:
    """The profile, and how many layers it takes to run."""
    steps = []
    profile = run(asked, progress=lambda done, total: steps.append(done))
    return profile, steps[-1]


def interrupt(asked, path, after, **options) -> None:
    def stop(done, total):
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, journal=path, progress=stop, **options)


def watch(monkeypatch) -> list:
    """What is measured from now on: names of what was called, and of which heads or rows."""
    seen = []
    for owner, name in ((TextLosses, "of"), (TextLosses, "slopes"), (ReadText, "losses"), (ReadText, "slopes")):
        real = getattr(owner, name)

        def measure(self, given, *rest, real=real, name=name):
            out = real(self, given, *rest)
            seen.append((name, given.shape, given.tobytes()))
            return out

        monkeypatch.setattr(owner, name, measure)
    return seen


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
def test_what_was_measured_is_not_measured_again_and_the_profile_is_the_same(
    asked, uninterrupted, tmp_path, monkeypatch, share
):
    expected, steps = uninterrupted
    path = tmp_path / "new" / "journal.jsonl"
    first = watch(monkeypatch)
    interrupt(asked, path, int(steps * share))
    measured = list(first)
    assert path.exists()
    written = path.read_text().count("\n")
    monkeypatch.undo()
    second, later = watch(monkeypatch), []
    found = run(asked, journal=str(path), progress=lambda done, total: later.append(done))
    assert found == expected
    assert not path.exists()
    journaled = written - 1  # the first line says whose it is
    if journaled:
        assert later[-1] < steps
        done = {
            each for each in measured if each[0] == "slopes" or each[1] == (2, 2)
        }  # of the last one there may be none
        assert len(done & set(second)) <= 1
    else:
        assert later[-1] == steps


def test_a_line_that_was_cut_is_measured_again(asked, uninterrupted, tmp_path):
    expected, steps = uninterrupted
    path = tmp_path / "journal"
    interrupt(asked, path, int(steps * 0.8))
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b'"value"') + 12])
    assert run(asked, journal=path) == expected


@pytest.mark.parametrize("changed", [{"config": dataclasses.replace(CONFIG, reserve=5)}, {"kept": 1.0}], ids=list)
def test_the_journal_of_another_calibration_is_ignored(asked, uninterrupted, tmp_path, changed):
    expected, steps = uninterrupted
    path, later = tmp_path / "journal", []
    interrupt(asked, path, int(steps * 0.6), **changed)
    foreign = path.read_text()
    assert len(foreign.splitlines()) > 2
    assert run(asked, journal=path, progress=lambda done, total: later.append(done)) == expected
    assert later[-1] == steps
    path.write_text(foreign)
    interrupt(asked, path, 1)
    assert len(path.read_text().splitlines()) == 1  # begun anew


# --- the file itself --------------------------------------------------------------------------------


def test_values_come_back_exactly_as_they_were_measured(tmp_path):
    path = tmp_path / "journal"
    values = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    heads = np.array([[True, False]])
    Journal(path, [1]).get("losses", heads, values.tolist)
    again = Journal(path, [1])
    found = again.get("losses", heads, lambda: pytest.fail("measured again"))
    np.testing.assert_array_equal(np.asarray(found, np.float32), values)
    assert again.get("losses", ~heads, lambda: 3) == 3
    assert again.get("losses", heads.astype(np.int32), lambda: 4) == 4
    assert again.get("losses", heads.T, lambda: 5) == 5
    assert again.get("slopes", heads, lambda: 6) == 6
    assert again.get("losses", None, lambda: 7) == 7
    assert again.get("losses", None, lambda: 8) == 7


def test_every_measurement_is_in_the_file_once_it_was_made(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path, {"a": 1})
    for i in range(3):
        journal.get(f"loss {i}", None, lambda i=i: [i])
        assert [json.loads(line).get("value") for line in path.read_text().splitlines()[1:]] == [
            [j] for j in range(i + 1)
        ]
    journal.remove()
    journal.remove()
    assert not path.exists()


def test_a_measurement_that_fails_leaves_nothing(tmp_path):
    journal = Journal(tmp_path / "journal", [])
    with pytest.raises(ZeroDivisionError):
        journal.get("loss", None, lambda: 1 / 0)
    assert journal.get("loss", None, lambda: 2) == 2


@pytest.mark.parametrize("content", ["not JSON\n", "[1, 2]\n", '{"key": "x"}\n'])
def test_a_file_that_holds_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "journal"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"journal = .*: this file is no journal of a calibration"):
        Journal(path, [1])
    assert path.read_text() == content


@pytest.mark.parametrize("content", ["", "\n\n", '{"calibration": "other"}\n{"key": "x"}\n'])
def test_a_file_that_is_no_journal_of_this_calibration_is_begun_anew(tmp_path, content):
    path = tmp_path / "journal"
    path.write_text(content)
    assert Journal(path, [1]).get("x", None, lambda: 9) == 9
    assert len(path.read_text().splitlines()) == 2


def test_without_a_path_measurements_are_kept_in_memory():
    journal = Journal(None, [1])
    assert [journal.get("x", None, lambda i=i: i) for i in range(3)] == [0, 0, 0]
    journal.remove()
