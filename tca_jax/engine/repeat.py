"""Prompts that were read in full are repeated to the model, and their caches compressed by the attention they get.

All keys and values of the prompts are held until then, in the model's dtype. Chunks run one after the other, in one
program: a request and a chunk are fed as appended tokens are, attend to everything and are forgotten.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from tca_jax.engine.cache import CacheLayout, PagedCache, shared_and_own
from tca_jax.engine.extend import AppendedColumns, extend_layer
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import heads_of
from tca_jax.engine.read import Read, read_prompts
from tca_jax.methods.full import FullCache
from tca_jax.methods.regions import Selection
from tca_jax.methods.repetition import AHEAD, Repetition, repeated_attention
from tca_jax.pallas_kernels.backends import Backend


def read_and_repeat(
    lm: LM,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    layout: CacheLayout,
    *,
    keep_hidden: bool = False,
    backend: Backend = "auto",
) -> Read:
    """`read_prompts` of a model whose cache policy has a `repetition`; the arguments are the same."""
    read, held = read_everything(lm, tokens, lengths, keep_hidden=keep_hidden, backend=backend)
    return read._replace(cache=_compressed(lm, held, tokens, lengths, layout, backend))


def read_everything(
    lm: LM,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    *,
    keep_hidden: bool = False,
    backend: Backend = "auto",
) -> tuple[Read, PagedCache]:
    """`read_prompts` with a cache of all tokens in the model's dtype, and that cache."""
    full = _holding_everything(lm)
    layout = full.cache_layout(*tokens.shape)
    read = read_prompts(full, tokens, lengths, layout, keep_hidden=keep_hidden, backend=backend)
    assert read.cache is not None
    return read, read.cache


def _holding_everything(lm: LM) -> LM:
    return dataclasses.replace(lm, method=dataclasses.replace(lm.method, cache=FullCache()), kv=None)


def _compressed(
    lm: LM,
    held: PagedCache,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    layout: CacheLayout,
    backend: Backend,
) -> PagedCache:
    """What stays of prompts, all of which is `held`."""
    selections = selections_by_repetition(lm, held, tokens, lengths, backend)
    kept = [selection.budgets.sum(axis=-1, dtype=jnp.int32) for selection in selections]
    cache = layout.empty(lm.config.head_dim, lm.cache_dtype, layout.window_start(lengths), kept)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    for layer, selection in enumerate(selections):
        k, v = (_at(pool, held, layer, positions) for pool in (held.k, held.v))
        with jax.named_scope("select"):
            selected = layout.regions(layer).fill(selection, k, v, block_size=layout.block_size, backend=backend)
        cache = cache.with_prompt(layout, layer, selected.pool, k, v)
        # One layer after the other: the copies of all would be as large as what is held.
        held, cache = jax.lax.optimization_barrier((held, cache))
    return cache


def selections_by_repetition(
    lm: LM, held: PagedCache, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], backend: Backend = "auto"
) -> list[Selection]:
    """What the model's cache policy keeps of prompts in each layer.

    Args:
        lm: The model, under a method whose cache policy has a `repetition`.
        held: All of the prompts, from `read_everything`.
        tokens: The prompts, right-padded.
        lengths: True lengths.
        backend: Kernel backend.
    """
    policy = lm.method.cache
    assert policy.repetition is not None
    heads = [heads_of(lm.head_shards, layer, kept.shape[1]) for layer, kept in enumerate(held.kept)]
    most, wanted = (policy.num_ranked_blocks(x) * policy.block_size for x in (tokens.shape[1], lengths))
    scores = attention_to_prompts(lm, policy.repetition, held, tokens, lengths, wanted, most, backend)
    return policy.select_repeated(heads, scores, lengths)


def attention_to_prompts(
    lm: LM,
    repetition: Repetition,
    held: PagedCache,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    wanted: Int[Array, " B"],
    most: int,
    backend: Backend = "auto",
) -> Float32[Array, "layers B Hkv L"]:
    """The most attention that each token gets while its chunk is repeated, as `CachePolicy.select_repeated` takes it.

    Args:
        lm: The model.
        repetition: How the prompts are repeated.
        held: All of the prompts.
        tokens: The prompts, right-padded.
        lengths: True lengths.
        wanted: Tokens whose scores are wanted, the first of each row; chunks without any are not repeated.
        most: The most that `wanted` may be; static.
        backend: Kernel backend.
    """
    batch, length = tokens.shape
    full, layers = _holding_everything(lm), range(lm.config.num_layers)
    chunk, sinks = repetition.chunk_tokens(length), min(repetition.sinks, length)
    following = full.following_layout(batch, length, repetition.fed_tokens(length))
    shared, own = shared_and_own(held, following, lengths)
    columns = following.window_columns * following.block_size
    first, chunks = own.start, repetition.num_chunks(most)
    firsts = jnp.broadcast_to(jnp.arange(sinks), (batch, sinks))

    def repeat(number: Array, scores: Float32[Array, "layers B Hkv S"]) -> Float32[Array, "layers B Hkv S"]:
        place = first[:, None] + jnp.arange(columns) - lengths[:, None]
        ids, counts = repetition.fed(number, tokens, lengths, wanted, place)
        ends, fed = lengths + counts, (place >= 0) & (place < counts[:, None])
        start = repetition.sinks + number * repetition.chunk
        positions = jnp.broadcast_to(start + jnp.arange(chunk), (batch, chunk))
        there = (positions < lengths[:, None]) & (counts > 0)[:, None]
        where = AppendedColumns(first, lengths, ends, lengths)
        cache = own

        def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, Array]:
            nonlocal cache
            heads = heads_of(lm.head_shards, layer, k.shape[2])
            out, cache = extend_layer(full.method.cache, layer, heads, q, k, v, shared, cache, where, backend)
            with jax.named_scope("token_scores"):
                of_sinks, of_chunk = (_at(held.k, held, layer, of_prompt) for of_prompt in (firsts, positions))
                found = repeated_attention(q, k, of_sinks, of_chunk, fed, there, queries=following.block_size)
            return out, found

        at = jnp.clip(first[:, None] + jnp.arange(columns), 0, jnp.maximum(ends, 1)[:, None] - 1)
        _, found = lm.decoder(ids, at, attention, (None,) * len(layers))
        return jax.lax.dynamic_update_slice_in_dim(scores, jnp.stack(found), start, axis=-1)

    width = max(length, repetition.sinks + (chunks - 1) * repetition.chunk + chunk)
    ahead = jnp.where(jnp.arange(width) < sinks, AHEAD, 0).astype(jnp.float32)
    scores = jnp.broadcast_to(ahead, (len(layers), batch, held.kept[0].shape[1], width))
    needed = jnp.max(-(-jnp.maximum(wanted - repetition.sinks, 0) // repetition.chunk))
    return jax.lax.fori_loop(0, jnp.minimum(needed, chunks), repeat, scores)[..., :length]


def _at(pool: Any, held: PagedCache, layer: int, positions: Int[Array, "B n"]) -> Array:
    """Keys or values `[B, n, Hkv, d]` at some positions of a cache whose window holds everything."""
    table = held.tables[layer][..., held.kept_columns[layer] :]
    block = jnp.clip(positions // held.block_size, 0, table.shape[-1] - 1)
    pages = jnp.take_along_axis(table, block[:, None], axis=2)
    return pool[pages.swapaxes(1, 2), (positions % held.block_size)[..., None]]
