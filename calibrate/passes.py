"""Forward passes of calibration, a layer at a time: one program serves all layers, however deep the model.

Memory is O(L): beside the residual stream a pass keeps what its caller takes of each layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from tca_jax.calibration.far_attention import attend_probe, dropped_by_row
from tca_jax.calibration.probing import worst_dropped
from tca_jax.calibration.scores import calibration_scores
from tca_jax.engine.prompts import pad_tokens
from tca_jax.engine.scoring import logprobs_of_hidden
from tca_jax.methods import tca
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.queries import last_queries
from tca_jax.methods.selection import select_by_candidates
from tca_jax.models.decoder import Decoder
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.ranking import selection_mask


class ForwardPass:
    """One sequence on its way through a model's layers.

    Args:
        decoder: The model.
        ids: The sequence, at least 1 token.
    """

    def __init__(self, decoder: Decoder, ids: Sequence[int]) -> None:
        padded, lengths = pad_tokens([list(ids)])
        self._decoder, self._tokens, self._lengths = decoder, jnp.asarray(padded), jnp.asarray(lengths)
        self._x, *self._angles = _embed(*nnx.split(decoder), self._tokens, self._lengths)

    def layers(
        self, program: Callable[..., tuple[Array, Any]], *arguments: Any, rows: Sequence[Any] | None = None
    ) -> Iterator[Any]:
        """Runs every layer by one of the programs below; yields what each measures.

        Args:
            program: What runs.
            *arguments: Its arguments, the same for all layers.
            rows: An argument in front of these that each layer has its own of.
        """
        for number, layer in enumerate(self._decoder.layers):
            graphdef, weights = nnx.split(layer)
            own = () if rows is None else (rows[number],)
            self._x, measured = program(graphdef, weights, self._x, *self._angles, self._lengths, *own, *arguments)
            yield measured

    def losses(self, start: int, most: int) -> Float32[np.ndarray, " P"]:
        """Loss in nats of the token after each of `most` queries from `start` on, once all layers have run."""
        return np.asarray(_losses(*nnx.split(self._decoder), self._x, self._tokens, jnp.array([start]), most))


@functools.partial(jax.jit, static_argnames=("graphdef", "config", "most"), donate_argnames=("x",))
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
        scores = calibration_scores(q, k, text, config)[0]
        dropped = dropped_by_row(q, k, starts, lengths, config, most)[0] if most else _no_probe(scores)
        finite = jnp.isfinite(q).all() & jnp.isfinite(k).all()  # a selection among NaNs may score well
        return causal_attention(q, k, v, lengths), (jnp.where(finite, scores, jnp.nan), dropped)

    x, measured, _ = nnx.merge(graphdef, weights)(x, cos, sin, attend, None)
    return x, measured


@functools.partial(jax.jit, static_argnames=("graphdef", "config", "most"), donate_argnames=("x",))
def sparse_layer(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 L D"],
    cos: Float[Array, "1 L half"],
    sin: Float[Array, "1 L half"],
    lengths: Int32[Array, " 1"],
    rows: Int32[Array, " Hkv"],
    starts: Int32[Array, " 1"],
    config: TCAConfig,
    most: int,
) -> tuple[Float[Array, "1 L D"], None]:
    """The stream behind the layer where the text is prefilled under row 1 of every head and the probe reads what cache
    rows of the layer's heads have left of it."""
    method = tca(0, config)

    def attend(q: Array, k: Array, v: Array, _: None) -> tuple[Array, None]:
        text = method.prefill.attend(0, q, k, v, starts, None, "auto")
        queries = last_queries(q, starts, config.num_queries)
        selection = select_by_candidates(queries, k, rows, starts, config, "auto")
        selected = selection_mask(selection.scores, selection.budgets, block_size=config.block_size)
        probe = attend_probe(q, k, v, selected, starts, lengths, config, most)
        columns = starts[:, None] + jnp.arange(most)
        places = jnp.where(columns < lengths[:, None], columns, q.shape[1])  # out of range: dropped
        return text.at[jnp.arange(len(q))[:, None], places].set(probe, mode="drop"), None

    x, _, _ = nnx.merge(graphdef, weights)(x, cos, sin, attend, None)
    return x, None


@functools.partial(jax.jit, static_argnames=("graphdef", "config", "most"), donate_argnames=("x",))
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
        dropped = dropped_by_row(q, k, starts, lengths, config, most)
        return causal_attention(q, k, v, lengths), worst_dropped(dropped, lengths - starts)[0]

    x, worst, _ = nnx.merge(graphdef, weights)(x, cos, sin, attend, None)
    return x, worst


def _no_probe(scores: Float32[Array, "Hkv M1"]) -> Float32[Array, "Hkv 0 M1"]:
    return jnp.zeros((scores.shape[0], 0, scores.shape[1]), jnp.float32)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _embed(
    graphdef: Any, weights: Any, tokens: Int32[Array, "1 L"], lengths: Int32[Array, " 1"]
) -> tuple[Float[Array, "1 L D"], Float[Array, "1 L half"], Float[Array, "1 L half"]]:
    """What the first layer gets: the residual stream, and the angles of RoPE."""
    decoder = nnx.merge(graphdef, weights)
    positions = jnp.minimum(jnp.arange(tokens.shape[1], dtype=jnp.int32), lengths[:, None] - 1)
    return decoder.embed(tokens), *decoder.angles(positions)


@functools.partial(jax.jit, static_argnames=("graphdef", "most"))
def _losses(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 L D"],
    tokens: Int32[Array, "1 L"],
    starts: Int32[Array, " 1"],
    most: int,
) -> Float32[Array, " P"]:
    """Loss of the token after each query."""
    decoder = nnx.merge(graphdef, weights)
    columns = starts[0] + jnp.arange(most)
    hidden = decoder.norm(x[0].at[columns].get(mode="clip"))
    targets = tokens[0].at[columns + 1].get(mode="clip")
    return -logprobs_of_hidden(decoder, hidden[None], targets[None])[0]
