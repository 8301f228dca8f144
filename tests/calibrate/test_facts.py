"""Facts that calibration hides: how they differ, and that a line, a question and an answer belong together."""

import collections
import itertools
import re

import numpy as np
import pytest

from tca_jax.calibration.facts import _KINDS, _NATURAL, _PLAIN, _SEVERAL, draw_facts

SEEDS = range(60)


def facts_of(seed):
    return draw_facts(np.random.default_rng([seed, 0, 1]))


def split_answer(fact):
    """Kind and key of each line, as the answer has them."""
    said = re.findall(r"[Tt]he ((?:(?!, the ).)+?) for (\w+ \w+) is (?:(?!, the ).)+", fact.answer)
    assert len(said) == len(fact.lines) == len(fact.values)
    return said


def kind_of(fact):
    """Without its ordinal."""
    kind, _ = split_answer(fact)[0]
    return kind.removeprefix("first ")


def shape_of(kind):
    return next(shape for shape, kinds in _KINDS.items() if kind in kinds)


VALUES = {
    "number": r"\d{6}",
    "hex": "[0-9a-f]{32}",
    "words": r"\w+ \w+",
    "sentence": r"(\w+ ){7,}\w+",
    "list": r"\w+, \w+, \w+",
    "several": r"\d{6}",
}


@pytest.mark.parametrize("seed", SEEDS)
def test_facts_have_six_shapes_and_different_keys(seed):
    facts = facts_of(seed)
    keys = [{key for _, key in split_answer(fact)} for fact in facts]
    assert all(len(of_fact) == 1 for of_fact in keys)
    shapes = [shape_of(kind_of(fact)) for fact in facts]
    assert collections.Counter(shapes) == {name: 3 if name in ("number", "hex") else 2 for name in VALUES}
    assert len({word for key in set.union(*keys) for word in key.split()}) == 2 * len(keys)  # no two keys share a word
    values = [value for fact in facts for value in fact.values]
    assert len(set(values)) == len(values)
    for shape, fact in zip(shapes, facts, strict=True):
        assert all(re.fullmatch(VALUES[shape], value) for value in fact.values)
        assert len(fact.lines) in ((2, 3) if shape == "several" else (1,))


@pytest.mark.parametrize("seed", SEEDS)
def test_lines_questions_and_answers_belong_together(seed):
    facts = facts_of(seed)
    every_line = [line for fact in facts for line in fact.lines]
    for fact in facts:
        for (kind, key), line, value in zip(split_answer(fact), fact.lines, fact.values, strict=True):
            assert all(line.count(part) == 1 for part in (kind, key, value))
            assert key in fact.question
            assert value not in fact.question
            assert "\n" not in line
            assert (line + fact.question + fact.answer).isascii()
            assert sum(key in other for other in every_line) == len(fact.lines)
            assert sum(value in other for other in every_line) == 1
        assert kind_of(fact) in fact.question
        assert fact.answer.endswith(f" is {fact.values[-1]}.")
        places = [fact.answer.index(f" is {value}") for value in fact.values]
        assert places == sorted(places)


def worded(fact, number):
    """A line with its words taken out."""
    kind, key = split_answer(fact)[number]
    line = fact.lines[number].removeprefix("# ").replace(fact.values[number], "{value}")
    return line.replace(key, "{key}").replace(kind, "{kind}")


def asked(fact):
    """The question with its words taken out."""
    key = split_answer(fact)[0][1]
    question = fact.question.replace(key, "{key}").replace(kind_of(fact), "{kind}")
    return re.sub(r"\b[23]\b", "{count}", question)


def test_every_other_fact_is_worded_plainly():
    for seed in SEEDS:
        facts = facts_of(seed)
        plain = [all(worded(fact, i) in _PLAIN[0] for i in range(len(fact.lines))) for fact in facts]
        assert all(a != b for a, b in itertools.pairwise(plain))
        for fact, is_plain in zip(facts, plain, strict=True):
            questions = _PLAIN[1] if is_plain else _NATURAL[1]
            assert asked(fact) in (_SEVERAL if len(fact.lines) > 1 else questions)
    lines = [line for seed in SEEDS for fact in facts_of(seed) for line in fact.lines]
    assert 0.25 < np.mean([line.startswith("# ") for line in lines]) < 0.42


def test_every_wording_and_every_kind_is_drawn():
    facts = [fact for seed in SEEDS for fact in facts_of(seed)]
    assert {worded(fact, i) for fact in facts for i in range(len(fact.lines))} == {*_PLAIN[0], *_NATURAL[0]}
    assert {asked(fact) for fact in facts} == {*_PLAIN[1], *_NATURAL[1], *_SEVERAL}
    assert {kind_of(fact) for fact in facts} == {kind for kinds in _KINDS.values() for kind in kinds}
