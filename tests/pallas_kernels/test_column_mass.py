"""Column mass against float64: near and far parts, tile sizes, ragged rows."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison, qkv, regions

from tca_jax.methods.config import TCAConfig
from tca_jax.pallas_kernels.column_mass import column_mass
from tca_jax.pallas_kernels.tiles import Tiles

LENGTHS = np.array([75, 40, 1], np.int32)
ARRAYS = qkv(0, 3, 75, 6, 2, 16)


@pytest.mark.parametrize(
    ("window", "tiles"),
    [(16, None), (80, None), (16, Tiles(8, 8, 1)), (16, Tiles(16, 24, 1)), (16, Tiles(40, 16, 5))],
    ids=str,
)
def test_equals_the_oracle(window, tiles):
    q, k = (jnp.asarray(poison(x, LENGTHS)) for x in ARRAYS[:2])
    parts = column_mass(q, k, jnp.asarray(LENGTHS), block_size=8, window=window, tiles=tiles)
    config = TCAConfig(block_size=8, window=window)
    for row, head, qs, ks, _ in regions(*ARRAYS, LENGTHS):
        for part, expected in zip(parts, oracle.column_mass(qs, ks, config), strict=True):
            np.testing.assert_allclose(part[row, head, : len(ks)], expected, atol=1e-5, rtol=1e-5)
            assert not np.any(part[row, head, len(ks) :])
    assert window < 75 or not np.any(parts[1])
