"""`tca-jax bench serve` and its soak at sizes that a CPU runs: their tables, their errors, and what makes them fail."""

import json

import commands
import pytest
from tiny import random_prompt, tiny_lm, with_candidates

from tca_jax.lab.benchmarks import serve_clients
from tca_jax.lab.benchmarks.serve import PARTS
from tca_jax.lab.benchmarks.served_documents import UnreadDocuments, seconds_to_come_back, send_to_host
from tca_jax.serve import Engine

TINY = [
    *("--model=tiny", "--tokens=512", "--window=128", "--backend=xla", "--rows=3", "--documents=4", "--layers=1"),
    *("--answer-tokens=256", "--prompt-tokens=1200", "--rate=50", "--requests=6", "--copy-bytes=1048576"),
]
SOAK = ["--model=tiny", "--tokens=512", "--minutes=0.3", "--rounds=2", "--documents=3", "--clients=3", "--backend=xla"]


@pytest.mark.slow
def test_every_part_makes_its_table(tmp_path):
    result = commands.run("bench", "serve", *TINY, "--keep=0.25", "--keep=1", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "serve.json").read_text())
    tables = {heading: record[heading] for heading in PARTS.values()}
    assert all({row["share"] for row in table} >= {0.25} for table in tables.values())
    assert [(row["share"], row["rows"]) for row in tables["Steps"]] == [(0.25, 3), (0.25, 1), (1.0, 3), (1.0, 1)]
    for row in (row for table in [record["rows"], *tables.values()] for row in table):
        measured = {key: value for key, value in row.items() if isinstance(value, int | float)}
        assert all(value > 0 for key, value in measured.items() if not key.startswith("queue")), row
    assert {row["what"] for row in record["rows"]} >= {"resident documents", "tokens/s over full caches"}
    assert "Failed" not in record["note"]


@pytest.mark.slow
def test_one_part_may_be_asked_for_and_what_fails_is_said(tmp_path, monkeypatch):
    assert "--what step: must be one of" in commands.error("bench", "serve", *TINY, "--what=step")
    monkeypatch.setattr("tca_jax.lab.benchmarks.serve_parts.floor_seconds", lambda *_: 1 / 0)
    result = commands.run("bench", "serve", *TINY, "--keep=0.25", "--what=steps", "--what=documents", "--out", tmp_path)
    assert result.exit_code == 1
    record = json.loads((tmp_path / "serve.json").read_text())
    assert "Failed: steps at 0.25: ZeroDivisionError" in record["note"]
    assert list(record)[4:] == ["Documents"]


def test_unread_documents_have_the_pages_of_documents_that_are_read():
    lm = with_candidates(tiny_lm(), [[0, 5], [9, 13]])
    with Engine(lm, max_rows=2, pages=200, answer_tokens=64) as engine:
        unread = UnreadDocuments(engine, 104)
        ids = unread.enter(2)
        read = engine.wait(engine.read(random_prompt(0, 104)), 60)
        assert [each.num_bytes for each in engine.documents()] == [unread.bytes_each] * 3 == [read.num_bytes] * 3
        numbers = [set(engine._documents.get(id_).numbers.ravel().tolist()) - {200} for id_ in (*ids, read.id)]
        assert sum(map(len, numbers)) == len(set.union(*numbers))  # each has its own
        send_to_host(engine, ids[0])
        assert engine.document(ids[0]).state == "host"
        assert seconds_to_come_back(engine, ids[0]) > 0
        assert len(engine.ask(ids[0], [1, 2], max_new_tokens=5, stop_token_ids=()).result(60).tokens) == 5
        for each in engine.documents():
            engine.forget(each.id)
        assert engine._documents.free.free == 200


@pytest.mark.slow
def test_a_soak_finds_that_nothing_is_lost(tmp_path):
    result = commands.run("bench", "serve-soak", *SOAK, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "serve-soak.json").read_text())
    assert "nothing failed" in record["note"]
    assert all(row["requests"] for row in record["rows"])
    assert [row["documents found"] > 0 for row in record["Rounds"]] == [True, True]  # from the rounds before


@pytest.mark.slow
def test_a_soak_fails_where_an_answer_is_another_one(tmp_path, monkeypatch):
    generate = serve_clients.tca_jax.generate

    def wrong(*args, **options):
        out = generate(*args, **options)
        out.tokens[0][0] += 1
        return out

    monkeypatch.setattr(serve_clients.tca_jax, "generate", wrong)
    result = commands.run("bench", "serve-soak", *SOAK, "--minutes=0.01", "--out", tmp_path)
    assert result.exit_code == 1
    assert "other answers" in json.loads((tmp_path / "serve-soak.json").read_text())["note"]


@pytest.mark.parametrize("name", ["serve", "serve-soak"])
def test_the_help_fits_80_columns(name):
    result = commands.run("bench", name, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert f"Example: tca-jax bench {name}" in result.stdout
