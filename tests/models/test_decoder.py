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
from random_decoders import random_decoder

from tca_jax.models import decoder as decoder_module
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder, RMSNorm

NO_STATES = (None, None)


def causal(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), state


def make(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Decoder:
    """About what training begins with."""
    return random_decoder(
        config, lambda rng, shape: 0.02 * rng.standard_normal(shape) if len(shape) > 1 else np.ones(shape), dtype, seed
    )


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


def test_rematerialised_gradients_are_the_same(config: ModelConfig) -> None:
    arguments = (*nnx.split(make(config)), *inputs(config))
    _, kept = loss_and_gradients(*arguments, False)
    _, recomputed = loss_and_gradients(*arguments, True)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
        assert jnp.abs(a).max() > 0
    program = jax.make_jaxpr(loss, static_argnums=(0, 4))
    assert "remat" in str(program(*arguments, True))
    assert "remat" not in str(program(*arguments, False))


@pytest.mark.parametrize("chunk", [8, 11])  # 22 tokens: two chunks of 8 and the rest
def test_chunks_of_tokens_change_nothing(chunk: int, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hidden_states(*nnx.split(make(config)), *inputs(config))
    monkeypatch.setattr(decoder_module, "_CHUNK_ELEMENTS", chunk * config.intermediate_size)
    arguments = (*nnx.split(make(config)), *inputs(config))
    program = str(jax.make_jaxpr(hidden_states, static_argnums=0)(*arguments))
    assert program.count("scan[") == 2 * config.num_layers  # before attention and after it
    np.testing.assert_allclose(hidden_states(*arguments), whole, atol=1e-5)


def test_chunks_overwrite_no_kept_keys(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def keeping(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return causal(layer, q, k, v, None)[0], (k, v)

    def kept(graphdef: Any, weights: Any, tokens: jax.Array, positions: jax.Array) -> Any:
        return nnx.merge(graphdef, weights)(tokens, positions, keeping, NO_STATES)[1]

    run = jax.jit(kept, static_argnums=0)
    whole = run(*nnx.split(make(config)), *inputs(config))
    monkeypatch.setattr(decoder_module, "_CHUNK_ELEMENTS", 8 * config.intermediate_size)
    chunked = run(*nnx.split(make(config)), *inputs(config))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), chunked, whole)


TAIL_LENGTHS = (11, 2, 7)


def dense(lengths: jax.Array, tail: int | None, last_layer: int) -> Any:
    """Exact causal attention of a padded batch, of the last layer's tail where one is asked for."""

    def attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        places = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        if tail is not None and layer == last_layer:
            places = jnp.maximum(lengths[:, None] - tail + jnp.arange(tail), 0)
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bmhd,blhd->bhml", q, k, precision="highest") / math.sqrt(q.shape[-1])
        visible = jnp.arange(k.shape[1]) <= places[:, None, :, None]
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        return jnp.einsum("bhml,blhd->bmhd", weights, v, precision="highest"), q.shape

    return attention


def of_tail(decoder: Decoder, tail: int | None, remat: bool = False) -> tuple[jax.Array, Any]:
    """Hidden states and the shapes of the queries that each layer's attention got."""
    lengths = jnp.asarray(TAIL_LENGTHS)
    tokens, places = inputs(decoder.config, rows=3)
    positions = jnp.minimum(places, lengths[:, None] - 1)
    attention = dense(lengths, tail, decoder.config.num_layers - 1)
    return decoder(tokens, positions, attention, NO_STATES, lengths=lengths, tail=tail, remat=remat)


def compiled_tail(config: ModelConfig, tail: int | None) -> tuple[jax.Array, Any]:
    """The same of random weights, as one compiled program."""
    shapes: Any = None

    @jax.jit
    def run(decoder: Decoder) -> jax.Array:
        nonlocal shapes
        hidden, shapes = of_tail(decoder, tail)
        return hidden

    return run(random_weights(config)), shapes


@functools.cache
def whole_hidden_states(config: ModelConfig) -> jax.Array:
    return compiled_tail(config, None)[0]


def random_weights(config: ModelConfig) -> Decoder:
    """Biases and norms drawn too."""
    return random_decoder(config, lambda rng, shape: 0.3 * rng.standard_normal(shape))


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
def test_the_tail_ends_all_hidden_states(
    family: str,
    rope_type: str,
    options: dict[str, Any],
    tail: int,
    chunk: int | None,
    config_entries: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ModelConfig.from_hf(config_entries(family, rope_type, **options))
    monkeypatch.setattr(f"{__name__}.NO_STATES", (None,) * config.num_layers)
    whole = whole_hidden_states(config)
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


@pytest.mark.integration
def test_the_tail_may_be_recomputed(config: ModelConfig) -> None:
    decoder = random_weights(config)
    hidden, _ = of_tail(decoder, 3, remat=True)
    np.testing.assert_array_equal(hidden, of_tail(decoder, 3)[0])


def test_the_last_layer_multiplies_its_tail_alone(config: ModelConfig) -> None:
    def products(tail: int | None) -> list[int]:
        """Tokens in each product of the program."""
        program = jax.make_jaxpr(lambda decoder: of_tail(decoder, tail)[0])(make(config))
        found = [equation for equation in program.eqns if equation.primitive.name == "dot_general"]
        weights = [dot for dot in found if dot.invars[1].aval.shape[0] != 3]  # not those of attention: no batch
        return [math.prod(dot.invars[0].aval.shape[:-1]) for dot in weights]

    assert products(None) == [33] * 8
    assert products(2) == [33] * 4 + [33] + [6] * 4  # keys and values of all; then queries, o, gate and up, down


@pytest.mark.parametrize("tail", [None, 1])
def test_layers_share_buffers_of_keys_and_values(
    tail: int | None, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's compiler makes fresh buffers of all layers at the start."""
    monkeypatch.setattr(decoder_module, "_CHUNK_ELEMENTS", 8 * config.intermediate_size)
    program = jax.make_jaxpr(lambda decoder: of_tail(decoder, tail)[0])(make(config))
    made = [e.outvars[0].aval.shape for e in program.eqns if e.primitive.name == "broadcast_in_dim"]
    fresh = [shape for shape in made if shape in {(33, config.num_heads, 12), (33, config.num_kv_heads, 12)}]
    assert len(fresh) == 3  # queries, keys and values of the first layer


def test_norms_round_once(config: ModelConfig) -> None:
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


def test_each_layer_gets_its_own_state_and_index(config: ModelConfig) -> None:
    seen = []

    def attention(layer: int, q: Any, k: Any, v: Any, state: Any) -> Any:
        seen.append((layer, state, q.shape, k.shape, v.shape))
        return q, state + 1

    _, states = jax.jit(lambda decoder: decoder(*inputs(config), attention, (10, 20)))(make(config))
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

    @jax.jit
    def run(decoder: Decoder) -> tuple[jax.Array, jax.Array]:
        hidden, _ = decoder(*inputs(config), attention, NO_STATES)
        return hidden, decoder.logits(hidden)

    hidden, logits = run(rounded)
    assert dtypes == {jnp.dtype(jnp.bfloat16)} == {hidden.dtype}
    assert logits.dtype == jnp.float32
    _, expected = run(exact)
    np.testing.assert_allclose(logits, expected, atol=0.05 * float(jnp.abs(expected).max()))


def test_float32_products_have_full_precision(config: ModelConfig) -> None:
    """On a GPU the default would be TF32, which no test on a CPU would notice."""
    decoder = make(config)

    def logits(tokens: jax.Array, positions: jax.Array) -> jax.Array:
        hidden, _ = decoder(tokens, positions, lambda layer, q, k, v, state: (q, state), NO_STATES)
        return decoder.logits(hidden)

    program = " ".join(str(jax.make_jaxpr(logits)(*inputs(config))).split())
    assert program.count("dot_general[") == 2 * 4 + 1
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 2 * 4 + 1


def test_one_product_holds_queries_keys_and_values(config_entries: Any) -> None:
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


def test_padding_may_be_outside_the_vocabulary(config: ModelConfig) -> None:
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
    layer = Decoder(ModelConfig.from_hf(config_entries("llama")), rngs=nnx.Rngs(0)).layers[0]
    for kernel in (layer.attention.qkv.kernel, layer.mlp.gate_up.kernel):
        assert abs(float(kernel[...].std()) / 0.02 - 1) < 0.15
    for kernel in (layer.attention.o.kernel, layer.mlp.down.kernel):
        assert abs(float(kernel[...].std()) / (0.02 / math.sqrt(2 * 2)) - 1) < 0.15
