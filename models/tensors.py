"""From tensors of a checkpoint to parameters on devices: read, cast, transpose, join, quantize; on a mesh, by part."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float32

from tca_jax.models.names import MODEL, Layout, Parameter
from tca_jax.models.projections import quantize, scale_of
from tca_jax.models.sharding import axis_size, by_part, spec_sharding


def read_tensor(file: Any, name: str, parameter: Parameter, mesh: Mesh | None) -> Array | np.ndarray:
    """A tensor of `parameter` as an open safetensors file holds it, or codes that are mapped.

    Without a mesh it is read whole and stays on the host. Otherwise the parts that this process's devices need are read
    and put onto them.
    """
    codes = isinstance(file, np.ndarray)
    if mesh is None:
        return file if codes else file.get_tensor(name)
    view, parts = (file if codes else file.get_slice(name)), {}

    def read(index: Any) -> np.ndarray:
        key = str(index)  # devices with the same part share one copy
        if key not in parts:
            parts[key] = view[index]
        return parts[key]

    shape = view.shape if codes else tuple(view.get_shape())
    return jax.make_array_from_callback(shape, spec_sharding(mesh, parameter.stored_spec), read)


def place_tensor(tensor: Array | np.ndarray, parameter: Parameter, dtype: Any, mesh: Mesh | None) -> Array:
    """A tensor on its devices, in the parameter's dtype and not transposed."""
    specs = parameter.stored_spec, parameter.tensor_spec
    return _place(tensor, dtype=dtype, transposed=parameter.transposed, specs=specs, mesh=mesh)


def place_codes(
    codes: Array | np.ndarray,
    scale: Float32[np.ndarray, "so si"],
    block: tuple[int, int],
    parameter: Parameter,
    mesh: Mesh | None,
) -> Array:
    """Codes `[out, in]` times their scales, of which a block shares one, on their devices: float32, not transposed."""
    specs = parameter.stored_spec, parameter.tensor_spec
    return _dequantize(codes, scale, block=block, specs=specs, mesh=mesh)


class Quantized(NamedTuple):
    """The parameters that a kernel becomes in eight bits."""

    codes: Parameter
    scale: Parameter


def quantize_kernel(
    kernel: Array, parameter: Parameter, to: Quantized, mesh: Mesh | None, scale: Float32[Array, "*out"] | None = None
) -> tuple[Array, Array]:
    """Codes `[*out, in]` and scales `[*out]` of a kernel `[in, *out]`; by default its own scales."""
    specs = parameter.spec, to.codes.spec, to.scale.spec
    return _quantize(kernel, scale, specs=specs, mesh=mesh)


def join_tensors(parameter: Parameter, tensors: Sequence[Array], mesh: Mesh | None) -> Array:
    """The parameter, from the tensors that `place_tensor` returned."""
    specs = parameter.tensor_spec, parameter.spec
    return _join(tuple(tensors), layout=parameter.layout, specs=specs, mesh=mesh) if tensors[1:] else tensors[0]


@functools.partial(jax.jit, static_argnames=("dtype", "transposed", "specs", "mesh"))
def _place(
    tensor: Array | np.ndarray,
    *,
    dtype: Any,
    transposed: bool,
    specs: tuple[PartitionSpec, PartitionSpec],
    mesh: Mesh | None,
) -> Array:
    """Casting and transposing happen on the device."""

    def on_device(tensor: Array) -> Array:
        tensor = tensor.astype(dtype)
        return tensor.T if transposed else tensor

    return by_part(on_device, mesh, *specs)(tensor)


@functools.partial(jax.jit, static_argnames=("block", "specs", "mesh"))
def _dequantize(
    codes: Array | np.ndarray,
    scale: Float32[Array | np.ndarray, "so si"],
    *,
    block: tuple[int, int],
    specs: tuple[PartitionSpec, PartitionSpec],
    mesh: Mesh | None,
) -> Array:
    def on_device(codes: Array, scale: Array) -> Array:
        part = jax.lax.axis_index(MODEL) if MODEL in specs[0] and axis_size(mesh, MODEL) > 1 else 0
        of_axes = []
        for size, of_block, split in zip(codes.shape, block, (*specs[0], None), strict=False):
            start = part * size if split == MODEL else 0
            of_axes.append((start + jnp.arange(size)) // of_block)
        outputs, inputs = of_axes
        return (codes.astype(jnp.float32) * scale[outputs[:, None], inputs]).T

    return by_part(on_device, mesh, (specs[0], PartitionSpec()), specs[1])(codes, scale)


@functools.partial(jax.jit, static_argnames=("specs", "mesh"))
def _quantize(
    kernel: Array,
    scale: Array | None,
    *,
    specs: tuple[PartitionSpec, PartitionSpec, PartitionSpec],
    mesh: Mesh | None,
) -> tuple[Array, Array]:
    def on_device(kernel: Array, scale: Array | None) -> tuple[Array, Array]:
        rows = jnp.moveaxis(kernel, 0, -1)
        if scale is None:
            scale = scale_of(rows)
            if specs[0][:1] == (MODEL,) and axis_size(mesh, MODEL) > 1:  # a device has some of the inputs
                scale = jax.lax.pmax(scale, MODEL)
        return quantize(rows, scale)

    return by_part(on_device, mesh, (specs[0], specs[2]), specs[1:])(kernel, scale)


@functools.partial(jax.jit, static_argnames=("layout", "specs", "mesh"))
def _join(
    tensors: tuple[Array, ...], *, layout: Layout, specs: tuple[PartitionSpec, PartitionSpec], mesh: Mesh | None
) -> Array:
    shape = layout.shape if mesh is None else spec_sharding(mesh, specs[1]).shard_shape(layout.shape)
    return by_part(layout.of_part(shape).join, mesh, (specs[:1] * len(tensors),), specs[1])(tensors)
