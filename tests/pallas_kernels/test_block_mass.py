"""Block mass against float64 on every backend: groups, types, odd lengths, extremes, tilings."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import poison
from implementations import gpu, implementation, on_every_backend
from jax.experimental import pallas as pl

from tca_jax.pallas_kernels.block_mass import triton
from tca_jax.pallas_kernels.block_mass.triton import BlockMassConfig, default_config
from tca_jax.pallas_kernels.kernel_math import shared_memory


def _operands(lengths, tokens, heads, kv_heads, head_dim, dtype=jnp.float32, scale=1.5):
    """Queries and keys that are NaN past their length, and the lengths."""
    rng = np.random.default_rng(0)
    q, k = (scale * rng.standard_normal((len(lengths), tokens, n, head_dim)) for n in (heads, kv_heads))
    return *(jnp.asarray(poison(x, lengths), dtype) for x in (q, k)), jnp.array(lengths, jnp.int32)


def _expected(q, k, lengths, block_size, stride):
    """By the definition, a sampled query of a head at a time [B, Hkv, N, N]."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    (batch, tokens, kv_heads, head_dim), group = k.shape, q.shape[2] // k.shape[2]
    blocks = -(-tokens // block_size)
    mass = np.zeros((batch, kv_heads, blocks, blocks))
    for row, length in enumerate(lengths.tolist()):
        for tile in range(-(-length // block_size)):
            for end in range(tile * block_size + stride - 1, (tile + 1) * block_size, stride):
                position = min(end, length - 1)
                for head in range(q.shape[2]):
                    logits = k[row, : position + 1, head // group] @ q[row, position, head] / np.sqrt(head_dim)
                    seen = np.pad(logits, (0, blocks * block_size - position - 1), constant_values=-np.inf)
                    peaks = seen.reshape(blocks, block_size).max(axis=1)
                    weights = np.exp(peaks - peaks.max())
                    mass[row, head // group, tile] += weights / weights.sum()
    return mass


def _check(function, operands, block_size, stride, tolerance=1e-4):
    mass = function(*operands, block_size=block_size, stride=stride)
    assert mass.dtype == jnp.float32
    expected = _expected(*operands, block_size, stride)
    np.testing.assert_allclose(mass, expected, rtol=tolerance, atol=max(1e-5, tolerance / 10))


@on_every_backend("block_mass")
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "dtype", "block_size", "stride"),
    [
        # Off the block, one token, less than a stride, whole blocks, nothing.
        ((75, 1, 3, 48, 16, 17, 0), 2, 2, 64, jnp.bfloat16, 16, 8),
        ((75, 16, 17), 8, 2, 16, jnp.float32, 16, 1),
        ((75, 1, 0), 7, 1, 64, jnp.float32, 16, 16),
        ((75, 47), 6, 1, 16, jnp.float32, 48, 16),
        ((393, 130), 4, 1, 128, jnp.bfloat16, 128, 8),
    ],
)
def test_equals_the_oracle(lengths, heads, kv_heads, head_dim, dtype, block_size, stride, backend):
    sizes, function = (lengths, lengths[0], heads, kv_heads, head_dim, dtype), implementation("block_mass", backend)
    _check(function, _operands(*sizes, scale=head_dim**-0.25 * 2.5), block_size, stride)
    if dtype == jnp.float32:  # scores past the range of exp
        _check(function, _operands(*sizes, scale=25.0), block_size, stride, tolerance=2e-3)


@on_every_backend("block_mass")
def test_array_without_tokens_has_no_mass(backend):
    mass = implementation("block_mass", backend)(*_operands((0,), 0, 2, 1, 16), block_size=16, stride=4)
    assert mass.shape == (1, 1, 0, 0)


def test_xla_takes_any_block_size_and_head_dim():
    _check(implementation("block_mass", "xla"), _operands((75, 14), 75, 4, 2, 12), 6, 3)


def test_memory_grows_with_the_length_alone():
    def temporary(length):
        shape = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
        function = jax.jit(partial(implementation("block_mass", "xla"), block_size=128, stride=16))
        lowered = function.lower(shape, shape, jax.ShapeDtypeStruct((1,), jnp.int32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(32768) < 5 * temporary(8192)


@pytest.mark.parametrize(
    ("config", "block_size", "stride"),
    [
        pytest.param((3, 16, 4, 2), 16, 8, id="off the powers of two and off the number of tiles"),
        pytest.param((4, 16, 4, 3), 32, 8, id="blocks of two tiles of keys"),
        pytest.param((16, 32, 8, 3), 32, 16, id="more tiles than there are"),
    ],
)
def test_tile_sizes_do_not_matter(config, block_size, stride):
    function = partial(implementation("block_mass", "triton"), config=BlockMassConfig(*config))
    _check(function, _operands((150, 82, 33, 3), 150, 6, 2, 16), block_size, stride)


@pytest.mark.parametrize(("tiles", "parts"), [(1, 3), (2, 2)])
def test_parts_of_the_tiles_do_not_matter(tiles, parts, monkeypatch):
    monkeypatch.setattr(triton, "_MOST_BYTES", 4 * 2 * 2 * 8 * 16 * 3)  # three programs of 16 rows
    jax.clear_caches()
    operands = _operands((115, 40), 115, 4, 2, 16)
    function = partial(implementation("block_mass", "triton"), config=BlockMassConfig(tiles, 16, 4, 1))
    assert f"length={parts}" in str(jax.make_jaxpr(partial(function, block_size=16, stride=8))(*operands))
    _check(function, operands, 16, 8)
    jax.clear_caches()


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "stride"),
    [(8, 2, 64, 128, 16), (7, 1, 128, 128, 8), (2, 2, 256, 128, 32), (7, 1, 128, 256, 16), (1, 1, 64, 1024, 16)],
)
def test_real_sizes_equal_xla(heads, kv_heads, head_dim, block_size, stride, dtype):
    operands = _operands((9001, 63, 5000), 9001, heads, kv_heads, head_dim, dtype)
    ours, theirs = (
        implementation("block_mass", name)(*operands, block_size=block_size, stride=stride)
        for name in ("triton", "xla")
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.max()))


@pytest.mark.parametrize("block_size", [16, 48, 128, 256, 1024])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, jnp.bfloat16), (256, jnp.bfloat16), (128, jnp.float32)])
def test_default_tiles_divide_blocks_and_fit(block_size, head_dim, dtype):
    for rows in (1, 7, 8, 32, 112, 256):
        config = default_config(rows, block_size, head_dim, dtype)
        assert block_size % config.keys == 0
        assert config.keys >= 16
        assert config.keys & (config.keys - 1) == 0
        assert config.tiles >= 1
        held = max(16, pl.next_power_of_2(config.tiles * rows))
        in_flight = config.stages * block_size if config.stages > 1 else config.keys
        assert dtype == jnp.float32 or 2 * head_dim * (held + in_flight) <= shared_memory()
