"""The demo: one short run with the shipped model, and that its table and sentence say what was measured."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from tca_jax.demo import Answer, DemoResult, demo_table, run_demo
from tca_jax.engine.generation import Stats


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Result and reported steps of a demo over 1,200 tokens."""
    steps = []
    result = run_demo(1200, 1, 0, tmp_path_factory.mktemp("demo") / "new", lambda *step: steps.append(step))
    return result, steps


def test_both_methods_answer_and_tca_keeps_less(demo):
    result, _ = demo
    full, tca = result.answers
    assert (full.method, tca.method) == ("full", "tca")
    assert full.correct
    assert tca.correct
    assert full.text == f"{full.expected}."
    assert full.stats.prompt_tokens == tca.stats.prompt_tokens == [1200] == [result.tokens]
    assert full.stats.kept_share == 1
    assert tca.stats.kept_share < 0.8
    assert tca.stats.kv_cache_bytes < full.stats.kv_cache_bytes
    assert result.picture.read_bytes().startswith(b"\x89PNG")


def test_progress_tells_every_step(demo):
    steps = list(dict.fromkeys(step for step, _, _ in demo[1]))
    assert steps == [
        "loading recall-tiny",
        "full attention: compiling and answering question 1 of 1",
        "tca attention: compiling and answering question 1 of 1",
        "drawing what tca kept",
    ]
    assert all(total is None or 0 <= done <= total for _, done, total in demo[1])


def test_the_result_survives_json(demo):
    result, _ = demo
    record = json.loads(json.dumps(result.to_json()))
    assert record["tokens"] == 1200
    assert record["answers"] == [dataclasses.asdict(answer) for answer in result.answers]


def answer(method, *, text="123456.", correct=True, prefill=100.25, per_token=0.5, kv_bytes=100_000_000, kept=1.0):
    stats = Stats([16384], [7], 1.0, prefill, per_token, kv_bytes, 100_000_000, kept)
    return Answer("quick garnet", "123456", method, text, correct, stats)


def printed(result, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(demo_table(result))
    return console.file.getvalue()


def test_the_table_fits_80_columns_uncut(tmp_path):
    result = DemoResult(16384, [answer("full"), answer("tca")], tmp_path)
    narrow = printed(result, 80)
    assert max(len(line.rstrip()) for line in narrow.splitlines()) <= 80
    rows = {" ".join(line.split()) for line in narrow.splitlines()}
    assert rows >= {
        "access code for method answer prefill s ms/token KV MB kept",
        "quick garnet full 123456. right 100.25 500.0 100.00 100%",
        "expected 123456 tca 123456. right 100.25 500.0 100.00 100%",
    }


def test_the_table_prints_whatever_a_model_says_as_it_is(tmp_path):
    result = DemoResult(16384, [answer("full", text="[red]\n\x1b", correct=False), answer("tca")], tmp_path)
    assert "[red]··  wrong" in printed(result, 80)


@pytest.mark.parametrize(
    ("tca", "quality", "speed"),
    [
        (
            answer("tca", prefill=50.0, per_token=0.2, kv_bytes=37_000_000),
            "tca 1 of 1 with 63% less KV cache",
            "2.0x faster and its decoding 2.5x faster.",
        ),
        (
            answer("tca", prefill=200.5, per_token=1.0, kv_bytes=102_000_000, correct=False),
            "tca 0 of 1 with 2% more KV cache",
            "2.0x slower and its decoding 2.0x slower.",
        ),
        (
            answer("tca", prefill=100.0, per_token=0.0),
            "tca 1 of 1 with the same KV cache",
            "as fast.",
        ),
    ],
)
def test_the_sentence_is_true_also_where_tca_is_slower_or_larger(tca, quality, speed, tmp_path):
    sentence = DemoResult(16384, [answer("full"), tca], tmp_path).summary()
    assert sentence == (
        f"Over 16,384 tokens full attention answers 1 of 1 right, {quality}; on this machine tca's prefill is {speed}"
    )
