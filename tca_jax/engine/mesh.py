"""Programs over a mesh of devices: each has its own heads of every layer and its own rows of a batch.

The functions of the engine are written for one device. Over a mesh the same function runs whole under one
`jax.shard_map`: the weights that it sees are a device's (`models.sharding`), so are heads (`HeadShards`), caches and
rows. What the devices of "model" tell each other is two sums per layer, and one more for the logits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Shaped

from tca_jax.errors import require
from tca_jax.methods.base import Heads
from tca_jax.models.names import MODEL
from tca_jax.models.sharding import DATA, axis_size, parameter_specs

if TYPE_CHECKING:
    from tca_jax.engine.lm import LM

STATIC = MappingProxyType({"static": True})  # of a field of a pytree that is static
Orders = tuple[tuple[int, ...], ...]  # for each layer the KV heads as they lie on the devices

#: Shardings of arguments and results on a mesh.
SAME = PartitionSpec()  # replicated on all devices
ROWS = PartitionSpec(DATA)  # axis 0 is the rows of a batch
CACHES = PartitionSpec(DATA, MODEL)  # two axes in front of those that programs see: devices on "data" and on "model"
SECOND_HEADS = PartitionSpec(None, MODEL)  # axis 1 is KV heads
WEIGHTS = "weights"  # stands for the partition specs of a decoder layer's weights


@dataclasses.dataclass(frozen=True)
class HeadShards:
    """How a model's KV heads are dealt out to the devices on "model", as many to each."""

    devices: int  # devices along that axis, n
    order: Orders  # `[layers][H_kv]`: heads of device i are at the places from i H_kv / n on

    def heads(self, layer: int | Array) -> Heads:
        """The heads of the device that runs a program. Of a traced layer, `of_devices` are those of the first."""
        order = np.asarray(self.order, np.int32).reshape(len(self.order), self.devices, -1)
        of_devices = order[layer if isinstance(layer, int) else 0]
        numbers = part_of_device(of_devices if isinstance(layer, int) else jnp.asarray(order)[layer])
        return Heads(numbers, tuple(map(tuple, of_devices.tolist())), MODEL)


class PerDevice:
    """A pytree of each device of a mesh; outside of programs its arrays have two more axes in front."""


def part_of_device(values: Shaped[Array | np.ndarray, "devices ..."]) -> Shaped[Array, ...]:
    """Of something for each device on "model", that of the device which runs a program."""
    return jax.lax.dynamic_index_in_dim(jnp.asarray(values), jax.lax.axis_index(MODEL), keepdims=False)


def mean_of_devices(x: Shaped[Array, "*s"], shards: HeadShards | None) -> Shaped[Array, "*s"]:
    """The mean over devices on "model" of a value of each device's heads."""
    return x if shards is None else jax.lax.pmean(x, MODEL)


class OverMesh:
    """A function of a model, arrays and static keywords, for one device or as one program of all devices of a mesh.

    Over a mesh it is traced for one device: batches, heads and caches are its share. `inputs` and `outputs` are
    partition specs of its arguments but the model and of its results, or pytree prefixes of them.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any) -> None:
        self._function, self._inputs, self._outputs = function, tuple(inputs), outputs
        functools.update_wrapper(self, function)

    def __call__(self, lm: LM, *args: Any, **static: Any) -> Any:
        if (mesh := lm.mesh) is None:
            return self._function(lm, *args, **static)
        given, args = (lm.parameter_specs, *self._inputs_of(lm, args)), (lm.params, *args)
        leaves, structure = jax.tree.flatten(args)
        specs = jax.tree.leaves(jax.tree.broadcast(given, args, is_leaf=_is_spec), is_leaf=_is_spec)
        # Arrays without elements stay outside and are created inside: Shardy's canonicalization crashes on those that
        # go in and are used (seen with JAX 0.11.2).
        filled = [np.size(leaf) > 0 for leaf in leaves]

        def on_device(there: list[Any]) -> Any:
            inside = iter(there)
            parts = [
                next(inside) if full else jnp.zeros(NamedSharding(mesh, spec).shard_shape(leaf.shape), leaf.dtype)
                for leaf, spec, full in zip(leaves, specs, filled, strict=True)
            ]
            params, *own = _with_arrays(jax.tree.unflatten(structure, parts), lambda array: array[0, 0])
            return _with_arrays(self._function(lm.on_device(params), *own, **static), lambda array: array[None, None])

        # `check_vma` would put the mesh axes over which values vary into their types, and each loop would have to begin
        # with values of the types that it ends with. Values that are replicated over an axis stay replicated.
        options: Any = {"mesh": mesh, "in_specs": (list(itertools.compress(specs, filled)),), "check_vma": False}
        return jax.shard_map(on_device, **options, out_specs=self._outputs)(list(itertools.compress(leaves, filled)))

    def _inputs_of(self, lm: LM, args: Sequence[Any]) -> tuple[Any, ...]:
        def of_layer(weights: Any) -> Any:
            dtype = min((leaf.dtype for leaf in jax.tree.leaves(weights)), key=lambda dtype: dtype.itemsize)
            return parameter_specs(lm.config, dtype)["layers"][0]

        return tuple(of_layer(arg) if spec is WEIGHTS else spec for spec, arg in zip(self._inputs, args, strict=False))

    def place(self, lm: LM, args: Sequence[Any]) -> tuple[Any, ...]:
        """Places the arguments after the model on its mesh. Already placed arrays and shapes pass through."""
        put, args = functools.partial(place, mesh=lm.mesh), tuple(args)
        specs = jax.tree.broadcast(self._inputs_of(lm, args), args, is_leaf=_is_spec)
        return jax.tree.map(put, specs, args, is_leaf=_is_spec)


def mesh_name(mesh: Mesh | None) -> str:
    """Devices on "data" x devices on "model", as `parse_mesh` takes them."""
    return f"{axis_size(mesh, DATA)}x{axis_size(mesh, MODEL)}"


def any_row(flags: Bool[Array, " B"], mesh: Mesh | None) -> Bool[Array, ""]:
    """Whether it is so for any row of a batch, on whichever device."""
    found = jnp.any(flags)
    if axis_size(mesh, DATA) == 1:
        return found
    return jax.lax.pmax(found.astype(jnp.int32), DATA) > 0


def rows_of_device(lm: LM, rows: int, what: str) -> int:
    """Rows of a batch that each device has; `what` names them in the error where they cannot be shared out."""
    devices = axis_size(lm.mesh, DATA)
    multiple = f"must be a multiple of {devices}, the devices on {DATA!r} of the mesh"
    require(rows % devices == 0, f"{what} are {rows}: {multiple}")
    return rows // devices


def agreed(number: int, mesh: Mesh | None) -> int:
    """The first process's number, of a clock for example, where several share a mesh: they run the same programs."""
    if mesh is None or not mesh.is_multi_process:
        return number
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return int(broadcast_one_to_all(np.int32(number)))


def on_host(arrays: Any) -> Any:
    """Arrays of a pytree on the host, all at once, since each waits; gathered where other processes hold parts."""

    def is_remote(x: Any) -> bool:
        return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)

    if not any(map(is_remote, jax.tree.leaves(arrays))):
        return jax.device_get(arrays)
    from jax.experimental.multihost_utils import process_allgather

    def of_all(x: Any) -> Any:
        return process_allgather(x, tiled=True) if is_remote(x) else jax.device_get(x)

    return jax.tree.map(of_all, arrays)


def _with_arrays(tree: Any, change: Callable[[Array], Array]) -> Any:
    """A tree whose `PerDevice` parts have other arrays: outside of programs with axes for the devices in front."""

    def changed(x: Any) -> Any:
        return jax.tree.map(change, x) if isinstance(x, PerDevice) else x

    return jax.tree.map(changed, tree, is_leaf=lambda x: isinstance(x, PerDevice))


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def place(spec: PartitionSpec, x: Any, mesh: Any) -> Any:
    """Places an array on a mesh. Already placed arrays and shapes pass through."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    wanted = NamedSharding(mesh, spec)
    lies = getattr(x, "sharding", None)
    if lies is not None and lies.is_equivalent_to(wanted, np.ndim(x)):
        return x
    if wanted.is_fully_addressable:
        return jax.device_put(x, wanted)
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        return jax.random.wrap_key_data(place(spec, jax.random.key_data(x), mesh), impl=jax.random.key_impl(x))
    # Every process has the whole value, and puts its own devices' parts of it there.
    value = np.asarray(x)
    return jax.make_array_from_callback(value.shape, wanted, lambda index: value[index])
