"""Sparse prefill: queries attend to their window and to what a cache policy would keep left of it (Eq. 3)."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from tca_jax.methods.base import CachePolicy, Frequencies, Method, PrefillPolicy
from tca_jax.methods.heads import capacities_of_heads
from tca_jax.methods.queries import last_queries
from tca_jax.methods.regions import Regions, Selected, Selection
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.prefill_attention import prefill_attention


@dataclasses.dataclass(frozen=True)
class SparsePrefill(PrefillPolicy):
    """Attention over the window and the selection of `selector`, the method's cache policy or another one."""

    selector: CachePolicy

    def reads(self, cache: CachePolicy) -> bool:
        return self.selector == cache

    def for_rope(self, frequencies: Frequencies | None) -> SparsePrefill:
        return dataclasses.replace(self, selector=self.selector.for_rope(frequencies))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        self.selector.validate_for(num_layers, num_kv_heads)

    def attend(
        self, layer: int, q: Array, k: Array, v: Array, lengths: Array, selected: Selected | None, backend: Backend
    ) -> Float[Array, "B L Hq d"]:
        policy, tokens = self.selector, k.shape[1]
        # Every prompt of this shape fits its window: exact attention. From there on a selection pays: on an H200 a
        # model's time to first token is full attention's at 4,608 tokens (benchmarks/results/crossover.md).
        if not policy.num_ranked_blocks(tokens):
            return causal_attention(q, k, v, lengths, backend=backend)
        if selected is None:
            selected = self._select(layer, q, k, v, lengths, backend)
        with jax.named_scope("prefill_attention"):
            return prefill_attention(
                q,
                k,
                v,
                selected.pool,
                selected.budgets,
                lengths,
                block_size=policy.block_size,
                window=policy.window,
                backend=backend,
            )

    def _select(self, layer: int, q: Array, k: Array, v: Array, lengths: Array, backend: Backend) -> Selected:
        policy = self.selector
        with jax.named_scope("select"):
            selection = policy.select(layer, last_queries(q, lengths, policy.num_queries), k, v, lengths, backend)
        return _compact(policy, layer, selection, k, v, backend)


def readable_selection(
    method: Method,
    layer: int,
    selection: Selection,
    kept: Selected,
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    backend: Backend,
) -> Selected | None:
    """What a method's prefill policy is given to attend to.

    Args:
        method: The method.
        layer: The layer.
        selection: What its cache policy selects.
        kept: The same as it lies in the cache.
        k: Prompt keys `[B, L, Hkv, d]`; `v` the values.
        backend: Kernel backend.

    Returns:
        `kept` where prompt queries attend to all of it; a compact buffer for this layer where they attend to less;
        None where the prefill policy does not read what the cache policy selects.
    """
    if not method.prefill_reads_cache:
        return None
    if selection.prefill_budgets is None:
        return kept
    return _compact(method.cache, layer, selection, k, v, backend)


def _compact(policy: CachePolicy, layer: int, selection: Selection, k: Array, v: Array, backend: Backend) -> Selected:
    """What a prompt's queries attend to left of their windows, in a pool of its own that lives for this layer."""
    batch, tokens, kv_heads, _ = k.shape
    name, capacities = "prefill_capacities", policy.prefill_capacities(layer, tokens)
    if capacities is None:
        name, capacities = "capacities", policy.capacities(layer, tokens)
    source = f"{type(policy).__name__}.{name}({layer}, {tokens})"
    regions = Regions.plan(batch, capacities_of_heads(layer, capacities, kv_heads, source))
    with jax.named_scope("select"):
        return regions.fill(selection.for_prefill, k, v, block_size=policy.block_size, backend=backend)
