"""Tasks of the zoo beside recall-tiny's, and the tasks of each member; NumPy alone.

"alias" and "alias-2" take one and two hops that the answer does not write: a fact has a value, a later line gives
another key the value of the first one, and the question is for that other key. The "memo-" tasks have other wordings,
kinds and values than recall-tiny's, and no long copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from tca_jax.lab.recall import TASKS, Question
from tca_jax.lab.recall.documents import Document
from tca_jax.lab.recall.documents import hide as hide_anywhere
from tca_jax.lab.recall.facts import KINDS, NOUNS, Fact, draw_fact, draw_keys, similar_keys
from tca_jax.lab.recall.tasks import completion

Draw = Callable[[np.random.Generator, str, Iterator[str]], Question]  # as the values of `recall.TASKS`

ALIAS_DIGITS = 4
_ALIAS_WORDINGS = (
    "The {kind} for {key} is that of {other}, which is {rest}.",
    "Remember that the {kind} of {key} is that of {other}, which is {rest}.",
    "For {key} the {kind} is that of {other}, which is {rest}.",
)
_ALIAS_QUESTIONS = (
    "What is the {kind} for {key}?",
    "Please tell me the {kind} of {key}.",
    "Which {kind} does {key} have?",
)

_MEMO_KINDS: dict[str, tuple[str, ...]] = {
    "number": ("serial", "invoice", "docket", "batch"),
    "date": ("expiry date", "release date", "audit date"),
    "name": ("owner", "carrier", "sponsor"),
}
_MEMO_WORDINGS = (
    "// {key} -> {kind}: {value}",
    "* In the register, {key} stands with the {kind} {value}.",
    "[{key}] {kind} = {value}",
    "-- {key} was issued the {kind} {value} this year.",
    "/* {kind} assigned to {key}: {value} */",
)
_MEMO_QUESTIONS = (
    "{key}: which {kind}?",
    "The register lists {key} under what {kind}?",
    "State the {kind} issued to {key}.",
    "Give me {key}'s {kind}.",
)


@dataclasses.dataclass(frozen=True)
class Alias(Fact):
    """A line that gives a key the value of another one; its first words do not reveal whether the value follows."""

    of: Fact = dataclasses.field(kw_only=True)  # precedes this line in a document
    spelled: bool = False  # the line ends with the value; only if no question asks for it

    @property
    def line(self) -> str:
        """The comment line in a document, with its line break."""
        rest = self.value if self.spelled else "given above"
        return f"# {_ALIAS_WORDINGS[self.wording].format(kind=self.kind, key=self.key, other=self.of.key, rest=rest)}\n"


@dataclasses.dataclass(frozen=True)
class Memo(Fact):
    """A fact in the wordings of the "memo-" tasks."""

    @property
    def line(self) -> str:
        return f"{_MEMO_WORDINGS[self.wording].format(kind=self.kind, key=self.key, value=self.value)}\n"


def _alias(hops: int) -> Draw:
    """A fact with `hops` aliases, and another fact of the kind, half of the time with an alias."""

    def draw(rng: np.random.Generator, task: str, keys: Iterator[str]) -> Question:
        kind = _one_of(rng, KINDS["digits"])
        chain = _alias_chain(rng, kind, keys, hops, spelled=False)
        others = _alias_chain(rng, kind, keys, int(rng.integers(2)), spelled=bool(rng.integers(2)))
        key, value = chain[-1].key, chain[-1].value
        text = _one_of(rng, _ALIAS_QUESTIONS).format(kind=kind, key=key)
        return Question(task, (*chain, *others), text, f"The {kind} for {key} is ", value)

    return draw


def _alias_chain(rng: np.random.Generator, kind: str, keys: Iterator[str], hops: int, *, spelled: bool) -> list[Fact]:
    """A fact and `hops` aliases, each of the preceding one."""
    chain = [draw_fact(rng, kind, next(keys), _digits(rng, ALIAS_DIGITS))]
    for _ in range(hops):
        wording = int(rng.integers(len(_ALIAS_WORDINGS)))
        chain.append(Alias(kind, next(keys), chain[0].value, wording, spelled, of=chain[-1]))
    return chain


def _memo(form: str, distractors: int = 0) -> Draw:
    """A memo and a question for its value, among memos of the kind about similar keys."""

    def draw(rng: np.random.Generator, task: str, keys: Iterator[str]) -> Question:
        kind, key = _one_of(rng, _MEMO_KINDS[form]), next(keys)
        memo = _draw_memo(rng, form, kind, key)
        others = [_draw_memo(rng, form, kind, other) for other in similar_keys(rng, key, distractors)]
        text = _one_of(rng, _MEMO_QUESTIONS).format(kind=kind, key=key)
        return Question(task, (memo, *others), text, *_memo_answer([memo]))

    return draw


def _memo_pair(rng: np.random.Generator, task: str, keys: Iterator[str]) -> Question:
    """Two memos of different kinds about one key."""
    key = next(keys)
    forms = [list(_MEMO_KINDS)[i] for i in rng.permutation(len(_MEMO_KINDS))[:2].tolist()]
    memos = [_draw_memo(rng, form, _one_of(rng, _MEMO_KINDS[form]), key) for form in forms]
    kinds = " and the ".join(memo.kind for memo in memos)
    return Question(task, tuple(memos), f"State the {kinds} issued to {key}.", *_memo_answer(memos))


def _draw_memo(rng: np.random.Generator, form: str, kind: str, key: str) -> Memo:
    """A memo in a random wording, with a value of a form of `_MEMO_KINDS`."""
    value = {
        "number": lambda: _digits(rng, 5),
        "date": lambda: f"{rng.integers(1900, 2100)}-{rng.integers(1, 13):02d}-{rng.integers(1, 29):02d}",
        "name": lambda: f"{_one_of(rng, NOUNS)}-{_one_of(rng, NOUNS)}",
    }[form]()
    return Memo(kind, key, value, int(rng.integers(len(_MEMO_WORDINGS))))


def _memo_answer(memos: Sequence[Memo]) -> tuple[str, str]:
    """The answer that states memos about one key: up to the first value, and the rest."""
    values = " and the ".join(memo.value if i == 0 else f"{memo.kind} {memo.value}" for i, memo in enumerate(memos))
    return f"The register gives {memos[0].key} the {memos[0].kind} ", values


def _digits(rng: np.random.Generator, count: int) -> str:
    return f"{rng.integers(10**count):0{count}d}"


def _one_of(rng: np.random.Generator, choices: tuple[str, ...]) -> str:
    return choices[int(rng.integers(len(choices)))]


#: All tasks by name.
DRAWS: Mapping[str, Draw] = MappingProxyType(
    {
        **TASKS,
        "alias": _alias(1),
        "alias-2": _alias(2),
        "memo-number": _memo("number"),
        "memo-date": _memo("date"),
        "memo-name": _memo("name"),
        "memo-keys": _memo("number", distractors=5),
        "memo-pair": _memo_pair,
    }
)

#: Tasks of each member; a repeated one is drawn more often.
MIXTURES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("recall-tiny", "recall-4x", "grouped", "deep-qknorm"), tuple(TASKS)),
        "biases-nocopy": ("memo-number", "memo-date", "memo-name", "memo-keys", "memo-pair"),
        "hops": ("digits", "words", "keys", *["alias"] * 5, "alias-2"),
        "large-32k": tuple(TASKS),
    }
)


def draw_documents(
    seed: tuple[int, ...] | int, count: int, num_bytes: int, member: str, task: str, split: str = "held-out"
) -> list[Document]:
    """As `recall.documents.draw_documents`, of a member's tasks: a question of `task`, then one of each other."""
    documents = []
    for number in range(count):
        rng = np.random.default_rng((*np.atleast_1d(seed).tolist(), number))
        tasks = [task, *(other for other in dict.fromkeys(MIXTURES[member]) if other != task)]
        keys = draw_keys(rng)
        questions = [DRAWS[name](rng, name, keys) for name in tasks]
        documents.append(hide(rng, num_bytes - len(completion("", questions[0])), questions, split))
    return documents


def hide(rng: np.random.Generator, num_bytes: int, questions: Sequence[Question], split: str) -> Document:
    """As `recall.documents.hide`, with every alias after its reference: the lines of a chain change places."""
    document = hide_anywhere(rng, num_bytes, questions, split)
    facts = [fact for fact, _ in document.places]
    aliases = [fact for fact in facts if isinstance(fact, Alias)]
    if not aliases:
        return document
    where = {id(fact): place for place, fact in enumerate(facts)}
    inner = {id(alias.of) for alias in aliases}
    for last in (alias for alias in aliases if id(alias) not in inner):
        chain: list[Fact] = [last]
        while isinstance(chain[-1], Alias):
            chain.append(chain[-1].of)
        for place, fact in zip(sorted(where[id(fact)] for fact in chain), reversed(chain), strict=True):
            facts[place] = fact
    text, places, end = "", list[tuple[Fact, int]](), 0
    for (old, offset), fact in zip(document.places, facts, strict=True):
        text += document.text[end:offset]
        places.append((fact, len(text)))
        text, end = text + fact.line, offset + len(old.line)
    return Document(text + document.text[end:], document.questions, tuple(places))
