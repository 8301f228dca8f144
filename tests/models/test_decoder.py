"""The decoder under jit and grad, in chunks and in bfloat16: what callers rely on beside its logits."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tca_jax.models import decoder as decoder_module
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder

NO_STATES = (None, None)


def causal(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), state


def make(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Decoder:
    return Decoder(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(seed))


def inputs(config: ModelConfig, rows: int = 2, length: int = 11) -> tuple[jax.Array, jax.Array]:
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, length), np.int32)
    return jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(length), (rows, length))


def loss(graphdef: Any, weights: Any, tokens: jax.Array, positions: jax.Array, remat: bool) -> jax.Array:
    decoder = nnx.merge(graphdef, weights)
    hidden, _ = decoder(tokens, positions, causal, NO_STATES, remat=remat)
    logits = jax.nn.log_softmax(decoder.logits(hidden)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))


loss_and_gradients = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=(0, 4))


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(graphdef: Any, weights: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, weights)(tokens, positions, causal, NO_STATES)[0]


@pytest.fixture
def config(config_entries: Any) -> ModelConfig:
    return ModelConfig.from_hf(config_entries("qwen3", "yarn"))


def test_models_of_one_config_share_a_compilation(config: ModelConfig) -> None:
    hidden_states.clear_cache()
    results = [hidden_states(*nnx.split(make(config, seed)), *inputs(config)) for seed in range(3)]
    assert not np.allclose(results[0], results[1])
    assert hidden_states._cache_size() == 1


def test_rematerialised_gradients_are_the_same_and_reach_every_weight(config: ModelConfig) -> None:
    arguments = (*nnx.split(make(config)), *inputs(config))
    _, kept = loss_and_gradients(*arguments, False)
    _, recomputed = loss_and_gradients(*arguments, True)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
        assert jnp.abs(a).max() > 0
    program = jax.make_jaxpr(loss, static_argnums=(0, 4))
    assert "remat" in str(program(*arguments, True))
    assert "remat" not in str(program(*arguments, False))


def test_gradient_descent_lowers_the_loss(config: ModelConfig) -> None:
    graphdef, weights = nnx.split(make(config))
    start, _ = loss_and_gradients(graphdef, weights, *inputs(config), True)
    assert abs(float(start) - math.log(config.vocab_size)) < 0.3  # an untrained model guesses evenly
    for _ in range(20):
        value, gradients = loss_and_gradients(graphdef, weights, *inputs(config), True)
        weights = jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients)
    assert float(value) < float(start) - 0.5


@pytest.mark.parametrize("chunk", [8, 11])  # 22 tokens: two chunks of 8 and the rest
def test_chunks_of_tokens_change_nothing(chunk: int, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hidden_states(*nnx.split(make(config)), *inputs(config))
    monkeypatch.setattr(decoder_module, "_CHUNK_ELEMENTS", chunk * config.intermediate_size)
    arguments = (*nnx.split(make(config)), *inputs(config))
    program = str(jax.make_jaxpr(hidden_states, static_argnums=0)(*arguments))
    assert program.count("scan[") == 2 * config.num_layers  # before attention and after it
    np.testing.assert_allclose(hidden_states(*arguments), whole, atol=1e-5)


def test_chunks_overwrite_no_keys_that_attention_keeps(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def keeping(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return causal(layer, q, k, v, None)[0], (k, v)

    def kept(graphdef: Any, weights: Any, tokens: jax.Array, positions: jax.Array) -> Any:
        return nnx.merge(graphdef, weights)(tokens, positions, keeping, NO_STATES)[1]

    run = jax.jit(kept, static_argnums=0)
    whole = run(*nnx.split(make(config)), *inputs(config))
    monkeypatch.setattr(decoder_module, "_CHUNK_ELEMENTS", 8 * config.intermediate_size)
    chunked = run(*nnx.split(make(config)), *inputs(config))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), chunked, whole)


def test_chunks_run_under_shard_map(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hidden_states(*nnx.split(make(config)), *inputs(config))
    monkeypatch.setattr(decoder_module, "_CHUNK_ELEMENTS", 8 * config.intermediate_size)
    graphdef, weights = nnx.split(make(config))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(
        lambda *arguments: hidden_states(graphdef, *arguments),
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), rows, rows),
        out_specs=rows,
    )
    np.testing.assert_allclose(jax.jit(sharded)(weights, *inputs(config)), whole, atol=1e-5)


def test_each_layer_gets_its_own_state_and_index(config: ModelConfig) -> None:
    seen = []

    def attention(layer: int, q: Any, k: Any, v: Any, state: Any) -> Any:
        seen.append((layer, state, q.shape, k.shape, v.shape))
        return q, state + 1

    _, states = make(config)(*inputs(config), attention, (10, 20))
    shapes = ((2, 11, 4, 12), (2, 11, 2, 12), (2, 11, 2, 12))
    assert seen == [(0, 10, *shapes), (1, 20, *shapes)]
    assert states == (11, 21)
    with pytest.raises(ValueError, match="states has 1 entries: must be one for each of 2 layers"):
        make(config)(*inputs(config), attention, (10,))


def test_bfloat16_stays_bfloat16_up_to_the_logits(config: ModelConfig) -> None:
    exact, rounded = make(config), make(config, dtype=jnp.bfloat16)
    dtypes = set()

    def attention(layer: int, q: Any, k: Any, v: Any, state: Any) -> Any:
        dtypes.update({q.dtype, k.dtype, v.dtype})
        return causal(layer, q, k, v, state)

    hidden, _ = rounded(*inputs(config), attention, NO_STATES)
    assert dtypes == {jnp.dtype(jnp.bfloat16)} == {hidden.dtype}
    logits = rounded.logits(hidden)
    assert logits.dtype == jnp.float32
    expected = exact.logits(hidden_states(*nnx.split(exact), *inputs(config)))
    np.testing.assert_allclose(logits, expected, atol=0.05 * float(jnp.abs(expected).max()))


def test_float32_products_are_asked_for_in_full_precision(config: ModelConfig) -> None:
    """On a GPU the default would be TF32, which no test on a CPU would notice."""
    decoder = make(config)

    def logits(tokens: jax.Array, positions: jax.Array) -> jax.Array:
        hidden, _ = decoder(tokens, positions, lambda layer, q, k, v, state: (q, state), NO_STATES)
        return decoder.logits(hidden)

    program = " ".join(str(jax.make_jaxpr(logits)(*inputs(config))).split())
    assert program.count("dot_general[") == 2 * 4 + 1
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 2 * 4 + 1


def test_one_product_holds_queries_key_and_value_of_each_kv_head_side_by_side(config_entries: Any) -> None:
    config = ModelConfig.from_hf(config_entries("qwen2", num_attention_heads=6, head_dim=8))
    attention = make(config).layers[1].attention
    rng = np.random.default_rng(0)
    x, bias = rng.normal(size=(3, 32)).astype(np.float32), rng.normal(size=(2, 3 + 2, 8)).astype(np.float32)
    attention.qkv.bias[...] = jnp.asarray(bias)
    kernel = np.asarray(attention.qkv.kernel[...], np.float64)
    assert kernel.shape == (32, 2, 3 + 2, 8)
    products = np.einsum("tD,Dhgd->thgd", x, kernel) + bias
    unrotated = jnp.ones((3, 4)), jnp.zeros((3, 4))
    q, k, v = attention.project(jnp.asarray(x), *unrotated)
    for head in range(6):
        np.testing.assert_allclose(q[:, head], products[:, head // 3, head % 3], atol=1e-5)
    np.testing.assert_allclose(k, products[:, :, 3], atol=1e-5)
    np.testing.assert_allclose(v, products[:, :, 4], atol=1e-5)


def test_padding_tokens_outside_the_vocabulary_do_no_harm(config: ModelConfig) -> None:
    tokens, positions = inputs(config)
    weights = nnx.split(make(config))
    clean = hidden_states(*weights, tokens, positions)
    garbage = hidden_states(*weights, tokens.at[:, 9:].set(2**31 - 1), positions)
    np.testing.assert_array_equal(clean[:, :9], garbage[:, :9])
    assert bool(jnp.isfinite(garbage).all())


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_any_leading_shape(tied: bool, config_entries: Any) -> None:
    decoder = make(ModelConfig.from_hf(config_entries(tie_word_embeddings=tied)))
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 32)), jnp.float32)
    weights = decoder.embedding[...].T if tied else decoder.head.kernel[...]
    expected = np.asarray(hidden, np.float64) @ np.asarray(weights, np.float64)
    np.testing.assert_allclose(decoder.logits(hidden), expected, atol=1e-5)
    np.testing.assert_allclose(decoder.logits(hidden[0, 0]), expected[0, 0], atol=1e-5)


def test_residual_projections_start_smaller(config_entries: Any) -> None:
    layer = make(ModelConfig.from_hf(config_entries("llama"))).layers[0]
    for kernel in (layer.attention.qkv.kernel, layer.mlp.gate_up.kernel):
        assert abs(float(kernel[...].std()) / 0.02 - 1) < 0.15
    for kernel in (layer.attention.o.kernel, layer.mlp.down.kernel):
        assert abs(float(kernel[...].std()) / (0.02 / math.sqrt(2 * 2)) - 1) < 0.15
