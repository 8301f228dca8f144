"""Projections in eight bits: codes and scales, both products, their derivative, and models of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import lowered_for_cuda
from flax import nnx
from tiny import CONFIG

from tca_jax.models.decoder import Decoder
from tca_jax.models.names import parameters
from tca_jax.models.projections import WEIGHTS, QuantizedLinear, largest_code, quantize, quantized_product

TOKENS = {"few": (3,), "one": (1, 1), "many": (2, 65)}


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def weights_of(kind, *shape):
    return quantize(normal(1, *shape), WEIGHTS[kind])


@pytest.mark.parametrize("kind", WEIGHTS)
def test_codes_times_scales_are_within_half_a_step(kind):
    x = normal(0, 7, 33) * 10.0 ** jnp.arange(-3, 4)[:, None]
    codes, scale = quantize(x, WEIGHTS[kind])
    assert codes.dtype == WEIGHTS[kind]
    assert scale.shape == (7,)
    wide = np.asarray(codes, np.float64)
    assert (np.abs(wide).max(axis=1) == largest_code(WEIGHTS[kind])).all()
    error = np.abs(wide * np.asarray(scale, np.float64)[:, None] - x)
    # e4m3 has four significant bits, and steps of 2 ** -9 below 2 ** -6; int8 steps of 1.
    step = np.maximum(np.abs(wide) / 8, 2.0**-9) if kind == "fp8" else 1.0
    assert (error <= 0.5001 * step * np.asarray(scale)[:, None]).all()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_vectors_of_zeros_stay_zeros(kind):
    codes, scale = quantize(jnp.zeros((2, 5)), WEIGHTS[kind])
    assert not np.asarray(codes, np.float32).any()
    assert np.isfinite(scale).all()
    x = jnp.concatenate([jnp.zeros((65, 5)), jnp.ones((1, 5))])
    assert np.isfinite(quantized_product(x, *weights_of(kind, 4, 5))).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_products_are_those_of_the_numbers_that_codes_stand_for(kind, tokens, dtype):
    x, (codes, scale) = normal(0, *TOKENS[tokens], 48, dtype=dtype), weights_of(kind, 2, 6, 48)
    y = quantized_product(x, codes, scale)
    assert y.shape == (*TOKENS[tokens], 2, 6)
    assert y.dtype == dtype
    wide = np.asarray(x, np.float64)
    if tokens == "many" and kind == "fp8":  # these are quantized, too
        of_x, scale_of_x = quantize(x, WEIGHTS["fp8"])
        wide = np.asarray(of_x, np.float64) * np.asarray(scale_of_x, np.float64)[..., None]
    dense = np.asarray(codes, np.float64) * np.asarray(scale, np.float64)[..., None]
    expected = np.einsum("...n,abn->...ab", wide, dense)
    tolerance = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2, jnp.float16: 2e-3}[dtype]
    if tokens == "many" and kind == "fp8" and jax.default_backend() == "gpu":
        tolerance = max(tolerance, 2.0**-11)  # tensor cores of Hopper sum fewer bits than float32's
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("tokens", ["few", "many"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_derivative_is_that_of_the_product_with_the_weights(kind, tokens):
    x, (codes, scale) = normal(0, *TOKENS[tokens], 48), weights_of(kind, 2, 6, 48)
    slope = normal(2, *TOKENS[tokens], 2, 6)
    _, pullback = jax.vjp(lambda x: quantized_product(x, codes, scale), x)
    dense = np.asarray(codes, np.float32) * np.asarray(scale)[..., None]
    np.testing.assert_allclose(pullback(slope)[0], np.einsum("...ab,abn->...n", slope, dense), rtol=1e-4, atol=1e-4)


def test_a_linear_is_the_product_with_its_weights_its_sum_over_devices_and_its_bias():
    linear = QuantizedLinear(
        8,
        (3, 2),
        bias=True,
        dtype=jnp.float32,
        param_dtype=WEIGHTS["int8"],
        init=lambda key, shape, dtype: jax.random.normal(key, shape, dtype),
        finish=lambda y: 2 * y,
        rngs=nnx.Rngs(0),
    )
    linear.bias[...] = normal(5, 3, 2)
    x = normal(0, 4, 8)
    dense = np.asarray(linear.codes[...], np.float32) * np.asarray(linear.scale[...])[..., None]
    expected = 2 * np.einsum("tn,abn->tab", x, dense) + linear.bias[...]
    np.testing.assert_allclose(linear(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_decoder_has_projections_in_eight_bits_and_all_else_in_its_dtype(kind):
    decoder = Decoder(CONFIG, dtype=jnp.bfloat16, param_dtype=WEIGHTS[kind], rngs=nnx.Rngs(0))
    for parameter in parameters(decoder):
        name, dtype = parameter.path[-1], parameter.variable[...].dtype
        is_projection = parameter.path[-2:-1] and parameter.path[-2] in ("qkv", "o", "gate_up", "down")
        wanted = {"codes": WEIGHTS[kind], "scale": jnp.float32} if is_projection else {}
        assert dtype == wanted.get(name, jnp.bfloat16), parameter.path


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_a_projection_of_many_tokens_is_a_product_of_cublaslt_in_fp8(name):
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128}
    config = dataclasses.replace(CONFIG, num_layers=1, **sizes)
    decoder = Decoder(config, dtype=jnp.bfloat16, param_dtype=WEIGHTS["fp8"], rngs=nnx.Rngs(0))
    layer = decoder.layers[0]
    linear = getattr(layer.attention if name in ("qkv", "o") else layer.mlp, name)
    x = jax.ShapeDtypeStruct((8192, linear.codes.shape[-1]), jnp.bfloat16)
    assert "__cublas$lt$matmul$f8" in jax.jit(linear).lower(x).compile().as_text()


def test_products_of_many_tokens_are_products_of_codes():
    """What is not one of two e4m3 arrays XLA cannot give to cuBLASLt, and by the algorithm's name only there."""
    decoder = Decoder(CONFIG, dtype=jnp.bfloat16, param_dtype=WEIGHTS["fp8"], rngs=nnx.Rngs(0))
    layer, heads = decoder.layers[0], (CONFIG.num_heads, CONFIG.head_dim)
    x, out = (normal(0, 1, 128, *shape, dtype=jnp.bfloat16) for shape in ((CONFIG.hidden_size,), heads))
    text = lowered_for_cuda(lambda x, out: (layer.attention.qkv(x), layer.mlp(x), layer.attention.output(out)), x, out)
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 4
    assert all("rhs_precision_type = f8E4M3FN" in line and line.endswith("xbf16>") for line in products)
