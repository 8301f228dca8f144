"""Keys and values in eight bits: what they hold."""

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.pallas_kernels.kv import CODES, UNPACKED, decode, empty, encode, num_bytes, unpack

NOTHING = empty((1, 2), CODES)


def rounded(x):
    return np.asarray(decode(encode(jnp.asarray(x, jnp.float32), NOTHING), jnp.float32), np.float64)


def test_vectors_of_any_size_lose_a_sixteenth():
    x = jax.random.normal(jax.random.key(0), (21, 64)) * 10.0 ** jnp.arange(-20, 21, 2)[:, None]
    codes = [np.asarray(half, np.float32) for half in unpack(encode(x, NOTHING).words)]
    largest = np.abs(np.concatenate(codes, axis=1) * 2.0**UNPACKED).max(axis=1)
    assert ((largest > 208) & (largest <= 448)).all()  # the largest entry fills the codes
    error = np.abs(rounded(x) - np.asarray(x, np.float64))
    assert (error <= np.maximum(np.abs(x) / 16, np.abs(x).max(axis=1, keepdims=True) * 2.0**-17)).all()
    powers = jnp.array([[448.0, 1.0], [449.0, 1.0], [0.875, 0.0], [0.0, 0.0]])
    assert encode(powers, NOTHING).exponents.tolist()[:3] == [0, 1, -9]
    np.testing.assert_array_equal(rounded(powers)[[0, 2, 3]], powers[jnp.array([0, 2, 3])])


def test_encoding_twice_changes_nothing():
    x = decode(encode(jax.random.normal(jax.random.key(1), (4096, 16)), NOTHING), jnp.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_array_equal(decode(encode(x.astype(dtype), NOTHING), jnp.float32), x)


def test_arrays_stay_in_their_own_dtype():
    x = jnp.ones((2, 3))
    assert encode(x, jnp.zeros((), jnp.bfloat16)).dtype == jnp.bfloat16
    assert decode(x, jnp.float16).dtype == jnp.float16
    assert num_bytes(10, 128, jnp.bfloat16) == 2560
    assert num_bytes(10, 128, CODES) == sum(leaf.nbytes for leaf in jax.tree.leaves(empty((10, 128), CODES)))
