"""Running a plan: every method, task, length and protocol that the results folder does not have yet."""

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

from tca_jax.engine.lm import LM, stored_entry
from tca_jax.engine.mesh import mesh_entry
from tca_jax.lab.equal_bytes import CallSizes
from tca_jax.lab.evaluation.answering import Answers, answer, call_sizes
from tca_jax.lab.evaluation.method_specs import Builder, Built
from tca_jax.lab.evaluation.pictures import draw_pictures
from tca_jax.lab.evaluation.plan import BYTES_OF, AnyTask, Plan, SampleStore
from tca_jax.lab.evaluation.results import FORMAT, Job, Results
from tca_jax.lab.evaluation.samples import Mark, Sample, Task
from tca_jax.lab.evaluation.tables import write_table
from tca_jax.lab.evaluation.text_tasks import Reading, TextTask
from tca_jax.lab.evaluation.tuning import tune, tuning_entry
from tca_jax.methods.registry import describe_method

#: Called as report(job, done, total): samples that are done, of all that were to be done when the run began.
Report = Callable[[Job, int, int], None]


def run_plan(
    plan: Plan, builder: Builder, results: Results, report: Report = lambda job, done, total: None
) -> list[dict[str, Any]]:
    """Runs what is not in the folder yet; writes each task when it is finished, and the table and pictures.

    Args:
        plan: What to run.
        builder: The model, and what its methods need.
        results: Where results go. A run that was interrupted goes on where it was.
        report: Told of every call.

    Returns:
        All records of the folder.

    Raises:
        ValueError: the folder is of another configuration, or a method cannot be made; nothing was compiled then.
    """
    if plan.tuning is not None:
        assert plan.kv_share is not None
        _open(plan, builder, results)
        results.open(config_of(plan, builder, {}))
        methods, builder = tune(plan.tuning, plan.methods, builder, results, kv_share=plan.kv_share, seed=plan.seed)
        plan = dataclasses.replace(plan, methods=methods)
    built = make_methods(plan, builder, results)
    results.open(config_of(plan, builder, built))
    tasks = {task.name: task for task, _ in plan.tasks}
    store = SampleStore(lambda task, length: task.draw(plan.drawing(builder.lm, length)))
    jobs = [job for job in plan.jobs() if not results.has(job)]
    done, total = 0, plan.samples * len(jobs)
    specs = {spec.label: spec for spec in plan.methods}

    @functools.lru_cache
    def within(label: str, sizes: CallSizes) -> Built:
        assert plan.kv_share is not None
        return builder.build_within(specs[label], plan.kv_share, sizes)

    for job in jobs:
        before, task = done, tasks[job.task]
        samples = store.get(task, job.length)
        method = built[job.method]
        if plan.kv_share is not None:
            method = within(job.method, job_sizes(builder.lm, task, samples, job, plan.bytes_of))

        def advance(count: int, job: Job = job) -> None:
            nonlocal done
            done += count
            report(job, done, total)

        record = _run_job(method, task, job, samples, plan, advance)
        done = before + plan.samples  # a file may hold fewer
        results.write(job, {**record, **_setting(plan, task, method)})
        report(job, done, total)
        write_table(results, plan.skipped)
    records = results.read_all()
    write_table(results, plan.skipped)
    draw_pictures(records, results.folder, results.read_tuning())
    return records


def make_methods(plan: Plan, builder: Builder, results: Results) -> dict[str, Built]:
    """The methods of a plan, for a folder that is of the same configuration or new; writes nothing.

    Raises:
        ValueError: as `run_plan`.
    """
    _open(plan, builder, results)
    return {spec.label: builder.build(spec) for spec in plan.methods}


def _open(plan: Plan, builder: Builder, results: Results) -> None:
    """Has the builder know what the folder says, before a method looks at text, which compiles."""
    held = results.require_same(config_of(plan, builder, {}))
    builder.remember(held.get("measured", {}))


def config_of(plan: Plan, builder: Builder, built: Mapping[str, Built]) -> dict[str, Any]:
    """What the results depend on."""
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


def job_sizes(lm: LM, task: AnyTask, samples: Sequence[Any], job: Job, bytes_of: str) -> CallSizes:
    """What the bytes of a job's calls depend on; of the prompt alone there is no room for what follows it."""
    if isinstance(task, TextTask):
        return task.call_sizes(job.length)
    sizes = call_sizes(lm, task, samples, job.protocol)
    return CallSizes(sizes.prompt_tokens) if bytes_of == "prompt" else sizes


def _setting(plan: Plan, task: AnyTask, method: Built) -> dict[str, Any]:
    """What a reader of the figures must know."""
    origins = {name: plan.sources.origin(name) for name in task.needs}
    return {
        "budget": method.budget,
        "own_budget": method.own_budget,
        "substitutes": {name: origin.label for name, origin in origins.items() if origin.substitute},
        "device": jax.local_devices()[0].device_kind,
        "library_version": version("tca-jax"),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _run_job(
    method: Built, task: AnyTask, job: Job, samples: Sequence[Any], plan: Plan, advance: Callable[[int], None]
) -> dict[str, Any]:
    if isinstance(task, TextTask):
        return _text_record(task, task.read(method.lm, samples, advance))
    answers = answer(method.lm, task, samples, job.protocol, batch=plan.batch, report=advance)
    marks = [task.score(*each, job.protocol) for each in zip(samples, answers.texts, strict=True)]
    return _record(task, samples, answers, marks)


def _record(task: Task, samples: Sequence[Sample], answers: Answers, marks: Sequence[Mark]) -> dict[str, Any]:
    scores = [mark.score for mark in marks]
    groups = {} if task.groups is None else dict(task.groups(samples, scores))
    costs = {name: value for name, value in vars(answers).items() if not isinstance(value, list)}
    return {
        "suite": task.suite,
        "metric": "%",
        "score": float(np.mean(list(groups.values()))) if groups else 100 * float(np.mean(scores)),
        "groups": groups,
        **costs,
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


def _text_record(task: TextTask, reading: Reading) -> dict[str, Any]:
    return {
        "suite": task.suite,
        "metric": task.metric,
        "score": reading.values[task.metric],
        "values": reading.values,
        "kv_cache_bytes": reading.kv_cache_bytes,
        "full_kv_cache_bytes": reading.full_kv_cache_bytes,
        "attended_share": reading.attended_share,
        "kept_share": reading.kept_share,
        "prefill_seconds": reading.prefill_seconds,
        "samples": reading.samples,
    }
