"""`tca-jax bench --mesh` and `tca-jax eval --mesh`: what they run on, what their results say of it, what is refused."""

import json
from pathlib import Path

import pytest
from meshes import needs_8_devices
from tiny import write_checkpoint
from typer.testing import CliRunner

from tca_jax.cli.app import app

pytestmark = needs_8_devices

BENCH = ["bench", "end-to-end", "--models=tiny", "--window=128", "--backend=xla", "--repeats=1", "--lengths=512"]
QUICK = ["--new-tokens=8", "--copy-bytes=1048576", "--kept=0.6"]
EVAL = ["eval", "model", "--methods=full", "--tasks=loss,agreement", "--lengths=128", "--samples=2", "--text=text.txt"]


def run(*args):
    return CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "80", "TERM": "xterm"})


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    write_checkpoint(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 12)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_end_to_end_runs_over_a_mesh_and_says_so(tmp_path):
    result = run(*BENCH, *QUICK, "--mesh=2x2", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "end-to-end.json").read_text())
    (row,) = record["rows"]
    assert row["mesh"] == "2x2"
    assert "--mesh=2x2" in record["environment"]["command"]
    assert "shared by 4 devices" in (tmp_path / "end-to-end.md").read_text()


def test_an_evaluation_over_a_mesh_finds_what_one_device_does_and_says_so(work):
    found = []
    for folder, mesh in (("one", []), ("many", ["--mesh=1x2"])):
        result = run(*EVAL, *mesh, f"--out={folder}")
        assert result.exit_code == 0, result.output
        found.append([json.loads(path.read_text()) for path in sorted(Path(folder).glob("results/*/*.json"))])
    for one, many in zip(*found, strict=True):
        assert many["score"] == pytest.approx(one["score"], abs=1e-3)
    assert json.loads(Path("many/config.json").read_text())["mesh"] == "1x2"
    assert "on a mesh of 1x2 devices" in Path("many/table.md").read_text()
    assert "mesh" not in json.loads(Path("one/config.json").read_text())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*BENCH, *QUICK, "--mesh=4"], "--mesh 4: must be devices on 'data' x devices on 'model', such as 1x4"),
        ([*BENCH, *QUICK, "--mesh=1x64"], "--mesh 1x64: needs 64 devices, there are"),
        ([*BENCH, *QUICK, "--mesh=1x8"], "KV heads"),
        ([*EVAL, "--mesh=2x1"], "--mesh 2x1: some tasks have one row"),
        ([*EVAL, "--mesh=1x4"], "has 2 KV heads"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(args, message, work):
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
