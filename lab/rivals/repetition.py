"""KVzip's repetition: prompts that were read in full are repeated to the model, and scored by the attention they get.

Each chunk is fed after its request, over the pages of the prompt; the next one overwrites it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.extend import Where, feed, num_columns
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, ROWS, SAME, OverMesh, rows_of_device
from tca_jax.engine.pages import Rows
from tca_jax.engine.read import Calls, ReadRows, empty_rows, fork, read
from tca_jax.lab.rivals.compression import over_heads
from tca_jax.methods.full import FullCache
from tca_jax.models.names import MODEL
from tca_jax.models.sharding import DATA
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import scaled_scores, varying_like
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


def read_and_repeat(
    lm: LM,
    tokens: Int[Array | np.ndarray, "B L"],
    lengths: Int[Array | np.ndarray, " B"],
    most: Int[Array | np.ndarray, " B"],
    layout: CacheLayout,
    calls: Calls,
    *,
    more_pages: int = 0,
    backend: Backend = "auto",
) -> ReadRows:
    """`engine.read.read` of a model under KVzip; the arguments are the same."""
    policy: Any = lm.method.cache  # a KVzipCache
    held, scores = repeat(lm, policy.repetition, tokens, lengths, calls, backend=backend)
    given, options = (scores, held.rows, lengths, most), {"layout": layout, "more_pages": more_pages}
    return held._replace(rows=calls(_keep_program, lm, *given, **options, backend=backend))


def repeat(
    lm: LM,
    repetition: Repetition,
    tokens: Int[Array | np.ndarray, "B L"],
    lengths: Int[Array | np.ndarray, " B"],
    calls: Calls,
    *,
    backend: Backend = "auto",
) -> tuple[ReadRows, list[Float32[Array, "B Hkv L"]]]:
    """Rows with all tokens, and by layer the most attention that each gets while its chunk is repeated."""
    (count, length), b, size = tokens.shape, FullCache.block_size, repetition.chunk
    # The model's cache policy plays no part, nor does the dtype that it stores keys and values in.
    lm = dataclasses.replace(lm.for_programs, method=dataclasses.replace(lm.method, cache=FullCache()), kv=None)
    sinks, batch = min(repetition.sinks, length), rows_of_device(lm, count, "prompts")
    texts = list(_texts(repetition, tokens))
    most = max(text.shape[1] for _, text in texts)
    more = lm.cache_layout(batch, length, most, following=True).num_pages
    layout = lm.cache_layout(batch, length)
    found = read(lm, tokens, lengths, lengths, layout, calls, more_pages=more, backend=backend)
    rows = fork(lm, found.rows, 1, lengths + most, length, most, calls)
    nothing = jnp.where(jnp.arange(length) < sinks, AHEAD, jnp.zeros((count, lm.config.num_kv_heads, length)))
    scores, bare = [nothing] * lm.config.num_layers, lm.without_weights
    sizes = {"sinks": sinks, "chunk": max(1, min(size, length - sinks)), "fed_tokens": most}
    columns = num_columns(b - 1 + most, b)
    for start, text in texts:
        there = jnp.clip(lengths - start, 0, size)
        fed = jnp.where(there > 0, text.shape[1] - min(size, length - start) + there, 0)

        def watch(layer: int, here: Where, q: Array, rows: Rows, start: int = start) -> None:
            given = scores[layer], q, rows, here, jnp.int32(start), jnp.int32(layer)
            scores[layer] = calls(_score_program, bare, *given, **sizes)

        padded = jnp.pad(text, ((0, 0), (0, columns - text.shape[1])))
        rows, *_ = feed(lm, rows, padded, lengths, fed, calls, watch=watch, backend=backend)
    return found._replace(rows=rows), scores


def _texts(repetition: Repetition, tokens: Int[Array | np.ndarray, "B L"]) -> Iterator[tuple[int, Int[Array, "B n"]]]:
    """For each chunk the position of its first token in prompts, and the tokens of its request and of itself."""
    r = repetition
    for start in range(r.sinks, max(tokens.shape[1], r.sinks + 1), r.chunk):
        before = tokens[:, :0] if start == r.sinks else tokens[:, start - CARRIED : start]
        words = r.opening if start == r.sinks else r.continuing
        ids = (jnp.broadcast_to(jnp.array(each, tokens.dtype), (len(tokens), len(each))) for each in (words, r.answer))
        opening, answer = ids
        yield start, jnp.concatenate([opening, before, answer, tokens[:, start : start + r.chunk]], axis=1)


def _score(
    lm: LM,
    scores: Float32[Array, "B Hkv L"],
    q: Float[Array, "B n Hq d"],  # of a request and its chunk, `here`
    rows: Rows,
    here: Where,
    start: Int[Array, ""],  # of the chunk
    layer: Int[Array, ""],
    *,
    sinks: int,
    chunk: int,
    fed_tokens: int,
) -> Float32[Array, "B Hkv L"]:
    """Scores that are at least a chunk's attention over sinks, the chunk's tokens in the prompt, and fed tokens."""
    of_chunk = jnp.broadcast_to(start + jnp.arange(chunk), (len(q), chunk))
    of_fed = here.starts[:, None] + jnp.arange(fed_tokens)
    held = jnp.concatenate([jnp.broadcast_to(jnp.arange(sinks), (len(q), sinks)), of_chunk, of_fed], axis=1)
    at, there = here.first[:, None] + jnp.arange(q.shape[1]), of_chunk < here.starts[:, None]
    seen = jnp.pad(there, ((0, 0), (sinks, fed_tokens)), constant_values=True)[:, None]
    seen &= held[:, None] <= at[..., None]
    new = (at >= here.starts[:, None]) & (at < here.ends[:, None])

    def most(q: Float[Array, "B n G d"], k: Float[Array, "B _ d"]) -> Float32[Array, "B c"]:
        found = jax.nn.softmax(scaled_scores("bqgd,bkd->bgqk", q, k), axis=-1, where=seen[:, None])
        counted = new[:, None, :, None] & there[:, None, None]
        return jnp.where(counted, found[..., sinks : sinks + chunk], 0).max(axis=(1, 2))

    with jax.named_scope("token_scores"):
        found = over_heads(most, q, _at(rows.k, rows, layer, held))
        return scores.at[..., start + jnp.arange(chunk)].max(found, mode="drop")


def _keep(
    lm: LM,
    scores: list[Float32[Array, "B Hkv L"]],
    held: Rows,
    lengths: Int[Array, " B"],
    most: Int[Array, " B"],
    *,
    layout: CacheLayout,
    more_pages: int,
    backend: Backend,
) -> Rows:
    """Rows with the tokens that stay."""
    policy: Any = lm.method.cache  # a KVzipCache
    selections = policy.select_repeated([lm.heads(layer) for layer in range(len(scores))], jnp.stack(scores), lengths)
    positions = jnp.broadcast_to(jnp.arange(layout.prompt_tokens), (len(lengths), layout.prompt_tokens))

    def of_layer(layer: Int[Array, ""], rows: Rows) -> Rows:
        k, v = (_at(pool, held, layer, positions) for pool in (held.k, held.v))
        selection = jax.tree.map(lambda x: x[layer], selections)
        with jax.named_scope("select"):
            selected = layout.regions(None).fill(selection, k, v, block_size=layout.block_size, backend=backend)
        return rows.with_prompts(layer, 0, selected.pool, k, v, lengths, most)

    rows = empty_rows(lm, layout.batch, layout.widths, layout.num_pages + more_pages, lm.cache_dtype)
    rows = varying_like(rows, held, scores, lengths, most)
    return jax.lax.fori_loop(0, len(scores), of_layer, rows)


def _at(pool: Any, held: Rows, layer: Int[Array, ""], positions: Int[Array, "B n"]) -> Float[Array, "B n Hkv d"]:
    """Keys or values at some positions of rows whose windows hold everything."""
    table = held.pages[layer]
    block = jnp.minimum(positions // held.page_size, table.shape[-1] - 1)
    pages = jnp.take_along_axis(table, block[:, None], axis=2).swapaxes(1, 2)
    return pool.at[pages, (positions % held.page_size)[..., None]].get(mode="clip")


_QUERIES = PartitionSpec(DATA, None, MODEL)
_score_program = Program(OverMesh(_score, (_BY_HEAD, _QUERIES, CACHES, ROWS, SAME, SAME), _BY_HEAD))
_keep_program = Program(OverMesh(_keep, (_BY_HEAD, CACHES, ROWS, ROWS), CACHES))
