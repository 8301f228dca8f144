"""Block-sparse prefill: the base of its methods. Each lists blocks and columns of keys for every query head."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.methods.base import Attended, Heads, Layer, PrefillPolicy
from tca_jax.methods.regions import Regions, Selection, causal_pairs, sum_of_counts
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.pallas_kernels.prefill_attention import FarBlocks, prefill_attention

_MOST_ENTRIES = 2**27  # in memory at once, of an estimate, of the attention of a block of queries or of lists


class Listed(NamedTuple):
    """Keys that the queries of a tile, a block of the prompt, attend to besides their own block."""

    blocks: Int[Array, "B G N C"]  # first tokens of key blocks, which do not overlap and end left of the tile
    counts: Int[Array, "B G N"]  # how many of these count, from the first
    columns: Bool[Array, "B G L"]  # single tokens that all later queries attend to


class BlockSparsePrefill(PrefillPolicy):
    """Attention over the blocks and columns that an estimate lists for each query tile of each query head.

    A tile is a block of the prompt. Its queries attend to this block, too.

    Attributes:
        block_size: Tokens in a key block and queries in a tile, a multiple of 16 for the Triton kernel.
        dense_tokens: Prompts of at most so many tokens get exact causal attention.
        aligned: Whether all blocks that it lists begin on multiples of the block size. Others may begin anywhere, also
            left of the prompt; then the block size must be no multiple of 128, which a kernel for aligned blocks takes.
    """

    block_size: int
    dense_tokens: int
    aligned: ClassVar[bool] = True

    @abc.abstractmethod
    def estimate(
        self,
        layer: Layer,
        heads: Heads,
        head: Int[Array, ""],
        q: Float[Array, "B L G d"],
        k: Float[Array, "B L d"],
        lengths: Int[Array, " B"],
    ) -> Listed:
        """Keys that the query heads of one KV head attend to.

        Args:
            head: The place of one of `heads`, the KV heads of a layer; traced.
            q: Queries of its group after RoPE, right-padded, `[B, L, G, d]`.
            k: Its keys, `[B, L, d]`.
            lengths: Prompt lengths `[B]`, traced.
        """

    def most_columns(self, layer: Layer, heads: Heads, group: int) -> int:
        """Most columns that a query head of a layer lists, of `group` query heads to a KV head; static."""
        return 0

    def attend(
        self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, selected: Any, backend: Backend
    ) -> Attended:
        (batch, tokens, kv_heads, _), group = k.shape, q.shape[2] // k.shape[2]
        if tokens <= self.dense_tokens:
            return Attended(causal_attention(q, k, v, lengths, backend=backend), causal_pairs(lengths))
        entries = batch * group * max(tokens * self.block_size, cdiv(tokens, self.block_size) ** 2)
        most = max(1, _MOST_ENTRIES // entries)
        at_once = max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= most)

        def some_heads(part: tuple[Array, ...]) -> tuple[Array, Array]:
            numbers, q, k, v = part  # of the heads, before the other axes
            with jax.named_scope("estimate"):
                listed = jax.vmap(lambda number, q, k: self._listed(layer, heads, number, q, k, lengths))(numbers, q, k)
            listed = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:]), listed)
            # A query head has lists of its own: its keys and values are laid beside it.
            q = jnp.moveaxis(q, 0, 2).reshape(batch, tokens, -1, q.shape[-1])
            k, v = (jnp.repeat(jnp.moveaxis(x, 0, 2), group, axis=2) for x in (k, v))
            out = self._attend_listed(q, k, v, listed, lengths, self.most_columns(layer, heads, group), backend)
            pairs = listed_pairs(listed, lengths, self.block_size).mean(axis=1)
            return jnp.moveaxis(out.reshape(batch, tokens, -1, group, q.shape[-1]), 2, 0), pairs

        queries = q.reshape(batch, tokens, kv_heads, group, -1)
        of_heads = jnp.arange(kv_heads), *(jnp.moveaxis(x, 2, 0) for x in (queries, k, v))
        parts = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), of_heads)
        out, pairs = jax.lax.map(some_heads, parts)
        out = out.reshape(kv_heads, *out.shape[2:])
        return Attended(jnp.moveaxis(out, 0, 2).reshape(q.shape), pairs.mean(axis=0))

    def _listed(self, layer: Layer, heads: Heads, head: Array, q: Array, k: Array, lengths: Array) -> Listed:
        """Lists of the query heads of one KV head; in short prompts, all blocks."""
        blocks, counts, columns = self.estimate(layer, heads, head, q, k, lengths)
        short = (lengths <= self.dense_tokens)[:, None, None]
        all_blocks = jnp.arange(blocks.shape[-1], dtype=jnp.int32) * self.block_size
        blocks = jnp.where(short[..., None], all_blocks, blocks)
        counts = jnp.where(short, jnp.arange(counts.shape[-1], dtype=jnp.int32), counts)
        return Listed(blocks, counts, columns & ~short)

    def _attend_listed(
        self, q: Array, k: Array, v: Array, listed: Listed, lengths: Array, most_columns: int, backend: Backend
    ) -> Float[Array, "B L H d"]:
        """Attention of heads that each have a list and keys of their own."""
        size, (batch, tokens, heads, _) = self.block_size, q.shape
        # In front of a prompt whose blocks may begin left of it comes a block of tokens that no list includes.
        ahead = 0 if self.aligned else 1
        q, k, v = (jnp.pad(x, ((0, 0), (ahead * size, 0), (0, 0), (0, 0))) for x in (q, k, v))
        columns = jnp.pad(listed.columns, ((0, 0), (0, 0), (ahead * size, 0)))
        blocks = jnp.pad(listed.blocks + ahead * size, ((0, 0), (0, 0), (ahead, 0), (0, 0)))
        counts = jnp.pad(listed.counts, ((0, 0), (0, 0), (ahead, 0)))
        regions = Regions.plan(batch, [min(tokens, most_columns)] * heads, size)
        kept = regions.fill(Selection.of_tokens(columns, size), k, v, block_size=size, backend=backend)
        number, means = counts.shape[-1], jnp.zeros((batch, counts.shape[-1], *k.shape[2:]), k.dtype)
        no_bias = jnp.zeros((batch, heads, number, number), jnp.float32)
        left_out = columns | (jnp.arange(columns.shape[-1]) < ahead * size)
        far = FarBlocks(blocks, counts, left_out, means, means, no_bias, jnp.zeros_like(counts))
        operands = q, k, v, kept.pool, kept.budgets, lengths + ahead * size
        return prefill_attention(*operands, block_size=size, window=0, far=far, backend=backend)[:, ahead * size :]


def lists_of_mask(mask: Bool[Array, "B G N N"], block_size: int, length: int) -> Listed:
    """The blocks of the prompt that a mask marks for each tile, left of its own."""
    tiles = mask.shape[-1]
    mask = mask & jnp.tri(tiles, k=-1, dtype=bool)
    order = jnp.sort(jnp.where(mask, jnp.arange(tiles, dtype=jnp.int32), tiles), axis=-1)
    no_columns = jax.lax.optimization_barrier(jnp.zeros((*mask.shape[:2], length), bool))  # XLA sums constants slowly
    return Listed(order * block_size, mask.sum(axis=-1, dtype=jnp.int32), no_columns)


def listed_pairs(listed: Listed, lengths: Int[Array, " B"], block_size: int) -> Float32[Array, "B H"]:
    """Causal pairs (query, key) that query heads attend to."""
    blocks, counts, columns = listed
    with jax.named_scope("count_pairs"):
        begins = jnp.arange(counts.shape[-1]) * block_size
        queries = jnp.clip(lengths[:, None] - begins, 0, block_size)[:, None]  # of each tile
        ends = jnp.pad(jnp.cumsum(columns, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
        first, end = jnp.maximum(blocks, 0), blocks + block_size
        flat = jnp.stack([first, end]).reshape(2, *ends.shape[:2], -1)
        before, past = (jnp.take_along_axis(ends, x, axis=-1, mode="clip").reshape(blocks.shape) for x in flat)
        counted = jnp.arange(blocks.shape[-1]) < counts[..., None]
        others = jnp.where(counted, end - first - (past - before), 0).sum(axis=-1, dtype=jnp.int32)
        return sum_of_counts(queries * (ends[..., begins] + others) + queries * (queries + 1) // 2)


def block_sums(x: Float[Array, "B L H d"], lengths: Int[Array, " B"], block_size: int) -> Float32[Array, "B N H d"]:
    """Sums over the tokens of each block that the prompt has."""
    batch, length, heads, dim = x.shape
    blocks = cdiv(length, block_size)
    real = jnp.arange(length) < lengths[:, None]
    x = jnp.pad(jnp.where(real[..., None, None], x, 0), ((0, 0), (0, blocks * block_size - length), (0, 0), (0, 0)))
    return x.reshape(batch, blocks, block_size, heads, dim).sum(axis=2, dtype=jnp.float32)
