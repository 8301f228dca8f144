"""Facts that calibration hides in a text, and questions about them, in many wordings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

_ADJECTIVES = """
ancient autumn bitter calm clever cosmic crimson curious dusty electric faint frozen gentle golden hidden hollow humble
lively lonely lucky mellow modest northern patient purple rustic scarlet silent sleepy stormy violet wandering wild
"""
_NOUNS = """
anvil badger banjo bottle camel chapel comet cottage cricket feather flute fountain heron kite lantern lemon lighthouse
maple mountain otter panther piano pilot puffin raven river sailor sparrow teapot trumpet turbine whistle willow
"""
_SENTENCES = (
    "bring the {} to the {} before sunrise",
    "meet me behind the {} near the {} at noon",
    "nobody may open the {} until the {} is back",
    "ask the {} why the {} stayed away on Monday",
)

#: Shapes of values, and the kinds of things that have such values.
_KINDS: dict[str, tuple[str, ...]] = {
    "number": ("access code", "locker number", "ticket number", "phone number", "invoice number", "PIN"),
    "hex": ("checksum", "session key", "commit hash", "license key", "fingerprint", "API token"),
    "words": ("password", "code name", "watchword", "nickname", "project name", "call sign"),
    "sentence": ("message", "note", "instruction", "reminder", "motto"),
    "list": ("combination", "list of ticket numbers", "list of seat numbers", "shopping list", "packing list"),
    "several": ("visitor number", "room number", "extension", "part number", "order number"),
}
# In the order in which they are drawn, so that the first ones have many shapes.
_SHAPES = (*_KINDS, *_KINDS, "number", "hex")

# (line of the fact, question). Small models may know no other wordings than these plain ones: every other fact has one.
_PLAIN: tuple[tuple[str, ...], ...] = (
    ("The {kind} for {key} is {value}.", "{key}: {kind} {value}."),
    ("What is the {kind} for {key}?", "Please tell me the {kind} of {key}."),
)
_NATURAL: tuple[tuple[str, ...], ...] = (
    (
        "Remember that the {kind} of {key} is {value}.",
        "For {key}, the {kind} is {value}.",
        "Note: {key} has the {kind} {value}.",
        "As agreed last week, the {kind} for {key} is now {value}.",
        "By the way, {value} is the {kind} of {key}.",
        "They settled on {value} as the {kind} for {key}.",
        "{kind} ({key}): {value}",
        "[{key}] {kind} = {value}",
        "Whoever asks about {key} should hear that its {kind} is {value}.",
        "According to the register, {key}'s {kind} is {value}.",
        "If you ever need the {kind} for {key}, it is {value}.",
        "Someone wrote down the {kind} of {key}: {value}.",
        "In the records of {key}, the {kind} reads {value}.",
    ),
    (
        "Which {kind} does {key} have?",
        "What {kind} was given to {key}?",
        "I need the {kind} of {key}.",
        "Look up the {kind} for {key}.",
        "Find the {kind} of {key} in what you have read.",
        "Can you tell me what the {kind} for {key} is?",
        "Somewhere above, the {kind} of {key} is mentioned. What is it?",
        "According to the text, what is {key}'s {kind}?",
        "What does the text say about the {kind} of {key}?",
        "Quote the {kind} for {key} exactly.",
        "Someone asked for the {kind} of {key}. What should I answer?",
    ),
)
# Of what two or three lines say, far from each other: whoever answers goes on from one to the next.
_SEVERAL = (
    "What are the {count} {kind}s for {key}?",
    "Please tell me all {count} {kind}s of {key}.",
    "List the {count} {kind}s that the text gives for {key}.",
    "Which {count} {kind}s does {key} have?",
)
_ORDINALS = ("first", "second", "third")
_COMMENT_EVERY = 3  # one of so many lines looks like a comment: that is how remarks stand in source code


@dataclasses.dataclass(frozen=True)
class Fact:
    """One fact, in ASCII."""

    values: tuple[str, ...]  # what is asked for: one value, or several
    lines: tuple[str, ...]  # the line that stands in a text for each value, without its line break
    question: str  # what is asked
    answer: str  # A sentence that restates the question, with the values in their order; it ends with the last


def draw_facts(rng: np.random.Generator) -> list[Fact]:
    """One text's facts, all about different keys: 3 numbers, 3 in hexadecimal, 2 of each other shape."""
    adjectives, nouns = rng.permutation(_ADJECTIVES.split()).tolist(), rng.permutation(_NOUNS.split()).tolist()
    pairs = (f"{adjective} {noun}" for adjective, noun in zip(adjectives, nouns, strict=True))
    first_plain = int(rng.integers(2))
    return [_draw_fact(rng, shape, pairs, i % 2 == first_plain) for i, shape in enumerate(_SHAPES)]


def _draw_fact(rng: np.random.Generator, shape: str, pairs: Iterator[str], plain: bool) -> Fact:
    kind, key = str(rng.choice(_KINDS[shape])), next(pairs)
    wordings, questions = _PLAIN if plain else _NATURAL
    kinds = [kind]
    if shape == "several":
        count = int(rng.integers(2, len(_ORDINALS) + 1))
        kinds, questions = [f"{ordinal} {kind}" for ordinal in _ORDINALS[:count]], _SEVERAL
    values = tuple(_draw_value(rng, shape, kind, pairs) for _ in kinds)
    said = [{"kind": one, "key": key, "value": value} for one, value in zip(kinds, values, strict=True)]
    marks = ("# ", *[""] * (_COMMENT_EVERY - 1))
    lines = tuple(f"{marks[rng.integers(len(marks))]}{rng.choice(wordings)}".format(**words) for words in said)
    question = str(rng.choice(questions)).format(kind=kind, key=key, count=len(kinds))
    answer = ", the ".join(_PLAIN[0][0].removeprefix("The ").removesuffix(".").format(**words) for words in said)
    return Fact(values, lines, question, f"The {answer}.")


def _draw_value(rng: np.random.Generator, shape: str, kind: str, pairs: Iterator[str]) -> str:
    """A value that no other fact has and that stands in no text by chance."""
    if shape in ("number", "several"):
        return f"{rng.integers(10**6):06d}"
    if shape == "hex":
        return rng.bytes(16).hex()
    if shape == "words":
        return next(pairs)
    if shape == "sentence":
        return str(rng.choice(_SENTENCES)).format(next(pairs), next(pairs))
    things = [f"{noun}s" for noun in _NOUNS.split()] if kind.endswith("ing list") else list(map(str, range(100, 1000)))
    return ", ".join(rng.choice(things, 3, replace=False).tolist())
