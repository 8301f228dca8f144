"""One layer over a mesh of devices: each has its own KV heads of it, with their queries, and its own rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from tca_jax.engine.mesh import CACHES, ROWS, HeadShards, balanced_orders, mesh_name, over_mesh, place
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.common import Layer, attention_inputs
from tca_jax.methods.base import CachePolicy
from tca_jax.models.names import MODEL
from tca_jax.models.sharding import DATA, axis_size

#: How queries, keys and values of prompts lie on a mesh, `[B, L, H, d]`.
SEQUENCES = PartitionSpec(DATA, None, MODEL)
#: How the arrays of `inputs_over` lie on it.
INPUTS = (SEQUENCES, SEQUENCES, SEQUENCES, ROWS)

_BALANCED_TOKENS = 2**17  # of the prompt whose caches the devices share evenly


def heads_over(mesh: Mesh | None, policy: CachePolicy, kv_heads: int) -> HeadShards | None:
    """How a layer's KV heads are dealt out, as a model's are under the policy; None on one device."""
    if mesh is None:
        return None
    devices = axis_size(mesh, MODEL)
    return HeadShards(devices, balanced_orders(policy, 1, kv_heads, devices, _BALANCED_TOKENS))


def program_over(
    mesh: Mesh | None, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any = CACHES
) -> Callable[..., Any]:
    """A function of a layer's arrays as a program of all devices, or of one; arguments are those of `over_mesh`."""
    return jax.jit(over_mesh(function, mesh, inputs, outputs))


def inputs_over(mesh: Mesh | None, layer: Layer, length: int, seed: int) -> tuple[Array, Array, Array, Array]:
    """What `attention_inputs` draws, a prompt for each device on "data", where the devices need it."""
    inputs = attention_inputs(layer, length, seed, axis_size(mesh, DATA))
    if mesh is None:
        return inputs
    q, k, v, n = (place(spec, x, mesh) for spec, x in zip(INPUTS, inputs, strict=True))
    return q, k, v, n


def check_layer(mesh: Mesh | None, layer: Layer, batches: Sequence[int] = ()) -> None:
    """Raises ValueError unless a mesh's devices can share a layer's heads, and the rows of every batch."""
    model, data = axis_size(mesh, MODEL), axis_size(mesh, DATA)
    if layer.kv_heads % model:
        raise UserError(
            f"--mesh {mesh_name(mesh)}: {model} devices on {MODEL!r}, but a layer of {layer.name} has "
            f"{layer.kv_heads} KV heads: must divide them"
        )
    for batch in batches:
        if batch % data:
            raise UserError(f"--batches {batch}: must be a multiple of {data}, the devices on {DATA!r} of --mesh")


def describe_layer_mesh(mesh: Mesh | None, rows: str) -> str:
    """What a note says of the mesh; `rows` is what it says of rows and of columns that are about all devices."""
    if mesh is None:
        return ""
    return f" The layer's heads are shared by {mesh.size} devices, `mesh` those on data x those on model: {rows}."
