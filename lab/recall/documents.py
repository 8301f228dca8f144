"""Documents: a passage of real text with facts hidden at the boundaries of its lines."""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from tca_jax.errors import require
from tca_jax.lab.recall.corpus import corpus, line_starts
from tca_jax.lab.recall.facts import Fact, draw_keys
from tca_jax.lab.recall.tasks import TASKS, Question, completion, draw_question


@dataclasses.dataclass(frozen=True)
class Document:
    """Real text with facts in it, all ASCII: one byte a character."""

    text: str  # with the line of every fact
    questions: tuple[Question, ...]
    places: tuple[tuple[Fact, int], ...]  # facts in the order of the text, with their byte offsets

    def place(self, fact: Fact) -> int:
        """Byte offset of a fact's line."""
        return next(offset for other, offset in self.places if other is fact)


def build_document(rng: np.random.Generator, num_bytes: int, tasks: Sequence[str], split: str = "held-out") -> Document:
    """Draws a question of each task, a key of `recall.TASKS`, and hides its facts in a passage of `num_bytes`.

    The shipped model was trained on the split "train". ValueError if a task or `split` is unknown, or the facts do not
    fit.
    """
    keys = draw_keys(rng)
    return hide(rng, num_bytes, [draw_question(rng, task, keys) for task in tasks], split)


def draw_documents(seed: tuple[int, ...] | int, count: int, num_bytes: int, task: str) -> list[Document]:
    """Documents with a question of `task` first and one of every other; `num_bytes` count the first question."""
    documents, tasks = [], [task, *(other for other in TASKS if other != task)]
    for number in range(count):
        rng = np.random.default_rng((*np.atleast_1d(seed).tolist(), number))
        keys = draw_keys(rng)
        questions = [draw_question(rng, name, keys) for name in tasks]
        documents.append(hide(rng, num_bytes - len(completion("", questions[0])), questions, "held-out"))
    return documents


def hide(rng: np.random.Generator, num_bytes: int, questions: Sequence[Question], split: str) -> Document:
    """Hides the facts of some questions; see `build_document`."""
    facts = [fact for question in questions for fact in question.facts]
    facts = [facts[i] for i in rng.permutation(len(facts)).tolist()]
    text, fact_bytes = corpus(split), sum(len(fact.line) for fact in facts)
    body_bytes = num_bytes - fact_bytes
    limits = f"must lie in [{fact_bytes}, {fact_bytes + len(text)}]"
    sizes = f"the facts take {fact_bytes} bytes and the {split!r} text has {len(text)}"
    require(0 <= body_bytes <= len(text), f"num_bytes = {num_bytes}: {sizes}: {limits}")
    starts = line_starts(split)
    start = int(starts[rng.integers(bisect_left(starts, len(text) - body_bytes + 1))])
    # Uniform bytes, each moved to the next line boundary.
    offsets = rng.integers(body_bytes + 1, size=len(facts)).tolist()
    last = bisect_right(starts, start + body_bytes) - 1
    moved = [min(bisect_left(starts, start + offset), last) for offset in offsets]
    cuts = [0, *sorted(int(starts[line]) - start for line in moved), body_bytes]
    parts = [text[start + a : start + b].decode("ascii") for a, b in itertools.pairwise(cuts)]
    before = itertools.accumulate((len(fact.line) for fact in facts), initial=0)
    places = tuple((fact, cut + taken) for fact, cut, taken in zip(facts, cuts[1:-1], before, strict=False))
    lines = [*(fact.line for fact in facts), ""]
    return Document("".join(itertools.chain.from_iterable(zip(parts, lines, strict=True))), tuple(questions), places)
