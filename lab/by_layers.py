"""Methods by masks, a layer at a time: without cache layouts and programs of the model.

A document is read once; a method keeps a mask over its tokens, per layer and KV head. Its window is that of the query
after the document, and does not move during a question.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import pad_tokens
from tca_jax.engine.read import Calls
from tca_jax.errors import require
from tca_jax.lab.rivals.repetition import Repetition, repeat
from tca_jax.layer_passes import LayerPass, TextPass, attention_program, layer_program
from tca_jax.methods.base import CachePolicy, Heads, Method, ScoredCache, compact, last_queries
from tca_jax.methods.full import BASELINE, FullPrefill
from tca_jax.methods.pairs import causal_pairs
from tca_jax.methods.regions import Selection
from tca_jax.models.decoder import Decoder
from tca_jax.pallas_kernels.select_tokens import selection_mask

_CHUNK = 128  # positions whose logits are computed at once


@dataclasses.dataclass(frozen=True)
class FullRead:
    """A document that was read under full attention."""

    ids: list[int]
    # Of each layer: q [1, L', Hq, d], k and v [1, L', Hkv, d], and the attended share [1]; L' is padded.
    layers: list[tuple[Array, Array, Array, Array]]
    # What methods that repeat the document measure, [layers, 1, Hkv, L'], by how they repeat it.
    repetitions: dict[Repetition, Array] = dataclasses.field(default_factory=dict)


class MaskedRead(NamedTuple):
    """A document that was read, and what a method keeps of it."""

    ids: list[int]
    keys: list[tuple[Array, Array]]  # k, v [1, L', Hkv, d] of each layer
    # Kept tokens of each layer, for all rows that are asked or for each; or what is added to the logits of keys, which
    # may then be more than the tokens.
    masks: list[Bool[Array, "_ Hkv _"] | Float32[Array, "1 Hkv _"]]
    attended_share: float

    @property
    def kept_share(self) -> float:
        """Share of all (layer, head, token) that is kept."""
        kept = [float(on_host(mask[..., : len(self.ids)].mean(dtype=jnp.float32))) for mask in self.masks]
        return float(np.mean(kept))


def read_full(lm: LM, ids: Sequence[int]) -> FullRead:
    """Reads a document under full attention."""
    require(lm.mesh is None, f"{lm.name} is on a mesh: masks are evaluated on one device")
    return FullRead(list(ids), list(TextPass(lm, ids).layers(_attend, method=BASELINE, layer=0)))


def read_by(lm: LM, full: FullRead) -> MaskedRead:
    """The tokens that the model's method keeps of a document; ValueError if each step reads others (Quest)."""
    method, layers = lm.method, full.layers
    masked = type(method.cache).attended is CachePolicy.attended and not isinstance(method.cache, ScoredCache)
    require(masked, f"{method.name} chooses what each step attends to, or by hidden states: use tca-jax eval")
    if not isinstance(method.prefill, FullPrefill):
        layers = list(_read(lm, TextPass(lm, full.ids)))
    masks = _masks(lm, full.ids, layers, full.repetitions)
    return MaskedRead(full.ids, [layer[1:3] for layer in layers], masks, _mean_share(layers))


def masks_of(lm: LM, ids: Sequence[int]) -> list[Bool[Array, "1 Hkv L"]]:
    """The tokens of a document that the model's method keeps in each layer."""
    return _masks(lm, ids, _read(lm, TextPass(lm, ids)), {})


def _masks(lm: LM, ids: Sequence[int], layers: Iterable[Any], repetitions: dict[Repetition, Array]) -> list[Array]:
    method, (tokens, lengths) = lm.method, map(jnp.asarray, pad_tokens([list(ids)]))
    if method.cache.reader is None:
        return [_mask(method, number, q, k, v, lengths) for number, (q, k, v, *_) in enumerate(layers)]
    policy: Any = method.cache  # a KVzipCache
    if policy.repetition not in repetitions:
        repetitions[policy.repetition] = jnp.stack(repeat(lm, policy.repetition, tokens, lengths, Calls())[1])
    heads = [Heads.all(lm.config.num_kv_heads)] * lm.config.num_layers
    selections = policy.select_repeated(heads, repetitions[policy.repetition], lengths)
    return [kept_mask(policy, selection, lengths) for selection in selections]


def read_losses(lm: LM, ids: Sequence[int]) -> tuple[Float32[np.ndarray, " L"], float]:
    """Loss of the token after each one of a text under the model's method, and the attended share."""
    passed = TextPass(lm, ids)
    share = _mean_share(layer[3:] for layer in _read(lm, passed))
    return passed.losses()[: len(ids) - 1], share


def _read(lm: LM, passed: TextPass) -> Any:
    return passed.layers(_attend, of_layer=lambda number: {"layer": number}, method=lm.method)


def _mean_share(layers: Any) -> float:
    return float(np.mean([float(on_host(share)[0]) for *_, share in layers]))


class Answers(NamedTuple):
    """Rows of tokens that follow a document, teacher-forced."""

    losses: Float32[np.ndarray, "Q n"]  # of the token after each
    right: Bool[np.ndarray, "Q n"]  # whether it is the likeliest


def ask(lm: LM, read: MaskedRead, rows: Int32[np.ndarray, "Q n"]) -> Answers:
    """Answers rows that follow a document; no row sees another."""
    passed, _ = _asked(lm, read, rows, None)
    return Answers(*(on_host(found).reshape(rows.shape) for found in passed.finish(_judge)))


def question_scores(
    lm: LM, read: MaskedRead, rows: Int32[np.ndarray, "Q n"], questions: Bool[np.ndarray, "Q n"]
) -> list[Float32[Array, "Q Hkv _"]]:
    """The most attention that each token of a document gets from these tokens of rows, in each layer."""
    return list(_asked(lm, read, rows, jnp.asarray(questions))[1])


def _asked(
    lm: LM, read: MaskedRead, rows: Int32[np.ndarray, "Q n"], questions: Array | None
) -> tuple[LayerPass, list[Any]]:
    """A pass of rows that has run, and what its layers measured."""
    positions = np.broadcast_to(len(read.ids) + np.arange(rows.shape[1], dtype=np.int32), rows.shape)
    passed = LayerPass(lm, rows, positions)
    there = jnp.arange(read.keys[0][0].shape[1]) < len(read.ids)

    def arrays(number: int) -> tuple[Any, ...]:
        mask = read.masks[number]
        bias = jnp.where(mask & there, 0.0, -jnp.inf) if mask.dtype == bool else mask
        return *read.keys[number], bias, questions

    return passed, list(passed.layers(_attend_after, arrays, rows=len(rows)))


def kept_mask(policy: CachePolicy, selection: Selection, lengths: Int[Array, " B"]) -> Bool[Array, "B Hkv L"]:
    """Tokens kept after prompts: the window of the next query, and the selection left of it."""
    chosen = selection_mask(*selection[:2], block_size=policy.block_size)
    first = policy.num_ranked_blocks(lengths) * policy.block_size
    return chosen | (jnp.arange(chosen.shape[-1]) >= first[:, None, None])


def _select(method: Method, layer: int, q: Array, k: Array, v: Array, lengths: Array) -> Selection:
    queries = last_queries(q, lengths, method.cache.num_queries)
    return method.cache.select(layer, Heads.all(k.shape[2]), queries, k, v, lengths, "auto")


def _mask(method: Method, layer: int, q: Array, k: Array, v: Array, lengths: Array) -> Bool[Array, "1 Hkv L"]:
    """The tokens that a method keeps in a layer. Not one program, which would be compiled for each layer."""
    if not method.cache.num_ranked_blocks(k.shape[1]):
        return jnp.ones((k.shape[0], k.shape[2], k.shape[1]), bool)
    return kept_mask(method.cache, _select(method, layer, q, k, v, lengths), lengths)


@functools.partial(attention_program, static=("method", "layer"))
def _attend(
    q: Array, k: Array, v: Array, lengths: Array, *, method: Method, layer: int
) -> tuple[Array, tuple[Array, Array, Array, Float32[Array, " 1"]]]:
    """Attention of a prompt under a method."""
    heads, readable = Heads.all(k.shape[2]), None
    if method.prefill_reads_cache and method.cache.num_ranked_blocks(k.shape[1]):
        readable = compact(method.cache, layer, heads, _select(method, layer, q, k, v, lengths), k, v, "auto")
    out, pairs = method.prefill.attend(layer, heads, q, k, v, lengths, readable, "auto")
    return out, (q, k, v, pairs / causal_pairs(lengths))


@functools.partial(attention_program, static=("rows",))
def _attend_after(
    q: Array, k: Array, v: Array, old_k: Array, old_v: Array, bias: Array, questions: Array | None, *, rows: int
) -> tuple[Float[Array, "1 P Hq d"], Float32[Array, "Q Hkv _"] | None]:
    """Attention of questions, row by row, over a document's keys with `bias` [1 or Q, Hkv, L'], and their own."""

    def of_row(row: tuple[Array, ...]) -> tuple[Float[Array, "n Hq d"], Array | None]:
        q, k, v, bias, *question = row
        grouped, scale = q.reshape(len(q), k.shape[1], -1, q.shape[-1]), 1 / math.sqrt(q.shape[-1])

        def scores(keys: Array) -> Array:
            return jnp.einsum("nhgd,lhd->hgnl", grouped, keys, preferred_element_type=jnp.float32) * scale

        causal = jnp.arange(len(k)) <= jnp.arange(len(q))[:, None]
        own = jnp.where(causal, scores(k), -jnp.inf)
        p = jax.nn.softmax(jnp.concatenate([scores(old_k[0]) + bias[:, None, None], own], axis=-1), axis=-1)
        most = jnp.where(question[0][:, None], p[..., : old_k.shape[1]], 0).max(axis=(1, 2)) if question else None
        old, new = jnp.split(p.astype(v.dtype), [old_k.shape[1]], axis=-1)
        out = jnp.einsum("hgnl,lhd->nhgd", old, old_v[0]) + jnp.einsum("hgnl,lhd->nhgd", new, v)
        return out.reshape(q.shape), most

    parts = tuple(x.reshape(rows, -1, *x.shape[2:]) for x in (q, k, v))
    asked = () if questions is None else (questions,)
    out, most = jax.lax.map(of_row, (*parts, jnp.broadcast_to(bias, (rows, *bias.shape[1:])), *asked))
    return out.reshape(q.shape), most


@layer_program
def _judge(
    decoder: Decoder, x: Float[Array, "1 P D"], targets: Int32[Array, "1 P"]
) -> tuple[Float32[Array, "1 P"], Bool[Array, "1 P"]]:
    """Loss of the token after each one, and whether it is the likeliest."""
    hidden = decoder.norm(x)[0]
    chunk = math.gcd(len(hidden), _CHUNK)

    def of_chunk(part: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = decoder.logits(part[0]).astype(jnp.float32)
        wanted = jnp.take_along_axis(logits, part[1][:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - wanted, logits.argmax(axis=-1) == part[1]

    losses, right = jax.lax.map(of_chunk, (hidden.reshape(-1, chunk, hidden.shape[-1]), targets.reshape(-1, chunk)))
    return losses.reshape(1, -1), right.reshape(1, -1)
