"""How the prompt's own queries attend under TCA: each KV head by a reading of its own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from tca_jax.methods.base import Attended, Heads, Layer
from tca_jax.methods.fetching import attend_blocks
from tca_jax.methods.pairs import causal_pairs, selected_pairs
from tca_jax.methods.regions import Selected
from tca_jax.methods.sparse import SparsePrefill
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.prefill_attention import prefill_attention

if TYPE_CHECKING:
    from tca_jax.methods.config import TCAConfig
    from tca_jax.methods.tca import TCACache

#: "sparse": the window, and what the head's row selects, once for the whole prompt; "blocks": the window, and for each
#: tile of queries a few key blocks; "dense": all tokens.
READINGS = ("sparse", "blocks", "dense")
#: Places of some KV heads among those that a program sees.
Places = Int[Array | np.ndarray, " n"]


@dataclasses.dataclass(frozen=True)
class TCAPrefill(SparsePrefill):
    """Attention by each head's reading."""

    selector: TCACache  # says which head reads how, and what heads that read "sparse" select

    def answers_from_cache(self, layer: int) -> bool:
        return bool(self.selector.reads(layer, self.selector.num_heads(layer), "sparse").all())

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
        policy, (batch, tokens, kv_heads, _) = self.selector, k.shape
        if not policy.layers_differ:
            return super().attend(layer, heads, q, k, v, lengths, selected, backend)
        sparse = policy.reads(layer, heads.of_model, "sparse")
        if sparse.all() or not policy.num_ranked_blocks(tokens):
            return super().attend(layer, heads, q, k, v, lengths, selected, backend)
        out, pairs = jnp.zeros_like(q), jnp.zeros((batch, kv_heads), jnp.float32)
        if sparse.any():
            selected = self._select(layer, heads, q, k, v, lengths, backend) if selected is None else selected
            own, sizes = heads.of(sparse), {"block_size": policy.block_size, "window": policy.window}
            with jax.named_scope("prefill_attention"):
                read = jnp.where(own, lengths[:, None], 0)  # the other heads cost nothing
                out = prefill_attention(q, k, v, selected.pool, selected.budgets, read, **sizes, backend=backend)
            pairs = jnp.where(own, selected_pairs(selected.budgets, lengths, **sizes), 0)
        for reading, attend in (("blocks", attend_blocks), ("dense", _attend_all)):
            if (mask := policy.reads(layer, heads.of_model, reading)).any():
                places = heads.places(mask)
                given = _take(q, places, kv_heads), _take(k, places, kv_heads), _take(v, places, kv_heads)
                part, of_part = attend(*given, lengths, policy.config, backend)
                out, pairs = _put(out, part, places, kv_heads), pairs.at[:, places].set(of_part, mode="drop")
        return Attended(out, pairs.mean(axis=1))


def _attend_all(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    backend: Backend,
) -> tuple[Float[Array, "B L Hq d"], Float32[Array, "B 1"]]:
    """Exact attention, and the pairs of each KV head."""
    return causal_attention(q, k, v, lengths, backend=backend), causal_pairs(lengths)[:, None]


def _take(x: Float[Array, "B L H d"], places: Places, kv_heads: int) -> Float[Array, "B L h d"]:
    """The heads of x that belong to some KV heads."""
    by_kv_head = x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1])
    taken = by_kv_head.at[:, :, places].get(mode="clip")  # past the last are places of no head
    return taken.reshape(*x.shape[:2], -1, x.shape[-1])


def _put(
    x: Float[Array, "B L Hq d"], part: Float[Array, "B L h d"], places: Places, kv_heads: int
) -> Float[Array, "B L Hq d"]:
    """The inverse of `_take`."""
    by_kv_head = x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1])
    parts = part.reshape(*x.shape[:2], -1, *by_kv_head.shape[3:])
    return by_kv_head.at[:, :, places].set(parts, mode="drop").reshape(x.shape)
