"""Sparse prefill: queries attend to their window and to the selection of a cache policy left of it (Eq. 3)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array

from tca_jax.methods.base import Attended, CachePolicy, Frequencies, Heads, Layer, PrefillPolicy, Wording, compact
from tca_jax.methods.regions import Selected, causal_pairs, selected_pairs
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.prefill_attention import prefill_attention


@dataclasses.dataclass(frozen=True)
class SparsePrefill(PrefillPolicy):
    """Attention over the window and a cache policy's selection (Eq. 3)."""

    selector: CachePolicy  # the cache policy that selects: the method's own, or another one

    @property
    def layers_differ(self) -> bool:  # type: ignore[override]
        return self.selector.layers_differ

    def reads(self, cache: CachePolicy) -> bool:
        return self.selector == cache

    def for_model(self, num_layers: int, frequencies: Frequencies | None, wording: Wording | None) -> SparsePrefill:
        return dataclasses.replace(self, selector=self.selector.for_model(num_layers, frequencies, wording))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        self.selector.validate_for(num_layers, num_kv_heads)

    def attend(
        self,
        layer: Layer,
        heads: Heads,
        q: Array,
        k: Array,
        v: Array,
        lengths: Array,
        selected: Selected | None,
        backend: Backend,
    ) -> Attended:
        policy, tokens = self.selector, k.shape[1]
        # Every prompt of this shape fits its window: exact attention. From there on a selection pays: on an H200 a
        # model's time to first token is full attention's at 4,608 tokens (lab/results/end-to-end.md).
        if not policy.num_ranked_blocks(tokens):
            return Attended(causal_attention(q, k, v, lengths, backend=backend), causal_pairs(lengths))
        if selected is None:
            selected = compact(policy, layer, heads, q, k, v, lengths, backend)
        pool, budgets = selected.pool, selected.budgets
        sizes: dict[str, Any] = {"block_size": policy.block_size, "window": policy.window}
        with jax.named_scope("prefill_attention"):
            out = prefill_attention(q, k, v, pool, budgets, lengths, **sizes, backend=backend)
        return Attended(out, selected_pairs(budgets, lengths, **sizes).mean(axis=1))
