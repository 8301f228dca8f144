"""Block-sparse prefill: what its members share. Each lists blocks and columns of keys; the kernel attends to these."""

from __future__ import annotations

import abc
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.methods.base import PrefillPolicy
from tca_jax.methods.regions import Selected
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.block_sparse_attention import BlockLists, Columns, block_sparse_attention
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.integers import cdiv

#: Lists of all heads lie in memory together up to so many bytes; past that KV heads are taken one after another.
_MOST_BYTES = 2**30

#: Attention of a block of queries that lies in memory at once: of as many KV heads at a time are estimates made.
_MOST_SAMPLED = 2**28


class Listed(NamedTuple):
    """What query tiles attend to, in one launch of the kernel.

    Attributes:
        blocks: Blocks of every tile and query head.
        columns: Single tokens of every query head, or None.
    """

    blocks: BlockLists
    columns: Columns | None = None

    def attend(
        self,
        q: Float[Array, "B L Hq d"],
        k: Float[Array, "B L Hkv d"],
        v: Float[Array, "B L Hkv d"],
        lengths: Int[Array, " B"],
        *,
        block_size: int,
        aligned: bool,
        backend: Backend,
    ) -> Float[Array, "B L Hq d"]:
        """Attention over it; see `block_sparse_attention`. Tiles are as large as blocks."""
        return block_sparse_attention(
            q,
            k,
            v,
            self.blocks,
            lengths,
            columns=self.columns,
            block_size=block_size,
            tile_size=block_size,
            aligned=aligned,
            backend=backend,
        )


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
        layer: int,
        head: Int[Array, ""],
        heads: int,
        q: Float[Array, "B L G d"],
        k: Float[Array, "B L d"],
        lengths: Int[Array, " B"],
    ) -> tuple[Listed, ...]:
        """What the query heads of one KV head attend to.

        Args:
            layer: The layer.
            head: The KV head, of those that the program sees (`methods.heads`); traced.
            heads: Query heads that it sees.
            q: Queries of its group after RoPE, right-padded.
            k: Its keys.
            lengths: Prompt lengths, traced.

        Returns:
            Lists with the group's heads as theirs, one for each launch. A query head lists something in one of them at
            most: the launches' results are added.
        """

    def listed(
        self, layer: int, q: Float[Array, "B L Hq d"], k: Float[Array, "B L Hkv d"], lengths: Int[Array, " B"]
    ) -> tuple[Listed, ...]:
        """What all query heads attend to, `dense_tokens` heeded."""
        (batch, tokens, kv_heads, _), group = k.shape, q.shape[2] // k.shape[2]
        at_once = max(1, _MOST_SAMPLED // (batch * group * tokens * self.block_size))
        at_once = max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= at_once)
        heads = jnp.arange(kv_heads)
        of_heads = jax.lax.map(lambda head: self._of_head(layer, head, q, k, lengths), heads, batch_size=at_once)
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), of_heads)

    def attend(
        self, layer: int, q: Array, k: Array, v: Array, lengths: Array, selected: Selected | None, backend: Backend
    ) -> Float[Array, "B L Hq d"]:
        batch, tokens, kv_heads, _ = k.shape
        if tokens <= self.dense_tokens:
            return causal_attention(q, k, v, lengths, backend=backend)
        entries = batch * q.shape[2] * cdiv(tokens, self.block_size) ** 2
        if 4 * entries <= _MOST_BYTES:
            with jax.named_scope("estimate"):
                listed = self.listed(layer, q, k, lengths)
            return self.attend_listed(q, k, v, listed, lengths, backend)

        def one_head(head: Array) -> Float[Array, "B L G d"]:
            with jax.named_scope("estimate"):
                listed = self._of_head(layer, head, q, k, lengths)
            keys, values = (x[:, :, head][:, :, None] for x in (k, v))
            return self.attend_listed(_group(q, head, kv_heads), keys, values, listed, lengths, backend)

        outputs = jax.lax.map(one_head, jnp.arange(kv_heads))  # [Hkv, B, L, G, d]
        return jnp.moveaxis(outputs, 0, 2).reshape(q.shape)

    def attend_listed(
        self, q: Array, k: Array, v: Array, listed: tuple[Listed, ...], lengths: Array, backend: Backend
    ) -> Float[Array, "B L Hq d"]:
        """Attention over what `listed` gave."""
        first, *others = (
            one.attend(q, k, v, lengths, block_size=self.block_size, aligned=self.aligned, backend=backend)
            for one in listed
        )
        return sum(others, start=first)

    def _of_head(self, layer: int, head: Array, q: Array, k: Array, lengths: Array) -> tuple[Listed, ...]:
        estimated = self.estimate(layer, head, q.shape[2], _group(q, head, k.shape[2]), k[:, :, head], lengths)
        short = lengths <= self.dense_tokens
        return tuple(
            _with_dense_rows(one, short, self.block_size, everything=number == 0)
            for number, one in enumerate(estimated)
        )


def computed_area(listed: tuple[Listed, ...], lengths: Int[Array, " B"], block_size: int) -> Float32[Array, ""]:
    """Share of the causal triangle that is computed, mean over rows and heads; a tile computes its own block whole.

    Columns count in full, also where a block has them: they are gathered all the same.
    """
    pairs = jnp.float32(0)
    for blocks, columns in listed:
        ends = (jnp.arange(blocks.counts.shape[-1]) + 1) * block_size
        alive = ends - block_size < lengths[:, None, None]
        tokens = (blocks.counts * block_size).astype(jnp.float32)
        if columns is not None:
            valid = jnp.arange(columns.tokens.shape[-1]) < columns.counts[..., None]
            tokens += (valid[..., None, :] & (columns.tokens[..., None, :] < ends[:, None])).sum(axis=-1)
        pairs += jnp.where(alive, tokens * block_size, 0).sum(axis=-1).mean(axis=1)
    triangles = lengths.astype(jnp.float32) ** 2 / 2
    return jnp.mean(pairs / triangles)


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
