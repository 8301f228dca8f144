"""The demo: short runs with the shipped model and SmolLM2, and that its tables and sentence say what was measured."""

import dataclasses
import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import tca_jax
from tca_jax.lab import demo as demo_module
from tca_jax.lab.demo import (
    METHODS,
    RECALL_TINY,
    SMOLLM2,
    Answer,
    DemoResult,
    Reading,
    choose_model,
    context_table,
    model_line,
    protocol_table,
    run_demo,
)
from tca_jax.lab.models import find
from tca_jax.lab.recall import PROTOCOLS
from tca_jax.loading import checkpoint_folder

RUN = ("full", "tca")  # the third one's runs are those of any profile


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Result and reported steps of a demo over 3,000 tokens."""
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tca_jax.lab.demo.METHODS", {name: METHODS[name] for name in RUN})
        result = run_demo(3000, 1, 0, tmp_path_factory.mktemp("demo") / "new", lambda *step: steps.append(step))
    return result, steps


def test_the_method_as_published_has_its_profile_beside_the_model():
    profile = tca_jax.Profile.load(checkpoint_folder(RECALL_TINY) / METHODS["paper()"])
    lm = tca_jax.load(RECALL_TINY, profile)
    assert lm.method.cache.config.criterion == "column_mean"
    assert list(METHODS) == [*RUN, "paper()"]


@pytest.mark.parametrize(("name", "criterion"), [("tca", "worth"), ("paper()", "column_mean")])
def test_smollm2_has_its_profiles_in_the_package(name, criterion):
    profile = tca_jax.Profile.load(Path(demo_module.__file__).parent / "profiles" / SMOLLM2 / METHODS[name])
    assert profile.method().cache.config.criterion == criterion


def test_smollm2_is_the_default_once_it_is_fetched(monkeypatch):
    monkeypatch.setattr(demo_module, "find", lambda alias: Path(f"{alias}.gguf"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)
    assert choose_model() == choose_model(SMOLLM2) == SMOLLM2
    assert choose_model(RECALL_TINY) == RECALL_TINY
    assert "make models" not in model_line(SMOLLM2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    assert choose_model() == RECALL_TINY
    assert "pip install gguf" in model_line(RECALL_TINY)


def test_without_its_file_the_shipped_model_answers(monkeypatch):
    monkeypatch.setattr(demo_module, "find", lambda alias: None)
    assert choose_model() == RECALL_TINY
    assert "make models" in model_line(RECALL_TINY)
    with pytest.raises(ValueError, match=r"model = 'smollm2': its file is not in .*make models"):
        choose_model(SMOLLM2)
    with pytest.raises(ValueError, match=r"model = 'other': must be one of \['smollm2', 'recall-tiny'\]"):
        choose_model("other")


@pytest.mark.slow
@pytest.mark.skipif(find(SMOLLM2) is None, reason="needs SmolLM2: make models")
def test_smollm2_answers_after_reading_and_tca_holds_less(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_module, "METHODS", {name: METHODS[name] for name in RUN})
    result = run_demo(3000, 1, 0, tmp_path, model=SMOLLM2)
    assert 2950 < result.tokens <= 3000
    assert [(answer.protocol, answer.method) for answer in result.answers] == [("late", name) for name in RUN]
    assert all(answer.correct for answer in result.answers), result.answers
    full, tca = result.readings
    assert full.kv_cache_bytes > tca.kv_cache_bytes
    assert full.attended_share == 1 > tca.attended_share > 0
    lines = printed(protocol_table(result))
    assert "late after the reading, later on 1 of 1 1 of 1" in lines
    assert not any(line.startswith("prefix") for line in lines)
    assert result.picture.read_bytes().startswith(b"\x89PNG")


def test_every_method_answers_under_every_protocol_and_tca_holds_less(demo):
    result, _ = demo
    assert len(result.answers) == len(RUN) * len(PROTOCOLS)
    for name in RUN:
        for protocol in PROTOCOLS:
            (answer,) = result.of(protocol, name)
            assert answer.correct, answer
            assert answer.text.endswith(answer.expected) or answer.expected.endswith(answer.text)
            assert answer.seconds > 0
    full, tca = result.readings
    assert full.kv_cache_bytes >= full.full_kv_cache_bytes > 2 * tca.kv_cache_bytes
    assert full.attended_share == 1 > tca.attended_share > 0
    assert result.picture.read_bytes().startswith(b"\x89PNG")


def test_progress_tells_every_step(demo):
    steps = list(dict.fromkeys(step for step, _, _ in demo[1]))
    assert steps == [
        "loading recall-tiny",
        "compiling",
        *(
            f"{name}: {what}"
            for name in RUN
            for what in ("answering whole prompts", "reading the document, then answering")
        ),
        "drawing what tca kept",
    ]
    assert all(total is None or 0 <= done <= total for _, done, total in demo[1])


def test_the_result_survives_json(demo):
    result, _ = demo
    record = json.loads(json.dumps(result.to_json()))
    assert record["tokens"] == 3000
    assert record["answers"] == [dataclasses.asdict(answer) for answer in result.answers]
    assert record["readings"] == [dataclasses.asdict(reading) for reading in result.readings]


def answer(protocol, method, *, correct=True, text="The code for amber falcon is 123456."):
    return Answer(protocol, method, "What is the code?", "The code for amber falcon is 123456.", text, correct, 0.25)


def result_of(tmp_path, *, right=("full", "tca"), **kwargs):
    answers = [answer(p, m, correct=m in right, **kwargs) for p in PROTOCOLS for m in METHODS]
    readings = [
        Reading("full", 2.0, 100_000_000, 100_000_000, 1.0),
        Reading("tca", 1.5, 31_000_000, 100_000_000, 0.24),
        Reading("paper()", 1.0, 93_000_000, 100_000_000, 0.9),
    ]
    return DemoResult(16384, answers, readings, tmp_path)


def printed(table):
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_the_tables_fit_80_columns_and_tell_what_is_right(tmp_path):
    result = result_of(tmp_path)
    lines = printed(protocol_table(result))
    assert "prefix with the answer's first words 1 of 1 1 of 1 0 of 1" in lines
    assert "late after the reading, later on 1 of 1 1 of 1 0 of 1" in lines
    assert "KV cache MB the document, once 100.0 31.0 93.0" in lines
    assert "pairs attended the document, once 100% 24% 90%" in lines
    assert "s to read the document, once 2.0 1.5 1.0" in lines
    assert any("right 0.2" in line for line in printed(context_table(result)))
    assert any("wrong 0.2" in line for line in printed(context_table(result_of(tmp_path, right=("full",)))))


def test_the_table_prints_whatever_a_model_says_as_it_is(tmp_path):
    lines = printed(context_table(result_of(tmp_path, text="[red]\n\x1b")))
    assert any("[red]··" in line for line in lines)


def test_the_sentence_says_what_was_measured(tmp_path):
    assert result_of(tmp_path).summary() == (
        "The question comes after 16,384 tokens were read without it: full attention answers 1 of 1 right, tca 1 with "
        "31% of the KV cache, the method as published 0. Reading took tca 1.5 s, each further question 0.2 s."
    )


@pytest.mark.parametrize(
    ("tokens", "questions", "message"),
    [
        (100, 1, r"tokens = 100: must lie in \[3000, 15872\]"),
        (100_000, 1, r"tokens = 100000: must lie in \[3000, 15872\]"),
        (4096, 0, r"questions = 0: must lie in \[1, 7\]"),
        (4096, 8, r"questions = 8: must lie in \[1, 7\]"),
    ],
)
def test_arguments_out_of_range_are_named(tokens, questions, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_demo(tokens, questions, 0, tmp_path)
