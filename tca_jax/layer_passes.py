"""Passes of a model a layer at a time: one compiled program serves all layers, however deep the model.

Memory is O(L): beside the residual stream a pass keeps what its caller takes of each layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME
from tca_jax.engine.prompts import pad_tokens
from tca_jax.models.decoder import Decoder
from tca_jax.models.names import MODEL
from tca_jax.models.sharding import parameter_specs

HEADS = PartitionSpec(MODEL)  # axis 0 of a result or an argument is KV heads, or query heads
LayerProgram = Callable[..., Any]  # what `layer_program` makes
#: A figure of each token from the last layer's stream: `measure(decoder, x [1, n, D], targets [1, n]) -> [1, n]`.
Measure = Callable[[Decoder, Array, Array], Array]

_LOGIT_ELEMENTS = 2**26  # of a chunk whose losses are differentiated: 256 MiB, several times


def layer_program(
    function: Callable[..., Any],  # `function(module, *arrays, **static)`, of a layer or a decoder
    *,
    static: Sequence[str] = (),  # names of its static arguments, which go by name
    inputs: Sequence[Any] = (),  # partition specs of its arrays; those behind the last are replicated
    outputs: Any = SAME,  # of its results
    donate: bool = False,  # whether the first array may be overwritten
) -> LayerProgram:
    """A jitted function of a module, for all layers: `program(weights, *arrays, graphdef=, shards=, **static)`.

    It takes the module in its two parts, and `(mesh, config, weights_dtype)`, or None on one device.
    """

    def run(weights: Any, *arrays: Any, graphdef: Any, shards: Any, **options: Any) -> Any:
        def on_device(weights: Any, *arrays: Any) -> Any:
            return function(nnx.merge(graphdef, weights), *arrays, **options)

        if shards is None:
            return on_device(weights, *arrays)
        mesh, config, weights_dtype = shards
        of_decoder = parameter_specs(config, weights_dtype)
        of_weights = of_decoder if "layers" in weights else of_decoder["layers"][0]
        in_specs = (of_weights, *inputs, *(SAME,) * (len(arrays) - len(inputs)))
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=outputs, check_vma=False)
        return mapped(weights, *arrays)

    run.__name__ = function.__name__
    return jax.jit(run, static_argnames=("graphdef", "shards", *static), donate_argnums=(1,) if donate else ())


def attention_program(attend: Callable[..., Any], *, inputs: Sequence[Any] = (), **options: Any) -> LayerProgram:
    """The program of a layer whose attention is `attend(q, k, v, *arrays, **static) -> (attention, measured)`."""

    @functools.wraps(attend)
    def run(module: Any, x: Array, cos: Array, sin: Array, *arrays: Any, **static: Any) -> tuple[Array, Any]:
        def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, Any]:
            return attend(q, k, v, *arrays, **static)

        return module(x, cos, sin, attention, None)

    return layer_program(run, inputs=(SAME, SAME, SAME, *inputs), **options)


class LayerPass:
    """A forward pass of a sequence, layer by layer. On a mesh, measured heads are in the order of `lm.head_orders`."""

    def __init__(
        self,
        lm: LM,
        tokens: Int32[np.ndarray, "B P"],  # a row, or one for each token: RoPE by the length then takes the token's own
        positions: Int32[np.ndarray, "B P"],
        last: tuple[Array, ...] = (),  # the last arrays that programs of all layers take
    ) -> None:
        self._lm, self._last = lm, last
        self._decoder = lm.decoder if lm.mesh is None else lm.on_device(lm.params).decoder
        self._layers = [nnx.split(layer) for layer in self._decoder.layers]
        self._shards = None if lm.mesh is None else (lm.mesh, lm.config, lm.weights_dtype)
        embedded = self._of_decoder(_embed, jnp.asarray(tokens), jnp.asarray(positions))
        self._x, *self._angles = (x.reshape(1, -1, x.shape[-1]) for x in embedded)
        self.targets = jnp.asarray(np.roll(tokens.reshape(1, -1), -1))  # arbitrary for the last

    def layers(
        self,
        program: LayerProgram,
        arrays: Callable[[int], tuple[Any, ...]] = lambda number: (),  # those between RoPE's angles and the last ones
        *,
        inputs: list[Array] | None = None,  # gets the stream in front of every layer
        of_layer: Callable[[int], Mapping[str, Any]] = lambda number: {},  # static arguments that differ between layers
        **static: Any,
    ) -> Iterator[Any]:
        """Runs every layer by an `attention_program`, with arrays and options by its number; yields measurements."""
        for number in range(len(self._layers)):
            if inputs is not None:
                inputs.append(self._x)
            options = {**static, **of_layer(number)}
            # No name holds the arrays that are passed: a stream and a layer's go once the next ones are there.
            self._x, measured = self._of_layer(number, program, self._x, *self._angles, *arrays(number), **options)
            yield measured

    def backward(
        self,
        program: LayerProgram,  # from the derivative by the stream after a layer, and its inputs, to that in front
        arrays: Callable[[int], tuple[Any, ...]],
        inputs: list[Array],  # the stream in front of every layer; empty in the end
        weights: Float32[np.ndarray, " P"],
        measure: Measure,
        **static: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Derivatives of a weighted sum over tokens, last layer first; yields each layer's number and measurements."""
        output = functools.partial(_output_slope, measure=measure)
        cotangent = self._of_decoder(output, self._x, self.targets, jnp.asarray(weights)[None])
        for number in reversed(range(len(self._layers))):
            cotangent, measured = self._of_layer(
                number, program, cotangent, inputs.pop(), *self._angles, *arrays(number), **static
            )
            yield number, measured

    def _of_layer(self, number: int, program: LayerProgram, *arrays: Any, **static: Any) -> Any:
        graphdef, weights = self._layers[number]
        return program(weights, *arrays, *self._last, graphdef=graphdef, shards=self._shards, **static)

    def _of_decoder(self, program: LayerProgram, *arrays: Any) -> Any:
        graphdef, weights = nnx.split(self._decoder)
        return program(weights, *arrays, graphdef=graphdef, shards=self._shards)


class TextPass(LayerPass):
    """A text on its way through a model's layers, whose programs take last how many tokens it has, `[1]`."""

    def __init__(self, lm: LM, ids: Sequence[int]) -> None:
        tokens, lengths = pad_tokens([list(ids)])
        positions = np.minimum(np.arange(tokens.shape[1], dtype=np.int32), lengths[:, None] - 1)
        super().__init__(lm, tokens, positions, (jnp.asarray(lengths),))


@layer_program
def _embed(
    decoder: Decoder, tokens: Int32[Array, "B L"], positions: Int32[Array, "B L"]
) -> tuple[Float[Array, "B L D"], Float[Array, "B L half"], Float[Array, "B L half"]]:
    """The first layer's inputs: the residual stream, and the angles of RoPE."""
    return decoder.embed(tokens), *decoder.angles(positions)


@functools.partial(layer_program, static=("measure",))
def _output_slope(
    decoder: Decoder,
    x: Float[Array, "1 L D"],
    targets: Int32[Array, "1 L"],
    counted: Float32[Array, "1 L"],
    *,
    measure: Measure,
) -> Float[Array, "1 L D"]:
    """Gradient of a weighted sum over tokens with respect to the last layer's residual stream."""
    (graphdef, weights), length, vocabulary = nnx.split(decoder), x.shape[1], decoder.config.vocab_size
    chunk = max(1, min(length, _LOGIT_ELEMENTS // vocabulary))

    def chunks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, -length % chunk), *((0, 0),) * (x.ndim - 2)))
        return padded.reshape(-1, 1, chunk, *x.shape[2:])

    def of_chunk(part: tuple[Array, Array, Array]) -> Array:
        x, targets, counted = part
        return jax.grad(lambda x: (measure(nnx.merge(graphdef, weights), x, targets) * counted).sum())(x)

    slopes = jax.lax.map(of_chunk, (chunks(x), chunks(targets), chunks(counted)))
    return slopes.reshape(1, -1, x.shape[2])[:, :length]
