"""Losses of probes by what all heads keep of the text before them, and their derivative by each head's.

A text is read once; its keys and values stay, and a trial reads the probes behind it alone. How much a head would give
back is a derivative: of the losses, by a gate that lets the head see the whole text. One backward pass through the
probes' own columns gives it for all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, Int, Int32

from tca_jax.calibration.layer_programs import HEADS, attention_program, slope_program
from tca_jax.calibration.passes import ForwardPass, embed, loss_slope, losses_of
from tca_jax.calibration.probe_attention import SeenText, attend_probe
from tca_jax.calibration.probes import ProbedText
from tca_jax.calibration.search import HeadMask
from tca_jax.calibration.text_losses import TEXT_SPECS, LayerText, gates_of, read_layer
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, on_host
from tca_jax.engine.prompts import bucket_length
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.selection import row_budgets
from tca_jax.pallas_kernels.ranking import selection_mask

_LEAST_COLUMNS = 512  # and multiples of it: texts' probes differ in length, and each length is a program
#: Cache row of every head, `[layers, H_kv]`.
Rows = Int[np.ndarray, "layers Hkv"]


class Columns(NamedTuple):
    """Probes as one sequence of columns.

    Attributes:
        tokens: Ids.
        positions: Of each column behind the text's beginning.
        probe: Number of the probe that it belongs to; -1 for padding.
        targets: The token after each column; arbitrary for the last of a probe.
    """

    tokens: Int32[Array, "1 P"]
    positions: Int32[Array, "1 P"]
    probe: Int32[Array, " P"]
    targets: Int32[Array, "1 P"]

    @classmethod
    def of(cls, text: ProbedText) -> Columns:
        """The probes of a text, side by side, padded to a bucket."""
        lengths = [len(probe.ids) for probe in text.segments]
        tokens = np.array([token for probe in text.segments for token in probe.ids], np.int32)
        places = np.concatenate([len(text.ids) + np.arange(length) for length in lengths])
        padding = bucket_length(len(tokens), _LEAST_COLUMNS) - len(tokens)
        number = np.pad(np.repeat(np.arange(len(lengths)), lengths), (0, padding), constant_values=-1)
        tokens, places = np.pad(tokens, (0, padding)), np.pad(places, (0, padding), mode="edge")
        arrays = tokens[None], places[None], number, np.roll(tokens, -1)[None]
        return cls(*(jnp.asarray(each, jnp.int32) for each in arrays))


class ReadText:
    """A text that was read, and the probes behind it.

    Args:
        lm: The model.
        text: The text and its probes.
        more: Heads that read blocks; all others read sparse at row 0. None: all read everything.
        config: Hyperparameters.
        step: Called once for every layer that has run.

    Attributes:
        probes: Its probes as columns.
    """

    def __init__(
        self,
        lm: LM,
        text: ProbedText,
        more: HeadMask | None,
        config: TCAConfig,
        step: Callable[[], None],
    ) -> None:
        self._lm, self._config, self._step = lm, config, step
        self._pass = ForwardPass(lm, text.ids)
        self.probes = Columns.of(text)
        # A row per column: with RoPE that follows the length so far, each is the last of its own.
        columns = self.probes.tokens.T, self.probes.positions.T
        self._x, *self._angles = (x.swapaxes(0, 1) for x in self._pass.of_decoder(embed, *columns))
        layers = range(lm.config.num_layers)
        self._sparse = [
            lm.in_mesh_order(i, np.zeros(lm.config.num_kv_heads, bool) if more is None else ~more[i]) for i in layers
        ]
        self._texts = []
        for of_layer in self._pass.layers(read_layer, gates_of(lm, more), config=config):
            self._texts.append(of_layer)
            step()

    @property
    def nbytes(self) -> int:
        """Of what is kept of the text on the device."""
        return sum(x.nbytes for x in jax.tree.leaves(self._texts) if isinstance(x, jax.Array))

    def to_host(self) -> None:
        """Moves what is kept of the text to the host: trials then bring a layer at a time to the device."""
        self._texts = [on_host(of_layer) for of_layer in self._texts]

    def losses(self, rows: Rows) -> Float32[np.ndarray, " P"]:
        """Loss in nats of the token after each column, where heads keep these cache rows."""
        *_, last = self._streams(rows)
        return on_host(self._pass.of_decoder(losses_of, last, self.probes.targets))[0]

    def slopes(self, rows: Rows, weights: Float32[np.ndarray, " P"]) -> Float64[np.ndarray, "layers Hkv"]:
        """Derivative of the weighted sum of losses by a gate of each head, from its row towards the whole text."""
        *streams, last = self._streams(rows)
        cotangent = self._pass.of_decoder(loss_slope, last, self.probes.targets, jnp.asarray(weights)[None])
        found, gates = list[np.ndarray](), jnp.zeros(rows.shape[1], jnp.float32)
        for number in reversed(range(len(streams))):
            given = cotangent, streams.pop(), *self._angles, gates, self._behind(number, rows)
            cotangent, slope = self._pass.of_layer(number, _slopes, *given, config=self._config)
            found.append(self._lm.in_model_order(number, on_host(slope).astype(np.float64)))
        return np.stack(found[::-1])

    def _streams(self, rows: Rows) -> list[Float[Array, "1 P D"]]:
        """The probes' stream in front of every layer, and behind the last."""
        streams = [self._x]
        for number in range(len(self._texts)):
            given = streams[-1], *self._angles, None, self._behind(number, rows)
            streams.append(self._pass.of_layer(number, _read_probes, *given, config=self._config)[0])
            self._step()
        return streams

    def _behind(self, number: int, rows: Rows) -> _Behind:
        dealt = jnp.asarray(self._lm.in_mesh_order(number, rows[number]), jnp.int32)
        text = jax.tree.map(jnp.asarray, self._texts[number])
        numbers, sparse = jnp.asarray(self._lm.head_numbers(number)), jnp.asarray(self._sparse[number])
        return _Behind(self.probes.probe, text, dealt, sparse, numbers, self._pass.lengths)


class _Behind(NamedTuple):
    """What probes are read behind in a layer.

    Attributes:
        probe: As `Columns.probe`.
        text: What the layer has of the text.
        rows: Cache rows of its heads.
        sparse: Heads that have read sparse, which keep at least row 0.
        numbers: Of the heads, in the model.
        lengths: Tokens of the text.
    """

    probe: Int32[Array, " P"]
    text: LayerText
    rows: Int32[Array, " Hkv"]
    sparse: Bool[Array, " Hkv"]
    numbers: Int32[Array, " Hkv"]
    lengths: Int32[Array, " 1"]

    def seen(self, config: TCAConfig) -> SeenText:
        """The text with what its rows have left of it."""
        tokens, scores = self.text.k.shape[1], self.text.scores
        least = row_budgets(scores, jnp.zeros_like(self.rows), self.lengths, config, self.numbers)
        budgets = row_budgets(scores, self.rows, self.lengths, config, self.numbers)
        budgets = jnp.maximum(budgets, jnp.where(self.sparse[:, None], least, 0))
        selected = selection_mask(scores.ranking, budgets, block_size=config.block_size)
        ranked = jnp.arange(tokens) < config.num_ranked_blocks(self.lengths) * config.block_size
        return SeenText(self.text.k[0], self.text.v[0], selected[0] | ~ranked, self.lengths[0], self.probe)


def _attend(
    q: Float[Array, "1 P Hq d"],
    k: Float[Array, "1 P Hkv d"],
    v: Float[Array, "1 P Hkv d"],
    gates: Float32[Array, " Hkv"] | None,
    behind: _Behind,
    config: TCAConfig,
) -> tuple[Float[Array, "1 P Hq d"], None]:
    """Attention of the probes over what cache rows have left of the text, or at gates of 1 over all of it."""
    return attend_probe(q[0], k[0], v[0], behind.seen(config), gates)[None], None


_LIES: Any = SAME, TEXT_SPECS, HEADS, HEADS, HEADS, SAME
_OPTIONS: dict[str, Any] = {"static": ("config",), "inputs": (HEADS, _Behind(*_LIES))}
_read_probes = attention_program(_attend, outputs=(SAME, SAME), **_OPTIONS)
_slopes = slope_program(_attend, outputs=(SAME, HEADS), **_OPTIONS)
