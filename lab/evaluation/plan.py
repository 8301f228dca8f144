"""Plans of evaluations: tasks, lengths, protocols and suites, checked before a model is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tca_jax.engine.prompts import Encoder
from tca_jax.errors import UserError
from tca_jax.lab.evaluation import longbench, recall_tasks, ruler, text_tasks
from tca_jax.lab.evaluation.method_specs import MethodSpec
from tca_jax.lab.evaluation.results import Job
from tca_jax.lab.evaluation.samples import TEXT_PROTOCOL, DoesNotFit, Drawing, Task
from tca_jax.lab.evaluation.sources import Origin, Sources
from tca_jax.lab.evaluation.text_tasks import TextTask
from tca_jax.lab.evaluation.tuning import Tuning
from tca_jax.lab.recall.protocols import EVALUATION_PROTOCOLS, LATE_PREFIX
from tca_jax.methods.full import BASELINE

AnyTask = Task | TextTask

#: Names of several tasks.
GROUPS: Mapping[str, tuple[AnyTask, ...]] = MappingProxyType(
    {
        "ruler": ruler.TASKS,
        "recall": recall_tasks.TASKS,
        "longbench": longbench.TASKS,
        "kvpress": ruler.KVPRESS_TASKS,
    }
)
TASKS: Mapping[str, AnyTask] = MappingProxyType(
    {task.name: task for group in (*GROUPS.values(), text_tasks.TASKS) for task in group}
)
#: Caches that `kv_share` counts: those of a call, with room for a question and its answer; or the prompt's alone.
BYTES_OF = ("call", "prompt")


class Part(NamedTuple):
    """An evaluation of a suite, with a folder of its own."""

    folder: str
    tasks: str
    protocol: str
    lengths: tuple[int, ...] = ()  # those of the suite if empty
    samples: int | None = None  # those of the suite if None; another requested number wins
    kv_share: float | None = None
    baseline: bool | None = None  # True: full attention only, False: all other methods, None: all


class Suite(NamedTuple):
    """Evaluations that others can repeat."""

    methods: str
    lengths: tuple[int, ...]
    samples: int  # of each task and length; data sets may have fewer
    needs: tuple[str, ...]  # sources
    parts: tuple[Part, ...]


_LENGTHS = (8192, 16384, 32768, 65536, 131072)
_RULER_FILES = ("essays", "squad", "hotpotqa")
SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        # RULER as kvpress's leaderboard takes it. An observation of 64 queries, and windows that leave a choice.
        "leaderboard": Suite(
            "full,tca,adakv-expected-attention,snapkv:observation=64,pyramidkv,tova,keydiff,streaming,random:window=128",
            (4096,),
            500,
            ("kvpress",),
            (
                Part("ratio-0", "kvpress", LATE_PREFIX, baseline=True),
                *(
                    Part(f"ratio-{ratio}", "kvpress", LATE_PREFIX, kv_share=1 - ratio, baseline=False)
                    for ratio in (0.25, 0.5, 0.75, 0.875)
                ),
            ),
        ),
        # Tables 1 and 2 of the TCA-Attention paper (arXiv 2512.09238).
        "paper": Suite(
            "full,tca,paper,minference,flexprefill:gamma=0.95,xattention",
            _LENGTHS,
            100,
            (*_RULER_FILES, "longbench"),
            (
                Part("ruler", "ruler", "prefix"),
                Part("longbench-e", "longbench", "prefix", lengths=(131072,), samples=1000),
            ),
        ),
        # Questions that come after the context.
        "late": Suite(
            "full,tca,paper,snapkv:share=0.25,adakv-expected-attention:share=0.25,streaming",
            _LENGTHS,
            100,
            _RULER_FILES,
            (Part("ruler-late", "ruler", "late"),),
        ),
    }
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """An evaluation."""

    methods: tuple[MethodSpec, ...]
    tasks: tuple[tuple[AnyTask, tuple[int, ...]], ...]  # with the lengths of each
    protocols: tuple[str, ...]  # of tasks that ask questions
    samples: int  # of each task and length; data sets may have fewer
    seed: int
    sources: Sources
    kv_share: float | None  # of full attention's KV cache bytes, for every method; None: methods as they are
    batch: int  # most prompts in a call
    skipped: tuple[str, ...] = ()  # reasons why tasks are left out
    bytes_of: str = BYTES_OF[0]
    tuning: Tuning | None = None
    seconds: bool = True  # show times in the table

    def jobs(self) -> list[Job]:
        """All entries; those of a length and a method, which share programs, are adjacent."""
        lengths = sorted({length for _, of_task in self.tasks for length in of_task})
        return [
            Job(spec.label, task.name, length, protocol)
            for length in lengths
            for spec in self.methods
            for task, of_task in self.tasks
            if length in of_task
            for protocol in (self.protocols if isinstance(task, Task) else (TEXT_PROTOCOL,))
        ]

    def drawing(self, lm: Encoder, length: int) -> Drawing:
        """Settings of samples of a length."""
        return Drawing(lm, self.sources, length, self.samples, self.seed)

    def origins(self) -> dict[str, Origin]:
        """Origins of the samples by source."""
        return {name: self.sources.origin(name) for task, _ in self.tasks for name in task.needs}


def make_plan(
    lm: Encoder,
    methods: tuple[MethodSpec, ...],
    tasks: Sequence[str],
    lengths: Sequence[int],
    protocols: Sequence[str],
    *,
    samples: int,
    seed: int,
    sources: Sources,
    kv_share: float | None,
    batch: int,
    bytes_of: str = BYTES_OF[0],
) -> Plan:
    """Checks the settings of an evaluation without the model's weights.

    A task that is named must run at every length. Tasks of a group without a file or a fitting length are left out,
    as long as any is left.

    Raises:
        ValueError: an argument is not allowed; the message names the option.
    """
    _require_known("--protocols", protocols, EVALUATION_PROTOCOLS)
    _require_known("--tasks", tasks, (*GROUPS, *TASKS))
    for name, value in (("--samples", samples), ("--batch", batch)):
        if value < 1:
            raise UserError(f"{name} {value}: must be at least 1")
    if kv_share is not None and not 0 < kv_share <= 1:
        raise UserError(f"--kv-share {kv_share}: must lie in (0, 1], a share of full attention's KV cache bytes")
    if bytes_of not in BYTES_OF:
        raise UserError(f"--bytes-of {bytes_of}: must be one of {list(BYTES_OF)}")
    if bytes_of != BYTES_OF[0] and kv_share is None:
        raise UserError(f"--bytes-of {bytes_of}: needs --kv-share")
    _require_lengths(lm, lengths)
    if lm.tokenizer is None:
        raise UserError(f"{lm.name} has no tokenizer: tasks are text")
    chosen: dict[str, tuple[AnyTask, tuple[int, ...]]] = {}
    skipped: list[str] = []
    for name in tasks:
        reasons: list[DoesNotFit] = []
        fits = 0
        for task in GROUPS.get(name) or (TASKS[name],):
            fitting, of_task = _fitting(lm, task, lengths, sources, samples, seed, named=name in TASKS)
            reasons += of_task
            fits += bool(fitting)
            if fitting:
                chosen[task.name] = (task, fitting)
        if not fits:
            nearest = min(reasons, key=lambda reason: reason.least or math.inf)
            raise UserError(f"--tasks {name}: no task of it can be run: {nearest}")
        skipped += map(str, reasons)
    if any(task.suite == "longbench" for task, _ in chosen.values()):
        longbench.require_libraries()
    settings = (samples, seed, sources, kv_share, batch, tuple(skipped), bytes_of)
    return Plan(methods, tuple(chosen.values()), tuple(protocols), *settings)


def plan_suite(
    name: str,
    lm: Encoder,
    methods: tuple[MethodSpec, ...],
    sources: Sources,
    *,
    lengths: Sequence[int],
    samples: int,
    seed: int,
    batch: int,
) -> dict[str, Plan]:
    """Plans of a suite by folder; LongBench-E is cut at the model's positions only. Raises as `make_plan`."""
    plans = {}
    for part in SUITES[name].parts:
        own = part.samples if samples == SUITES[name].samples else None
        chosen = tuple(spec for spec in methods if part.baseline in (None, spec.label == BASELINE.name))
        if chosen:
            plans[part.folder] = make_plan(
                lm,
                chosen,
                [part.tasks],
                [min(length, lm.config.max_context) for length in part.lengths] or lengths,
                [part.protocol],
                samples=own or samples,
                seed=seed,
                sources=sources,
                kv_share=part.kv_share,
                batch=batch,
                bytes_of=BYTES_OF[0] if part.kv_share is None else "prompt",
            )
    return plans


def _require_lengths(lm: Encoder, lengths: Sequence[int]) -> None:
    if not lengths or len(set(lengths)) < len(lengths):
        raise UserError(f"--lengths {list(lengths)}: must be one or more, each once")
    for length in lengths:
        if not 1 <= length <= lm.config.max_context:
            raise UserError(f"--lengths {length}: must lie in [1, {lm.config.max_context}], positions of {lm.name}")


def _require_known(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    if not given:
        raise UserError(f"{option} is empty: must name one or more of {list(known)}")
    for name in given:
        if name not in known:
            raise UserError(f"{option} {name}: must be one of {list(known)}")
        if given.count(name) > 1:
            raise UserError(f"{option} names {name} twice")


def _fitting(
    lm: Encoder, task: AnyTask, lengths: Sequence[int], sources: Sources, samples: int, seed: int, *, named: bool
) -> tuple[tuple[int, ...], list[DoesNotFit]]:
    """Lengths at which a task can be run, and the reasons against the others; a named task raises the first reason."""
    reasons: list[DoesNotFit] = []
    fitting: list[int] = []
    missing = next((text for name in task.needs if (text := sources.missing(name.partition("/")[0]))), None)
    if missing:
        reasons.append(DoesNotFit(f"--tasks {task.name}: {missing}" if named else f"{task.name}: {missing}"))
    for length in () if missing else lengths:
        try:
            task.draw(Drawing(lm, sources, length, samples, seed, only_check=True))
            fitting.append(length)
        except DoesNotFit as error:
            reasons.append(error)
    if named and reasons:
        raise reasons[0]
    return tuple(fitting), reasons
