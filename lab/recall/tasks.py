"""Tasks: facts that a document hides, questions about them and answers, in several wordings; and protocols."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from tca_jax.errors import require_name
from tca_jax.lab.recall.facts import KINDS, Fact, draw_fact, draw_value, one_of, similar_keys

#: Room for any answer of any task in a byte-level chat: the longest are those of tracking over four hops.
ANSWER_TOKENS = 448
_ORDINALS = ("first", "second", "third", "fourth")
_WORDINGS = (
    "What is the {kind} for {key}?",
    "Please tell me the {kind} of {key}.",
    "Look up the {kind} for {key}.",
    "Which {kind} does {key} have?",
    "I need the {kind} of {key}.",
    "Find the {kind} that {key} was given.",
)
_WORDINGS_OF_SEVERAL = (
    "What are {items}?",
    "Please tell me {items}.",
    "Look up {items}.",
    "List {items}.",
    "I need {items}.",
)


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about a document."""

    task: str  # a key of `TASKS`
    facts: tuple[Fact, ...]  # that the document hides, distractors included
    text: str
    lead: str  # the answer's beginning, up to its first value
    answer: str  # the rest of the answer, without the full stop

    @property
    def sentence(self) -> str:
        """The complete answer, with its full stop."""
        return f"{self.lead}{self.answer}."


def draw_question(rng: np.random.Generator, task: str, keys: Iterator[str]) -> Question:
    """A question of a task of `TASKS` with its facts; `keys` gives keys without facts in the document."""
    require_name(f"task = {task!r}", task, TASKS)
    return TASKS[task](rng, task, keys)


def _single(form: str, distractors: int = 0) -> Callable[..., Question]:
    """A fact and a question for its value, among facts of one kind about keys that share a word with it."""

    def draw(rng: np.random.Generator, task: str, keys: Iterator[str]) -> Question:
        kind, key = one_of(rng, KINDS[form]), next(keys)
        fact = draw_fact(rng, kind, key, draw_value(rng, form))
        others = [draw_fact(rng, kind, k, draw_value(rng, form)) for k in similar_keys(rng, key, distractors)]
        text = one_of(rng, _WORDINGS).format(kind=kind, key=key)
        return Question(task, (fact, *others), text, *_answer([fact]))

    return draw


def _several_values(rng: np.random.Generator, task: str, keys: Iterator[str]) -> Question:
    """Several values of one key."""
    kind, key = one_of(rng, KINDS["digits"]), next(keys)
    count = int(rng.integers(2, len(_ORDINALS) + 1))
    facts = [draw_fact(rng, f"{ordinal} {kind}", key, draw_value(rng, "digits")) for ordinal in _ORDINALS[:count]]
    text = one_of(rng, _WORDINGS_OF_SEVERAL).format(items=f"all {count} {kind}s for {key}")
    return Question(task, tuple(facts), text, *_answer(facts))


def _several_queries(rng: np.random.Generator, task: str, keys: Iterator[str]) -> Question:
    """Several keys in one question."""
    kind, count = one_of(rng, KINDS["digits"]), int(rng.integers(2, 5))
    facts = [draw_fact(rng, kind, next(keys), draw_value(rng, "digits")) for _ in range(count)]
    asked = [fact.key for fact in facts]
    items = f"the {kind}s for {', '.join(asked[:-1])} and {asked[-1]}"
    return Question(task, tuple(facts), one_of(rng, _WORDINGS_OF_SEVERAL).format(items=items), *_answer(facts))


def _tracking(rng: np.random.Generator, task: str, keys: Iterator[str]) -> Question:
    """A chain of 2 to 4 hops to a value, and a shorter one of the same kind that only distracts."""
    kind = one_of(rng, KINDS["digits"])
    chain, other = _chain(rng, kind, keys, int(rng.integers(2, 5))), _chain(rng, kind, keys, 1)
    text = one_of(rng, _WORDINGS).format(kind=kind, key=chain[0].key)[:-1]
    end = "?" if text.startswith(("What", "Which")) else "."
    return Question(task, (*chain, *other), f"{text}, step by step{end}", *_answer(chain))


def _chain(rng: np.random.Generator, kind: str, keys: Iterator[str], hops: int) -> list[Fact]:
    """Facts each of which refers to the next; the last one has the value."""
    names = [next(keys) for _ in range(hops + 1)]
    values = [f"that of {name}" for name in names[1:]] + [draw_value(rng, "digits")]
    return [draw_fact(rng, kind, name, value) for name, value in zip(names, values, strict=True)]


#: What can be asked, by name.
TASKS: Mapping[str, Callable[..., Question]] = {
    "digits": _single("digits"),
    "words": _single("words"),
    "hex": _single("hex"),
    "keys": _single("digits", distractors=7),
    "values": _several_values,
    "queries": _several_queries,
    "tracking": _tracking,
    "copy": _single("passage"),
}


def _answer(facts: list[Fact]) -> tuple[str, str]:
    """The answer that states some facts in their order: up to the first value, and from there on."""
    parts = [(f"{'the' if i else 'The'} {fact.kind} for {fact.key} is ", fact.value) for i, fact in enumerate(facts)]
    rest = [parts[0][1], *(f"{lead}{value}" for lead, value in parts[1:])]
    return parts[0][0], ", ".join(rest)


# Protocols. "prefix": the prompt ends with the question and the answer's first words (RULER's way). "preamble": a
# chat; the model answers with words of its own first. "late": the same chat, but the question comes to a context that
# was read without it.

PROTOCOLS = ("prefix", "preamble", "late")
#: Of evaluations alone: as "late", but the answer's first words come with the question, as kvpress asks.
LATE_PREFIX = "late-prefix"
EVALUATION_PROTOCOLS = (*PROTOCOLS, LATE_PREFIX)
#: Where the document is read without the question, and where the answer's first words are given.
READ_FIRST, WITH_LEAD = ("late", LATE_PREFIX), ("prefix", LATE_PREFIX)

#: With what an answer in a chat begins.
PREAMBLES = (
    "I have read the whole text to find this.",
    "Let me look for that in the text above.",
    "This is what the text says about it.",
    "Sure, I went through the text for you.",
    "There is a line about this in the text.",
    "I found one place that speaks of it.",
)


def completion(text: str, question: Question) -> str:
    """The prompt of "prefix": a plain text that the model continues."""
    return f"{text}{asked(question)}{question.lead}"


def asked(question: Question) -> str:
    """The question, between a text and an answer without a chat."""
    return f"\n\nQuestion: {question.text}\nAnswer: "


def is_correct(question: Question, text: str, protocol: str) -> bool:
    """Whether a model's continuation is exactly the answer, in a chat after a preamble."""
    require_name(f"protocol = {protocol!r}", protocol, PROTOCOLS)
    if protocol == "prefix":
        return text == f"{question.answer}."
    before = text.removesuffix(question.sentence)
    # A first attempt that was wrong is no preamble.
    return before != text and question.lead not in before and len(before) <= 2 * max(map(len, PREAMBLES))
