"""Loss inside calibration texts by the readings of all heads, and its derivative by each head's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32

from tca_jax.calibration.gated_attention import attend_gated, read_both
from tca_jax.calibration.search import HeadMask
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, on_host
from tca_jax.errors import require
from tca_jax.layer_passes import HEADS, THIRD_HEADS, TextPass, attention_program, slope_program
from tca_jax.methods.base import last_queries
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.selection import PromptScores, score_prompt
from tca_jax.pallas_kernels.causal_attention import causal_attention


class TextLosses:
    """Losses inside texts, of the tokens whose query has tokens left of its window; `step` is called after each layer.

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
            losses, _, finite = self._losses(ids, None)
            where = "logits" if finite.all() else f"attention of layer {np.argmin(finite.all(axis=1))}"
            is_finite = finite.all() and np.isfinite(losses).all()
            require(is_finite, f"model {self._lm.name!r} computes NaN or infinity in the {where}")
            found.append(losses)
        return found

    def of(self, more: HeadMask) -> list[Float32[np.ndarray, " counted"]]:
        """Losses of each text if these heads read blocks and all others sparse with the smallest budget."""
        found, shares = [], []
        for ids in self._texts:
            losses, pairs, _ = self._losses(ids, more)
            found.append(losses)
            ordered = [self._lm.in_model_order(layer, of_heads) for layer, of_heads in enumerate(pairs)]
            shares.append(np.stack(ordered).astype(np.float64) / (len(ids) * (len(ids) + 1) / 2))
        self.shares = np.mean(shares, axis=0)
        return found

    def slopes(self, more: HeadMask) -> Float64[np.ndarray, "layers Hkv"]:
        """Derivative of the loss by a gate of each head, from its reading towards blocks."""
        return np.mean([self._slopes(ids, more) for ids in self._texts], axis=0)

    def _counted(self, ids: Sequence[int]) -> slice:
        """Columns that count: a token follows them, and one lies left of their window."""
        return slice(self._config.window + self._config.block_size, len(ids) - 1)

    def _losses(
        self, ids: Sequence[int], more: HeadMask | None
    ) -> tuple[Float32[np.ndarray, " counted"], Float32[np.ndarray, "layers Hkv 2"], Bool[np.ndarray, "layers Hkv"]]:
        """Losses that count, the pairs that heads attend to, and whether they are finite; heads as they lie."""
        run = TextPass(self._lm, ids, self._step)
        layers = run.layers(read_layer, gates_of(self._lm, more), config=self._config)
        pairs, finite = zip(*(on_host((read.pairs, read.finite)) for read in layers), strict=True)
        return run.losses()[self._counted(ids)], np.stack(pairs), np.stack(finite)

    def _slopes(self, ids: Sequence[int], more: HeadMask) -> Float64[np.ndarray, "layers Hkv"]:
        run, inputs = TextPass(self._lm, ids, self._step), list[Array]()
        arrays, counted = gates_of(self._lm, more), self._counted(ids)
        for _ in run.layers(read_layer, arrays, inputs=inputs, config=self._config):
            pass
        weights = np.zeros(run.targets.shape[1], np.float32)
        weights[counted] = 1 / max(1, weights[counted].size)
        return run.slopes(_slopes, arrays, inputs, weights, config=self._config)


class LayerText(NamedTuple):
    """A layer's keys, values and scores of a text."""

    k: Float[Array, "1 L Hkv d"]  # Keys, zero behind the text
    v: Float[Array, "1 L Hkv d"]
    scores: PromptScores  # what its tokens are chosen by
    # Causal pairs (query, key) that each KV head attends to where it reads sparse, or blocks; zeros under full
    # attention, where nobody asks.
    pairs: Float32[Array, "Hkv 2"]
    finite: Bool[Array, " Hkv"]  # whether each KV head's keys and its group's queries are


def gates_of(lm: LM, more: HeadMask | None) -> Callable[[int], tuple[Array | None, Array]]:
    """Of a layer, as `read_layer` takes them: gates of heads that read blocks, or None; and the heads' numbers."""

    def of_layer(layer: int) -> tuple[Array | None, Array]:
        gates = None if more is None else jnp.asarray(lm.in_mesh_order(layer, more[layer]), jnp.float32)
        return gates, jnp.asarray(lm.head_numbers(layer))

    return of_layer


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
        both = read_both(q, k, v, numbers, lengths, config)
        out, pairs = both.mixed(gates), both.pairs
    scores = score_prompt(last_queries(q, lengths, config.num_queries), k, lengths, config)
    return out, LayerText(jnp.where(text, k, 0), jnp.where(text, v, 0), scores, pairs, finite)


_slopes = slope_program(attend_gated, static=("config",), inputs=(HEADS, HEADS))
