"""How much of a model each device of a mesh holds, by the layouts of weights and caches alone."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.mesh import HeadShards, balanced_orders
from tca_jax.methods.base import CachePolicy
from tca_jax.models.config import ModelConfig
from tca_jax.models.names import MODEL
from tca_jax.models.sharding import DATA, abstract_parameters, axis_size, check_mesh, parameter_sharding


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes of what lies in a device's memory from the first new token to the last.

    Attributes:
        weights: Of weights.
        caches: Of the KV caches of all layers.
    """

    weights: int
    caches: int

    @property
    def all(self) -> int:
        """Of both."""
        return self.weights + self.caches


def held_by_device(
    config: ModelConfig,
    policy: CachePolicy,
    mesh: Mesh | AbstractMesh | None,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    *,
    weights: DTypeLike | None = None,
    kv: DTypeLike | None = None,
) -> Held:
    """What every device of a mesh holds of a model.

    Args:
        config: The model's shape.
        policy: What stays in its caches.
        mesh: The devices; None for one.
        batch: Rows, a multiple of the devices on "data".
        prompt_tokens: Padded prompt length.
        new_tokens: Most tokens of an answer.
        weights: What projections are stored in; None for the model's own dtype.
        kv: What caches are stored in; None for the model's own dtype.

    Raises:
        ValueError: the mesh does not fit the model.
    """
    if mesh is not None:
        check_mesh(mesh, config)
    c, devices, dtype = config, axis_size(mesh, MODEL), jnp.dtype(config.dtype_name)
    heads = None
    if devices > 1:
        orders = balanced_orders(policy, c.num_layers, c.num_kv_heads, devices, c.max_context)
        heads = HeadShards(devices, orders)
    sizes = c.num_layers, c.num_kv_heads, batch // axis_size(mesh, DATA), prompt_tokens, new_tokens - 1
    layout = CacheLayout.plan(policy, *sizes, heads)
    return Held(_weight_bytes(config, mesh, weights or dtype), layout.num_bytes(c.head_dim, kv or dtype))


def over_even_share(
    config: ModelConfig,
    policy: CachePolicy,
    mesh: Mesh | AbstractMesh,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    *,
    weights: DTypeLike | None = None,
    kv: DTypeLike | None = None,
) -> float:
    """What a device holds over its even share: weights are shared by "model", caches by all devices. 1 is perfect.

    More than that are norms, which every device holds, and room in caches, which are as large on all devices as on the
    one that needs most. Arguments and errors are those of `held_by_device`.
    """
    alone, shared = (
        held_by_device(config, policy, devices, batch, prompt_tokens, new_tokens, weights=weights, kv=kv)
        for devices in (None, mesh)
    )
    model, data = axis_size(mesh, MODEL), axis_size(mesh, DATA)
    return shared.all / (alone.weights / model + alone.caches / (model * data))


def _weight_bytes(config: ModelConfig, mesh: Mesh | AbstractMesh | None, stored: DTypeLike) -> int:
    """Bytes of the parts of all weights that a device holds."""
    dtype = jnp.dtype(config.dtype_name)
    total = 0
    for parameter in abstract_parameters(config, jnp.dtype(stored), dtype):
        shape = tuple(parameter.variable.shape)
        part = shape if mesh is None else parameter_sharding(parameter, mesh).shard_shape(shape)
        total += math.prod(part) * parameter.variable.dtype.itemsize
    return total
