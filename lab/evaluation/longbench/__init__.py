"""LongBench-E (arXiv 2308.14508): its thirteen English data sets from a local folder."""

from __future__ import annotations

from tca_jax.lab.evaluation.longbench.tasks import TASKS, require_libraries

__all__ = ["TASKS", "require_libraries"]
