"""Real sizes: default tiles fit, and results are those of XLA."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import gpu, implementation
from jax.experimental import pallas as pl
from operations import call

from tca_jax.pallas_kernels.block_scores import triton as block_scores
from tca_jax.pallas_kernels.paged_attention import triton as paged_attention
from tca_jax.pallas_kernels.triton_call import attention_tiles


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    ("operation", "sizes"),
    [
        *(("block_scores", {"Hq": h, "Hkv": kv, "d": d, "stride": 16}) for h, kv, d in [(8, 2, 64), (2, 2, 256)]),
        *(("block_scores", {"Hq": 7, "Hkv": 1, "block_size": b, "stride": s}) for b, s in [(128, 8), (1024, 128)]),
    ],
)
def test_real_sizes_equal_xla(operation, sizes, dtype):
    rng = np.random.default_rng(0)

    def draw(shape):
        if shape.dtype == jnp.int32:
            return jnp.asarray(np.array([9001, 63, 5000]), jnp.int32)
        return jnp.asarray(rng.standard_normal(shape.shape), shape.dtype)

    sizes = {"B": 3, "L": 9001, "dtype": dtype} | sizes
    calls = [call(operation, **sizes, function=implementation(operation, name)) for name in ("triton", "xla")]
    arguments = jax.tree.map(draw, calls[0][1])
    ours, theirs = (function(**arguments) for function, _ in calls)
    tolerance = 1e-3 if dtype == jnp.float32 else 0.03  # rounded to int8
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.max()))


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_default_tiles_divide_blocks_and_fit(head_dim, dtype):
    def fits(tokens):
        return tokens * head_dim * jnp.dtype(dtype).itemsize <= 227 * 1024

    for block, tile in ((16, 16), (48, 48), (64, 64), (64, 128), (128, 128), (192, 384), (1024, 1024)):
        config = attention_tiles(tile, block, head_dim, dtype)
        assert tile % config.queries == block % config.keys == 0
        assert config.keys >= 16
        assert fits(config.queries + 2 * config.stages * config.keys)
    for rows in (1, 16, 28, 64, 500):
        config = paged_attention.default_config(rows, head_dim, 128, dtype)
        assert 16 <= config.queries <= max(16, 2 * rows - 1)
        assert config.queries & (config.queries - 1) == 0
        assert fits(config.queries + 2 * config.keys)
    for block, rows in itertools.product((16, 48, 128, 256, 1024), (1, 7, 8, 32, 112, 256)):
        config = block_scores.default_config(rows, block, head_dim, jnp.int8 if dtype == jnp.bfloat16 else dtype)
        assert block % config.keys == config.keys & (config.keys - 1) == 0
        assert config.keys >= 16
        assert config.tiles >= 1
        held = max(16, pl.next_power_of_2(config.tiles * rows))
        in_flight = config.stages * block if config.stages > 1 else config.keys
        assert dtype == jnp.float32 or fits(held + in_flight)
