"""Prefill attention through Pallas-Triton: one program a query tile of one head.

A program streams tiles of K and V: first the diagonal, then the last tile of the head's region in the pool, then the
rest of the region, then the window, listed blocks and means. After the diagonal every row has a finite maximum, so the
long loops are plain; listed blocks mask what is selected, means have a bias.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from tca_jax.pallas_kernels.kernel_math import divide_up, lengths_by_head, prefix_schedule, quotient_and_remainder
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.numerics import MASKED, cdiv
from tca_jax.pallas_kernels.prefill_attention import FarBlocks
from tca_jax.pallas_kernels.triton_call import (
    AttentionTiles,
    attention_tiles,
    check_supported,
    load_rows,
    online_softmax_step,
    triton_call,
)


@partial(jax.jit, static_argnames=("block_size", "window", "config", "interpret"))
@jax.named_scope("prefill_attention")
def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    pool: Pool,
    budgets: Array,
    lengths: Array,
    *,
    block_size: int,
    window: int,
    far: FarBlocks | None = None,
    config: AttentionTiles | None = None,
    interpret: bool = False,
) -> Array:
    """See `prefill_attention.prefill_attention`. Unattended tokens are never read."""
    batch, length, heads, head_dim = q.shape
    check_supported("prefill_attention", head_dim, q, k, v, pool.k, pool.v, block_size=block_size)
    config = config or attention_tiles(block_size, block_size, head_dim, q.dtype)
    num_blocks = cdiv(length, block_size)
    far_work = 0.0 if far is None else far.work(block_size)
    prefixes, order = prefix_schedule(budgets, num_blocks, window // block_size, far_work)
    kernel = partial(_attend, block_size=block_size, window=window, config=config, interpret=interpret)
    (out,) = triton_call(
        kernel,
        (q, k, v, pool.k, pool.v, pool.offsets, prefixes, lengths_by_head(lengths, k.shape[2]), order, far or ()),
        [(q.shape, q.dtype)],
        grid=(batch * heads * cdiv(length, config.queries),),
        name="prefill_attention",
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    return out


def _attend(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    k_pool_ref: Any,
    v_pool_ref: Any,
    offsets_ref: Any,
    prefixes_ref: Any,
    lengths_ref: Any,
    order_ref: Any,
    far: FarBlocks | tuple[()],  # of refs
    out_ref: Any,
    *,
    block_size: int,
    window: int,
    config: AttentionTiles,
    interpret: bool,
) -> None:
    """Attention of one query tile of one head."""
    _, tokens, heads, head_dim = q_ref.shape
    kv_heads = k_ref.shape[2]
    group, tiles = heads // kv_heads, cdiv(tokens, config.queries)
    # Heads of a group run side by side and regions one after another, since they share K and V in the L2 cache; the
    # largest regions and their longest tiles come first, so that no long program is left over at the end.
    turn, member = quotient_and_remainder(pl.program_id(0), group)
    turn, tile = quotient_and_remainder(turn, tiles)
    row, kv_head = quotient_and_remainder(order_ref[turn], kv_heads)
    head, first = kv_head * group + member, (tiles - 1 - tile) * config.queries
    length, offset = lengths_ref[row, kv_head], offsets_ref[row, kv_head]
    block, _ = quotient_and_remainder(first, block_size)
    alive = first < length  # the loops of a tile past the length have no trips
    prefix = jnp.where(alive, prefixes_ref[row, kv_head, block], 0)
    edge = jnp.maximum(block * block_size - window, 0)

    rows, columns = first + jnp.arange(config.queries), jnp.arange(config.keys)
    q = pltriton.load(q_ref.at[row, pl.ds(first, config.queries), head, :], mask=(rows < length)[:, None], other=0.0)

    def step(state: Any, k: Array, v: Array, visible: Array | None = None, bias: Array | None = None) -> Any:
        return online_softmax_step((q,), state, (k,), (v,), visible, bias=bias, interpret=interpret)

    def attend_span(
        begin: Any, end: Any, load: Callable[..., tuple[Array, Array]], state: Any, visible: Any = None
    ) -> Any:
        """Attends to the tokens from `begin` to `end` by full tiles; `visible` gives the mask of a tile."""

        def body(i: Array, state: Any) -> Any:
            start = begin + i * config.keys
            if visible is None:
                return step(state, *load(start))
            inside, mask = visible(start)
            return step(state, *load(start, inside[:, None]), mask)

        return lax.fori_loop(0, divide_up(jnp.maximum(end - begin, 0), config.keys), body, state)

    def local(start: Array, inside: Array | None = None) -> tuple[Array, Array]:
        where = (row, pl.ds(start, config.keys), kv_head, slice(None))
        return load_rows(k_ref.at[where], inside), load_rows(v_ref.at[where], inside)

    def pooled(start: Array, inside: Array | None = None) -> tuple[Array, Array]:
        where = (pl.ds(offset + start, config.keys), slice(None))
        return load_rows(k_pool_ref.at[where], inside), load_rows(v_pool_ref.at[where], inside)

    def causal(start: Array) -> tuple[Array, Array]:
        token = start + columns
        return token < length, token[None, :] <= rows[:, None]

    def selected(start: Array) -> tuple[Array, Array]:
        inside = start + columns < prefix
        return inside, inside[None, :]

    state = (
        (jnp.zeros((config.queries, head_dim), jnp.float32),),
        jnp.full((config.queries,), MASKED, jnp.float32),
        jnp.zeros((config.queries,), jnp.float32),
    )
    whole = prefix - lax.rem(prefix, config.keys)
    state = attend_span(first, jnp.minimum(first + config.queries, length), local, state, causal)
    state = attend_span(whole, prefix, pooled, state, selected)
    state = attend_span(0, whole, pooled, state)
    state = attend_span(edge, jnp.where(alive, first, edge), local, state)
    if isinstance(far, FarBlocks):
        place = (row, kv_head, block)

        def listed(i: Array, state: Any) -> Any:
            start = far.blocks[(*place, i)]

            def unselected(start: Array) -> tuple[Array, Array]:
                taken = far.selected[row, kv_head, pl.ds(start, config.keys)]
                return ~taken, ~taken[None, :]

            return attend_span(start, start + block_size, local, state, unselected)

        def mean_tile(i: Array, state: Any) -> Any:
            index = pl.ds(i * config.keys, config.keys)
            inside = i * config.keys + columns < means
            of_means: Any = far.mean_bias.at[(*place, index)]
            bias = pltriton.load(of_means, mask=inside, other=-jnp.inf)
            attended = bias > -jnp.inf
            mean_k, mean_v = (
                load_rows(x.at[row, index, kv_head, :], attended[:, None]) for x in (far.mean_k, far.mean_v)
            )
            return step(state, mean_k, mean_v, attended[None, :], bias=jnp.where(attended, bias, 0.0))

        means = jnp.where(alive, far.mean_counts[place], 0)
        state = lax.fori_loop(0, jnp.where(alive, far.counts[place], 0), listed, state)
        state = lax.fori_loop(0, divide_up(means, config.keys), mean_tile, state)
    (out,), _, weight = state
    out = jnp.where((rows < length)[:, None], out / weight[:, None], 0)
    pltriton.store(
        out_ref.at[row, pl.ds(first, config.queries), head, :],
        out.astype(out_ref.dtype),
        mask=(rows < tokens)[:, None],
    )
