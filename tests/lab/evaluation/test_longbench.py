"""LongBench-E: prompts, scores, truncation in the middle and groups by length."""

import importlib.util
import json

import pytest

from tca_jax.lab.evaluation import longbench as scores
from tca_jax.lab.evaluation.longbench import DATA_SETS, TASKS, by_length
from tca_jax.lab.evaluation.samples import Drawing, Sample
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.loading import open_checkpoint

BY_NAME = {data_set.name: data_set for data_set in DATA_SETS}


@pytest.fixture(scope="module")
def encoder():
    return open_checkpoint("recall-tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("longbench")
    for name in BY_NAME:
        lines = [
            {
                "input": f"{{question}} {i}",
                "context": f"start {i} " + "{word} " * 100 * (i + 1) + f"end {i}",
                "answers": ["yes", "Paragraph 2"],
                "length": [100, 5000, 9000][i],
                "all_classes": ["yes", "no"],
                "dataset": name,
            }
            for i in range(3)
        ]
        (folder / f"{name}_e.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def drawn(encoder, folder, name, length=8000, count=3):
    return BY_NAME[name].draw(Drawing(encoder, Sources(longbench=folder), length, count, 0))


def test_data_sets_have_their_answer_lengths():
    names = "qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum passage_count"
    lengths = (128, 64, 32, 32, 512, 512, 64, 32, 128, 32, 32, 64, 64)
    expected = zip((*names.split(), "passage_retrieval_en", "lcc", "repobench-p"), lengths, strict=True)
    assert {task.name: task.new_tokens for task in TASKS} == dict(expected)


def test_prompts_are_the_originals(encoder, folder):
    sample = drawn(encoder, folder, "qasper")[0]
    context = "start 0 " + "{word} " * 100 + "end 0"
    prefix, preamble = sample.prompts["prefix"], sample.prompts["preamble"]
    rules = (
        "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered "
        'based on the information in the article, write "unanswerable". If the question is a yes/no question, answer '
        '"yes", "no", or "unanswerable". Do not provide any explanation.'
    )
    whole = (
        f"You are given a scientific article and a question. Answer the question {rules}\n\nArticle: {context}\n\n "
        f"Answer the question based on the above article {rules}\n\nQuestion: {{question}} 0\n\nAnswer:"
    )
    assert prefix.document + prefix.question == whole
    assert preamble.document + preamble.question + "\n\nAnswer:" == whole
    assert (prefix.lead, preamble.lead) == ("", "")


def test_examples_use_no_chat_template(encoder, folder):
    chats = {name: drawn(encoder, folder, name)[0].prompts["late"].chat for name in BY_NAME}
    assert {name for name, chat in chats.items() if not chat} == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}


def test_long_documents_lose_their_middle(encoder, folder):
    sample = drawn(encoder, folder, "multifieldqa_en", length=1000)[2]
    prompt = sample.prompts["prefix"]
    assert 900 < len(prompt.encode(encoder)) + 64 <= 1000
    assert "start 2 {word}" in prompt.document
    assert prompt.document.endswith("{word} end 2")
    assert prompt.question.endswith("Question: {question} 2\nAnswer:")


def test_scores_are_grouped_by_length(encoder, folder):
    samples = drawn(encoder, folder, "qasper")
    assert by_length(samples, [0.5, 1.0, 0.25]) == {"0-4k": 50.0, "4-8k": 100.0, "8k+": 25.0}
    assert by_length(samples[:1], [0.5]) == {"0-4k": 50.0}


def test_missing_and_damaged_files_are_named(encoder, folder, tmp_path):
    with pytest.raises(ValueError, match=r"has no lcc_e.jsonl"):
        drawn(encoder, tmp_path, "lcc")
    (tmp_path / "lcc_e.jsonl").write_text('{"input": ""}')
    with pytest.raises(ValueError, match=r"lcc_e.jsonl, line 1: not of LongBench's form: KeyError: 'context'"):
        drawn(encoder, tmp_path, "lcc")


@pytest.mark.parametrize(
    ("score", "answer", "reference", "expected"),
    [
        (scores.qa_f1, "The cat, sat!", "a CAT sat", 1),
        (scores.qa_f1, "cat dog", "cat", 2 / 3),
        (scores.qa_f1, "dog", "cat", 0),
        (scores.count, "4, or 5 of 4", "4", 2 / 3),
        (scores.count, "none", "4", 0),
        (scores.retrieval, "Paragraph 12", "Paragraph 12", 1),
        (scores.retrieval, "12 or 3", "Paragraph 12", 0.5),
        (scores.classification, "Food and drink", "Food and drink", 1),  # part of the right class does not count
        (scores.classification, "Food and drink, Sport", "Sport", 1 / 3),
        (scores.classification, "Sport", "Food", 0),
    ],
)
def test_answers_have_their_scores(score, answer, reference, expected):
    assert score(answer, reference, ("Food", "Food and drink", "Sport")) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [("trec", "\nyes\nno", 1), ("triviaqa", "no\nyes", 0), ("qasper", "blue whale", 1)],
)
def test_first_line_and_best_reference_count(name, answer, expected):
    references = ("red", "blue whale") if name == "qasper" else ("yes",)
    sample = Sample({}, references, source=(1, ("yes", "no")))
    assert BY_NAME[name].mark(sample, answer, "prefix").score == expected


def test_rouge_of_nothing_is_zero():
    pytest.importorskip("rouge")
    assert scores.rouge_l("the cat sat", "the cat sat", ()) == pytest.approx(1, abs=1e-6)
    assert scores.rouge_l("", "the cat", ()) == 0


def test_first_line_of_code_is_compared():
    pytest.importorskip("rapidfuzz")
    assert scores.code_similarity("\n# a comment\nx = 1\ny = 2", "x = 1", ()) == 1
    assert scores.code_similarity("abcd", "abxx", ()) == 0.5
    assert scores.code_similarity("```", "x", ()) == 0


def test_missing_libraries_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need rouge and rapidfuzz: pip install rouge rapidfuzz"):
        scores.require_libraries()
