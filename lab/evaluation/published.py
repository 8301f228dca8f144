"""Published figures that stand beside a suite's own, each with its source.

All are for full attention or for methods that this library has, but for KVzip. Left out, as no copy of them could be
read: the tables of the TCA-Attention paper (arXiv 2512.09238) and the entries of kvpress's leaderboard.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

LLAMA = "llama-3.1-8b-instruct"


@dataclasses.dataclass(frozen=True)
class Figures:
    """A row of a published table.

    Attributes:
        part: The part of a suite that it stands beside.
        model: Model, as `model_key` writes it.
        method: Method, by its name here where it has one.
        scores: Scores in percent, by the column of the part's table.
        source: Where they were published.
        settings: What is known of how they were made.
        compression_ratio: Share of the cache that was dropped, as kvpress counts it; None where nothing says.
    """

    part: str
    model: str
    method: str
    scores: Mapping[str, float]
    source: str
    settings: str
    compression_ratio: float | None = None


def model_key(name: str) -> str:
    """A model's name as figures have it: the alias "llama3.1-8b-instruct" and the repository
    "meta-llama/Meta-Llama-3.1-8B-Instruct" are "llama-3.1-8b-instruct"."""
    key = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return re.sub(r"^llama(?=\d)", "llama-", key)


def published(part: str, model: str) -> tuple[Figures, ...]:
    """The figures beside a part's: those of the model, or of LLaMA-3.1-8B-Instruct where it has none."""
    of_part = [figures for figures in FIGURES if figures.part == part]
    own = tuple(figures for figures in of_part if figures.model == model_key(model))
    return own or tuple(figures for figures in of_part if figures.model == LLAMA)


_LENGTHS = ("4096", "8192", "16384", "32768", "65536", "131072")


def _by_length(model: str, method: str, source: str, settings: str, *scores: float) -> Figures:
    return Figures("ruler", model, method, dict(zip(_LENGTHS, scores, strict=True)), source, settings)


_RULER = "README of github.com/NVIDIA/RULER at c3f5e3b"
_QWEN3 = f"{_RULER}, from arXiv 2505.09388"
_QWEN_1M = f"{_RULER}, from arXiv 2501.15383"
_OWN_TASKS = "13 tasks, prompts that end with the answer's first words"
_X = "XAttention, arXiv 2503.16428, Table 1, as several summaries of it agree"
_X_TASKS = "RULER, LLaMA-3.1-8B-Instruct"
_KVZIP = "github.com/NVIDIA/kvpress, pull request 93 (figures of KVzip's author)"
_KVZIP_TASKS = "simonjegou/ruler at 4,096 tokens by kvpress's evaluation, contexts read without the question"

FIGURES = (
    _by_length(LLAMA, "full", _RULER, _OWN_TASKS, 95.5, 93.8, 91.6, 87.4, 84.7, 77.0),
    _by_length("llama-3.1-70b-instruct", "full", _RULER, _OWN_TASKS, 96.5, 95.8, 95.4, 94.8, 88.4, 66.6),
    _by_length("qwen2.5-7b-instruct-1m", "full", _QWEN_1M, _OWN_TASKS, 96.8, 95.3, 93.0, 91.1, 90.4, 84.4),
    _by_length("qwen2.5-14b-instruct-1m", "full", _QWEN_1M, _OWN_TASKS, 97.5, 97.1, 94.6, 94.9, 94.9, 92.2),
    _by_length("qwen3-4b", "full", _QWEN3, _OWN_TASKS, 95.1, 93.6, 91.0, 87.8, 77.8, 66.0),
    _by_length("qwen3-8b", "full", _QWEN3, _OWN_TASKS, 96.3, 96.0, 91.8, 91.2, 82.1, 77.4),
    _by_length("qwen3-14b", "full", _QWEN3, _OWN_TASKS, 98.0, 97.8, 96.4, 96.1, 94.0, 85.1),
    _by_length("qwen3-32b", "full", _QWEN3, _OWN_TASKS, 98.4, 96.0, 96.2, 94.4, 91.8, 85.6),
    _by_length(LLAMA, "full", _X, _X_TASKS, 96.74, 94.03, 92.02, 84.17, 81.32, 76.89),
    _by_length(LLAMA, "flexprefill", _X, f"{_X_TASKS}, gamma 0.95, tau 0.1", 95.99, 93.67, 92.73, 88.14, 81.14, 74.67),
    _by_length(LLAMA, "minference", _X, f"{_X_TASKS}, published patterns", 96.54, 94.06, 91.37, 85.79, 83.03, 54.12),
    _by_length(LLAMA, "xattention", _X, f"{_X_TASKS}, stride 8", 96.83, 94.07, 93.17, 90.75, 84.08, 72.31),
    _by_length(LLAMA, "xattention", _X, f"{_X_TASKS}, stride 16", 96.11, 93.95, 93.56, 90.64, 83.12, 71.11),
    Figures(
        "longbench-e",
        LLAMA,
        "full",
        {
            "single-document QA": 45.29,
            "multi-document QA": 45.16,
            "summaries": 26.55,
            "few-shot": 68.38,
            "synthetic": 59.54,
            "code": 46.28,
            "mean": 50.06,
        },
        "TurboQuant, arXiv 2504.19874, Table 1, as several summaries of it agree",
        "LongBench-E; the mean is that of the 13 data sets",
    ),
    *(
        Figures("leaderboard", LLAMA, "full" if not ratio else "kvzip", {"mean": score}, _KVZIP, _KVZIP_TASKS, ratio)
        for ratio, score in (
            (0.0, 95.7),
            (0.1, 95.5),
            (0.25, 95.5),
            (0.5, 95.5),
            (0.6, 95.5),
            (0.7, 95.3),
            (0.8, 94.9),
            (0.9, 90.5),
        )
    ),
)
