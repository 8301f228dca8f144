"""Tokens appended to caches, a block at a time, each as decoding would have fed it.

Rows are aligned to blocks: the token of row i at position p lies in column p - (start_i // b) b, so the edges of blocks
coincide in all rows, and a layer is one scan over blocks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.cache import PagedCache
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import heads_of
from tca_jax.engine.prompts import bucket_length
from tca_jax.methods.base import CachePolicy, Heads
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import cdiv, round_up, scaled_scores
from tca_jax.pallas_kernels.paged_attention import paged_attention
from tca_jax.pallas_kernels.select_tokens import selection_mask

_PIECE_TOKENS = 2048  # of a row in one call of the decoder: enough for matrix products at full speed


class AppendedColumns(NamedTuple):
    """Where the appended tokens of each row are."""

    first: Int[Array, " B"]  # position of column 0, a multiple of b, `[B]`
    starts: Int[Array, " B"]  # position of the first new token, `[B]`: tokens that were there before
    ends: Int[Array, " B"]  # one past the last, `[B]`
    prompt_lengths: Int[Array, " B"]  # tokens that the first prefill dealt with, `[B]`


class Extended(NamedTuple):
    """Result of `extend`."""

    cache: PagedCache  # with the tokens in it
    logits: Float32[Array, "B V"]  # of the token after each row's last, float32 `[B, V]`
    # The decoder's output in every column, `[B, S, D]`, arbitrary where there is no new token; None unless
    # `keep_hidden`.
    hidden: Float[Array, "B S D"] | None


def num_columns(most_columns: int, block_size: int) -> int:
    """Columns that programs are compiled for: a bucket of blocks, or a multiple of pieces."""
    blocks = bucket_length(cdiv(most_columns, block_size), smallest=1)
    piece = _piece_blocks(block_size)
    return block_size * (blocks if blocks <= piece else round_up(blocks, piece))


def align(
    tokens: Int[np.ndarray, "B L"], starts: Int[np.ndarray, " B"], *, block_size: int, columns: int
) -> Int[np.ndarray, "B S"]:
    """Right-padded rows moved to the columns that `extend` wants them in.

    Returns:
        int32 `[B, S]`; what lies beside a row's tokens is arbitrary.
    """
    places = np.arange(columns) - (starts % block_size)[:, None]
    return np.take_along_axis(tokens, np.clip(places, 0, tokens.shape[1] - 1), axis=1)


def extend(
    lm: LM,  # the model, under the method of the caches
    shared: PagedCache | None,  # what came before
    cache: PagedCache,  # the rows' own, with room for the tokens; updated in place where the caller gives it away
    tokens: Int[Array, "B S"],  # appended tokens as `align` lays them out; S is a multiple of b, of `num_columns`
    starts: Int[Array, " B"],  # tokens in the caches, at least 1
    lengths: Int[Array, " B"],  # tokens to append; a row of none is left as it is, and its logits mean nothing
    prompt_lengths: Int[Array, " B"],  # tokens that the first prefill dealt with
    *,
    keep_hidden: bool = False,  # whether `Extended.hidden` is wanted
    backend: Backend = "auto",
) -> Extended:
    """Appends tokens to caches. Each behaves as if decoding had fed it, however they are split into calls."""
    decoder, b = lm.decoder, cache.block_size
    batch, columns = tokens.shape
    where = AppendedColumns(starts // b * b, starts, starts + lengths, prompt_lengths)
    piece = min(columns, b * _piece_blocks(b))
    state = _Progress(
        cache=cache,
        last=jnp.zeros((batch, lm.config.hidden_size), decoder.dtype),
        hidden=jnp.zeros((batch, columns, lm.config.hidden_size), decoder.dtype) if keep_hidden else None,
    )

    def one_piece(index: Array, state: _Progress) -> _Progress:
        part = jax.lax.dynamic_slice_in_dim(tokens, index * piece, piece, axis=1)
        here = where._replace(first=where.first + index * piece)
        found, cache = _read_piece(lm, shared, state.cache, part, here, backend)
        last = where.ends - 1 - here.first
        picked = jnp.take_along_axis(found, jnp.clip(last, 0, piece - 1)[:, None, None], axis=1)[:, 0]
        inside = (last >= 0) & (last < piece)
        hidden = state.hidden
        if hidden is not None:
            hidden = jax.lax.dynamic_update_slice_in_dim(hidden, found, index * piece, axis=1)
        return _Progress(cache, jnp.where(inside[:, None], picked, state.last), hidden)

    pieces = columns // piece
    if pieces == 1:
        state = one_piece(jnp.int32(0), state)
    else:  # as many as the longest row needs
        needed = jnp.minimum(pieces, jnp.max(-(-(where.ends - where.first) // piece)))
        state = jax.lax.fori_loop(0, needed, one_piece, state)
    return Extended(state.cache, decoder.logits(state.last), state.hidden)


class _Progress(NamedTuple):
    """Between two pieces: the cache, the hidden state of each row's last token, and that of all columns."""

    cache: PagedCache
    last: Float[Array, "B D"]
    hidden: Float[Array, "B S D"] | None


def _piece_blocks(block_size: int) -> int:
    return max(1, _PIECE_TOKENS // block_size)


def _read_piece(
    lm: LM,
    shared: PagedCache | None,
    cache: PagedCache,
    tokens: Int[Array, "B S"],
    where: AppendedColumns,
    backend: Backend,
) -> tuple[Float[Array, "B S D"], PagedCache]:
    """The decoder over some columns."""

    def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, None]:
        nonlocal cache
        heads = heads_of(lm.head_shards, layer, k.shape[2])
        out, cache = extend_layer(lm.method.cache, layer, heads, q, k, v, shared, cache, where, backend)
        return out, None

    positions = where.first[:, None] + jnp.arange(tokens.shape[1])
    positions = jnp.clip(positions, 0, where.ends[:, None] - 1)
    states = (None,) * lm.config.num_layers
    hidden, _ = lm.decoder(tokens, positions, attention, states)
    return hidden, cache


def extend_layer(
    policy: CachePolicy,
    layer: int,
    heads: Heads,
    q: Float[Array, "B S Hq d"],  # rotated queries, S whole blocks
    k: Float[Array, "B S Hkv d"],
    v: Float[Array, "B S Hkv d"],
    shared: PagedCache | None,  # what came before, or None
    cache: PagedCache,  # the rows' own cache
    where: AppendedColumns,  # which columns are new tokens
    backend: Backend = "auto",
) -> tuple[Float[Array, "B S Hq d"], PagedCache]:
    """A layer's attention of appended tokens: for each block evicts, writes the new tokens, attends.

    Returns:
        Attention output `[B, S, H_q, d]`, arbitrary but finite where a column is no new token, and the cache.
    """
    b = cache.block_size
    if q.shape[1] == b:
        return _extend_block(policy, layer, heads, q, k, v, shared, cache, where.first, where, backend)
    blocks = [jnp.swapaxes(x.reshape(x.shape[0], -1, b, *x.shape[2:]), 0, 1) for x in (q, k, v)]
    firsts = where.first + b * jnp.arange(q.shape[1] // b)[:, None]

    def step(cache: PagedCache, block: tuple[Array, ...]) -> tuple[PagedCache, Array]:
        q, k, v, first = block
        out, cache = _extend_block(policy, layer, heads, q, k, v, shared, cache, first, where, backend)
        return cache, out

    cache, out = jax.lax.scan(step, cache, (*blocks, firsts))
    return jnp.swapaxes(out, 0, 1).reshape(q.shape), cache


def _extend_block(
    policy: CachePolicy,
    layer: int,
    heads: Heads,
    q: Float[Array, "B b Hq d"],
    k: Float[Array, "B b Hkv d"],
    v: Float[Array, "B b Hkv d"],
    shared: PagedCache | None,
    cache: PagedCache,
    first: Int[Array, " B"],
    where: AppendedColumns,
    backend: Backend,
) -> tuple[Float[Array, "B b Hq d"], PagedCache]:
    """One block of every row, of which some columns may be no new tokens."""
    b = cache.block_size
    if cache.kept_columns[layer]:
        leaving = jnp.asarray(rows_with_leaving_block(policy, first, where.prompt_lengths))
        leaving &= (first >= where.starts) & (first < where.ends)
        with jax.named_scope("evict_block"):
            token = q[:, 0], k[:, 0]
            cache = evict_block(policy, layer, heads, *token, shared, cache, first, leaving, backend, rare=True)
    positions = first[:, None] + jnp.arange(b)
    new = (positions >= where.starts[:, None]) & (positions < where.ends[:, None])
    cache = cache.with_tokens(layer, k, v, positions, new)
    newest = jnp.minimum(where.ends, first + b) - 1
    return attend(policy, layer, q, shared, cache, first, newest, backend)[0], cache


def attend(
    policy: CachePolicy,
    layer: int,
    q: Float[Array, "B m Hq d"],
    shared: PagedCache | None,
    cache: PagedCache,
    first: Int[Array, " B"],
    newest: Int[Array, " B"],
    backend: Backend,
) -> tuple[Float[Array, "B m Hq d"], Float32[Array, "B m Hq"]]:
    """Attention of new tokens, which are in the cache, to all that rows hold; see `paged_attention`."""
    held = [cache] if shared is None else [shared, cache]
    pages = tuple(each.pages(layer) for each in held)
    return paged_attention(q, pages, first, newest, window=policy.window, backend=backend)


def rows_with_leaving_block(
    policy: CachePolicy, positions: Int[Array | np.ndarray, " B"], prompt_lengths: Int[Array | np.ndarray, " B"]
) -> Bool[Array | np.ndarray, " B"]:
    """Rows in which the token at `positions` starts a block and so pushes the oldest block out of the window, `[B]`.

    Prefill has already dealt with the block that leaves when the very first new token starts a block.
    """
    return (positions % policy.block_size == 0) & (positions > policy.window) & (positions > prompt_lengths)


def evict_block(
    policy: CachePolicy,
    layer: int,
    heads: Heads,
    q: Float[Array, "B Hq d"],  # query of the token that starts a block; `k` its key
    k: Float[Array, "B Hkv d"],
    shared: PagedCache | None,  # what came before, or None
    cache: PagedCache,  # the rows' own cache, without that token
    positions: Int[Array, " B"],  # the token's position; a multiple of b in rows where a block leaves
    leaving: Bool[Array, " B"],  # those rows
    backend: Backend,
    *,
    rare: bool = False,  # whether there mostly are none, so that the device asks the host to leave out what is for them
) -> PagedCache:
    """Keeps the policy's choice from the block that leaves the window, in rows where one leaves.

    The policy sees the current query's attention probabilities over all that it can see at this step: what is kept, the
    window with the leaving block still in it, and itself.
    """
    before = jnp.maximum(positions - 1, 0)

    def log_sum_exp() -> Float32[Array, "B Hq"]:
        newest = jnp.where(leaving, before, before - 1)  # other rows ask nothing, which costs nothing
        return attend(policy, layer, q[:, None], shared, cache, before, newest, backend)[1][:, 0]

    # A pass over all that is kept, of which only the normaliser is wanted, and only in rows where a block leaves.
    nothing = functools.partial(jnp.zeros, q.shape[:2], jnp.float32)
    lse = jax.lax.cond(jnp.any(leaving), log_sum_exp, nothing) if rare else log_sum_exp()
    batch, kv_heads, head_dim = k.shape
    queries = q.reshape(batch, kv_heads, -1, head_dim)
    own = scaled_scores("bhgd,bhd->bhg", queries, k)
    lse = jnp.logaddexp(lse.reshape(own.shape), own)
    blocks = positions // policy.block_size - policy.window // policy.block_size - 1
    k_block, v_block = _leaving_block(layer, shared, cache, blocks, k.dtype)
    attention = jnp.exp(scaled_scores("bhgd,bhtd->bhgt", queries, k_block) - lse[..., None])  # [B, H_kv, G, b]
    selection = policy.evict(layer, heads, attention, blocks)
    budgets = jnp.where(leaving[:, None, None], selection.budgets, 0)
    chosen = selection_mask(selection.scores, budgets, block_size=policy.block_size)
    return cache.with_kept(layer, chosen, k_block, v_block)


def _leaving_block(
    layer: int, shared: PagedCache | None, cache: PagedCache, blocks: Int[Array, " B"], dtype: Any
) -> tuple[Float[Array, "B Hkv b d"], Float[Array, "B Hkv b d"]]:
    """Keys and values of a block of the window, from the cache that has it."""
    own = cache.window_block(layer, blocks, dtype)
    if shared is None:
        return own
    is_own = (blocks * cache.block_size >= cache.start)[:, None, None, None]
    k, v = (jnp.where(is_own, *each) for each in zip(own, shared.window_block(layer, blocks, dtype), strict=True))
    return k, v
