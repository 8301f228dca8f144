"""Models of benchmarks over meshes: random weights drawn in their parts, and what a device holds by the layouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from meshes import lm_of, mesh_of
from tiny import TCA

import tca_jax
from tca_jax.engine.lm import KV
from tca_jax.lab.benchmarks.meshes import held_by_device, over_even_share
from tca_jax.lab.benchmarks.models import config_of, random_model
from tca_jax.lab.benchmarks.shares import FULL, Share
from tca_jax.models.names import parameters
from tca_jax.models.projections import WEIGHTS
from tca_jax.models.sharding import parameter_sharding

FOUR = AbstractMesh((1, 4), ("data", "model"))
DEFAULT_KIND = Share(0.25, prefill=0.05)  # a quarter of the heads dense in the cache


def policy_of(config, share):
    return share.method(tca_jax.TCAConfig(), config.num_kv_heads, config.num_layers).cache


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_random_weights_are_drawn_in_their_parts(kind):
    mesh = jax.make_mesh((1, 2), ("data", "model"), (kind,) * 2, devices=jax.devices()[:2])
    lm = random_model("tiny", jax.random.key(0), mesh=mesh)
    alone = random_model("tiny", jax.random.key(0))
    assert lm.graphdef == alone.graphdef
    for ours, theirs in zip(parameters(lm.decoder), parameters(alone.decoder), strict=True):
        value, other = ours.variable[...], theirs.variable[...]
        assert (value.shape, value.dtype) == (other.shape, other.dtype)
        assert value.sharding.is_equivalent_to(parameter_sharding(ours, lm.mesh), value.ndim)
        if value.ndim == 1:
            np.testing.assert_array_equal(value, other)
        else:
            assert float(jnp.std(value)) == pytest.approx(float(jnp.std(other)), rel=0.1)
            parts = [np.asarray(part.data) for part in value.addressable_shards]
            assert np.intersect1d(*parts).size < 0.01 * parts[0].size  # devices do not draw the same numbers


def test_a_large_model_has_the_bytes_of_its_name():
    held = held_by_device(config_of("llama3.1-70b"), policy_of(config_of("llama3.1-70b"), FULL), None, 1, 2**17, 128)
    assert held.weights == pytest.approx(2 * 70.55e9, rel=1e-3)
    assert held.caches == pytest.approx(2 * 2 * 80 * 8 * 128 * 2**17, rel=2e-3)


def test_eight_bits_halve_all_but_embedding_head_and_norms():
    config, sizes = config_of("llama3.1-70b"), (None, 1, 2**17, 128)
    policy = policy_of(config, FULL)
    wide = held_by_device(config, policy, *sizes)
    eight = held_by_device(config, policy, *sizes, weights=WEIGHTS["fp8"], kv=KV["fp8"])
    outer = 2 * 2 * config.vocab_size * config.hidden_size
    assert eight.weights - outer == pytest.approx((wide.weights - outer) / 2, rel=1e-3)
    assert eight.caches == pytest.approx(wide.caches * 129 / 256, rel=1e-3)


@pytest.mark.parametrize("tokens", [2**17, 2**20])
@pytest.mark.parametrize("name", ["qwen2.5-7b", "llama3.1-8b", "llama3.1-70b"])
@pytest.mark.parametrize(("share", "most"), [(FULL, 1.001), (DEFAULT_KIND, 1.01)], ids=str)
def test_models_are_shared_out_about_evenly(share, most, name, tokens):
    config = config_of(name)
    assert 1 <= over_even_share(config, policy_of(config, share), FOUR, 1, tokens, 128) <= most


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_every_device_holds_what_the_layouts_say():
    lm = lm_of(mesh_of((1, 4)), num_layers=4).with_method("tca", candidates=[[0, 14, 2, 1]] * 4, config=TCA)
    held = held_by_device(lm.config, lm.method.cache, lm.mesh, 2, 384, 32)
    assert held.caches == lm.cache_layout(2, 384, 31).num_bytes(lm.config.head_dim, jnp.float32)
    for device in lm.mesh.devices.flat:
        parts = [part for x in jax.tree.leaves(lm.params) for part in x.addressable_shards if part.device == device]
        assert held.weights == sum(part.data.nbytes for part in parts)


def test_heads_of_unequal_caches_are_dealt_out_before_bytes_are_counted():
    config = config_of("llama3.1-8b", num_layers=2)
    config_rows = ((14, 14, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 14, 14))
    policy = tca_jax.methods.configured(tca_jax.TCAConfig(), config_rows).cache
    two = AbstractMesh((2,), ("model",))
    alone, shared = (held_by_device(config, policy, mesh, 1, 2**17, 128) for mesh in (None, two))
    assert shared.caches == pytest.approx(alone.caches / 2, rel=0.01)


def test_what_the_layouts_say_is_what_a_model_and_its_caches_take():
    config, method = config_of("tiny"), DEFAULT_KIND.method(tca_jax.TCAConfig(window=128), 2, 2)
    lm = random_model("tiny", jax.random.key(0)).with_method(method)
    held = held_by_device(config, lm.method.cache, None, 2, 512, 8)
    assert held.weights == sum(x.nbytes for x in jax.tree.leaves(lm.params))
    assert held.caches == lm.cache_layout(2, 512, 7).num_bytes(16, jnp.float32)


def test_rows_of_a_batch_and_their_caches_are_shared_by_data_and_weights_are_not():
    config = config_of("tiny")
    policy = policy_of(config, FULL)
    alone = held_by_device(config, policy, None, 4, 2**15, 8)
    shared = held_by_device(config, policy, AbstractMesh((4,), ("data",)), 4, 2**15, 8)
    assert shared.weights == alone.weights
    assert shared.caches == pytest.approx(alone.caches / 4, rel=0.01)


def test_a_mesh_that_does_not_fit_is_refused():
    config = config_of("qwen2.5-7b")
    with pytest.raises(ValueError, match=r"model=8 devices, but the model has 4 KV heads: 1, 2 or 4 fit"):
        held_by_device(config, policy_of(config, FULL), AbstractMesh((8,), ("model",)), 1, 2**17, 128)
