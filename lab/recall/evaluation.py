"""A model's answers to recall questions under a protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tca_jax.engine.contexts import prefill
from tca_jax.engine.generation import generate
from tca_jax.engine.lm import LM
from tca_jax.lab.recall.documents import Document, hide
from tca_jax.lab.recall.facts import draw_keys
from tca_jax.lab.recall.protocols import chat_document, chat_question, completion, is_correct, require_protocol
from tca_jax.lab.recall.tasks import TASKS, draw_question

#: Room for any answer of any task in a byte-level chat: the longest are those of tracking over four hops.
ANSWER_TOKENS = 448


class RecallAnswers(NamedTuple):
    """Answers of a model."""

    texts: list[str]
    right: list[bool]
    kv_cache_share: float  # of full attention's bytes


def draw_documents(
    seed: tuple[int, ...] | int, count: int, num_bytes: int, task: str, split: str = "held-out"
) -> list[Document]:
    """Documents with a question of `task` first and one of every other; `num_bytes` count the first question."""
    documents, tasks = [], [task, *(other for other in TASKS if other != task)]
    for number in range(count):
        rng = np.random.default_rng((*np.atleast_1d(seed).tolist(), number))
        keys = draw_keys(rng)
        questions = [draw_question(rng, name, keys) for name in tasks]
        documents.append(hide(rng, num_bytes - len(completion("", questions[0])), questions, split))
    return documents


def ask(
    lm: LM, documents: Sequence[Document], protocol: str, *, batch: int = 50, max_new_tokens: int = ANSWER_TOKENS
) -> RecallAnswers:
    """Asks each document's first question, greedily, `batch` questions in one call."""
    require_protocol(protocol)
    texts, right, held, full = list[str](), list[bool](), 0, 0
    for first in range(0, len(documents), batch):
        pairs = [(document.text, document.questions[0]) for document in documents[first : first + batch]]
        if protocol == "late":
            context = prefill(lm, [chat_document(text) for text, _ in pairs])
            prompts = [chat_question(question) for _, question in pairs]
        else:
            context = None
            prompts = [
                completion(text, question) if protocol == "prefix" else chat_document(text) + chat_question(question)
                for text, question in pairs
            ]
        out = generate(lm, prompts, context=context, max_new_tokens=max_new_tokens)
        texts += out.text
        right += [is_correct(question, text, protocol) for (_, question), text in zip(pairs, out.text, strict=True)]
        held, full = held + out.stats.kv_cache_bytes, full + out.stats.full_kv_cache_bytes
    return RecallAnswers(texts, right, held / full)
