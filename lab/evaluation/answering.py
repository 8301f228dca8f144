"""Answers of a model to the samples of a task under a protocol, in batches of one shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

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

#: Room of an answer beyond its first words, where these are not given.
PREAMBLE_TOKENS = 64
# Least room in the caches for answers: few sizes, so that tasks share programs; answers end earlier.
_LEAST_ROOM = 128
_LEAST_ROOM_BEHIND_A_QUESTION = 256
_STRIDE = 16  # tokens between checks for stop strings
_CACHE_SHARE = 0.25  # of the memory, for the caches of a batch; the rest is for weights, activations and copies


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers and their costs, means over prompts."""

    texts: list[str]
    prompt_tokens: list[int]  # of each prompt with its document
    new_tokens: list[int]
    kv_cache_bytes: float
    full_kv_cache_bytes: float  # under full attention
    attended_share: float  # of the causal pairs of a prompt, or of the document that was read before
    kept_share: float  # of the prompt's tokens, after prefill
    prefill_seconds: float  # from the document to the first new token
    question_seconds: float  # from the question to the first new token
    seconds_per_token: float  # of a decoding step of a batch
    batch: int
    compile_seconds: float  # in no other figure


def answer(
    lm: LM,
    task: Task,
    samples: Sequence[Sample],
    protocol: str,
    *,
    batch: int,
    report: Callable[[int], None] = lambda asked: None,
) -> Answers:
    """Asks all samples, greedily, at most `batch` prompts in a call, fewer if memory is short.

    On a mesh all devices on "data" have as many. `report` gets the number of prompts after each call.
    """
    prompts = _encoded(lm, samples, protocol)
    tokens = [len(document) + len(question) for document, question in prompts]
    limit, room = _limits(lm, task, samples, protocol, max(tokens))
    rows = safe_batch(lm, max(tokens), room, min(batch, len(samples)))
    order = sorted(range(len(samples)), key=tokens.__getitem__)  # groups buckets
    texts, new_tokens, calls = [""] * len(samples), [0] * len(samples), list[dict[str, float]]()
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        filled = chosen + [chosen[-1]] * (rows - len(chosen))  # no batch of another shape
        answered, counts, costs = _ask(lm, task, [prompts[i] for i in filled], limit, room)
        for place, text, count in zip(chosen, answered, counts, strict=False):
            texts[place], new_tokens[place] = text, count
        calls.append(costs)
        report(len(chosen))
    means = {name: float(np.mean([costs[name] for costs in calls])) for name in calls[0]}
    means["compile_seconds"] *= len(calls)
    return Answers(texts, tokens, new_tokens, batch=rows, **means)


def call_sizes(lm: LM, task: Task, samples: Sequence[Sample], protocol: str) -> CallSizes:
    """Sizes of the calls of `answer`, in buckets, which tasks of one length share."""
    prompts = [(len(document), len(question)) for document, question in _encoded(lm, samples, protocol)]
    _, room = _limits(lm, task, samples, protocol, max(map(sum, prompts)))
    document, question = (max(part) for part in zip(*prompts, strict=True))
    return CallSizes(bucket_length(document), room, bucket_length(question) if question else None)


def _encoded(lm: LM, samples: Sequence[Sample], protocol: str) -> list[tuple[list[int], list[int]]]:
    """Document and question of each prompt; without `READ_FIRST` the document has both."""
    return [
        prompt.encode_apart(lm) if protocol in READ_FIRST else (prompt.encode(lm), [])
        for prompt in (sample.prompts[protocol] for sample in samples)
    ]


def _limits(lm: LM, task: Task, samples: Sequence[Sample], protocol: str, tokens: int) -> tuple[int, int]:
    """Most new tokens of an answer, and room for them in the caches, after prompts of up to `tokens`."""
    positions = lm.config.max_context - tokens
    limit = max(1, min(most_new_tokens(lm, task, samples, protocol), positions))
    return limit, answer_room(protocol, limit, positions)


def most_new_tokens(lm: LM, task: Task, samples: Sequence[Sample], protocol: str) -> int:
    """Most new tokens of an answer: the task's, and room for the first words where these are not given."""
    if protocol in WITH_LEAD:
        return task.new_tokens
    leads = {lead for sample in samples if (lead := sample.prompts["prefix"].lead)}
    return task.new_tokens + PREAMBLE_TOKENS + max((len(lm.tokenizer(lead)["input_ids"]) for lead in leads), default=0)


def answer_room(protocol: str, limit: int, positions: int) -> int:
    """Room for an answer in the caches: a power of two of at least `limit`, within the positions."""
    least = _LEAST_ROOM if protocol in WITH_LEAD else _LEAST_ROOM_BEHIND_A_QUESTION
    return max(1, min(max(least, 1 << (limit - 1).bit_length()), positions))


def safe_batch(lm: LM, prompt_tokens: int, new_tokens: int, most: int) -> int:
    """Prompts, at most `most`, whose full caches take at most a part of the device's memory.

    On a mesh a multiple of the devices on "data".
    """
    devices, memory = axis_size(lm.mesh, DATA), memory_bytes()
    of_device = cdiv(most, devices)
    if memory is None:
        return devices * of_device
    layout = lm.with_method(BASELINE).cache_layout(1, bucket_length(prompt_tokens), bucket_length(new_tokens))
    each = layout.num_bytes(lm.config.head_dim, lm.cache_dtype)
    return devices * max(1, min(of_device, int(_CACHE_SHARE * memory / each)))


def _ask(
    lm: LM, task: Task, prompts: Sequence[tuple[list[int], list[int]]], limit: int, room: int
) -> tuple[list[str], list[int], dict[str, float]]:
    """Texts, their numbers of tokens, and costs of one batch."""
    documents, questions = map(list, zip(*prompts, strict=True))
    context = prefill(lm, documents) if any(questions) else None
    out, kept = _generate(lm, task, questions if context else documents, context, limit, room)
    stats, rows = out.stats, len(prompts)
    read_seconds, compile_seconds = (context.prefill_seconds, context.compile_seconds) if context else (0.0, 0.0)
    costs = {
        "kv_cache_bytes": stats.kv_cache_bytes / rows,
        "full_kv_cache_bytes": stats.full_kv_cache_bytes / rows,
        "attended_share": stats.attended_share,
        "kept_share": kept,
        "prefill_seconds": (read_seconds + stats.prefill_seconds) / rows,
        "question_seconds": stats.prefill_seconds / rows,
        "seconds_per_token": stats.seconds_per_token,
        "compile_seconds": compile_seconds + stats.compile_seconds,
    }
    return out.text, stats.new_tokens, costs


def _generate(
    lm: LM, task: Task, prompts: list[list[int]], context: Context | None, limit: int, room: int
) -> tuple[Output, float]:
    """`generate` with room for more tokens than are made, and the kept share of the prompts."""
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
