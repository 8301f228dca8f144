"""Attention sinks and a window (StreamingLLM, arXiv 2309.17453; as prefill, the A-shape of arXiv 2407.02490).

Tokens keep their own positions, as in the A-shape; StreamingLLM's code counts positions inside the cache instead.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from tca_jax.errors import check_geometry, check_integer
from tca_jax.methods.base import CachePolicy, Heads, Layer, Method
from tca_jax.methods.regions import Selection
from tca_jax.methods.sparse import SparsePrefill


@dataclasses.dataclass(frozen=True)
class StreamingCache(CachePolicy):
    """The first `sinks` tokens and the window."""

    layers_differ: ClassVar[bool] = False
    sinks: int = 4  # tokens kept from the start of the sequence
    window: int = 4096  # least number of local tokens, a multiple of `block_size`
    block_size: int = 128  # tokens in a block, a power of two

    def __post_init__(self) -> None:
        check_geometry(self.block_size, self.window)
        check_integer("sinks", self.sinks, at_least=0)

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return min(self.sinks, self.num_ranked_blocks(prompt_tokens) * self.block_size)

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> int:
        # Shorter prompts have all their sinks in the window still.
        return min(self.sinks, self.num_leaving_blocks(prompt_tokens, new_tokens) * self.block_size)

    def select(self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array) -> Selection:
        batch, tokens, kv_heads, _ = k.shape
        blocks = jnp.arange(tokens // self.block_size)
        budgets = jnp.where(blocks < self.num_ranked_blocks(lengths)[:, None], self._budgets(blocks), 0)
        scores = jnp.broadcast_to(-jnp.arange(tokens, dtype=jnp.float32), (batch, kv_heads, tokens))
        return Selection(scores, jnp.broadcast_to(budgets[:, None], (batch, kv_heads, blocks.size)))

    def evict(
        self, layer: Layer, heads: Heads, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]
    ) -> Selection:
        return Selection.of_block(attention, self._budgets(blocks)[:, None, None])

    def _budgets(self, blocks: Int[Array, " n"]) -> Int[Array, " n"]:
        """Sinks in each of the blocks."""
        return jnp.clip(self.sinks - blocks * self.block_size, 0, self.block_size).astype(jnp.int32)


def streaming(sinks: int = 4, window: int = 4096, block_size: int = 128) -> Method:
    """Sinks and a window, for the prompt's queries and for the cache."""
    cache = StreamingCache(sinks, window, block_size)
    return Method("streaming", SparsePrefill(cache), cache)
