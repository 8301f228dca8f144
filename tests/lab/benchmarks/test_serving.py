"""`tca-jax bench serve` and `soak`: how times of tokens become figures, and what makes a soak fail."""

import time

import commands
import pytest
from tiny import tiny_lm

from tca_jax.engine.request import AnswerOptions
from tca_jax.engine.sampling import Sampling
from tca_jax.lab.benchmarks import soak
from tca_jax.lab.benchmarks.common import percentiles, read_results
from tca_jax.lab.benchmarks.serve import TokenTimes, at_random
from tca_jax.lab.benchmarks.soak import growth
from tca_jax.serve.streams import Stream

SERVE = [
    *("--model=tiny", "--tokens=512", "--window=128", "--layers=1", "--block-shares=0.25", "--rows=2", "--documents=2"),
    *("--prompt-tokens=300", "--answer-tokens=8", "--rate=50", "--requests=4", "--copy-bytes=1048576"),
]
SOAK = ["--model=tiny", "--tokens=512", "--minutes=0.3", "--rounds=2", "--documents=3", "--clients=3"]


def test_percentiles_are_in_milliseconds():
    found = percentiles("first token", [n / 1000 for n in range(101)])
    assert found == pytest.approx({"first token p50 ms": 50, "first token p95 ms": 95, "first token p99 ms": 99})


def test_a_stream_is_timed_from_its_first_token_on():
    lm = tiny_lm()
    sampling = {"max_new_tokens": 9, "min_new_tokens": 0, "sampling": Sampling(), "seed": 0, "stop": ()}
    stream = Stream(lm, AnswerOptions.create(lm, **sampling, stop_token_ids=(), logprobs=False), lambda stream: None)
    stream.add([1, 2], [], [])
    times = TokenTimes(stream)
    stream.add([3, 4, 5], [], [])
    stream.add([], [], [])  # nothing new
    assert [count for _, count in times.times] == [2, 5]
    times.wait(5, 0)
    with pytest.raises(TimeoutError, match="5 of 6 tokens"):
        times.wait(6, 0)
    times.times = [(1.0, 1), (2.0, 2), (2.5, 4)]
    assert times.gaps() == [1.0, 0.5]


def test_requests_arrive_at_the_rate():
    begin = time.perf_counter()
    found = at_random(400, 4000.0, 3, lambda number, at: (number, at - begin))
    assert [number for number, _ in found] == list(range(400))
    times = [at for _, at in found]
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4000, rel=0.2)


def test_growth_is_measured_once_nothing_compiles():
    compiling = [(float(s), 10**8 + 2 * 10**6 * s, min(s, 6)) for s in range(51)]
    flat = [(float(s), 2 * 10**8, 7) for s in range(51, 101)]
    assert growth(compiling + flat) == pytest.approx(0, abs=1)
    assert growth([(float(s), 10**8 + 10**6 * s, 7) for s in range(101)]) == pytest.approx(6e7)
    assert growth([]) == 0


@pytest.mark.slow
def test_serve_times_steps_and_load(tmp_path):
    result = commands.run("bench", "serve", *SERVE, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = read_results(tmp_path / "serve.jsonl")["rows"]
    of = {table: [row for row in rows if row["table"] == table] for table in ("Documents", "Steps", "Load")}
    assert [(row["attention"], row["rows"]) for row in of["Steps"]] == [
        (name, rows) for name in ("TCA 0.25", "full") for rows in (1, 2)
    ]
    assert all(row["fit"] >= row["documents"] == 2 for row in of["Documents"])
    for row in of["Load"]:
        assert 0 < row["first token p50 ms"] <= row["first token p95 ms"] <= row["first token p99 ms"]
        assert 0 < row["inter-token p50 ms"] <= row["inter-token p99 ms"]


@pytest.mark.slow
def test_a_soak_finds_nothing(tmp_path):
    result = commands.run("bench", "soak", *SOAK, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = read_results(tmp_path / "soak.jsonl")["rows"]
    assert [row["documents found"] for row in rows if row["table"] == "Rounds"] == [0, 3]
    assert all(row["equal"] + row["gone"] for row in rows if row["table"] == "Requests")
    assert "Nothing failed." in (tmp_path / "soak.md").read_text()


@pytest.mark.slow
def test_a_soak_fails_where_an_answer_differs(tmp_path, monkeypatch):
    generate = soak.tca_jax.generate

    def wrong(*args, **options):
        out = generate(*args, **options)
        out.tokens[0][0] += 1
        return out

    monkeypatch.setattr(soak.tca_jax, "generate", wrong)
    result = commands.run("bench", "soak", *SOAK, "--rounds=1", "--minutes=0.01", "--out", tmp_path)
    assert result.exit_code == 1
    assert "other answers" in result.stderr
