"""From tensors of a checkpoint to parameters on the devices: read, cast, transpose, join; on a mesh, part by part."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from tca_jax.models.names import Layout, Parameter
from tca_jax.models.sharding import by_part, spec_sharding


def read_tensor(file: Any, name: str, parameter: Parameter, mesh: Mesh | None) -> Array | np.ndarray:
    """A tensor as an open safetensors file holds it.

    Args:
        file: The open file.
        name: The tensor's name; it has the shape and the sharding of the parameter's tensors.
        parameter: The parameter that it belongs to.
        mesh: If None, the whole tensor is read and stays on the host. Otherwise the parts that this process's devices
            need are read and put onto them.
    """
    if mesh is None:
        return file.get_tensor(name)
    view, parts = file.get_slice(name), {}

    def read(index: Any) -> np.ndarray:
        key = str(index)  # devices with the same part share one copy
        if key not in parts:
            parts[key] = view[index]
        return parts[key]

    return jax.make_array_from_callback(tuple(view.get_shape()), spec_sharding(mesh, parameter.stored_spec), read)


def place_tensor(tensor: Array | np.ndarray, parameter: Parameter, dtype: Any, mesh: Mesh | None) -> Array:
    """A tensor on its devices, in the parameter's dtype and not transposed."""
    specs = parameter.stored_spec, parameter.tensor_spec
    return _place(tensor, dtype=dtype, transposed=parameter.transposed, specs=specs, mesh=mesh)


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


@functools.partial(jax.jit, static_argnames=("layout", "specs", "mesh"))
def _join(
    tensors: tuple[Array, ...], *, layout: Layout, specs: tuple[PartitionSpec, PartitionSpec], mesh: Mesh | None
) -> Array:
    shape = layout.shape if mesh is None else spec_sharding(mesh, specs[1]).shard_shape(layout.shape)
    return by_part(layout.of_part(shape).join, mesh, (specs[:1] * len(tensors),), specs[1])(tensors)
