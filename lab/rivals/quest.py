"""Quest (arXiv 2406.10774): every token stays, and each step of decoding attends to the pages that may matter to it.

The least and the greatest entry of a page's keys, in each dimension, bound the product of a query with any of them. A
step attends to the window and to the pages of the highest bounds; the first layers attend to everything. Prompts, and
tokens that are appended, are read under full attention. Follows the published code (mit-han-lab/Quest at 01c1623,
`evaluation/quest_attention.py`), whose defaults these are. What differs:

- Query heads. The code repeats keys for every query head and lets each choose pages of its own. Here a KV head reads
  one set of pages, those of the highest mean bound over its group.
- The window. There, the page that is being filled competes with all others; here at least `window` tokens are always
  attended to, and `budget` counts them.
- Log-likelihoods of given answers are those of full attention: their tokens are appended.

The bounds are computed anew from the keys where a block leaves the window of any row, in that step and behind it. One
row reads its keys twice in `block_size` steps for that; rows that are at different places of their blocks do so for
each of them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.errors import UserError, check_geometry, check_integer
from tca_jax.lab.rivals.compression import GrowingCache, over_full
from tca_jax.methods.base import Heads
from tca_jax.methods.regions import Selection
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.kv import CODES, Pages, decode

#: The least and the greatest entry of each page's keys, `[R, Hkv, C, d]`; C differs between caches.
Bounds = tuple[Float[Array, "..."], Float[Array, "..."]]


@dataclasses.dataclass(frozen=True)
class QuestCache(GrowingCache):
    """All tokens, of which a step attends to the window and to some pages."""

    budget: int = 1024  # tokens that a step attends to, the window counted as `window`; the code's `token_budget`
    dense_layers: int = 2  # first layers, which attend to everything
    window: int = 16  # least number of local tokens, a multiple of `block_size`
    block_size: int = 16  # tokens in a block and in a page, a power of two; the code's `chunk_size`

    def __post_init__(self) -> None:
        check_geometry(self.block_size, self.window)
        check_integer("dense_layers", self.dense_layers, at_least=0)
        check_integer("budget", self.budget, at_least=1)
        if self.budget < self.window + self.block_size:
            raise UserError(
                f"budget = {self.budget}: must be at least window + block_size = {self.window + self.block_size}"
            )

    @property
    def num_pages(self) -> int:
        """Pages beside the window that a step attends to."""
        return (self.budget - self.window) // self.block_size

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return self.num_ranked_blocks(prompt_tokens) * self.block_size

    def select(
        self, layer: int, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Selection:
        batch, tokens, kv_heads, _ = k.shape
        ranked = jnp.arange(tokens // self.block_size) < self.num_ranked_blocks(lengths)[:, None, None]
        budgets = jnp.where(ranked, self.block_size, 0)
        shape = (batch, kv_heads)
        return Selection(
            jnp.zeros((*shape, tokens), jnp.float32), jnp.broadcast_to(budgets, (*shape, budgets.shape[-1]))
        )

    def summarize(self, layer: int, pages: Pages) -> Bounds | None:
        if layer < self.dense_layers or not pages.kept_columns:
            return None
        table = pages.table[..., : pages.kept_columns]
        dtype = jnp.bfloat16 if pages.k.dtype == CODES else pages.k.dtype
        keys = decode(jax.tree.map(lambda pool: pool.at[table].get(mode="clip"), pages.k), dtype)
        return keys.min(axis=-2), keys.max(axis=-2)

    def attended(
        self, layer: int, q: Float[Array, "B Hq d"], caches: tuple[Pages, ...], summaries: tuple[Bounds | None, ...]
    ) -> tuple[Pages, ...]:
        if layer < self.dense_layers or sum(cache.kept_columns for cache in caches) <= self.num_pages:
            return caches
        with jax.named_scope("quest"):
            scores = [
                page_scores(q, cache, bounds) if bounds is not None else None
                for cache, bounds in zip(caches, summaries, strict=True)
            ]
            of_all = jnp.concatenate([x for x in scores if x is not None], axis=-1)
            best, places = jax.lax.top_k(of_all, self.num_pages)
            places = jnp.where(best > -jnp.inf, places, -1)
            first, pages = 0, []
            for cache, of_cache in zip(caches, scores, strict=True):
                own = (places >= first) & (places < first + cache.kept_columns)
                first += cache.kept_columns
                pages.append(
                    cache if of_cache is None else with_pages(cache, of_cache, own.sum(axis=-1), self.num_pages)
                )
            return tuple(pages)


def page_scores(q: Float[Array, "B Hq d"], cache: Pages, bounds: Bounds) -> Float32[Array, "B Hkv C"]:
    """The most that a query's product with a key of each kept page can be, mean over the group; -inf for no page.

    Args:
        q: Queries of a step.
        cache: Pages of R rows, each of which serves B / R neighbouring rows of `q`.
        bounds: Least and greatest entries of the keys of each page, `[R, Hkv, C, d]`.
    """
    times = len(q) // len(cache.kept)
    least, greatest = (jnp.repeat(x, times, axis=0).astype(jnp.float32) for x in bounds)
    grouped = q.astype(jnp.float32).reshape(len(q), least.shape[1], -1, q.shape[-1])
    # Of a group, the mean of the bounds is the bound of the means of the queries' positive and negative parts.
    positive, negative = (jnp.maximum(x, 0).mean(axis=2) for x in (grouped, -grouped))
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bhd,bhcd->bhc", positive, greatest, precision=exact) - jnp.einsum(
        "bhd,bhcd->bhc", negative, least, precision=exact
    )
    held = jnp.arange(cache.kept_columns) * cache.page_size < cache.kept[..., None]
    return jnp.where(jnp.repeat(held, times, axis=0), scores, -jnp.inf)


def with_pages(cache: Pages, scores: Float32[Array, "B Hkv C"], counts: Int[Array, "B Hkv"], most: int) -> Pages:
    """The `counts` pages of the highest scores of each head, at most `most`, and the window. Kept pages are full."""
    times, count = len(scores) // len(cache.kept), min(most, cache.kept_columns)
    table, start, end = (jnp.repeat(x, times, axis=0) for x in (cache.table, cache.start, cache.end))
    columns = jax.lax.top_k(scores, count)[1]
    pages = jnp.take_along_axis(table[..., : cache.kept_columns], columns, axis=-1)
    table = jnp.concatenate([pages, table[..., cache.kept_columns :]], axis=-1)
    kept = (counts * cache.page_size).astype(jnp.int32)
    return Pages(cache.k, cache.v, table, kept, start, end, count)


quest = over_full("quest", QuestCache)
