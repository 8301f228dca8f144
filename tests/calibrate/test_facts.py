"""Facts that calibration hides: how they differ, and that a line, a question and an answer belong together."""

import collections
import itertools
import re

import numpy as np
import pytest

from tca_jax.calibration.facts import _KINDS, _NATURAL, _PLAIN, draw_facts

SEEDS = range(60)


def facts_of(seed):
    return draw_facts(np.random.default_rng([seed, 0, 1]))


def split_answer(fact):
    """Kind and key of a fact."""
    return re.fullmatch(r"The (.+) for (\w+ \w+) is .+\.", fact.answer).groups()


def shape_of(kind):
    return next(shape for shape, kinds in _KINDS.items() if kind in kinds)


def test_the_same_state_gives_the_same_facts_and_another_one_others():
    assert facts_of(3) == facts_of(3)
    lines = [{fact.line for fact in facts_of(seed)} for seed in SEEDS]
    assert all(not a & b for a, b in itertools.pairwise(lines))


@pytest.mark.parametrize("seed", SEEDS)
def test_facts_are_twelve_of_five_shapes_about_different_keys(seed):
    facts = facts_of(seed)
    kinds, keys = zip(*map(split_answer, facts), strict=True)
    assert collections.Counter(map(shape_of, kinds)) == {"number": 3, "hex": 3, "words": 2, "sentence": 2, "list": 2}
    assert len({word for key in keys for word in key.split()}) == 2 * len(keys)  # no two keys share a word
    assert len({fact.value for fact in facts}) == len(facts)
    for kind, fact in zip(kinds, facts, strict=True):
        assert re.fullmatch(
            {
                "number": r"\d{6}",
                "hex": "[0-9a-f]{32}",
                "words": r"\w+ \w+",
                "sentence": r"(\w+ ){7,}\w+",
                "list": r"\w+, \w+, \w+",
            }[shape_of(kind)],
            fact.value,
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_line_says_the_value_of_a_key_and_the_question_asks_for_it(seed):
    facts = facts_of(seed)
    for fact in facts:
        kind, key = split_answer(fact)
        assert all(fact.line.count(part) == 1 for part in (kind, key, fact.value))
        assert kind in fact.question
        assert key in fact.question
        assert fact.value not in fact.question
        assert fact.answer.endswith(f" is {fact.value}.")
        assert "\n" not in fact.line
        assert (fact.line + fact.question + fact.answer).isascii()
        assert sum(key in other.line for other in facts) == 1
        assert sum(fact.value in other.line for other in facts) == 1


def plain(fact):
    kind, key = split_answer(fact)
    lines, questions = ([each.format(kind=kind, key=key, value=fact.value) for each in some] for some in _PLAIN)
    return fact.line.removeprefix("# ") in lines, fact.question in questions


def test_every_other_fact_is_worded_plainly_in_line_and_question_and_a_third_are_comments():
    for seed in SEEDS:
        kinds_of_wording = [plain(fact) for fact in facts_of(seed)]
        assert set(kinds_of_wording) == {(True, True), (False, False)}
        assert all(a != b for a, b in itertools.pairwise(kinds_of_wording))
    lines = [fact.line for seed in SEEDS for fact in facts_of(seed)]
    assert 0.25 < np.mean([line.startswith("# ") for line in lines]) < 0.42


def test_every_wording_and_every_kind_is_drawn():
    facts = [fact for seed in SEEDS for fact in facts_of(seed)]
    drawn_lines, drawn_questions, drawn_kinds = set(), set(), set()
    for fact in facts:
        kind, key = split_answer(fact)
        drawn_kinds.add(kind)
        line = fact.line.removeprefix("# ").replace(fact.value, "{value}")
        drawn_lines.add(line.replace(key, "{key}").replace(kind, "{kind}"))
        drawn_questions.add(fact.question.replace(key, "{key}").replace(kind, "{kind}"))
    assert drawn_lines == {*_PLAIN[0], *_NATURAL[0]}
    assert drawn_questions == {*_PLAIN[1], *_NATURAL[1]}
    assert drawn_kinds == {kind for kinds in _KINDS.values() for kind in kinds}
