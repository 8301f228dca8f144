"""Figures of a serving engine are computed from moments and bytes as their tables say."""

import pytest
from tiny import tiny_lm

from tca_jax.engine.request import AnswerOptions
from tca_jax.engine.sampling import Sampling
from tca_jax.lab.benchmarks.serve import PARTS, TARGETS, summary
from tca_jax.lab.benchmarks.serve_parts import floor_seconds
from tca_jax.lab.benchmarks.serve_soak import Sample, growth
from tca_jax.lab.benchmarks.served_documents import Round, own_time
from tca_jax.lab.benchmarks.watching import Watched, arrivals, at_times, percentiles
from tca_jax.serve.streams import Stream


def test_a_step_reads_at_least_weights_and_pages():
    assert floor_seconds(16 * 10**9, 16 * 5 * 10**9, 4e12) == pytest.approx(0.024)


def test_percentiles_are_those_of_milliseconds():
    assert percentiles([n / 1000 for n in range(101)], 50, 99) == pytest.approx({"p50 ms": 50, "p99 ms": 99})


def test_a_stream_is_watched_from_its_first_token_on():
    lm = tiny_lm()
    sampling = {"max_new_tokens": 9, "min_new_tokens": 0, "sampling": Sampling(), "seed": 0, "stop": ()}
    stream = Stream(lm, AnswerOptions.create(lm, **sampling, stop_token_ids=(), logprobs=False), lambda stream: None)
    stream.add([1, 2], [], [])
    watched = Watched(stream)
    stream.add([3, 4, 5], [], [])
    stream.add([], [], [])  # nothing new
    assert [count for _, count in watched.times] == [2, 5]
    watched.wait(5, 0)
    with pytest.raises(TimeoutError, match="5 of 6 tokens"):
        watched.wait(6, 0)
    watched.times = [(1.0, 1), (2.0, 2), (2.5, 4), (4.0, 5), (9.0, 9)]
    assert watched.seconds_per_token(1.5, 3) == (pytest.approx(2 / 3), 4.0)
    assert watched.pauses(2.2, 3.0) == [0.5, 1.5]  # also those that begin before, or end later


def test_the_scheduler_has_what_is_neither_waiting_nor_the_call_of_a_program():
    rounds = [Round(10.0 * i, 10.0 * i + 10, 5.0, 1.0, 2) for i in range(5)]
    rounds.append(Round(20.0, 21.0, 0.0, 0.0, 0))  # it launched nothing
    assert own_time(rounds, 10, 40) == pytest.approx({"scheduler ms/step": 2000, "call ms/step": 500})


def test_requests_arrive_at_the_rate_and_at_their_times():
    times = arrivals(10_000, 50.0, seed=3)
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(50, rel=0.05)
    assert times != arrivals(10_000, 50.0, seed=4)
    assert at_times([0.0, 0.001], lambda number, at: number) == [0, 1]


def test_the_summary_compares_with_one_row_and_with_full_caches():
    steps = [
        {"share": share, "rows": rows, "over floor": 1.2, "tokens/s": rate}
        for share, rows, rate in ((0.25, 16, 400.0), (0.25, 1, 100.0), (1.0, 5, 200.0), (1.0, 1, 50.0))
    ]
    tables = {PARTS["steps"]: steps, PARTS["documents"]: [{"share": 0.25, "documents": 16}]}
    found = {(row["what"], row["share"]): row["measured"] for row in summary(tables)}
    assert found == {
        ("resident documents", 0.25): 16,
        ("a step over its byte floor", 0.25): 1.2,
        ("a step over its byte floor", 1.0): 1.2,
        ("tokens/s over one row", 0.25): 4.0,
        ("tokens/s over one row", 1.0): 4.0,
        ("tokens/s over full caches", 0.25): 2.0,
    }
    assert {row["at least"] for row in summary(tables) if row["share"] == 0.25} == {
        TARGETS[what][0.25][0] for what, share in found if share == 0.25
    }


def test_growth_is_the_slope_of_a_line_once_nothing_is_compiled_any_more():
    flat = [Sample(float(s), 2 * 10**8, 7) for s in range(51, 101)]
    compiling = [Sample(float(s), 10**8 + 2 * 10**6 * s, min(s, 6)) for s in range(51)]
    row = growth(compiling + flat)
    assert (row["samples"], row["programs compiled"], row["peak MB"]) == (50, 0, 200)
    assert row["grown MB"] == pytest.approx(0, abs=1e-6)
    row = growth([Sample(float(s), 10**8 + 10**6 * s, 7) for s in range(101)])
    assert (row["over s"], row["MB/minute"], row["grown MB"]) == pytest.approx((60, 60, 60))
    late = growth([Sample(float(s), 10**8 + 10**6 * s, s) for s in range(101)])
    assert (late["over s"], late["programs compiled"]) == (60, 60)
    assert growth([])["grown MB"] == 0
