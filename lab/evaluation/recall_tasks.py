"""Recall tasks of the shipped model: exact answers about facts hidden in real text."""

from __future__ import annotations

import functools

from tca_jax.lab.evaluation.ruler import largest
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing, Prompt, Sample, Task, by_protocol
from tca_jax.lab.recall import TASKS as RECALL_TASKS
from tca_jax.lab.recall import Document, is_correct
from tca_jax.lab.recall.documents import draw_documents
from tca_jax.lab.recall.tasks import ANSWER_TOKENS, WITH_LEAD, asked

_LEAST_BYTES = 3500  # that the facts of all tasks may take
_SEED = 2  # the questions of the shipped model's card


def _draw(drawing: Drawing, task: str) -> list[Sample]:
    """Documents that with their question have the length; answers come on top."""
    length, most = drawing.length, drawing.lm.config.max_context
    special = len(Prompt("a", "", chat=False).encode(drawing.lm)) - 1

    def samples(num_bytes: int, count: int) -> list[Sample]:
        return [sample_of(document) for document in draw_documents((drawing.seed, _SEED), count, num_bytes, task)]

    def tokens(num_bytes: int) -> int:
        return len(samples(num_bytes, 1)[0].prompts["prefix"].encode(drawing.lm)) - special

    if length + ANSWER_TOKENS > most:
        raise DoesNotFit(
            f"--lengths {length}: recall_{task} needs at most {most - ANSWER_TOKENS}, for answers take up to "
            f"{ANSWER_TOKENS} tokens more, and {drawing.lm.name} has {most} positions"
        )
    num_bytes = largest(lambda size: tokens(size) <= length, _LEAST_BYTES)
    if num_bytes is None:
        raise drawing.too_short(f"recall_{task}", tokens(_LEAST_BYTES))
    return samples(num_bytes, drawing.count)


def sample_of(document: Document) -> Sample:
    """A document's first question."""
    question = document.questions[0]
    prefix = Prompt(document.text, asked(question) + question.lead, chat=False)
    prompts = by_protocol(prefix, Prompt(document.text, f"\n\n{question.text}"))
    return Sample(prompts, (question.answer,), source=question)


def _score(sample: Sample, text: str, protocol: str) -> float:
    return float(is_correct(sample.source, text, "prefix" if protocol in WITH_LEAD else protocol))


TASKS = tuple(
    Task(f"recall_{name}", "recall", ANSWER_TOKENS, functools.partial(_draw, task=name), _score)
    for name in RECALL_TASKS
)
