"""Gradients through attention over a selection: those of the same attention by masks, the selection held fixed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import observed_queries, poison, qkv

import tca_jax
from tca_jax.methods import gradients

CONFIG = tca_jax.TCAConfig(block_size=8, window=16)
CANDIDATES = np.array([2, 9])


def masked(q, k, v, kept, lengths):
    """The attention by masks, for JAX to differentiate."""
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    row, column = jnp.arange(length)[:, None], jnp.arange(length)
    edge = jnp.maximum(0, row // 8 * 8 - 16)
    seen = ((column >= edge) & (column <= row)) | (kept[:, :, None] & (column < edge))
    seen = jnp.repeat(seen, group, axis=1)
    scores = jnp.einsum("bihd,bjhd->bhij", q, jnp.repeat(k, group, axis=2), precision="highest") / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bhij,bjhd->bihd", weights, jnp.repeat(v, group, axis=2), precision="highest")
    return jnp.where((jnp.arange(length) < lengths[:, None])[..., None, None], out, 0)


def inputs(heads, lengths):
    q, k, v = qkv(0, len(lengths), max(lengths) + 3, heads, 2, 16)
    lengths = np.array(lengths)
    kept = tca_jax.select(observed_queries(q, lengths, CONFIG.num_queries), k, CANDIDATES, lengths, CONFIG)
    weight = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
    return (q, k, v), kept, lengths, weight


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        pytest.param(2, [60], marks=pytest.mark.integration),
        (8, [61, 40, 5]),
        pytest.param(14, [33, 64], marks=pytest.mark.integration),
    ],
)
def test_gradients_are_those_of_attention_by_masks(heads, lengths, monkeypatch):
    arrays, kept, lengths, weight = inputs(heads, lengths)
    monkeypatch.setattr(gradients, "_TILE_ELEMENTS", 7 * len(lengths) * heads * arrays[0].shape[1])  # ragged tiles
    jax.clear_caches()

    def loss(q, k, v):
        return jnp.sum(weight * tca_jax.attend(q, k, v, CANDIDATES, lengths, CONFIG))

    def expected(q, k, v):
        return jnp.sum(weight * masked(q, k, v, kept, lengths))

    value, actual = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)
    expected_value, expected_gradients = jax.jit(jax.value_and_grad(expected, (0, 1, 2)))(*arrays)
    assert float(value) == pytest.approx(float(expected_value), rel=1e-4)
    for ours, theirs in zip(actual, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
        assert np.abs(theirs).max() > 1e-2


def test_padding_gets_no_gradient_and_spoils_none():
    arrays, _, lengths, weight = inputs(4, [60, 40])

    def loss(q, k, v):
        return jnp.sum(weight * tca_jax.attend(q, k, v, CANDIDATES, lengths, CONFIG))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    clean, poisoned = gradient(*arrays), gradient(*(poison(x, lengths) for x in arrays))
    for ours, theirs in zip(poisoned, clean, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert not np.asarray(ours)[1, 40:].any()
