"""Tasks and samples: prompts by protocol, and scores of answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tca_jax.engine.prompts import DocumentTemplate, Encoder, encode_continuation
from tca_jax.errors import UserError
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.lab.recall.protocols import LATE_PREFIX

#: Protocol of the task without questions: loss of a text.
TEXT_PROTOCOL = "text"
_ARGUMENT = "a sample's prompt"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A question about a document."""

    document: str  # can be read before the question is known
    question: str  # follows the document in the user's message
    lead: str = ""  # the answer's first words
    chat: bool = True  # use the model's chat template, if any

    def encode(self, lm: Encoder) -> list[int]:
        """Token ids of the prompt."""
        frame = self._frame(lm)
        return frame.document(lm, self.document + self.question + frame.after_question + self.lead, _ARGUMENT)

    def encode_apart(self, lm: Encoder) -> tuple[list[int], list[int]]:
        """Token ids of the document, with what precedes it, and of the rest."""
        frame = self._frame(lm)
        rest = self.question + frame.after_question + self.lead
        document = frame.document(lm, self.document, _ARGUMENT)
        return document, encode_continuation(lm, rest, document, _ARGUMENT)

    def _frame(self, lm: Encoder) -> DocumentTemplate:
        return DocumentTemplate.of(lm) if self.chat else DocumentTemplate("", "", "", "", verbatim=False)


def asked_with_lead(document: str, question: str, lead: str) -> Mapping[str, Prompt]:
    """Prompts by protocol; "prefix" and "late-prefix" include the answer's first words."""
    given, without = Prompt(document, question, lead), Prompt(document, question)
    return {"prefix": given, "preamble": without, "late": without, LATE_PREFIX: given}


@dataclasses.dataclass(frozen=True)
class Sample:
    """A question with its references."""

    prompts: Mapping[str, Prompt]  # by protocol
    references: tuple[str, ...]
    depths: tuple[float, ...] = ()  # position of each reference in the document, in [0, 1]; empty if unknown
    source: Any = None  # further data for the scorer


class Mark(NamedTuple):
    """Score of an answer."""

    score: float  # in [0, 1]
    hits: tuple[bool, ...] = ()  # for each reference with a depth, whether the answer states it


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Settings of a task's samples."""

    lm: Encoder
    sources: Sources
    length: int  # tokens of a prompt and its answer
    count: int  # samples; each depends on seed, task, length and its number only
    seed: int
    only_check: bool = False  # check that samples fit, draw none


@dataclasses.dataclass(frozen=True)
class Task:
    """A task with questions."""

    name: str
    suite: str
    new_tokens: int  # most tokens of an answer after its first words
    draw: Callable[[Drawing], Sequence[Sample]]  # raises `DoesNotFit`
    score: Callable[[Sample, str, str], Mark]  # of a sample, an answer and a protocol
    needs: tuple[str, ...] = ()  # names of sources
    stop: tuple[str, ...] = ()  # strings that end an answer
    # Scores of subsets in percent, from samples and their scores; their mean is the task's score.
    groups: Callable[[Sequence[Sample], Sequence[float]], Mapping[str, float]] | None = None


class DoesNotFit(UserError):
    """A task has no sample of a length; `least` is the shortest length that it has samples of, None if unknown."""

    def __init__(self, message: str, least: int | None = None) -> None:
        super().__init__(message)
        self.least = least

    @classmethod
    def too_short(cls, task: str, length: int, least: int, model: str) -> DoesNotFit:
        """The error for a length below `least`."""
        return cls(f"--lengths {length}: {task} needs at least {least} tokens of {model}", least)
