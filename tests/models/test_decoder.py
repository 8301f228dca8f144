"""The decoder in chunks and in bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_decoders import causal, random_decoder, without_zeros

from tca_jax.models import decoder as decoder_module
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import RMSNorm

NO_STATES = (None, None)


def inputs(config, rows=2, length=11):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, length), np.int32)
    return jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(length), (rows, length))


def keeping(layer, q, k, v, state):
    return causal(layer, q, k, v, None)[0], (k, v)


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(graphdef, weights, tokens, positions):
    """And all layers' keys and values."""
    return nnx.merge(graphdef, weights)(tokens, positions, keeping, NO_STATES)


@pytest.fixture
def config(config_entries):
    return ModelConfig.from_hf(config_entries("qwen3", "yarn"))


@pytest.mark.parametrize("chunk", [8, 11])  # 22 tokens: two chunks of 8 and the rest
def test_chunks_of_tokens_change_nothing(chunk, config, monkeypatch):
    whole = hidden_states(*nnx.split(random_decoder(config, without_zeros)), *inputs(config))
    monkeypatch.setattr(decoder_module, "_CHUNK_ELEMENTS", chunk * config.intermediate_size)
    arguments = (*nnx.split(random_decoder(config, without_zeros)), *inputs(config))
    program = str(jax.make_jaxpr(hidden_states, static_argnums=0)(*arguments))
    assert program.count("scan[") == 2 * config.num_layers  # before attention and after it
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), hidden_states(*arguments), whole)


def test_norms_round_once(config):
    """From float32 weights and statistics to bfloat16, as training needs it."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 128)), jnp.bfloat16)
    norm = RMSNorm(128, eps=1e-5, param_dtype=jnp.float32)
    norm.scale[...] = jnp.asarray(1 + rng.normal(size=128) / 100, jnp.float32)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5) * np.asarray(norm.scale[...], np.float64)
    ours = norm(x)
    assert ours.dtype == jnp.bfloat16
    assert np.mean(np.asarray(ours) == np.asarray(jnp.asarray(exact, jnp.bfloat16))) > 0.999


def test_float32_products_have_full_precision(config):
    """On a GPU the default would be TF32, which no test on a CPU would notice."""
    decoder = random_decoder(config, without_zeros)

    def logits(tokens, positions):
        hidden, _ = decoder(tokens, positions, lambda layer, q, k, v, state: (q, state), NO_STATES)
        return decoder.logits(hidden)

    program = " ".join(str(jax.make_jaxpr(logits)(*inputs(config))).split())
    assert program.count("dot_general[") == 2 * 4 + 1
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 2 * 4 + 1
