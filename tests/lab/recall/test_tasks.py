"""Tasks: each question has one answer, which a reader of the document finds without knowing how it was made."""

import re

import numpy as np
import pytest

from tca_jax.lab.recall import TASKS, build_document, draw_question
from tca_jax.lab.recall.facts import ADJECTIVES, KINDS, NOUNS, draw_keys

KEY = rf"(?:{'|'.join(ADJECTIVES)}) (?:{'|'.join(NOUNS)})"
KIND = rf"(?:(?:first|second|third|fourth) )?(?:{'|'.join(kind for kinds in KINDS.values() for kind in kinds)})"
LINES = tuple(
    re.compile(f"# {pattern.format(kind=f'(?P<kind>{KIND})', key=f'(?P<key>{KEY})', value='(?P<value>.+)')}[.]")
    for pattern in (
        "The {kind} for {key} is {value}",
        "Remember that the {kind} of {key} is {value}",
        "For {key} the {kind} is {value}",
        "As agreed, the {kind} for {key} is {value}",
        "{key}: {kind} {value}",
        "Note on {key}: its {kind} reads {value}",
        "We gave {key} a {kind}, namely {value}",
    )
)


def read_facts(text):
    """What a text says, by kind and key; nothing twice."""
    said = {}
    for line in text.splitlines():
        for match in filter(None, (pattern.fullmatch(line) for pattern in LINES)):
            where = match["kind"], match["key"]
            assert where not in said, f"{where} has two values"
            said[where] = match["value"]
    return said


def solve(text, question):
    """The answer to a question, from the text alone."""
    said, keys = read_facts(text), re.findall(KEY, question)
    kind = re.search(KIND, re.sub(KEY, "#", question))[0]
    if count := re.search(r"\ball (\d)\b", question):
        ordinals = ("first", "second", "third", "fourth")[: int(count[1])]
        found = [(f"{ordinal} {kind}", keys[0]) for ordinal in ordinals]
    else:
        found = [(kind, key) for key in keys]
    while follows := re.fullmatch(f"that of ({KEY})", said[found[-1]]):
        found.append((kind, follows[1]))
    sentence = ", ".join(f"the {kind} for {key} is {said[kind, key]}" for kind, key in found)
    return f"{sentence[0].upper()}{sentence[1:]}."


def draw(task, seed):
    rng = np.random.default_rng(seed)
    return draw_question(rng, task, draw_keys(rng))


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_of_a_document_finds_the_answer_to_every_question(seed):
    document = build_document(np.random.default_rng(seed), 12000, [*TASKS, *TASKS])
    assert [question.task for question in document.questions] == [*TASKS, *TASKS]
    for question in document.questions:
        assert solve(document.text, question.text) == question.sentence


@pytest.mark.parametrize("task", TASKS)
def test_the_answers_lead_holds_nothing_that_only_the_text_says(task):
    for seed in range(20):
        question = draw(task, seed)
        assert question.lead == f"The {question.facts[0].kind} for {question.facts[0].key} is "
        assert question.sentence == f"{question.lead}{question.answer}."
        assert question.answer.startswith(question.facts[0].value)


@pytest.mark.parametrize("task", TASKS)
def test_questions_come_in_several_wordings(task):
    drawn = [draw(task, seed) for seed in range(100)]
    wordings = {re.sub(rf"{KEY}|\d", "#", re.sub(KIND, "#", question.text)) for question in drawn}
    assert len(wordings) >= 5


def test_tracking_follows_two_to_four_hops_beside_a_chain_that_is_not_asked_for():
    hops = set()
    for seed in range(60):
        question = draw("tracking", seed)
        *chain, distractor, end = question.facts
        assert [fact.value for fact in chain[:-1]] == [f"that of {fact.key}" for fact in chain[1:]]
        assert re.fullmatch(r"\d{6}", chain[-1].value)
        assert distractor.value == f"that of {end.key}"
        assert re.fullmatch(r"\d{6}", end.value)
        assert end.key not in question.sentence
        assert "step by step" in question.text
        hops.add(len(chain) - 1)
    assert hops == {2, 3, 4}


def test_distractors_of_keys_are_of_the_same_kind_and_share_a_word():
    for seed in range(20):
        asked, *others = draw("keys", seed).facts
        assert len({fact.key for fact in others} - {asked.key}) == 7
        assert {fact.kind for fact in others} == {asked.kind}
        assert all(len(set(fact.key.split()) & set(asked.key.split())) == 1 for fact in others)


@pytest.mark.parametrize(("task", "keys"), [("values", 1), ("queries", None)])
def test_several_are_two_to_four(task, keys):
    drawn = [draw(task, seed) for seed in range(60)]
    assert {len(question.facts) for question in drawn} == {2, 3, 4}
    for question in drawn:
        assert len({fact.key for fact in question.facts}) == (keys or len(question.facts))
        assert question.answer.count(" is ") == len(question.facts) - 1


@pytest.mark.parametrize(("task", "length"), [("digits", 6), ("hex", 32), ("copy", 200)])
def test_single_values_have_their_length(task, length):
    assert {len(draw(task, seed).answer) for seed in range(20)} == {length}


def test_the_same_generator_state_gives_the_same_question_and_another_gives_another():
    assert draw("queries", 3) == draw("queries", 3)
    assert draw("queries", 3) != draw("queries", 4)


def test_an_unknown_task_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"task = 'sums': must be one of \['digits', 'words', .*'copy'\]"):
        draw_question(rng, "sums", draw_keys(rng))
