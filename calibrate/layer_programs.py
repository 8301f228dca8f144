"""Compiled functions of a layer or a decoder that calibration runs, on one device or over the mesh of the model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int32

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME
from tca_jax.methods.heads import HeadShards, dealt_out
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.names import MODEL
from tca_jax.models.sharding import parameter_specs

#: Axis 0 of a result or an argument is KV heads, or query heads; or axis 2 is.
HEADS, THIRD_HEADS = PartitionSpec(MODEL), PartitionSpec(None, None, MODEL)


@dataclasses.dataclass(frozen=True)
class Shards:
    """What a program must know of a model that a mesh shares.

    Attributes:
        mesh: The devices.
        config: The model's shape.
        heads: Where its KV heads lie.
    """

    mesh: Mesh
    config: ModelConfig
    heads: HeadShards


def shards_of(lm: LM) -> Shards | None:
    """Of a model on a mesh; None on one device."""
    return None if lm.mesh is None or lm.head_shards is None else Shards(lm.mesh, lm.config, lm.head_shards)


def runnable_decoder(lm: LM) -> Decoder:
    """The decoder whose parts layer programs take: on a mesh, that of a device."""
    return lm.decoder if lm.mesh is None else lm.on_device(lm.params).decoder


class LayerProgram:
    """A jitted function of a module's static part, its weights, and further arguments.

    Args:
        function: What to run. Over a mesh it is traced for a single device and its own heads.
        static: Names of its static arguments.
        donate: Names of those whose buffers may be overwritten.
        inputs: How arguments lie on a mesh, by name, those that are not the same on all devices.
        outputs: The same of its results.
        derives: Whether it takes derivatives: JAX must then know what is the same on all devices.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static: tuple[str, ...] = (),
        donate: tuple[str, ...] = (),
        inputs: Mapping[str, Any] | None = None,
        outputs: Any = SAME,
        derives: bool = False,
    ) -> None:
        self._function, self._static = function, ("graphdef", *static)
        self._inputs, self._outputs, self._derives = inputs or {}, outputs, derives
        self._signature = inspect.signature(function)
        self._alone = jax.jit(function, static_argnames=self._static, donate_argnames=donate)

        def over_mesh(shards: Shards, numbers: Int32[Array, " Hkv"], **arguments: Any) -> Any:
            return self._over_mesh(shards, numbers, arguments)

        over_mesh.__name__ = function.__name__
        self._shared = jax.jit(over_mesh, static_argnames=("shards", *self._static), donate_argnames=donate)

    def __call__(self, *args: Any, shards: Shards | None = None, layer: int = 0, **options: Any) -> Any:
        """Runs it; over the mesh of `shards` it is told which heads `layer` has where."""
        if shards is None:
            return self._alone(*args, **options)
        numbers = jnp.asarray(shards.heads.order[layer], jnp.int32)
        return self._shared(shards=shards, numbers=numbers, **self._signature.bind(*args, **options).arguments)

    def _over_mesh(self, shards: Shards, numbers: Int32[Array, " Hkv"], arguments: dict[str, Any]) -> Any:
        fixed = {name: arguments.pop(name) for name in self._static}
        specs = {name: self._inputs.get(name, SAME) for name in arguments}
        of_decoder = parameter_specs(shards.config, shards.mesh)
        specs["weights"] = of_decoder if "layers" in arguments["weights"] else of_decoder["layers"][0]

        def on_device(numbers: Int32[Array, " Hkv"], arrays: dict[str, Any]) -> Any:
            with dealt_out(shards.heads, numbers):
                return self._function(**arrays, **fixed)

        mapped = jax.shard_map(
            on_device, mesh=shards.mesh, in_specs=(HEADS, specs), out_specs=self._outputs, check_vma=self._derives
        )
        return mapped(numbers, arguments)


def layer_program(**options: Any) -> Callable[[Callable[..., Any]], LayerProgram]:
    """`LayerProgram` as a decorator."""
    return lambda function: LayerProgram(function, **options)


_LAYER = ("graphdef", "weights", "x", "cos", "sin")


def attention_program(**options: Any) -> Callable[[Callable[..., Any]], LayerProgram]:
    """Makes a layer program of its attention: `attend(q, k, v, *arguments) -> (attention, what is measured)`.

    The program takes a layer's parts, the stream in front of it, RoPE's angles and the arguments; it returns the stream
    behind the layer and what is measured. Options are those of `LayerProgram`.
    """

    def program(attend: Callable[..., Any]) -> LayerProgram:
        return LayerProgram(_layer_of(attend), **options)

    return program


def slope_program(attend: Callable[..., Any], **options: Any) -> LayerProgram:
    """The program of a layer's derivatives by the stream in front of it and by the gates of its heads.

    Args:
        attend: As for `attention_program`, differentiable; among its arguments are `gates`, `[H_kv]`. The program takes
            what that of the attention takes, and then the derivative by the stream behind the layer.
        **options: Of `LayerProgram`.
    """
    layer = _layer_of(attend)
    parameters = [*inspect.signature(layer).parameters.values()]
    cotangent = inspect.Parameter("cotangent", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def slopes(x: Array, gates: Array, cotangent: Array, **given: Any) -> tuple[Array, Array]:
        _, pullback = jax.vjp(lambda x, gates: layer(x=x, gates=gates, **given)[0], x, gates)
        return pullback(cotangent)

    named = _with_signature(slopes, f"{attend.__name__}_slopes", [*parameters, cotangent])
    return LayerProgram(named, derives=True, **options)


def _layer_of(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A layer whose attention is `attend`, as a function of its parts and of what the attention takes."""

    def run(graphdef: Any, weights: Any, x: Array, cos: Array, sin: Array, **given: Any) -> tuple[Array, Any]:
        layer = nnx.merge(graphdef, weights)
        x, measured, _ = layer(x, cos, sin, lambda q, k, v, _: attend(q, k, v, **given), None)
        return x, measured

    own = list(inspect.signature(attend).parameters.values())[3:]
    layer = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _LAYER]
    return _with_signature(run, attend.__name__, [*layer, *own])


def _with_signature(function: Callable[..., Any], name: str, parameters: list[inspect.Parameter]) -> Callable[..., Any]:
    """A function of keywords as one of these parameters, by position or by name, as `jax.jit` wants to know them."""
    signature = inspect.Signature(parameters)

    def named(*args: Any, **kwargs: Any) -> Any:
        return function(**signature.bind(*args, **kwargs).arguments)

    named.__name__, named.__signature__ = name, signature  # type: ignore[attr-defined]
    return named
