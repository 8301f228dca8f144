"""Uniform budgets: TCA's selection with one candidate (Eq. 4) for every KV head. Needs no calibration."""

from __future__ import annotations

import dataclasses

from tca_jax.methods.base import Method
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.tca import tca


def uniform(candidate: int = 4, config: TCAConfig | None = None) -> Method:
    """Row `candidate` of `candidate_budgets` for every KV head: 0 the sparsest, `num_candidates` keeps every token."""
    return dataclasses.replace(tca(candidate, config), name="uniform")
