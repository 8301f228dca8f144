"""`tca-jax eval`: whole runs, suites, tuning, what a second run adds, and what is refused."""

import functools
import json
from pathlib import Path

import commands
import pytest

from tca_jax.lab.evaluation import Sources, make_plan, parse_methods, tuning
from tca_jax.lab.evaluation.ruler import TASKS
from tca_jax.loading import open_checkpoint

pytestmark = pytest.mark.usefixtures("in_work")
NOISE_TASK = ["model", "--tasks=niah_single_1", "--lengths=1024", "--samples=2", "--batch=2", "--protocols=prefix"]
SUITE = ["model", "--suite=late", "--methods=full,streaming:window=128", "--lengths=1024", "--samples=1"]
TUNED = ["model", "--methods=full,tca,snapkv", "--tasks=loss", "--lengths=512", "--samples=1", "--kv-share=0.6"]
TUNED += ["--trials=2", "--profile=profile", "--text=text.txt", "--tune=all", "--out=tuned"]

error = functools.partial(commands.error, "eval")


def run(*args):
    result = commands.run("eval", *args)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def work(work):
    """With a longer text."""
    (work / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    return work


def records(folder):
    return {path: json.loads(path.read_text()) for path in sorted(Path(folder).glob("**/results/*/*.json"))}


def test_second_run_adds_to_a_folder():
    assert run(*NOISE_TASK, "--methods=full", "--out=out") == Path("out/table.md").read_text()
    ((path, record),) = records("out").items()
    assert path == Path("out/results/full/niah_single_1-1024-prefix.json")
    assert record["score"] == 100 * sum(sample["score"] for sample in record["samples"]) / 2
    assert all(sample["prompt_tokens"] + 128 <= 1024 for sample in record["samples"])
    assert record["kv_cache_bytes"] == record["full_kv_cache_bytes"] > 0
    finished = path.stat().st_mtime_ns
    run(*NOISE_TASK, "--methods=full,random:share=0.25,window=128", "--out=out")
    full, other = records("out").values()
    assert (full["method"], other["method"]) == ("full", "random:share=0.25,window=128")
    assert other["kv_cache_bytes"] < 0.7 * other["full_kv_cache_bytes"]
    assert 0.2 < other["attended_share"] < 0.7
    assert path.stat().st_mtime_ns == finished
    assert "| random:share=0.25,window=128 |" in Path("out/table.md").read_text()


@pytest.mark.slow
def test_suites_fix_tasks_and_protocol():
    run(*SUITE, "--out=late")
    assert {(record["suite"], record["protocol"]) for record in records("late").values()} == {("ruler", "late")}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--methods=fool"], "--methods fool: 'fool' is not registered: must be one of"),
        (["--methods="], "--methods is empty"),
        (["--methods=full,full"], "names 'full' twice"),
        (["--methods=paper", "--tasks=loss", "--lengths=128"], "no profile of the paper's hyperparameters"),
        (["--tasks=niah"], "--tasks niah: must be one of ['cwe'"),
        (["--tasks=vt,vt"], "--tasks names vt twice"),
        (["--protocols=suffix"], "--protocols suffix: must be one of ['late', 'late-prefix', 'preamble', 'prefix']"),
        (["--lengths=4k"], "--lengths 4k: must be numbers of tokens"),
        (["--lengths=8192"], "--lengths 8192: must lie in [1, 4096], positions of model"),
        (["--tasks=fwe", "--lengths=256"], "--lengths 256: fwe needs at least"),
        (["--tasks=qa_1", "--lengths=4096"], "qa_1: needs --squad FILE"),
        (["--tasks=recall", "--lengths=128"], "--lengths 128: recall_digits needs at least 3500"),
        (["--squad=absent.json"], "absent.json: No such file or directory"),
        (["--kv-share=1.5"], "--kv-share = 1.5: must lie in (0, 1]"),
        (["--methods=tca", "--tasks=loss", "--lengths=128"], "--methods tca: needs --profile DIR"),
        (["--profile=absent"], "absent"),
        (["--out=text.txt/x"], "--out text.txt/x cannot be written"),
        (["--suite=ruler"], "--suite ruler: must be one of ['late', 'paper']"),
        (["--suite=paper", "--tasks=vt"], "--tasks is fixed by --suite paper: leave it out, or leave out --suite"),
        (["--suite=late", "--kv-share=0.5"], "--kv-share is fixed by --suite late"),
        (["--tune=cake", "--kv-share=0.5"], "--tune cake: must be all, or methods of --methods with options to search"),
        (["--tune=all", "--kv-share=0.5"], "--tune all: must be all, or methods of --methods with options to search"),
        (["--tune=all"], "--tune: needs --kv-share"),
        (["--trials=2"], "--trials and --tune-text say how to tune: they need --tune"),
    ],
)
def test_refusals_write_nothing(args, message):
    assert message in error("model", "--methods=full", "--out=refused", *args)
    assert not Path("refused").exists()


def test_groups_skip_tasks_that_do_not_fit():
    settings = {"samples": 1, "seed": 0, "sources": Sources(), "kv_share": None, "batch": 1}
    checkpoint, methods = open_checkpoint("model"), parse_methods("full")
    plan = make_plan(checkpoint, methods, ["ruler"], [1024, 4096], ["prefix", "late"], **settings)
    assert {name for name, _ in plan.drawn} == {task.name for task in TASKS} - {"cwe", "qa_1", "qa_2"}
    assert [length for name, length in plan.drawn if name == "niah_single_1"] == [1024, 4096]
    assert [length for name, length in plan.drawn if name == "vt"] == [4096]
    assert "qa_1: needs --squad FILE" in plan.skipped
    assert any(reason.startswith("--lengths 4096: cwe needs at least") for reason in plan.skipped)
    jobs = plan.jobs()
    assert len(jobs) == len(set(jobs)) == 2 * len(plan.drawn)


# --- tuning ---


def test_points_begin_with_the_defaults():
    spec, tova, fixed, pair = parse_methods("snapkv,tova,snapkv:kernel=7,pooling=max,xattention+tova")
    points = tuning.points(spec, 8, 0)
    assert points[0] == spec
    assert points == tuning.points(spec, 8, 0) != tuning.points(spec, 8, 1)
    assert len(tuning.points(tova, 50, 0)) == 1 + len(tuning.SPACES["tova"]["window"])
    kept = [dict(point.parts[0][1]) for point in tuning.points(fixed, 5, 0)[1:]]
    assert all((options["kernel"], options["pooling"], len(options)) == (7, "max", 4) for options in kept)
    for again in tuning.points(pair, 3, 0):
        assert parse_methods(again.label) == (again,)


def test_best_trial_costs_no_more_than_the_first():
    names = ("excess", "held_share", "attended_share")
    trials = [dict(zip(names, each, strict=True)) for each in ((3, 0.3, 1), (2, 0.5, 1), (1, 0.6, 1), (0, 0.4, 1.01))]
    assert tuning.best_trial(trials, 0.5) == trials[1]
    assert tuning.best_trial([trials[2], *trials], 0.5) == trials[2]


@pytest.mark.slow
def test_tuning_continues_and_shows_both():
    printed, path = run(*TUNED), Path("tuned/tuning/snapkv.json")
    record = json.loads(path.read_text())
    first, second = record["trials"]
    best = next(trial for trial in (first, second) if trial["spec"] == record["tuned"])
    assert best["excess"] <= first["excess"]
    assert max(first["held_share"], second["held_share"]) <= 0.6
    assert f"| {record['tuned']} (tuned) |" in printed
    finished = path.stat().st_mtime_ns
    assert run(*TUNED) == printed
    assert path.stat().st_mtime_ns == finished
    assert error(*TUNED, "--trials=3").startswith("--out tuned was made with trials = ")
