"""RULER's tasks with the samples of kvpress's leaderboard, read from its files instead of drawn.

github.com/NVIDIA/kvpress made them once, with LLaMA-3.1-8B's tokenizer and without a chat template: 500 of each task
at 4,096 tokens. A context ends where the question begins; question and first words of the answer are apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tca_jax.errors import UserError
from tca_jax.lab.evaluation.ruler import TASKS
from tca_jax.lab.evaluation.samples import Drawing, Sample, Task, asked_with_lead
from tca_jax.lab.evaluation.sources import parquet_file

_COLUMNS = ("context", "question", "answer_prefix", "answer", "task")


def stored_tasks(lengths: Sequence[int]) -> tuple[Task, ...]:
    """RULER's tasks, whose samples are those of `Sources.kvpress` at these lengths."""
    needs = tuple(f"kvpress/{length}" for length in lengths)
    return tuple(
        dataclasses.replace(task, draw=functools.partial(_draw, task=task.name), needs=needs) for task in TASKS
    )


def _draw(drawing: Drawing, task: str) -> list[Sample]:
    path = parquet_file(drawing.sources.kvpress, drawing.length)
    rows = [row for row in read_rows(path) if row["task"] == task][: drawing.count]
    if not rows:
        raise UserError(f"--data: {path} holds no sample of {task}")
    return [] if drawing.only_check else [_sample(row, task) for row in rows]


def _sample(row: Mapping[str, Any], task: str) -> Sample:
    document, answers = row["context"], tuple(row["answer"])
    placed = task.startswith("niah") and all(answer in document for answer in answers)
    depths = tuple(document.find(answer) / len(document) for answer in answers) if placed else ()
    return Sample(asked_with_lead(document, row["question"], row["answer_prefix"]), answers, depths)


@functools.lru_cache(maxsize=1)
def read_rows(path: Path) -> list[dict[str, Any]]:
    """The samples of a file.

    Raises:
        ValueError: it is not of kvpress's form, or the library that reads it is not installed.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError("kvpress's samples need pyarrow: pip install 'tca-jax[lab]'") from None
    try:
        return parquet.read_table(path, columns=list(_COLUMNS)).to_pylist()
    except (ArrowException, OSError, KeyError) as error:
        raise UserError(f"--data: {path} is not of the form of kvpress's samples: {error}") from None
