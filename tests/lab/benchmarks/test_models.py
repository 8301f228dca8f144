"""Shapes with random weights, and budgets of a chosen share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx
from jax.sharding import AxisType

import tca_jax
from tca_jax.lab.benchmarks.models import CONFIGS, Share, parse_method, random_model, unequal_candidates
from tca_jax.models.decoder import Decoder
from tca_jax.models.names import parameters
from tca_jax.models.sharding import parameter_sharding

BILLIONS = {"llama3.1-8b": 8.03, "qwen2.5-7b": 7.62, "llama3.1-70b": 70.55, "llama3.2-1b": 1.24}


@pytest.mark.parametrize("name", BILLIONS)
def test_shapes_have_the_parameters_of_their_models(name):
    decoder = nnx.eval_shape(lambda: Decoder(CONFIGS[name], dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    count = sum(parameter.variable.size for parameter in parameters(decoder))
    assert count / 1e9 == pytest.approx(BILLIONS[name], abs=0.005)


def test_a_random_model_generates():
    lm = random_model("tiny", 1, max_positions=10**6)
    assert (lm.config.num_layers, lm.config.max_context) == (1, 10**6)
    assert len(tca_jax.generate(lm, [[1, 2, 3]], max_new_tokens=2).tokens[0]) == 2


def test_a_random_model_stores_fp8():
    lm = random_model("tiny", 1, weights="fp8", kv="fp8")
    assert lm.weights_dtype == lm.cache_dtype == jnp.float8_e4m3fn
    (codes,) = (p for p in parameters(lm.decoder) if p.path[-2:] == ("qkv", "codes"))
    assert 0.8 * 56 < float(jnp.std(codes.variable[...].astype(jnp.float32))) < 1.2 * 56  # an eighth of 448


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_devices_draw_their_own_weights():
    mesh = jax.make_mesh((1, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:2])
    lm, alone = (random_model("tiny", mesh=each) for each in (mesh, None))
    assert lm.graphdef == alone.graphdef
    for ours, theirs in zip(parameters(lm.decoder), parameters(alone.decoder), strict=True):
        value, other = ours.variable[...], theirs.variable[...]
        assert (value.shape, value.dtype) == (other.shape, other.dtype)
        assert value.sharding.is_equivalent_to(parameter_sharding(ours, lm.mesh), value.ndim)
        if value.ndim > 1:
            parts = [np.asarray(part.data) for part in value.addressable_shards]
            assert np.intersect1d(*parts).size < 0.01 * parts[0].size


@pytest.mark.parametrize("text", ["0.2", "0.05:0.25", "0.05:0.25+16"])
def test_a_share_is_written_as_it_is_parsed(text):
    assert str(Share.parse(text)) == f"TCA {text}"


@pytest.mark.parametrize("text", ["much", "1", "0", "0.3:0.2", "0.1:0.2:0.3", "0.2+x"])
def test_other_shares_are_refused(text):
    with pytest.raises(typer.BadParameter, match="must be"):
        Share.parse(text)


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("heads", [4, 8])
def test_unequal_budgets_have_the_share(share, heads):
    config = tca_jax.TCAConfig()
    candidates = unequal_candidates(config, heads, share)
    budgets = np.asarray(tca_jax.candidate_budgets(config, 1000))[list(candidates)]
    assert budgets.mean() / config.block_size == pytest.approx(share, abs=0.01)
    assert len(set(candidates)) > 2


def test_two_shares_make_heads_dense_in_the_cache():
    config = tca_jax.TCAConfig()
    policy = Share(0.25, prefill=0.05).method(config, 8).cache
    cache, prefill = policy.rows(0, 8), policy.prefill_rows(0, 8)
    dense = cache == config.num_candidates
    assert dense.sum() == 2
    assert len(set(prefill.tolist())) == 1
    assert (cache[~dense] == prefill[~dense]).all()


@pytest.mark.parametrize(("blocks", "expected"), [(3, [1, 0] * 3), (9, [2, 1] * 3), (12, [2] * 6)])
def test_heads_that_read_blocks_are_spread_over_layers(blocks, expected):
    policy = Share(0.25, blocks=blocks).method(tca_jax.TCAConfig(), 2, 6).cache
    counts = [int(policy.reads(layer, 2, "blocks").sum()) for layer in range(6)]
    assert counts == expected
    with pytest.raises(tca_jax.UserError, match="there are 12 KV heads"):
        Share(0.25, blocks=13).method(tca_jax.TCAConfig(), 2, 6)


def test_methods_are_written_with_options():
    assert parse_method("streaming:window=512").cache.window == 512
    with pytest.raises(tca_jax.UserError, match="--methods snap: 'snap' is not registered"):
        parse_method("snap")
