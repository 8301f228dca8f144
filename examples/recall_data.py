"""Training data of recall-tiny and of the zoo: documents with questions in turns; NumPy alone, for workers."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
from zoo_tasks import DRAWS, hide

from tca_jax.lab.recall import TASKS, Question
from tca_jax.lab.recall.corpus import corpus
from tca_jax.lab.recall.facts import draw_keys
from tca_jax.lab.recall.tasks import PREAMBLES, asked

BOS, EOS, PAD, USER, ASSISTANT = 256, 257, 258, 259, 260  # ids 0 to 255 are the bytes
VOCAB_SIZE = 264  # a multiple of 8; the last ids are unused
SPECIAL_TOKENS = {"<|bos|>": BOS, "<|eos|>": EOS, "<|pad|>": PAD, "<|user|>": USER, "<|assistant|>": ASSISTANT}

Row = tuple[np.ndarray, np.ndarray, list[str]]  # tokens, answers and tasks, as in `Batch`
DEFAULT_TASKS = tuple(TASKS)
_PIECE = tuple[np.ndarray, bool]  # token ids, and whether they belong to an answer


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the curriculum: `steps` of `rows` sequences of `length` tokens."""

    length: int
    rows: int
    steps: int


class Batch(NamedTuple):
    """Sequences of a stage."""

    tokens: np.ndarray  # int16 [rows, length + 1]
    answers: np.ndarray  # number of the question, from 1, that a token answers; 0 for others; as `tokens`
    tasks: list[list[str]]  # of each question of each row


def make_batch(
    seed: tuple[int, ...], stage: Stage, split: str, recall_share: float, tasks_asked: Sequence[str] = DEFAULT_TASKS
) -> Batch:
    """A batch of documents with questions, and plain text in the rows after `recall_share`.

    `tasks_asked` are keys of `zoo_tasks.DRAWS`; a repeated one is asked more often.
    """
    rng = np.random.default_rng(seed)
    recall = round(recall_share * stage.rows)
    rows = [recall_row(rng, stage.length, split, tasks_asked) for _ in range(recall)]
    rows += [text_row(rng, stage.length, split) for _ in range(stage.rows - recall)]
    tokens, answers, tasks = zip(*rows, strict=True)
    return Batch(np.stack(tokens), np.stack(answers), list(tasks))


def training_batches(
    seed: int,
    stage: Stage,
    recall_share: float,
    first: int,
    tasks_asked: Sequence[str] = DEFAULT_TASKS,
    workers: int | None = None,
) -> Iterator[Batch]:
    """Endless batches of a stage from step `first` on, built ahead by other processes."""
    workers = workers or max(1, min(12, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        seeds = ((seed, step) for step in itertools.count(first))
        batches = (pool.submit(make_batch, each, stage, "train", recall_share, tasks_asked) for each in seeds)
        ahead = collections.deque(itertools.islice(batches, 3 * workers))
        try:
            while True:
                ahead.append(next(batches))
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def recall_row(rng: np.random.Generator, length: int, split: str, tasks_asked: Sequence[str] = DEFAULT_TASKS) -> Row:
    """A document with answered questions, in a chat or without one."""
    chat = bool(rng.integers(2))
    questions, turns = _questions(rng, length, chat, tasks_asked)
    text_bytes = length - sum(len(piece) for turn in turns for piece, _ in turn) - chat
    document = hide(rng, text_bytes, questions, split)
    start = np.array([BOS, USER] if chat else [BOS], np.int16)
    pieces: list[tuple[np.ndarray, int]] = [(start, 0), (_ids(document.text), 0)]
    for number, turn in enumerate(turns, start=1):
        pieces += [(piece, number * is_answer) for piece, is_answer in turn]
    tokens = np.concatenate([piece for piece, _ in pieces])
    answers = np.concatenate([np.full(len(piece), number, np.int16) for piece, number in pieces])
    return tokens, answers, [question.task for question in questions]


def text_row(rng: np.random.Generator, length: int, split: str) -> Row:
    """A passage of plain text."""
    text = corpus(split)
    start = int(rng.integers(len(text) - length + 1))
    passage = np.frombuffer(text, np.uint8, length, start)
    return np.concatenate([[BOS], passage]).astype(np.int16), np.zeros(length + 1, np.int16), []


def _questions(
    rng: np.random.Generator, length: int, chat: bool, tasks: Sequence[str]
) -> tuple[list[Question], list[list[_PIECE]]]:
    """At least one question, until facts and turns take a drawn share of the row."""
    keys = draw_keys(rng)
    wanted, most, taken = length * rng.uniform(0.2, 0.8), 0.9 * length, 0
    questions: list[Question] = []
    turns: list[list[_PIECE]] = []
    for _ in range(64):
        task = tasks[int(rng.integers(len(tasks)))]
        question = DRAWS[task](rng, task, keys)
        turn = _turn(rng, question, chat, first=not turns)
        size = sum(len(fact.line) for fact in question.facts) + sum(len(piece) for piece, _ in turn)
        if taken + size > most:
            continue
        questions.append(question)
        turns.append(turn)
        taken += size
        if taken > wanted:
            break
    return questions, turns


def _turn(rng: np.random.Generator, question: Question, chat: bool, *, first: bool) -> list[_PIECE]:
    """A question and its answer, closed with eos."""
    answer = (np.append(_ids(f"{question.answer}."), np.int16(EOS)), True)
    if not chat:
        return [(_ids(f"{asked(question)}{question.lead}"), False), answer]
    preamble = PREAMBLES[int(rng.integers(len(PREAMBLES)))]
    turn = _ids(f"\n\n{question.text}") if first else np.concatenate([[USER], _ids(question.text)])
    lead = _ids(f"{preamble} {question.lead}")
    return [(np.concatenate([turn, [EOS, ASSISTANT], lead]).astype(np.int16), False), answer]


def _ids(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int16)
