"""Quest (arXiv 2406.10774): every token stays, and each step of decoding attends to the pages that may matter to it.

The least and the greatest entry of a page's keys, by dimension, bound a query's product with any of them. A step
attends to the window and the pages of the highest bounds; the first layers, prompts and appended tokens attend to all.
Follows mit-han-lab/Quest at 01c1623 (`evaluation/quest_attention.py`). What differs: a KV head reads one set of pages,
by the mean bound over its group; `window` tokens are always attended to and count in `budget`. Bounds are recomputed
when a block leaves the window of any row.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from tca_jax.errors import check_geometry, check_integer, require
from tca_jax.lab.rivals.compression import GrowingCache, rival
from tca_jax.methods.base import Heads, Layer
from tca_jax.methods.regions import Selection
from tca_jax.pallas_kernels.kv import CODES, Pages, decode

#: The least and the greatest entry of each page's keys, `[R, Hkv, C, d]`.
Bounds = tuple[Float[Array, "..."], Float[Array, "..."]]


@dataclasses.dataclass(frozen=True)
class QuestCache(GrowingCache):
    budget: int = 1024  # tokens that a step attends to, the window counted as `window`; the code's `token_budget`
    dense_layers: int = 2  # first layers, which attend to everything
    window: int = 16  # least number of local tokens, a multiple of `block_size`
    block_size: int = 16  # tokens in a block and in a page, a power of two; the code's `chunk_size`

    def __post_init__(self) -> None:
        check_geometry(self.block_size, self.window)
        check_integer("dense_layers", self.dense_layers, at_least=0)
        check_integer("budget", self.budget, at_least=1)
        least = self.window + self.block_size
        require(self.budget >= least, f"budget = {self.budget}: must be at least window + block_size = {least}")

    @property
    def num_pages(self) -> int:
        """Pages beside the window that a step attends to."""
        return (self.budget - self.window) // self.block_size

    def select(self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array) -> Selection:
        batch, tokens, kv_heads, _ = k.shape
        ranked = jnp.arange(tokens // self.block_size) < self.num_ranked_blocks(lengths)[:, None, None]
        budgets = jnp.broadcast_to(jnp.where(ranked, self.block_size, 0), (batch, kv_heads, ranked.shape[-1]))
        return Selection(jnp.zeros((batch, kv_heads, tokens), jnp.float32), budgets)

    def summarize(self, layer: Layer, pages: Pages) -> Bounds | None:
        if layer < self.dense_layers or not pages.kept_columns:
            return None
        table = pages.table[..., : pages.kept_columns]
        dtype = jnp.bfloat16 if pages.k.dtype == CODES else pages.k.dtype
        keys = decode(jax.tree.map(lambda pool: pool.at[table].get(mode="clip"), pages.k), dtype)
        return keys.min(axis=-2), keys.max(axis=-2)

    def attended(
        self, layer: Layer, q: Float[Array, "B Hq d"], caches: tuple[Pages, ...], summaries: tuple[Bounds | None, ...]
    ) -> tuple[Pages, ...]:
        (cache,), (bounds,) = caches, summaries
        if bounds is None or cache.kept_columns <= self.num_pages:
            return caches
        with jax.named_scope("quest"):
            best, columns = jax.lax.top_k(page_scores(q, cache, bounds), self.num_pages)
            pages = jnp.take_along_axis(cache.table[..., : cache.kept_columns], columns, axis=-1)
            table = jnp.concatenate([pages, cache.table[..., cache.kept_columns :]], axis=-1)
            kept = (best > -jnp.inf).sum(axis=-1, dtype=jnp.int32) * cache.page_size  # kept pages are full
            return (dataclasses.replace(cache, table=table, kept=kept, kept_columns=self.num_pages),)


quest = rival("quest", QuestCache)


def page_scores(q: Float[Array, "B Hq d"], cache: Pages, bounds: Bounds) -> Float32[Array, "B Hkv C"]:
    """The most that a query's product with a key of each kept page can be, mean over the group; -inf for no page."""
    least, greatest = (x.astype(jnp.float32) for x in bounds)
    grouped = q.astype(jnp.float32).reshape(len(q), least.shape[1], -1, q.shape[-1])
    # Of a group, the mean of the bounds is the bound of the means of the queries' positive and negative parts.
    positive, negative = (jnp.maximum(x, 0).mean(axis=2) for x in (grouped, -grouped))
    product = functools.partial(jnp.einsum, "bhd,bhcd->bhc", precision="highest")
    held = jnp.arange(cache.kept_columns) * cache.page_size < cache.kept[..., None]
    return jnp.where(held, product(positive, greatest) - product(negative, least), -jnp.inf)
