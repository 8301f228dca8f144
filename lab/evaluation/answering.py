"""Asking a model the samples of a task under a protocol, in batches of one shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tca_jax.engine.cache import memory_bytes
from tca_jax.engine.contexts import Context, prefill
from tca_jax.engine.generation import Output, output_of
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import bucket_length
from tca_jax.engine.request import Request
from tca_jax.engine.sampling import Sampling
from tca_jax.lab.equal_bytes import CallSizes
from tca_jax.lab.evaluation.samples import Sample, Task
from tca_jax.lab.recall.protocols import READ_FIRST, WITH_LEAD
from tca_jax.methods.full import BASELINE
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.numerics import cdiv

#: Without its first words given, an answer has room for as many tokens as these take, and for this many more.
PREAMBLE_TOKENS = 64
# Room in the caches for answers, at least: answers of all tasks run the programs of a few sizes, and end earlier.
_LEAST_ROOM = 128
_LEAST_ROOM_BEHIND_A_QUESTION = 256
_STRIDE = 16  # tokens between looks for stop strings
_CACHE_SHARE = 0.25  # of the memory, for the caches of a batch: weights, activations and the prefill's copies need more


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a model said, and what that cost.

    Attributes:
        texts: One answer a sample.
        prompt_tokens: Tokens of each prompt, its document included.
        new_tokens: Tokens of each answer.
        kv_cache_bytes: Bytes of the caches, mean a prompt.
        full_kv_cache_bytes: The same under full attention.
        attended_share: Share of a prompt's causal pairs (query, key) that its queries attended to, mean; of the
            document's where that was read before.
        kept_share: Share of a prompt's own tokens that the caches hold once it is read, mean.
        prefill_seconds: From the document to the first new token, mean a prompt; prompts of a batch share its time.
        question_seconds: From the question to the first new token, mean a prompt: less than that where the document
            was read before.
        seconds_per_token: Of a further step of a batch, mean.
        batch: Prompts in a batch.
        compile_seconds: In no other figure.
    """

    texts: list[str]
    prompt_tokens: list[int]
    new_tokens: list[int]
    kv_cache_bytes: float
    full_kv_cache_bytes: float
    attended_share: float
    kept_share: float
    prefill_seconds: float
    question_seconds: float
    seconds_per_token: float
    batch: int
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class _Call:
    """One batch's answers and cost; see `Answers`."""

    texts: list[str]
    new_tokens: list[int]
    kv_cache_bytes: int
    full_kv_cache_bytes: int
    attended_share: float
    kept_share: float
    read_seconds: float
    question_seconds: float
    seconds_per_token: float
    compile_seconds: float


def answer(
    lm: LM,
    task: Task,
    samples: Sequence[Sample],
    protocol: str,
    *,
    batch: int,
    report: Callable[[int], None] = lambda asked: None,
) -> Answers:
    """Asks all samples, greedily.

    Args:
        lm: The model, under any method.
        task: Whose samples they are.
        samples: What to ask.
        protocol: One of `EVALUATION_PROTOCOLS`.
        batch: Most prompts in a call; fewer where the memory is short. Over a mesh all devices on "data" have as many.
        report: Called with the number of prompts after each call.

    Raises:
        ValueError: as `generate`.
    """
    prompts = _encoded(lm, samples, protocol)
    tokens = [len(document) + len(question) for document, question in prompts]
    limit, room = _limits(lm, task, samples, protocol, max(tokens))
    rows = safe_batch(lm, max(tokens), room, min(batch, len(samples)))
    order = sorted(range(len(samples)), key=tokens.__getitem__)  # so that those of one bucket come together
    texts, new_tokens, calls = [""] * len(samples), [0] * len(samples), []
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        filled = chosen + [chosen[-1]] * (rows - len(chosen))  # a batch of the same shape: nothing is compiled for it
        call = _ask(lm, task, [prompts[i] for i in filled], limit, room)
        for place, text, count in zip(chosen, call.texts, call.new_tokens, strict=False):
            texts[place], new_tokens[place] = text, count
        calls.append(call)
        report(len(chosen))
    return Answers(
        texts=texts,
        prompt_tokens=tokens,
        new_tokens=new_tokens,
        kv_cache_bytes=_mean(call.kv_cache_bytes / rows for call in calls),
        full_kv_cache_bytes=_mean(call.full_kv_cache_bytes / rows for call in calls),
        attended_share=_mean(call.attended_share for call in calls),
        kept_share=_mean(call.kept_share for call in calls),
        prefill_seconds=_mean((call.read_seconds + call.question_seconds) / rows for call in calls),
        question_seconds=_mean(call.question_seconds / rows for call in calls),
        seconds_per_token=_mean(call.seconds_per_token for call in calls),
        batch=rows,
        compile_seconds=sum(call.compile_seconds for call in calls),
    )


def call_sizes(lm: LM, task: Task, samples: Sequence[Sample], protocol: str) -> CallSizes:
    """Sizes of the calls of `answer`, whatever the method: buckets, so that tasks of one length share them."""
    prompts = [(len(document), len(question)) for document, question in _encoded(lm, samples, protocol)]
    _, room = _limits(lm, task, samples, protocol, max(map(sum, prompts)))
    document, question = (max(part) for part in zip(*prompts, strict=True))
    return CallSizes(bucket_length(document), room, bucket_length(question) if question else None)


def _encoded(lm: LM, samples: Sequence[Sample], protocol: str) -> list[tuple[list[int], list[int]]]:
    """Document, or all, and question of each prompt."""
    return [
        prompt.encode_apart(lm) if protocol in READ_FIRST else (prompt.encode(lm), [])
        for prompt in (sample.prompts[protocol] for sample in samples)
    ]


def _limits(lm: LM, task: Task, samples: Sequence[Sample], protocol: str, tokens: int) -> tuple[int, int]:
    """Most new tokens of an answer, and those that the caches have room for, behind prompts of up to `tokens`."""
    positions = lm.config.max_context - tokens
    limit = max(1, min(most_new_tokens(lm, task, samples, protocol), positions))
    return limit, answer_room(protocol, limit, positions)


def most_new_tokens(lm: LM, task: Task, samples: Sequence[Sample], protocol: str) -> int:
    """Most new tokens of an answer: the task's own, and without its first words given as many as these and more."""
    if protocol in WITH_LEAD:
        return task.new_tokens
    leads = {lead for sample in samples if (lead := sample.prompts["prefix"].lead)}
    return task.new_tokens + PREAMBLE_TOKENS + max((len(lm.tokenizer(lead)["input_ids"]) for lead in leads), default=0)


def answer_room(protocol: str, limit: int, positions: int) -> int:
    """Tokens that caches have room for behind a prompt: a power of two for answers of `limit`, within the positions."""
    least = _LEAST_ROOM if protocol in WITH_LEAD else _LEAST_ROOM_BEHIND_A_QUESTION
    return max(1, min(max(least, 1 << (limit - 1).bit_length()), positions))


def safe_batch(lm: LM, prompt_tokens: int, new_tokens: int, most: int) -> int:
    """Prompts, at most `most`, whose full caches take no more than a part of the device's memory.

    Over a mesh the least multiple of the devices on "data" that is not below: of such are its batches.
    """
    devices, memory = axis_size(lm.mesh, DATA), memory_bytes()
    of_device = cdiv(most, devices)
    if memory is None:
        return devices * of_device
    layout = lm.with_method(BASELINE).cache_layout(1, bucket_length(prompt_tokens), bucket_length(new_tokens))
    each = layout.num_bytes(lm.config.head_dim, lm.cache_dtype)
    return devices * max(1, min(of_device, int(_CACHE_SHARE * memory / each)))


def _ask(lm: LM, task: Task, prompts: Sequence[tuple[list[int], list[int]]], limit: int, room: int) -> _Call:
    documents, questions = map(list, zip(*prompts, strict=True))
    if not any(questions):
        (out, kept), read_seconds, compiling = _generate(lm, task, documents, None, limit, room), 0.0, 0.0
    else:
        context = prefill(lm, documents)
        read_seconds, compiling = context.prefill_seconds, context.compile_seconds
        out, kept = _generate(lm, task, questions, context, limit, room)
    return _Call(
        texts=out.text,
        new_tokens=out.stats.new_tokens,
        kv_cache_bytes=out.stats.kv_cache_bytes,
        full_kv_cache_bytes=out.stats.full_kv_cache_bytes,
        attended_share=out.stats.attended_share,
        kept_share=kept,
        read_seconds=read_seconds,
        question_seconds=out.stats.prefill_seconds,
        seconds_per_token=out.stats.seconds_per_token,
        compile_seconds=compiling + out.stats.compile_seconds,
    )


def _generate(
    lm: LM, task: Task, prompts: list[list[int]], context: Context | None, limit: int, room: int
) -> tuple[Output, float]:
    """`generate`, with room for more tokens than are made; and the share of the prompts' tokens that caches hold."""
    request = Request.create(
        lm,
        prompts,
        context,
        max_new_tokens=room,
        min_new_tokens=1 if task.stop else 0,
        sampling=Sampling(),
        seed=0,
        stop=task.stop,
        stop_token_ids=None,
        backend="auto",
    )
    state = request.start()
    kept = output_of(request, state).stats.kept_share  # the first new token is in no cache yet
    while not request.is_finished(state) and (left := limit - request.steps(state)) > 0:
        state = request.advance(state, min(_STRIDE, left) if task.stop else left)
    return output_of(request, state), kept


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
