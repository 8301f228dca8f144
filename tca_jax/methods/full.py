"""Full attention: every query sees every token before it, and the cache's window holds everything."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from tca_jax.methods.base import Attended, CachePolicy, Method, PrefillPolicy
from tca_jax.methods.blocks import Tokens
from tca_jax.methods.heads import Heads
from tca_jax.methods.pairs import causal_pairs
from tca_jax.methods.regions import Selected, Selection
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.integers import round_up

_BLOCK = 128  # sizes of the ring are multiples of this


@dataclasses.dataclass(frozen=True)
class FullCache(CachePolicy):
    """Every token stays: no block ever leaves the window."""

    block_size = _BLOCK
    window = _BLOCK  # see `local_window`

    def local_window(self, total_tokens: int) -> int:
        return round_up(total_tokens, _BLOCK)

    def num_ranked_blocks(self, tokens: Tokens) -> Tokens:
        return 0 * tokens

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return 0

    def select(
        self, layer: int, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Selection:
        raise AssertionError("nothing is left of a window that holds everything")

    def for_contexts(self) -> CachePolicy:
        return DenseCache()


@dataclasses.dataclass(frozen=True)
class DenseCache(CachePolicy):
    """Every token stays, those left of a small window in the pool: there, any number of questions can share them."""

    block_size = _BLOCK
    window = _BLOCK

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return self.num_ranked_blocks(prompt_tokens) * _BLOCK

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> int:
        return self.num_leaving_blocks(prompt_tokens, new_tokens) * _BLOCK

    def select(
        self, layer: int, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Selection:
        batch, tokens, kv_heads, _ = k.shape
        blocks = jnp.arange(tokens // _BLOCK)
        budgets = jnp.where(blocks < self.num_ranked_blocks(lengths)[:, None, None], _BLOCK, 0).astype(jnp.int32)
        shape = (batch, kv_heads, blocks.size)
        return Selection(jnp.zeros((batch, kv_heads, tokens), jnp.float32), jnp.broadcast_to(budgets, shape))

    def evict(
        self, layer: int, heads: Heads, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]
    ) -> Selection:
        batch, kv_heads, _, tokens = attention.shape
        budgets = jnp.full((batch, kv_heads, 1), _BLOCK, jnp.int32)
        return Selection(jnp.zeros((batch, kv_heads, tokens), jnp.float32), budgets)


@dataclasses.dataclass(frozen=True)
class FullPrefill(PrefillPolicy):
    """Exact causal attention."""

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
        return Attended(causal_attention(q, k, v, lengths, backend=backend), causal_pairs(lengths))

    def reads(self, cache: CachePolicy) -> bool:
        return isinstance(cache, FullCache | DenseCache)


def full() -> Method:
    """Exact full attention: the baseline of everything else."""
    return Method("full", FullPrefill(), FullCache())
