"""`tca-jax bench --mesh` and `tca-jax eval --mesh`: what they run on, what their results say of it, what is refused."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of, needs_8_devices
from tiny import write_checkpoint
from typer.testing import CliRunner

import tca_jax
from tca_jax.cli.app import app
from tca_jax.cli.options import LAUNCH_ORDER
from tca_jax.engine.decode import PROMPTS, STARTED, prefill
from tca_jax.engine.mesh import OverMesh
from tca_jax.engine.sampling import Sampling
from tca_jax.lab.benchmarks.attention import Prefill
from tca_jax.lab.benchmarks.common import find_layers
from tca_jax.lab.benchmarks.decode_models import random_state
from tca_jax.lab.benchmarks.fetching import FETCH_STAGES
from tca_jax.lab.benchmarks.layer_mesh import inputs_over
from tca_jax.lab.benchmarks.mesh_columns import SPEED_UPS, Peaks, with_speed_ups
from tca_jax.lab.benchmarks.models import random_model, under_share
from tca_jax.lab.benchmarks.shares import Share

pytestmark = needs_8_devices

TINY = ["--models=tiny", "--window=128", "--backend=xla", "--repeats=1", "--lengths=512"]
BENCH = ["bench", "end-to-end", *TINY]
QUICK = ["--new-tokens=8", "--copy-bytes=1048576", "--kept=0.6"]
ATTENTION = ["bench", "attention", *TINY, "--block-shares=0.05:0.5"]
DECODE = ["bench", "decode", *TINY, "--block-shares=0.2", "--layers=1", "--copy-bytes=1048576"]
DENSE_HEADS = Share(0.5, prefill=0.05)
EVAL = ["eval", "model", "--methods=full", "--tasks=loss", "--lengths=128", "--samples=3", "--text=text.txt"]


def run(*args):
    return CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "80", "TERM": "xterm"})


@pytest.fixture(autouse=True)
def _nothing_set_is_left(monkeypatch) -> None:
    """Behind a test the environment is without what its commands have set."""
    monkeypatch.setenv(LAUNCH_ORDER, "")
    monkeypatch.delenv(LAUNCH_ORDER)


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    write_checkpoint(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 12)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [BENCH, ATTENTION, DECODE, EVAL], ids=lambda command: command[1])
@pytest.mark.parametrize(
    ("before", "expected"), [(None, "1"), ("8", "8")], ids=["by default", "the environment differs"]
)
def test_kernels_of_a_command_over_a_mesh_start_in_the_order_of_their_launch(command, before, expected, monkeypatch):
    if before is not None:
        monkeypatch.setenv(LAUNCH_ORDER, before)
    assert run(*command, "--mesh=9x9").exit_code == 2  # there are no 81 devices
    assert os.environ[LAUNCH_ORDER] == expected


@pytest.mark.parametrize("command", [BENCH, EVAL], ids=lambda command: command[1])
def test_the_order_is_set_before_jax_looks_for_a_device(command):
    script = f"""
        import os, sys
        from jax._src import xla_bridge
        from tca_jax.cli.app import app

        class Watched(type(os.environ)):
            def setdefault(self, key, value):
                if key == {LAUNCH_ORDER!r}:
                    print("too late" if xla_bridge.backends_are_initialized() else "in time")
                return super().setdefault(key, value)

        os.environ.__class__ = Watched
        app({[*command, "--mesh=9x9"]!r})
    """
    environment = {name: value for name, value in os.environ.items() if name != LAUNCH_ORDER}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "in time\n", done.stderr


@pytest.mark.slow
def test_end_to_end_runs_over_a_mesh_and_says_so(tmp_path):
    result = run(*BENCH, *QUICK, "--mesh=2x2", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "end-to-end.json").read_text())
    (row,) = record["rows"]
    assert row["mesh"] == "2x2"
    assert row["measured peak GB"] == ""  # a CPU does not say
    assert not any("first mesh" in column for column in row)
    assert "--mesh=2x2" in record["environment"]["command"]
    assert "with 2 prompts on each mesh" in (tmp_path / "end-to-end.md").read_text()


@pytest.mark.slow
def test_meshes_of_one_run_are_compared_with_the_first(tmp_path):
    result = run(*BENCH, *QUICK, "--layers=1", "--mesh=1x1", "--mesh=2x2", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "end-to-end.json").read_text())
    one, many = record["rows"]
    assert (one["mesh"], many["mesh"]) == ("1x1", "2x2")
    assert one["over even share"] == 1 < many["over even share"]
    assert many["held GB"] < one["held GB"] < 3 * many["held GB"]  # weights are shared by two of the four
    for column, name in SPEED_UPS.items():
        assert (one[name], many[name]) == (1, pytest.approx(one[column] / many[column]))
    assert "as fast the same attention is as on the first mesh" in record["note"]
    assert (tmp_path / "end-to-end.png").stat().st_size > 0


def test_a_row_is_compared_with_the_same_model_length_storage_and_attention():
    place = {"model": "tiny", "tokens": 512, "attention": "full", "mesh": "1x1"}
    rows = [
        {**place, "TTFT s": 8.0, "ms/token": 6.0},
        {**place, "attention": "TCA", "TTFT s": 4.0, "ms/token": 3.0},
        {**place, "fp8": "both", "TTFT s": 3.0, "ms/token": 5.0},
        {**place, "mesh": "1x2", "TTFT s": 2.0, "ms/token": 4.0},
        {**place, "mesh": "1x2", "attention": "TCA", "TTFT s": 2.0, "ms/token": 2.0},
    ]
    found = [tuple(row[name] for name in SPEED_UPS.values()) for row in with_speed_ups(rows)]
    assert found == [(1, 1), (1, 1), (1, 1), (4, 1.5), (2, 1.5)]


def test_a_peak_is_told_only_where_it_was_reached_just_now(monkeypatch):
    device = SimpleNamespace(peak=10**9)
    device.memory_stats = lambda: {"peak_bytes_in_use": device.peak}
    monkeypatch.setattr(jax, "devices", lambda: [device])
    peaks = Peaks(None)
    assert peaks.grown() == ""
    device.peak = 3 * 10**9
    assert peaks.grown() == 3
    assert peaks.grown() == ""


@pytest.mark.slow
def test_attention_of_a_layer_is_timed_over_a_mesh(tmp_path, monkeypatch):
    monkeypatch.setattr("tca_jax.lab.benchmarks.prefill_methods._STEPS", 1)
    result = run(*ATTENTION, "--methods=minference", "--mesh=2x2", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "attention.json").read_text())
    (row,), (other,) = record["rows"], record["Other methods"]
    assert row["mesh"] == other["mesh"] == "2x2"
    assert row["kept in prefill"] < row["kept"]
    assert row["error"] == other["error"] == 0
    assert "shared by 4 devices" in record["note"]


@pytest.mark.slow
def test_heads_that_fetch_are_timed_over_a_mesh(tmp_path):
    args = [*ATTENTION, "--lengths=3072", "--fetching=0", "--fetching=1", "--mesh=1x2"]
    result = run(*args, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    short, short_one, none, one = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert [row["tokens"] for row in (short, short_one, none, one)] == [512, 512, 3072, 3072]
    assert none["area"] < one["area"] < 1
    assert one["kept in prefill"] == pytest.approx(none["kept in prefill"], rel=0.1)
    assert min(one[f"{name} ms"] for name in FETCH_STAGES) > 0
    assert one["error"] == 0


@pytest.mark.slow
def test_decoding_is_timed_over_a_mesh(tmp_path):
    result = run(*DECODE, "--batches=2", "--mesh=2x2", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "decode.json").read_text())
    for table in (record["rows"], record["Whole models"]):
        assert [(row["mesh"], row["share"]) for row in table] == [("2x2", 1.0), ("2x2", 0.2)]
        assert table[1]["attended"] < table[0]["attended"] == 1
    assert "shared by 4 devices" in record["note"]


def test_a_layer_over_a_mesh_gives_what_one_device_does():
    (layer,), config = find_layers(["tiny"]), tca_jax.TCAConfig(window=128)
    mesh = mesh_of((2, 2))
    many = Prefill.create(layer, DENSE_HEADS, "xla", config, mesh)
    many = dataclasses.replace(many, shards=dataclasses.replace(many.shards, order=((1, 0),)))
    one = Prefill.create(layer, DENSE_HEADS, "xla", config)
    q, k, v, n = inputs_over(mesh, layer, 512, seed=0)
    out, selected = many.whole(q, k, v, n)
    stages = many.stages(q, k, v, n)
    np.testing.assert_array_equal(stages["attention"](), out)
    np.testing.assert_array_equal(stages["select"]().budgets, selected.budgets)
    order = [1, 0]  # where the model's heads lie on the mesh
    q, out = (x.reshape(2, 512, layer.kv_heads, -1, layer.head_dim)[:, :, order].reshape(q.shape) for x in (q, out))
    expected, kept = one.whole(q, k[:, :, order], v[:, :, order], n)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=1e-2)
    np.testing.assert_array_equal(np.asarray(selected.budgets)[:, order], kept.budgets)
    np.testing.assert_array_equal(np.asarray(selected.pool.lengths)[:, order], kept.pool.lengths)


def test_a_random_state_on_a_mesh_is_one_that_prefill_could_have_left():
    lm = under_share(random_model("tiny", jax.random.key(0), mesh=mesh_of((2, 2))), DENSE_HEADS, tca_jax.TCAConfig())
    state = random_state(lm, 2, 2048)
    arguments = (lm, jnp.zeros((2, 2048), jnp.int32), jnp.array([2048, 2048]), state.keys, Sampling())
    reading = OverMesh(prefill, PROMPTS, STARTED)
    new_tokens = state.tokens.shape[1]
    left, _ = jax.eval_shape(lambda *args: reading(*args, state.stop_tokens, new_tokens=new_tokens), *arguments)
    assert jax.tree.structure(left) == jax.tree.structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(left)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    held = {shard.device: shard.data.nbytes for shard in state.cache.k.addressable_shards}
    assert len(held) == 4
    assert len(set(held.values())) == 1
    for kept, table in zip(state.cache.kept, state.cache.tables, strict=True):
        room = (np.asarray(table) < state.cache.k.shape[2]).sum(axis=-1) * 128
        assert (np.asarray(kept) <= room).all()


@pytest.mark.slow
def test_an_evaluation_over_a_mesh_finds_what_one_device_does_and_says_so(work):
    found = []
    for folder, mesh in (("one", []), ("many", ["--mesh=2x2"])):
        result = run(*EVAL, *mesh, f"--out={folder}")
        assert result.exit_code == 0, result.output
        found.append([json.loads(path.read_text()) for path in sorted(Path(folder).glob("results/*/*.json"))])
    for one, many in zip(*found, strict=True):
        assert many["score"] == pytest.approx(one["score"], abs=1e-3)
        for sample, other in zip(one["samples"], many["samples"], strict=True):  # three, of devices for two
            assert other == {name: pytest.approx(value, abs=1e-3) for name, value in sample.items()}
        assert one["kv_cache_bytes"] <= many["kv_cache_bytes"] < 1.3 * one["kv_cache_bytes"]
    assert json.loads(Path("many/config.json").read_text())["mesh"] == "2x2"
    assert "on a mesh of 2x2 devices" in Path("many/table.md").read_text()
    assert "mesh" not in json.loads(Path("one/config.json").read_text())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*BENCH, *QUICK, "--mesh=4"], "--mesh 4: must be devices on 'data' x devices on 'model', such as 1x4"),
        ([*BENCH, *QUICK, "--mesh=1x64"], "--mesh 1x64: needs 64 devices, there are"),
        ([*BENCH, *QUICK, "--mesh=1x8"], "KV heads"),
        ([*ATTENTION, "--mesh=1x4"], "--mesh 1x4: 4 devices on 'model', but a layer of tiny has 2 KV heads"),
        ([*DECODE, "--mesh=1x4"], "--mesh 1x4: 4 devices on 'model', but a layer of tiny has 2 KV heads"),
        ([*DECODE, "--batches=2", "--batches=3", "--mesh=2x1"], "--batches 3: must be a multiple of 2, the devices"),
        ([*EVAL, "--mesh=1x4"], "has 2 KV heads"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(args, message, work):
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
