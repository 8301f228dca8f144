"""Projections: in chunks of tokens, of a single token, and in e4m3."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import lowered_for_cuda
from flax import nnx
from tiny import CONFIG

from tca_jax.models.decoder import Decoder
from tca_jax.models.projections import E4M3, LARGEST_CODE, Linear, by_chunks, quantize, quantized_product, single_twice

#: 33 tokens: one chunk, equal chunks and a rest, unequal chunks that end in the first or in a later chunk of a step.
SIZES = [(33,), (8,), (11,), (5, 7, 6), (14, 18)]
TOKENS = {"few": (3,), "one": (1, 1), "many": (2, 65)}


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_chunks_give_what_all_tokens_give(sizes):
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.integers(-99, 99, shape), jnp.float32) for shape in ((3, 11, 4), (3, 11)))
    seen = []

    def function(x, y):
        seen.append(y.size)
        return x * y[..., None]

    got = jax.jit(lambda *args: by_chunks(function, sizes, *args))(x, y)
    np.testing.assert_array_equal(got, x * y[..., None])
    assert max(seen) <= max(sizes)


@pytest.mark.parametrize(("shape", "tokens"), [((1, 1, 3, 8), 2), ((1, 1), 2), ((2, 1, 24), 1), ((1, 3, 24), 3)])
def test_only_gpus_compute_a_single_token_twice(shape, tokens, monkeypatch):
    x = normal(0, *shape)
    assert single_twice(x).shape == shape or jax.default_backend() == "gpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    got = single_twice(x)
    np.testing.assert_array_equal(got, jnp.concatenate([x, x], axis=1) if tokens > shape[1] else x)
    assert got.shape == (shape[0], tokens, *shape[2:])


def test_codes_are_within_half_a_step():
    x = normal(0, 7, 33) * 10.0 ** jnp.arange(-3, 4)[:, None]
    codes, scale = quantize(x)
    assert (codes.dtype, scale.shape) == (E4M3, (7,))
    wide = np.asarray(codes, np.float64)
    assert (np.abs(wide).max(axis=1) == LARGEST_CODE).all()
    step = np.maximum(np.abs(wide) / 8, 2.0**-9)  # four significant bits, and steps of 2 ** -9 below 2 ** -6
    error = np.abs(wide * np.asarray(scale, np.float64)[:, None] - x)
    assert (error <= 0.5001 * step * np.asarray(scale)[:, None]).all()
    zeros, scale = quantize(jnp.zeros((2, 5)))
    assert not np.asarray(zeros, np.float32).any()
    assert np.isfinite(scale).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tokens", TOKENS)
def test_quantized_products_are_those_of_dequantized_weights(tokens, dtype):
    x, (codes, scale) = normal(0, *TOKENS[tokens], 48, dtype=dtype), quantize(normal(1, 2, 6, 48))
    x = x.at[0].set(0)  # the scale of zeros is finite
    y, pullback = jax.vjp(lambda x: quantized_product(x, codes, scale), x)
    assert y.shape == (*TOKENS[tokens], 2, 6)
    assert y.dtype == dtype
    wide = np.asarray(x, np.float64)
    if tokens == "many":  # these are quantized, too
        of_x, scale_of_x = quantize(x)
        wide = np.asarray(of_x, np.float64) * np.asarray(scale_of_x, np.float64)[..., None]
    dense = np.asarray(codes, np.float64) * np.asarray(scale, np.float64)[..., None]
    expected = np.einsum("...n,abn->...ab", wide, dense)
    tolerance = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2, jnp.float16: 2e-3}[dtype]
    if tokens == "many" and jax.default_backend() == "gpu":
        tolerance = max(tolerance, 2.0**-11)  # tensor cores of Hopper sum fewer bits than float32's
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=tolerance * np.abs(expected).max())
    slope = normal(2, *y.shape, dtype=dtype)
    gradient = np.einsum("...ab,abn->...n", np.asarray(slope, np.float64), dense)
    found = np.asarray(pullback(slope)[0], np.float64)
    np.testing.assert_allclose(found, gradient, atol=tolerance * np.abs(gradient).max())


def test_a_linear_adds_its_bias_last():
    options = {"dtype": jnp.float32, "init": jax.random.normal, "finish": lambda y: 2 * y, "rngs": nnx.Rngs(0)}
    linear = Linear(8, (3, 2), bias=True, param_dtype=E4M3, **options)
    linear.bias[...] = normal(5, 3, 2)
    x = normal(0, 4, 8)
    dense = np.asarray(linear.codes[...], np.float32) * np.asarray(linear.scale[...])[..., None]
    expected = 2 * np.einsum("tn,abn->tab", x, dense) + linear.bias[...]
    np.testing.assert_allclose(linear(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_cublaslt_multiplies_many_tokens_in_fp8(name):
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128}
    config = dataclasses.replace(CONFIG, num_layers=1, **sizes)
    decoder = Decoder(config, dtype=jnp.bfloat16, param_dtype=E4M3, rngs=nnx.Rngs(0))
    layer = decoder.layers[0]
    linear = getattr(layer.attention if name in ("qkv", "o") else layer.mlp, name)
    x = jax.ShapeDtypeStruct((8192, linear.codes.shape[-1]), jnp.bfloat16)
    assert "__cublas$lt$matmul$f8" in jax.jit(linear).lower(x).compile().as_text()


def test_products_of_many_tokens_are_of_codes():
    """XLA gives cuBLASLt only products of two e4m3 arrays, and by the algorithm's name only there."""
    decoder = Decoder(CONFIG, dtype=jnp.bfloat16, param_dtype=E4M3, rngs=nnx.Rngs(0))
    layer, heads = decoder.layers[0], (CONFIG.num_heads, CONFIG.head_dim)
    x, out = (normal(0, 1, 128, *shape, dtype=jnp.bfloat16) for shape in ((CONFIG.hidden_size,), heads))
    text = lowered_for_cuda(lambda x, out: (layer.attention.qkv(x), layer.mlp(x), layer.attention.output(out)), x, out)
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 4
    assert all("rhs_precision_type = f8E4M3FN" in line and line.endswith("xbf16>") for line in products)
