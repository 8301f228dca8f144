"""Evaluation: RULER, recall tasks and loss of a text, by method and protocol."""

from tca_jax.lab.evaluation.method_specs import Builder, MethodSpec, parse_methods
from tca_jax.lab.evaluation.plan import Plan, make_plan, run_plan
from tca_jax.lab.evaluation.results import Results
from tca_jax.lab.evaluation.sources import Sources

__all__ = ["Builder", "MethodSpec", "Plan", "Results", "Sources", "make_plan", "parse_methods", "run_plan"]
