"""Evaluation: RULER, LongBench-E, recall tasks and loss of a text, by method and protocol."""

from tca_jax.lab.evaluation.method_specs import Builder, MethodSpec, parse_methods
from tca_jax.lab.evaluation.plan import GROUPS, SUITES, TASKS, Plan, make_plan, plan_suite, run_plan
from tca_jax.lab.evaluation.results import Results
from tca_jax.lab.evaluation.sources import Sources

__all__ = ["GROUPS", "SUITES", "TASKS", "Builder", "MethodSpec", "Plan", "Results", "Sources", "make_plan"]
__all__ += ["parse_methods", "plan_suite", "run_plan"]
