"""KVzip's repetition: prompts that were read in full are repeated to the model, and scored by the attention they get.

All keys and values are held until then. Chunks run in one program: each is fed after a request, and forgotten.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.engine.cache import CacheLayout, PagedCache, shared_and_own
from tca_jax.engine.extend import AppendedColumns, extend_layer
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import heads_of
from tca_jax.engine.read import Read, read_prompts
from tca_jax.lab.rivals.compression import over_heads
from tca_jax.methods.full import FullCache
from tca_jax.methods.regions import Selection
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import cdiv, scaled_scores

CARRIED = 8  # last tokens of the chunk before, which tell the model where a chunk begins
AHEAD = 2.0  # score of the first tokens, which stay: no attention passes 1


@dataclasses.dataclass(frozen=True)
class Repetition:
    """How a prompt is repeated: behind it comes, for each chunk, a request to repeat it and then the chunk itself."""

    chunk: int  # tokens of a chunk, at least `CARRIED`
    sinks: int  # first tokens of a prompt, which are in no chunk
    opening: tuple[int, ...] = ()  # token ids of the request for the first chunk
    # of that for any other, which the last `CARRIED` tokens of the chunk before complete
    continuing: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()  # token ids between a request and the chunk


def read_and_repeat(
    lm: LM, tokens: Array, lengths: Array, layout: CacheLayout, *, keep_hidden: bool = False, backend: Backend = "auto"
) -> Read:
    """`read_prompts` of a model under KVzip; the arguments are the same."""
    read, held = read_everything(lm, tokens, lengths, keep_hidden=keep_hidden, backend=backend)
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
    return read._replace(cache=cache)


def read_everything(
    lm: LM, tokens: Array, lengths: Array, *, keep_hidden: bool = False, backend: Backend = "auto"
) -> tuple[Read, PagedCache]:
    """`read_prompts` with a cache of all tokens in the model's dtype, and that cache."""
    full = _holding_everything(lm)
    layout = full.cache_layout(*tokens.shape)
    read = read_prompts(full, tokens, lengths, layout, keep_hidden=keep_hidden, backend=backend)
    assert read.cache is not None
    return read, read.cache


def _holding_everything(lm: LM) -> LM:
    return dataclasses.replace(lm, method=dataclasses.replace(lm.method, cache=FullCache()), kv=None)


def selections_by_repetition(
    lm: LM, held: PagedCache, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], backend: Backend = "auto"
) -> list[Selection]:
    """What KVzip keeps of prompts in each layer; all of them are `held`, from `read_everything`."""
    policy: Any = lm.method.cache  # a KVzipCache
    heads = [heads_of(lm.head_shards, layer, kept.shape[1]) for layer, kept in enumerate(held.kept)]
    scores = attention_to_prompts(lm, policy.repetition, held, tokens, lengths, backend)
    return policy.select_repeated(heads, scores, lengths)


def attention_to_prompts(
    lm: LM,
    repetition: Repetition,
    held: PagedCache,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    backend: Backend = "auto",
) -> Float32[Array, "layers B Hkv L"]:
    """The most attention of each token while its chunk is repeated: KVzip, Algorithm 1; `AHEAD` for sinks."""
    (batch, length), full, layers = tokens.shape, _holding_everything(lm), range(lm.config.num_layers)
    chunk, sinks = max(1, min(repetition.chunk, length - repetition.sinks)), min(repetition.sinks, length)
    # Token ids of the request for the first chunk and for others; negative ones count back from the chunk.
    opening = repetition.opening + repetition.answer
    others = (*repetition.continuing, *range(-CARRIED, 0), *repetition.answer)
    words = jnp.asarray((*opening, *others, 0), jnp.int32)
    following = full.following_layout(batch, length, max(len(opening), len(others)) + chunk)
    shared, own = shared_and_own(held, following, lengths)
    first, columns = own.start, jnp.arange(following.window_columns * following.block_size)
    firsts = jnp.broadcast_to(jnp.arange(sinks), (batch, sinks))
    place = first[:, None] + columns - lengths[:, None]  # of each column, counted from the request's first token

    def repeat(number: Array, scores: Float32[Array, "layers B Hkv S"]) -> Float32[Array, "layers B Hkv S"]:
        start = repetition.sinks + number * repetition.chunk
        request = jnp.where(number == 0, len(opening), len(others))
        word = words.at[place + jnp.where(number == 0, 0, len(opening))].get(mode="clip")
        word = jnp.where(place < request, word, place - request)  # of the chunk, its tokens' places
        of_prompt = jnp.take_along_axis(tokens, jnp.clip(start + word, 0, length - 1), axis=1)
        ids = jnp.where((place < request) & (word >= 0), word, of_prompt)
        counts = jnp.where(lengths > start, request + jnp.minimum(lengths - start, chunk), 0).astype(jnp.int32)
        ends, fed = lengths + counts, (place >= 0) & (place < counts[:, None])
        positions = jnp.broadcast_to(start + jnp.arange(chunk), (batch, chunk))
        there = positions < lengths[:, None]
        where, cache = AppendedColumns(first, lengths, ends, lengths), own
        seen = jnp.concatenate([jnp.ones(firsts.shape, bool), there, fed], axis=1)
        mask = seen[:, None] & (jnp.arange(seen.shape[1]) - sinks - chunk <= columns[:, None])  # [B, queries, keys]

        def most(q: Float[Array, "B S G d"], *k: Float[Array, "B _ d"]) -> Float32[Array, "B c"]:
            """Over all that is fed, and over the query heads of a KV head."""
            scores = scaled_scores("bqgd,bkd->bgqk", q, jnp.concatenate(k, axis=1))
            found = jax.nn.softmax(scores, axis=-1, where=mask[:, None])[..., sinks : sinks + chunk]
            return jnp.where((fed[:, :, None] & there[:, None])[:, None], found, 0).max(axis=(1, 2))

        def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, Array]:
            nonlocal cache
            heads = heads_of(lm.head_shards, layer, k.shape[2])
            out, cache = extend_layer(full.method.cache, layer, heads, q, k, v, shared, cache, where, backend)
            with jax.named_scope("token_scores"):
                before = (_at(held.k, held, layer, of_prompt) for of_prompt in (firsts, positions))
                return out, over_heads(most, q, *before, k)

        at = jnp.clip(first[:, None] + columns, 0, jnp.maximum(ends, 1)[:, None] - 1)
        _, found = lm.decoder(ids, at, attention, (None,) * len(layers))
        return jax.lax.dynamic_update_slice_in_dim(scores, jnp.stack(found), start, axis=-1)

    chunks = cdiv(max(0, length - repetition.sinks), repetition.chunk)
    width = max(length, repetition.sinks + (chunks - 1) * repetition.chunk + chunk)
    ahead = jnp.where(jnp.arange(width) < sinks, AHEAD, 0).astype(jnp.float32)
    scores = jnp.broadcast_to(ahead, (len(layers), batch, held.kept[0].shape[1], width))
    needed = -(-jnp.maximum(lengths - repetition.sinks, 0) // repetition.chunk)
    return jax.lax.fori_loop(0, jnp.max(needed), repeat, scores)[..., :length]


def _at(pool: Any, held: PagedCache, layer: int, positions: Int[Array, "B n"]) -> Array:
    """Keys or values `[B, n, Hkv, d]` at some positions of a cache whose window holds everything."""
    table = held.tables[layer][..., held.kept_columns[layer] :]
    block = jnp.clip(positions // held.block_size, 0, table.shape[-1] - 1)
    pages = jnp.take_along_axis(table, block[:, None], axis=2)
    return pool[pages.swapaxes(1, 2), (positions % held.block_size)[..., None]]
