"""What the benchmarks share: names of results, and tables that fit a terminal."""

import pytest

from tca_jax.lab.benchmarks.common import free_name, markdown_table, print_row, terminal_table

ROWS = [
    {"model": "tiny", "tokens": 8192 * n, "ms": 1.5 * n, **{f"stage {i} ms": 0.1234 * i for i in range(20)}}
    for n in (1, 2, 30)
]


def test_earlier_results_keep_their_name(tmp_path):
    assert free_name(tmp_path, "attention") == "attention"
    for taken, free in (("attention", "attention-2"), ("attention-2", "attention-3")):
        (tmp_path / f"{taken}.json").write_text("{}")
        assert free_name(tmp_path, "attention") == free
    assert free_name(tmp_path, "decode") == "decode"


@pytest.mark.parametrize("width", [40, 80])
def test_a_table_of_many_columns_fits_a_terminal_and_has_every_value(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = terminal_table(ROWS).splitlines()
    assert max(map(len, lines)) <= width
    for i, row in enumerate(ROWS):
        tokens = [line.split() for line in lines if line.startswith("tokens")]
        assert f"{row['tokens']:,}" in [value for of_line in tokens for value in of_line], i
    assert sum(line.startswith("stage 19 ms") for line in lines) == len(
        [line for line in lines if line.startswith("ms")]
    )
    assert terminal_table([{"a": 1, "b": 2.0}]) == markdown_table([{"a": 1, "b": 2.0}])


def test_a_row_is_printed_in_lines_that_fit_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    print_row(ROWS[0])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("model tiny  tokens 8,192  ms 1.5  stage 0 ms 0")
    assert "stage 19 ms 2.34" in lines[-1]
