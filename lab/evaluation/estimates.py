"""How long an evaluation will take: from one batch of each method, length and protocol, measured before it begins."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tca_jax.lab.evaluation.answering import answer, most_new_tokens
from tca_jax.lab.evaluation.longbench.tasks import read_records
from tca_jax.lab.evaluation.method_specs import Builder, Built
from tca_jax.lab.evaluation.plan import Plan
from tca_jax.lab.evaluation.results import Job, write_json
from tca_jax.lab.evaluation.run import job_sizes
from tca_jax.lab.evaluation.samples import Task
from tca_jax.lab.evaluation.suites import Part
from tca_jax.lab.recall.protocols import READ_FIRST
from tca_jax.models.json_object import read_json_object

RATES = "rates.json"


@dataclasses.dataclass(frozen=True)
class Rate:
    """What one batch took, without compilation.

    Attributes:
        batch: Prompts in it.
        draw_seconds: Of making a sample.
        prompt_seconds: Of a prompt, from its text to the first new token.
        step_seconds: Of a further token of the whole batch.
        extra_tokens: Of an answer, beyond the task's own.
    """

    batch: int
    draw_seconds: float
    prompt_seconds: float
    step_seconds: float
    extra_tokens: int

    def seconds(self, samples: int, new_tokens: int) -> float:
        """Of a task: all answers are counted at their longest, so it may end earlier."""
        batches = -(-samples // self.batch)
        steps = batches * (new_tokens + self.extra_tokens - 1) * self.step_seconds
        return samples * (self.draw_seconds + self.prompt_seconds) + steps


class Rates:
    """The rates of a suite's folder, which are measured where it does not have them.

    Args:
        folder: The suite's.
        batch: Most prompts in a call, on which rates depend.
    """

    def __init__(self, folder: Path, batch: int) -> None:
        self._path = folder / RATES
        self._made_with = {"devices": devices(), "batch": batch}
        held = read_json_object(self._path) if self._path.exists() else {}
        same = held.get("made_with") == self._made_with  # another machine has other rates
        self._found: dict[str, dict[str, Any]] = held.get("rates", {}) if same else {}

    def get(self, key: str, measure: Callable[[], Rate]) -> Rate:
        """The rate of jobs of a key, measured and written where there is none."""
        if key not in self._found:
            self._found[key] = dataclasses.asdict(measure())
            write_json(self._path, {"made_with": self._made_with, "rates": self._found})
        return Rate(**self._found[key])


def rate_key(part: Part, job: Job) -> str:
    """Jobs of one key have one rate: RULER's tasks have prompts of one length, data sets do not."""
    own = (job.task,) if part.tasks == "longbench" else ()
    return "/".join((part.name, job.method, f"{job.length}", job.protocol, *own))


def devices() -> str:
    """The devices of this process, in words."""
    return f"{jax.device_count()} x {jax.local_devices()[0].device_kind}"


def measure_rate(plan: Plan, builder: Builder, built: Mapping[str, Built], job: Job) -> Rate:
    """Asks one batch of a job's samples; its programs are those that the job runs."""
    lm, task = builder.lm, tasks_of(plan)[job.task]
    count = min(plan.batch, num_samples(plan, task))

    def draw(number: int) -> tuple[Sequence[Any], float]:
        began = time.perf_counter()
        drawn = task.draw(dataclasses.replace(plan.drawing(lm, job.length), count=number))
        return drawn, time.perf_counter() - began

    draw(1)  # reads the files
    _, of_one = draw(1)  # with the search for a haystack's size
    samples, of_all = draw(count)
    method = built[job.method]
    if plan.kv_share is not None:
        spec = next(spec for spec in plan.methods if spec.label == job.method)
        sizes = job_sizes(lm, task, samples, job, plan.bytes_of)
        method = builder.build_within(spec, plan.kv_share, sizes)
    answers = answer(method.lm, task, samples, job.protocol, batch=plan.batch)
    began = time.perf_counter()
    for prompt in (sample.prompts[job.protocol] for sample in samples):
        prompt.encode_apart(lm) if job.protocol in READ_FIRST else prompt.encode(lm)
    encoding = (time.perf_counter() - began) / count
    return Rate(
        batch=answers.batch,
        draw_seconds=max(0.0, of_all - of_one) / (count - 1) if count > 1 else of_one,
        prompt_seconds=encoding + answers.prefill_seconds,
        step_seconds=answers.seconds_per_token,
        extra_tokens=most_new_tokens(lm, task, samples, job.protocol) - task.new_tokens,
    )


def tasks_of(plan: Plan) -> dict[str, Task]:
    """The tasks of a suite's plan, which all ask questions, by name."""
    return {task.name: task for task, _ in plan.tasks if isinstance(task, Task)}


def num_samples(plan: Plan, task: Task) -> int:
    """Samples of a task: a data set may have fewer than were asked for."""
    if task.suite != "longbench":
        return plan.samples
    return len(read_records(plan.sources.longbench, task.name)[: plan.samples])
