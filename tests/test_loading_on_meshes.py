"""`load(..., mesh=)`: the same model over several devices, its heads where the profile's budgets balance."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from tiny import CONFIG, TCA

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.params import save_decoder

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")

ROWS = np.array([[14, 14, 0, 0], [0, 3, 14, 14]])  # on two devices, one would have both dense heads of a layer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = dataclasses.replace(CONFIG, num_heads=8, num_kv_heads=4)
    decoder = Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(decoder)
    sharp = nnx.merge(graphdef, jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, params))
    folder = tmp_path_factory.mktemp("checkpoint")
    save_decoder(folder, sharp, jnp.float32)
    return folder


def mesh_of(shape, axes=("data", "model")):
    return jax.make_mesh(shape, axes, (AxisType.Explicit,) * len(axes), devices=jax.devices()[: int(np.prod(shape))])


def profile_of(folder) -> Profile:
    lm = tca_jax.load(folder)
    return dataclasses.replace(Profile.uniform(TCA, 2, 4, 0), candidates=ROWS, fingerprint=lm.fingerprint)


def test_heads_are_read_where_the_profile_wants_them(folder):
    profile = profile_of(folder)
    lm = tca_jax.load(folder, profile=profile, mesh=mesh_of((1, 2)))
    dense = [[ROWS[layer][head] for head in order] for layer, order in enumerate(lm.head_orders)]
    assert [rows.index(14) // 2 for rows in dense] == [0, 0]
    assert [(3 - rows[::-1].index(14)) // 2 for rows in dense] == [1, 1]  # one on each device
    alone = tca_jax.load(folder).decoder
    for layer, order in enumerate(lm.head_orders):
        kernel = lm.decoder.layers[layer].attention.qkv.kernel[...]
        np.testing.assert_array_equal(kernel, alone.layers[layer].attention.qkv.kernel[...][:, list(order)])
    assert lm.fingerprint == fingerprint(alone)
