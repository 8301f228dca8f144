"""Tasks with questions: samples, answers of a model in batches of one shape, and scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from tca_jax.engine.cache import memory_bytes
from tca_jax.engine.contexts import DocumentTemplate, prefill
from tca_jax.engine.generation import generate
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import Encoder, bucket_length, encode_continuation
from tca_jax.errors import UserError
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.lab.recall.tasks import LATE_PREFIX, READ_FIRST, WITH_LEAD
from tca_jax.methods.full import BASELINE
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.numerics import cdiv

#: Room of an answer beyond its first words, where these are not given.
PREAMBLE_TOKENS = 64
_CACHE_SHARE = 0.25  # of the memory, for the caches of a batch; the rest is for weights, activations and copies
_Encoded = list[tuple[list[int], list[int]]]
_ARGUMENT = "a sample's prompt"
Item = TypeVar("Item")


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
        """Token ids of the document with its opening, and of the rest."""
        frame = self._frame(lm)
        document = frame.document(lm, self.document, _ARGUMENT)
        rest = self.question + frame.after_question + self.lead
        return document, encode_continuation(lm, rest, document, _ARGUMENT)

    def _frame(self, lm: Encoder) -> DocumentTemplate:
        return DocumentTemplate.of(lm) if self.chat else DocumentTemplate("", "", "", "", verbatim=False)


def by_protocol(given: Prompt, without: Prompt) -> Mapping[str, Prompt]:
    """Prompts with the answer's first words for "prefix" and "late-prefix", and those without for the others."""
    return {"prefix": given, "preamble": without, "late": without, LATE_PREFIX: given}


@dataclasses.dataclass(frozen=True)
class Sample:
    """A question with its references."""

    prompts: Mapping[str, Prompt]  # by protocol
    references: tuple[str, ...]
    source: Any = None  # further data for the scorer


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Settings of a task's samples."""

    lm: Encoder
    sources: Sources
    length: int  # tokens of a prompt and its answer
    count: int  # samples; each depends on seed, task, length and its number only
    seed: int

    def too_short(self, task: str, least: int) -> DoesNotFit:
        """The error for a length below `least`."""
        return DoesNotFit(f"--lengths {self.length}: {task} needs at least {least} tokens of {self.lm.name}")


class DoesNotFit(UserError):
    """A task has no sample of a length."""


def batches(items: Sequence[Item], rows: int) -> Iterator[tuple[Sequence[Item], list[Item]]]:
    """Items by `rows`, and the same with the last one repeated: no batch has another shape."""
    for first in range(0, len(items), rows):
        chosen = items[first : first + rows]
        yield chosen, [*chosen, *[chosen[-1]] * (rows - len(chosen))]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task with questions."""

    protocols: ClassVar[tuple[str, ...]] = ()  # those of the plan
    name: str
    suite: str
    new_tokens: int  # most tokens of an answer after its first words
    draw: Callable[[Drawing], Sequence[Sample]]  # raises `DoesNotFit`
    score: Callable[[Sample, str, str], float]  # in [0, 1], of a sample, an answer and a protocol
    needs: tuple[str, ...] = ()  # names of sources

    def measure(
        self, lm: LM, samples: Sequence[Sample], protocol: str, batch: int, report: Callable[[int], None]
    ) -> dict[str, Any]:
        """Answers samples greedily, at most `batch` prompts in a call, fewer if memory is short; costs are means."""
        prompts = _encoded(lm, samples, protocol)
        tokens = [len(document) + len(question) for document, question in prompts]
        limit = self._limit(lm, samples, protocol, max(tokens))
        rows = safe_batch(lm, max(tokens), limit, min(batch, len(samples)))
        found, calls = [dict[str, Any]() for _ in samples], list[dict[str, float]]()
        for chosen, filled in batches(sorted(range(len(samples)), key=tokens.__getitem__), rows):  # groups buckets
            texts, counts, costs = _ask(lm, [prompts[i] for i in filled], limit)
            for i, text, count in zip(chosen, texts, counts, strict=False):
                found[i] = {
                    "prediction": text,
                    "references": list(samples[i].references),
                    "score": self.score(samples[i], text, protocol),
                    "prompt_tokens": tokens[i],
                    "new_tokens": count,
                }
            calls.append(costs)
            report(len(chosen))
        means = {name: float(np.mean([costs[name] for costs in calls])) for name in calls[0]}
        score = 100 * float(np.mean([each["score"] for each in found]))
        return {"metric": "%", "score": score, **means, "batch": rows, "samples": found}

    def prompt_tokens(self, lm: LM, samples: Sequence[Sample], protocol: str) -> int:
        """Tokens of the longest prompt, or document, in buckets, which tasks of one length share."""
        return bucket_length(max(len(document) for document, _ in _encoded(lm, samples, protocol)))

    def _limit(self, lm: LM, samples: Sequence[Sample], protocol: str, tokens: int) -> int:
        """Most new tokens of an answer, after prompts of up to `tokens`."""
        most = self.new_tokens
        if protocol not in WITH_LEAD:
            leads = {sample.prompts["prefix"].lead for sample in samples} - {""}
            most += PREAMBLE_TOKENS + max((len(lm.tokenizer(lead)["input_ids"]) for lead in leads), default=0)
        return max(1, min(most, lm.config.max_context - tokens))


def _ask(lm: LM, prompts: _Encoded, limit: int) -> tuple[list[str], list[int], dict[str, float]]:
    """Texts, their numbers of tokens, and costs of one batch."""
    documents, questions = map(list, zip(*prompts, strict=True))
    context = prefill(lm, documents) if any(questions) else None
    out = generate(lm, questions if context else documents, context=context, max_new_tokens=limit)
    stats, rows = out.stats, len(prompts)
    costs = {
        "kv_cache_bytes": stats.kv_cache_bytes / rows,
        "full_kv_cache_bytes": stats.full_kv_cache_bytes / rows,  # under full attention
        "attended_share": stats.attended_share,  # of a prompt's causal pairs, or of the document's
        "kept_share": stats.kept_share,  # of the tokens of prompts and answers
    }
    return out.text, stats.new_tokens, costs


def _encoded(lm: LM, samples: Sequence[Sample], protocol: str) -> _Encoded:
    """Document and question of each prompt; unless it is read first, the document has both."""
    prompts = [sample.prompts[protocol] for sample in samples]
    return [each.encode_apart(lm) if protocol in READ_FIRST else (each.encode(lm), []) for each in prompts]


def safe_batch(lm: LM, prompt_tokens: int, new_tokens: int, most: int) -> int:
    """Prompts, at most `most`, whose full caches fit a part of the memory; a multiple of the devices on "data"."""
    devices, memory = axis_size(lm.mesh, DATA), memory_bytes()
    of_device = cdiv(most, devices)
    if memory is None:
        return devices * of_device
    layout = lm.with_method(BASELINE).cache_layout(1, bucket_length(prompt_tokens), bucket_length(new_tokens))
    each = layout.num_bytes(lm.config.head_dim, lm.cache_dtype)
    return devices * max(1, min(of_device, int(_CACHE_SHARE * memory / each)))
