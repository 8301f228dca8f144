"""Prefill attention through Pallas-Triton: one program a query tile of one head.

A program streams tiles of K and V: first the diagonal, then the last tile of the head's region in the pool, then the
rest of the region, then the window. Only the first two need a mask. In the two long loops the matrix units compute the
scores of a tile while the softmax of the tile before is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from tca_jax.pallas_kernels.kernel_math import LOG2E, full_precision_tile, scaled_exp2, shared_memory, split
from tca_jax.pallas_kernels.numerics import MASKED
from tca_jax.pallas_kernels.triton_call import check_supported, divide_up, dot, triton_call


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Tiling of prefill attention.

    Attributes:
        queries: Query rows of a program, a power of two from 16 that divides the block size.
        keys: Tokens of a tile of K and V, a power of two from 16 up to `queries`.
        warps: Warps of a program.
        stages: Tiles of K and V in flight in a program.
    """

    queries: int
    keys: int
    warps: int
    stages: int


def default_config(block_size: int, head_dim: int, dtype: Any) -> PrefillConfig:
    """The largest tiles, then the deepest pipeline, that the shared memory holds."""
    itemsize = jnp.dtype(dtype).itemsize
    queries = math.gcd(block_size, 128)
    if itemsize == 4:
        tile, warps = full_precision_tile(head_dim)
        return PrefillConfig(min(queries, tile), min(queries, tile), warps, stages=1)
    for keys, stages in ((128, 3), (128, 2), (64, 3), (64, 2), (32, 2)):
        if (queries + 2 * stages * keys) * head_dim * itemsize <= shared_memory():
            break
    return PrefillConfig(queries, min(queries, keys), warps=8 if queries == 128 else 4, stages=stages)


@partial(jax.jit, static_argnames=("block_size", "window", "config", "interpret"))
@jax.named_scope("prefill_attention")
def prefill_attention(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    k_pool: Float[Array, "P d"],
    v_pool: Float[Array, "P d"],
    offsets: Int[Array, "B Hkv"],
    budgets: Int[Array, "B Hkv nb"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    window: int,
    config: PrefillConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "B L Hq d"]:
    """See `prefill_attention.prefill_attention`. What is not attended to is never read.

    Raises:
        NotImplementedError: the head dimension, the types, or a block size that is no multiple of 16.
    """
    batch, length, heads, head_dim = q.shape
    check_supported("prefill_attention", head_dim, q, k, v, k_pool, v_pool)
    if block_size % 16:
        raise NotImplementedError(
            f"prefill_attention on Triton: block_size = {block_size}: must be a multiple of 16, the least tile"
        )
    config = config or default_config(block_size, head_dim, q.dtype)
    num_blocks = pl.cdiv(length, block_size)
    prefixes, order = _schedule(budgets, num_blocks, window // block_size)
    kernel = partial(_attend, block_size=block_size, window=window, config=config, interpret=interpret)
    (out,) = triton_call(
        kernel,
        (q, k, v, k_pool, v_pool, offsets, prefixes, lengths, order),
        [(q.shape, q.dtype)],
        grid=(batch * heads * pl.cdiv(length, config.queries),),
        name="prefill_attention",
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    return out


def _schedule(
    budgets: Int[Array, "B Hkv nb"], num_blocks: int, window_blocks: int
) -> tuple[Int[Array, "B Hkv N"], Int[Array, " regions"]]:
    """Selected tokens left of each block's window, and the regions, largest first."""
    ends = jnp.pad(jnp.cumsum(budgets, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
    edges = jnp.clip(jnp.arange(num_blocks) - window_blocks, 0, budgets.shape[-1])
    return ends[..., edges], jnp.argsort(-ends[..., -1].ravel()).astype(jnp.int32)


class _Tiles(NamedTuple):
    """Refs to the tiles of K and of V that a loop streams, by number."""

    k: Callable[[Any], Any]
    v: Callable[[Any], Any]


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
    out_ref: Any,
    *,
    block_size: int,
    window: int,
    config: PrefillConfig,
    interpret: bool,
) -> None:
    """Attention of one query tile of one head."""
    _, tokens, heads, head_dim = q_ref.shape
    kv_heads = k_ref.shape[2]
    group, tiles = heads // kv_heads, pl.cdiv(tokens, config.queries)
    # Heads of a group run side by side and regions one after another, since they share K and V in the L2 cache; the
    # largest regions and their longest tiles come first, so that no long program is left over at the end.
    turn, member = split(pl.program_id(0), group)
    turn, tile = split(turn, tiles)
    row, kv_head = split(order_ref[turn], kv_heads)
    head, first = kv_head * group + member, (tiles - 1 - tile) * config.queries
    length, offset = lengths_ref[row], offsets_ref[row, kv_head]
    block, _ = split(first, block_size)
    alive = first < length  # the loops of a tile past the length have no trips
    prefix = jnp.where(alive, prefixes_ref[row, kv_head, block], 0)
    edge = jnp.maximum(block * block_size - window, 0)

    def local(begin: Any) -> _Tiles:
        def at(i: Any) -> tuple[Any, ...]:
            return row, pl.ds(begin + i * config.keys, config.keys), kv_head, slice(None)

        return _Tiles(lambda i: k_ref.at[at(i)], lambda i: v_ref.at[at(i)])

    def pooled(begin: Any) -> _Tiles:
        def at(i: Any) -> tuple[Any, ...]:
            return pl.ds(offset + begin + i * config.keys, config.keys), slice(None)

        return _Tiles(lambda i: k_pool_ref.at[at(i)], lambda i: v_pool_ref.at[at(i)])

    rows, columns = first + jnp.arange(config.queries), jnp.arange(config.keys)

    def causal(i: Array) -> tuple[Array, Array]:
        token = first + i * config.keys + columns
        return token < length, token[None, :] <= rows[:, None]

    def selected(i: Array) -> tuple[Array, Array]:
        inside = (full + i) * config.keys + columns < prefix
        return inside, inside[None, :]

    q = pltriton.load(q_ref.at[row, pl.ds(first, config.queries), head, :], mask=(rows < length)[:, None], other=0.0)
    state = (
        jnp.zeros((config.queries, head_dim), jnp.float32),
        jnp.full((config.queries,), MASKED, jnp.float32),
        jnp.zeros((config.queries,), jnp.float32),
    )
    stream = partial(_stream, q, config=config, interpret=interpret)
    full, rest = split(prefix, config.keys)
    trips = divide_up(jnp.clip(length - first, 0, config.queries), config.keys)
    state = _stream_masked(q, local(first), trips, causal, state, interpret=interpret)
    state = _stream_masked(q, pooled(full * config.keys), jnp.minimum(rest, 1), selected, state, interpret=interpret)
    state = stream(pooled(0), full, state)
    out, _, weight = stream(local(edge), split(jnp.where(alive, first - edge, 0), config.keys)[0], state)
    out = jnp.where((rows < length)[:, None], out / weight[:, None], 0)
    pltriton.store(
        out_ref.at[row, pl.ds(first, config.queries), head, :],
        out.astype(out_ref.dtype),
        mask=(rows < tokens)[:, None],
    )


#: Sum of weighted values, largest score and sum of weights of every query row, so far; scores are to base 2.
_State = tuple[Array, Array, Array]


def _stream_masked(
    q: Array,
    tiles: _Tiles,
    count: Array,
    mask: Callable[[Array], tuple[Array, Array]],
    state: _State,
    *,
    interpret: bool,
) -> _State:
    """Attends to `count` tiles; `mask` gives the tokens of a tile that are read, and which of them each row sees."""
    scale = LOG2E / math.sqrt(q.shape[1])

    def step(i: Array, state: _State) -> _State:
        out, peak, weight = state
        inside, visible = mask(i)
        # Tokens that are not read give zeros: whatever they hold, NaN even, cannot reach a product.
        k, v = (pltriton.load(ref(i), mask=inside[:, None], other=0.0) for ref in tiles)
        scores = jnp.where(visible, dot(q, k, transposed=True) * scale, MASKED)
        weights, decay, peak, weight = _softmax(scores, peak, weight, interpret=interpret)
        return out * decay[:, None] + dot(weights.astype(v.dtype), v), peak, weight

    return lax.fori_loop(0, count, step, state)


def _stream(q: Array, tiles: _Tiles, count: Array, state: _State, *, config: PrefillConfig, interpret: bool) -> _State:
    """Attends to `count` whole tiles; every row must have seen a token before."""
    scale = LOG2E / math.sqrt(q.shape[1])
    shape = (config.queries, config.keys)

    def step(i: Array, carry: tuple[_State, Array, Array]) -> tuple[_State, Array, Array]:
        # Triton waits for a product where it is made, unless only the next step uses it. So: the values of tile i - 2,
        # waited for; then the scores of tile i, which are computed during the softmax of tile i - 1. Scaling that
        # tile's scores first moves them out of the registers that the new ones arrive in.
        (out, peak, weight), weights, products = carry
        out = out + dot(weights.astype(q.dtype), tiles.v(jnp.maximum(i - 2, 0))[...])
        scores = products * scale
        products = dot(q, tiles.k(jnp.minimum(i, count - 1))[...], transposed=True)
        weights, decay, peak, weight = _softmax(scores, peak, weight, interpret=interpret)
        return (out * decay[:, None], peak, weight), weights, products

    def run(state: _State) -> _State:
        carry = (state, jnp.zeros(shape, jnp.float32), jnp.full(shape, MASKED, jnp.float32))
        (out, peak, weight), weights, _ = lax.fori_loop(0, count + 1, step, carry)
        return out + dot(weights.astype(q.dtype), tiles.v(count - 1)[...]), peak, weight

    return lax.cond(count > 0, run, lambda state: state, state)


def _softmax(scores: Array, peak: Array, weight: Array, *, interpret: bool) -> tuple[Array, Array, Array, Array]:
    """Weights of a tile, decay of what was summed before, and the rows' new largest score and sum of weights."""
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
    decay = scaled_exp2(peak, 1.0, -new_peak, interpret=interpret)
    weights = scaled_exp2(scores, 1.0, jnp.broadcast_to(-new_peak[:, None], scores.shape), interpret=interpret)
    return weights, decay, new_peak, weight * decay + jnp.sum(weights, axis=1)
