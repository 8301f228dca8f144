"""The demo: a short run of the shipped model, and that its table and sentence have the measured figures."""

import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tca_jax.lab import demo as demo_module
from tca_jax.lab.demo import (
    METHODS,
    RECALL_TINY,
    SMOLLM2,
    Answer,
    DemoResult,
    Reading,
    choose_model,
    model_line,
    open_model,
    printable,
    result_table,
    run_demo,
)
from tca_jax.lab.models import find


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Result and reported steps of a demo over 3,000 tokens."""
    steps = []
    checkpoint, out = open_model(RECALL_TINY, 3000, 1), tmp_path_factory.mktemp("demo") / "new"
    result = run_demo(checkpoint, 3000, 1, 0, out, lambda *step: steps.append(step))
    return result, steps


def test_smollm2_is_the_default_once_fetched(monkeypatch):
    monkeypatch.setattr(demo_module, "find", lambda alias: Path(f"{alias}.gguf"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)
    assert choose_model() == choose_model(SMOLLM2) == SMOLLM2
    assert choose_model(RECALL_TINY) == RECALL_TINY
    assert "make models" not in model_line(SMOLLM2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    assert choose_model() == RECALL_TINY
    assert "pip install gguf" in model_line(RECALL_TINY)
    monkeypatch.setattr(demo_module, "find", lambda alias: None)
    assert choose_model() == RECALL_TINY
    assert "make models" in model_line(RECALL_TINY)
    with pytest.raises(ValueError, match=r"model = 'smollm2': its file is not in .*make models"):
        choose_model(SMOLLM2)
    with pytest.raises(ValueError, match=r"model = 'other': must be one of \['recall-tiny', 'smollm2'\]"):
        choose_model("other")


@pytest.mark.slow
@pytest.mark.skipif(find(SMOLLM2) is None, reason="needs SmolLM2: make models")
def test_smollm2_answers_with_less_cache(tmp_path):
    result = run_demo(open_model(SMOLLM2, 3000, 1), 3000, 1, 0, tmp_path)
    assert 2950 < result.tokens <= 3000
    assert all(answer.correct for name in METHODS[:2] for answer in result.of(name)), result.answers
    assert result.share("tca") < 1


def test_the_window_loses_what_tca_answers(demo):
    result, _ = demo
    assert [[answer.correct for answer in result.of(name)] for name in METHODS] == [[True], [True], [False]]
    assert result.share("full") == 1
    assert result.share("window") <= result.share("tca") < 0.5
    assert result.lost() == [(*result.of("tca"), *result.of("window"))]
    full, tca, _ = result.readings
    assert full.attended_share == 1 > tca.attended_share > 0
    assert result.picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(json.dumps(result.to_json()))
    assert [len(record[name]) for name in ("answers", "readings")] == [3, 3]


def test_each_step_is_reported(demo):
    steps = list(dict.fromkeys(step for step, _, _ in demo[1]))
    of_methods = ((f"{name}: compiling, and reading 3,000 tokens", f"{name}: question 1 of 1") for name in METHODS)
    assert steps == ["loading recall-tiny", *sum(of_methods, ()), "drawing the tokens that TCA keeps"]
    assert all(total is None or 0 <= done <= total for _, done, total in demo[1])


def result_of():
    answers = [
        Answer(name, f"What is [red]{i}?", "It is 1.", "It is 1.\x1b", name != "window" or i == 1, 0.25)
        for name in METHODS
        for i in range(2)
    ]
    readings = [
        Reading("full", 2.0, 100_000_000, 100_000_000, 1.0),
        Reading("tca", 1.5, 31_000_000, 100_000_000, 0.24),
        Reading("window", 1.0, 30_000_000, 100_000_000, 0.3),
    ]
    return DemoResult("tiny", 16384, 4096, answers, readings, Path("demo.png"))


def test_table_and_summary_have_the_figures():
    console = Console(file=io.StringIO(), width=80)
    console.print(result_table(result_of()))
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "What is [red]0? right right wrong" in lines
    assert "right answers 2 of 2 2 of 2 1 of 2" in lines
    assert "KV cache, MB 100.0 31.0 30.0" in lines
    assert "prefill attends to 100% 24% 30%" in lines
    assert "seconds to read 2.0 1.5 1.0" in lines
    assert printable("[red]\n\x1b") == "[red]··"
    assert result_of().summary() == (
        "Asked after 16,384 tokens were read: full attention answers 2 of 2 questions, TCA 2 with 31% of the KV cache, "
        "a window of 4,096 tokens with 30% of it 1."
    )
