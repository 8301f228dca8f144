"""`eval --tune`: what is searched, at what cost, what is written, and what a second run measures again."""

import functools
import json
from pathlib import Path

import commands
import pytest
from tiny import TCA, write_checkpoint

from tca_jax import Profile
from tca_jax.lab.evaluation import parse_methods
from tca_jax.lab.evaluation.tuning import PREFILL_KNOBS, SPACES, _best, _points, _written, highest_within, make_tuning
from tca_jax.methods.registry import names, option_names

run, error = (functools.partial(each, "eval") for each in (commands.run, commands.error))
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
SMALL = ["--tasks=loss", "--lengths=512", "--samples=1", "--kv-share=0.6", "--trials=2", "--profile=profile"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    write_checkpoint(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    Profile.uniform(TCA, 2, 2, 3).save(folder / "profile")
    return folder


@pytest.fixture(autouse=True)
def in_work(work, monkeypatch):
    monkeypatch.chdir(work)


def tuned(name):
    return json.loads(Path(f"out/tuning/{name}.json").read_text())


def test_spaces_hold_options_that_set_no_cost():
    for name, space in SPACES.items():
        assert name in names()
        assert set(space) <= set(option_names(name))
        assert not set(space) & {"share", "capacity", "budget", PREFILL_KNOBS.get(name, ("",))[0]}
    for name, (knob, values) in PREFILL_KNOBS.items():
        assert knob in option_names(name)
        assert list(values) == sorted(values)


def test_points_begin_with_the_defaults():
    (spec,) = parse_methods("snapkv")
    points = _points(spec, 8, 0)
    assert points[0] == [{}]
    assert len(points) == 8
    assert points == _points(spec, 8, 0) != _points(spec, 8, 1)
    assert all(point[0]["observation"] <= point[0]["window"] for point in _points(spec, 200, 0)[1:])
    assert len(_points(parse_methods("tova")[0], 50, 0)) == 1 + len(SPACES["tova"]["window"])
    (fixed,) = parse_methods("snapkv:kernel=7,pooling=max")
    assert all(set(point[0]) == {"observation", "window"} for point in _points(fixed, 5, 0)[1:])
    (pair,) = parse_methods("xattention+tova")
    again = _written(tuple((n, o) for (n, _), o in zip(pair.parts, _points(pair, 3, 0)[1], strict=True)))
    assert parse_methods(again.label) == (again,)


def test_best_trial_keeps_the_costs():
    def trial(excess, held, attended):
        return {"excess": excess, "sum": excess, "held_share": held, "attended_share": attended}

    trials = [trial(5, 0.4, 0.2), trial(3, 0.4, 0.3), trial(2, 0.6, 0.2), trial(4, 0.5, 0.1), trial(4, 0.5, 0.1)]
    assert _best(trials, 0.5, 0.2) is trials[3]
    assert _best(trials, 0.1, 0.1) is trials[0]  # what the defaults cost is allowed


@pytest.mark.filterwarnings("ignore:no probe is informative")  # random weights answer nothing
@pytest.mark.filterwarnings("ignore:the loss .* stays above its tolerance")
@pytest.mark.slow
def test_tuning_continues_and_shows_both(work):
    args = ["model", "--methods=full,tca,snapkv", *SMALL, "--text=text.txt", "--tune=all", "--out=out"]
    result = run(*args)
    assert result.exit_code == 0, result.output
    before = tuned("snapkv")
    assert len(before["trials"]) == 2
    best = next(trial for trial in before["trials"] if trial["spec"] == before["tuned"])
    assert best["excess"] <= before["trials"][0]["excess"]
    assert len(parse_methods(before["tuned"])) == 1
    assert f"| {before['tuned']} (tuned) |" in result.stdout
    assert tuned("tca")["trials"][0]["held_share"] <= 0.6
    assert before["trials"][1]["held_share"] <= 0.6
    assert "| tca (as calibrated) |" in result.stdout
    # A lost trial is measured again, and gives the same.
    Path("out/tuning/snapkv.json").write_text(json.dumps({**before, "trials": before["trials"][:1]}))
    result = run(*args)
    assert result.exit_code == 0, result.output
    after = tuned("snapkv")
    assert after["trials"][1]["spec"] == before["trials"][1]["spec"]
    assert after["trials"][1]["excess"] == pytest.approx(before["trials"][1]["excess"], rel=1e-4)
    assert error(*args, "--trials=3").startswith("--out out was made with tuning = ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tune=full"], "--tune full: has no options to search; must be all, or some of ['snapkv']"),
        (["--tune=cake"], "--tune cake: is not among --methods; must be all, or some of ['snapkv']"),
        (["--trials=2"], "--trials and --tune-text say how to tune: they need --tune"),
        (["--tune=snapkv", "--tune-text=none.txt"], "none.txt"),
    ],
)
def test_refusals_name_the_option(args, message):
    found = error("model", "--methods=full,snapkv", "--kv-share=0.5", "--tasks=loss", "--lengths=512", *args)
    assert message in found


def test_tuning_needs_bytes_and_a_space():
    with pytest.raises(ValueError, match="--tune: needs --kv-share"):
        make_tuning(["all"], parse_methods("snapkv"), None, None)
    with pytest.raises(ValueError, match="no method of --methods has options to search"):
        make_tuning(["all"], parse_methods("full,tca"), None, 0.5)


@pytest.mark.parametrize(
    ("limit", "taken", "most"), [(0.5, 0.5, 1), (0.305, 0.30, 7), (0.005, 0.0, 7), (2.0, 0.99, 7), (0.257, 0.25, 2)]
)
def test_costs_are_set_below_the_limit(limit, taken, most):
    values, looks = [i / 100 for i in range(100)], []

    def cost(value):
        looks.append(value)
        return value

    assert highest_within(values, cost, limit) == taken
    assert len(looks) <= most
