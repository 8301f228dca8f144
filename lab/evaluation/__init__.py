"""Evaluation: RULER, LongBench-E, recall tasks, loss and agreement, under any methods and three protocols."""

from __future__ import annotations

from tca_jax.lab.evaluation.method_specs import Builder, MethodSpec, parse_methods
from tca_jax.lab.evaluation.plan import SUITES, TASKS, Plan, make_plan
from tca_jax.lab.evaluation.results import Results
from tca_jax.lab.evaluation.run import run_plan
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.lab.recall.protocols import PROTOCOLS

__all__ = [
    "PROTOCOLS",
    "SUITES",
    "TASKS",
    "Builder",
    "MethodSpec",
    "Plan",
    "Results",
    "Sources",
    "make_plan",
    "parse_methods",
    "run_plan",
]
