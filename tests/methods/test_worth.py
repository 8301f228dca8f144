"""Attention by predicted worth against dense attention under masks (`lab.sparse_reading`), part by part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.lab.sparse_reading import _attend
from tca_jax.methods.worth import ReadSettings, attend_by_worth
from tca_jax.pallas_kernels.causal_attention import causal_attention

LENGTHS, TOKENS, BLOCK = [1024, 640], 1024, 128
OPTIONS = {"block_size": BLOCK, "window": 256, "stride": 16}


def drawn():
    keys = jax.random.split(jax.random.key(0), 4)
    q = 3 * jax.random.normal(keys[0], (2, TOKENS, 6, 16))
    k, v = (jax.random.normal(key, (2, TOKENS, 2, 16)) for key in keys[1:3])
    return q, k, v, jax.random.normal(keys[3], (2, 2, TOKENS)), jnp.asarray(LENGTHS)


@pytest.mark.parametrize(("theta", "mass"), [(1.5, 0.1), (1.5, np.inf), (np.inf, 0.1), (np.inf, np.inf)])
def test_tokens_blocks_and_means_equal_masks(theta, mass):
    q, k, v, worth, lengths = drawn()
    settings = ReadSettings(jnp.float32(theta), jnp.float32(mass), jnp.asarray(True))
    out, pairs = jax.jit(lambda *x: attend_by_worth(*x, **OPTIONS))(q, k, v, worth, lengths, settings)
    for row, length in enumerate(LENGTHS):
        expected, attended = _attend(
            q[row], k[row], v[row], worth[row] >= theta, worth[row], lengths[row], settings.mass, 16
        )
        np.testing.assert_allclose(out[row, :length], expected[:length], atol=3e-5)
        np.testing.assert_allclose(pairs[row], attended.mean(), rtol=1e-6)


def test_means_can_be_off():
    q, k, v, worth, lengths = drawn()
    settings = ReadSettings(jnp.float32(1.5), jnp.float32(jnp.inf), jnp.asarray(False))
    out, _ = attend_by_worth(q, k, v, worth, lengths, settings, **OPTIONS)
    place = np.arange(TOKENS)
    first = np.maximum(place // BLOCK * BLOCK - OPTIONS["window"], 0)
    for row, head in np.ndindex(2, 6):
        seen = (np.asarray(worth[row, head // 3]) >= 1.5) | (place < 4) | (place >= first[:, None])
        seen &= place <= place[:, None]
        logits = np.where(seen, np.asarray(q[row, :, head] @ k[row, :, head // 3].T) / 4, -np.inf)
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        expected = p / p.sum(axis=-1, keepdims=True) @ np.asarray(v[row, :, head // 3])
        np.testing.assert_allclose(out[row, : LENGTHS[row], head], expected[: LENGTHS[row]], atol=3e-5)


def test_everything_selected_is_full_attention():
    q, k, v, worth, lengths = drawn()
    settings = ReadSettings(jnp.float32(-jnp.inf), jnp.float32(jnp.inf), jnp.asarray(True))
    out, _ = attend_by_worth(q, k, v, worth, lengths, settings, **OPTIONS)
    np.testing.assert_allclose(out, causal_attention(q, k, v, lengths), atol=3e-5)
