"""Forward passes of calibration, a layer at a time: one program serves all layers, however deep the model.

Memory is O(L): beside the residual stream a pass keeps what its caller takes of each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from tca_jax.calibration.layer_programs import LayerProgram, layer_program, runnable_decoder, shards_of
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import pad_tokens
from tca_jax.engine.scoring import logprobs_of_hidden

_LOGIT_ELEMENTS = 2**26  # of a chunk whose losses are differentiated: 256 MiB, several times


class ForwardPass:
    """One sequence on its way through a model's layers.

    Args:
        lm: The model. On a mesh, heads of what layers measure are in the order of `lm.head_orders`.
        ids: The sequence, at least 1 token.
    """

    def __init__(self, lm: LM, ids: Sequence[int]) -> None:
        padded, lengths = pad_tokens([list(ids)])
        self._decoder, self._shards = runnable_decoder(lm), shards_of(lm)
        self._layers = [nnx.split(layer) for layer in self._decoder.layers]
        self._tokens, self.lengths = jnp.asarray(padded), jnp.asarray(lengths)
        positions = jnp.minimum(jnp.arange(padded.shape[1], dtype=jnp.int32), self.lengths[:, None] - 1)
        self._x, *self._angles = self.of_decoder(embed, self._tokens, positions)

    @property
    def num_columns(self) -> int:
        """Tokens that the sequence is padded to."""
        return self._tokens.shape[1]

    def layers(
        self,
        program: LayerProgram,
        *arguments: Any,
        each: Sequence[tuple[Any, ...]] | None = None,
        inputs: list[Array] | None = None,
    ) -> Iterator[Any]:
        """Runs every layer by a program that returns the stream behind it and what it measures; yields the latter.

        Args:
            program: Takes a layer's parts, the stream, RoPE's angles and the length.
            *arguments: What it takes behind these.
            each: Of every layer, what it takes in front of these.
            inputs: Gets the stream in front of every layer, where the program does not overwrite it.
        """
        for number in range(len(self._layers)):
            own = () if each is None else each[number]
            if inputs is not None:
                inputs.append(self._x)
            self._x, measured = self.one_layer(number, program, self._x, *own, *arguments)
            yield measured

    def one_layer(self, number: int, program: LayerProgram, x: Array, *arguments: Any) -> Any:
        """What a program of a layer gives for a stream in front of it."""
        return self.of_layer(number, program, x, *self._angles, self.lengths, *arguments)

    def behind(self, program: LayerProgram, *arguments: Any) -> Any:
        """What a program of the whole decoder gives for the stream behind the last layer."""
        return self.of_decoder(program, self._x, *arguments)

    def of_layer(self, number: int, program: LayerProgram, *arguments: Any) -> Any:
        """What a program gives of a layer's parts and arguments."""
        return program(*self._layers[number], *arguments, shards=self._shards, layer=number)

    def of_decoder(self, program: LayerProgram, *arguments: Any) -> Any:
        """What a program gives of the decoder's parts and arguments."""
        return program(*nnx.split(self._decoder), *arguments, shards=self._shards)

    @property
    def targets(self) -> Int32[Array, "1 L"]:
        """The token after each one; the last repeated."""
        return jnp.concatenate([self._tokens[:, 1:], self._tokens[:, -1:]], axis=1)

    def losses(self) -> Float32[np.ndarray, " L"]:
        """Loss in nats of the token after each one, once all layers have run."""
        return on_host(self.behind(losses_of, self.targets))[0]


@layer_program()
def embed(
    graphdef: Any, weights: Any, tokens: Int32[Array, "B L"], positions: Int32[Array, "B L"]
) -> tuple[Float[Array, "B L D"], Float[Array, "B L half"], Float[Array, "B L half"]]:
    """What the first layer gets: the residual stream, and the angles of RoPE."""
    decoder = nnx.merge(graphdef, weights)
    return decoder.embed(tokens), *decoder.angles(positions)


@layer_program()
def losses_of(
    graphdef: Any, weights: Any, x: Float[Array, "B P D"], targets: Int32[Array, "B P"]
) -> Float32[Array, "B P"]:
    """Loss in nats of a token after each position, from the stream behind the last layer."""
    decoder = nnx.merge(graphdef, weights)
    return -logprobs_of_hidden(decoder, decoder.norm(x), targets)


@layer_program(derives=True)
def loss_slope(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 L D"],
    targets: Int32[Array, "1 L"],
    counted: Float32[Array, "1 L"],
) -> Float[Array, "1 L D"]:
    """Derivative of the losses of some tokens, weighted and summed, by the stream behind the last layer."""
    length, vocabulary = x.shape[1], nnx.merge(graphdef, weights).config.vocab_size
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
