"""Forward passes of calibration, a layer at a time: one program serves all layers, however deep the model.

Memory is O(L): beside the residual stream a pass keeps what its caller takes of each layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from tca_jax.calibration.far_attention import dropped_by_row
from tca_jax.calibration.layer_programs import HEADS, LayerProgram, layer_program, runnable_decoder, shards_of
from tca_jax.calibration.probing import worst_dropped
from tca_jax.calibration.scores import calibration_scores
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, on_host
from tca_jax.engine.prompts import pad_tokens
from tca_jax.engine.scoring import logprobs_of_hidden
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.heads import head_numbers
from tca_jax.pallas_kernels.causal_attention import causal_attention


class ForwardPass:
    """One sequence on its way through a model's layers.

    Args:
        lm: The model. On a mesh, heads of what layers measure are in the order of `lm.head_orders`.
        ids: The sequence, at least 1 token.
    """

    def __init__(self, lm: LM, ids: Sequence[int]) -> None:
        padded, lengths = pad_tokens([list(ids)])
        self._decoder, self._shards = runnable_decoder(lm), shards_of(lm)
        self._tokens, self._lengths = jnp.asarray(padded), jnp.asarray(lengths)
        parts = nnx.split(self._decoder)
        self._x, *self._angles = _embed(*parts, self._tokens, self._lengths, shards=self._shards)

    def layers(self, program: LayerProgram, *arguments: Any) -> Iterator[Any]:
        """Runs every layer by one of the programs below, with the same arguments; yields what each measures."""
        for number, layer in enumerate(self._decoder.layers):
            given = self._x, *self._angles, self._lengths, *arguments
            self._x, measured = program(*nnx.split(layer), *given, shards=self._shards, layer=number)
            yield measured

    def columns(self, start: int, count: int) -> tuple[Array, Array, Array, Array]:
        """Residual stream, RoPE's two angles and the next token of `count` positions from `start` on, the last repeated
        past the end."""
        return _columns(self._x, *self._angles, self._tokens, start, count)

    def losses(self, start: int, most: int) -> Float32[np.ndarray, " P"]:
        """Loss in nats of the token after each of `most` queries from `start` on, once all layers have run."""
        x, _, _, targets = self.columns(start, most)
        return on_host(losses_of(*nnx.split(self._decoder), x, targets, shards=self._shards))


@layer_program(static=("config", "most"), donate=("x",), outputs=(SAME, (HEADS, HEADS)))
def score_layer(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 L D"],
    cos: Float[Array, "1 L half"],
    sin: Float[Array, "1 L half"],
    lengths: Int32[Array, " 1"],
    text: Int32[Array, " 1"],
    starts: Int32[Array, " 1"],
    config: TCAConfig,
    most: int,
) -> tuple[Float[Array, "1 L D"], tuple[Float32[Array, "Hkv M1"], Float32[Array, "Hkv P M1"]]]:
    """Full attention: the stream behind the layer, the calibration scores of the first `text` tokens, and the probe's
    dropped masses; NaN where a query or key is not finite."""

    def attend(q: Array, k: Array, v: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        heads = head_numbers(0, k.shape[2])
        scores = calibration_scores(q, k, text, config, heads=heads)[0]
        dropped = dropped_by_row(q, k, starts, lengths, config, most, heads)[0] if most else _no_probe(scores)
        finite = jnp.isfinite(q).all() & jnp.isfinite(k).all()  # a selection among NaNs may score well
        return causal_attention(q, k, v, lengths), (jnp.where(finite, scores, jnp.nan), dropped)

    x, measured, _ = nnx.merge(graphdef, weights)(x, cos, sin, attend, None)
    return x, measured


@layer_program(static=("config", "most"), donate=("x",), outputs=(SAME, HEADS))
def worst_layer(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 L D"],
    cos: Float[Array, "1 L half"],
    sin: Float[Array, "1 L half"],
    lengths: Int32[Array, " 1"],
    starts: Int32[Array, " 1"],
    config: TCAConfig,
    most: int,
) -> tuple[Float[Array, "1 L D"], Float32[Array, "Hkv M1"]]:
    """Full attention: the stream behind the layer, and `worst_dropped` of the queries from `starts` on."""

    def attend(q: Array, k: Array, v: Array, _: None) -> tuple[Array, Array]:
        dropped = dropped_by_row(q, k, starts, lengths, config, most, head_numbers(0, k.shape[2]))
        return causal_attention(q, k, v, lengths), worst_dropped(dropped, lengths - starts)[0]

    x, worst, _ = nnx.merge(graphdef, weights)(x, cos, sin, attend, None)
    return x, worst


def _no_probe(scores: Float32[Array, "Hkv M1"]) -> Float32[Array, "Hkv 0 M1"]:
    return jnp.zeros((scores.shape[0], 0, scores.shape[1]), jnp.float32)


@layer_program()
def _embed(
    graphdef: Any, weights: Any, tokens: Int32[Array, "1 L"], lengths: Int32[Array, " 1"]
) -> tuple[Float[Array, "1 L D"], Float[Array, "1 L half"], Float[Array, "1 L half"]]:
    """What the first layer gets: the residual stream, and the angles of RoPE."""
    decoder = nnx.merge(graphdef, weights)
    positions = jnp.minimum(jnp.arange(tokens.shape[1], dtype=jnp.int32), lengths[:, None] - 1)
    return decoder.embed(tokens), *decoder.angles(positions)


@functools.partial(jax.jit, static_argnames=("count",))
def _columns(
    x: Float[Array, "1 L D"],
    cos: Float[Array, "1 L half"],
    sin: Float[Array, "1 L half"],
    tokens: Int32[Array, "1 L"],
    start: int | Int32[Array, ""],
    count: int,
) -> tuple[Float[Array, "1 P D"], Float[Array, "1 P half"], Float[Array, "1 P half"], Int32[Array, "1 P"]]:
    places = start + jnp.arange(count)
    x, cos, sin = (each.at[:, places].get(mode="clip") for each in (x, cos, sin))
    return x, cos, sin, tokens.at[:, places + 1].get(mode="clip")


def _losses(
    graphdef: Any, weights: Any, x: Float[Array, "1 P D"], targets: Int32[Array, "1 P"]
) -> Float32[Array, " P"]:
    """Loss in nats of a token after each position, from the stream behind the last layer."""
    decoder = nnx.merge(graphdef, weights)
    return -logprobs_of_hidden(decoder, decoder.norm(x), targets)[0]


losses_of = LayerProgram(_losses)
