"""What evaluate_zoo.py measures of a model: losses of held-out text, and answers about documents."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from recall_tokens import BOS
from zoo_tasks import MIXTURES, draw_documents

import tca_jax
from tca_jax import TCAConfig
from tca_jax.calibration.profile import Profile
from tca_jax.engine.score import score_answers
from tca_jax.lab.recall import PROTOCOLS, Document
from tca_jax.lab.recall.corpus import corpus
from tca_jax.lab.recall.evaluation import ask
from tca_jax.lab.recall.protocols import chat_answer, chat_document, chat_question

FOLLOWING = 256
#: Questions in one call. A step of these models takes as long for many rows as for few.
BATCH = 80


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        lengths: Tokens of a prompt, and of a calibration text.
        calibrated: Tokens of all calibration texts of a length together.
        passages: Texts whose losses are measured.
        questions: Questions of each task under each protocol.
        draws: Draws of calibration texts.
        keep_tolerance: Calibration's.
    """

    lengths: tuple[int, ...] = (8192, 16384)
    calibrated: int = 2**17
    passages: int = 32
    questions: int = 100
    draws: int = 5
    keep_tolerance: float = TCAConfig.keep_tolerance

    def config(self, tokens: int) -> TCAConfig:
        """Calibration's for prompts of a length."""
        return TCAConfig(window=window_of(tokens), keep_tolerance=self.keep_tolerance)

    def texts(self, tokens: int) -> int:
        """Calibration texts of a length."""
        return max(1, self.calibrated // tokens)


SMOKE = Plan(lengths=(2560,), calibrated=2560, passages=1, questions=1, draws=2)


def window_of(tokens: int) -> int:
    """TCA's window for prompts of a length."""
    return max(256, tokens // 16)


def passages(seed: int, count: int, tokens: int, half: int) -> list[list[int]]:
    """Passages of one half of the held-out text, as token ids."""
    text = np.frombuffer(corpus("held-out"), np.uint8)
    part = text[half * len(text) // 2 : (half + 1) * len(text) // 2]
    starts = np.random.default_rng((seed, half, tokens)).integers(len(part) - tokens, size=count)
    return [[BOS, *part[start : start + tokens - 1].tolist()] for start in starts]


def documents_with_pairs(lm: tca_jax.LM, name: str, count: int, tokens: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Documents as chats, and all questions about each with their answers: a user's own probes."""
    tasks = sorted(set(MIXTURES[name]))

    def ids(part: str, *, begins: bool = False) -> list[int]:
        return lm.tokenizer(part, add_special_tokens=begins)["input_ids"]

    texts, pairs = [], []
    for number in range(count):
        (document,) = draw_documents((seed, 7, number), 1, tokens, name, tasks[number % len(tasks)])
        texts.append(ids(chat_document(document.text), begins=True))
        answers = [f"{chat_answer(question, number)}<|eos|>" for question in document.questions]
        asked = [chat_question(question) for question in document.questions]
        pairs.append([(ids(question), ids(answer)) for question, answer in zip(asked, answers, strict=True)])
    return texts, pairs


def documents_by_task(lm: tca_jax.LM, name: str, plan: Plan, tokens: int) -> dict[str, list[Document]]:
    """Documents with a question each, of every task that a model was trained for."""
    size = document_size(lm, tokens)
    tasks = sorted(set(MIXTURES[name]))
    return {task: draw_documents((11, tokens), plan.questions, size, name, task) for task in tasks}


def document_size(lm: tca_jax.LM, tokens: int) -> int:
    """Tokens of a document that leave room for a question and its answer."""
    return min(tokens - 256, lm.config.max_context - 768)


def losses(lm: tca_jax.LM, texts: Sequence[list[int]], window: int) -> dict[str, float]:
    """Loss inside prompts, of the tokens that follow them over the cache, and the attended share."""
    prompts, following = [ids[:-FOLLOWING] for ids in texts], [[ids[-FOLLOWING:]] for ids in texts]
    first = window + TCAConfig.block_size
    inside, shares, after = [], [], []
    for one, rest in zip(prompts, following, strict=True):
        scores = tca_jax.score(lm, [one])
        inside.append(-scores.logprobs[0][first:].mean())
        shares.append(scores.attended_share[0])
        after.append(-score_answers(lm, [one], [rest]).logprobs[0][0].mean())
    return {
        "inside": float(np.mean(inside)),
        "following": float(np.mean(after)),
        "attended_share": float(np.mean(shares)),
    }


def answers(
    lm: tca_jax.LM, documents: dict[str, list[Document]], protocols: Sequence[str] = PROTOCOLS
) -> dict[str, Any]:
    """Share of right answers by protocol and task, and the KV bytes next to full attention's."""
    right: dict[str, dict[str, float]] = {}
    held = []
    tasks = [(task, document) for task, of_task in documents.items() for document in of_task]
    for protocol in protocols:
        found = ask(lm, [document for _, document in tasks], protocol, batch=BATCH)
        held.append(found.kv_cache_share)
        of_task: dict[str, list[bool]] = {}
        for (task, _), is_right in zip(tasks, found.right, strict=True):
            of_task.setdefault(task, []).append(is_right)
        right[protocol] = {task: float(np.mean(each)) for task, each in of_task.items()}
    return {"right": right, "kv_share": float(held[-1])}


def calibrated_profile(lm: tca_jax.LM, plan: Plan, config: TCAConfig, tokens: int, seed: int) -> Profile:
    texts = passages(seed, plan.texts(tokens), tokens, 0)
    with warnings.catch_warnings(action="ignore"):  # probes may say nothing of a model
        return tca_jax.calibrate(lm, texts, config)
