"""Samples: what a task asks, in every protocol, and what counts as an answer; and tasks, which draw and score them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tca_jax.engine.prompts import DocumentTemplate, Encoder, encode_verbatim
from tca_jax.errors import UserError
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.lab.recall.protocols import LATE_PREFIX

#: Of tasks that ask nothing: loss and agreement on a text.
TEXT_PROTOCOL = "text"

_ARGUMENT = "a sample's prompt"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One way of asking.

    Attributes:
        document: What can be read before the question is known.
        question: What follows it in the user's message.
        lead: The answer's first words, behind whatever the chat template puts before an answer.
        chat: Whether it goes into the model's chat template, where there is one.
    """

    document: str
    question: str
    lead: str = ""
    chat: bool = True

    def encode(self, lm: Encoder) -> list[int]:
        """Token ids of all of it."""
        frame = self._frame(lm)
        return frame.document(lm, self.document + self.question + frame.after_question + self.lead, _ARGUMENT)

    def encode_apart(self, lm: Encoder) -> tuple[list[int], list[int]]:
        """Token ids of the document, with what stands before it, and of the rest."""
        frame = self._frame(lm)
        rest = self.question + frame.after_question + self.lead
        return frame.document(lm, self.document, _ARGUMENT), encode_verbatim(lm, rest, _ARGUMENT)

    def _frame(self, lm: Encoder) -> DocumentTemplate:
        return DocumentTemplate.of(lm) if self.chat else DocumentTemplate("", "", "", "", verbatim=False)


def asked_with_lead(document: str, question: str, lead: str) -> Mapping[str, Prompt]:
    """The prompts of all protocols where the answer's first words are given under "prefix" and "late-prefix" alone."""
    given, without = Prompt(document, question, lead), Prompt(document, question)
    return {"prefix": given, "preamble": without, "late": without, LATE_PREFIX: given}


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        prompts: How it is asked under each protocol.
        references: What the answer must state; a scorer says how.
        depths: Where in the document each reference is found, in [0, 1]; empty where that means nothing.
        source: What else its scorer needs.
    """

    prompts: Mapping[str, Prompt]
    references: tuple[str, ...]
    depths: tuple[float, ...] = ()
    source: Any = None


class Mark(NamedTuple):
    """What an answer is worth.

    Attributes:
        score: In [0, 1].
        hits: Whether each reference was stated; as many as the sample has depths.
    """

    score: float
    hits: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class Drawing:
    """What samples are drawn for.

    Attributes:
        lm: The model's tokenizer, chat template and positions.
        sources: Texts and words.
        length: Tokens of a prompt and its answer.
        count: How many samples.
        seed: Other seeds, other samples. A sample depends on seed, task, length and its number alone.
        only_check: Whether `draw` is only asked if there are such samples; it draws none.
    """

    lm: Encoder
    sources: Sources
    length: int
    count: int
    seed: int
    only_check: bool = False


@dataclasses.dataclass(frozen=True)
class Task:
    """A task that asks questions.

    Attributes:
        name: Its name on the command line and in tables.
        suite: The family that it belongs to.
        new_tokens: Most tokens of an answer whose first words are given.
        draw: Draws its samples. ValueError, which names the length, where one does not fit it.
        score: Marks the answer to a sample, given as text, under a protocol.
        needs: Names of the sources that its samples are made from.
        stop: Strings that end an answer.
        groups: From samples and their scores to the scores of subsets, in percent; their mean is the task's score.
    """

    name: str
    suite: str
    new_tokens: int
    draw: Callable[[Drawing], Sequence[Sample]]
    score: Callable[[Sample, str, str], Mark]
    needs: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    groups: Callable[[Sequence[Sample], Sequence[float]], Mapping[str, float]] | None = None


class DoesNotFit(UserError):
    """A task has no sample of a length.

    Attributes:
        least: The least length that it has samples of; None where a longer one would not help.
    """

    def __init__(self, message: str, least: int | None = None) -> None:
        super().__init__(message)
        self.least = least

    @classmethod
    def too_short(cls, task: str, length: int, least: int, model: str) -> DoesNotFit:
        """Of a length below the least one."""
        return cls(f"--lengths {length}: {task} needs at least {least} tokens of {model}", least)
