"""Models on a mesh of devices: allowed meshes, shards of the weights, and computation with a shard.

Weights are split over the mesh axis "model", by the table in `names`, and replicated over "data". Under `jax.shard_map`
each device has whole KV heads with their queries, and a part of the MLP's inner width. So with x the residual stream,
the same on all devices of "model":

    qkv, gate and up   products of x as on one device: for the device's own heads and its part of the inner width
    o and down         partial sums: `psum` over "model", then the bias, which every device has
    embedding          a device has some of its columns: look up rows, then `gather_width`
    head               `slice_width`, then partial sums: `psum` of the logits; a tied head is the embedding
    norms              the same everywhere
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from tca_jax.errors import require, require_type
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder, chunk_size
from tca_jax.models.names import MODEL, Parameter, parameters

DATA = "data"  # the mesh axis that the rows of a batch are split over
HeadOrders = Sequence[Sequence[int]]  # [layers][H_kv]: the KV heads in the order in which they lie

_OVERLAPPING = (14, 18, 15, 17)  # sixteenths of a chunk: the four chunks of a step
# Least elements of a chunk's residual stream for each device: 16 MiB in bfloat16, give or take the sixteenths. XLA
# combines the sums of neighbouring chunks if they have at most 30 MiB together, and their products too, and both then
# wait. Whole sums, as now, would allow smaller chunks on many devices; these are the sizes that were measured.
_PART_ELEMENTS = 2**23


@functools.lru_cache(maxsize=8)
def device_graphdef(config: ModelConfig, dtype: DTypeLike, param_dtype: DTypeLike, devices: int) -> Any:
    """Static part (`nnx.split`) of the decoder that a device runs on its part of the weights, under `jax.shard_map`.

    `config` is the whole model's; `devices` are those on "model", which fit it (`check_mesh`). Cached, because it takes
    seconds to build a decoder of many layers.
    """
    parted = ("num_heads", "num_kv_heads", "intermediate_size")
    part = dataclasses.replace(config, **{name: getattr(config, name) // devices for name in parted})
    options: Any = {"dtype": dtype, "param_dtype": param_dtype, "chunks": layer_chunks(config, devices)}
    return nnx.graphdef(nnx.eval_shape(lambda: Decoder(part, sharded=True, **options, rngs=nnx.Rngs(0))))


def layer_chunks(config: ModelConfig, devices: int) -> tuple[int, ...]:
    """Tokens of the chunks in one step of a layer's second half, whose products overlap with the sum before.

    They differ in size, or XLA would fuse their additions, which then wait for all sums. One device sums nothing.
    """
    if devices == 1:
        return (chunk_size(config.intermediate_size),)
    least = -(-devices * _PART_ELEMENTS // config.hidden_size)
    chunk = max(chunk_size(config.intermediate_size), 1 << max(0, least - 1).bit_length())
    return tuple(max(1, part * chunk // 16) for part in _OVERLAPPING)


def axis_size(mesh: Mesh | AbstractMesh | None, axis: str) -> int:
    """Devices along an axis of a mesh; 1 where there is no such axis or no mesh."""
    return 1 if mesh is None else mesh.shape.get(axis, 1)


def check_mesh(mesh: Any, config: ModelConfig, name: str = "the model") -> None:
    """Raises TypeError or ValueError unless a mesh of axes "data" and "model", or one of them, can run a model.

    The devices on "model" must divide its KV heads, inner width and width; the message has the numbers that do.
    """
    require_type("mesh", mesh, (Mesh, AbstractMesh), "a jax.sharding.Mesh, as jax.make_mesh gives it")
    given = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    fits = mesh.axis_names and set(mesh.axis_names) <= {DATA, MODEL}
    require(fits, f"mesh = ({given}): its axes must be {DATA!r} and {MODEL!r}, or one of them")
    devices, sizes = axis_size(mesh, MODEL), (config.num_kv_heads, config.intermediate_size, config.hidden_size)
    allowed = [number for number in range(1, config.num_kv_heads + 1) if math.gcd(*sizes) % number == 0]
    words = "{} KV heads, an inner width of {} and a width of {}".format(*sizes)
    must = f"the devices must be one of {allowed}, which divide all three"
    require(devices in allowed, f"mesh = ({given}): {MODEL}={devices} devices, but {name} has {words}: {must}")


def whole_mesh(mesh: Mesh) -> Mesh:
    """The mesh as programs know it: with both axes, of which one may be a single device, for the compiler to share out.

    So programs are the same for Auto and Explicit axes.
    """
    missing = tuple(axis for axis in (DATA, MODEL) if axis not in mesh.axis_names)
    names = (*mesh.axis_names, *missing)
    devices = mesh.devices.reshape(*mesh.devices.shape, *(1 for _ in missing))
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def within(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Programs on arrays of a mesh run within it, whichever mesh the caller has set."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def constrained(value: Array, mesh: Mesh | None, spec: PartitionSpec) -> Array:
    """A value of a program, which the compiler splits over a mesh so; without a mesh the value."""
    return value if mesh is None else jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def settled(value: Array, parameter: Parameter, mesh: Mesh | None) -> Array:
    """A parameter's value under its sharding on a mesh.

    An equivalent sharding may be another object, for which programs would be compiled again.
    """
    return value if mesh is None else jax.device_put(value, NamedSharding(mesh, parameter.spec))


@functools.lru_cache(maxsize=8)
def parameter_specs(config: ModelConfig, param_dtype: DTypeLike = jnp.bfloat16) -> Any:
    """The `PartitionSpec` of every parameter, in the structure of the decoder's state, for `jax.shard_map`."""
    found = abstract_parameters(config, jnp.dtype(param_dtype))
    return nnx.from_flat_state({each.path: each.variable.replace(each.spec) for each in found})


def mesh_of(weight: Array) -> Mesh | None:
    """The mesh of a weight, as programs know it; None on one device."""
    mesh = getattr(weight.sharding, "mesh", None)
    return whole_mesh(mesh) if isinstance(mesh, Mesh) else None


def shard_decoder(decoder: Decoder, mesh: Mesh) -> Decoder:
    """Puts a decoder that is in memory onto a mesh; `load_checkpoint` reads one directly into its shards.

    ValueError where the mesh does not fit the model.
    """
    check_mesh(mesh, decoder.config)
    mesh, found = whole_mesh(mesh), parameters(decoder)
    sharded = {each.path: each.variable.replace(settled(each.variable[...], each, mesh)) for each in found}
    return nnx.merge(nnx.graphdef(decoder), nnx.from_flat_state(sharded))


def reorder_heads(value: Array, parameter: Parameter, orders: HeadOrders | None) -> Array:
    """A parameter's value with the KV heads of its layer in another order.

    Head i becomes the one that had the number `orders[layer][i]`. A head's queries move with it, in the weights and
    biases of q, k, v and o, so results change only by the order in which o sums. On a mesh a weight is exchanged
    between the devices once.
    """
    if orders is None or parameter.layer is None or not parameter.by_head:
        return value
    order, mesh = np.array(orders[parameter.layer], np.int32), mesh_of(value)
    if (order == np.arange(len(order))).all():
        return value
    with within(mesh):
        options: Any = {"axis": parameter.split_axis, "spec": parameter.spec, "mesh": mesh}
        return settled(_reorder(settled(value, parameter, mesh), order, **options), parameter, mesh)


def check_orders(orders: HeadOrders, config: ModelConfig) -> None:
    """Raises ValueError unless there is a permutation of the KV heads for each layer."""
    heads = list(range(config.num_kv_heads))
    fits = len(orders) == config.num_layers and all(sorted(order) == heads for order in orders)
    require(fits, f"orders = {orders!r}: must be {config.num_layers} permutations of {len(heads)} KV heads")


@functools.partial(jax.jit, static_argnames=("axis", "spec", "mesh"))
def _reorder(
    x: Array, order: Int[Array | np.ndarray, " Hkv"], *, axis: int, spec: PartitionSpec, mesh: Mesh | None
) -> Array:
    """A weight whose `axis` holds the KV heads, with the heads in another order."""
    by_head = x.reshape(*x.shape[:axis], order.size, -1, *x.shape[axis + 1 :])
    return constrained(jnp.take(by_head, order, axis=axis, unique_indices=True).reshape(x.shape), mesh, spec)


@functools.lru_cache(maxsize=8)
def abstract_parameters(
    config: ModelConfig, param_dtype: Any = jnp.bfloat16, dtype: Any = jnp.bfloat16
) -> tuple[Parameter, ...]:
    """Every parameter of a decoder of this shape, without values; cached, because many layers take seconds."""
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    return tuple(parameters(nnx.eval_shape(lambda: Decoder(config, **dtypes, rngs=nnx.Rngs(0)))))
