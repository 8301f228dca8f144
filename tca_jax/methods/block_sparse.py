"""Block-sparse prefill: the base of its methods. Each lists blocks and columns of keys; the kernel attends to these."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.methods.base import Attended, Heads, Layer, PrefillPolicy
from tca_jax.methods.regions import Selected, causal_pairs, sum_of_counts
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.block_sparse_attention import BlockLists, Columns, block_sparse_attention
from tca_jax.pallas_kernels.block_sparse_attention.lists import entries_by_distance
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.numerics import cdiv

#: Lists of all heads lie in memory together up to so many bytes; past that KV heads are taken one after another.
_MOST_BYTES = 2**30

#: Attention of a block of queries that lies in memory at once: of as many KV heads at a time are estimates made.
_MOST_SAMPLED = 2**28

#: Pairs (tile, column) of all heads that are looked at together where attended ones are counted.
_MOST_COUNTED = 2**24


class Listed(NamedTuple):
    """Keys that query tiles attend to, in one launch of the kernel."""

    blocks: BlockLists  # blocks of every tile and query head
    columns: Columns | None = None  # single tokens of every query head, or None


class BlockSparsePrefill(PrefillPolicy):
    """Attention over the blocks and columns that an estimate lists for each query tile of each query head.

    Attributes:
        block_size: Tokens in a key block and queries in a tile, a multiple of 16 for the Triton kernel.
        dense_tokens: Prompts of at most so many tokens get exact causal attention.
        aligned: Whether all blocks that it lists begin on multiples of the block size.
    """

    block_size: int
    dense_tokens: int
    aligned = True

    @abc.abstractmethod
    def estimate(
        self,
        layer: Layer,
        heads: Heads,
        head: Int[Array, ""],
        q: Float[Array, "B L G d"],
        k: Float[Array, "B L d"],
        lengths: Int[Array, " B"],
    ) -> tuple[Listed, ...]:
        """Keys that the query heads of one KV head attend to.

        Args:
            layer: The layer.
            heads: Its KV heads.
            head: The place of one of them; traced.
            q: Queries of its group after RoPE, right-padded, `[B, L, G, d]`.
            k: Its keys, `[B, L, d]`.
            lengths: Prompt lengths `[B]`, traced.

        Returns:
            Lists with the group's heads as theirs, one for each launch. A query head lists something in one of them at
            most: the launches' results are added.
        """

    def listed(
        self,
        layer: Layer,
        heads: Heads,
        q: Float[Array, "B L Hq d"],
        k: Float[Array, "B L Hkv d"],
        lengths: Int[Array, " B"],
    ) -> tuple[Listed, ...]:
        """Lists of all query heads; prompts of at most `dense_tokens` list every block."""
        (batch, tokens, kv_heads, _), group = k.shape, q.shape[2] // k.shape[2]
        at_once = max(1, _MOST_SAMPLED // (batch * group * tokens * self.block_size))
        at_once = max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= at_once)

        def of_head(head: Array) -> tuple[Listed, ...]:
            return self._of_head(layer, heads, head, q, k, lengths)

        of_heads = jax.lax.map(of_head, jnp.arange(kv_heads), batch_size=at_once)
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), of_heads)

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
        batch, tokens, kv_heads, _ = k.shape
        if tokens <= self.dense_tokens:
            return Attended(causal_attention(q, k, v, lengths, backend=backend), causal_pairs(lengths))
        entries = batch * q.shape[2] * cdiv(tokens, self.block_size) ** 2
        if 4 * entries <= _MOST_BYTES:
            with jax.named_scope("estimate"):
                listed = self.listed(layer, heads, q, k, lengths)
            out = self.attend_listed(q, k, v, listed, lengths, backend)
            return Attended(out, listed_pairs(listed, lengths, self.block_size).mean(axis=1))

        def one_head(head: Array) -> Attended:
            with jax.named_scope("estimate"):
                listed = self._of_head(layer, heads, head, q, k, lengths)
            keys, values = (x[:, :, head][:, :, None] for x in (k, v))
            out = self.attend_listed(_group(q, head, kv_heads), keys, values, listed, lengths, backend)
            return Attended(out, listed_pairs(listed, lengths, self.block_size).mean(axis=1))

        outputs, pairs = jax.lax.map(one_head, jnp.arange(kv_heads))  # [Hkv, B, L, G, d], [Hkv, B]
        return Attended(jnp.moveaxis(outputs, 0, 2).reshape(q.shape), pairs.mean(axis=0))

    def attend_listed(
        self, q: Array, k: Array, v: Array, listed: tuple[Listed, ...], lengths: Array, backend: Backend
    ) -> Float[Array, "B L Hq d"]:
        """Attention over `listed`; tiles are as large as blocks."""
        options: dict[str, Any] = {"block_size": self.block_size, "tile_size": self.block_size}
        options |= {"aligned": self.aligned, "backend": backend}
        first, *others = (
            block_sparse_attention(q, k, v, blocks, lengths, columns=columns, **options) for blocks, columns in listed
        )
        return sum(others, start=first)

    def _of_head(
        self, layer: Layer, heads: Heads, head: Array, q: Array, k: Array, lengths: Array
    ) -> tuple[Listed, ...]:
        estimated = self.estimate(layer, heads, head, _group(q, head, k.shape[2]), k[:, :, head], lengths)
        short = lengths <= self.dense_tokens
        return tuple(
            _with_dense_rows(one, short, self.block_size, everything=number == 0)
            for number, one in enumerate(estimated)
        )


def listed_pairs(
    listed: tuple[Listed, ...] | Listed, lengths: Int[Array, " B"], block_size: int
) -> Float32[Array, "B Hq"]:
    """Causal pairs (query, key) that query heads attend to, of all launches; tiles are as large as blocks."""
    launches = (listed,) if isinstance(listed, Listed) else listed
    with jax.named_scope("count_pairs"):
        first, *others = (
            sum_of_counts(
                _pairs_of_blocks(blocks, lengths, block_size)
                + (0 if columns is None else _pairs_of_columns(blocks, columns, lengths, block_size))
            )
            for blocks, columns in launches
        )
    return sum(others, start=first)


def _pairs_of_blocks(blocks: BlockLists, lengths: Int[Array, " B"], size: int) -> Int32[Array, "B Hq N"]:
    """Pairs of each tile with the keys of its blocks.

    All queries of a tile see the whole of a block that ends left of the tile. The others are among the two nearest, for
    blocks do not overlap, and only the last one can begin left of the prompt.
    """
    distances, counts = blocks
    ends = (jnp.arange(counts.shape[-1], dtype=jnp.int32) + 1) * size
    queries = jnp.clip(lengths[:, None] - ends + size, 0, size)[:, None]  # [B, 1, N]
    near = distances[..., :2].astype(jnp.int32)
    # Query r of a tile, from 0, sees r + 1 + D - size keys of a block at distance D, at most all and at least none.
    seen = _sum_to(queries[..., None] + near - size, size) - _sum_to(near - size, size)
    seen = jnp.sum(seen, axis=-1, where=jnp.arange(near.shape[-1]) < counts[..., None], dtype=jnp.int32)
    places = jnp.maximum(counts - 1, 0)
    if distances.shape[2] == 1:
        last = jnp.take_along_axis(distances[:, :, 0], places, axis=-1)
    else:
        last = jnp.take_along_axis(distances, places[..., None], axis=-1)[..., 0]
    outside = jnp.where(counts > 0, jnp.maximum(0, last - ends), 0)  # of the prompt, keys of the last block
    return (seen + queries * (jnp.maximum(0, counts - 2) * size - outside)).astype(jnp.int32)


def _sum_to(number: Int[Array, "*s"], most: int) -> Int[Array, "*s"]:
    """The sum of min(i, most) over i from 1 to a number; 0 for those below 1."""
    number = jnp.maximum(number, 0)
    small = jnp.minimum(number, most)
    return small * (small + 1) // 2 + (number - small) * most


def _pairs_of_columns(
    blocks: BlockLists, columns: Columns, lengths: Int[Array, " B"], size: int
) -> Int32[Array, "B Hq N"]:
    """Pairs of each tile with the columns that none of its blocks has; the lists of blocks are those of all tiles."""
    (batch, heads, tiles), tokens = blocks.counts.shape, columns.tokens
    entries = entries_by_distance(blocks, tiles * size + 1, size)
    real = jnp.arange(tokens.shape[-1]) < columns.counts[..., None]

    def of_tile(tile: Array) -> Int32[Array, "B Hq"]:
        end = (tile + 1) * size
        queries = jnp.clip(lengths - end + size, 0, size)[:, None, None]
        later = jnp.maximum(0, queries - jnp.maximum(0, tokens - end + size))  # queries from the column on
        entry = jnp.take_along_axis(entries, jnp.clip(end - tokens, 0, tiles * size), axis=-1)
        alone = real & (entry >= blocks.counts[:, :, tile, None])
        return jnp.sum(later, axis=-1, where=alone, dtype=jnp.int32)

    at_once = max(1, min(tiles, _MOST_COUNTED // (batch * heads * tokens.shape[-1])))
    return jnp.moveaxis(jax.lax.map(of_tile, jnp.arange(tiles), batch_size=at_once), 0, -1)


def block_sums(x: Float[Array, "B L H d"], lengths: Int[Array, " B"], block_size: int) -> Float32[Array, "B N H d"]:
    """Sums over the tokens of each block that the prompt has."""
    batch, length, heads, dim = x.shape
    blocks = cdiv(length, block_size)
    real = jnp.arange(length) < lengths[:, None]
    x = jnp.pad(jnp.where(real[..., None, None], x, 0), ((0, 0), (0, blocks * block_size - length), (0, 0), (0, 0)))
    return x.reshape(batch, blocks, block_size, heads, dim).sum(axis=2, dtype=jnp.float32)


def _group(q: Float[Array, "B L Hq d"], head: Array, kv_heads: int) -> Float[Array, "B L G d"]:
    """The queries of one KV head."""
    batch, tokens, heads, dim = q.shape
    return q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)[:, :, head]


def _with_dense_rows(listed: Listed, short: Bool[Array, " B"], block_size: int, *, everything: bool) -> Listed:
    """The same lists with all blocks of a tile, or with none, in rows that are short."""
    (distances, counts), columns = listed
    tiles = jnp.arange(counts.shape[-1], dtype=jnp.int32)
    all_of_them = (jnp.arange(distances.shape[-1], dtype=jnp.int32) + 1) * block_size
    rows = short[:, None, None]
    counts = jnp.where(rows, tiles + 1 if everything else 0, counts)
    if columns is not None:
        columns = columns._replace(counts=jnp.where(short[:, None], 0, columns.counts))
    return Listed(BlockLists(jnp.where(rows[..., None], all_of_them, distances), counts), columns)
