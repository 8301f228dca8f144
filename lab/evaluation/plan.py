"""Evaluations: tasks, lengths and protocols, checked before a model is loaded, and their runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax

from tca_jax.engine.prompts import Encoder
from tca_jax.errors import check_integer, check_number, require, require_name
from tca_jax.lab.benchmarks.models import mesh_entry, stored_entry
from tca_jax.lab.evaluation import recall_tasks, ruler, text_tasks
from tca_jax.lab.evaluation.method_specs import Builder, MethodSpec
from tca_jax.lab.evaluation.results import FORMAT, TUNING, Job, Results
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing, Task
from tca_jax.lab.evaluation.sources import Sources, digest
from tca_jax.lab.evaluation.text_tasks import TextTask
from tca_jax.lab.evaluation.tuning import Tuning, tune
from tca_jax.lab.recall.tasks import EVALUATION_PROTOCOLS
from tca_jax.methods.registry import describe_method

AnyTask = Task | TextTask

#: Names of several tasks.
GROUPS: dict[str, tuple[AnyTask, ...]] = {"ruler": ruler.TASKS, "recall": recall_tasks.TASKS}
TASKS: dict[str, AnyTask] = {task.name: task for group in (*GROUPS.values(), text_tasks.TASKS) for task in group}


@dataclasses.dataclass(frozen=True)
class Plan:
    """An evaluation."""

    methods: tuple[MethodSpec, ...]
    protocols: tuple[str, ...]  # of tasks that ask questions
    samples: int  # of each task and length
    seed: int
    sources: Sources
    kv_share: float | None  # of full attention's bytes of a prompt, for every method; None: methods as they are
    batch: int  # most prompts in a call
    tuning: Tuning | None = None
    drawn: Mapping[tuple[str, int], Sequence[Any]] = dataclasses.field(default_factory=dict)  # by task and length
    skipped: tuple[str, ...] = ()  # reasons why tasks are left out

    def jobs(self) -> list[Job]:
        """All entries; those of a length and a method, which share programs, are adjacent."""
        return [
            Job(spec.label, task, length, protocol)
            for shared in sorted({length for _, length in self.drawn})
            for spec in self.methods
            for task, length in self.drawn
            if length == shared
            for protocol in TASKS[task].protocols or self.protocols
        ]


def make_plan(
    lm: Encoder,  # the model, or its checkpoint
    methods: tuple[MethodSpec, ...],
    tasks: Sequence[str],  # names of `TASKS` and `GROUPS`
    lengths: Sequence[int],  # tokens of a prompt with its answer
    protocols: Sequence[str],
    **settings: Any,  # other fields of `Plan`
) -> Plan:
    """Checks an evaluation without the model's weights, and draws its samples; messages name options of the command.

    A named task must run at every length; of a group, tasks without a file or a fitting length are left out.
    """
    plan = Plan(methods, tuple(protocols), **settings)
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
    require(len(set(lengths)) == len(lengths) > 0, f"--lengths {list(lengths)}: must be one or more, each once")
    for length in lengths:
        within = 1 <= length <= lm.config.max_context
        require(within, f"--lengths {length}: must lie in [1, {lm.config.max_context}], positions of {lm.name}")
    require(lm.tokenizer is not None, f"{lm.name} has no tokenizer: tasks are text")
    drawn, skipped = dict[tuple[str, int], Sequence[Any]](), list[str]()
    for name in tasks:
        entries = list(itertools.product(GROUPS.get(name) or (TASKS[name],), lengths))
        reasons = list[DoesNotFit]()
        for task, length in entries:
            try:
                drawn[task.name, length] = task.draw(Drawing(lm, plan.sources, length, plan.samples, plan.seed))
            except DoesNotFit as error:
                reasons.append(error)
        if reasons and (name in TASKS or len(reasons) == len(entries)):
            raise reasons[0]
        skipped += map(str, reasons)
    return dataclasses.replace(plan, drawn=drawn, skipped=tuple(dict.fromkeys(skipped)))


#: report(job, done, total): samples done, of those to do when the run began.
Report = Callable[[Job, int, int], None]


def run_plan(
    plan: Plan, builder: Builder, results: Results, report: Report = lambda job, done, total: None
) -> list[dict[str, Any]]:
    """Runs the jobs that the folder lacks, writes each and the table; returns all records of the folder."""
    built = {spec.label: builder.build(spec) for spec in plan.methods}
    results.open(_config(plan, builder))
    if plan.tuning is not None:
        plan = dataclasses.replace(plan, methods=tune(plan.tuning, plan.methods, builder, results.folder / TUNING))
        built = {spec.label: builder.build(spec) for spec in plan.methods}
        results.open(_config(plan, builder))
    specs = {spec.label: spec for spec in plan.methods}
    jobs = [job for job in plan.jobs() if not results.has(job)]
    done, total = 0, sum(len(plan.drawn[job.task, job.length]) for job in jobs)

    for job in jobs:
        task, samples, method = TASKS[job.task], plan.drawn[job.task, job.length], built[job.method]
        if plan.kv_share is not None:
            tokens = task.prompt_tokens(builder.lm, samples, job.protocol)
            method = builder.build_within(specs[job.method], plan.kv_share, tokens)

        def advance(count: int, job: Job = job) -> None:
            nonlocal done
            done += count
            report(job, done, total)

        measured = task.measure(method.lm, samples, job.protocol, plan.batch, advance)
        origins = {name: plan.sources.origin(name) for name in task.needs}
        record = {
            "suite": task.suite,
            **measured,
            "budget": method.budget,
            "own_budget": method.own_budget,
            "substitutes": {name: origin.label for name, origin in origins.items() if origin.substitute},
            "device": jax.local_devices()[0].device_kind,
            "library_version": version("tca-jax"),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        results.write(job, record)
        results.write_table(plan.skipped)
    results.write_table(plan.skipped)
    return results.read_all()


def _config(plan: Plan, builder: Builder) -> dict[str, Any]:
    """Settings that the results depend on."""
    lm, names = builder.lm, dict.fromkeys(name for task, _ in plan.drawn for name in TASKS[task].needs)
    origins, profiles = {name: plan.sources.origin(name) for name in names}, (builder.profile, builder.paper)
    return {
        "format": FORMAT,
        "model": lm.name,
        "fingerprint": lm.fingerprint,
        "dtype": lm.dtype.name,
        **stored_entry(lm),
        **mesh_entry(lm),
        "seed": plan.seed,
        "samples": plan.samples,
        "kv_share": plan.kv_share,
        **({} if plan.tuning is None else {"trials": plan.tuning.trials}),
        "profiles": [each and digest(describe_method(each.method()).encode()) for each in profiles],
        "texts": digest(json.dumps([list(map(int, ids)) for ids in builder.texts()]).encode()),
        "methods": [spec.label for spec in plan.methods],
        "sources": {name: dataclasses.asdict(origin) for name, origin in origins.items()},
    }
