"""What the benchmarks share: result files, tables, random inputs, checks against the oracle, memory that runs out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from tca_jax.lab.benchmarks.common import (
    Compilations,
    Results,
    agreement,
    fitted,
    markdown_table,
    random_normal,
    read_results,
)


def test_rows_are_on_disk_before_the_end(tmp_path, capsys):
    results = Results(tmp_path / "out", "attention", "Attention", "What was done.")
    results.add("Layers", {"model": "tiny", "ms": 1.5})
    record = read_results(tmp_path / "out" / "attention.jsonl")
    assert record["rows"] == [{"table": "Layers", "model": "tiny", "ms": 1.5}]
    assert record["environment"]["jax"] == jax.__version__
    results.finish("Nothing failed.")
    page = (tmp_path / "out" / "attention.md").read_text()
    assert page.startswith("# Attention\n\nWhat was done. Nothing failed.\n\n## Layers\n\n| model | ms |\n|---|---|\n")
    assert f"- jax: {jax.__version__}" in page
    assert "model tiny  ms 1.5" in capsys.readouterr().out


def test_earlier_results_keep_their_name(tmp_path):
    for name in ("attention", "attention-2", "attention-3"):
        results = Results(tmp_path, "attention", "", "")
        assert results.path.name == f"{name}.jsonl"
    with pytest.raises(typer.Exit):  # there are no rows
        results.finish()


def test_columns_with_one_value_stand_above_a_table():
    rows = [
        {"model": "tiny", "tokens": 8192, "ms": 0.12345},
        {"model": "tiny", "tokens": 131072, "ms": 1234.5, "x": ""},
    ]
    expected = "All rows: model tiny.\n\n| tokens | ms |\n|---|---|\n| 8,192 | 0.123 |\n| 131,072 | 1,234 |"
    assert markdown_table(rows) == expected
    assert markdown_table(rows[:1]) == "| model | tokens | ms |\n|---|---|---|\n| tiny | 8,192 | 0.123 |"


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
    expected = jnp.ones(4)
    assert agreement("triton", expected, expected) == 0
    with pytest.raises(RuntimeError, match="triton differs from the oracle by"):
        agreement("triton", expected.at[0].set(wrong), expected)


def test_memory_that_runs_out_costs_one_call(capsys):
    assert fitted(lambda: 3, "three") == 3
    assert fitted(jax.jit(lambda: jnp.zeros((2**30, 2**30), jnp.int8)), "an exabyte") is None
    assert capsys.readouterr().out.startswith("does not fit: an exabyte: RESOURCE_EXHAUSTED: ")

    def other():
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    with pytest.raises(jax.errors.JaxRuntimeError, match="is gone"):
        fitted(other, "another")


def test_compilations_are_counted_with_their_seconds():
    compilations = Compilations()
    jax.jit(lambda x: x * 3.25 + 17)(jnp.ones(11)).block_until_ready()
    compilations.close()
    assert compilations.count >= 1
    assert sum(compilations.by_program.values()) > 0
    count = compilations.count
    jax.jit(lambda x: x * 4.25 + 17)(jnp.ones(13)).block_until_ready()
    assert compilations.count == count
