"""Asking: documents that depend on their seed, what each protocol reads when, and how answers are counted."""

import numpy as np
import pytest
import sharp_lm

from tca_jax.engine.generation import Output, Stats
from tca_jax.lab.recall import TASKS, evaluation
from tca_jax.lab.recall.evaluation import ask, draw_documents
from tca_jax.lab.recall.protocols import chat_answer, chat_document, chat_question, completion, is_correct


@pytest.fixture(scope="module")
def lm():
    return sharp_lm.make_lm()


@pytest.fixture
def calls(monkeypatch):
    """What reaches the model; every answer to the first question of a call is right, the others are empty."""
    made = []

    stats = Stats([], [], 0.0, 0.0, 0.0, kv_cache_bytes=3, full_kv_cache_bytes=10, kept_share=0.25, attended_share=0.5)

    def generate(lm, prompts, *, max_new_tokens, context=None):
        made.append((prompts, context, max_new_tokens))
        return Output([], [], stats, None, [f"answer {prompts[0]}", *[""] * (len(prompts) - 1)])

    monkeypatch.setattr(evaluation, "generate", generate)
    monkeypatch.setattr(evaluation, "prefill", lambda lm, documents: ("read", documents))
    monkeypatch.setattr(evaluation, "is_correct", lambda question, text, protocol: bool(text))
    return made


@pytest.mark.parametrize("task", TASKS)
def test_documents_hide_every_task_and_ask_the_wanted_one_first(task):
    for document in draw_documents(7, 3, 6000, task):
        question = document.questions[0]
        assert question.task == task
        assert sorted(question.task for question in document.questions) == sorted(TASKS)
        assert len(completion(document.text, question)) == 6000


def test_documents_depend_on_their_seed_and_number_alone():
    two, three = draw_documents((7, 1), 2, 4000, "hex"), draw_documents((7, 1), 3, 4000, "hex")
    assert two == three[:2]
    assert len({document.text for document in [*three, *draw_documents((7, 2), 1, 4000, "hex")]}) == 4


def test_prefix_and_preamble_give_document_and_question_at_once_and_late_one_after_the_other(lm, calls):
    documents = draw_documents(0, 2, 4000, "digits")
    for protocol in ("prefix", "preamble", "late"):
        ask(lm, documents, protocol, max_new_tokens=99)
    prefix, preamble, late = calls
    questions = [document.questions[0] for document in documents]
    texts = [document.text for document in documents]
    assert prefix == (list(map(completion, texts, questions)), None, 99)
    read, asked = list(map(chat_document, texts)), list(map(chat_question, questions))
    assert preamble == ([d + q for d, q in zip(read, asked, strict=True)], None, 99)
    assert late == (asked, ("read", read), 99)


def test_answers_of_all_batches_are_counted_in_order(lm, calls):
    asked = ask(lm, draw_documents(1, 5, 4000, "digits"), "prefix", batch=2)
    assert [len(prompts) for prompts, *_ in calls] == [2, 2, 1]
    assert asked.right == [True, False, True, False, True]
    assert [bool(text) for text in asked.texts] == asked.right
    assert asked.kv_cache_share == 0.3


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_of_a_chat_that_probes_use_is_right_and_has_room(task):
    for seed in range(30):
        question = draw_documents(seed, 1, 4000, task)[0].questions[0]
        assert is_correct(question, chat_answer(question), "late")
        assert len(chat_answer(question)) < evaluation.ANSWER_TOKENS


def test_an_unknown_protocol_is_refused_before_anything_runs(lm, calls):
    with pytest.raises(ValueError, match="protocol = 'ruler': must be one of"):
        ask(lm, draw_documents(0, 1, 4000, "digits"), "ruler")
    assert not calls


def test_a_seed_may_be_one_number_or_several():
    assert draw_documents(3, 1, 4000, "digits") == draw_documents((3,), 1, 4000, "digits")
    assert np.unique([draw_documents(seed, 1, 4000, "digits")[0].text for seed in (3, 4)]).size == 2
