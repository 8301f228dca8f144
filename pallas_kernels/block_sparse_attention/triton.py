"""Block-sparse attention through Pallas-Triton: one program a query tile of one head.

A program takes the blocks that need a mask first, the nearest ones, which the diagonal crosses, and the last one, which
may begin left of the prompt; then the blocks between, in a plain loop; then the columns, gathered, but for those that a
block has. So its cost is that of what is listed for it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from tca_jax.pallas_kernels.block_sparse_attention.lists import BlockLists, Columns, entries_by_distance
from tca_jax.pallas_kernels.kernel_math import divide_up, quotient_and_remainder
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.pallas_kernels.triton_call import (
    AttentionTiles,
    attention_tiles,
    check_supported,
    online_softmax_step,
    triton_call,
)

#: Where the largest score of a row begins: a power of two, above `MASKED`, so that masked scores weigh nothing
#: (`online_softmax_step`).
_LOWEST = -(2.0**96)
State = tuple[Array, Array, Array]


class _ColumnLists(NamedTuple):
    """Columns in the kernel's form; arrays or refs."""

    tokens: Any  # positions `[B, Hq, V]`
    counts: Any  # columns left of every tile's end `[B, Hq, N]`
    entries: Any  # which block has the token at each distance left of a tile's end `[B, Hq, m N + 1]`


@partial(jax.jit, static_argnames=("block_size", "tile_size", "aligned", "config", "interpret"))
@jax.named_scope("block_sparse_attention")
def block_sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    blocks: BlockLists,
    lengths: Array,
    *,
    columns: Columns | None = None,
    block_size: int,
    tile_size: int,
    aligned: bool = False,
    config: AttentionTiles | None = None,
    interpret: bool = False,
) -> Array:
    """See `block_sparse_attention.block_sparse_attention`. Unattended tokens are never read."""
    batch, length, heads, head_dim = q.shape
    check_supported("block_sparse_attention", head_dim, q, k, v, block_size=block_size)
    config = config or attention_tiles(tile_size, block_size, head_dim, q.dtype)
    kv_heads, tiles = k.shape[2], blocks.counts.shape[-1]
    listed = None if columns is None else _column_lists(blocks, columns, tiles, block_size, tile_size)
    # The regions, one a row and KV head, with most to do come first.
    work = blocks.counts.reshape(batch * kv_heads, -1).sum(axis=-1)
    order = jnp.argsort(-work).astype(jnp.int32)
    kernel = partial(_attend, block_size=block_size, tile_size=tile_size, config=config, interpret=interpret)
    (out,) = triton_call(
        kernel,
        (q, k, v, blocks, listed, lengths, order),
        [(q.shape, q.dtype)],
        grid=(batch * heads * cdiv(length, config.queries),),
        name="block_sparse_attention",
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    return out


def _column_lists(blocks: BlockLists, columns: Columns, tiles: int, block_size: int, tile_size: int) -> _ColumnLists:
    """Columns with their counts by tile and entries by distance."""
    ends = (jnp.arange(tiles, dtype=jnp.int32) + 1) * tile_size
    valid = jnp.arange(columns.tokens.shape[-1]) < columns.counts[..., None]
    left = valid[..., None, :] & (columns.tokens[..., None, :] < ends[:, None])
    entries = entries_by_distance(blocks, tiles * tile_size + 1, block_size)
    return _ColumnLists(columns.tokens, left.sum(axis=-1, dtype=jnp.int32), entries)


def _attend(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    blocks: BlockLists,
    columns: _ColumnLists | None,
    lengths_ref: Any,
    order_ref: Any,
    out_ref: Any,
    *,
    block_size: int,
    tile_size: int,
    config: AttentionTiles,
    interpret: bool,
) -> None:
    """Attention of one query tile of one head."""
    _, tokens, heads, head_dim = q_ref.shape
    group, programs = heads // k_ref.shape[2], cdiv(tokens, config.queries)
    # Heads of a group run side by side, and regions one after another, since they share K and V in the L2 cache; the
    # last tiles, which can see most, come first, so that no long program is left over at the end.
    turn, member = quotient_and_remainder(pl.program_id(0), group)
    turn, number = quotient_and_remainder(turn, programs)
    row, kv_head = quotient_and_remainder(order_ref[turn], k_ref.shape[2])
    head, first = kv_head * group + member, (programs - 1 - number) * config.queries
    tile, _ = quotient_and_remainder(first, tile_size)
    length, end = lengths_ref[row], (tile + 1) * tile_size
    alive = first < length  # the loops of a tile past the length have no trips
    count = jnp.where(alive, blocks.counts[row, head, tile], 0)

    rows = first + jnp.arange(config.queries)
    q = pltriton.load(q_ref.at[row, pl.ds(first, config.queries), head, :], mask=(rows < length)[:, None], other=0.0)
    step = partial(online_softmax_step, q, interpret=interpret)
    steps = block_size // config.keys  # tiles of K and V in a block
    lanes, dims = jnp.arange(config.keys), jnp.arange(head_dim)
    # Blocks that a tile's queries do not all see end right of its first token, and begin at most m + b - 1 before its
    # end: blocks do not overlap, so these are at most the nearest m / b + 1.
    near = jnp.minimum(count, tile_size // block_size + 1)

    def begin(entry: Array) -> Array:
        """First token of a block."""
        return end - blocks.distances[row, head, tile if blocks.distances.shape[2] > 1 else 0, entry]

    def gathered(token: Array, inside: Array, state: State) -> State:
        """Takes tokens one by one; those that are not `inside` are not read."""
        where = (row, jnp.where(inside, token, 0)[:, None], kv_head, dims[None, :])
        k, v = (pltriton.load(ref.at[where], mask=inside[:, None], other=0.0) for ref in (k_ref, v_ref))
        return step(state, k, v, inside[None, :] & (token[None, :] <= rows[:, None]))

    def masked(i: Array, state: State) -> State:
        index, part = quotient_and_remainder(i, steps)
        token = begin(jnp.where(index < near, index, count - 1)) + part * config.keys + lanes
        return gathered(token, (token >= 0) & (token < length), state)

    def plain(i: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        state, start = carry
        # Where a block begins is read one step ahead: the fetches of its tiles need not wait for it.
        following = begin(jnp.minimum(lax.div(i + 1, jnp.int32(steps)), jnp.maximum(count - 1, 0)))
        where = (row, pl.ds(start + lax.rem(i, jnp.int32(steps)) * config.keys, config.keys), kv_head, slice(None))
        return step(state, pltriton.load(k_ref.at[where]), pltriton.load(v_ref.at[where])), following

    def column(columns: _ColumnLists, i: Array, state: State) -> State:
        index = i * config.keys + lanes
        valid = index < columns.counts[row, head, tile]
        token = pltriton.load(columns.tokens.at[row, head, pl.ds(i * config.keys, config.keys)], mask=valid, other=0)
        entry = pltriton.load(columns.entries.at[row, head, end - token], mask=valid, other=0)
        return gathered(token, valid & (entry >= count) & (token < length), state)

    state = (
        jnp.zeros((config.queries, head_dim), jnp.float32),
        jnp.full((config.queries,), _LOWEST, jnp.float32),
        jnp.zeros((config.queries,), jnp.float32),
    )
    far = (count > near).astype(jnp.int32)
    state = lax.fori_loop(0, (near + far) * steps, masked, state)
    start = begin(jnp.minimum(near, jnp.maximum(count - 1, 0)))
    state, _ = lax.fori_loop(near * steps, (count - far) * steps, plain, (state, start))
    if columns is not None:
        trips = divide_up(jnp.where(alive, columns.counts[row, head, tile], 0), config.keys)
        state = lax.fori_loop(0, trips, partial(column, columns), state)
    out, _, weight = state
    seen = (rows < length) & (weight > 0)
    out = jnp.where(seen[:, None], out / jnp.where(seen, weight, 1.0)[:, None], 0)
    pltriton.store(
        out_ref.at[row, pl.ds(first, config.queries), head, :],
        out.astype(out_ref.dtype),
        mask=(rows < tokens)[:, None],
    )
