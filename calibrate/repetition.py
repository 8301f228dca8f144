"""The worth of each token to a literal repetition of its text (docs/worth.md).

After the text the chat template asks for it, and the text follows again in chunks. A chunk sees of the text its own
chunk, the one before and the first tokens, so the cost is linear in the length. The margin of the repetition is
differentiated by each head's output, a layer at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import Encoder, TokenizerWording, encode_verbatim
from tca_jax.errors import require
from tca_jax.layer_passes import LayerPass, TextPass, attention_program, layer_program
from tca_jax.models.decoder import Decoder
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, round_up, scaled_scores

REQUEST = "\n\nRepeat the previous context exactly."
#: What `text_targets` measures of each token, maxima over queries i and query heads g of the group: the worth
#: p |dm/do| |v|, the probability p, and the first-order effect p |dm/do . (v - o)|.
TARGETS = ("worth", "probability", "effect")
CHUNK = 1_024  # tokens of a chunk
_FIRST = 128  # first tokens, which every chunk sees
_ROW_MULTIPLE = 128  # tokens of a request and its chunk are padded to a multiple


class LayerInputs(NamedTuple):
    """A layer's inputs and keys of a text that was read under full attention; zero from the text's end on."""

    x: Float[Array, "1 L D"]  # hidden states at the input of the projections, after the norm
    k: Float[Array, "1 L Hkv d"]
    v: Float[Array, "1 L Hkv d"]


class LayerTargets(NamedTuple):
    """Targets of a layer's heads, for each token of a text."""

    values: Float32[Array, "3 Hkv L"]  # in the order of `TARGETS`
    head_weight: Float32[Array, " Hkv"]  # mean over queries of max_g |dm/do|, times the mean of |v|


class TextRows(NamedTuple):
    """Rows of tokens that follow a text: its repetition in chunks."""

    tokens: Int32[np.ndarray, "R n"]
    counted: Float32[np.ndarray, "R n"]  # 1 at tokens whose prediction of the next one counts
    chunk: int  # tokens of the chunk that row r repeats, the r-th


def chat_frame(lm: Encoder) -> tuple[list[int], list[int]]:
    """Token ids around a user's text (`TokenizerWording.around_text`); none without a tokenizer."""
    if lm.tokenizer is None:
        return [], []
    before, after = TokenizerWording(lm).around_text()
    return list(before), list(after)


def repetition_request(lm: Encoder) -> list[int]:
    """Token ids between a text and its repetition; none without a tokenizer."""
    return [] if lm.tokenizer is None else [*encode_verbatim(lm, REQUEST), *chat_frame(lm)[1]]


def read_inputs(lm: LM, ids: Sequence[int]) -> list[LayerInputs]:
    """Reads a text under full attention. ValueError if the model is on a mesh."""
    require(lm.mesh is None, f"{lm.name} is on a mesh: load it on one device to fit predicted worth")
    return list(TextPass(lm, ids).layers(_read_layer))


def repetition_rows(ids: Sequence[int], request: Sequence[int], chunk: int = CHUNK) -> TextRows:
    """A row of request and chunk for each chunk of a text; a chunk's tokens count, but its first."""
    rows = cdiv(len(ids), chunk)
    tokens = np.zeros((rows, round_up(len(request) + chunk, _ROW_MULTIPLE)), np.int32)
    counted = np.zeros(tokens.shape, np.float32)
    for row, start in enumerate(range(0, len(ids), chunk)):
        fed = [*request, *ids[start : start + chunk]]
        tokens[row, : len(fed)] = fed
        counted[row, len(request) : len(fed) - 1] = 1
    return TextRows(tokens, counted, chunk)


def text_targets(
    lm: LM, ids: Sequence[int], layers: Sequence[LayerInputs], rows: TextRows
) -> Iterator[tuple[int, LayerTargets]]:
    """Targets of rows after a text that was read; yields each layer's number and targets, last layer first."""
    positions = np.broadcast_to(len(ids) + np.arange(rows.tokens.shape[1], dtype=np.int32), rows.tokens.shape)
    passed = LayerPass(lm, rows.tokens, positions)
    heads, inputs = (lm.config.num_heads, lm.config.head_dim), list[Array]()

    def arrays(number: int) -> tuple[Any, ...]:
        return layers[number].k, layers[number].v, jnp.asarray(rows.counted), jnp.int32(len(ids))

    for _ in passed.layers(_attend_rows, arrays, inputs=inputs, chunk=rows.chunk):
        pass
    static: dict[str, Any] = {"heads": heads, "chunk": rows.chunk}
    yield from passed.backward(_differentiate_layer, arrays, inputs, rows.counted.reshape(-1), margin, **static)


def margin(decoder: Decoder, x: Float[Array, "1 n D"], targets: Int32[Array, "1 n"]) -> Float32[Array, "1 n"]:
    """Logit of the right token minus the logsumexp of all others, from the last layer's residual stream."""
    logits = decoder.logits(decoder.norm(x)).astype(jnp.float32)
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    others = jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], MASKED, logits)
    return right[..., 0] - jax.nn.logsumexp(others, axis=-1)


@layer_program
def _read_layer(
    module: Any, x: Float[Array, "1 L D"], cos: Array, sin: Array, lengths: Int[Array, " 1"]
) -> tuple[Array, LayerInputs]:
    def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        return causal_attention(q, k, v, lengths), (k, v)

    after, (k, v) = module(x, cos, sin, attention, None)
    text = jnp.arange(x.shape[1]) < lengths[0]
    hidden = jnp.where(text[:, None], module.attention_norm(x), 0)
    return after, LayerInputs(hidden, *(jnp.where(text[:, None, None], each, 0) for each in (k, v)))


def _seen_by(x: Float[Array, "1 L H d"], rows: int, chunk: int) -> Float[Array, "R m H d"]:
    """Tokens of the text that each row sees: its own chunk, the one before, the first tokens."""
    padded = jnp.pad(x[0, : rows * chunk], ((0, max(0, rows * chunk - x.shape[1])), (0, 0), (0, 0)))
    own = padded.reshape(rows, chunk, *x.shape[2:])
    before = jnp.concatenate([own[:1], own[:-1]])
    first = jnp.broadcast_to(own[:1, :_FIRST], (rows, min(_FIRST, chunk), *x.shape[2:]))
    return jnp.concatenate([own, before, first], axis=1)


def _exists(rows: int, chunk: int, length: Int[Array, ""]) -> Bool[Array, "R m"]:
    """Which of these tokens exist, each once."""
    row = jnp.arange(rows)[:, None]
    own = row * chunk + jnp.arange(chunk) < length
    before = jnp.broadcast_to(row >= 1, own.shape)
    return jnp.concatenate([own, before, jnp.broadcast_to(row >= 2, (rows, min(_FIRST, chunk)))], axis=1)


_Row = tuple[Array, Array, Array, Array, Array, Array]  # q, k, v of a row; keys, values and mask of the text


def _probabilities(row: _Row) -> Float32[Array, "Hkv G n keys"]:
    """Attention probabilities of a row's queries over tokens of the text that they see, and over the row."""
    q, k, _, text_k, _, seen = row
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    causal = jnp.arange(len(k)) <= jnp.arange(len(q))[:, None]
    text = jnp.where(seen, scaled_scores("nhgd,lhd->hgnl", grouped, text_k), MASKED)
    own = jnp.where(causal, scaled_scores("nhgd,lhd->hgnl", grouped, k), MASKED)
    return jax.nn.softmax(jnp.concatenate([text, own], axis=-1), axis=-1)


def _attend_row(row: _Row) -> Float[Array, "n Hq d"]:
    q, _, v, _, text_v, _ = row
    p, values = _probabilities(row).astype(v.dtype), jnp.concatenate([text_v, v])
    return jnp.einsum("hgnl,lhd->nhgd", p, values).reshape(q.shape)


def _rows_of(
    q: Array, k: Array, v: Array, text_k: Array, text_v: Array, counted: Array, length: Int[Array, ""], *, chunk: int
) -> _Row:
    """Arguments of all rows, stacked."""
    rows = len(counted)
    q, k, v = (x.reshape(rows, -1, *x.shape[2:]) for x in (q, k, v))
    keys, values = (_seen_by(x, rows, chunk) for x in (text_k, text_v))
    return q, k, v, keys, values, _exists(rows, chunk, length)


@functools.partial(attention_program, static=("chunk",))
def _attend_rows(q: Array, *of_rows: Array, chunk: int) -> tuple[Array, None]:
    return jax.lax.map(_attend_row, _rows_of(q, *of_rows, chunk=chunk)).reshape(q.shape), None


@functools.partial(layer_program, static=("chunk", "heads"))
def _differentiate_layer(
    module: Any,
    cotangent: Float[Array, "1 P D"],
    x: Float[Array, "1 P D"],
    cos: Array,
    sin: Array,
    text_k: Array,
    text_v: Array,
    counted: Float32[Array, "R n"],
    length: Int[Array, ""],
    *,
    chunk: int,
    heads: tuple[int, int],  # query heads and their size
) -> tuple[Float[Array, "1 P D"], LayerTargets]:
    rows = len(counted)

    def layer(x: Array, added: Array) -> tuple[Array, tuple[_Row, Array]]:
        def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, tuple[_Row, Array]]:
            stacked = _rows_of(q, k, v, text_k, text_v, counted, length, chunk=chunk)
            out = jax.lax.map(jax.checkpoint(_attend_row), stacked).reshape(q.shape)
            return out + added.astype(out.dtype), (stacked, out)

        return module(x, cos, sin, attention, None)

    _, pullback, (stacked, out) = jax.vjp(layer, x, jnp.zeros((*x.shape[:2], *heads), jnp.float32), has_aux=True)
    before, slope = pullback(cotangent)
    slope, out = (each.reshape(rows, -1, *heads) for each in (slope, out))

    def of_row(part: tuple[_Row, Array, Array, Array]) -> tuple[Float32[Array, "3 Hkv c"], Float32[Array, " Hkv"]]:
        row, out, slope, counted = part
        kv_heads, values = row[1].shape[1], row[4][:chunk].astype(jnp.float32)
        slope, out = (each.reshape(len(out), kv_heads, -1, heads[1]).astype(jnp.float32) for each in (slope, out))
        p = jnp.where(counted[:, None] > 0, _probabilities(row)[..., :chunk], 0)
        norm = jnp.linalg.norm(slope, axis=-1)
        change = jnp.einsum("nhgd,lhd->hgnl", slope, values) - (slope * out).sum(-1).transpose(1, 2, 0)[..., None]
        found = p * norm.transpose(1, 2, 0)[..., None], p, p * jnp.abs(change)
        worth, probability, effect = (each.max(axis=(1, 2)) for each in found)
        worth = worth * jnp.linalg.norm(values, axis=-1).T
        return jnp.stack([worth, probability, effect]), (norm.max(axis=-1) * counted[:, None]).sum(axis=0)

    values, weight = jax.lax.map(of_row, (stacked, out, slope, counted))
    size = jnp.linalg.norm(text_v[0].astype(jnp.float32), axis=-1).sum(axis=0) / length
    of_text = values.transpose(1, 2, 0, 3).reshape(3, -1, rows * chunk)
    return before, LayerTargets(of_text, weight.sum(axis=0) / counted.sum() * size)
