"""Random tokens of every block: the floor that a selection must beat at the same budget."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from tca_jax.errors import check_geometry, check_number, check_seed
from tca_jax.lab.rivals.compression import rival
from tca_jax.methods.base import CachePolicy, Heads, Layer
from tca_jax.methods.regions import Selection
from tca_jax.methods.sparse import SparsePrefill


@dataclasses.dataclass(frozen=True)
class RandomCache(CachePolicy):
    """The same number of random tokens of every block that leaves the window, in a prompt and while decoding."""

    share: float = 0.25  # kept share of a block's tokens, in (0, 1], rounded to whole tokens, at least one
    window: int = 4096  # least number of local tokens, w, a multiple of `block_size`
    block_size: int = 128  # tokens in a block, b, a power of two
    seed: int = 0  # other seeds, other tokens; draws depend on seed, layer, head and position alone

    layers_differ: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_geometry(self.block_size, self.window)
        check_number("share", self.share, above=0, at_most=1)
        check_seed("seed", self.seed)

    @property
    def budget(self) -> int:
        """Tokens kept of a block."""
        return max(1, round(self.share * self.block_size))

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return self.budget * self.num_ranked_blocks(prompt_tokens)

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> int:
        return self.budget * self.num_leaving_blocks(prompt_tokens, new_tokens)

    def select(self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array) -> Selection:
        batch, tokens, kv_heads, _ = k.shape
        blocks = jnp.arange(tokens // self.block_size)
        scores = self._draw(layer, heads, blocks).reshape(kv_heads, -1)
        scores = jnp.pad(scores, ((0, 0), (0, tokens - scores.shape[1])))
        budgets = jnp.where(blocks < self.num_ranked_blocks(lengths)[:, None, None], jnp.int32(self.budget), 0)
        return Selection(*(jnp.broadcast_to(x, (batch, kv_heads, x.shape[-1])) for x in (scores, budgets)))

    def evict(
        self, layer: Layer, heads: Heads, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]
    ) -> Selection:
        batch, kv_heads = attention.shape[:2]
        scores = self._draw(layer, heads, blocks).swapaxes(0, 1)
        return Selection(scores, jnp.full((batch, kv_heads, 1), self.budget, jnp.int32))

    def _draw(self, layer: Layer, heads: Heads, blocks: Int[Array, " n"]) -> Float32[Array, "Hkv n b"]:
        """Uniform numbers for the tokens of some blocks."""
        key = jax.random.fold_in(jax.random.key(self.seed), layer)
        of_heads = jax.vmap(lambda head: jax.random.fold_in(key, head))(jnp.asarray(heads.numbers))
        keys = jax.vmap(lambda own: jax.vmap(lambda block: jax.random.fold_in(own, block))(blocks))(of_heads)
        return jax.vmap(jax.vmap(lambda own: jax.random.uniform(own, (self.block_size,))))(keys)


random = rival("random", RandomCache, SparsePrefill)
