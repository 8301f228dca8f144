"""Methods by masks, a layer at a time: without cache layouts and programs of the model.

A document is read once. A method keeps a mask over its tokens, per layer and KV head; questions attend to the masked
keys and to their own. Methods that read prompts in full differ in the mask only. A method's window is that of the query
after the document, and does not move during a question.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.errors import UserError
from tca_jax.lab.rivals.repetition import Repetition, repeated_attention
from tca_jax.layer_passes import LayerPass, TextPass, attention_program, layer_program
from tca_jax.methods.base import CachePolicy, Heads, Method, compact, last_queries
from tca_jax.methods.full import FullPrefill
from tca_jax.methods.pairs import causal_pairs
from tca_jax.methods.regions import Selection
from tca_jax.models.decoder import Decoder
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.numerics import round_up

_QUERIES = 128  # of a chunk that attends at once


class FullRead(NamedTuple):
    """A document that was read under full attention."""

    ids: list[int]
    layers: list[tuple[Array, Array, Array]]  # q [1, L', Hq, d], k and v [1, L', Hkv, d]; L' is padded


class MaskedRead(NamedTuple):
    """A document that was read, and what a method keeps of it."""

    ids: list[int]
    keys: list[tuple[Array, Array]]  # k, v [1, L', Hkv, d] of each layer
    masks: list[Bool[Array, "1 Hkv _"]]  # kept tokens of each layer
    attended_share: float

    @property
    def kept_share(self) -> float:
        """Share of all (layer, head, token) that is kept."""
        kept = [float(on_host(mask[..., : len(self.ids)].mean(dtype=jnp.float32))) for mask in self.masks]
        return float(np.mean(kept))


def read_full(lm: LM, ids: Sequence[int]) -> FullRead:
    """Reads a document under full attention."""
    if lm.mesh is not None:
        raise UserError(f"{lm.name} is on a mesh: masks are evaluated on one device")
    return FullRead(list(ids), list(TextPass(lm, ids).layers(_attend_fully)))


def read_by(lm: LM, full: FullRead, scores: Float32[Array, "layers 1 Hkv L"] | None = None) -> MaskedRead:
    """The tokens that the model's method keeps of a document, which a sparse prefill reads again.

    `scores` are of `repetition_scores`, for a method that selects by a repetition. ValueError if each step of a method
    attends to other tokens of its cache (Quest).
    """
    method, lengths = lm.method, jnp.asarray([len(full.ids)])
    if type(method.cache).attended is not CachePolicy.attended:
        raise UserError(f"{method.name} chooses what each step attends to, which is no mask: use tca-jax eval")
    if not isinstance(method.prefill, FullPrefill):
        found = list(
            TextPass(lm, full.ids).layers(_attend_by, of_layer=lambda number: {"layer": number}, method=method)
        )
        shares = [float(on_host(share)[0]) for *_, share in found]
        return MaskedRead(
            full.ids, [layer[:2] for layer in found], [layer[2] for layer in found], float(np.mean(shares))
        )
    if scores is not None:
        heads = [Heads.all(k.shape[2]) for _, k, _ in full.layers]
        policy: Any = method.cache  # a KVzipCache
        selections = policy.select_repeated(heads, scores, lengths)
        masks = [kept_mask(method.cache, selection, lengths) for selection in selections]
    else:
        masks = [_select(*layer, lengths, method=method, layer=number) for number, layer in enumerate(full.layers)]
    return MaskedRead(full.ids, [layer[1:] for layer in full.layers], masks, 1.0)


def read_losses(lm: LM, ids: Sequence[int]) -> tuple[Float32[np.ndarray, " L"], float]:
    """Loss of the token after each one of a text under the model's method, and the attended share."""
    passed = TextPass(lm, ids)
    layers = passed.layers(_attend_only, of_layer=lambda number: {"layer": number}, method=lm.method)
    shares = [float(on_host(share)[0]) for share in layers]
    return passed.losses()[: len(ids) - 1], float(np.mean(shares))


class Answers(NamedTuple):
    """Rows of tokens that follow a document, teacher-forced."""

    losses: Float32[np.ndarray, "Q n"]  # of the token after each
    right: Bool[np.ndarray, "Q n"]  # whether it is the likeliest


def ask(lm: LM, read: MaskedRead, rows: Int32[np.ndarray, "Q n"]) -> Answers:
    """Answers rows that follow a document; no row sees another."""
    positions = np.broadcast_to(len(read.ids) + np.arange(rows.shape[1], dtype=np.int32), rows.shape)
    passed = LayerPass(lm, rows, positions)
    there = jnp.arange(read.keys[0][0].shape[1]) < len(read.ids)

    def arrays(number: int) -> tuple[Any, ...]:
        return (*read.keys[number], read.masks[number] & there)

    for _ in passed.layers(_attend_after, arrays, rows=len(rows)):
        pass
    losses, right = passed.finish(_judge)
    return Answers(*(on_host(found).reshape(rows.shape) for found in (losses, right)))


def repetition_scores(lm: LM, full: FullRead) -> Float32[Array, "layers 1 Hkv L"]:
    """The most attention of each token of a document during its repetition, for a method with a `repetition`."""
    policy: Any = lm.method.cache  # a KVzipCache
    repetition = policy.repetition
    length, tokens = len(full.ids), full.layers[0][1].shape[1]
    padded = jnp.asarray(np.pad(full.ids, (0, tokens - length)), jnp.int32)[None]
    columns = round_up(repetition.fed_tokens(length), _QUERIES)
    sinks = repetition.sinks
    scores = np.zeros((len(full.layers), 1, full.layers[0][1].shape[2], tokens), np.float32)
    scores[..., :sinks] = 2.0
    for number in range(repetition.num_chunks(length)):
        start = sinks + number * repetition.chunk
        ids, count = _fed(repetition, number, padded, length, columns)
        positions = length + np.minimum(np.arange(columns, dtype=np.int32), max(count - 1, 0))[None]
        place = jnp.asarray(start + np.arange(repetition.chunk_tokens(length)))
        extra = (jnp.asarray([length]), place, jnp.arange(columns)[None] < count)
        passed = LayerPass(lm, ids, positions, last=extra)
        end = min(start + repetition.chunk_tokens(length), length)
        found = passed.layers(_repeat, lambda layer: full.layers[layer][1:], sinks=sinks)
        for layer, most in enumerate(found):
            scores[layer, :, :, start:end] = on_host(most)[..., : end - start]
    return jnp.asarray(scores)


def _fed(
    repetition: Repetition, number: int, tokens: Int32[Array, "1 L"], length: int, columns: int
) -> tuple[Int32[np.ndarray, "1 S"], int]:
    """Tokens of a request and its chunk, and their number."""
    lengths, places = jnp.asarray([length]), jnp.arange(columns)[None]
    ids, count = repetition.fed(jnp.asarray(number), tokens, lengths, lengths, places)
    return on_host(ids), int(on_host(count)[0])


def kept_mask(policy: CachePolicy, selection: Selection, lengths: Int[Array, " B"]) -> Bool[Array, "B Hkv L"]:
    """Tokens kept after prompts: the window of the next query, and the selection left of it."""
    batch, kv_heads, tokens = selection.scores.shape
    b, blocks = policy.block_size, tokens // policy.block_size
    in_blocks = selection.scores[..., : blocks * b].reshape(batch, kv_heads, blocks, b)
    rank = jnp.argsort(jnp.argsort(-in_blocks, axis=-1, stable=True), axis=-1)
    chosen = (rank < selection.budgets[..., None]).reshape(batch, kv_heads, blocks * b)
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, tokens - blocks * b)))
    first = jnp.maximum(0, lengths // b * b - policy.window)
    return chosen | (jnp.arange(tokens) >= first[:, None, None])


def _masked(
    method: Method, layer: int, q: Array, k: Array, v: Array, lengths: Int[Array, " B"]
) -> tuple[Selection | None, Bool[Array, "B Hkv L"]]:
    """A method's selection in a layer, None without ranked blocks, and the mask of kept tokens."""
    policy, heads = method.cache, Heads.all(k.shape[2])
    if not policy.num_ranked_blocks(k.shape[1]):
        return None, jnp.ones((k.shape[0], k.shape[2], k.shape[1]), bool)
    queries = last_queries(q, lengths, policy.num_queries)
    selection = policy.select(layer, heads, queries, k, v, lengths, "auto")
    return selection, kept_mask(policy, selection, lengths)


@functools.partial(jax.jit, static_argnames=("method", "layer"))
def _select(
    q: Array, k: Array, v: Array, lengths: Int[Array, " 1"], *, method: Method, layer: int
) -> Bool[Array, "1 Hkv L"]:
    return _masked(method, layer, q, k, v, lengths)[1]


@attention_program
def _attend_fully(q: Array, k: Array, v: Array, lengths: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return causal_attention(q, k, v, lengths), (q, k, v)


def _attended(
    method: Method, layer: int, q: Array, k: Array, v: Array, lengths: Array, selection: Selection | None
) -> tuple[Array, Float32[Array, " 1"]]:
    """Attention of a prompt under a method, and the attended share."""
    heads, readable = Heads.all(k.shape[2]), None
    if selection is not None and method.prefill_reads_cache:
        readable = compact(method.cache, layer, heads, selection, k, v, "auto")
    out, pairs = method.prefill.attend(layer, heads, q, k, v, lengths, readable, "auto")
    return out, pairs / causal_pairs(lengths)


@functools.partial(attention_program, static=("method", "layer"))
def _attend_by(
    q: Array, k: Array, v: Array, lengths: Array, *, method: Method, layer: int
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    selection, mask = _masked(method, layer, q, k, v, lengths)
    out, share = _attended(method, layer, q, k, v, lengths, selection)
    return out, (k, v, mask, share)


@functools.partial(attention_program, static=("method", "layer"))
def _attend_only(
    q: Array, k: Array, v: Array, lengths: Array, *, method: Method, layer: int
) -> tuple[Array, Float32[Array, " 1"]]:
    selection = _masked(method, layer, q, k, v, lengths)[0] if method.prefill_reads_cache else None
    return _attended(method, layer, q, k, v, lengths, selection)


def _attend_to_both(
    q: Float[Array, "n Hq d"],
    k: Float[Array, "m Hkv d"],
    v: Float[Array, "m Hkv d"],
    before: tuple[Float[Array, "L Hkv d"], Float[Array, "L Hkv d"], Bool[Array, "#Hkv L"]],
    first: Int[Array, ""],
) -> Float[Array, "n Hq d"]:
    """Attention of queries from place `first` after a document on, over its masked keys and their own."""
    (old_k, old_v, mask), kv_heads, scale = before, k.shape[1], 1 / math.sqrt(q.shape[-1])
    grouped = q.reshape(len(q), kv_heads, -1, q.shape[-1])

    def scores(keys: Array) -> Array:
        return jnp.einsum("nhgd,lhd->hgnl", grouped, keys, preferred_element_type=jnp.float32) * scale

    causal = jnp.arange(len(k)) <= first + jnp.arange(len(q))[:, None]
    old = jnp.where(mask[:, None, None], scores(old_k), -jnp.inf)
    new = jnp.where(causal, scores(k), -jnp.inf)
    p = jax.nn.softmax(jnp.concatenate([old, new], axis=-1), axis=-1).astype(v.dtype)
    out = jnp.einsum("hgnl,lhd->nhgd", p[..., : len(old_k)], old_v) + jnp.einsum(
        "hgnl,lhd->nhgd", p[..., len(old_k) :], v
    )
    return out.reshape(q.shape)


@functools.partial(attention_program, static=("rows",), measures=False)
def _attend_after(
    q: Array, k: Array, v: Array, old_k: Array, old_v: Array, mask: Array, *, rows: int
) -> Float[Array, "1 P Hq d"]:
    """Attention of questions, row by row."""
    before = old_k[0], old_v[0], mask[0]

    def of_row(row: tuple[Array, Array, Array]) -> Array:
        return _attend_to_both(*row, before, jnp.int32(0))

    parts = tuple(x.reshape(rows, -1, *x.shape[2:]) for x in (q, k, v))
    return jax.lax.map(of_row, parts).reshape(q.shape)


@functools.partial(attention_program, static=("sinks",))
def _repeat(
    q: Array,
    k: Array,
    v: Array,
    old_k: Array,
    old_v: Array,
    lengths: Int[Array, " 1"],
    place: Int[Array, " c"],
    fed: Bool[Array, "1 S"],
    *,
    sinks: int,
) -> tuple[Array, Float32[Array, "1 Hkv c"]]:
    """Attention of a request and its chunk to everything, and the most that each token of the chunk gets."""
    before = old_k[0], old_v[0], (jnp.arange(old_k.shape[1]) < lengths)[None]

    def of_chunk(number: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(q[0], number * _QUERIES, _QUERIES)
        return _attend_to_both(part, k[0], v[0], before, number * _QUERIES)

    out = jax.lax.map(of_chunk, jnp.arange(q.shape[1] // _QUERIES)).reshape(q.shape)
    there = (place < lengths)[None]
    chunk = old_k[:, jnp.minimum(place, old_k.shape[1] - 1)]
    return out, repeated_attention(q, k, old_k[:, :sinks], chunk, fed, there, queries=_QUERIES)


@layer_program
def _judge(
    decoder: Decoder, x: Float[Array, "1 P D"], targets: Int32[Array, "1 P"]
) -> tuple[Float32[Array, "1 P"], Bool[Array, "1 P"]]:
    """Loss of the token after each one, and whether it is the likeliest."""
    hidden = decoder.norm(x)[0]
    chunk = math.gcd(len(hidden), _QUERIES)

    def of_chunk(part: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = decoder.logits(part[0]).astype(jnp.float32)
        wanted = jnp.take_along_axis(logits, part[1][:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - wanted, logits.argmax(axis=-1) == part[1]

    parts = hidden.reshape(-1, chunk, hidden.shape[-1]), targets[0].reshape(-1, chunk)
    losses, right = jax.lax.map(of_chunk, parts)
    return losses.reshape(1, -1), right.reshape(1, -1)
