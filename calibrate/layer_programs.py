"""Compiled functions of a layer or a decoder that calibration runs, on one device or over the mesh of the model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME
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
    """

    mesh: Mesh
    config: ModelConfig


def shards_of(lm: LM) -> Shards | None:
    """Of a model on a mesh; None on one device."""
    return None if lm.mesh is None else Shards(lm.mesh, lm.config)


def runnable_decoder(lm: LM) -> Decoder:
    """The decoder whose parts layer programs take: on a mesh, that of a device."""
    return lm.decoder if lm.mesh is None else lm.on_device(lm.params).decoder


class LayerProgram:
    """A jitted `function(module, *arrays, **static)`, one program for all layers of a model.

    Args:
        function: What to run. Over a mesh it is traced for a single device and its own heads.
        static: Names of its static arguments, which go by name.
        inputs: How its arrays lie on a mesh; those behind the last that is named are the same on all devices.
        outputs: The same of its results.
        derives: Whether it takes derivatives: JAX must then know what is the same on all devices.
        donate: Whether the first array may be overwritten.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str] = (),
        inputs: Sequence[Any] = (),
        outputs: Any = SAME,
        derives: bool = False,
        donate: bool = False,
    ) -> None:
        self._function, self._inputs, self._outputs, self._derives = function, tuple(inputs), outputs, derives

        def run(*args: Any, **options: Any) -> Any:
            return self._run(*args, **options)

        run.__name__ = function.__name__
        names = ("graphdef", "shards", *static)
        self._jitted = jax.jit(run, static_argnames=names, donate_argnums=(1,) if donate else ())

    def __call__(self, module: tuple[Any, Any], *arrays: Any, shards: Shards | None = None, **static: Any) -> Any:
        """Runs it on a module's static part and weights; over the mesh of `shards`."""
        graphdef, weights = module
        return self._jitted(weights, *arrays, graphdef=graphdef, shards=shards, **static)

    def _run(self, weights: Any, *arrays: Any, graphdef: Any, shards: Shards | None, **static: Any) -> Any:
        def on_device(weights: Any, *arrays: Any) -> Any:
            return self._function(nnx.merge(graphdef, weights), *arrays, **static)

        if shards is None:
            return on_device(weights, *arrays)
        of_decoder = parameter_specs(shards.config, shards.mesh)
        lies = of_decoder if "layers" in weights else of_decoder["layers"][0]
        inputs = *self._inputs, *(SAME,) * (len(arrays) - len(self._inputs))
        mapped = jax.shard_map(
            on_device,
            mesh=shards.mesh,
            in_specs=(lies, *inputs),
            out_specs=self._outputs,
            check_vma=self._derives,
        )
        return mapped(weights, *arrays)


def attention_program(attend: Callable[..., Any], *, inputs: Sequence[Any] = (), **options: Any) -> LayerProgram:
    """The program of a layer with an attention of its own.

    Args:
        attend: `attend(q, k, v, *arrays, **static) -> (attention, what is measured)`. The program takes the stream in
            front of the layer, RoPE's angles and the arrays; it returns the stream behind and what is measured.
        inputs: How these arrays lie on a mesh.
        **options: Those of `LayerProgram`.
    """
    return LayerProgram(_layer_of(attend), inputs=(SAME, SAME, SAME, *inputs), **options)


def slope_program(attend: Callable[..., Any], *, inputs: Sequence[Any], **options: Any) -> LayerProgram:
    """The program of a layer's derivatives by the stream in front of it and by the gates of its heads.

    Args:
        attend: As for `attention_program`, differentiable; the first of its arrays are the gates, `[H_kv]`. The program
            takes the derivative by the stream behind the layer, and then what that of the attention takes.
        inputs: How these arrays lie on a mesh.
        **options: Those of `LayerProgram`.
    """
    layer = _layer_of(attend)

    def slopes(
        module: Any, cotangent: Array, x: Array, cos: Array, sin: Array, gates: Array, *rest: Any, **static: Any
    ) -> tuple[Array, Array]:
        _, pullback = jax.vjp(lambda x, gates: layer(module, x, cos, sin, gates, *rest, **static)[0], x, gates)
        return pullback(cotangent)

    slopes.__name__ = f"{attend.__name__}_slopes"
    return LayerProgram(slopes, inputs=(SAME, SAME, SAME, SAME, *inputs), derives=True, **options)


def _layer_of(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A layer whose attention is `attend`."""

    @functools.wraps(attend)
    def run(module: Any, x: Array, cos: Array, sin: Array, *arrays: Any, **static: Any) -> tuple[Array, Any]:
        x, measured, _ = module(x, cos, sin, lambda q, k, v, _: attend(q, k, v, *arrays, **static), None)
        return x, measured

    return run
