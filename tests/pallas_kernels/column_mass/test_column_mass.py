"""Column mass against the oracle: near and far parts, tile sizes, ragged rows."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison, qkv, regions

from tca_jax.methods.config import TCAConfig
from tca_jax.pallas_kernels.column_mass import column_mass
from tca_jax.pallas_kernels.column_mass import xla as column_mass_xla
from tca_jax.pallas_kernels.tiles import Tiles

CONFIG = TCAConfig(block_size=8, window=16)
LENGTHS = np.array([75, 40, 1], np.int32)
ARRAYS = qkv(0, 3, 75, 6, 2, 16)


def _check(near, far):
    for row, head, q, k, _ in regions(*ARRAYS, LENGTHS):
        for part, expected in zip((near, far), oracle.column_mass(q, k, CONFIG), strict=True):
            np.testing.assert_allclose(part[row, head, : len(k)], expected, atol=1e-5, rtol=1e-5)
            assert not np.any(part[row, head, len(k) :])


@pytest.mark.parametrize(
    "tiles",
    [None, Tiles(8, 8, 1), Tiles(16, 24, 1), Tiles(40, 16, 5), Tiles(80, 256, 1)],
    ids=lambda tiles: f"{tiles.queries}x{tiles.keys}x{tiles.parallel}" if tiles else "default",
)
def test_equals_the_oracle_with_any_tiles(tiles):
    q, k = (jnp.asarray(poison(x, LENGTHS)) for x in ARRAYS[:2])
    _check(*column_mass_xla.column_mass(q, k, jnp.asarray(LENGTHS), block_size=8, window=16, tiles=tiles))


def test_all_columns_together_hold_one_per_query():
    q, k, _ = map(jnp.asarray, ARRAYS)
    near, far = column_mass(q, k, jnp.asarray(LENGTHS), block_size=8, window=16)
    np.testing.assert_allclose((near + far).sum(axis=-1), LENGTHS[:, None].repeat(2, axis=1), rtol=1e-5)


def test_nothing_is_far_within_the_window():
    q, k, _ = map(jnp.asarray, ARRAYS)
    _, far = column_mass(q, k, jnp.asarray(LENGTHS), block_size=8, window=80)
    assert not np.any(far)


def test_memory_does_not_grow_with_the_square_of_the_length():
    def temporary(length):
        shape = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
        lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
        lowered = jax.jit(lambda *args: column_mass(*args, block_size=128, window=512)).lower(shape, shape, lengths)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(32768) < 5 * temporary(8192)
