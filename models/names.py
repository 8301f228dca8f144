"""The table of the decoder's parameters: tensors of a Hugging Face checkpoint they are made of, and the split axis."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CODES = "F8_E4M3"  # safetensors' name of e4m3
MODEL = "model"  # the mesh axis that a model's weights are split over
LAYER = re.compile(r"model\.layers\.(\d+)\..*")  # a name of a layer's tensor


@dataclasses.dataclass(frozen=True)
class _Module:
    """Where checkpoints keep a module, and how it is split over a mesh."""

    names: tuple[str, ...]  # of one axis, each tensor but the first has one entry; the first has the others
    split: int | None = None  # axis of the checkpoint's tensors that is split: 0 for outputs, 1 for inputs
    output: int = 0  # the axis of a parameter's outputs that is split with axis 0 of its tensors
    by_head: bool = False  # the split axis holds the KV heads, one after the other


# Projections to heads or to the MLP's inner width are split over their outputs, projections from them over their
# inputs: a device has whole KV heads, and attention and the MLP each end with one sum over the devices. Biases behind
# these sums, and norms, are small and needed on every device. Embedding and head are split over the width: in a model
# of 70B they are 4.2 GB, too much for each device, and a vocabulary often has no useful divisor, because users add
# tokens to theirs.
_OUTER = {
    "": _Module(("model.embed_tokens",), split=1),
    "norm": _Module(("model.norm",)),
    "head": _Module(("lm_head",), split=1),
}
_OF_LAYER = {
    "attention_norm": _Module(("input_layernorm",)),
    "mlp_norm": _Module(("post_attention_layernorm",)),
    "attention.q_norm": _Module(("self_attn.q_norm",)),
    "attention.k_norm": _Module(("self_attn.k_norm",)),
    "attention.qkv": _Module(tuple(f"self_attn.{part}_proj" for part in "qkv"), split=0, by_head=True),
    "attention.o": _Module(("self_attn.o_proj",), split=1, by_head=True),
    "mlp.gate_up": _Module(("mlp.gate_proj", "mlp.up_proj"), split=0, output=1),
    "mlp.down": _Module(("mlp.down_proj",), split=1),
}
# The last part of a parameter's path -> its tensors' suffix, and which of its axes is that of inputs.
_KINDS = {
    "embedding": ("weight", -1),
    "kernel": ("weight", 0),
    "codes": ("weight", -1),  # of eight bits
    "scale": ("weight_scale", None),
    "bias": ("bias", None),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a parameter holds tensors, `[out, in]` or `[out]`. Hashable: a static value under jit."""

    shape: tuple[int, ...]  # of the parameter: any axes of outputs
    inputs: int | None  # its axis of inputs; None for vectors
    tensors: int  # their number; they share the last but one axis of outputs (`_Module.names`)

    @property
    def _axes(self) -> tuple[int, ...]:
        """The parameter's axes, that of inputs last."""
        return tuple(sorted(range(len(self.shape)), key=lambda axis: axis == self.inputs))

    @property
    def _joined(self) -> int:
        """The axis that several tensors share, where inputs are last."""
        return max(0, len(self.shape) - (2 if self.inputs is None else 3))

    @property
    def _parts(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors as parts of the parameter, inputs last."""
        sizes, axis = [self.shape[axis] for axis in self._axes], self._joined
        widths = (sizes[axis] - self.tensors + 1, *[1] * (self.tensors - 1))
        return [(*sizes[:axis], width, *sizes[axis + 1 :]) for width in widths]

    @property
    def tensor_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors."""
        last = len(self.shape) - (self.inputs is not None)
        return [(math.prod(part[:last]), *part[last:]) for part in self._parts]

    def split(self, value: Any) -> list[Any]:
        """Tensors of a parameter's value, NumPy or JAX."""
        value, lead = value.transpose(self._axes), (slice(None),) * self._joined
        ends = [0, *itertools.accumulate(part[self._joined] for part in self._parts)]
        parts = [value[(*lead, slice(start, end))] for start, end in itertools.pairwise(ends)]
        return [part.reshape(shape) for part, shape in zip(parts, self.tensor_shapes, strict=True)]

    def join(self, tensors: Sequence[Array]) -> Array:
        """The parameter of its tensors."""
        parts = [tensor.reshape(shape) for tensor, shape in zip(tensors, self._parts, strict=True)]
        value = jnp.concatenate(parts, self._joined)
        return value if self.inputs is None else jnp.moveaxis(value, -1, self.inputs)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the decoder and the tensors of the checkpoint that it is made of."""

    path: tuple[Any, ...]  # in the decoder
    variable: Any  # its `nnx.Param`, with or without a value
    names: tuple[str, ...]  # its tensors
    layout: Layout  # how it holds them
    split_axis: int | None  # the axis that is split over the devices of a mesh; None for a replicated parameter
    spec: PartitionSpec  # how it is split over a mesh
    stored_spec: PartitionSpec  # how its tensors are
    by_head: bool  # the split axis holds the KV heads, one after the other

    @property
    def layer(self) -> int | None:
        """The parameter's layer; None for embedding, final norm and head."""
        return self.path[1] if self.path[0] == "layers" else None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors."""
        return dict(zip(self.names, self.layout.tensor_shapes, strict=True))


def parameters(decoder: nnx.Module) -> list[Parameter]:
    """Every parameter of the decoder, with its tensors."""
    return [_parameter(path, variable) for path, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param))]


def _parameter(path: tuple[Any, ...], variable: Any) -> Parameter:
    *of_module, kind = path[2:] if path[0] == "layers" else path
    name, prefix = ".".join(of_module), f"model.layers.{path[1]}." if path[0] == "layers" else ""
    module = (_OF_LAYER if prefix else _OUTER)[name]
    suffix, inputs = ("weight", None) if name.endswith("norm") else _KINDS[kind]
    shape, stored_split = tuple(variable.shape), module.split
    if inputs is None:
        stored_split = 0 if module.split == 0 else None
    else:
        inputs %= len(shape)
    split = inputs if stored_split == 1 else None if stored_split is None else module.output + (inputs == 0)
    layout = Layout(shape, inputs, len(module.names))
    names = tuple(f"{prefix}{each}.{suffix}" for each in module.names)
    by_head, specs = module.by_head and split is not None, (_spec(split), _spec(stored_split))
    return Parameter(path, variable, names, layout, split, *specs, by_head)


def _spec(split: int | None) -> PartitionSpec:
    return PartitionSpec() if split is None else PartitionSpec(*[None] * split, MODEL)
