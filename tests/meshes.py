"""Tiny models on one device and on meshes, for tests that compare the two."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from random_decoders import random_decoder, with_heads, without_zeros
from tiny import CONFIG, TCA

import tca_jax
from tca_jax.engine.placement import balanced_orders
from tca_jax.methods.candidates import kept_share
from tca_jax.models.names import MODEL
from tca_jax.models.sharding import axis_size, device_graphdef

needs_8_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

#: Rows of budgets that lie badly: the heads of the largest caches are neighbours.
ROWS = [[14, 14, 0, 2], [5, 1, 14, 3]]


def mesh_of(shape: tuple[int, ...], axes: tuple[str, ...] = ("data", "model"), kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh over the first devices; skips the test where there are fewer."""
    devices = jax.devices()[: int(np.prod(shape))]
    if len(devices) < np.prod(shape):
        pytest.skip(f"needs {np.prod(shape)} devices")
    return jax.make_mesh(shape, axes, (kind,) * len(axes), devices=devices)


@functools.lru_cache
def lm_of(
    mesh: Mesh | None = None,
    group: int = 2,
    kv_heads: int = 4,
    dtype=jnp.float32,
    name: str = "tiny",
    rows: tuple[tuple[int, ...], ...] | None = None,
    **changes,
) -> tca_jax.LM:
    """A random model without zeros. On a mesh, caches of TCA with such budgets balance."""
    sizes = {"num_kv_heads": kv_heads, "num_heads": kv_heads * group, "hidden_size": 64, "intermediate_size": 96}
    config = dataclasses.replace(CONFIG, **{**sizes, **changes})
    lm = tca_jax.LM.from_decoder(random_decoder(config, without_zeros, dtype), mesh=mesh, name=name)
    if mesh is None:
        return lm
    candidates = np.array(with_tca(lm, rows).method.cache.candidates, np.int32)
    orders = balanced_orders(kept_share(TCA, config.max_positions, candidates), axis_size(lm.mesh, MODEL))
    return tca_jax.LM.from_decoder(with_heads(lm.decoder, orders), mesh=mesh, head_orders=orders, name=name)


def chunks_of(tokens: int, lm: tca_jax.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of models as wide as `lm`, made from now on, take so many tokens at a time, on a mesh, too."""
    monkeypatch.setattr("tca_jax.models.decoder._CHUNK_ELEMENTS", tokens * lm.config.intermediate_size)
    monkeypatch.setattr("tca_jax.models.sharding._PART_ELEMENTS", 0)
    device_graphdef.cache_clear()


def with_tca(lm: tca_jax.LM, rows=None, **options) -> tca_jax.LM:
    """The model under TCA, with budgets that differ from head to head."""
    layers, heads = range(lm.config.num_layers), range(lm.config.num_kv_heads)
    rows = [[ROWS[layer % 2][head % 4] for head in heads] for layer in layers] if rows is None else rows
    return lm.with_method("tca", candidates=rows, config=TCA, **options)
