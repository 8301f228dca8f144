"""A probe read behind a text of which heads keep little: what it loses, and which heads would give that back.

The text is read once; the probe behind it any number of times, over the rows that are being tried. How much a head
would give back is a derivative: of the losses, by a gate that lets the head see the whole text again. That is their
derivative by the head's output, times how the output would change, and one backward pass through the probe's own
columns gives it for all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Float64, Int, Int32

from tca_jax.calibration.far_attention import far_tokens
from tca_jax.calibration.layer_programs import (
    HEADS,
    THIRD_HEADS,
    layer_program,
    runnable_decoder,
    shards_of,
)
from tca_jax.calibration.passes import ForwardPass, losses_of
from tca_jax.calibration.probe_attention import SeenText, attend_probe, known_attention
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, on_host
from tca_jax.methods import tca
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.heads import head_numbers
from tca_jax.methods.queries import last_queries
from tca_jax.methods.selection import PromptScores, row_budgets, score_prompt
from tca_jax.pallas_kernels.numerics import varying_like
from tca_jax.pallas_kernels.ranking import selection_mask


class LayerText(NamedTuple):
    """What a layer has of a text: keys and values, zero behind it, and what its tokens are chosen by."""

    k: Float[Array, "1 L Hkv d"]
    v: Float[Array, "1 L Hkv d"]
    scores: PromptScores


class Reading:
    """A text read under row 1 of every head, and the probe behind it.

    Args:
        lm: The model.
        ids: Text and probe.
        start: Tokens of the text.
        most: Columns that the probe is padded to, P.
        config: The method's hyperparameters.
        step: Called once a layer.
    """

    def __init__(
        self,
        lm: LM,
        ids: Sequence[int],
        start: int,
        most: int,
        config: TCAConfig,
        step: Callable[[], None],
    ) -> None:
        self._lm, self._config = lm, config
        decoder, self._shards = runnable_decoder(lm), shards_of(lm)
        self._start = jnp.array([start], jnp.int32)
        text = ForwardPass(lm, ids)
        self._x, *self._angles, self._targets = text.columns(start, most)
        self._whole, self._layers = nnx.split(decoder), [nnx.split(layer) for layer in decoder.layers]
        self._texts: list[LayerText] = []
        for of_layer in text.layers(_read_layer, self._start, config):
            self._texts.append(of_layer)
            step()
        self._inputs: list[Array] = []
        self._attention: list[Array] = []
        self._rows: list[Array] = []

    @property
    def nbytes(self) -> int:
        """Of what is kept on the device."""
        return sum(x.nbytes for x in jax.tree.leaves(self._texts))

    def losses(self, rows: Int32[np.ndarray, "layers Hkv"]) -> Float32[np.ndarray, " P"]:
        """Loss in nats of the token after each of the probe's, read over what these cache rows keep of the text."""
        dealt = [self._lm.dealt_heads(layer, of_layer) for layer, of_layer in enumerate(rows)]
        self._rows = [jnp.asarray(of_layer) for of_layer in dealt]
        x, self._inputs, self._attention = self._x, [], []
        for number, layer in enumerate(self._layers):
            self._inputs.append(x)
            given = *layer, x, self._behind(number)
            x, out = _probe_layer(*given, config=self._config, shards=self._shards, layer=number)
            self._attention.append(out)
        self._inputs.append(x)
        return on_host(losses_of(*self._whole, x, self._targets, shards=self._shards))

    def relief(self, queries: Float32[np.ndarray, " P"]) -> Float64[np.ndarray, "layers Hkv"]:
        """Nats that each head would give back to the last reading if it saw the whole text, to first order.

        Args:
            queries: How much the loss after each of the probe's tokens counts.
        """
        *inputs, last = self._inputs
        of_losses = *self._whole, last, self._targets, jnp.asarray(queries)
        cotangent = _loss_pullback(*of_losses, shards=self._shards)
        found = []
        for number in reversed(range(len(inputs))):
            behind = self._behind(number), self._attention[number]
            given = *self._layers[number], inputs[number], *behind, cotangent
            cotangent, gain = _probe_pullback(*given, config=self._config, shards=self._shards, layer=number)
            found.append(gain)
        gains = [on_host(gain).astype(np.float64) for gain in reversed(found)]
        return -np.stack([self._lm.own_heads(number, gain) for number, gain in enumerate(gains)])

    def _behind(self, number: int) -> _Behind:
        cos, sin = self._angles
        return _Behind(cos, sin, self._texts[number], self._rows[number], self._start)


#: How what a layer has of a text lies on a mesh.
_SPECS: Any = THIRD_HEADS, THIRD_HEADS, SECOND_HEADS
_TEXT = LayerText(*_SPECS)


@layer_program(static=("config",), donate=("x",), outputs=(SAME, _TEXT))
def _read_layer(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 L D"],
    cos: Float[Array, "1 L half"],
    sin: Float[Array, "1 L half"],
    lengths: Int32[Array, " 1"],
    starts: Int32[Array, " 1"],
    config: TCAConfig,
) -> tuple[Float[Array, "1 L D"], LayerText]:
    """The stream behind the layer where the text is prefilled under row 1 of every head, and what it leaves."""
    method = tca(0, config)

    def attend(q: Array, k: Array, v: Array, _: None) -> tuple[Array, LayerText]:
        out = method.prefill.attend(0, q, k, v, starts, None, "auto")
        scores = score_prompt(last_queries(q, starts, config.num_queries), k, starts, config, "auto")
        text = (jnp.arange(k.shape[1]) < starts[:, None])[..., None, None]
        return out, LayerText(jnp.where(text, k, 0), jnp.where(text, v, 0), scores)

    x, text, _ = nnx.merge(graphdef, weights)(x, cos, sin, attend, None)
    return x, text


class _Behind(NamedTuple):
    """What a probe is read behind in a layer.

    Attributes:
        cos: Of RoPE at the probe's positions; `sin` too.
        text: What the layer has of the text.
        rows: Cache rows of its heads.
        starts: Tokens of the text.
    """

    cos: Float[Array, "1 P half"]
    sin: Float[Array, "1 P half"]
    text: LayerText
    rows: Int[Array, " Hkv"]
    starts: Int32[Array, " 1"]

    def seen(self, config: TCAConfig) -> SeenText:
        """The text with what its rows have left of it."""
        tokens, heads = self.text.k.shape[1:3]
        budgets = row_budgets(self.text.scores, self.rows, self.starts, config, head_numbers(0, heads))
        selected = selection_mask(self.text.scores.ranking, budgets, block_size=config.block_size)
        seen = selected | ~far_tokens(self.starts, tokens, config)[:, None]
        return SeenText(self.text.k[0], self.text.v[0], seen[0], self.starts[0])


_LIES: Any = SAME, SAME, _TEXT, HEADS, SAME
_INPUTS = {"behind": _Behind(*_LIES), "out": SECOND_HEADS}


@layer_program(static=("config",), inputs=_INPUTS, outputs=(SAME, SECOND_HEADS))
def _probe_layer(
    graphdef: Any, weights: Any, x: Float[Array, "1 P D"], behind: _Behind, config: TCAConfig
) -> tuple[Float[Array, "1 P D"], Float[Array, "P Hq d"]]:
    """The probe's stream behind the layer, read over what cache rows of its heads have left of the text; attention."""
    text = behind.seen(config)

    def attend(q: Array, k: Array, v: Array, _: None) -> tuple[Array, Array]:
        out = attend_probe(q[0], k[0], v[0], text)
        return out[None], out

    x, out, _ = nnx.merge(graphdef, weights)(x, behind.cos, behind.sin, attend, None)
    return x, out


@layer_program(static=("config",), inputs=_INPUTS, outputs=(SAME, HEADS), derives=True)
def _probe_pullback(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 P D"],
    behind: _Behind,
    out: Float[Array, "P Hq d"],
    cotangent: Float[Array, "1 P D"],
    config: TCAConfig,
) -> tuple[Float[Array, "1 P D"], Float32[Array, " Hkv"]]:
    """Derivatives by the stream in front of the layer, and by gates that let each of its heads see the whole text.

    `x` and `out` are what `_probe_layer` was given and what its attention gave.
    """
    known = known_attention(out, behind.seen(config))

    def run(x: Array, gates: Array) -> Array:
        def attend(q: Array, k: Array, v: Array, _: None) -> tuple[Array, None]:
            return known(q[0], k[0], v[0], gates)[None], None

        x, _, _ = nnx.merge(graphdef, weights)(x, behind.cos, behind.sin, attend, None)
        return x

    # Over a mesh each device has heads of its own.
    gates = varying_like(jnp.zeros(behind.rows.shape, jnp.float32), behind.text.k)
    _, pullback = jax.vjp(run, x, gates)
    return pullback(cotangent)


@layer_program(derives=True)
def _loss_pullback(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 P D"],
    targets: Int32[Array, "1 P"],
    queries: Float32[Array, " P"],
) -> Float[Array, "1 P D"]:
    """Derivative of the summed losses by the stream behind the last layer."""
    return jax.grad(lambda x: (losses_of(graphdef, weights, x, targets) * queries).sum())(x)
