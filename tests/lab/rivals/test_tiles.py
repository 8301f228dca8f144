"""Passes over a sequence a tile at a time give what one pass gives, of any length."""

import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.lab.rivals import tiles


@pytest.mark.parametrize("length", [1, 8, 10, 13])
def test_tiles_are_one_pass(length, monkeypatch):
    monkeypatch.setattr(tiles, "_TILE", 4)
    rng = np.random.default_rng(length)
    x, y = (jnp.asarray(rng.integers(-9, 9, (2, length, *dims)), jnp.float32) for dims in ((3,), ()))

    def concatenated(positions, x, y):
        return jnp.moveaxis(x * positions[:, None], 1, 2), y + positions

    def summed(positions, x, y):
        return jnp.sum(x * y[..., None], axis=1, where=(positions < length)[:, None])

    expected = concatenated(jnp.arange(length), x, y)
    for got, wanted in zip(tiles.concatenate_tiles(concatenated, x, y), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(tiles.sum_tiles(summed, x, y), summed(jnp.arange(length), x, y))
