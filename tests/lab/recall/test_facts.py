"""Facts: keys that do not repeat, values of their form, lines in every wording."""

import itertools
import re

import numpy as np
import pytest

from tca_jax.lab.recall import facts
from tca_jax.lab.recall.facts import ADJECTIVES, KINDS, NOUNS, Fact, draw_fact, draw_keys, draw_value, similar_keys


def test_word_lists_hold_no_word_twice_and_words_of_one_length():
    for words, length in ((ADJECTIVES, 5), (NOUNS, 6)):
        assert len(set(words)) == len(words) > 50
        assert {len(word) for word in words} == {length}


def test_no_kind_stands_under_two_forms():
    kinds = list(itertools.chain.from_iterable(KINDS.values()))
    assert len(set(kinds)) == len(kinds) == 16


def test_all_keys_are_distinct():
    keys = list(draw_keys(np.random.default_rng(0)))
    assert len(set(keys)) == len(keys) == len(ADJECTIVES) * len(NOUNS)


def test_the_first_keys_share_no_word():
    """So that a question's distractors, which share a word with its key, are no other question's keys."""
    keys = list(itertools.islice(draw_keys(np.random.default_rng(1)), len(ADJECTIVES)))
    adjectives, nouns = zip(*map(str.split, keys), strict=True)
    assert len(set(adjectives)) == len(set(nouns)) == len(ADJECTIVES)


@pytest.mark.parametrize("count", [0, 7, len(ADJECTIVES) + len(NOUNS) - 2])
def test_similar_keys_share_one_word_and_are_distinct(count):
    others = similar_keys(np.random.default_rng(2), "amber falcon", count)
    assert len(set(others)) == len(others) == count
    assert all(("amber" in key.split()) != ("falcon" in key.split()) for key in others)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ("digits", r"[0-9]{6}"),
        ("hex", r"[0-9a-f]{32}"),
        ("words", rf"({'|'.join(ADJECTIVES)}) ({'|'.join(NOUNS)})"),
        ("passage", r"[a-z ]{199}[a-z]"),
    ],
)
def test_values_have_their_form_and_differ(form, pattern):
    rng = np.random.default_rng(3)
    values = [draw_value(rng, form) for _ in range(200)]
    assert all(re.fullmatch(pattern, value) for value in values)
    assert len(set(values)) > 190


def test_codes_may_begin_with_any_digit():
    rng = np.random.default_rng(4)
    assert {draw_value(rng, "digits")[0] for _ in range(200)} == set("0123456789")  # leading zeros are not lost


def test_passages_are_words_of_the_lists():
    words = draw_value(np.random.default_rng(5), "passage").split(" ")
    assert set(words[:-1]) <= {*ADJECTIVES, *NOUNS}


def test_every_wording_is_one_comment_line_that_names_kind_key_and_value():
    rng = np.random.default_rng(6)
    drawn = [draw_fact(rng, "access code", "amber falcon", "482913") for _ in range(200)]
    lines = {fact.line for fact in drawn}
    assert len(lines) == len(facts._WORDINGS) == 7
    for line in lines:
        assert re.fullmatch(r"# [^\n]+\.\n", line)
        assert all(line.count(part) == 1 for part in ("access code", "amber falcon", "482913"))
    assert Fact("access code", "amber falcon", "482913").line == "# The access code for amber falcon is 482913.\n"
