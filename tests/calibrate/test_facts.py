"""Facts that calibration hides: how they differ, and that a line, a question and an answer belong together."""

import collections
import itertools
import re

import numpy as np

from tca_jax.calibration.facts import _KINDS, _NATURAL, _PLAIN, _SEVERAL, draw_facts

FACTS = [draw_facts(np.random.default_rng([seed, 0, 1])) for seed in range(60)]
VALUES = {
    "number": r"\d{6}",
    "hex": "[0-9a-f]{32}",
    "words": r"\w+ \w+",
    "sentence": r"(\w+ ){7,}\w+",
    "list": r"\w+, \w+, \w+",
    "several": r"\d{6}",
}


def kinds_and_keys(fact):
    """Of each line, as the answer has them."""
    found = re.findall(r"[Tt]he ((?:(?!, the ).)+?) for (\w+ \w+) is (?:(?!, the ).)+", fact.answer)
    assert len(found) == len(fact.lines) == len(fact.values)
    return found


def kind_of(fact):
    """Without its ordinal."""
    return kinds_and_keys(fact)[0][0].removeprefix("first ")


def wordings(fact):
    """Lines and question with their words taken out."""
    parts = zip(kinds_and_keys(fact), fact.lines, fact.values, strict=True)
    lines = [
        line.removeprefix("# ").replace(value, "{value}").replace(key, "{key}").replace(kind, "{kind}")
        for (kind, key), line, value in parts
    ]
    question = fact.question.replace(kinds_and_keys(fact)[0][1], "{key}").replace(kind_of(fact), "{kind}")
    return lines, re.sub(r"\b[23]\b", "{count}", question)


def test_facts_have_six_shapes_and_different_keys():
    for facts in FACTS:
        shapes = [next(shape for shape, kinds in _KINDS.items() if kind_of(fact) in kinds) for fact in facts]
        assert collections.Counter(shapes) == {name: 3 if name in ("number", "hex") else 2 for name in VALUES}
        keys = {key for fact in facts for _, key in kinds_and_keys(fact)}
        assert len(keys) == len(facts)
        assert len({word for key in keys for word in key.split()}) == 2 * len(keys)  # no two keys share a word
        values = [value for fact in facts for value in fact.values]
        assert len(set(values)) == len(values)
        for shape, fact in zip(shapes, facts, strict=True):
            assert all(re.fullmatch(VALUES[shape], value) for value in fact.values)
            assert len(fact.lines) in ((2, 3) if shape == "several" else (1,))


def test_lines_questions_and_answers_belong_together():
    for facts in FACTS:
        every_line = [line for fact in facts for line in fact.lines]
        for fact in facts:
            for (kind, key), line, value in zip(kinds_and_keys(fact), fact.lines, fact.values, strict=True):
                assert all(line.count(part) == 1 for part in (kind, key, value))
                assert key in fact.question
                assert value not in fact.question
                assert (line + fact.question + fact.answer).isascii()
                assert sum(key in other for other in every_line) == len(fact.lines)
                assert sum(value in other for other in every_line) == 1
            assert kind_of(fact) in fact.question
            assert fact.answer.endswith(f" is {fact.values[-1]}.")


def test_every_other_fact_is_worded_plainly():
    for facts in FACTS:
        plain = [all(line in _PLAIN[0] for line in wordings(fact)[0]) for fact in facts]
        assert all(a != b for a, b in itertools.pairwise(plain))
    facts = list(itertools.chain.from_iterable(FACTS))
    assert {line for fact in facts for line in wordings(fact)[0]} == {*_PLAIN[0], *_NATURAL[0]}
    assert {wordings(fact)[1] for fact in facts} == {*_PLAIN[1], *_NATURAL[1], *_SEVERAL}
    assert {kind_of(fact) for fact in facts} == {kind for kinds in _KINDS.values() for kind in kinds}
    assert 0.25 < np.mean([line.startswith("# ") for fact in facts for line in fact.lines]) < 0.42
