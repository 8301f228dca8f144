"""KVzip's repetition: prompts that were read in full are repeated to the model, and scored by the attention they get.

All keys and values of the prompts are held until then, in the model's dtype. Chunks run one after the other, in one
program: a request and a chunk are fed as appended tokens are, attend to everything and are forgotten.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.engine.cache import CacheLayout, PagedCache, shared_and_own
from tca_jax.engine.extend import AppendedColumns, extend_layer
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import heads_of
from tca_jax.engine.read import Read, read_prompts
from tca_jax.methods.base import Wording
from tca_jax.methods.full import FullCache
from tca_jax.methods.regions import Selection
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, scaled_scores

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

    def worded(self, opening: str, continuing: str, wording: Wording | None) -> Repetition:
        """The same in words of a model; without words for None."""
        if wording is None:
            return Repetition(self.chunk, self.sinks)
        ids = wording.ids(opening), wording.ids(continuing), wording.before_answer()
        return Repetition(self.chunk, self.sinks, *ids)

    @property
    def requests(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of the request for the first chunk and for others; negative ones count back from the chunk."""
        return self.opening + self.answer, (*self.continuing, *range(-CARRIED, 0), *self.answer)

    def chunk_tokens(self, prompt_tokens: int) -> int:
        """Tokens of a chunk of prompts of at most so many tokens."""
        return max(1, min(self.chunk, prompt_tokens - self.sinks))

    def num_chunks(self, prompt_tokens: int) -> int:
        """Chunks of a prompt of so many tokens."""
        return cdiv(max(0, prompt_tokens - self.sinks), self.chunk)

    def fed_tokens(self, prompt_tokens: int) -> int:
        """Most tokens of a request and a chunk of prompts of at most so many tokens."""
        return max(map(len, self.requests)) + self.chunk_tokens(prompt_tokens)

    def fed(
        self,
        number: Int[Array, ""],  # of the chunk, traced
        tokens: Int[Array, "B L"],
        lengths: Int[Array, " B"],
        wanted: Int[Array, " B"],  # tokens whose scores are wanted, the first of each prompt
        places: Int[Array, "B S"],  # of the tokens to return, counted from the request's first
    ) -> tuple[Int32[Array, "B S"], Int32[Array, " B"]]:
        """Tokens of a request and its chunk, and their number in each row: 0 where no score is wanted."""
        first, others = self.requests
        request = jnp.where(number == 0, len(first), len(others))
        start = self.sinks + number * self.chunk
        words = jnp.asarray((*first, *others, 0), jnp.int32)
        word = words.at[places + jnp.where(number == 0, 0, len(first))].get(mode="clip")
        word = jnp.where(places < request, word, places - request)  # of the chunk, its tokens' places
        of_prompt = jnp.take_along_axis(tokens, jnp.clip(start + word, 0, tokens.shape[1] - 1), axis=1)
        ids = jnp.where((places < request) & (word >= 0), word, of_prompt)
        count = request + jnp.clip(lengths - start, 0, self.chunk_tokens(tokens.shape[1]))
        return ids, jnp.where(wanted > start, count, 0).astype(jnp.int32)


def repeated_attention(
    q: Float[Array, "B S Hq d"],  # of what is fed; `k` its keys
    k: Float[Array, "B S Hkv d"],
    sinks: Float[Array, "B s Hkv d"],  # keys of the prompt's first tokens
    chunk: Float[Array, "B c Hkv d"],  # keys of the chunk's tokens in the prompt
    fed: Bool[Array, "B S"],  # which columns of `q` and `k` hold a token
    there: Bool[Array, "B c"],  # which columns of `chunk` do
    *,
    queries: int,
) -> Float32[Array, "B Hkv c"]:
    """The most attention that each token of a chunk gets from what repeats it: KVzip, Algorithm 1, in float32.

    The softmax of a query is over the prompt's first tokens, the chunk and what was fed up to the query; the maximum
    is over all that was fed, the request included, and over the query heads of a KV head. Queries are taken in parts
    of `queries`, of which S is a multiple.
    """
    batch, columns, kv_heads, head_dim = k.shape
    keys = jnp.concatenate([sinks, chunk, k], axis=1)
    seen = jnp.concatenate([jnp.ones(sinks.shape[:2], bool), there, fed], axis=1)
    before = keys.shape[1] - columns
    of_chunk = slice(sinks.shape[1], before)
    grouped = q.reshape(batch, columns, kv_heads, -1, head_dim)

    def of_part(number: Array) -> Float32[Array, "B Hkv c"]:
        place = number * queries + jnp.arange(queries)
        part, is_fed = (jax.lax.dynamic_slice_in_dim(x, number * queries, queries, axis=1) for x in (grouped, fed))
        causal = jnp.arange(keys.shape[1]) - before <= place[:, None]
        mask = (seen[:, None] & causal)[:, None, None]  # [B, 1, 1, queries, keys]
        scores = jnp.where(mask, scaled_scores("bqhgd,bkhd->bhgqk", part, keys), MASKED)
        found = jax.nn.softmax(scores, axis=-1)[..., of_chunk]
        counts = (is_fed[:, :, None] & there[:, None])[:, None, None]
        return jnp.where(counts, found, 0).max(axis=(2, 3))

    return jax.lax.map(of_part, jnp.arange(columns // queries)).max(axis=0)


def read_and_repeat(
    lm: LM,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    layout: CacheLayout,
    *,
    keep_hidden: bool = False,
    backend: Backend = "auto",
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


def selections_by_repetition(
    lm: LM, held: PagedCache, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], backend: Backend = "auto"
) -> list[Selection]:
    """What KVzip keeps of prompts in each layer; all of them are `held`, from `read_everything`."""
    policy: Any = lm.method.cache  # a KVzipCache
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
    """The most attention that each token gets while its chunk is repeated; 2 for the first `sinks`, 0 if not wanted.

    `wanted` of the tokens, the first of each row, are scored, at most `most` (static); chunks without any are not
    repeated. All prompts are `held`.
    """
    batch, length = tokens.shape
    full, layers = _holding_everything(lm), range(lm.config.num_layers)
    chunk, sinks = repetition.chunk_tokens(length), min(repetition.sinks, length)
    following = full.following_layout(batch, length, repetition.fed_tokens(length))
    shared, own = shared_and_own(held, following, lengths)
    columns = jnp.arange(following.window_columns * following.block_size)
    first, chunks = own.start, repetition.num_chunks(most)
    firsts = jnp.broadcast_to(jnp.arange(sinks), (batch, sinks))

    def repeat(number: Array, scores: Float32[Array, "layers B Hkv S"]) -> Float32[Array, "layers B Hkv S"]:
        place = first[:, None] + columns - lengths[:, None]
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

        at = jnp.clip(first[:, None] + columns, 0, jnp.maximum(ends, 1)[:, None] - 1)
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
