"""Suites: evaluations that others can repeat, each with fixed tasks, protocols and budgets.

"leaderboard" is RULER as kvpress's leaderboard takes it, "paper" what the TCA-Attention paper reports (arXiv
2512.09238, Tables 1 and 2), "late" RULER with questions that come to a context that was read without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tca_jax.engine.prompts import Encoder
from tca_jax.errors import UserError
from tca_jax.lab.evaluation.method_specs import MethodSpec
from tca_jax.lab.evaluation.plan import BYTES_OF, SUITES, Plan, make_plan
from tca_jax.lab.evaluation.results import CONFIG, write_json
from tca_jax.lab.evaluation.ruler.stored import stored_tasks
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.lab.plots.curves import BASELINE
from tca_jax.lab.recall.protocols import LATE_PREFIX
from tca_jax.models.json_object import read_json_object

SETTINGS = "suite.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a suite: an evaluation of its own, in a folder of its own.

    Attributes:
        name: The folder.
        tasks: A suite of tasks.
        protocol: How they are asked.
        lengths: Tokens of a prompt with its answer; None for the suite's.
        samples: Of each task, unless another number than the suite's is asked for; None for the suite's.
        kv_share: Share of full attention's bytes for the prompt that every method holds; None for methods as they are.
        baseline: Whether it is of full attention alone (True) or of all others (False); None for all.
        figures: The published figures beside it.
    """

    name: str
    tasks: str
    protocol: str
    lengths: tuple[int, ...] | None = None
    samples: int | None = None
    kv_share: float | None = None
    baseline: bool | None = None
    figures: str = ""


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite.

    Attributes:
        name: Its name on the command line.
        title: What its table is headed with.
        methods: Methods, as `parse_methods` takes them.
        lengths: Tokens of a prompt with its answer.
        samples: Of each task and length; data sets may have fewer.
        needs: Files, see `find_sources`.
        parts: Its parts.
    """

    name: str
    title: str
    methods: str
    lengths: tuple[int, ...]
    samples: int
    needs: tuple[str, ...]
    parts: tuple[Part, ...]


_RULER_FILES = ("essays", "squad", "hotpotqa")
_LENGTHS = (8192, 16384, 32768, 65536, 131072)
_COMPRESSION_RATIOS = (0.25, 0.5, 0.75, 0.875)

LEADERBOARD = Suite(
    "leaderboard",
    "RULER as kvpress's leaderboard takes it",
    # Rivals as kvpress registers them: an observation of 64 queries, and windows that leave a choice at 4,096 tokens.
    "full,tca,adakv-expected-attention,snapkv:observation=64,pyramidkv,tova,keydiff,streaming,random:window=128",
    (4096,),
    500,
    ("kvpress",),
    (
        Part("ratio-0", "ruler", LATE_PREFIX, baseline=True, figures="leaderboard"),
        *(
            Part(f"ratio-{ratio}", "ruler", LATE_PREFIX, kv_share=1 - ratio, baseline=False, figures="leaderboard")
            for ratio in _COMPRESSION_RATIOS
        ),
    ),
)
PAPER = Suite(
    "paper",
    "RULER from 8K to 128K tokens and LongBench-E",
    "full,tca,paper,minference,flexprefill:gamma=0.95,xattention",
    _LENGTHS,
    100,
    (*_RULER_FILES, "longbench"),
    (
        Part("ruler", "ruler", "prefix", figures="ruler"),
        # All that the files have.
        Part("longbench-e", "longbench", "prefix", lengths=(131072,), samples=1000, figures="longbench-e"),
    ),
)
LATE = Suite(
    "late",
    "RULER with questions after the context",
    "full,tca,paper,snapkv:share=0.25,adakv-expected-attention:share=0.25,streaming",
    _LENGTHS,
    100,
    _RULER_FILES,
    (Part("ruler-late", "ruler", "late"),),
)
BY_NAME: Mapping[str, Suite] = MappingProxyType({suite.name: suite for suite in (LEADERBOARD, PAPER, LATE)})


def get_suite(name: str) -> Suite:
    """The suite of a name; ValueError where there is none."""
    if name not in BY_NAME:
        raise UserError(f"--suite {name}: must be one of {list(BY_NAME)}")
    return BY_NAME[name]


def plan_suite(
    suite: Suite,
    lm: Encoder,
    methods: tuple[MethodSpec, ...],
    sources: Sources,
    *,
    lengths: Sequence[int],
    samples: int,
    seed: int,
    batch: int,
) -> dict[Part, Plan]:
    """The plans of a suite's parts, those that no method is for left out.

    Args:
        suite: The suite.
        lm: The model's tokenizer, chat template and positions.
        methods: Methods.
        sources: All files that the suite needs.
        lengths: The suite's, or others that were asked for; LongBench-E is cut at the model's positions alone.
        samples: The suite's, or another number.
        seed: Draws samples.
        batch: Most prompts in a call.

    Raises:
        ValueError: as `make_plan`.
    """
    tasks = {**SUITES, "ruler": stored_tasks(lengths)} if "kvpress" in suite.needs else SUITES
    plans: dict[Part, Plan] = {}
    for part in suite.parts:
        chosen = tuple(spec for spec in methods if part.baseline in (None, spec.label == BASELINE))
        if chosen:
            own = None if part.lengths is None else [min(length, lm.config.max_context) for length in part.lengths]
            count = part.samples if part.samples is not None and samples == suite.samples else samples
            plans[part] = make_plan(
                lm,
                chosen,
                [part.tasks],
                own or list(lengths),
                [part.protocol],
                samples=count,
                seed=seed,
                sources=sources,
                kv_share=part.kv_share,
                batch=batch,
                bytes_of=BYTES_OF[0] if part.kv_share is None else "prompt",
                suites=tasks,
            )
    return plans


def suite_settings(suite: Suite, lm: Encoder, *, lengths: Sequence[int], samples: int, seed: int) -> dict[str, Any]:
    """What the folder of a suite is of; its parts compare what else there is."""
    asked = {"model": lm.name, "lengths": list(lengths), "samples": samples, "seed": seed}
    return {"format": _FORMAT, "suite": suite.name, **asked}


def require_same_settings(folder: Path, suite: Suite, settings: Mapping[str, Any]) -> None:
    """Writes nothing.

    Raises:
        ValueError: the folder is of another suite or of other settings, with the difference; or of something else.
    """
    path = folder / SETTINGS
    if not path.exists():
        own = {part.name for part in suite.parts}  # those of a run that was killed before it wrote its settings
        there = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        if any(not name.startswith(".") and name not in own for name in there):
            what = "is of an evaluation without --suite" if CONFIG in there else f"holds files but no {SETTINGS}"
            raise UserError(f"--out {folder} {what}: must be new, or of --suite {suite.name}")
        return
    held = read_json_object(path)
    for name in dict.fromkeys((*settings, *held)):
        if held.get(name) != settings.get(name):
            raise UserError(
                f"--out {folder} was made with {name} = {held.get(name)}, this run has {settings.get(name)}: use "
                "another folder, or the same settings"
            )


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes what the folder is of."""
    write_json(folder / SETTINGS, settings)
