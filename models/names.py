"""The table of the decoder's parameters: tensors of a Hugging Face checkpoint they are made of, and the split axis."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CODES = "F8_E4M3"  # safetensors' name of e4m3
SCALE = "_scale"  # after the name of a tensor of eight-bit codes: that of their scales
_SCALES = (SCALE, "_scale_inv")  # both multiply
MODEL = "model"  # the mesh axis that a model's weights are split over
_WHOLE = PartitionSpec()
LAYER = re.compile(r"model\.layers\.(\d+)\..*")  # a name of a layer's tensor


@dataclasses.dataclass(frozen=True)
class _Row:
    """Where checkpoints keep a kind of parameter."""

    path: str  # its path in the decoder, a regular expression
    names: tuple[str, ...]  # its tensors, as templates of the match
    spec: PartitionSpec = _WHOLE  # which of its axes is split over a mesh
    by_head: bool = False  # the split axis holds the KV heads, one after the other
    transposed: bool = False  # the checkpoint holds transposes ([out, in])
    inputs_last: bool = False  # the last axis is that of inputs, as the checkpoint's is; not transposed
    # Of several tensors: what each one fills of the axis before the parameter's last output.
    widths: Callable[[ModelConfig], tuple[int, ...]] | None = None


_LAYER, _HF_LAYER = r"layers\.(\d+)", r"model.layers.\1"


def _projection(
    module: str,  # path in a layer
    parts: tuple[str, ...],  # the checkpoint's names of what is joined
    output: int | None,  # output axis that is split over a mesh; None for that of inputs
    **of_row: Any,
) -> tuple[_Row, ...]:
    """Rows of a projection: kernel `[in, *out]` and bias; in eight bits codes `[*out, in]` and scale `[*out]`."""
    if output is None:
        kernel, codes, others = PartitionSpec(MODEL), PartitionSpec(None, MODEL), _WHOLE
    else:
        codes = others = PartitionSpec(*[None] * output, MODEL)
        kernel = PartitionSpec(None, *codes)
    kinds = {
        "kernel": ("weight", kernel, {"transposed": True}),
        "bias": ("bias", others, {}),
        "codes": ("weight", codes, {"inputs_last": True}),
        "scale": (f"weight{SCALE}", others, {}),
    }
    return tuple(
        _Row(
            rf"{_LAYER}\.{module}\.{kind}",
            tuple(rf"{_HF_LAYER}.{part}.{suffix}" for part in parts),
            spec,
            **(of_row | options | {"by_head": MODEL in spec and of_row.get("by_head", False)}),
        )
        for kind, (suffix, spec, options) in kinds.items()
    )


# Projections to heads or to the MLP's inner width are split over their outputs, projections from them over their
# inputs: a device has whole KV heads, and attention and the MLP each end with one sum over the devices. Biases behind
# these sums, and norms, are small and needed on every device. Embedding and head are split over the width: in a model
# of 70B they are 4.2 GB, too much for each device, and a vocabulary often has no useful divisor, because users add
# tokens to theirs.
_TABLE = (
    _Row(r"embedding", (EMBEDDING,), PartitionSpec(None, MODEL)),
    _Row(r"norm\.scale", ("model.norm.weight",)),
    _Row(r"head\.kernel", (HEAD,), PartitionSpec(MODEL), transposed=True),
    _Row(rf"{_LAYER}\.attention_norm\.scale", (rf"{_HF_LAYER}.input_layernorm.weight",)),
    _Row(rf"{_LAYER}\.mlp_norm\.scale", (rf"{_HF_LAYER}.post_attention_layernorm.weight",)),
    _Row(rf"{_LAYER}\.attention\.([qk])_norm\.scale", (rf"{_HF_LAYER}.self_attn.\2_norm.weight",)),
    *_projection(
        r"attention\.qkv",
        tuple(f"self_attn.{part}_proj" for part in "qkv"),
        0,
        by_head=True,
        widths=lambda config: (config.num_heads // config.num_kv_heads, 1, 1),
    ),
    *_projection(r"attention\.o", ("self_attn.o_proj",), None, by_head=True),
    *_projection(r"mlp\.gate_up", ("mlp.gate_proj", "mlp.up_proj"), 1, widths=lambda c: (1, 1)),
    *_projection(r"mlp\.down", ("mlp.down_proj",), None),
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Order of the tensors of a parameter. Hashable: a static value under jit."""

    shape: tuple[int, ...]  # of the parameter
    lead: int  # leading axes that parameter and tensors have in common
    trail: int  # trailing ones; tensors flatten the axes between into one
    widths: tuple[int, ...]  # size of each tensor on the last but one of these axes; empty for a single tensor

    @property
    def tensor_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors, not transposed."""
        if not self.widths:
            return [self.shape]
        *outer, _, inner = self.shape[self.lead : self._end]
        each = math.prod(outer) * inner
        return [(*self.shape[: self.lead], each * width, *self.shape[self._end :]) for width in self.widths]

    @property
    def _end(self) -> int:
        """Past the axes that tensors flatten."""
        return len(self.shape) - self.trail

    def tensor_axis(self, axis: int) -> int:
        """The axis of the tensors that contains an axis of the parameter."""
        if not self.widths:
            return axis
        return self.lead + 1 + axis - self._end if axis >= self._end else min(axis, self.lead)

    def split(self, value: Any) -> list[Any]:
        """Tensors of a parameter's value, NumPy or JAX, not transposed."""
        if not self.widths:
            return [value]
        trailing = (slice(None),) * (1 + self.trail)
        return [
            value[(..., slice(end - width, end), *trailing)].reshape(shape)
            for shape, width, end in zip(
                self.tensor_shapes, self.widths, itertools.accumulate(self.widths), strict=True
            )
        ]

    def join(self, tensors: Sequence[Array]) -> Array:
        """The parameter of its tensors, not transposed."""
        if not self.widths:
            return tensors[0]
        joined = self._end - 2
        parts = [
            tensor.reshape(*self.shape[:joined], width, *self.shape[joined + 1 :])
            for tensor, width in zip(tensors, self.widths, strict=True)
        ]
        return jnp.concatenate(parts, axis=joined)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the decoder and the tensors of the checkpoint that it is made of."""

    path: tuple[Any, ...]  # in the decoder
    variable: Any  # its `nnx.Param`, with or without a value
    names: tuple[str, ...]  # its tensors
    transposed: bool  # the checkpoint holds transposes ([out, in])
    layout: Layout  # how it holds the tensors
    spec: PartitionSpec  # which of its axes is split over the devices of a mesh
    by_head: bool  # the split axis holds the KV heads, one after the other

    @property
    def layer(self) -> int | None:
        """The parameter's layer; None for embedding, final norm and head."""
        return self.path[1] if self.path[0] == "layers" else None

    @property
    def split_axis(self) -> int | None:
        """The axis that is split over the devices of a mesh; None for a replicated parameter."""
        return next((axis for axis, name in enumerate(self.spec) if name == MODEL), None)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, not transposed."""
        return dict(zip(self.names, self.layout.tensor_shapes, strict=True))

    @property
    def tensor_spec(self) -> PartitionSpec:
        """The spec of its tensors, not transposed."""
        split = None if self.split_axis is None else self.layout.tensor_axis(self.split_axis)
        return PartitionSpec(*(MODEL if axis == split else None for axis in range(len(self.layout.tensor_shapes[0]))))

    @property
    def stored_spec(self) -> PartitionSpec:
        """The spec of its tensors as the checkpoint stores them."""
        return PartitionSpec(*reversed(self.tensor_spec)) if self.transposed else self.tensor_spec

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in the checkpoint."""
        shape = self.shapes[name]
        return shape[::-1] if self.transposed else shape


def parameters(decoder: Decoder) -> list[Parameter]:
    """Every parameter of the decoder, with its tensors."""
    found = []
    for path, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        row, match = _row(path)
        widths = row.widths(decoder.config) if row.widths else ()
        # Weights have an axis of inputs.
        layout = Layout(tuple(variable.shape), int(row.transposed), int(row.inputs_last), widths)
        names = tuple(match.expand(name) for name in row.names)
        found.append(Parameter(path, variable, names, row.transposed, layout, row.spec, row.by_head))
    return found


def scale_name(name: str, stored: Container[str]) -> str | None:
    """Name of the scales of a tensor of codes, among the names of a checkpoint; None where there are none."""
    return next((name + suffix for suffix in _SCALES if name + suffix in stored), None)


def _row(path: tuple[Any, ...]) -> tuple[_Row, re.Match[str]]:
    """The table's row of a parameter, and the match that fills in its names."""
    joined = ".".join(str(part) for part in path)
    return next((row, match) for row in _TABLE if (match := re.fullmatch(row.path, joined)))
