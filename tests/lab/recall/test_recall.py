"""Recall tasks: facts, questions, documents and protocols."""

import hashlib

import numpy as np
import pytest

from tca_jax.lab.recall import PROTOCOLS, TASKS, build_document, draw_question
from tca_jax.lab.recall.corpus import HELD_OUT_MODULES, corpus, source_files
from tca_jax.lab.recall.documents import draw_documents
from tca_jax.lab.recall.facts import Fact, draw_keys
from tca_jax.lab.recall.tasks import ANSWER_TOKENS, PREAMBLES, Question, completion, is_correct

EVERY_TASK = tuple(TASKS)
#: Of 30 questions each, with their facts: recall-tiny was trained on these.
DIGESTS = {
    "digits": "d8c1ee7c7d71",
    "words": "7f133169228f",
    "hex": "7fdb164c7c33",
    "keys": "476b8a191b57",
    "values": "61023fb8f864",
    "queries": "08be5a349223",
    "tracking": "a9373b5ff0b7",
    "copy": "a305c54978fb",
}


def test_splits_share_no_text():
    train, held_out = set(source_files("train")), set(source_files("held-out"))
    assert not train & held_out
    assert not [path for path in train if {"test", "tests", "site-packages", "idlelib"} & set(path.parts)]
    assert {path.name for path in held_out} <= set(HELD_OUT_MODULES)


@pytest.mark.parametrize("task", TASKS)
def test_questions_keep_their_text(task):
    found = hashlib.sha256()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        question = draw_question(rng, task, draw_keys(rng))
        answer = f"{PREAMBLES[0]} {question.sentence}"
        assert is_correct(question, answer, "late")
        assert len(answer) < ANSWER_TOKENS
        lines = (*(fact.line for fact in question.facts), question.text, question.lead, question.answer)
        found.update("\0".join(lines).encode())
    assert found.hexdigest()[:12] == DIGESTS[task]


@pytest.mark.parametrize("split", ["train", "held-out"])
@pytest.mark.parametrize(("num_bytes", "tasks"), [(500, ["digits"]), (4095, EVERY_TASK), (16383, EVERY_TASK * 4)])
def test_documents_have_their_bytes_and_places(num_bytes, tasks, split):
    document, again, other = (build_document(np.random.default_rng(s), num_bytes, tasks, split) for s in (0, 0, 1))
    assert document == again
    assert document.text != other.text
    assert len(document.text.encode("ascii")) == num_bytes
    offsets, passage = [offset for _, offset in document.places], document.text
    assert offsets == sorted(offsets)
    assert len(offsets) == sum(len(question.facts) for question in document.questions)
    for fact, place in document.places:
        assert document.place(fact) == place
        assert document.text.startswith(fact.line, place)
        assert place == 0 or document.text[place - 1] == "\n"
        passage = passage.replace(fact.line, "", 1)
    assert b"\n" + passage.encode() in b"\n" + corpus(split)


@pytest.mark.parametrize("num_bytes", [0, 40, 100_000_000])
def test_sizes_without_room_are_refused(num_bytes):
    with pytest.raises(ValueError, match=rf"num_bytes = {num_bytes}: the facts take \d+ bytes") as error:
        build_document(np.random.default_rng(0), num_bytes, ["digits"])
    least = int(str(error.value).rsplit("[", 1)[1].split(",")[0])
    document = build_document(np.random.default_rng(0), least, ["digits"])
    assert document.text == "".join(fact.line for fact, _ in document.places)


@pytest.mark.parametrize("task", TASKS)
def test_drawn_documents_ask_their_task_first(task):
    two, three = draw_documents((7, 1), 2, 6000, task), draw_documents((7, 1), 3, 6000, task)
    assert two == three[:2]
    for document in three:
        assert document.questions[0].task == task
        assert sorted(question.task for question in document.questions) == sorted(TASKS)
        assert len(completion(document.text, document.questions[0])) == 6000
    assert len({document.text for document in [*three, *draw_documents(7, 1, 6000, task)]}) == 4


LEAD = "The access code for amber falcon is "
QUESTION = Question(
    "digits", (Fact("access code", "amber falcon", "482913"),), "Find the access code of amber falcon.", LEAD, "482913"
)


def test_completions_end_with_the_first_words():
    expected = f"Some text.\n\nQuestion: Find the access code of amber falcon.\nAnswer: {LEAD}"
    assert completion("Some text.", QUESTION) == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_answers_are_right_by_their_protocol(protocol):
    bare, first, said = "482913.", PREAMBLES[0], f"{LEAD}482913."
    chats = {said, *(f"{preamble} {said}" for preamble in PREAMBLES)}
    wrong = {"", "482913", "482914.", " 482913.", "482913. And", f"{LEAD}482914.", f"{LEAD}482913", f"{said} It was."}
    wrong |= {f"{LEAD}111111. {said}", f"{first} 482913.", f"{first * 4} {said}"}
    expected = {bare} if protocol == "prefix" else chats
    assert {text for text in {bare, *chats, *wrong} if is_correct(QUESTION, text, protocol)} == expected
