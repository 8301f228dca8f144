"""The pool of pages of each device of a mesh: as large as it must be, and answers as on one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hlo import operations
from meshes import lm_of, mesh_of, needs_8_devices, with_tca
from tiny import random_prompt

import tca_jax
from tca_jax.engine import request
from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.mesh import balanced_orders, balanced_together
from tca_jax.programs import results_of

LAYERS = 4
#: One dense head of four in each layer, always the same.
DENSE = ((0, 14, 2, 1),) * LAYERS
DOCUMENTS = [random_prompt(0, 330), random_prompt(1, 289)]


def dressed(shape: tuple[int, int] | None = None, layers: int = LAYERS) -> tca_jax.LM:
    mesh, rows = None if shape is None else mesh_of(shape), DENSE[:layers]
    return with_tca(lm_of(mesh, num_layers=layers, rows=rows), rows)


def held_by_devices(arrays) -> set[int]:
    """Bytes of arrays on each device that has any."""
    held: dict[jax.Device, int] = {}
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return set(held.values())


def keys_and_values(context: tca_jax.Context) -> list[jax.Array]:
    return [context.cache.k, context.cache.v]


@pytest.fixture(scope="module")
def shared() -> tca_jax.Context:
    """The same on four devices."""
    return tca_jax.prefill(dressed((1, 4)), DOCUMENTS)


def test_devices_hold_about_as_much():
    loads = np.tile([1000, 50, 40, 30, 20, 900, 10, 60], (6, 1))
    orders = balanced_together(loads, 4)
    assert all(sorted(order) == list(range(8)) for order in orders)
    by_device = np.take_along_axis(loads, np.asarray(orders), axis=1).reshape(6, 4, 2)
    totals = by_device.sum(axis=(0, 2))
    assert totals.max() <= 1.02 * totals.mean()
    assert by_device.sum(axis=2).max() == 1010  # the two largest of a layer are never on one device
    assert (np.diff(by_device, axis=2) <= 0).all()  # the largest of a device first


def test_balanced_heads_are_not_moved():
    policy = dressed().method.cache
    own = (tuple(range(4)),) * LAYERS
    dealt = balanced_orders(policy, LAYERS, 4, 4, 4096)
    assert sorted(order.index(1) for order in dealt) == [0, 1, 2, 3]  # each device has the dense head of one layer
    uniform = tca_jax.methods.get("tca", candidates=3, config=policy.config).cache
    assert balanced_orders(uniform, LAYERS, 4, 4, 4096) == own


def test_pages_of_each_device_are_named_once():
    pages = (((4, 1), (2, 0)), ((0, 1), (7, 2)), ((3, 1), (0, 0)))  # [layers][devices][Hkv]
    layout = CacheLayout(8, 16, 3, pages, 5, 100)
    for device, kept in enumerate((10, 11)):
        named = np.concatenate([np.asarray(table).ravel() for table in layout.tables(device)])
        named = np.unique(named[named < layout.num_pages])
        assert len(named) == 3 * (3 * 2 * 3 + kept)
        assert named.max() < layout.num_pages == 3 * (18 + 11)
    assert layout.kept_columns == (4, 7, 3)


@needs_8_devices
def test_devices_allocate_what_statistics_say(shared):
    assert held_by_devices(keys_and_values(shared)) == {shared.stats.kv_cache_bytes_per_device}
    one = tca_jax.prefill(dressed(), DOCUMENTS).stats.kv_cache_bytes
    assert one <= shared.stats.kv_cache_bytes <= 1.1 * one


@needs_8_devices
def test_no_program_over_a_context_copies_the_pool(shared):
    lm = dressed((1, 4))
    options = {"max_new_tokens": 20, "seed": 0, "stop": (), "stop_token_ids": (), "backend": "auto"}
    asked = request.Request.create(lm, [[1] * 9, [2] * 14], shared, sampling=tca_jax.Sampling(), **options)
    program, _ = asked._prepare_start()
    state = asked._started(results_of(program))
    step = asked.prepare_step(state)
    shape = shared.cache.k.shape[2:]
    for executable in (program, step):
        text = executable._executable.as_text()
        found = operations(text, {shape, (1, 1, *shape)})
        assert "parameter" in found
        assert found <= {"parameter", "get-tuple-element", "bitcast"}
