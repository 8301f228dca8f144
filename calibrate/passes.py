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

from tca_jax.calibration.layer_programs import LayerProgram, runnable_decoder, shards_of
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import pad_tokens
from tca_jax.engine.score import logprobs_of_hidden
from tca_jax.models.decoder import Decoder

_LOGIT_ELEMENTS = 2**26  # of a chunk whose losses are differentiated: 256 MiB, several times


class ForwardPass:
    """One sequence on its way through a model's layers.

    Args:
        lm: The model. On a mesh, heads of what layers measure are in the order of `lm.head_orders`.
        ids: The sequence, at least 1 token.

    Attributes:
        lengths: Its tokens, `[1]`.
        angles: Of RoPE, cosines and sines.
    """

    def __init__(self, lm: LM, ids: Sequence[int]) -> None:
        padded, lengths = pad_tokens([list(ids)])
        self._decoder, self._shards = runnable_decoder(lm), shards_of(lm)
        self._layers = [nnx.split(layer) for layer in self._decoder.layers]
        self._tokens, self.lengths = jnp.asarray(padded), jnp.asarray(lengths)
        positions = jnp.minimum(jnp.arange(padded.shape[1], dtype=jnp.int32), self.lengths[:, None] - 1)
        self._x, *self.angles = self.of_decoder(embed, self._tokens, positions)

    @property
    def num_columns(self) -> int:
        """Tokens that the sequence is padded to."""
        return self._tokens.shape[1]

    def layers(
        self,
        program: LayerProgram,
        each: Sequence[tuple[Any, ...]] | None = None,
        *,
        inputs: list[Array] | None = None,
        **static: Any,
    ) -> Iterator[Any]:
        """Runs every layer by a program that returns the stream behind it and what it measures; yields the latter.

        Args:
            program: Takes the stream, RoPE's angles, arrays of the layer, and the length.
            each: These arrays, of every layer; None for none.
            inputs: Gets the stream in front of every layer, where the program does not overwrite it.
            **static: The program's static arguments.
        """
        for number in range(len(self._layers)):
            own = () if each is None else each[number]
            if inputs is not None:
                inputs.append(self._x)
            self._x, measured = self.of_layer(number, program, self._x, *self.angles, *own, self.lengths, **static)
            yield measured

    def of_layer(self, number: int, program: LayerProgram, *arrays: Any, **static: Any) -> Any:
        """What a program of a layer gives."""
        return program(self._layers[number], *arrays, shards=self._shards, **static)

    def of_decoder(self, program: LayerProgram, *arrays: Any) -> Any:
        """What a program of the decoder gives."""
        return program(nnx.split(self._decoder), *arrays, shards=self._shards)

    def behind(self, program: LayerProgram, *arrays: Any) -> Any:
        """The same for the stream behind the last layer."""
        return self.of_decoder(program, self._x, *arrays)

    @property
    def targets(self) -> Int32[Array, "1 L"]:
        """The token after each one; the last repeated."""
        return jnp.concatenate([self._tokens[:, 1:], self._tokens[:, -1:]], axis=1)

    def losses(self) -> Float32[np.ndarray, " L"]:
        """Loss in nats of the token after each one, once all layers have run."""
        return on_host(self.behind(losses_of, self.targets))[0]


@LayerProgram
def embed(
    decoder: Decoder, tokens: Int32[Array, "B L"], positions: Int32[Array, "B L"]
) -> tuple[Float[Array, "B L D"], Float[Array, "B L half"], Float[Array, "B L half"]]:
    """What the first layer gets: the residual stream, and the angles of RoPE."""
    return decoder.embed(tokens), *decoder.angles(positions)


@LayerProgram
def losses_of(decoder: Decoder, x: Float[Array, "B P D"], targets: Int32[Array, "B P"]) -> Float32[Array, "B P"]:
    """Loss in nats of a token after each position, from the stream behind the last layer."""
    return -logprobs_of_hidden(decoder, decoder.norm(x), targets)


@functools.partial(LayerProgram, derives=True)
def loss_slope(
    decoder: Decoder,
    x: Float[Array, "1 L D"],
    targets: Int32[Array, "1 L"],
    counted: Float32[Array, "1 L"],
) -> Float[Array, "1 L D"]:
    """Derivative of the losses of some tokens, weighted and summed, by the stream behind the last layer."""
    (graphdef, weights), length, vocabulary = nnx.split(decoder), x.shape[1], decoder.config.vocab_size
    chunk = max(1, min(length, _LOGIT_ELEMENTS // vocabulary))

    def chunks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, -length % chunk), *((0, 0),) * (x.ndim - 2)))
        return padded.reshape(-1, 1, chunk, *x.shape[2:])

    def of_chunk(part: tuple[Array, Array, Array]) -> Array:
        x, targets, counted = part

        def loss(x: Array) -> Array:
            decoder = nnx.merge(graphdef, weights)
            return -(logprobs_of_hidden(decoder, decoder.norm(x), targets) * counted).sum()

        return jax.grad(loss)(x)

    slopes = jax.lax.map(of_chunk, (chunks(x), chunks(targets), chunks(counted)))
    return slopes.reshape(1, -1, x.shape[2])[:, :length]
