"""`tca-jax bench soak` on a tiny model: it passes, and it fails where something drifts."""

import itertools
import json

import jax.numpy as jnp
import pytest
from soaks import soak_arguments
from tiny import write_checkpoint
from typer.testing import CliRunner

import tca_jax
from tca_jax.cli.app import app
from tca_jax.lab.benchmarks import soak


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path):
    def run(*more):
        return CliRunner().invoke(app, [*soak_arguments(model, 20, tmp_path), *more])

    return run


def test_a_soak_reports_what_ran_and_that_nothing_drifted(run, tmp_path):
    result = run()
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "soak.json").read_text())
    rows = record["rows"]
    assert {"full", "streaming", "uniform", "random"} <= {row["method"] for row in rows}
    assert sum(row["requests"] for row in rows) == 20
    assert sum(row["of them repeats"] for row in rows) > 1
    assert sum(row["distinct programs"] for row in rows) >= 2
    assert all(row[what] == 0 for row in rows for what in ("compiled again", "other answers", "errors"))
    assert [row["at"] for row in record["Memory"]] == ["start", "each shape has run", "end"]
    assert "nothing failed" in record["note"]
    assert "| full |" in (tmp_path / "soak.md").read_text()


@pytest.mark.parametrize(
    ("drift", "message"),
    [
        ("another answer", "other answers"),
        ("a leak", "MB of live arrays grew"),
        ("a compilation", "compiled again"),
        ("an error", "errors"),
    ],
)
def test_a_soak_fails_where_something_drifts(drift, message, run, monkeypatch):
    calls, kept = itertools.count(), []

    def drifting(*args, **options):
        if drift == "a leak":
            kept.append(jnp.zeros(100_000) + 1)
        if drift == "a compilation":
            kept.append(jnp.arange(next(calls) + 1) * 2)
        out = generate(*args, **options)
        if drift == "another answer":
            out.tokens[0].append(next(calls))
        if drift == "an error":
            raise RuntimeError("this backend is out of order")
        return out

    generate = tca_jax.generate
    monkeypatch.setattr(tca_jax, "generate", drifting)
    result = run()
    assert result.exit_code == 1, result.output
    assert message in result.stderr.split("failed: ", 1)[1]


def test_time_that_is_up_ends_a_soak(run, tmp_path):
    assert run("--minutes=0", "--generations=1000").exit_code == 0
    assert sum(row["requests"] for row in json.loads((tmp_path / "soak.json").read_text())["rows"]) == 2


def test_shapes_take_every_method_in_turn_and_hold_lengths_of_one_bucket():
    shapes = soak.draw_shapes(["a", "b", "c"], [100, 700], 12, soak.random.Random(0))
    assert [shape.method for shape in shapes] == ["a", "b", "c"] * 4
    assert {shape.context for shape in shapes if shape.method == "a"} == {True, False}
    assert {shape.tokens for shape in shapes} == {112, 704}
    assert [(soak._least(n), n) for n in (16, 32, 112, 704)] == [(1, 16), (17, 32), (97, 112), (641, 704)]
