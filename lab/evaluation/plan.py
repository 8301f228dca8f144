"""What an evaluation asks: tasks by name or suite, lengths, protocols; checked before a model is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tca_jax.engine.prompts import Encoder
from tca_jax.errors import UserError
from tca_jax.lab.evaluation import longbench, recall_tasks, ruler, text_tasks
from tca_jax.lab.evaluation.method_specs import MethodSpec
from tca_jax.lab.evaluation.results import Job
from tca_jax.lab.evaluation.samples import TEXT_PROTOCOL, DoesNotFit, Drawing, Task
from tca_jax.lab.evaluation.sources import Origin, Sources
from tca_jax.lab.evaluation.text_tasks import TextTask
from tca_jax.lab.evaluation.tuning import Tuning
from tca_jax.lab.recall.protocols import EVALUATION_PROTOCOLS

AnyTask = Task | TextTask

SUITES: Mapping[str, tuple[AnyTask, ...]] = MappingProxyType(
    {"ruler": ruler.TASKS, "recall": recall_tasks.TASKS, "longbench": longbench.TASKS}
)
TASKS: Mapping[str, AnyTask] = MappingProxyType(
    {task.name: task for suite in (*SUITES.values(), text_tasks.TASKS) for task in suite}
)
assert len(TASKS) == sum(map(len, SUITES.values())) + len(text_tasks.TASKS)

#: What `kv_share` counts: the caches of a call, with room for a question and its answer; or the prompt's alone.
BYTES_OF = ("call", "prompt")
_KEPT_CHARACTERS = 2**28  # of samples, between methods


@dataclasses.dataclass(frozen=True)
class Plan:
    """An evaluation.

    Attributes:
        methods: Methods.
        tasks: Tasks, with the lengths at which each is run.
        protocols: Protocols of tasks that ask questions.
        samples: Samples of each task and length; LongBench and SQuAD may have fewer.
        seed: Draws them.
        sources: Files.
        kv_share: Share of full attention's KV cache bytes that every method is to hold; None: methods as they are.
        batch: Most prompts in a call.
        skipped: Why tasks of a suite are left out.
        bytes_of: What `kv_share` counts, see `BYTES_OF`.
        tuning: Methods whose options are searched first; None: none.
        seconds: Whether the table shows times; false where something else used the device.
    """

    methods: tuple[MethodSpec, ...]
    tasks: tuple[tuple[AnyTask, tuple[int, ...]], ...]
    protocols: tuple[str, ...]
    samples: int
    seed: int
    sources: Sources
    kv_share: float | None
    batch: int
    skipped: tuple[str, ...] = ()
    bytes_of: str = BYTES_OF[0]
    tuning: Tuning | None = None
    seconds: bool = True

    def jobs(self) -> list[Job]:
        """All entries, those of a length and a method together: they run the same programs."""
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
        """What samples are drawn for."""
        return Drawing(lm, self.sources, length, self.samples, self.seed)

    def origins(self) -> dict[str, Origin]:
        """Where the samples come from, by the name of the source."""
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
    suites: Mapping[str, tuple[AnyTask, ...]] = SUITES,
) -> Plan:
    """Checks what is asked for, without the model's weights.

    A task that is named must run at every length; of a suite, tasks that lack a file or do not fit a length are left
    out, as long as any is left.

    Raises:
        ValueError: an argument is not allowed; the message names the option.
    """
    _require_known("--protocols", protocols, EVALUATION_PROTOCOLS)
    _require_known("--tasks", tasks, (*suites, *TASKS))
    for name, value in (("--samples", samples), ("--batch", batch)):
        if value < 1:
            raise UserError(f"{name} {value}: must be at least 1")
    if kv_share is not None and not 0 < kv_share <= 1:
        raise UserError(f"--kv-share {kv_share}: must lie in (0, 1], a share of full attention's KV cache bytes")
    if bytes_of not in BYTES_OF:
        raise UserError(f"--bytes-of {bytes_of}: must be one of {list(BYTES_OF)}")
    if bytes_of != BYTES_OF[0] and kv_share is None:
        raise UserError(f"--bytes-of {bytes_of}: says what --kv-share counts, which is not given")
    require_lengths(lm, lengths)
    if lm.tokenizer is None:
        raise UserError(f"{lm.name} has no tokenizer: tasks are text")
    chosen: dict[str, tuple[AnyTask, tuple[int, ...]]] = {}
    skipped: list[str] = []
    for name in tasks:
        wanted = suites.get(name) or (TASKS[name],)
        found = [_that_fit(lm, task, lengths, sources, samples, seed, named=name in TASKS) for task in wanted]
        if not any(fitting for _, fitting, _ in found):
            reasons = [reason for _, _, of_task in found for reason in of_task]
            nearest = min(reasons, key=lambda reason: reason.least or math.inf)
            raise UserError(f"--tasks {name}: no task of it can be run: {nearest}")
        for task, fitting, of_task in found:
            skipped += map(str, of_task)
            if fitting:
                chosen[task.name] = (task, fitting)
    of_plan = tuple(chosen.values())
    plan = Plan(methods, of_plan, tuple(protocols), samples, seed, sources, kv_share, batch, tuple(skipped), bytes_of)
    if any(task.suite == "longbench" for task, _ in plan.tasks):
        longbench.require_libraries()
    return plan


def require_lengths(lm: Encoder, lengths: Sequence[int]) -> None:
    """Raises ValueError unless there are lengths, each once and within the model's positions."""
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


def _that_fit(
    lm: Encoder, task: AnyTask, lengths: Sequence[int], sources: Sources, samples: int, seed: int, *, named: bool
) -> tuple[AnyTask, tuple[int, ...], list[DoesNotFit]]:
    """A task, the lengths at which it can be run, and why not at the others; an error instead where it was named."""
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
    return task, tuple(fitting), reasons


class SampleStore:
    """Draws samples, and keeps those of the last tasks for the next method.

    Args:
        draw: Draws those of a task at a length.
    """

    def __init__(self, draw: Callable[[AnyTask, int], Sequence[Any]]) -> None:
        self._draw = draw
        self._held: dict[tuple[str, int], tuple[Sequence[Any], int]] = {}

    def get(self, task: AnyTask, length: int) -> Sequence[Any]:
        """The samples of a task at a length."""
        key = (task.name, length)
        if key not in self._held:
            samples = self._draw(task, length)
            self._held[key] = samples, 4 * length * len(samples)
            while len(self._held) > 1 and sum(size for _, size in self._held.values()) > _KEPT_CHARACTERS:
                del self._held[next(iter(self._held))]
        return self._held[key][0]
