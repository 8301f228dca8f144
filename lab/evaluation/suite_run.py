"""Running a suite: its methods and folders checked, its time estimated, its parts one after the other."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tca_jax.lab.benchmarks.progress import Count, counted, duration
from tca_jax.lab.evaluation.estimates import Rate, Rates, devices, measure_rate, num_samples, rate_key, tasks_of
from tca_jax.lab.evaluation.method_specs import Builder, Built
from tca_jax.lab.evaluation.plan import Plan
from tca_jax.lab.evaluation.results import Job, Results
from tca_jax.lab.evaluation.run import config_of, make_methods, run_plan
from tca_jax.lab.evaluation.suite_tables import write_suite_table
from tca_jax.lab.evaluation.suites import Part, Suite, require_same_settings, write_settings

_LINE_SECONDS = 60.0  # between lines of progress in a log


@dataclasses.dataclass(frozen=True)
class Left:
    """A job that is to be done.

    Attributes:
        part: Its part.
        job: The job.
        samples: How many it has.
        seconds: What it will take.
    """

    part: Part
    job: Job
    samples: int
    seconds: float


def run_suite(
    suite: Suite,
    plans: Mapping[Part, Plan],
    builder: Builder,
    folder: Path,
    settings: Mapping[str, Any],
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, list[dict[str, Any]]]:
    """Runs what a suite's folder does not have yet.

    Before the first job stands an estimate of the time, from one batch of each method, length and protocol. Results go
    where `run_plan` puts them, in a folder for each part; the suite's table is written after each part, and when a run
    is interrupted.

    Args:
        suite: The suite.
        plans: From `plan_suite`.
        builder: The model, and what its methods need.
        folder: The suite's.
        settings: From `suite_settings`.
        tell: Told the estimate, in lines.

    Returns:
        All records, by the name of their part.

    Raises:
        ValueError: as `require_same_settings`; as `run_plan`, for any part, before the first job.
    """
    require_same_settings(folder, suite, settings)
    results = {part: Results(folder / part.name) for part in plans}
    built = {part: make_methods(plan, builder, results[part]) for part, plan in plans.items()}
    write_settings(folder, settings)  # nothing is refused from here on
    for part, plan in plans.items():
        results[part].open(config_of(plan, builder, built[part]))
    left = _estimate(plans, builder, Rates(folder, max(plan.batch for plan in plans.values())), results, built)
    for line in estimate_lines(left):
        tell(line)
    total, done = sum(each.seconds for each in left), 0.0
    with counted("seconds of the estimate", _LINE_SECONDS) as count:
        for part, plan in plans.items():
            own = [each for each in left if each.part == part]
            try:
                run_plan(plan, builder, results[part], _progress(own, plan.samples, done, total, count))
            finally:  # an interrupted run shows what it has
                write_suite_table(suite, plans, folder)
            done += sum(each.seconds for each in own)
    return {part.name: results[part].read_all() for part in plans}


def _estimate(
    plans: Mapping[Part, Plan],
    builder: Builder,
    rates: Rates,
    results: Mapping[Part, Results],
    built: Mapping[Part, Mapping[str, Built]],
) -> list[Left]:
    """All jobs that are left, with their times; measures what no earlier run has measured."""
    jobs = [(part, job) for part, plan in plans.items() for job in plan.jobs() if not results[part].has(job)]
    first: dict[str, tuple[Part, Job]] = {}
    for part, job in jobs:
        first.setdefault(rate_key(part, job), (part, job))
    found: dict[str, Rate] = {}
    with counted("measured batches", _LINE_SECONDS) as count:
        for place, (key, (part, job)) in enumerate(first.items()):
            count(place, len(first), key)
            found[key] = rates.get(key, functools.partial(measure_rate, plans[part], builder, built[part], job))
    left = []
    for part, job in jobs:
        task = tasks_of(plans[part])[job.task]
        samples = num_samples(plans[part], task)
        left.append(Left(part, job, samples, found[rate_key(part, job)].seconds(samples, task.new_tokens)))
    return left


def estimate_lines(left: list[Left]) -> list[str]:
    """The estimate in words: all of it, then each part and length."""
    if not left:
        return ["estimate: nothing is left to do"]
    samples, seconds = sum(each.samples for each in left), sum(each.seconds for each in left)
    lines = [
        f"estimate: about {duration(seconds)} for {samples:,} samples, from one measured batch of each method, length "
        f"and protocol on {devices()}; answers are counted at their longest, compilation is not"
    ]
    for part, length in dict.fromkeys((each.part, each.job.length) for each in left):
        some = [each for each in left if (each.part, each.job.length) == (part, length)]
        per_method = {
            method: sum(each.seconds for each in some if each.job.method == method)
            for method in dict.fromkeys(each.job.method for each in some)
        }
        methods = ", ".join(f"{method} {duration(seconds)}" for method, seconds in per_method.items())
        lines.append(f"  {part.name}, {length:,} tokens: {duration(sum(per_method.values()))} ({methods})")
    return lines


def _progress(
    own: list[Left], samples: int, before: float, total: float, count: Count
) -> Callable[[Job, int, int], None]:
    """From `run_plan`'s count of samples, `samples` a job, to seconds of the estimate: those of a long prompt are
    more."""
    places = {each.job: place for place, each in enumerate(own)}

    def report(job: Job, done: int, _: int) -> None:
        place = places[job]
        share = min(1.0, (done - samples * place) / own[place].samples)
        seconds = before + sum(each.seconds for each in own[:place]) + share * own[place].seconds
        shown = f"{own[place].part.name}, {job.method}: {job.task}, {job.length:,}"
        last = place == len(own) - 1 and share == 1
        count(_whole(before + sum(each.seconds for each in own)) if last else int(seconds), _whole(total), shown)

    return report


def _whole(seconds: float) -> int:
    return max(1, round(seconds))
