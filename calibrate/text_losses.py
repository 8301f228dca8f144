"""Loss inside calibration texts by the readings of all heads, and its derivative by each head's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32

from tca_jax.calibration.gated_attention import attend_gated, read_both
from tca_jax.calibration.layer_programs import HEADS, THIRD_HEADS, attention_program, slope_program
from tca_jax.calibration.passes import ForwardPass, loss_slope
from tca_jax.calibration.search import HeadMask
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, on_host
from tca_jax.errors import UserError
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.queries import last_queries
from tca_jax.methods.selection import PromptScores, score_prompt
from tca_jax.pallas_kernels.causal_attention import causal_attention


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
        found = []
        for ids in self._texts:
            losses, layers = self._losses(ids, None)
            finite = [bool(of_heads.all()) for _, of_heads in layers]
            if not all(finite) or not np.isfinite(losses).all():
                layer = [*finite, False].index(False)
                where = f"attention of layer {layer}" if layer < len(finite) else "logits"
                raise UserError(f"model {self._lm.name!r} computes NaN or infinity in the {where}")
            found.append(losses)
        return found

    def of(self, more: HeadMask) -> list[Float32[np.ndarray, " counted"]]:
        """The same where these heads read blocks and all others sparse at row 0."""
        losses, shares = [], []
        for ids in self._texts:
            of_text, layers = self._losses(ids, more)
            losses.append(of_text)
            pairs = [self._lm.in_model_order(layer, of_heads) for layer, (of_heads, _) in enumerate(layers)]
            shares.append(np.stack(pairs).astype(np.float64) / (len(ids) * (len(ids) + 1) / 2))
        self.shares = np.mean(shares, axis=0)
        return losses

    def slopes(self, more: HeadMask) -> Float64[np.ndarray, "layers Hkv"]:
        """Derivative of the loss by a gate of each head, from its reading towards blocks."""
        return np.mean([self._slopes(ids, more) for ids in self._texts], axis=0)

    def _counted(self, ids: Sequence[int]) -> slice:
        """Columns that count, which have a token behind them and one left of their window."""
        return slice(self._config.window + self._config.block_size, len(ids) - 1)

    def _losses(
        self, ids: Sequence[int], more: HeadMask | None
    ) -> tuple[Float32[np.ndarray, " counted"], list[tuple[np.ndarray, np.ndarray]]]:
        """Losses that count, and of every layer the pairs that its heads attend to and whether they are finite."""
        run, measured = ForwardPass(self._lm, ids), []
        for read in run.layers(read_layer, gates_of(self._lm, more), config=self._config):
            measured.append((on_host(read.pairs), on_host(read.finite)))
            self._step()
        return run.losses()[self._counted(ids)], measured

    def _slopes(self, ids: Sequence[int], more: HeadMask) -> Float64[np.ndarray, "layers Hkv"]:
        run, inputs, gates = ForwardPass(self._lm, ids), list[Array](), gates_of(self._lm, more)
        for _ in run.layers(read_layer, gates, inputs=inputs, config=self._config):
            self._step()
        weights = np.zeros((1, run.num_columns), np.float32)
        weights[0, self._counted(ids)] = 1 / max(1, weights[0, self._counted(ids)].size)
        cotangent = run.behind(loss_slope, run.targets, jnp.asarray(weights))
        found: list[np.ndarray] = []
        for number in reversed(range(len(inputs))):
            given = cotangent, inputs.pop(), *run.angles, *gates[number], run.lengths
            cotangent, slope = run.of_layer(number, _slopes, *given, config=self._config)
            found.append(self._lm.in_model_order(number, on_host(slope).astype(np.float64)))
            self._step()
        return np.stack(found[::-1])


class LayerText(NamedTuple):
    """What a layer has of a text that it has read.

    Attributes:
        k: Keys, zero behind the text; `v` the values.
        scores: What its tokens are chosen by.
        pairs: Causal pairs (query, key) that each KV head attends to where it reads sparse, or blocks; zeros under full
            attention, where nobody asks.
        finite: Whether each KV head's keys and its group's queries are.
    """

    k: Float[Array, "1 L Hkv d"]
    v: Float[Array, "1 L Hkv d"]
    scores: PromptScores
    pairs: Float32[Array, "Hkv 2"]
    finite: Bool[Array, " Hkv"]


def gates_of(lm: LM, more: HeadMask | None) -> list[tuple[Array | None, Array]]:
    """Of every layer, as `read_layer` takes them: gates of heads that read blocks, or None; and the heads' numbers."""
    return [
        (
            None if more is None else jnp.asarray(lm.in_mesh_order(layer, more[layer]), jnp.float32),
            jnp.asarray(lm.head_numbers(layer)),
        )
        for layer in range(lm.config.num_layers)
    ]


_SPECS: Any = THIRD_HEADS, THIRD_HEADS, SECOND_HEADS, HEADS, HEADS
#: How a layer's text lies on a mesh.
TEXT_SPECS = LayerText(*_SPECS)


@functools.partial(attention_program, static=("config",), inputs=(HEADS, HEADS), outputs=(SAME, TEXT_SPECS))
def read_layer(
    q: Float[Array, "1 L Hq d"],
    k: Float[Array, "1 L Hkv d"],
    v: Float[Array, "1 L Hkv d"],
    gates: Float32[Array, " Hkv"] | None,
    numbers: Int32[Array, " Hkv"],
    lengths: Int32[Array, " 1"],
    config: TCAConfig,
) -> tuple[Float[Array, "1 L Hq d"], LayerText]:
    """Attention of heads that read blocks where their gate is 1 and sparse where it is 0; full without gates."""
    heads, text = k.shape[2], (jnp.arange(k.shape[1]) < lengths[:, None])[..., None, None]
    finite = jnp.isfinite(k).all(axis=(0, 1, 3)) & jnp.isfinite(q).reshape(*k.shape[:3], -1).all(axis=(0, 1, 3))
    if gates is None:
        out, pairs = causal_attention(q, k, v, lengths), jnp.zeros((heads, 2), jnp.float32)
    else:
        both = read_both(q, k, v, lengths, numbers, config)
        out, pairs = both.mixed(gates), both.pairs
    scores = score_prompt(last_queries(q, lengths, config.num_queries), k, lengths, config)
    return out, LayerText(jnp.where(text, k, 0), jnp.where(text, v, 0), scores, pairs, finite)


def _gated(
    q: Float[Array, "1 L Hq d"],
    k: Float[Array, "1 L Hkv d"],
    v: Float[Array, "1 L Hkv d"],
    gates: Float32[Array, " Hkv"],
    numbers: Int32[Array, " Hkv"],
    lengths: Int32[Array, " 1"],
    config: TCAConfig,
) -> tuple[Float[Array, "1 L Hq d"], None]:
    """What `read_layer` attends to, to be derived."""
    return attend_gated(q, k, v, gates, lengths, numbers, config), None


_slopes = slope_program(_gated, static=("config",), inputs=(HEADS, HEADS), outputs=(SAME, HEADS))
