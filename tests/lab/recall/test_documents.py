"""Documents: exact sizes, facts where they say, real text around them."""

import numpy as np
import pytest

from tca_jax.lab.recall import TASKS, build_document
from tca_jax.lab.recall.corpus import corpus

EVERY_TASK = tuple(TASKS)


@pytest.mark.parametrize("split", ["train", "held-out"])
@pytest.mark.parametrize(("num_bytes", "tasks"), [(500, ["digits"]), (4095, EVERY_TASK), (16383, EVERY_TASK * 4)])
def test_a_document_has_exactly_the_wanted_bytes(num_bytes, tasks, split):
    document = build_document(np.random.default_rng(0), num_bytes, tasks, split)
    assert len(document.text.encode("ascii")) == num_bytes


def test_every_fact_stands_on_a_line_of_its_own_at_its_place():
    rng = np.random.default_rng(1)
    for _ in range(20):
        document = build_document(rng, 5000, EVERY_TASK)
        facts = [fact for question in document.questions for fact in question.facts]
        offsets = [offset for _, offset in document.places]
        assert offsets == sorted(offsets)
        assert len(document.places) == len(facts)
        for fact in facts:
            place = document.place(fact)
            assert document.text.startswith(fact.line, place)
            assert place == 0 or document.text[place - 1] == "\n"


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_text_around_the_facts_is_a_passage_of_the_split_that_starts_a_line(split):
    document = build_document(np.random.default_rng(2), 6000, EVERY_TASK, split)
    passage = document.text
    for fact, _ in document.places:
        passage = passage.replace(fact.line, "", 1)
    assert b"\n" + passage.encode() in b"\n" + corpus(split)


def test_facts_stand_in_an_order_that_does_not_tell_the_questions_order():
    rng = np.random.default_rng(3)
    documents = [build_document(rng, 2000, ["digits", "words", "hex"]) for _ in range(60)]
    asked_first = [document.questions[0].facts[0] for document in documents]
    orders = [[fact for fact, _ in document.places] for document in documents]
    assert {order.index(fact) for order, fact in zip(orders, asked_first, strict=True)} == {0, 1, 2}


def test_facts_spread_over_the_whole_document():
    rng = np.random.default_rng(4)
    documents = [build_document(rng, 8191, ["digits"] * 4) for _ in range(100)]
    depths = [offset / 8191 for document in documents for _, offset in document.places]
    counts, _ = np.histogram(depths, bins=5, range=(0, 1))
    assert counts.min() > 400 / 5 / 2


def test_the_same_generator_state_gives_the_same_document_and_another_gives_another():
    first, again, other = (build_document(np.random.default_rng(seed), 4000, EVERY_TASK) for seed in (8, 8, 9))
    assert first == again
    assert first.text != other.text


@pytest.mark.parametrize("num_bytes", [0, 40, 100_000_000])
def test_a_document_too_short_for_its_facts_or_longer_than_all_text_is_refused(num_bytes):
    with pytest.raises(ValueError, match=rf"num_bytes = {num_bytes}: the facts take \d+ bytes .* must lie in \[\d+, "):
        build_document(np.random.default_rng(0), num_bytes, ["digits"])


def test_the_smallest_size_that_the_message_names_is_enough():
    with pytest.raises(ValueError, match="num_bytes = 0") as error:
        build_document(np.random.default_rng(0), 0, EVERY_TASK)
    fewest = int(str(error.value).rsplit("[", 1)[1].split(",")[0])
    document = build_document(np.random.default_rng(0), fewest, EVERY_TASK)
    assert document.text == "".join(fact.line for fact, _ in document.places)


def test_unknown_tasks_and_splits_are_refused():
    with pytest.raises(ValueError, match="task = 'sums': must be one of"):
        build_document(np.random.default_rng(0), 4000, ["sums"])
    with pytest.raises(ValueError, match="split = 'test': must be one of"):
        build_document(np.random.default_rng(0), 4000, ["digits"], "test")
