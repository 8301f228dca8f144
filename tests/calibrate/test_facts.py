"""Facts that calibration hides: how they differ, and that a line, a question and an answer belong together."""

import collections
import itertools
import re

import numpy as np
import pytest

from tca_jax.calibration.facts import _KINDS, _NATURAL, _PLAIN, draw_facts

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


def wordings(fact):
    """Lines with their words taken out."""
    for (kind, key), line, value in zip(kinds_and_keys(fact), fact.lines, fact.values, strict=True):
        yield line.removeprefix("# ").replace(value, "{value}").replace(key, "{key}").replace(kind, "{kind}")


@pytest.mark.parametrize("seed", range(20))
def test_facts_differ_and_belong_together(seed):
    facts = draw_facts(np.random.default_rng([seed, 0, 1]))
    shapes = []
    for fact in facts:
        kind = kinds_and_keys(fact)[0][0].removeprefix("first ")
        shapes.append(shape := next(shape for shape, kinds in _KINDS.items() if kind in kinds))
        assert len(fact.lines) in ((2, 3) if shape == "several" else (1,))
        assert kind in fact.question
        assert fact.answer.endswith(f" is {fact.values[-1]}.")
        for (named, key), line, value in zip(kinds_and_keys(fact), fact.lines, fact.values, strict=True):
            assert re.fullmatch(VALUES[shape], value)
            assert all(line.count(part) == 1 for part in (named, key, value))
            assert key in fact.question
            assert value not in fact.question
            assert (line + fact.question + fact.answer).isascii()
    assert collections.Counter(shapes) == {name: 3 if name in ("number", "hex") else 2 for name in VALUES}
    keys = {key for fact in facts for _, key in kinds_and_keys(fact)}
    assert len({word for key in keys for word in key.split()}) == 2 * len(keys) == 2 * len(facts)  # no word twice
    text = "\n".join(line for fact in facts for line in fact.lines)
    assert all(text.count(value) == 1 for fact in facts for value in fact.values)
    plain = [all(line in _PLAIN[0] for line in wordings(fact)) for fact in facts]
    assert all(a != b for a, b in itertools.pairwise(plain))  # every other one
    assert {line for fact in facts for line in wordings(fact)} <= {*_PLAIN[0], *_NATURAL[0]}
