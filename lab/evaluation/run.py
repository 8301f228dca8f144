"""Runs a plan: every method, task, length and protocol that the results folder lacks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from tca_jax.engine.lm import stored_entry
from tca_jax.engine.mesh import mesh_entry
from tca_jax.lab.equal_bytes import CallSizes
from tca_jax.lab.evaluation.answering import answer, call_sizes
from tca_jax.lab.evaluation.method_specs import Builder, Built
from tca_jax.lab.evaluation.plan import BYTES_OF, AnyTask, Plan
from tca_jax.lab.evaluation.results import FORMAT, Job, Results
from tca_jax.lab.evaluation.samples import Task
from tca_jax.lab.evaluation.tables import write_table
from tca_jax.lab.evaluation.text_tasks import TextTask
from tca_jax.lab.evaluation.tuning import tune, tuning_entry
from tca_jax.methods.registry import describe_method

#: report(job, done, total): samples done, of those to do when the run began.
Report = Callable[[Job, int, int], None]


def run_plan(
    plan: Plan, builder: Builder, results: Results, report: Report = lambda job, done, total: None
) -> list[dict[str, Any]]:
    """Runs the jobs that the folder lacks; writes each when it is finished, and the table.

    Args:
        plan: Jobs.
        builder: The model, and makes its methods.
        results: Folder of the results. An interrupted run continues.
        report: Called after every call.

    Returns:
        All records of the folder.

    Raises:
        ValueError: the folder has another configuration, or a method cannot be made; nothing was compiled then.
    """
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
    total = plan.samples * len(jobs)

    @functools.lru_cache(maxsize=len(tasks))  # the methods of a length ask the same samples
    def draw(name: str, length: int) -> Sequence[Any]:
        return tasks[name].draw(plan.drawing(builder.lm, length))

    @functools.lru_cache
    def within(label: str, sizes: CallSizes) -> Built:
        assert plan.kv_share is not None
        return builder.build_within(specs[label], plan.kv_share, sizes)

    for number, job in enumerate(jobs):
        task, method, done = tasks[job.task], built[job.method], plan.samples * number
        samples = draw(job.task, job.length)
        if plan.kv_share is not None:
            method = within(job.method, _sizes(builder, task, samples, job, plan.bytes_of))

        def advance(count: int, job: Job = job) -> None:
            nonlocal done
            done += count
            report(job, done, total)

        results.write(job, _measure(method, task, job, samples, plan, advance))
        report(job, plan.samples * (number + 1), total)  # a file may hold fewer samples
        write_table(results, plan.skipped)
    write_table(results, plan.skipped)
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
        "methods": {label: _digest(describe_method(each.lm.method)) for label, each in built.items()},
        "measured": builder.measured,
        "sources": {
            name: {"sha256": origin.digest, "label": origin.label, "substitute": origin.substitute}
            for name, origin in plan.origins().items()
        },
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sizes(builder: Builder, task: AnyTask, samples: Sequence[Any], job: Job, bytes_of: str) -> CallSizes:
    """Sizes of the caches that `kv_share` counts."""
    if isinstance(task, TextTask):
        return task.call_sizes(job.length)
    sizes = call_sizes(builder.lm, task, samples, job.protocol)
    return sizes if bytes_of == BYTES_OF[0] else CallSizes(sizes.prompt_tokens)


def _measure(
    method: Built, task: AnyTask, job: Job, samples: Sequence[Any], plan: Plan, advance: Callable[[int], None]
) -> dict[str, Any]:
    """The record of a job."""
    origins = {name: plan.sources.origin(name) for name in task.needs}
    if isinstance(task, TextTask):
        reading = vars(task.read(method.lm, samples, advance))
        record = {"suite": task.suite, "metric": task.metric, "score": reading["values"][task.metric], **reading}
    else:
        record = _ask(method, task, job, samples, plan.batch, advance)
    return {
        **record,
        "budget": method.budget,
        "own_budget": method.own_budget,
        "substitutes": {name: origin.label for name, origin in origins.items() if origin.substitute},
        "device": jax.local_devices()[0].device_kind,
        "library_version": version("tca-jax"),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _ask(
    method: Built, task: Task, job: Job, samples: Sequence[Any], batch: int, advance: Callable[[int], None]
) -> dict[str, Any]:
    answers = answer(method.lm, task, samples, job.protocol, batch=batch, report=advance)
    marks = [task.score(*each, job.protocol) for each in zip(samples, answers.texts, strict=True)]
    scores = [mark.score for mark in marks]
    groups = {} if task.groups is None else dict(task.groups(samples, scores))
    return {
        "suite": task.suite,
        "metric": "%",
        "score": float(np.mean(list(groups.values()))) if groups else 100 * float(np.mean(scores)),
        "groups": groups,
        **{name: value for name, value in vars(answers).items() if not isinstance(value, list)},
        "samples": [
            {
                "prediction": text,
                "references": list(sample.references),
                "score": mark.score,
                "depths": list(sample.depths),
                "hits": list(mark.hits),
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens,
            }
            for sample, text, mark, prompt_tokens, new_tokens in zip(
                samples, answers.texts, marks, answers.prompt_tokens, answers.new_tokens, strict=True
            )
        ],
    }
