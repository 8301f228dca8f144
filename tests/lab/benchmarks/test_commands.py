"""`tca-jax bench`: each command at sizes of a CPU, what it refuses, and what the commands share."""

import functools

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import needs_8_devices

import tca_jax
from tca_jax import methods
from tca_jax.cli.options import LAUNCH_ORDER
from tca_jax.lab.benchmarks import attention, serve
from tca_jax.lab.benchmarks.common import agreement, fitted, random_normal, read_results
from tca_jax.lab.benchmarks.models import CONFIGS, tca_with

TINY = ["--models=tiny", "--lengths=512", "--window=128"]
SERVE = [
    *("--model=tiny", "--tokens=512", "--window=128", "--block-shares=0.25", "--rows=2", "--documents=2"),
    *("--prompt-tokens=300", "--answer-tokens=8", "--rate=50", "--requests=4"),
]
SOAK, XLA = ["--minutes=0.3", "--documents=4", "--question-tokens=40"], "--backend=xla"

run, error = (functools.partial(each, "bench") for each in (commands.run, commands.error))


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setenv(LAUNCH_ORDER, "1")  # as --mesh sets it
    yield
    jax.config.update("jax_default_matmul_precision", None)  # a soak raises it


def bench(name, folder, *args):
    result = run(name, *args, "--out", folder)
    assert result.exit_code == 0, result.output
    assert f"Results: {folder / name}.jsonl" in result.stdout
    return read_results(folder / f"{name}.jsonl")["rows"]


def positive(rows):
    figures = [(key, value) for row in rows for key, value in row.items() if isinstance(value, int | float)]
    assert all(value >= 0 if key in ("error", "compile s", "peak GB") else value > 0 for key, value in figures), rows


def test_attention_compares_methods_with_full_attention(tmp_path):
    args = [*TINY, XLA, "--repeats=1", "--block-shares=0.5", "--methods=full", "--worth"]
    tca, full, worth, one_head = bench("attention", tmp_path, *args)
    assert worth["area"] < one_head["area"] < 1
    assert (tca["attention"], full["attention"]) == ("TCA 0.5", "full")
    assert 0 < tca["area"] < full["area"] == full["kept"] == 1 > tca["kept"]
    assert tca["error"] == full["error"] == 0  # the oracle against itself
    assert tca["speed-up"] == pytest.approx(tca["full ms"] / tca["total ms"])


def test_decode_compares_caches_by_their_bytes(tmp_path):
    args = [*TINY, "--repeats=1", XLA, "--block-shares=0.2", "--rows=2", "--kv=fp8"]
    rows = bench("decode", tmp_path, *args)
    positive(rows)
    layer = [row for row in rows if row["table"] == rows[0]["table"]]
    assert layer[1]["KV MB"] < 0.6 * layer[0]["KV MB"]  # fp8 and bfloat16
    assert layer[2]["attended"] < layer[0]["attended"] == 1


def test_end_to_end_times_answers_and_questions(tmp_path):
    options = ["--lengths=1024", "--repeats=1", "--block-shares=0.5", "--worth=0.3", "--new-tokens=4", "--questions=2"]
    full, tca, worth, *asked = [row for row in bench("end-to-end", tmp_path, *TINY, *options) if row["tokens"] == 1024]
    assert (full["attention"], tca["attention"], worth["attention"]) == ("full", "TCA 0.5", "worth 0.3")
    assert worth["kept"] == pytest.approx(0.3 * 0.75 + 0.25 + 0.125, abs=0.1)  # ranked, window, reserve
    assert full["TTFT speed-up"] == full["ms/token speed-up"] == full["kept"] == full["area"] == 1
    assert tca["TTFT speed-up"] == pytest.approx(full["TTFT s"] / tca["TTFT s"])
    assert max(tca["kept"], tca["area"], worth["area"]) < 1
    assert tca["KV GB"] < full["KV GB"] < full["GB per device"]
    assert [row["questions"] for row in asked] == [2, 2, 2]
    positive([tca, worth, *asked])


@needs_8_devices
def test_end_to_end_runs_over_meshes(tmp_path):
    args = [*TINY, "--repeats=1", "--mesh=1x1", "--mesh=2x2", "--no-full", "--block-shares=0.3", "--new-tokens=4"]
    one, four = bench("end-to-end", tmp_path, *args)
    assert (one["mesh"], four["mesh"]) == ("1x1", "2x2")
    assert four["GB per device"] < one["GB per device"] < 4 * four["GB per device"]
    assert four["kept"] == pytest.approx(one["kept"], rel=0.01)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["sparsity"], "No such command 'sparsity'"),
        (["attention", "--models=gpt2"], "--models gpt2: must be one of ['llama3.1-8b', "),
        (["attention"], "--lengths 16384: a CPU takes at most 4096 tokens; pass --models tiny --lengths 1024"),
        (["end-to-end", "--lengths=1024"], "--models llama3.1-8b: needs a GPU, this is 'cpu'; pass --models tiny"),
        (["serve", "--tokens=100"], "--tokens 100: must be a multiple of 128 and at least 4224, one block more than"),
        (["decode", *TINY, "--block-shares=1"], "'--block-shares': Input should be less than or equal to 0.999"),
        (["decode", *TINY, "--backend=cuda"], "--backend 'cuda': must be one of"),
        (["attention", *TINY, "--methods=snap"], "--methods snap: 'snap' is not registered"),
        (["attention", "--window=100"], "--window 100: must be a positive multiple of block_size = 128"),
        (["end-to-end", *TINY, "--mesh=4"], "--mesh 4: must be devices on 'data' x devices on 'model', such as 1x4"),
        (["serve", "--model=tiny", "--tokens=512", "--window=128", "--profile=p"], "--profile p: tiny has random"),
        (["attention", *TINY, "--out=file"], "--out file cannot be written"),
    ],
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="messages of a machine without a GPU")
def test_what_cannot_run_is_refused_in_one_line(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert message in error(*args)


@pytest.mark.parametrize(
    "method",
    [tca_with(0.5, tca_jax.TCAConfig(window=128), 2), methods.get("xattention", dense_tokens=0)],
    ids=["TCA", "xattention"],
)
def test_parts_of_a_layer_make_the_whole(method):
    inputs, case = attention.attention_inputs(CONFIGS["tiny"], 512, seed=0), attention.Case("case", method, "xla")
    out, kept = jax.jit(case.run)(*inputs)
    selected = jax.jit(case.select)(*inputs)
    np.testing.assert_array_equal(jax.jit(case.attend)(*inputs, selected).out, out)
    if selected is not None:
        jax.tree.map(np.testing.assert_array_equal, selected[0], kept)


@needs_8_devices
@pytest.mark.slow
def test_serve_times_steps_and_load(tmp_path):
    rows = bench("serve", tmp_path, *SERVE, "--worth=0.3", "--most-tokens=768", "--new=0.5", "--rate=20", "--mesh=1x2")
    of = {table: [row for row in rows if row["table"] == table] for table in ("Documents", "Steps", "Load")}
    assert [(row["attention"], row["rows"]) for row in of["Steps"]] == [
        (name, rows) for name in ("full", "TCA 0.25", "worth 0.3") for rows in (1, 2)
    ]
    assert [row["per second"] for row in of["Load"]] == [50, 20] * 3
    assert all(row["fit"] >= row["documents"] == 2 and row["mesh"] == "1x2" for row in of["Documents"])
    for row in of["Load"]:
        assert 0 < row["first token p50 ms"] <= row["first token p95 ms"] <= row["first token p99 ms"]
        assert 0 < row["inter-token p50 ms"] <= row["inter-token p99 ms"]
        assert row["new document's p50 ms"] > 0


@pytest.mark.slow
def test_a_soak_finds_nothing(tmp_path):
    (row,) = bench("serve", tmp_path, *SERVE, *SOAK)
    assert row["attention"] == "TCA 0.25"
    assert row["requests"] == row["equal"] + row["cancelled"] > 0
    assert "Nothing failed." in (tmp_path / "serve.md").read_text()


@pytest.mark.slow
def test_a_soak_fails_where_an_answer_differs(tmp_path, monkeypatch):
    generate = serve.tca_jax.generate

    def wrong(*args, **options):
        out = generate(*args, **options)
        out.tokens[0][0] += 1
        return out

    monkeypatch.setattr(serve.tca_jax, "generate", wrong)
    result = run("serve", *SERVE, *SOAK, "--minutes=0.02", "--out", tmp_path)
    assert result.exit_code != 0
    assert "other answers" in result.stderr


@pytest.mark.parametrize("shape", [(7,), (1, 3, 2**11, 1000)])
def test_random_numbers_are_normal_and_do_not_repeat(shape):
    x = np.asarray(random_normal(jax.random.key(1), shape, jnp.float32, 2.0), np.float64)
    assert x.shape == shape
    assert len(np.unique(x)) > 0.6 * x.size  # of the 2^23 floats that a draw can take
    if x.size > 1000:
        assert abs(x.mean()) < 0.01
        assert abs(x.std() - 2) < 0.01
        assert abs(np.corrcoef(x.ravel()[: 2**21], x.ravel()[-(2**21) :])[0, 1]) < 0.01


@pytest.mark.parametrize("wrong", [2.0, np.nan])
def test_wrong_results_are_not_timed(wrong):
    assert agreement("triton", lambda backend: jnp.ones(4)) == 0
    with pytest.raises(RuntimeError, match="triton differs from the oracle by"):
        agreement("triton", lambda backend: jnp.ones(4).at[0].set(wrong if backend == "triton" else 1))


def test_memory_that_runs_out_costs_one_call(capsys):
    assert fitted(lambda: 3, "three") == 3
    assert fitted(jax.jit(lambda: jnp.zeros((2**30, 2**30), jnp.int8)), "an exabyte") is None
    assert capsys.readouterr().out.startswith("does not fit: an exabyte: RESOURCE_EXHAUSTED: ")

    def other():
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    with pytest.raises(jax.errors.JaxRuntimeError, match="is gone"):
        fitted(other, "another")
