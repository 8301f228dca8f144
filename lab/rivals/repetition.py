"""KVzip's repetition: prompts that were read in full are repeated to the model, and scored by the attention they get.

Chunks are independent, so the repetition is a pass over layers, as reading is: a layer's program feeds each chunk after
its request, over the pages of the prompt, and the next chunk overwrites it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, LAYER_WEIGHTS, ROWS, SAME, OverMesh, heads_of, rows_of_device
from tca_jax.engine.pages import Rows
from tca_jax.engine.read import Calls, ReadRows, empty_rows, fork, pages_of_forks, read
from tca_jax.lab.rivals.compression import over_heads
from tca_jax.methods.full import FullCache
from tca_jax.methods.regions import Selection
from tca_jax.models.names import MODEL
from tca_jax.models.sharding import DATA
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import cdiv, scaled_scores
from tca_jax.pallas_kernels.paged_attention import paged_attention
from tca_jax.programs import Program

CARRIED = 8  # last tokens of the chunk before, which tell the model where a chunk begins
AHEAD = 2.0  # score of the first tokens, which stay: no attention passes 1
_BY_HEAD = PartitionSpec(DATA, MODEL)  # arrays [B, Hkv, ...]


@dataclasses.dataclass(frozen=True)
class Repetition:
    """How a prompt is repeated: after it comes, for each chunk, a request to repeat it and then the chunk itself."""

    chunk: int  # tokens of a chunk, at least `CARRIED`
    sinks: int  # first tokens of a prompt, which are in no chunk
    opening: tuple[int, ...] = ()  # token ids of the request for the first chunk
    # of that for any other, which the last `CARRIED` tokens of the chunk before complete
    continuing: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()  # token ids between a request and the chunk


class Repeated(NamedTuple):
    """Prompts that were read with full attention, and repeated."""

    read: ReadRows  # its rows hold all tokens, in the model's dtype
    # The most attention of each token while its chunk is repeated: KVzip, Algorithm 1; `AHEAD` for sinks.
    scores: list[Float32[Array, "B Hkv L"]]  # of each layer


def read_and_repeat(
    lm: LM,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    most: Int[Array, " B"],
    layout: CacheLayout,
    calls: Calls,
    *,
    more_pages: int = 0,
    backend: Backend = "auto",
) -> ReadRows:
    """`engine.read.read` of a model under KVzip; the arguments are the same."""
    policy: Any = lm.method.cache  # a KVzipCache
    done = repeat(lm, policy.repetition, tokens, lengths, calls, backend=backend)
    selections, rows = calls(_select_program, lm, done.scores, lengths, layout=layout, more_pages=more_pages)
    bare, options = lm.without_weights(), {"layout": layout, "backend": backend}
    for layer, selection in enumerate(selections):
        given = rows, done.read.rows, selection, lengths, most, jnp.int32(layer)
        rows = calls(_keep_program, bare, *given, **options)
    return done.read._replace(rows=rows, calls=calls)


def repeat(
    lm: LM,
    repetition: Repetition,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    calls: Calls,
    *,
    backend: Backend = "auto",
) -> Repeated:
    """Reads prompts with all tokens held, and repeats them; the model's cache policy plays no part."""
    length = tokens.shape[1]
    chunks = _Chunks(repetition, length, FullCache.block_size)
    lm = dataclasses.replace(lm.for_programs(), method=dataclasses.replace(lm.method, cache=FullCache()), kv=None)
    batch = rows_of_device(lm, len(lengths), "prompts")
    more = pages_of_forks(lm, batch, length, chunks.fed_tokens)
    found = read(lm, tokens, lengths, lengths, lm.cache_layout(batch, length), more_pages=more, backend=backend)
    calls.compile_seconds += found.calls.compile_seconds
    ends = lengths + chunks.fed_tokens
    rows = fork(lm, found.rows, 1, ends, length, chunks.fed_tokens, calls, private=True)
    x, cos, sin = calls(_begin_program, lm, tokens, lengths, chunks=chunks)
    bare, scores = lm.without_weights(), []
    options: dict[str, Any] = {"graphdef": lm.layer_graphdef, "chunks": chunks, "backend": backend}
    for layer in range(lm.config.num_layers):
        given = lm.layer_params(layer), x, rows, cos, sin, lengths, jnp.int32(layer)
        x, rows, of_layer = calls(_repeat_program, bare, *given, **options)
        scores.append(of_layer)
    return Repeated(found._replace(rows=rows), scores)


def select_repeated(lm: LM, repeated: Repeated, lengths: Int[Array, " B"], calls: Calls) -> list[Selection]:
    """The tokens that KVzip keeps of prompts in each layer."""
    return calls(_select_program, lm, repeated.scores, lengths, layout=None, more_pages=0)[0]


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """Chunks of prompts, each after its request, in S columns that are aligned to pages."""

    repetition: Repetition
    length: int  # of padded prompts, L
    page_size: int  # b

    @property
    def count(self) -> int:
        return max(1, cdiv(self.length - self.repetition.sinks, self.repetition.chunk))

    @property
    def tokens(self) -> int:
        """Most tokens of a chunk, c."""
        return max(1, min(self.repetition.chunk, self.length - self.repetition.sinks))

    @property
    def sinks(self) -> int:
        return min(self.repetition.sinks, self.length)

    @property
    def requests(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of the request for the first chunk and for others; negative ones count back from the chunk."""
        r = self.repetition
        return r.opening + r.answer, (*r.continuing, *range(-CARRIED, 0), *r.answer)

    @property
    def fed_tokens(self) -> int:
        """Most tokens of a request and its chunk."""
        return max(map(len, self.requests)) + self.tokens

    @property
    def columns(self) -> int:
        return self.page_size * cdiv(self.page_size - 1 + self.fed_tokens, self.page_size)

    def start(self, number: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """Position of a chunk's first token."""
        return self.repetition.sinks + number * self.repetition.chunk

    def request(self, number: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """Tokens of its request."""
        opening, continuing = map(len, self.requests)
        return jnp.where(number == 0, opening, continuing)

    def fed(self, number: Int[Array, "*n"], lengths: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Tokens of its request and of itself; 0 past a prompt's end."""
        start = self.start(number)
        return jnp.where(lengths > start, self.request(number) + jnp.minimum(lengths - start, self.tokens), 0)

    def place(self, lengths: Int[Array, " B"]) -> Int[Array, "B S"]:
        """Each column, counted from a request's first token."""
        return jnp.arange(self.columns) - (lengths % self.page_size)[:, None]


def _begin(
    lm: LM, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], *, chunks: _Chunks
) -> tuple[Array, Array, Array]:
    """The embedded columns of all chunks, one chunk after the other, and their angles."""
    number, place = jnp.arange(chunks.count)[:, None], chunks.place(lengths)[:, None]
    words = jnp.asarray((*chunks.requests[0], *chunks.requests[1], 0), jnp.int32)
    request = chunks.request(number)
    word = words.at[place + jnp.where(number == 0, 0, len(chunks.requests[0]))].get(mode="clip")
    word = jnp.where(place < request, word, place - request)  # of the chunk, its tokens' places
    at = jnp.clip(chunks.start(number) + word, 0, chunks.length - 1).reshape(len(lengths), -1)
    of_prompt = jnp.take_along_axis(tokens, at, axis=1)
    ids = jnp.where(((place < request) & (word >= 0)).reshape(at.shape), word.reshape(at.shape), of_prompt)
    fed = jax.vmap(chunks.fed, in_axes=(0, None), out_axes=1)(number[:, 0], lengths)  # [B, chunks]
    positions = lengths[:, None, None] + jnp.minimum(place, fed[..., None] - 1)
    positions = jnp.maximum(positions, 0).reshape(at.shape)
    return lm.decoder.embed(ids), *lm.decoder.angles(positions)


def _repeat_layer(
    lm: LM,  # without weights
    weights: Any,
    x: Float[Array, "B CS D"],
    rows: Rows,
    cos: Array,
    sin: Array,
    lengths: Int[Array, " B"],
    layer: Int[Array, ""],
    *,
    graphdef: Any,
    chunks: _Chunks,
    backend: Backend,
) -> tuple[Array, Rows, Float32[Array, "B Hkv L"]]:
    """One layer of all chunks: the stream after it, the rows, whose prompts are as before, and the scores."""
    b, batch, columns, sinks = rows.page_size, len(lengths), chunks.columns, chunks.sinks
    first, place = lengths // b * b, chunks.place(lengths)
    of_sinks = jnp.broadcast_to(jnp.arange(sinks), (batch, sinks))

    def in_turn(y: Array, count: int) -> Array:
        return jnp.swapaxes(y.reshape(batch, count, -1, *y.shape[2:]), 0, 1)

    def one_chunk(rows: Rows, inputs: tuple[Array, ...]) -> tuple[Rows, tuple[Array, Array]]:
        number, q, k, v = inputs
        fed = chunks.fed(number, lengths)

        def one_block(rows: Rows, inputs: tuple[Array, ...]) -> tuple[Rows, Array]:
            at, q, k, v = inputs
            positions, ends = at[:, None] + jnp.arange(b), lengths + fed
            new = (positions >= lengths[:, None]) & (positions < ends[:, None])
            rows = rows.with_tokens(layer, k, v, positions, new, rows.start)
            newest = jnp.minimum(ends, at + b) - 1
            out, _ = paged_attention(q, rows.of_layer(layer), at, newest, window=FullCache.window, backend=backend)
            return rows, out

        blocks = columns // b
        firsts = first + b * jnp.arange(blocks)[:, None]
        rows, out = jax.lax.scan(one_block, rows, (firsts, *(in_turn(y, blocks) for y in (q, k, v))))
        with jax.named_scope("token_scores"):
            positions = jnp.broadcast_to(chunks.start(number) + jnp.arange(chunks.tokens), (batch, chunks.tokens))
            there, new = positions < lengths[:, None], (place >= 0) & (place < fed[:, None])
            seen = jnp.concatenate([jnp.ones(of_sinks.shape, bool), there, new], axis=1)
            before = jnp.arange(seen.shape[1]) - sinks - chunks.tokens <= jnp.arange(columns)[:, None]
            mask, counted = seen[:, None] & before, new[:, :, None] & there[:, None]
            keys = (_at(rows.k, rows, layer, of_prompt) for of_prompt in (of_sinks, positions))
            found = over_heads(lambda q, *k: _most(q, k, mask, counted, sinks), q, *keys, k)
        return rows, (jnp.swapaxes(out, 0, 1).reshape(q.shape), found)

    def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, tuple[Rows, Array]]:
        parts = (in_turn(y, chunks.count) for y in (q, k, v))
        filled, (out, found) = jax.lax.scan(one_chunk, rows, (jnp.arange(chunks.count), *parts))
        return jnp.swapaxes(out, 0, 1).reshape(q.shape), (filled, found)

    x, (rows, found), _ = nnx.merge(graphdef, weights)(x, cos, sin, attention, None)
    scores = jnp.moveaxis(found, 0, 2).reshape(*found.shape[1:3], -1)
    scores = jnp.pad(scores, ((0, 0), (0, 0), (sinks, 0)), constant_values=AHEAD)
    return x, rows, scores[..., : chunks.length]


def _most(
    q: Float[Array, "B S G d"],
    k: Sequence[Float[Array, "B _ d"]],  # of sinks, the chunk's tokens in the prompt, and what is fed
    mask: Bool[Array, "B S n"],
    counted: Bool[Array, "B S c"],
    sinks: int,
) -> Float32[Array, "B c"]:
    """The most attention of a chunk's tokens over all that is fed, and over the query heads of a KV head."""
    scores = scaled_scores("bqgd,bkd->bgqk", q, jnp.concatenate(k, axis=1))
    found = jax.nn.softmax(scores, axis=-1, where=mask[:, None])[..., sinks : sinks + counted.shape[-1]]
    return jnp.where(counted[:, None], found, 0).max(axis=(1, 2))


def _select(
    lm: LM,
    scores: list[Float32[Array, "B Hkv L"]],
    lengths: Int[Array, " B"],
    *,
    layout: CacheLayout | None,
    more_pages: int,
) -> tuple[list[Selection], Rows | None]:
    """What stays in each layer, and rows for it where a layout plans them."""
    policy: Any = lm.method.cache  # a KVzipCache
    heads = [heads_of(lm.head_shards, layer, of_layer.shape[1]) for layer, of_layer in enumerate(scores)]
    selections = policy.select_repeated(heads, jnp.stack(scores), lengths)
    return selections, None if layout is None else empty_rows(lm, layout, more_pages)


def _keep(
    lm: LM,
    rows: Rows,
    held: Rows,
    selection: Selection,
    lengths: Int[Array, " B"],
    most: Int[Array, " B"],
    layer: Int[Array, ""],
    *,
    layout: CacheLayout,
    backend: Backend,
) -> Rows:
    """Rows with the tokens of a layer that stay."""
    positions = jnp.broadcast_to(jnp.arange(layout.prompt_tokens), (len(lengths), layout.prompt_tokens))
    k, v = (_at(pool, held, layer, positions) for pool in (held.k, held.v))
    with jax.named_scope("select"):
        selected = layout.regions(None).fill(selection, k, v, block_size=layout.block_size, backend=backend)
    return rows.with_prompts(layer, jnp.arange(len(lengths)), selected.pool, k, v, lengths, most)


def _at(pool: Any, held: Rows, layer: Int[Array, ""], positions: Int[Array, "B n"]) -> Float[Array, "B n Hkv d"]:
    """Keys or values at some positions of rows whose windows hold everything."""
    table = held.pages[layer]
    block = jnp.minimum(positions // held.page_size, table.shape[-1] - 1)
    pages = jnp.take_along_axis(table, block[:, None], axis=2).swapaxes(1, 2)
    return pool.at[pages, (positions % held.page_size)[..., None]].get(mode="clip")


_begin_program = Program(OverMesh(_begin, (ROWS, ROWS), (ROWS, ROWS, ROWS)))
_repeat_program = Program(
    OverMesh(_repeat_layer, (LAYER_WEIGHTS, ROWS, CACHES, ROWS, ROWS, ROWS, SAME), (ROWS, CACHES, _BY_HEAD)),
    donate=(2, 3),
)
_select_program = Program(OverMesh(_select, (_BY_HEAD, ROWS), (_BY_HEAD, CACHES)))
_keep_program = Program(OverMesh(_keep, (CACHES, CACHES, _BY_HEAD, ROWS, ROWS, SAME), CACHES), donate=(1,))
