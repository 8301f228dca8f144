"""Loss inside calibration texts by the readings of all heads, and its derivative by each head's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32

from tca_jax.calibration.gated_attention import attend_gated, read_both
from tca_jax.calibration.layer_programs import HEADS, layer_program
from tca_jax.calibration.passes import ForwardPass, attend_fully, loss_slope
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, on_host
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.heads import head_numbers

#: Which heads read more than row 0, `[layers, H_kv]`.
Heads = Bool[np.ndarray, "layers Hkv"]


class TextLosses:
    """Losses inside texts, of the tokens whose query has tokens left of its window.

    Args:
        lm: The model.
        texts: Token ids of each.
        config: Hyperparameters.
        step: Called once for every layer that has run.

    Attributes:
        shares: Attended share of each KV head under the readings "sparse" and "blocks", `[layers, H_kv, 2]`, the mean
            over the texts; known once a loss was measured.
    """

    def __init__(self, lm: LM, texts: Sequence[Sequence[int]], config: TCAConfig, step: Callable[[], None]) -> None:
        self._lm, self._texts, self._config, self._step = lm, texts, config, step
        self.shares: Float64[np.ndarray, "layers Hkv 2"] | None = None

    def full(self) -> list[Float32[np.ndarray, " counted"]]:
        """Of each text under full attention, in nats.

        Raises:
            ValueError: the model computes NaN or infinity.
        """
        return [self._of_full(ids) for ids in self._texts]

    def of(self, more: Heads) -> list[Float32[np.ndarray, " counted"]]:
        """The same where these heads read blocks and all others sparse at row 0."""
        losses, shares = [], []
        for ids in self._texts:
            of_text, pairs = self._losses(ids, _read_layer, [(gates,) for gates in self._gates(more)])
            losses.append(of_text)
            own = [self._lm.own_heads(layer, each) for layer, each in enumerate(pairs)]
            shares.append(np.stack(own).astype(np.float64) / (len(ids) * (len(ids) + 1) / 2))
        self.shares = np.mean(shares, axis=0)
        return losses

    def slopes(self, more: Heads) -> Float64[np.ndarray, "layers Hkv"]:
        """Derivative of the loss by a gate of each head, from its reading towards blocks."""
        return np.mean([self._slopes(ids, more) for ids in self._texts], axis=0)

    def _of_full(self, ids: Sequence[int]) -> Float32[np.ndarray, " counted"]:
        losses, finite = self._losses(ids, attend_fully, None)
        wrong = ~np.isfinite([*finite, losses.sum()])
        if wrong.any():
            layer = int(np.argmax(wrong))
            where = f"attention of layer {layer}" if layer < len(finite) else "logits"
            raise ValueError(f"model {self._lm.name!r} computes NaN or infinity in the {where}")
        return losses

    def _gates(self, more: Heads) -> list[Float32[np.ndarray, " Hkv"]]:
        return [self._lm.dealt_heads(layer, of_layer.astype(np.float32)) for layer, of_layer in enumerate(more)]

    def _counted(self, ids: Sequence[int]) -> slice:
        """Columns that count, which have a token behind them and one left of their window."""
        return slice(self._config.window + self._config.block_size, len(ids) - 1)

    def _losses(
        self, ids: Sequence[int], program: Any, each: Sequence[tuple[Any, ...]] | None
    ) -> tuple[Float32[np.ndarray, " counted"], list[Any]]:
        """Losses that count, and what the program measures of every layer."""
        run, measured = ForwardPass(self._lm, ids), []
        for of_layer in run.layers(program, self._config, each=each):
            measured.append(on_host(of_layer))
            self._step()
        return run.losses()[self._counted(ids)], measured

    def _slopes(self, ids: Sequence[int], more: Heads) -> Float64[np.ndarray, "layers Hkv"]:
        run, inputs = ForwardPass(self._lm, ids), list[Array]()
        gates = [jnp.asarray(of_layer) for of_layer in self._gates(more)]
        for _ in run.layers(_keep_input, self._config, each=[(of_layer,) for of_layer in gates], inputs=inputs):
            self._step()
        weights = np.zeros((1, run.num_columns), np.float32)
        weights[0, self._counted(ids)] = 1 / max(1, weights[0, self._counted(ids)].size)
        cotangent = run.behind(loss_slope, run.targets, jnp.asarray(weights))
        found: list[np.ndarray] = []
        for number in reversed(range(len(inputs))):
            cotangent, slope = run.one_layer(number, _pullback, inputs.pop(), gates[number], cotangent, self._config)
            found.append(self._lm.own_heads(number, on_host(slope).astype(np.float64)))
            self._step()
        return np.stack(found[::-1])


def _gated_layer(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 L D"],
    cos: Float[Array, "1 L half"],
    sin: Float[Array, "1 L half"],
    lengths: Int32[Array, " 1"],
    gates: Float32[Array, " Hkv"],
    config: TCAConfig,
) -> tuple[Float[Array, "1 L D"], Float32[Array, "Hkv 2"]]:
    """The stream behind a layer whose heads read blocks where their gate is 1, and the pairs of both readings."""

    def attend(q: Array, k: Array, v: Array, _: None) -> tuple[Array, Array]:
        both = read_both(q, k, v, lengths, head_numbers(0, k.shape[2]), config)
        return both.mixed(gates), both.pairs

    x, pairs, _ = nnx.merge(graphdef, weights)(x, cos, sin, attend, None)
    return x, pairs


_OPTIONS: dict[str, Any] = {"static": ("config",), "inputs": {"gates": HEADS}, "outputs": (SAME, HEADS)}
_read_layer = layer_program(donate=("x",), **_OPTIONS)(_gated_layer)
_keep_input = layer_program(**_OPTIONS)(_gated_layer)


@layer_program(derives=True, **_OPTIONS)
def _pullback(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 L D"],
    cos: Float[Array, "1 L half"],
    sin: Float[Array, "1 L half"],
    lengths: Int32[Array, " 1"],
    gates: Float32[Array, " Hkv"],
    cotangent: Float[Array, "1 L D"],
    config: TCAConfig,
) -> tuple[Float[Array, "1 L D"], Float32[Array, " Hkv"]]:
    """Derivatives by the stream in front of `_gated_layer`, and by its gates."""

    def run(x: Array, gates: Array) -> Array:
        def attend(q: Array, k: Array, v: Array, _: None) -> tuple[Array, None]:
            return attend_gated(q, k, v, gates, lengths, head_numbers(0, k.shape[2]), config), None

        x, _, _ = nnx.merge(graphdef, weights)(x, cos, sin, attend, None)
        return x

    _, pullback = jax.vjp(run, x, gates)
    return pullback(cotangent)
