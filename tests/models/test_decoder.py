"""The decoder in chunks, of its tail and in bfloat16."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_decoders import random_decoder

from tca_jax.models import decoder as decoder_module
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import RMSNorm

NO_STATES = (None, None)


def causal(layer, q, k, v, state):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), state


def make(config, seed=0, dtype=jnp.float32):
    """About what training begins with."""
    return random_decoder(
        config, lambda rng, shape: 0.02 * rng.standard_normal(shape) if len(shape) > 1 else np.ones(shape), dtype, seed
    )


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
    whole = hidden_states(*nnx.split(make(config)), *inputs(config))
    monkeypatch.setattr(decoder_module, "_CHUNK_ELEMENTS", chunk * config.intermediate_size)
    arguments = (*nnx.split(make(config)), *inputs(config))
    program = str(jax.make_jaxpr(hidden_states, static_argnums=0)(*arguments))
    assert program.count("scan[") == 2 * config.num_layers  # before attention and after it
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(close, hidden_states(*arguments), whole)  # and kept keys are not overwritten


TAIL_LENGTHS = (11, 2, 7)


def dense(lengths, tail, last_layer):
    """Exact causal attention of a padded batch, of the last layer's tail where one is asked for."""

    def attention(layer, q, k, v, state):
        places = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        if tail is not None and layer == last_layer:
            places = jnp.maximum(lengths[:, None] - tail + jnp.arange(tail), 0)
        visible = jnp.arange(k.shape[1]) <= places[:, None, :, None]
        return jax.nn.dot_product_attention(q, k, v, mask=visible), q.shape

    return attention


def of_tail(decoder, tail):
    """Hidden states and the shapes of the queries that each layer's attention got."""
    lengths = jnp.asarray(TAIL_LENGTHS)
    tokens, places = inputs(decoder.config, rows=3)
    positions = jnp.minimum(places, lengths[:, None] - 1)
    attention = dense(lengths, tail, decoder.config.num_layers - 1)
    return decoder(tokens, positions, attention, NO_STATES, lengths=lengths, tail=tail)


def compiled_tail(config, tail):
    """The same of random weights, biases and norms too, as one compiled program."""
    shapes: Any = None

    @jax.jit
    def run(decoder):
        nonlocal shapes
        hidden, shapes = of_tail(decoder, tail)
        return hidden

    decoder = random_decoder(config, lambda rng, shape: 0.3 * rng.standard_normal(shape))
    return run(decoder), shapes


# 33 tokens, at once or in four chunks and the rest; 16 are more than a row has.
@pytest.mark.parametrize(
    ("family", "rope_type", "options", "tail", "chunk"),
    [
        ("llama", "llama3", {}, 1, None),
        ("llama", "default", {"attention_bias": True, "mlp_bias": True}, 3, 8),
        ("qwen2", "dynamic", {}, 16, 8),
        ("qwen3", "yarn", {}, 3, 8),
        ("qwen3", "default", {"attention_bias": True, "num_hidden_layers": 1}, 1, None),
    ],
)
def test_the_tail_ends_all_hidden_states(family, rope_type, options, tail, chunk, config_entries, monkeypatch):
    config = ModelConfig.from_hf(config_entries(family, rope_type, **options))
    monkeypatch.setattr(f"{__name__}.NO_STATES", (None,) * config.num_layers)
    whole, _ = compiled_tail(config, None)
    if chunk is not None:
        monkeypatch.setattr(decoder_module, "_CHUNK_ELEMENTS", chunk * config.intermediate_size)
    hidden, query_shapes = compiled_tail(config, tail)
    heads = (config.num_heads, config.head_dim)
    assert query_shapes == (*((3, 11, *heads),) * (config.num_layers - 1), (3, tail, *heads))
    assert hidden.shape == (3, tail, config.hidden_size)
    assert bool(jnp.isfinite(hidden).all())
    for row, length in enumerate(TAIL_LENGTHS):
        kept = min(tail, length)
        np.testing.assert_allclose(hidden[row, -kept:], whole[row, length - kept : length], rtol=1e-5, atol=1e-5)


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
    decoder = make(config)

    def logits(tokens, positions):
        hidden, _ = decoder(tokens, positions, lambda layer, q, k, v, state: (q, state), NO_STATES)
        return decoder.logits(hidden)

    program = " ".join(str(jax.make_jaxpr(logits)(*inputs(config))).split())
    assert program.count("dot_general[") == 2 * 4 + 1
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 2 * 4 + 1
