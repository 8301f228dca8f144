"""Full attention: every query sees every token before it, and the cache's window holds everything."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array

from tca_jax.methods.base import UNBOUNDED, Attended, CachePolicy, Heads, Layer, Method, PrefillPolicy
from tca_jax.methods.regions import Selection, causal_pairs
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.causal_attention import causal_attention


@dataclasses.dataclass(frozen=True)
class FullCache(CachePolicy):
    """Every token stays: no block ever leaves the window."""

    block_size = 128
    window = UNBOUNDED
    layers_differ = False

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return 0

    def select(self, *_: Any, **__: Any) -> Selection:
        raise AssertionError("nothing is left of a window that holds everything")


@dataclasses.dataclass(frozen=True)
class FullPrefill(PrefillPolicy):
    """Exact causal attention."""

    layers_differ = False

    def attend(
        self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, selected: Any, backend: Backend
    ) -> Attended:
        return Attended(causal_attention(q, k, v, lengths, backend=backend), causal_pairs(lengths))

    def reads(self, cache: CachePolicy) -> bool:
        return isinstance(cache, FullCache)


def full() -> Method:
    """Exact full attention: the baseline of everything else."""
    return Method("full", FullPrefill(), FullCache())


BASELINE = full()  # what a model runs under until it is given a method, and what the others are compared with
