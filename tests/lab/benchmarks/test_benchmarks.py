"""The benchmarks at sizes that a CPU runs in a moment: their files, what they record, and their errors."""

import dataclasses
import functools
import json
import os
import re

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tca_jax
from tca_jax.engine.decode import prefill
from tca_jax.engine.sampling import Sampling
from tca_jax.lab.benchmarks import caches, calibration, decode, decode_models, tune
from tca_jax.lab.benchmarks.attention import STAGES, Prefill
from tca_jax.lab.benchmarks.common import (
    LAYERS,
    agreement,
    attention_inputs,
    find_layers,
    markdown_table,
    random_normal,
    terminal_table,
)
from tca_jax.lab.benchmarks.decode_models import random_state
from tca_jax.lab.benchmarks.end_to_end import share_of_ranked
from tca_jax.lab.benchmarks.fetching import FETCH_STAGES, OneHead
from tca_jax.lab.benchmarks.models import CONFIGS, random_model, under_share
from tca_jax.lab.benchmarks.prefill_methods import Wanted, find_value
from tca_jax.lab.benchmarks.shares import FULL, Share, fetching_by_layer, unequal_candidates
from tca_jax.methods.block_sparse import Listed, listed_pairs
from tca_jax.methods.pairs import causal_pairs
from tca_jax.pallas_kernels.block_mass.triton import BlockMassConfig
from tca_jax.pallas_kernels.paged_attention import paged_attention

TINY = ["--models=tiny", "--window=128", "--backend=xla", "--repeats=1"]
OPTIONS = {
    "attention": [*TINY, "--lengths=512", "--block-shares=0.05:0.5", "--fetching=0", "--fetching=1"],
    "decode": [
        *TINY,
        "--lengths=512",
        "--block-shares=0.2",
        "--block-shares=0.05:0.5",
        "--batches=2",
        "--layers=1",
        "--copy-bytes=1048576",
    ],
    "end-to-end": [
        *(*TINY, "--lengths=512", "--kept=1", "--kept=0.6", "--no-compilation", "--new-tokens=8"),
        *("--fetching=0", "--fetching=3", "--copy-bytes=1048576"),
    ],
    "calibration": [*TINY, "--lengths=512", "--model-tokens=512", "--layers=1", "--texts=1"],
    "context": [*TINY, "--lengths=512", "--layers=1", "--no-full", "--questions=2", "--append-tokens=130"],
    "many-shapes": ["--shapes=2", "--generations=4"],
}


run, error = (functools.partial(each, "bench") for each in (commands.run, commands.error))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "decode" else name for name in OPTIONS]
)
def test_a_benchmark_writes_its_table_its_json_and_its_plot(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "results"
    result = run(name, *OPTIONS[name], "--out", out)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == [f"{name}.json", f"{name}.md", f"{name}.png"]
    record = json.loads((out / f"{name}.json").read_text())
    assert record["environment"]["command"] == " ".join(["tca-jax", "bench", name, *OPTIONS[name]])
    assert record["environment"]["device"] == jax.devices()[0].device_kind
    tables = [value for value in record.values() if isinstance(value, list)]
    assert all(tables)
    for row in (row for table in tables for row in table):
        figures = {key: value for key, value in row.items() if isinstance(value, int | float)}
        assert figures.pop("error", 0) == 0  # the oracle against itself
        assert min(figures.pop(column, 0) for column in ("fetching", "compile s")) >= 0
        assert all(value > 0 for value in figures.values()), row
    table = (out / f"{name}.md").read_text()
    assert str(tmp_path) not in table + json.dumps(record)
    assert markdown_table(record["rows"]) in table
    assert terminal_table(record["rows"]) in result.stdout
    assert result.stdout.endswith(f"Results: {out / name}.md\n")


@pytest.mark.slow
def test_json_is_one_object_alone_on_standard_output(tmp_path):
    result = run("calibration", *OPTIONS["calibration"], "--json", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record == json.loads((tmp_path / "calibration.json").read_text())
    assert record["rows"]
    assert "model tiny  tokens" in result.stderr  # a row as soon as it is known
    assert record["environment"]["command"] == " ".join(["tca-jax", "bench", "calibration", *OPTIONS["calibration"]])


@pytest.mark.slow
def test_other_methods_are_timed_where_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("tca_jax.lab.benchmarks.prefill_methods._STEPS", 1)
    args = [*TINY, "--lengths=512", "--block-shares=0.2", "--methods=xattention", "--attended=0.8"]
    result = run("attention", *args, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "attention.json").read_text())["Other methods"]
    assert row["knob"] == "threshold 0.1"  # the middle of the first step's range
    assert row["error"] == 0
    assert min(row[f"{stage} ms"] for stage in ("method", "estimate", "attention")) > 0
    assert 0 < row["area"] < 1.5


def test_the_value_of_a_knob_is_found_by_its_area():
    assert Wanted.parse("minference=0.5") == ("minference", 0.5)
    assert find_value(lambda value: value**2, 0.25, 0.01, 1.0) == pytest.approx(0.5, abs=0.01)
    assert find_value(lambda value: 0.1, 0.25, 0.01, 1.0) > 0.9  # out of reach: as near as it comes


@pytest.mark.slow
def test_the_default_folder_is_not_that_of_the_committed_tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("calibration", *OPTIONS["calibration"]).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "out" / "bench").iterdir()) == [
        f"calibration.{suffix}" for suffix in ("json", "md", "png")
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.slow
@pytest.mark.parametrize("timed", [True, False])
def test_compilation_is_timed_only_where_it_is_asked_for(timed, tmp_path):
    args = [*TINY, "--lengths=512", "--layers=1", "--kept=0.6", "--new-tokens=8", "--copy-bytes=1048576", "--name=one"]
    choice = "--compilation" if timed else "--no-compilation"
    assert run("end-to-end", *args, choice, "--out", tmp_path).exit_code == 0
    record, table = json.loads((tmp_path / "one.json").read_text()), (tmp_path / "one.md").read_text()
    (row,) = record["rows"]
    assert row["attention"] == "TCA 60%"
    compiled = record.get("Compilation", [])
    assert len(compiled) == timed
    assert all(times["cached s"] > 0 and times["cold s"] > 0 for times in compiled)
    assert ("## Compilation" in table) == ("second table" in table) == timed


def test_the_recorded_command_leaves_out_the_folder_however_it_is_spelled(tmp_path):
    out = tmp_path / "a folder"
    assert run("calibration", *OPTIONS["calibration"], f"--out={out}").exit_code == 0
    command = json.loads((out / "calibration.json").read_text())["environment"]["command"]
    assert command == " ".join(["tca-jax", "bench", "calibration", *OPTIONS["calibration"]])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["attention"], "131,072 tokens need a GPU, this process runs on 'cpu'"),
        (["decode", "--no-whole"], "1,048,576 tokens need a GPU, this process runs on 'cpu'"),
        (["calibration"], "a whole llama3.1-8b needs a GPU, this process runs on 'cpu': pass --models tiny"),
        (["decode"], "a whole llama3.1-8b needs a GPU, this process runs on 'cpu': pass --models tiny"),
        (["calibration", "--models=tiny"], "131,072 tokens need a GPU, this process runs on 'cpu'"),
        (["tune"], "tune times GPU kernels, this process runs on 'cpu'"),
        (["tune", "--operation=sort"], "--operation sort: must be one of ['token_scores', "),
        (["attention", "--models=gpt2"], "--models gpt2: must be one of ['llama3.1-8b', 'qwen2.5-7b', "),
        (["end-to-end", "--models=llama-d256"], "--models llama-d256: a layer only; must be one of ['llama3.1-8b', "),
        (["decode", *TINY, "--lengths=500"], "--lengths 500: must be a multiple of 128 and at least 256, one"),
        (["decode", *TINY, "--lengths=128"], "--lengths 128: must be a multiple of 128 and at least 256, one"),
        (["decode", *TINY, "--lengths=512", "--block-shares=1"], "--block-shares 1.0: must lie between 0 and 1"),
        (
            ["decode", *TINY, "--lengths=512", "--block-shares=0.2:0.1"],
            "--block-shares 0.2:0.1: the cache must keep more than pre",
        ),
        (["attention", *TINY, "--block-shares=much"], "much: must be a share, or PREFILL:CACHE such as 0.05:0.25"),
        (["attention", *TINY, "--methods=tca"], "--methods tca: must be one of ['minference', 'flexprefill', 'xattent"),
        (["attention", *TINY, "--methods=xattention=much"], "--methods xattention=much: 'much' is no number"),
        (["attention", *TINY, "--methods=xattention=2"], "threshold = 2.0: must lie in (0, 1]"),
        (["attention", *TINY, "--attended=0"], "--attended 0.0: must lie in (0, 1]"),
        (["calibration", *TINY, "--probes=text"], "--probes text: must be one of ['copy', 'pairs']"),
        (["attention", *TINY, "--fetching=3"], "--fetching 3: a layer of tiny has 2 KV heads"),
        (["end-to-end", *TINY, "--fetching=5"], "--fetching 5: tiny has 4 KV heads"),
        (["end-to-end", *TINY, "--no-full", "--kept=1"], "--no-full: nothing is left to measure"),
        (["end-to-end", *TINY, "--new-tokens=2"], "--new-tokens 2: must be 1, or at least 4"),
        (["attention", *TINY, "--fetching=-1"], "Invalid value for '--fetching'"),
        (["context"], "a whole llama3.1-8b needs a GPU, this process runs on 'cpu': pass --models tiny"),
        (["decode", "--no-whole", "--backend=cuda"], "--backend 'cuda': must be one of"),
        (["attention", "--backend=mosaic", "--lengths=8192"], "--backend 'mosaic' needs an NVIDIA GPU"),
        (["decode", "--no-whole", "--beside=cuda"], "--backend 'cuda': must be one of"),
        (["decode", "--no-whole", "--backend=xla", "--beside=xla"], "--beside xla: must differ from --backend"),
        (["decode", "--repeats=0"], "Invalid value for '--repeats'"),
        (["end-to-end"], "a whole llama3.1-8b needs a GPU, this process runs on 'cpu': pass --models tiny"),
        (
            ["end-to-end", *TINY, "--lengths=512"],
            "--kept 0.185: must be at least 0.4064 at --lengths 512: window 128 and reserve 16 take more; a smaller",
        ),
        (
            ["attention", "--models=tiny", "--lengths=1024"],
            "--lengths 1024: must be a multiple of 128 and at least 4224, one block more than --window 4096; without a "
            "GPU pass --window 3968 or less",
        ),
        (
            ["calibration", *TINY, "--lengths=512", "--model-tokens=100"],
            "--model-tokens 100: must be a multiple of 128 and at least 256, one block more than --window 128",
        ),
        (["attention", "--window=100"], "--window 100: must be a positive multiple of block_size = 128"),
        (["soak", "--lengths=0"], "--lengths 0: must be at least 1"),
        (
            ["end-to-end", *TINY, "--kept=1.5"],
            "--kept 1.5: must lie between 0 and 1",
        ),
        (["sparsity"], "No such command 'sparsity'"),
    ],
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="messages of a machine without a GPU")
def test_what_cannot_run_is_one_line_that_says_why(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in error(*args)
    assert not list(tmp_path.iterdir())


def test_the_least_kept_share_that_an_error_names_is_allowed():
    config = tca_jax.TCAConfig(window=128)
    for tokens in (512, 640, 4096, 131072):
        with pytest.raises(ValueError, match=r"must be at least 0\.\d{4} at") as raised:
            share_of_ranked(0.0001, config, tokens)
        least = float(re.search(r"at least ([\d.]+)", str(raised.value)).group(1))
        assert 0 < share_of_ranked(least, config, tokens).cache < 0.01
    with pytest.raises(ValueError, match=r"^--kept 0\.5: must be 1 at --lengths 192: window 128 and"):
        share_of_ranked(0.5, config, 192)


def test_an_unwritable_folder_fails_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in error("decode", *OPTIONS["decode"], "--out", tmp_path / "file")


@pytest.mark.parametrize("name", ["attention", "calibration", "context", "decode", "end-to-end", "many-shapes", "tune"])
def test_the_help_of_a_benchmark_fits_80_columns(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert f"Example: tca-jax bench {name}" in result.stdout


def test_benchmarks_take_more_of_the_memory_unless_the_user_says_how_much(monkeypatch):
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    for set_by_user in ({}, {names[0]: "0.5"}, {names[1]: "0.5"}):  # JAX refuses both
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in set_by_user.items():
            monkeypatch.setenv(name, value)
        assert run("attention", "--help").exit_code == 0
        assert {n: os.environ[n] for n in names if n in os.environ} == (set_by_user or {names[0]: "0.9"})


@pytest.mark.parametrize("name", LAYERS)
def test_the_models_have_the_attention_shape_of_their_layers(name):
    config, layer = CONFIGS[name], LAYERS[name]
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (layer.heads, layer.kv_heads, layer.head_dim)


def test_a_random_model_generates():
    lm = random_model("tiny", jax.random.key(0), num_layers=1, max_positions=10**6)
    assert (lm.config.num_layers, lm.config.max_context) == (1, 10**6)
    assert {leaf.dtype for leaf in jax.tree.leaves(lm.params)} == {jnp.dtype(jnp.float32)}
    out = tca_jax.generate(lm, [[1, 2, 3]], max_new_tokens=2)
    assert len(out.tokens[0]) == 2
    with pytest.raises(
        ValueError, match=r"model = 'gpt2': must be one of \['llama3.1-8b', 'qwen2.5-7b', 'llama3.1-70b', 'tiny'\]"
    ):
        random_model("gpt2", jax.random.key(0))


@pytest.mark.parametrize("shape", [(7,), (5, 3), (1, 3, 2**11, 1000)])
def test_random_numbers_are_normal_and_do_not_repeat(shape):
    x = np.asarray(random_normal(jax.random.key(1), shape, jnp.float32, 2.0), np.float64)
    assert x.shape == shape
    assert len(np.unique(x)) > 0.6 * x.size  # of the 2^23 floats that a draw can take
    if x.size > 1000:
        assert abs(x.mean()) < 0.01
        assert abs(x.std() - 2) < 0.01
        assert abs(np.corrcoef(x.ravel()[: 2**21], x.ravel()[-(2**21) :])[0, 1]) < 0.01


@pytest.mark.parametrize("wrong", [2.0, np.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_nothing_is_timed_where_one_array_of_a_result_is_wrong(wrong, place):
    expected = (jnp.ones(4), jnp.ones(3))
    assert agreement("triton", expected, expected) == 0
    out = [*expected]
    out[place] = out[place].at[0].set(wrong)
    with pytest.raises(RuntimeError, match="triton differs from the oracle by"):
        agreement("triton", tuple(out), expected)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("heads", [4, 8])
def test_budgets_of_heads_have_the_share_that_was_asked_for(share, heads):
    config = tca_jax.TCAConfig()
    candidates = unequal_candidates(config, heads, share)
    budgets = np.asarray(tca_jax.candidate_budgets(config, 1000))[list(candidates)]
    assert budgets.mean() / config.block_size == pytest.approx(share, abs=0.01)
    assert len(set(candidates)) > 2


@pytest.mark.parametrize(("share", "dense"), [(Share(0.25, prefill=0.05), 2), (Share(0.25, prefill=0.02), 2)], ids=str)
def test_two_shares_make_heads_dense_in_the_cache_and_leave_the_others_as_they_are(share, dense):
    config = tca_jax.TCAConfig()
    cache, prefill = map(np.asarray, share.rows(config, 8))
    is_dense = cache == config.num_candidates
    assert is_dense.sum() == dense
    assert (cache[~is_dense] == prefill[~is_dense]).all()
    shares = np.asarray(tca_jax.candidate_budgets(config, 1000)).mean(axis=1) / config.block_size
    assert (prefill == np.abs(shares - share.prefill).argmin()).all()
    assert shares[cache].mean() == pytest.approx(share.cache, abs=0.03)


def test_a_twentieth_of_the_ranked_blocks_is_read_at_row_0():
    _, prefill = Share(0.25, prefill=0.05).rows(tca_jax.TCAConfig(), 8)
    assert set(prefill) == {0}


@pytest.mark.parametrize(
    ("fetching", "layers"),
    [
        (0, [0] * 8),
        (1, [0, 0, 0, 1, 0, 0, 0, 0]),
        (4, [1, 0] * 4),
        (8, [1] * 8),
        (10, [1, 2, 1, 1, 1, 2, 1, 1]),
        (16, [2] * 8),
    ],
)
def test_heads_that_fetch_are_spread_over_the_layers_and_the_densest_of_the_cache(fetching, layers):
    assert fetching_by_layer(fetching, 2, 8) == layers
    config, share = tca_jax.TCAConfig(), Share(0.5, prefill=0.05, fetching=fetching)
    method = share.method(config, 2, 8)
    policy = method.cache
    for layer, count in enumerate(layers):
        fetches = policy.reads(layer, 2, "blocks")
        assert fetches.sum() == count
        rows = policy.rows(layer, 2)
        assert rows[fetches].min(initial=99) >= rows[~fetches].max(initial=0)
        assert method.prefill.answers_from_cache(layer) == (count == 0)
    without = dataclasses.replace(share, fetching=0).method(config, 2, 8).cache
    assert [policy.capacities(i, 8192) for i in range(8)] == [without.capacities(i, 8192) for i in range(8)]


def test_more_heads_than_there_are_cannot_fetch():
    with pytest.raises(ValueError, match="17 heads cannot fetch: the model has 8 layers of 2 KV heads"):
        fetching_by_layer(17, 2, 8)


@pytest.mark.parametrize("text", ["0.2", "0.05:0.25", "1.0", "0.05:0.25+16"])
def test_a_share_is_written_as_it_is_read(text):
    share = Share.parse(text)
    assert str(share) == text
    assert Share.parse(share.cell) == dataclasses.replace(share, fetching=0)


KINDS_OF_SHARES = pytest.mark.parametrize(
    ("share", "reserve", "absent"),
    [
        (Share(0.2), 0, {"observation scores", "reserve", "select for prefill"}),
        (Share(0.2), None, {"select for prefill"}),
        (Share(0.5, prefill=0.05), None, set()),
    ],
    ids=["no reserve", "one row", "two rows"],
)


@pytest.mark.slow
def test_heads_that_fetch_are_timed_beside_the_same_without_them(tmp_path):
    args = [*TINY, "--lengths=3072", "--block-shares=0.05:0.5", "--fetching=0", "--fetching=1"]
    assert run("attention", *args, "--out", tmp_path).exit_code == 0
    record = json.loads((tmp_path / "attention.json").read_text())
    without, one = record["rows"]
    assert (without["fetching"], one["fetching"]) == (0, 1)
    assert (without["share"], without["kept"]) == (one["share"], one["kept"])
    assert one["over fetching 0"] == pytest.approx(one["TCA ms"] / without["TCA ms"])
    assert without["over fetching 0"] == 1
    assert min(one[f"{name} ms"] for name in FETCH_STAGES) > 0
    assert {without[f"{name} ms"] for name in FETCH_STAGES} == {""}
    assert without["area"] < one["area"] < 1
    assert "Where it says fetching" in record["note"]


def test_the_area_of_a_layer_with_heads_that_fetch_is_counted_head_by_head():
    (layer,), config = find_layers(["tiny"]), tca_jax.TCAConfig(window=128)
    inputs = attention_inputs(layer, 4096, seed=0)

    def area(fetching):
        prefill = Prefill.create(layer, Share(0.5, prefill=0.05, fetching=fetching), "xla", config)
        return float(prefill.area(*inputs, prefill.select(*inputs)[-1])[0])

    lists = OneHead(layer, "xla", config).lists(inputs[0][:, :, :2], inputs[1][:, :, :1], inputs[3])
    alone = float((listed_pairs(Listed(lists), inputs[3], config.block_size) / causal_pairs(inputs[3])).mean())
    none, one, both = (area(fetching) for fetching in range(3))
    assert both == pytest.approx(alone, rel=0.01)  # the other head's lists are as long
    assert one == pytest.approx((none + both) / 2, rel=0.01)


def test_prompts_alone_are_read_where_one_new_token_is_asked_for(tmp_path):
    args = [*TINY, "--lengths=512", "--layers=1", "--kept=1", "--block-shares=0.05:0.5", "--no-compilation"]
    result = run("end-to-end", *args, "--new-tokens=1", "--copy-bytes=1048576", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "end-to-end.json").read_text())["rows"]
    assert [row["attention"] for row in rows] == ["full", "TCA 5%:50% of blocks"]
    assert all("ms/token" not in row and row["TTFT s"] > 0 for row in rows)
    assert rows[0]["area"] == 1 > rows[1]["area"] > 0
    assert (tmp_path / "end-to-end.png").stat().st_size > 0


@KINDS_OF_SHARES
def test_the_stages_of_a_prefill_make_what_the_whole_makes(share, reserve, absent):
    (layer,), config = find_layers(["tiny"]), tca_jax.TCAConfig(window=128, reserve=reserve)
    inputs = attention_inputs(layer, 512, seed=0)
    prefill = Prefill.create(layer, share, "xla", config)
    stages = prefill.stages(*inputs)
    assert set(STAGES) - set(stages) == absent
    out, cached = jax.jit(prefill.run)(*inputs)
    np.testing.assert_array_equal(stages["attention"](), out)
    for one, other in zip(stages["select"](), cached, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    attended = prefill.select(*inputs)[-1]
    assert (np.asarray(attended.pool.lengths) <= np.asarray(cached.pool.lengths)).all()
    assert (attended.budgets.sum() < cached.budgets.sum()) == (share.prefill is not None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", calibration.PROBES)
def test_the_parts_of_a_calibration_are_timed_and_add_up(kind):
    (layer,), config = find_layers(["tiny"]), tca_jax.TCAConfig(window=128)
    rows, call = calibration.measure_model(layer, calibration.Texts(2, 512, kind), config, 1)
    assert [row["part"] for row in rows] == list(calibration.PARTS) == list(calibration.TYPICAL)
    assert all(row["s"] > 0 <= row["compile s"] for row in rows)
    assert call["probes"] == kind
    assert call["s"] > 0
    reading, keeping, both = calibration.typical([{**row, "s": 1.0} for row in rows])
    assert (reading["computed s"], keeping["computed s"], both["computed s"]) == (22, 46, 68)
    assert reading["computed as"] == "1 x losses, full attention + 19 x losses + 2 x derivatives"


def test_questions_are_timed_against_reading_and_full_attention_where_it_is_asked_for(tmp_path):
    args = [*TINY, "--lengths=512", "--layers=1", "--questions=1", "--append-tokens=0", "--block-shares=0.2"]
    assert run("context", *args, "--out", tmp_path).exit_code == 0
    record = json.loads((tmp_path / "context.json").read_text())
    assert [row["attention"] for row in record["rows"]] == ["TCA 20% of blocks", "full"]
    assert "append s" not in record["rows"][0]
    assert record["rows"][0]["kept"] < record["rows"][1]["kept"] == 1
    for document, question in zip(record["rows"], record["Questions"], strict=True):
        assert question["% of reading"] == pytest.approx(question["first token ms"] / document["read s"] / 10)
        assert question["in the program ms"] <= question["first token ms"]


def test_a_cache_holds_what_its_layout_says_and_a_step_reads_it():
    layer, config = dataclasses.replace(LAYERS["qwen2.5-7b"], head_dim=16), tca_jax.TCAConfig(window=256)
    q = random_normal(jax.random.key(3), (2, layer.heads, layer.head_dim), jnp.bfloat16)
    at, attended = jnp.full(2, 1024, jnp.int32), []
    for share in (FULL, Share(0.2)):
        plan = caches.plan(config, layer, share, 2, 1024)
        cache = caches.random_cache(plan, layer.head_dim, seed=0)
        expected, _ = paged_attention(q[:, None], (cache.pages(0),), at, at, window=plan.layout.window, backend="xla")
        np.testing.assert_array_equal(decode.attend(q, cache, plan.layout, "xla"), expected[:, 0])
        assert cache.k.nbytes + cache.v.nbytes == plan.layout.num_bytes(16, jnp.bfloat16)
        assert (np.asarray(cache.kept[0]) <= np.array(plan.layout.kept_pages[0][0]) * 128).all()
        attended.append((plan.attended_tokens, int(np.asarray(cache.kept[0]).sum())))
    assert attended[0] == (2 * layer.kv_heads * 1025, 0)
    assert attended[1][0] == 2 * layer.kv_heads * 257 + attended[1][1]


@pytest.mark.parametrize("share", [FULL, Share(0.3), Share(0.5, prefill=0.05)], ids=str)
def test_a_random_state_is_one_that_prefill_could_have_left(share):
    lm = random_model("tiny", jax.random.key(0))
    lm = under_share(lm, share, tca_jax.TCAConfig(window=128))
    state = random_state(lm, 2, 512)
    arguments = (lm, jnp.zeros((2, 512), jnp.int32), jnp.array([512, 512]), state.keys, Sampling())
    new_tokens = state.tokens.shape[1]
    left, shared = jax.eval_shape(lambda *args: prefill(*args, state.stop_tokens, new_tokens=new_tokens), *arguments)
    assert shared is None
    assert jax.tree.structure(left) == jax.tree.structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(left)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]


@pytest.mark.slow
def test_caches_that_do_not_fit_are_left_out_and_said_to_be(tmp_path, monkeypatch):
    full = random_model("tiny", jax.random.key(0), 1).cache_layout(8, 512, 65).num_bytes(16, jnp.float32)
    for module in (decode, decode_models):  # room for a whole model's smaller cache at batch 8, for all at batch 1
        monkeypatch.setattr(module, "free_bytes", lambda: full)
    args = ["--models=tiny", "--window=128", "--backend=xla", "--repeats=1", "--lengths=512", "--block-shares=0.2"]
    result = run("decode", *args, "--batches=1", "--batches=8", "--layers=1", "--copy-bytes=1048576", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "decode.json").read_text())
    assert {row["batch"] for row in record["rows"]} == {1}
    wholes = [(row["batch"], row["share"], row["speed-up"] == "") for row in record["Whole models"]]
    assert wholes == [(1, 1.0, False), (1, 0.2, False), (8, 0.2, True)]
    assert "a layer of tiny at batch 8, 512 tokens" in record["note"]
    assert "the whole tiny at batch 8, 512 tokens, share 1" in record["note"]
    assert (tmp_path / "decode.png").stat().st_size > 0


@pytest.mark.slow
def test_two_backends_decode_in_turns_over_the_same_caches(tmp_path):
    args = [*TINY, "--lengths=512", "--block-shares=0.2", "--batches=1", "--copy-bytes=1048576", "--out", tmp_path]
    result = run("decode", *args, "--beside=auto", "--no-whole")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [(row["backend"], row["share"]) for row in rows] == [
        (backend, share) for backend in ("xla", "auto") for share in (1.0, 0.2)
    ]
    for mine, other in zip(rows[:2], rows[2:], strict=True):
        assert mine["over xla"] == 1
        assert other["over xla"] == pytest.approx(mine["attention ms"] / other["attention ms"])
        assert mine["KV MB"] == other["KV MB"]
        assert mine["speed-up"] == pytest.approx(rows[0]["attention ms"] / mine["attention ms"])


def test_a_kernel_that_does_not_take_a_layer_is_named_before_anything_is_timed(tmp_path, monkeypatch):
    def declining(*_, **__):
        raise NotImplementedError("not of such a layer")

    monkeypatch.setattr("tca_jax.methods.sparse.prefill_attention", declining)
    args = [*TINY, "--lengths=512", "--block-shares=0.2", "--out", tmp_path]
    assert error("attention", *args) == "--backend xla: not of such a layer"
    monkeypatch.undo()
    monkeypatch.setattr("tca_jax.methods.block_sparse.block_sparse_attention", declining)
    assert error("attention", *args, "--fetching=0", "--fetching=1") == "--backend xla: not of such a layer"


@dataclasses.dataclass(frozen=True)
class Tiles:
    size: int
    inner: "Tiles | None" = None


def toy_kernel(x, *, config):
    if config.size == 3:
        raise NotImplementedError("3 is no power of two\nsee above")
    return x + (1.0 if config.size == 5 else 0.0), jnp.zeros(4)


def test_tuning_times_what_agrees_and_says_what_was_left_out(tmp_path):
    others = (Tiles(2), Tiles(3), Tiles(5), Tiles(1))
    operation = tune.Operation("toy", "xla", Tiles(1), others, toy_kernel, (jnp.arange(8.0),), steps=2)
    declined = dataclasses.replace(operation, default=Tiles(3), others=(Tiles(1),))
    assert [row["reason"] for row in tune.compare(declined, repeats=1)[1]] == [
        "NotImplementedError: 3 is no power of two"
    ]
    rows, left_out = tune.compare(operation, repeats=1)
    assert {row["config"] for row in rows} == {"size=1 inner=None", "size=2 inner=None"}
    assert [row["ms"] for row in rows] == sorted(row["ms"] for row in rows)
    assert [row["reason"] for row in left_out] == [
        "NotImplementedError: 3 is no power of two",
        "differs from the default's result",
    ]
    rows, left_out = ([{"model": "tiny", "tokens": 1024, **row} for row in table] for table in (rows, left_out))
    tune.write_tuning(rows, left_out, tmp_path, "tune")
    record = json.loads((tmp_path / "tune.json").read_text())
    (best,) = record["What this device should use"]
    assert (best["best"], best["default"]) == (rows[0]["config"], "size=1 inner=None")
    assert best["default over best"] >= 1
    assert record["Left out"] == left_out
    assert (tmp_path / "tune.png").stat().st_size > 0


def test_block_mass_is_tuned_by_its_stride():
    (layer,), config = find_layers(["tiny"]), tca_jax.TCAConfig(block_size=32, window=64)
    found = list(tune.block_mass_operations(layer, 160, config))
    assert [each.label for each in found] == [f"block_mass, stride {stride}" for stride in (8, 16, 32)]
    assert found[0].inputs[0].shape == (1, 160, 2, 16)  # the group of one KV head
    operation = dataclasses.replace(
        found[1],
        default=BlockMassConfig(1, 32, 4, 2),
        others=(BlockMassConfig(4, 16, 4, 2),),
        kernel=functools.partial(found[1].kernel, interpret=True),
    )
    rows, left_out = tune.compare(operation, repeats=1)
    assert (len(rows), left_out) == (2, [])
    assert {row["operation"] for row in rows} == {"block_mass, stride 16"}
    assert len(set(tune.block_mass_configs())) == 3 * 2 * 2 * 3


def test_a_tuned_configuration_is_described_without_its_class():
    assert tune.describe(Tiles(1, Tiles(2))) == "size=1 inner=(size=2 inner=None)"


def test_candidates_of_tuning_are_few_and_differ():
    decode_default = tune.paged_attention_triton.default_config(4, 128, 128, jnp.bfloat16)
    lists = [f() for f in (tune.token_score_configs, tune.select_configs, tune.prefill_configs)]
    lists += [tune.decode_configs(decode_default, 128)]
    for configs in lists:
        assert 4 <= len(set(configs)) == len(configs) <= 9


def test_full_attention_may_be_left_out(tmp_path):
    args = ["--lengths=256", "--window=128", "--kept=0.9", "--kept=1", "--repeats=1", "--copy-bytes=1048576"]
    result = run("end-to-end", *TINY, *args, "--no-full", "--no-compilation", "--new-tokens=1", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "end-to-end.json").read_text())["rows"]
    assert (row["attention"], row["TTFT speed-up"]) == ("TCA 90%", "")


@pytest.mark.slow
def test_caches_and_weights_in_eight_bits_are_measured_beside_those_in_sixteen(tmp_path):
    args = [*TINY, "--lengths=512", "--window=128", "--block-shares=0.3", "--repeats=1", "--copy-bytes=1048576"]
    args += ["--backend=xla", "--out", tmp_path]
    result = run("end-to-end", *args, "--kept=1", "--new-tokens=4", "--fp8=nothing", "--fp8=both")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "end-to-end.png").stat().st_size > 0
    record = json.loads((tmp_path / "end-to-end.json").read_text())
    rows = {(row["fp8"], row["attention"]): row for row in record["rows"]}
    assert len(rows) == 4
    for attention in {attention for _, attention in rows}:
        wide, eight = (rows[stored, attention] for stored in ("nothing", "both"))
        assert eight["KV GB"] < 0.3 * wide["KV GB"]
        assert eight["kept"] == pytest.approx(wide["kept"], abs=0.01)
    assert "`fp8` is what is stored in e4m3" in record["note"]
    result = run("decode", *args, "--batches=1", "--kv=fp8", "--no-whole")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [row["KV"] for row in rows] == ["bfloat16", "float8_e4m3fn"] * 2
    assert all(row["error"] == 0 for row in rows)
    assert rows[1]["KV MB"] < 0.6 * rows[0]["KV MB"]
