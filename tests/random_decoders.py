"""Decoders whose weights NumPy draws, since JAX compiles a program for each shape that it draws."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.names import parameters
from tca_jax.models.sharding import reorder_heads


def without_zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that keep the size of activations, biases that count, and norms about 1."""
    noise = rng.standard_normal(shape)
    return noise / np.sqrt(shape[0]) if len(shape) >= 2 else 1 + 0.1 * noise


def random_decoder(
    config: ModelConfig,
    draw: Callable[..., np.ndarray] = np.random.Generator.standard_normal,
    dtype: Any = jnp.float32,
    seed: int = 0,
) -> Decoder:
    """A decoder of weights `draw(rng, shape)`, of biases and norms, too."""
    make = functools.partial(Decoder, config, dtype=dtype, param_dtype=dtype)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(draw(rng, x.shape), x.dtype), state))


def causal(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """Full attention by JAX, for a pass of a decoder."""
    with jax.default_matmul_precision("highest"):  # not TF32
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), state


def with_heads(decoder: Decoder, orders: Any) -> Decoder:
    """The model with the KV heads of each layer in another order (`reorder_heads`)."""
    moved = {
        each.path: each.variable.replace(reorder_heads(each.variable[...], each, orders))
        for each in parameters(decoder)
    }
    return nnx.merge(nnx.graphdef(decoder), nnx.from_flat_state(moved))


def assert_equal_weights(a: Decoder, b: Decoder) -> None:
    jax.tree.map(np.testing.assert_array_equal, nnx.state(a), nnx.state(b))
