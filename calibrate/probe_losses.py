"""Losses of probes by what all heads keep of the text before them, and their derivative by each head's.

A text is read once; its keys and values stay, and a trial reads the probes behind it alone. How much a head would give
back is a derivative: of the losses, by a gate that lets the head see the whole text. One backward pass through the
probes' own columns gives it for all heads.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int, Int32

from tca_jax.calibration.probe_attention import KeptText, attend_probes
from tca_jax.calibration.probes import ProbedText
from tca_jax.calibration.search import HeadMask
from tca_jax.calibration.text_losses import TEXT_SPECS, gates_of, read_layer
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, on_host
from tca_jax.engine.prompts import bucket_length
from tca_jax.layer_passes import HEADS, LayerPass, TextPass, attention_program, slope_program
from tca_jax.methods.config import TCAConfig

_LEAST_COLUMNS = 512  # and multiples of it: texts' probes differ in length, and each length is a program
#: Cache row of every head, `[layers, H_kv]`.
Rows = Int[np.ndarray, "layers Hkv"]


def columns_of(
    text: ProbedText,
) -> tuple[Int32[np.ndarray, " P"], Int32[np.ndarray, " P"], Int32[np.ndarray, " P"]]:
    """The probes of a text as one sequence of columns, side by side, padded to a bucket.

    Returns:
        Of each column its token; its position behind the text's beginning; and the number of its probe, -1 for padding.
    """
    lengths = [len(probe.ids) for probe in text.segments]
    padding = (0, bucket_length(sum(lengths), _LEAST_COLUMNS) - sum(lengths))
    tokens = np.array([token for probe in text.segments for token in probe.ids], np.int32)
    positions = np.concatenate([len(text.ids) + np.arange(length, dtype=np.int32) for length in lengths])
    probe = np.pad(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), padding, constant_values=-1)
    return np.pad(tokens, padding), np.pad(positions, padding, mode="edge"), probe


class ReadText:
    """A text that was read, and the probes behind it."""

    def __init__(
        self,
        lm: LM,
        text: ProbedText,
        more: HeadMask | None,  # heads that read blocks, all others sparse at row 0; None: all read everything
        config: TCAConfig,
        step: Callable[[], None],  # called after each layer
    ) -> None:
        self._lm, self._config, self._more = lm, config, more
        tokens, positions, probe = columns_of(text)
        self.num_columns, lengths = tokens.size, jnp.array([len(text.ids)], jnp.int32)  # columns with padding
        # A row per column: with RoPE that follows the length so far, each is the last of its own.
        self._probes = LayerPass(lm, tokens[:, None], positions[:, None], step, (jnp.asarray(probe), lengths))
        self._texts = list(TextPass(lm, text.ids, step).layers(read_layer, gates_of(lm, more), config=config))

    @property
    def nbytes(self) -> int:
        """Bytes of the text's keys and values on the device."""
        return sum(x.nbytes for x in jax.tree.leaves(self._texts) if isinstance(x, jax.Array))

    def to_host(self) -> None:
        """Moves the text's keys and values to the host: trials then bring a layer at a time to the device."""
        self._texts = [on_host(of_layer) for of_layer in self._texts]

    def losses(self, rows: Rows) -> Float32[np.ndarray, " P"]:
        """Loss in nats of the token after each column, where heads keep these cache rows."""
        return self._trial(rows).losses()

    def slopes(self, rows: Rows, weights: Float32[np.ndarray, " P"]) -> Float64[np.ndarray, "layers Hkv"]:
        """Derivative of the weighted sum of losses by a gate of each head, from its row towards the whole text."""
        inputs, gates = list[Array](), jnp.zeros(rows.shape[1], jnp.float32)
        run = self._trial(rows, inputs)
        arrays = functools.partial(self._arrays, rows, gates)
        return run.slopes(_slopes, arrays, inputs, weights, config=self._config)

    def _trial(self, rows: Rows, inputs: list[Array] | None = None) -> LayerPass:
        """The probes' pass, once all layers have run; `inputs` gets the stream in front of every layer."""
        run = copy.copy(self._probes)
        arrays = functools.partial(self._arrays, rows, None)
        list(run.layers(_read_probes, arrays, inputs=inputs, config=self._config))
        return run

    def _arrays(self, rows: Rows, gates: Array | None, layer: int) -> tuple[Array | None, KeptText]:
        """Arguments of a layer's programs."""
        text = jax.tree.map(jnp.asarray, self._texts[layer])
        prefill_rows = rows if self._more is None else np.where(self._more, rows, 0)
        both = (self._lm.in_mesh_order(layer, of_heads[layer]) for of_heads in (rows, prefill_rows))
        heads = (*both, self._lm.head_numbers(layer))
        return gates, KeptText(text, *(jnp.asarray(each, jnp.int32) for each in heads))


_LIES: Any = TEXT_SPECS, HEADS, HEADS, HEADS
_OPTIONS: dict[str, Any] = {"static": ("config",), "inputs": (HEADS, KeptText(*_LIES))}
_read_probes = attention_program(attend_probes, measures=False, outputs=(SAME, SAME), **_OPTIONS)
_slopes = slope_program(attend_probes, **_OPTIONS)
