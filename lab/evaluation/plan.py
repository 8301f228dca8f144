"""Evaluations: tasks, lengths, protocols and suites, checked before a model is loaded, and their runs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import jax

from tca_jax.engine.lm import stored_entry
from tca_jax.engine.mesh import mesh_entry
from tca_jax.engine.prompts import Encoder
from tca_jax.errors import check_integer, check_number, require, require_name
from tca_jax.lab.equal_bytes import CallSizes
from tca_jax.lab.evaluation import longbench, recall_tasks, ruler, text_tasks
from tca_jax.lab.evaluation.method_specs import Builder, Built, MethodSpec
from tca_jax.lab.evaluation.results import FORMAT, Job, Results
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing, Task
from tca_jax.lab.evaluation.sources import Origin, Sources
from tca_jax.lab.evaluation.text_tasks import TextTask
from tca_jax.lab.evaluation.tuning import Tuning, tune, tuning_entry
from tca_jax.lab.recall.protocols import EVALUATION_PROTOCOLS, LATE_PREFIX
from tca_jax.methods.full import BASELINE
from tca_jax.methods.registry import describe_method

AnyTask = Task | TextTask

#: Names of several tasks.
GROUPS: dict[str, tuple[AnyTask, ...]] = {
    "ruler": ruler.TASKS,
    "recall": recall_tasks.TASKS,
    "longbench": longbench.TASKS,
    "kvpress": ruler.KVPRESS_TASKS,
}
TASKS: dict[str, AnyTask] = {task.name: task for group in (*GROUPS.values(), text_tasks.TASKS) for task in group}
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
SUITES = {
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
        return [
            Job(spec.label, task.name, length, protocol)
            for length in sorted({length for _, of_task in self.tasks for length in of_task})
            for spec in self.methods
            for task, of_task in self.tasks
            if length in of_task
            for protocol in task.protocols or self.protocols
        ]

    def drawing(self, lm: Encoder, length: int, *, only_check: bool = False) -> Drawing:
        """Settings of samples of a length."""
        return Drawing(lm, self.sources, length, self.samples, self.seed, only_check)

    def origins(self) -> dict[str, Origin]:
        """Origins of the samples by source."""
        return {name: self.sources.origin(name) for task, _ in self.tasks for name in task.needs}


def make_plan(
    lm: Encoder,  # the model, or its checkpoint
    methods: tuple[MethodSpec, ...],
    tasks: Sequence[str],  # names of `TASKS` and `GROUPS`
    lengths: Sequence[int],  # tokens of a prompt with its answer
    protocols: Sequence[str],
    **settings: Any,  # the other fields of `Plan`
) -> Plan:
    """Checks an evaluation without the model's weights; messages name options of the command.

    A named task must run at every length; of a group, tasks without a file or a fitting length are left out.
    """
    plan = Plan(methods, (), tuple(protocols), **settings)
    for option, given, known in (
        ("--protocols", protocols, EVALUATION_PROTOCOLS),
        ("--tasks", tasks, (*GROUPS, *TASKS)),
    ):
        require(given, f"{option} is empty: must name one or more of {list(known)}")
        for name in given:
            require_name(f"{option} {name}", name, known)
            require(given.count(name) == 1, f"{option} names {name} twice")
    check_integer("--samples", plan.samples, at_least=1)
    check_integer("--batch", plan.batch, at_least=1)
    if plan.kv_share is not None:
        check_number("--kv-share", plan.kv_share, above=0, at_most=1)
    require_name(f"--bytes-of {plan.bytes_of}", plan.bytes_of, BYTES_OF)
    prompt_without_share = plan.kv_share is None and plan.bytes_of != BYTES_OF[0]
    require(not prompt_without_share, f"--bytes-of {plan.bytes_of}: needs --kv-share")
    require(len(set(lengths)) == len(lengths) > 0, f"--lengths {list(lengths)}: must be one or more, each once")
    for length in lengths:
        within = 1 <= length <= lm.config.max_context
        require(within, f"--lengths {length}: must lie in [1, {lm.config.max_context}], positions of {lm.name}")
    require(lm.tokenizer is not None, f"{lm.name} has no tokenizer: tasks are text")
    chosen: dict[AnyTask, tuple[int, ...]] = {}
    skipped: list[str] = []
    for name in tasks:
        group, reasons = GROUPS.get(name) or (TASKS[name],), list[DoesNotFit]()
        for task in group:
            missing = [text for need in task.needs if (text := plan.sources.missing(need.partition("/")[0]))]
            reasons += [DoesNotFit(f"{task.name}: {text}") for text in missing[:1]]
            fitting = []
            for length in () if missing else lengths:
                try:
                    task.draw(plan.drawing(lm, length, only_check=True))
                    fitting.append(length)
                except DoesNotFit as error:
                    reasons.append(error)
            chosen |= {task: tuple(fitting)} if fitting else {}
        if name in TASKS and reasons:
            raise reasons[0]
        nearest = min(reasons, key=lambda reason: reason.least or math.inf, default=None)
        require(any(task in chosen for task in group), f"--tasks {name}: no task of it can be run: {nearest}")
        skipped += map(str, reasons)
    if any(task.suite == "longbench" for task in chosen):
        longbench.require_libraries()
    return dataclasses.replace(plan, tasks=tuple(chosen.items()), skipped=tuple(skipped))


def plan_suite(
    name: str, lm: Encoder, methods: tuple[MethodSpec, ...], *, lengths: Sequence[int], samples: int, **settings: Any
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
                kv_share=part.kv_share,
                bytes_of=BYTES_OF[0] if part.kv_share is None else "prompt",
                **settings,
            )
    return plans


#: report(job, done, total): samples done, of those to do when the run began.
Report = Callable[[Job, int, int], None]


def run_plan(
    plan: Plan, builder: Builder, results: Results, report: Report = lambda job, done, total: None
) -> list[dict[str, Any]]:
    """Runs the jobs that the folder lacks, writes each and the table; returns all records of the folder."""
    held = results.require_same(_config(plan, builder, {}))
    builder.remember(held.get("measured", {}))
    if plan.tuning is not None:
        assert plan.kv_share is not None
        results.open(_config(plan, builder, {}))
        methods, builder = tune(plan.tuning, plan.methods, builder, results, kv_share=plan.kv_share, seed=plan.seed)
        plan = dataclasses.replace(plan, methods=methods)
    built = {spec.label: builder.build(spec) for spec in plan.methods}
    results.open(_config(plan, builder, built))
    tasks = {task.name: task for task, _ in plan.tasks}
    specs = {spec.label: spec for spec in plan.methods}
    jobs = [job for job in plan.jobs() if not results.has(job)]

    @functools.lru_cache(maxsize=len(tasks))  # the methods of a length ask the same samples
    def draw(name: str, length: int) -> Sequence[Any]:
        return tasks[name].draw(plan.drawing(builder.lm, length))

    @functools.lru_cache
    def within(label: str, sizes: CallSizes) -> Built:
        assert plan.kv_share is not None
        return builder.build_within(specs[label], plan.kv_share, sizes)

    for number, job in enumerate(jobs):
        task, method = tasks[job.task], built[job.method]
        samples = draw(job.task, job.length)
        if plan.kv_share is not None:
            sizes = task.call_sizes(builder.lm, samples, job.protocol)
            method = within(job.method, sizes if plan.bytes_of == BYTES_OF[0] else CallSizes(sizes.prompt_tokens))
        done = plan.samples * number

        def advance(count: int, job: Job = job) -> None:
            nonlocal done
            done += count
            report(job, done, plan.samples * len(jobs))

        record = task.measure(method.lm, samples, job.protocol, plan.batch, advance)
        origins = {name: plan.sources.origin(name) for name in task.needs}
        results.write(
            job,
            {
                "suite": task.suite,
                **record,
                "budget": method.budget,
                "own_budget": method.own_budget,
                "substitutes": {name: origin.label for name, origin in origins.items() if origin.substitute},
                "device": jax.local_devices()[0].device_kind,
                "library_version": version("tca-jax"),
                "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        )
        advance(plan.samples * (number + 1) - done)  # a file may hold fewer samples
        results.write_table(plan.skipped)
    results.write_table(plan.skipped)
    return results.read_all()


def _config(plan: Plan, builder: Builder, built: Mapping[str, Built]) -> dict[str, Any]:
    """Settings that the results depend on."""
    lm = builder.lm
    return {
        "format": FORMAT,
        "model": lm.name,
        "fingerprint": lm.fingerprint,
        "dtype": lm.dtype.name,
        **stored_entry(lm),
        **mesh_entry(lm.mesh),
        "seed": plan.seed,
        "samples": plan.samples,
        "kv_share": plan.kv_share,
        **({} if plan.bytes_of == BYTES_OF[0] else {"bytes_of": plan.bytes_of}),
        **({} if plan.seconds else {"seconds": False}),
        **({} if plan.tuning is None else {"tuning": tuning_entry(plan.tuning, builder)}),
        "methods": {
            label: hashlib.sha256(describe_method(each.lm.method).encode()).hexdigest() for label, each in built.items()
        },
        "measured": builder.measured,
        "sources": {
            name: {"sha256": origin.digest, "label": origin.label, "substitute": origin.substitute}
            for name, origin in plan.origins().items()
        },
    }
