"""Tokens appended to caches, a block at a time, each as decoding would have fed it; and contexts that grow by them.

Rows are aligned to blocks: the token of row i at position p lies in column p - (start_i // b) b, so the edges of blocks
coincide in all rows, and a layer is one scan over blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from tca_jax.engine.cache import (
    LayerCache,
    attend_cache,
    evict_block,
    gather_pools,
    region_capacities,
    rows_with_leaving_block,
    spread_pools,
)
from tca_jax.engine.layouts import CacheLayout, with_capacities
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import bucket_length
from tca_jax.methods.base import CachePolicy, Method
from tca_jax.methods.regions import Regions
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.extend_attention import extend_attention
from tca_jax.pallas_kernels.integers import cdiv, round_up
from tca_jax.pallas_kernels.kv import Pool, Ring

_PIECE_TOKENS = 2048  # of a row in one call of the decoder: enough for matrix products at full speed


class AppendedColumns(NamedTuple):
    """Where the appended tokens of each row are.

    Attributes:
        first: Position of column 0, a multiple of b, `[B]`.
        starts: Position of the first new token, `[B]`: tokens that were there before.
        ends: One past the last, `[B]`.
        prompt_lengths: Tokens that the first prefill dealt with, `[B]`.
    """

    first: Int[Array, " B"]
    starts: Int[Array, " B"]
    ends: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]


class Extended(NamedTuple):
    """What `extend` gives.

    Attributes:
        caches: One a layer, with the tokens in them.
        logits: Of the token after each row's last, float32 `[B, V]`.
        hidden: The decoder's output in every column, `[B, S, D]`, arbitrary where there is no new token; None unless
            `keep_hidden`.
    """

    caches: tuple[LayerCache, ...]
    logits: Float32[Array, "B V"]
    hidden: Float[Array, "B S D"] | None


def num_columns(most_columns: int, block_size: int) -> int:
    """Columns that programs are compiled for: whole blocks in buckets, and whole pieces where there are several."""
    blocks = bucket_length(cdiv(most_columns, block_size), smallest=1)
    piece = _piece_blocks(block_size)
    return block_size * (blocks if blocks <= piece else round_up(blocks, piece))


def align(
    tokens: Int[np.ndarray, "B L"], starts: Int[np.ndarray, " B"], *, block_size: int, columns: int
) -> Int[np.ndarray, "B S"]:
    """Right-padded rows moved to the columns that `extend` wants them in.

    Args:
        tokens: Appended tokens, right-padded, `[B, L]`.
        starts: Position of each row's first, `[B]`.
        block_size: Tokens in a block, b.
        columns: S, at least (start mod b) + tokens of every row; from `num_columns`.

    Returns:
        int32 `[B, S]`; what lies beside a row's tokens is arbitrary.
    """
    places = np.arange(columns) - (starts % block_size)[:, None]
    return np.take_along_axis(tokens, np.clip(places, 0, tokens.shape[1] - 1), axis=1)


def extend(
    lm: LM,
    caches: tuple[LayerCache, ...],
    tokens: Int[Array, "B S"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    prompt_lengths: Int[Array, " B"],
    *,
    keep_hidden: bool = False,
    backend: Backend = "auto",
) -> Extended:
    """Feeds tokens behind what caches hold. Each behaves as if decoding had fed it, however they are cut into calls.

    Growth and rings are updated in place where the caller gives them away; pools are not written.

    Args:
        lm: The model, under the method of the caches.
        caches: One a layer, with room for what leaves the window (`CacheLayout.with_growth`).
        tokens: Appended tokens as `align` lays them out; S is a multiple of b, of `num_columns`.
        starts: Tokens in the caches, `[B]`, at least 1.
        lengths: Tokens to append, `[B]`; a row of none is left as it is, and its logits mean nothing.
        prompt_lengths: Tokens that the first prefill dealt with, `[B]`.
        keep_hidden: Whether `Extended.hidden` is wanted.
        backend: Kernel backend.
    """
    decoder, b = lm.decoder, caches[0].layout.block_size
    batch, columns = tokens.shape
    where = AppendedColumns(starts // b * b, starts, starts + lengths, prompt_lengths)
    piece = min(columns, b * _piece_blocks(b))
    state = _Progress(
        caches=caches,
        last=jnp.zeros((batch, lm.config.hidden_size), decoder.dtype),
        hidden=jnp.zeros((batch, columns, lm.config.hidden_size), decoder.dtype) if keep_hidden else None,
    )

    def one_piece(index: Array, state: _Progress) -> _Progress:
        part = jax.lax.dynamic_slice_in_dim(tokens, index * piece, piece, axis=1)
        here = where._replace(first=where.first + index * piece)
        found, caches = _read_piece(lm, state.caches, part, here, backend)
        last = where.ends - 1 - here.first
        picked = jnp.take_along_axis(found, jnp.clip(last, 0, piece - 1)[:, None, None], axis=1)[:, 0]
        inside = (last >= 0) & (last < piece)
        hidden = state.hidden
        if hidden is not None:
            hidden = jax.lax.dynamic_update_slice_in_dim(hidden, found, index * piece, axis=1)
        return _Progress(caches, jnp.where(inside[:, None], picked, state.last), hidden)

    pieces = columns // piece
    if pieces == 1:
        state = one_piece(jnp.int32(0), state)
    else:  # as many as the longest row needs
        needed = jnp.minimum(pieces, jnp.max(-(-(where.ends - where.first) // piece)))
        state = jax.lax.fori_loop(0, needed, one_piece, state)
    return Extended(state.caches, decoder.logits(state.last), state.hidden)


class _Progress(NamedTuple):
    """Between two pieces: the caches, the hidden state of each row's last token, and that of all columns."""

    caches: tuple[LayerCache, ...]
    last: Float[Array, "B D"]
    hidden: Float[Array, "B S D"] | None


def _piece_blocks(block_size: int) -> int:
    return max(1, _PIECE_TOKENS // block_size)


def _read_piece(
    lm: LM, caches: tuple[LayerCache, ...], tokens: Int[Array, "B S"], where: AppendedColumns, backend: Backend
) -> tuple[Float[Array, "B S D"], tuple[LayerCache, ...]]:
    """The decoder over some columns."""

    def attention(layer: int, q: Array, k: Array, v: Array, cache: LayerCache) -> tuple[Array, LayerCache]:
        return extend_layer(lm.method, layer, q, k, v, cache, where, backend)

    positions = where.first[:, None] + jnp.arange(tokens.shape[1])
    positions = jnp.clip(positions, 0, where.ends[:, None] - 1)
    hidden, caches = lm.decoder(tokens, positions, attention, spread_pools(caches), each_as_last=True)
    return hidden, gather_pools(caches)


def extend_layer(
    method: Method,
    layer: int,
    q: Float[Array, "B S Hq d"],
    k: Float[Array, "B S Hkv d"],
    v: Float[Array, "B S Hkv d"],
    cache: LayerCache,
    where: AppendedColumns,
    backend: Backend = "auto",
) -> tuple[Float[Array, "B S Hq d"], LayerCache]:
    """A layer's attention of appended tokens, block by block: what leaves the window, what joins it, attention.

    Args:
        method: Attention method.
        layer: The layer.
        q: Rotated queries, `[B, S, H_q, d]`, S whole blocks; `k` and `v` likewise with H_kv heads.
        cache: The layer's cache, its pool shared or not.
        where: Which columns are new tokens.
        backend: Kernel backend.

    Returns:
        Attention output `[B, S, H_q, d]`, arbitrary but finite where a column is no new token, and the cache.
    """
    b = cache.layout.block_size
    one_block = functools.partial(_extend_block, method, layer, where=where, backend=backend)
    if q.shape[1] == b:
        return one_block(cache, q, k, v, where.first)
    blocks = [jnp.swapaxes(x.reshape(x.shape[0], -1, b, *x.shape[2:]), 0, 1) for x in (q, k, v)]
    starts = where.first + b * jnp.arange(q.shape[1] // b)[:, None]

    # The pool stays outside of the loop, which nothing but growth and ring go through.
    def step(state: tuple, block: tuple) -> tuple[tuple, Array]:
        growth, ring = state
        out, after = one_block(dataclasses.replace(cache, growth=growth, ring=ring), *block)
        return (after.growth, after.ring), out

    (growth, ring), out = jax.lax.scan(step, (cache.growth, cache.ring), (*blocks, starts))
    out = jnp.swapaxes(out, 0, 1).reshape(q.shape)
    return out, dataclasses.replace(cache, growth=growth, ring=ring)


def _extend_block(
    method: Method,
    layer: int,
    cache: LayerCache,
    q: Float[Array, "B b Hq d"],
    k: Float[Array, "B b Hkv d"],
    v: Float[Array, "B b Hkv d"],
    block_starts: Int[Array, " B"],
    *,
    where: AppendedColumns,
    backend: Backend,
) -> tuple[Float[Array, "B b Hq d"], LayerCache]:
    """One block of every row, of which some columns may be no new tokens."""
    layout = cache.layout
    if layout.evicts:
        with jax.named_scope("evict_block"):
            cache = _evict(method, layer, q[:, 0], k[:, 0], cache, block_starts, where, backend)
    positions = block_starts[:, None] + jnp.arange(layout.block_size)
    new = (positions >= where.starts[:, None]) & (positions < where.ends[:, None])
    ring = Ring(*(_write_block(x, y, positions, new) for x, y in zip(cache.ring, (k, v), strict=True)))
    cache = dataclasses.replace(cache, ring=ring)
    with jax.named_scope("extend_attention"):
        out, _ = extend_attention(
            q,
            cache.pool,
            cache.ring,
            block_starts,
            jnp.minimum(where.ends, block_starts + layout.block_size) - 1,
            growth=cache.growth,
            block_size=layout.block_size,
            window=layout.window,
            **region_capacities(layout),
            backend=backend,
        )
    return out, cache


def _evict(
    method: Method,
    layer: int,
    q: Float[Array, "B Hq d"],
    k: Float[Array, "B Hkv d"],
    cache: LayerCache,
    block_starts: Int[Array, " B"],
    where: AppendedColumns,
    backend: Backend,
) -> LayerCache:
    """Decides on the leaving block of each row by the block's first query, as decoding does."""
    leaving = rows_with_leaving_block(cache.layout, block_starts, where.prompt_lengths)
    leaving &= (block_starts >= where.starts) & (block_starts < where.ends)

    def log_sum_exp() -> Float32[Array, "B Hq"]:
        return attend_cache(q, cache, jnp.maximum(block_starts - 1, 0), backend)[1]

    # A pass over all that is kept, of which only the normaliser is wanted, and only where a block leaves.
    lse = jax.lax.cond(jnp.any(leaving), log_sum_exp, lambda: jnp.zeros(q.shape[:2], jnp.float32))
    return evict_block(method.cache, layer, q, k, cache, block_starts, leaving, lse)


def _write_block(
    ring: Float[Array, "B Hkv R d"], block: Float[Array, "B b Hkv d"], positions: Array, new: Array
) -> Float[Array, "B Hkv R d"]:
    """Puts the new tokens of a block into their slots."""
    slots = jnp.where(new, positions % ring.shape[2], ring.shape[2])  # out of range: dropped
    rows = jnp.arange(ring.shape[0])[:, None]
    return ring.at[rows, :, slots].set(block, mode="drop")


def open_caches(lm: LM, caches: tuple[LayerCache, ...], rows: int, fed_tokens: int) -> tuple[LayerCache, ...]:
    """A context's caches with `rows` rows, and room for what leaves the window while `fed_tokens` are fed; static."""

    def opened(layer: int, cache: LayerCache) -> LayerCache:
        cache = cache.repeat_rows(rows // cache.layout.batch)
        return cache.with_growth(cache.layout.with_growth(lm.method.cache, layer, fed_tokens).growth)

    return tuple(opened(layer, cache) for layer, cache in enumerate(caches))


# Where a region is too small, there is room made for more than is fed: for so many blocks, or this part of the context.
_HEADROOM_BLOCKS = 8
_HEADROOM_SHARE = 8


def layouts_after(
    policy: CachePolicy, caches: Sequence[LayerCache], rows: int, fed_tokens: int
) -> tuple[CacheLayout, ...]:
    """The caches that a context has once `fed_tokens` were appended, in `rows` rows of a device.

    The regions are as now where everything is sure to fit, so that a conversation's turns mostly run one program;
    otherwise there is room for some more turns.
    """
    layouts = [dataclasses.replace(cache.layout, batch=rows, growth=None) for cache in caches]
    return with_capacities(layouts, [_capacities(policy, *each, fed_tokens) for each in enumerate(caches)])


def _capacities(policy: CachePolicy, layer: int, cache: LayerCache, fed_tokens: int) -> Int[np.ndarray, "devices Hkv"]:
    """Tokens that a layer's regions are to hold on each device."""
    layout = cache.layout
    now = layout.capacities_by_device
    held = on_host(cache.pool.lengths).reshape(-1, *now.shape).max(axis=0)
    if np.all(held + layout.growth_by_device(policy, layer, fed_tokens) <= now):
        return now
    headroom = max(_HEADROOM_BLOCKS * layout.block_size, layout.prompt_tokens // _HEADROOM_SHARE)
    return np.maximum(held + layout.growth_by_device(policy, layer, fed_tokens + headroom), now)


def fold(caches: tuple[LayerCache, ...], layouts: tuple[CacheLayout, ...]) -> tuple[LayerCache, ...]:
    """The caches with what is kept in their pools alone, each row with regions of its own, from `layouts_after`."""
    folded: list[LayerCache] = []
    for cache, layout in zip(spread_pools(caches), layouts, strict=True):
        regions, lengths = layout.regions, cache.pool.lengths
        k, v = (_fold(cache, name, regions) for name in ("k", "v"))
        lengths = lengths if cache.growth is None else lengths + cache.growth.lengths
        if layout.shared is None:
            pool = Pool(k, v, jnp.asarray(regions.offsets, jnp.int32), lengths)
        else:
            own = Pool(k, v, cache.pool.offsets, lengths)
            pool = layout.shared.write(regions, own, folded[-1].pool if folded else None)
        folded.append(LayerCache(pool, None, cache.ring, layout))
    return gather_pools(tuple(folded))


def _fold(cache: LayerCache, name: str, regions: Regions) -> Float[Array, "P d"]:
    """Keys or values of all regions, those of the pool before those of the growth."""
    if not regions.row_tokens:
        return getattr(regions.empty(cache.ring.k.shape[-1], cache.ring.k.dtype), name)
    pool, growth = cache.pool, cache.growth
    parts = []
    for head, capacity in enumerate(regions.capacities):
        slots, held = jnp.arange(capacity), pool.lengths[:, head, None]
        part = getattr(pool, name).at[pool.offsets[:, head, None] + slots].get(mode="clip")
        if growth is not None:
            later = getattr(growth, name).at[growth.offsets[:, head, None] + slots - held].get(mode="clip")
            part = jnp.where((slots < held)[..., None], part, later)
        parts.append(part)
    return jnp.concatenate(parts, axis=1).reshape(-1, parts[0].shape[-1])
