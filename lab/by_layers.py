"""Methods by masks, a layer at a time: without cache layouts and programs of the model.

A document is read once; a method keeps a mask over its tokens, per layer and KV head. Its window is that of the query
after the document, and does not move during a question.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import pad_tokens
from tca_jax.engine.read import Calls
from tca_jax.engine.score import scores_of_hidden
from tca_jax.errors import require
from tca_jax.lab.rivals.repetition import Repetition, repeat
from tca_jax.layer_passes import LayerPass, TextPass, attention_program, layer_program
from tca_jax.methods.base import CachePolicy, Heads, Method, ScoredCache, ScoredPrefill, compact, last_queries
from tca_jax.methods.full import BASELINE, FullPrefill
from tca_jax.methods.regions import Selection, causal_pairs
from tca_jax.models.decoder import Decoder
from tca_jax.pallas_kernels.select_tokens import selection_mask


class LayerRead(NamedTuple):
    """A layer of a document that was read; L is padded."""

    q: Float[Array, "1 L Hq d"]
    k: Float[Array, "1 L Hkv d"]
    v: Float[Array, "1 L Hkv d"]
    attended_share: Float32[Array, " 1"]
    scores: Any  # float32 [1, Hkv, L], of methods that score hidden states; None of others


@dataclasses.dataclass(frozen=True)
class FullRead:
    """A document that was read under full attention."""

    ids: list[int]
    layers: list[LayerRead]
    # What methods that repeat the document measure, [layers, 1, Hkv, L'], by how they repeat it.
    repetitions: dict[Repetition, Array] = dataclasses.field(default_factory=dict)


class MaskedRead(NamedTuple):
    """A document that was read, and the tokens that a method keeps."""

    ids: list[int]
    keys: list[tuple[Array, Array]]  # k, v [1, L', Hkv, d] of each layer, means of evicted tokens behind the tokens
    biases: list[Float32[Array, "1 Hkv _"]]  # additions to the logits of keys; -inf for those that are not held
    attended_share: float

    @property
    def kept_share(self) -> float:
        """Share of all (layer, head, token) that is kept."""
        return self._held(len(self.ids))

    @property
    def kv_share(self) -> float:
        """Kept tokens and means over all tokens."""
        return self._held(None)

    def _held(self, end: int | None) -> float:
        counts = [jnp.isfinite(bias[..., :end]).sum(axis=-1).mean() for bias in self.biases]
        return float(np.mean(on_host(counts))) / len(self.ids)


def read_full(lm: LM, ids: Sequence[int]) -> FullRead:
    """Reads a document under full attention."""
    require(lm.mesh is None, f"{lm.name} is on a mesh: masks are evaluated on one device")
    full = lm.with_method(BASELINE)
    return FullRead(list(ids), list(_layers(full, TextPass(full, ids))))


def read_by(lm: LM, full: FullRead) -> MaskedRead:
    """The tokens that the model's method keeps of a document; ValueError if each step reads others (Quest)."""
    method, layers = lm.method, full.layers
    masked = type(method.cache).attended is CachePolicy.attended
    require(masked, f"{method.name} chooses what each step attends to: use tca-jax eval")
    if not isinstance(method.prefill, FullPrefill):
        layers = list(_layers(lm, TextPass(lm, full.ids)))
    held = [_with_means(lm, *each, len(full.ids)) for each in zip(layers, _masks(lm, full, layers), strict=True)]
    attended = np.mean([on_host(layer.attended_share)[0] for layer in layers])
    return MaskedRead(full.ids, [keys for keys, _ in held], [bias for _, bias in held], float(attended))


def masks_of(lm: LM, ids: Sequence[int]) -> list[Bool[Array, "1 Hkv L"]]:
    """The tokens of a document that the model's method keeps in each layer."""
    return _masks(lm, FullRead(list(ids), []), _layers(lm, TextPass(lm, ids)))


def _layers(lm: LM, passed: TextPass) -> Iterator[LayerRead]:
    """Layers of a text under the model's method; methods whose layers differ compile a program for each."""
    shared = lm.method == BASELINE or isinstance(lm.method.cache, ScoredCache)
    return passed.layers(
        _read_layer,
        lambda number: (lm.settings_of(number),),
        of_layer=lambda number: {"layer": 0 if shared else number},
        method=lm.method,
    )


def _masks(lm: LM, full: FullRead, layers: Iterable[LayerRead]) -> list[Array]:
    """Kept tokens of each layer; `full` holds the measurements of methods that repeat the document."""
    policy: Any = lm.method.cache
    tokens, lengths = map(jnp.asarray, pad_tokens([full.ids]))
    if policy.reader is None:
        return [_mask(lm, number, layer, lengths) for number, layer in enumerate(layers)]
    if policy.repetition not in full.repetitions:
        scores = repeat(lm, policy.repetition, tokens, lengths, Calls())[1]
        full.repetitions[policy.repetition] = jnp.stack(scores)
    heads = [Heads.all(lm.config.num_kv_heads)] * lm.config.num_layers
    selections = policy.select_repeated(heads, full.repetitions[policy.repetition], lengths)
    return [kept_mask(policy, selection, lengths) for selection in selections]


def _mask(lm: LM, number: int, layer: LayerRead, lengths: Array) -> Bool[Array, "1 Hkv L"]:
    """The tokens that a method keeps in a layer. Not one program, which would be compiled for each layer."""
    policy, (batch, tokens, heads, _) = lm.method.cache, layer.k.shape
    if not policy.num_ranked_blocks(tokens):
        return jnp.ones((batch, heads, tokens), bool)
    if isinstance(policy, ScoredCache):
        kept = policy.stays(lm.settings_of(number), layer.scores) | _window(policy, lengths, tokens)
        queries = last_queries(layer.q, lengths, policy.num_queries)
        return kept | policy.reserved(queries, layer.k, lengths, "auto") if policy.reserve else kept
    return kept_mask(policy, _select(lm.method, number, *layer[:3], lengths), lengths)


def _with_means(
    lm: LM, layer: LayerRead, mask: Bool[Array, "1 Hkv L"], length: int
) -> tuple[tuple[Array, Array], Float32[Array, "1 Hkv _"]]:
    """Keys and values, followed by the means of evicted tokens if the method keeps these; additions to the logits."""
    policy, there = lm.method.cache, jnp.arange(mask.shape[-1]) < length
    bias = jnp.where(mask & there, 0.0, -jnp.inf)
    if not (isinstance(policy, ScoredCache) and policy.means):
        return (layer.k, layer.v), bias
    means = policy.block_means(layer.k, layer.v, layer.scores, ~mask & there)
    k, v = (jnp.concatenate([x, mean.astype(x.dtype)], axis=1) for x, mean in ((layer.k, means.k), (layer.v, means.v)))
    return (k, v), jnp.concatenate([bias, means.bias], axis=-1)


class Answers(NamedTuple):
    """Rows of tokens that follow a document, teacher-forced."""

    losses: Float32[np.ndarray, "Q n"]  # of the token after each
    right: Bool[np.ndarray, "Q n"]  # whether it is the likeliest


def ask(lm: LM, read: MaskedRead, rows: Int32[np.ndarray, "Q n"]) -> Answers:
    """Answers rows that follow a document; no row sees another."""
    positions = np.broadcast_to(len(read.ids) + np.arange(rows.shape[1], dtype=np.int32), rows.shape)
    passed = LayerPass(lm, rows, positions)
    for _ in passed.layers(_attend_after, lambda number: (*read.keys[number], read.biases[number]), rows=len(rows)):
        pass
    return Answers(*(on_host(found).reshape(rows.shape) for found in passed.finish(_judge)))


def kept_mask(policy: CachePolicy, selection: Selection, lengths: Int[Array, " B"]) -> Bool[Array, "B Hkv L"]:
    """Tokens kept after prompts: the window of the next query, and the selection left of it."""
    chosen = selection_mask(*selection[:2], block_size=policy.block_size)
    return chosen | _window(policy, lengths, chosen.shape[-1])


def _window(policy: CachePolicy, lengths: Int[Array, " B"], tokens: int) -> Bool[Array, "B 1 L"]:
    return jnp.arange(tokens) >= (policy.num_ranked_blocks(lengths) * policy.block_size)[:, None, None]


def _select(method: Method, layer: int, q: Array, k: Array, v: Array, lengths: Array) -> Selection:
    queries = last_queries(q, lengths, method.cache.num_queries)
    return method.cache.select(layer, Heads.all(k.shape[2]), queries, k, v, lengths, "auto")


@functools.partial(layer_program, static=("method", "layer"))
def _read_layer(
    module: Any,
    x: Float[Array, "1 L D"],
    cos: Array,
    sin: Array,
    settings: Any,
    lengths: Int[Array, " 1"],
    *,
    method: Method,
    layer: int,
) -> tuple[Array, LayerRead]:
    """A layer of a prompt under a method."""
    scores: Any = None
    if isinstance(method.cache, ScoredCache):
        positions = jnp.minimum(jnp.arange(x.shape[1]), lengths[:, None] - 1)
        scores = method.cache.score(settings, module.attention_norm(x), positions)

    def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, LayerRead]:
        heads, selected = Heads.all(k.shape[2]), None
        if method.prefill_reads_cache and method.cache.num_ranked_blocks(k.shape[1]):
            selected = compact(method.cache, layer, heads, _select(method, layer, q, k, v, lengths), k, v, "auto")
        if isinstance(method.prefill, ScoredPrefill):
            out, pairs = method.prefill.attend_scored(settings, q, k, v, scores, lengths, "auto")
        else:
            out, pairs = method.prefill.attend(layer, heads, q, k, v, lengths, selected, "auto")
        return out, LayerRead(q, k, v, pairs / causal_pairs(lengths), scores)

    return module(x, cos, sin, attention, None)


@functools.partial(attention_program, static=("rows",))
def _attend_after(
    q: Array, k: Array, v: Array, old_k: Array, old_v: Array, bias: Float32[Array, "1 Hkv _"], *, rows: int
) -> tuple[Float[Array, "1 P Hq d"], None]:
    """Attention of questions, row by row, over a document's keys with `bias`, and their own."""

    def of_row(row: tuple[Array, Array, Array]) -> Float[Array, "n Hq d"]:
        q, k, v = row
        grouped, scale = q.reshape(len(q), k.shape[1], -1, q.shape[-1]), 1 / math.sqrt(q.shape[-1])

        def scores(keys: Array) -> Array:
            return jnp.einsum("nhgd,lhd->hgnl", grouped, keys, preferred_element_type=jnp.float32) * scale

        causal = jnp.arange(len(k)) <= jnp.arange(len(q))[:, None]
        own = jnp.where(causal, scores(k), -jnp.inf)
        p = jax.nn.softmax(jnp.concatenate([scores(old_k[0]) + bias[0, :, None, None], own], axis=-1), axis=-1)
        old, new = jnp.split(p.astype(v.dtype), [old_k.shape[1]], axis=-1)
        out = jnp.einsum("hgnl,lhd->nhgd", old, old_v[0]) + jnp.einsum("hgnl,lhd->nhgd", new, v)
        return out.reshape(q.shape)

    parts = tuple(x.reshape(rows, -1, *x.shape[2:]) for x in (q, k, v))
    return jax.lax.map(of_row, parts).reshape(q.shape), None


@layer_program
def _judge(decoder: Decoder, x: Float[Array, "1 P D"], targets: Int32[Array, "1 P"]) -> tuple[Array, Array]:
    """Loss of the token after each one, and whether it is the likeliest."""
    found = scores_of_hidden(decoder, decoder.norm(x), targets)
    return -found.logprobs, found.greedy
