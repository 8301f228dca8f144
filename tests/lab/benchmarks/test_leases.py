"""What benchmarks leave behind where memory or time does not suffice, and what they say while they run."""

import dataclasses
import itertools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import needs_8_devices
from soaks import soak_arguments
from tiny import write_checkpoint
from typer.testing import CliRunner

import tca_jax
from tca_jax.cli.app import app
from tca_jax.lab.benchmarks import ending as ending_module
from tca_jax.lab.benchmarks import progress, soak, whole_models
from tca_jax.lab.benchmarks.common import fitted
from tca_jax.lab.benchmarks.ending import Ending

END_TO_END = [
    *("bench", "end-to-end", "--models=tiny", "--window=128", "--backend=xla", "--repeats=1", "--lengths=512"),
    *("--new-tokens=8", "--copy-bytes=1048576", "--kept=1", "--kept=0.6", "--no-compilation"),
]


def run(*args):
    return CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "80", "TERM": "xterm"})


def record_of(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def out_of_memory():
    """The error that XLA raises."""
    jax.block_until_ready(jax.jit(lambda: jnp.zeros((2**30, 2**30), jnp.int8))())


# ---- memory


def test_what_does_not_fit_is_told_and_any_other_error_is_raised(capsys):
    unfit = []
    assert fitted(lambda: 3, "three", unfit) == 3
    assert fitted(out_of_memory, "an exabyte", unfit) is None
    assert unfit == ["an exabyte"]
    assert capsys.readouterr().out.startswith("does not fit: an exabyte: RESOURCE_EXHAUSTED: ")

    def other():
        raise jax.errors.JaxRuntimeError("INTERNAL: the device has gone")

    with pytest.raises(jax.errors.JaxRuntimeError, match="has gone"):
        fitted(other, "another", unfit)
    assert unfit == ["an exabyte"]


def test_what_was_made_before_memory_ran_out_is_let_go():
    def call():
        held = jnp.zeros(12_345)
        out_of_memory()
        return held

    assert fitted(call, "it", []) is None
    assert not any(array.shape == (12_345,) for array in jax.live_arrays())


@pytest.mark.slow
@needs_8_devices
def test_a_model_that_does_not_fit_a_mesh_costs_no_other_row(tmp_path, monkeypatch):
    def small(*args, mesh, **options):
        return out_of_memory() if mesh.size == 1 else random_model(*args, mesh=mesh, **options)

    random_model = whole_models.random_model
    monkeypatch.setattr(whole_models, "random_model", small)
    result = run(*END_TO_END, "--mesh=1x1", "--mesh=1x2", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = record_of(tmp_path, "end-to-end")
    assert [(row["mesh"], row["attention"]) for row in record["rows"]] == [("1x2", "full"), ("1x2", "TCA 60%")]
    assert "Memory did not suffice for the weights of tiny on 1x1." in record["note"]
    assert "tiny on 1x2: weights made in " in result.stdout
    assert "tiny on 1x2, 512 tokens, full: compiled in " in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["compile", "time"])
def test_an_attention_that_does_not_fit_costs_no_other_row(stage, tmp_path, monkeypatch):
    owner = whole_models.Run if stage == "compile" else whole_models.Times
    known = getattr(owner, stage)

    def small(self, *args):
        run = self if stage == "compile" else self.run
        too_large = run.lm.method.name == "full" and run.tokens.shape[1] == 512
        return out_of_memory() if too_large else known(self, *args)

    monkeypatch.setattr(owner, stage, small)
    result = run(*END_TO_END, "--lengths=640", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = record_of(tmp_path, "end-to-end")
    found = [(row["tokens"], row["attention"]) for row in record["rows"]]
    assert found == [(512, "TCA 60%"), (640, "full"), (640, "TCA 60%")]
    assert [row["TTFT speed-up"] == "" for row in record["rows"]] == [True, False, False]
    assert "Memory did not suffice for tiny, 512 tokens, full." in record["note"]
    assert (tmp_path / "end-to-end.png").stat().st_size > 0


def test_where_nothing_fits_the_run_fails_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_models, "random_model", lambda *args, **options: out_of_memory())
    result = run(*END_TO_END, "--out", tmp_path)
    assert result.exit_code == 1, result.output
    assert "Memory did not suffice for the weights of tiny." in record_of(tmp_path, "end-to-end")["note"]


@pytest.mark.slow
def test_rows_are_on_disk_as_soon_as_their_length_is_done(tmp_path, monkeypatch):
    def measure(lms, place, tokens, *args):
        if tokens == 640:
            raise RuntimeError("the machine is taken away")
        return known(lms, place, tokens, *args)

    known = whole_models.measure
    monkeypatch.setattr(whole_models, "measure", measure)
    assert isinstance(run(*END_TO_END, "--lengths=640", "--out", tmp_path).exception, RuntimeError)
    record = record_of(tmp_path, "end-to-end")
    assert [(row["tokens"], row["attention"]) for row in record["rows"]] == [(512, "full"), (512, "TCA 60%")]
    assert "The run was going on when this was written." in record["note"]


# ---- time


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run_soak(model, tmp_path):
    def run_soak(*more):
        return run(*soak_arguments(model, 12, tmp_path), *more)

    return run_soak


def at_call(monkeypatch, number, action):
    """Does something in the so many-th call of `tca_jax.generate`."""
    calls, generate = itertools.count(1), tca_jax.generate

    def counting(*args, **options):
        if next(calls) == number:
            action()
        return generate(*args, **options)

    monkeypatch.setattr(tca_jax, "generate", counting)
    monkeypatch.setattr(soak, "_STREAMED", 0.0)  # all are calls of `generate`


@pytest.mark.slow
@pytest.mark.parametrize(("told_by", "code"), [("SIGTERM", 1), ("SIGINT", 130)])
def test_a_soak_that_is_told_to_stop_writes_what_has_run(told_by, code, run_soak, tmp_path, monkeypatch):
    at_call(monkeypatch, 5, lambda: os.kill(os.getpid(), getattr(signal, told_by)))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    result = run_soak()
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (code, "interrupted"), result.output
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    record = record_of(tmp_path, "soak")
    assert sum(row["requests"] for row in record["rows"]) == 5
    assert f"5 of the 12 generations asked for, as it was interrupted by {told_by}; 2 shapes" in record["note"]
    assert [row["at"] for row in record["Memory"]] == ["start", "each shape has run", "end"]
    assert "Results: " in result.stdout


@pytest.mark.slow
def test_a_soak_that_is_killed_leaves_what_it_wrote_last(run_soak, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "_WRITTEN_EVERY", 0.0)
    steps, step = itertools.count(), soak.Soak.step

    def dying(self):
        if next(steps) == 3:
            raise SystemExit("killed")
        return step(self)

    monkeypatch.setattr(soak.Soak, "step", dying)
    result = run_soak()
    assert "| full |" not in result.stdout
    record = record_of(tmp_path, "soak")
    assert "5 of the 12 generations asked for, as it was still running when this was written" in record["note"]
    assert [row["at"] for row in record["Memory"]] == ["start", "each shape has run", "so far"]


@pytest.mark.slow
def test_shapes_that_time_does_not_suffice_for_are_dropped_and_named(run_soak, tmp_path):
    result = run_soak("--minutes=0", "--shapes=4")
    assert result.exit_code == 0, result.output
    record = record_of(tmp_path, "soak")
    assert sum(row["requests"] for row in record["rows"]) == 2
    assert (
        "2 of the 12 generations asked for, as its time was up; 2 shapes of requests, without the 2" in record["note"]
    )
    assert "whose turn had not come in time (" in record["note"]
    [compiling] = [row for row in record["Time"] if row["phase"] == "compiling"]
    assert compiling["s"] > 0


@pytest.mark.slow
def test_compiling_leaves_time_for_generations(run_soak, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "_COMPILING", 0.0)
    result = run_soak("--minutes=60", "--shapes=4")
    assert result.exit_code == 0, result.output
    record = record_of(tmp_path, "soak")
    assert sum(row["requests"] for row in record["rows"]) == 12
    assert "12 generations; 2 shapes of requests, without the 2 whose turn had not come in time" in record["note"]


def test_a_context_that_there_is_no_time_to_append_to_is_dropped_with_its_shape(model, monkeypatch):
    lm = tca_jax.load(model)
    requested = soak.Soak({"full": lm}, [64], 8, 3, "auto", Ending(3600.0))
    requested.shapes = [dataclasses.replace(shape, context=True, appended=True) for shape in requested.shapes]
    monkeypatch.setattr(soak, "_RUN_ANYWAY", 0)
    monkeypatch.setattr(requested, "_compile", lambda request: monkeypatch.setattr(soak, "_COMPILING", 0.0))
    assert requested.compile() == []
    requested.compilations.close()


@pytest.mark.slow
def test_a_shape_that_cannot_be_compiled_fails_when_it_runs_and_costs_no_other(run_soak, tmp_path, monkeypatch):
    def failing(self):
        raise RuntimeError("this backend is out of order")

    monkeypatch.setattr(soak.Question, "compile", failing)
    assert run_soak().exit_code == 0  # nothing is wrong but what is made in advance
    assert sum(row["requests"] for row in record_of(tmp_path, "soak")["rows"]) == 12


@pytest.mark.parametrize("appended", [False, True])
def test_requests_of_a_shape_over_a_context_share_their_programs(appended, model):
    requested = soak.Soak({"full": tca_jax.load(model)}, [128], 1, 0, "auto", Ending())
    requested.compilations.close()
    [shape] = requested.shapes
    shape = dataclasses.replace(shape, prompts=2, context=True, appended=appended)
    held, block = shape.tokens - 5, requested._context(shape).layout.block_size
    found, layouts = set(), set()
    for seed in range(100):
        more, asked = requested._following(shape, requested._context(shape), np.random.default_rng(seed))
        assert (more > 0) == appended
        found.add((more, *asked))
        ends = held + more, (held + more) // block * block + (held + more) % block + max(asked)
        layouts.add((held // block, *(-(-end // block) for end in ends)))
    assert len(found) > 50
    assert len(layouts) == 1


def test_an_answer_has_room_for_the_tokens_that_it_must_have(model):
    lm = tca_jax.load(model)
    shape = soak.Shape("full", 64, 1, 1, 16, frozenset({"min_new_tokens"}))
    drawn = [soak.draw_options(shape, lm, np.random.default_rng(seed)) for seed in range(200)]
    assert all(options["min_new_tokens"] <= options["max_new_tokens"] in range(2, 17) for options in drawn)
    assert len({options["max_new_tokens"] for options in drawn}) > 10


def test_a_share_of_the_time_is_up_before_all_of_it(monkeypatch):
    now = 100.0
    monkeypatch.setattr(ending_module.time, "monotonic", lambda: now)
    ending = Ending(60.0)
    now = 130.0
    assert (ending.time_is_up(0.5), ending.time_is_up(), ending.reason) == (True, False, "")
    now = 160.0
    assert (ending.time_is_up(), ending.reason) == (True, "its time was up")
    assert Ending().reason == ""


@pytest.mark.slow
def test_a_soak_says_what_it_is_doing_from_the_start(run_soak):
    errors = run_soak().stderr
    for line in ("0 of 2 shapes of requests compiled: ", "2 of 2 shapes run: ", "12 of 12 generations: 0 failed"):
        assert line in errors


def test_in_a_log_progress_is_a_line_now_and_then_with_the_time_left(capsys, monkeypatch):
    clock = iter([0.0, *range(1, 200)])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.counted("steps", line_seconds=10) as report:
        for done in range(24, 41):
            report(done, 40, f"step {done}")
    assert capsys.readouterr().err.splitlines() == [
        "24 of 40 steps: step 24",
        "35 of 40 steps, about 5 s left: step 35",
        "40 of 40 steps: step 40",
    ]


def test_only_the_first_signal_is_for_the_run():
    ending, heard = Ending(), []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("before"))
    try:
        with ending.told_by_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            assert (ending.signal, heard) == (signal.SIGTERM, [])
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == ["before"]
        assert "SIGTERM" in ending.reason
    finally:
        signal.signal(signal.SIGTERM, before)
