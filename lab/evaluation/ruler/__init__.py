"""RULER (arXiv 2404.06654): its thirteen tasks as NVIDIA/RULER defines them, drawn offline for any tokenizer."""

from __future__ import annotations

import functools
import re

from tca_jax.lab.evaluation.ruler.counting import draw_common_words, draw_frequent_words
from tca_jax.lab.evaluation.ruler.needles import Needles
from tca_jax.lab.evaluation.ruler.questions import draw_questions
from tca_jax.lab.evaluation.ruler.tracking import draw_tracking
from tca_jax.lab.evaluation.samples import Mark, Sample, Task

_CONTROL = re.compile(r"[\x00-\x1f]")

_NEEDLES = (
    Needles("niah_single_1", "noise"),
    Needles("niah_single_2", "essay"),
    Needles("niah_single_3", "essay", values="uuids"),
    Needles("niah_multikey_1", "essay", num_keys=4),
    Needles("niah_multikey_2", "needle"),
    Needles("niah_multikey_3", "needle", keys="uuids", values="uuids"),
    Needles("niah_multivalue", "essay", num_values=4),
    Needles("niah_multiquery", "essay", num_queries=4),
)


def match_all(sample: Sample, text: str, protocol: str) -> Mark:
    """RULER's string_match_all: the share of references that the answer holds, upper and lower case alike."""
    hits = _hits(sample, text)
    return Mark(sum(hits) / len(hits), hits if sample.depths else ())


def match_part(sample: Sample, text: str, protocol: str) -> Mark:
    """RULER's string_match_part: whether the answer holds any of the references."""
    return Mark(float(any(_hits(sample, text))))


def _hits(sample: Sample, text: str) -> tuple[bool, ...]:
    said = _CONTROL.sub("\n", text.strip()).strip().lower()
    return tuple(reference.lower() in said for reference in sample.references)


def _needle_task(needles: Needles) -> Task:
    draw = functools.partial(needles.draw, new_tokens=128)
    return Task(needles.name, "ruler", 128, draw, match_all, needs=needles.needs)


TASKS = (
    *map(_needle_task, _NEEDLES),
    Task("vt", "ruler", 30, functools.partial(draw_tracking, name="vt", new_tokens=30), match_all),
    Task("cwe", "ruler", 120, functools.partial(draw_common_words, name="cwe", new_tokens=120), match_all, ("words",)),
    Task("fwe", "ruler", 50, functools.partial(draw_frequent_words, name="fwe", new_tokens=50), match_all),
    *(
        Task(
            name,
            "ruler",
            32,
            functools.partial(draw_questions, name=name, source=source, new_tokens=32),
            match_part,
            needs=(source,),
        )
        for name, source in (("qa_1", "squad"), ("qa_2", "hotpotqa"))
    ),
)
