"""Sparse prefill: queries attend to their window and to what a cache policy would keep left of it (Eq. 3)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from tca_jax.methods.base import Attended, CachePolicy, Frequencies, Method, PrefillPolicy, per_head
from tca_jax.methods.heads import Heads
from tca_jax.methods.pairs import causal_pairs, sum_of_counts
from tca_jax.methods.queries import last_queries
from tca_jax.methods.regions import Regions, Selected, Selection
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.prefill_attention import prefill_attention


@dataclasses.dataclass(frozen=True)
class SparsePrefill(PrefillPolicy):
    """Attention over the window and a cache policy's selection (Eq. 3).

    Attributes:
        selector: The cache policy that selects: the method's own, or another one.
    """

    selector: CachePolicy

    def reads(self, cache: CachePolicy) -> bool:
        return self.selector == cache

    def for_rope(self, frequencies: Frequencies | None) -> SparsePrefill:
        return dataclasses.replace(self, selector=self.selector.for_rope(frequencies))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        self.selector.validate_for(num_layers, num_kv_heads)

    def attend(
        self,
        layer: int,
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
            selected = self._select(layer, heads, q, k, v, lengths, backend)
        pool, budgets = selected.pool, selected.budgets
        sizes = {"block_size": policy.block_size, "window": policy.window}
        with jax.named_scope("prefill_attention"):
            out = prefill_attention(q, k, v, pool, budgets, lengths, **sizes, backend=backend)
        return Attended(out, selected_pairs(budgets, lengths, **sizes).mean(axis=1))

    def _select(
        self, layer: int, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Selected:
        policy = self.selector
        with jax.named_scope("select"):
            queries = last_queries(q, lengths, policy.num_queries)
            selection = policy.select(layer, heads, queries, k, v, lengths, backend)
        return _compact(policy, layer, heads, selection, k, v, backend)


def selected_pairs(
    budgets: Int[Array, "B Hkv nb"], lengths: Int[Array, " B"], *, block_size: int, window: int
) -> Float32[Array, "B Hkv"]:
    """Causal pairs (query, key) that a KV head's queries attend to over their windows and a selection left of these.

    A query in block t has the tokens from max(0, t b - w) up to its own, and what is selected of the blocks before.

    Args:
        budgets: Selected tokens of every block `[B, Hkv, L // b]`.
        lengths: Prompt lengths `[B]`, at most L.
        block_size: Tokens in a block, b.
        window: Least number of local tokens, w, a multiple of b.

    Returns:
        The pairs of one query head, `[B, Hkv]`: those of a group all have as many.
    """
    with jax.named_scope("count_pairs"):
        blocks = np.arange(budgets.shape[-1] + 1)  # of queries; a last one that is cut off has no budget
        edges = np.maximum(0, blocks - window // block_size)
        queries = jnp.clip(lengths[:, None] - blocks * block_size, 0, block_size)
        local = queries * ((blocks - edges) * block_size) + queries * (queries + 1) // 2
        prefixes = jnp.pad(jnp.cumsum(budgets, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
        return sum_of_counts(local[:, None] + queries[:, None] * prefixes[..., edges])


def selection_for_prefill(
    method: Method,
    layer: int,
    heads: Heads,
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
        heads: Its KV heads.
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
    return _compact(method.cache, layer, heads, selection, k, v, backend)


def _compact(
    policy: CachePolicy, layer: int, heads: Heads, selection: Selection, k: Array, v: Array, backend: Backend
) -> Selected:
    """What a prompt's queries attend to left of their windows, in a pool of its own that lives for this layer."""
    batch, tokens, *_ = k.shape
    name, capacities = "prefill_capacities", policy.prefill_capacities(layer, tokens)
    if capacities is None:
        name, capacities = "capacities", policy.capacities(layer, tokens)
    source = f"{type(policy).__name__}.{name}({layer}, {tokens})"
    regions = Regions.plan(batch, heads.widest(per_head(capacities, heads.of_model, source)), policy.block_size)
    with jax.named_scope("select"):
        return regions.fill(selection.for_prefill, k, v, block_size=policy.block_size, backend=backend)
