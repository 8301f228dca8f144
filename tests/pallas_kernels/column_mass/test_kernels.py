"""Column mass through Triton and Mosaic against the XLA oracle, lowered for CUDA, and what they refuse.

Triton runs real kernels on a GPU and interpret mode elsewhere; Mosaic runs on a Hopper GPU only.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import poison, unchecked
from cuda_lowering import kernels

from tca_jax.pallas_kernels.backends import can_run
from tca_jax.pallas_kernels.column_mass import mosaic as column_mass_mosaic
from tca_jax.pallas_kernels.column_mass import triton as column_mass_triton
from tca_jax.pallas_kernels.column_mass import xla as column_mass_xla
from tca_jax.pallas_kernels.column_mass.mosaic import MosaicColumnMassConfig, MosaicPassConfig
from tca_jax.pallas_kernels.column_mass.triton import ColumnMassConfig, PassConfig, default_config
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")

INTERPRET = jax.default_backend() != "gpu"
gpu = pytest.mark.skipif(INTERPRET, reason="needs an NVIDIA GPU; interpret mode takes too long at this size")

needs_hopper = pytest.mark.skipif(not can_run("mosaic"), reason="needs a Hopper GPU")
KERNELS = {"triton": column_mass_triton.column_mass, "mosaic": column_mass_mosaic.column_mass}

column_mass = partial(column_mass_triton.column_mass, interpret=INTERPRET)


def _operands(lengths, length, heads, kv_heads, head_dim, *, dtype=jnp.float32, scale=1.5, seed=0):
    """Random queries and keys; NaN past every length."""
    rng = np.random.default_rng(seed)
    q, k = (scale * rng.standard_normal((len(lengths), length, n, head_dim)) for n in (heads, kv_heads))
    return *(jnp.asarray(poison(x, lengths), dtype) for x in (q, k)), jnp.array(lengths, jnp.int32)


def _check(actual, operands, sizes, tolerance=1e-4):
    q, k, lengths = operands
    expected = column_mass_xla.column_mass(jnp.nan_to_num(q), jnp.nan_to_num(k), lengths, **sizes)
    for part, wanted in zip(actual, expected, strict=True):
        for row, length in enumerate(lengths.tolist()):
            # A column's sum is compared on the scale of the columns beside it: its smallest terms are rounding.
            np.testing.assert_allclose(
                part[row, :, :length], wanted[row, :, :length], rtol=tolerance, atol=tolerance * float(wanted.mean())
            )
            assert not np.any(part[row, :, length:])
    total = np.asarray(actual[0] + actual[1]).sum(axis=-1)
    np.testing.assert_allclose(total, np.broadcast_to(lengths[:, None], total.shape), rtol=tolerance)


@pytest.mark.parametrize(
    ("lengths", "length", "heads", "kv_heads", "block", "window", "dtype"),
    [
        pytest.param((75, 40), 75, 4, 2, 16, 32, jnp.float32, id="ragged, odd length"),
        pytest.param((129, 1), 130, 2, 2, 32, 32, jnp.float32, id="one token past a tile, one token"),
        pytest.param((200,), 200, 7, 1, 16, 48, jnp.bfloat16, id="group of 7"),
        pytest.param((256, 160), 256, 2, 1, 16, 64, jnp.float16, id="whole tiles"),
        pytest.param((300,), 300, 2, 1, 128, 128, jnp.bfloat16, id="default tiles"),
        pytest.param((60,), 60, 2, 1, 16, 64, jnp.float32, id="nothing is far"),
    ],
)
def test_equals_the_oracle_and_never_reads_padding(lengths, length, heads, kv_heads, block, window, dtype):
    operands, sizes = (
        _operands(lengths, length, heads, kv_heads, 16, dtype=dtype),
        {"block_size": block, "window": window},
    )
    _check(column_mass(*operands, **sizes), operands, sizes)


@pytest.mark.parametrize(
    ("norms", "columns"),
    [((64, 16, 4, 2), (16, 32, 4, 2)), ((16, 64, 4, 1), (32, 16, 2, 3)), ((32, 32, 2, 2), (32, 32, 4, 1))],
)
def test_tile_sizes_do_not_matter(norms, columns):
    operands, sizes = _operands((130, 97), 130, 3, 1, 16), {"block_size": 32, "window": 64}
    config = ColumnMassConfig(PassConfig(*norms), PassConfig(*columns))
    _check(column_mass(*operands, **sizes, config=config), operands, sizes)


def test_scores_past_the_range_of_exp_do_not_overflow():
    operands, sizes = _operands((80,), 80, 2, 1, 16, scale=20.0), {"block_size": 16, "window": 32}
    _check(column_mass(*operands, **sizes), operands, sizes, tolerance=1e-3)


@needs_hopper
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("lengths", "length", "heads", "kv_heads", "head_dim", "window", "scale"),
    [
        ((3000, 1501), 3001, 8, 2, 128, 512, 1.0),
        ((2047, 129, 128), 2047, 7, 1, 64, 128, 1.5),
        ((1024, 1), 1024, 4, 4, 128, 256, 1.0),
        ((777,), 777, 2, 2, 64, 4096, 1.0),
        ((900,), 1100, 4, 1, 128, 128, 8.0),
    ],
)
def test_mosaic_equals_the_oracle_whatever_is_in_the_padding(
    lengths, length, heads, kv_heads, head_dim, window, scale, dtype
):
    operands = _operands(lengths, length, heads, kv_heads, head_dim, dtype=dtype, scale=scale)
    sizes = {"block_size": 128, "window": window}
    _check(column_mass_mosaic.column_mass(*operands, **sizes), operands, sizes, tolerance=1e-3)


@needs_hopper
@pytest.mark.parametrize(("norms", "columns"), [((2, 4), (2, 2)), ((3, 5), (2, 5)), ((2, 1), (3, 5))])
def test_mosaic_warpgroups_and_stages_do_not_matter(norms, columns):
    operands = _operands((1000, 385), 1001, 6, 2, 128, dtype=jnp.bfloat16, scale=1.0)
    sizes = {"block_size": 128, "window": 256}
    config = MosaicColumnMassConfig(MosaicPassConfig(*norms), MosaicPassConfig(*columns))
    actual = column_mass_mosaic.column_mass(*operands, **sizes, config=config)
    _check(actual, operands, sizes, tolerance=1e-3)


@gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 1e-3), (jnp.float16, 1e-3), (jnp.float32, 1e-4)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block", "window"), [(8, 2, 128, 512), (7, 1, 64, 256), (2, 2, 256, 256)]
)
def test_equals_the_oracle_at_real_sizes(heads, kv_heads, block, window, head_dim, dtype, tolerance):
    operands = _operands((3000, 1501), 3001, heads, kv_heads, head_dim, dtype=dtype, scale=1.0)
    sizes = {"block_size": block, "window": window}
    _check(column_mass(*operands, **sizes), operands, sizes, tolerance)


def _avals(length, heads, kv_heads, head_dim, *, batch=1, dtype=jnp.bfloat16):
    of = jax.ShapeDtypeStruct
    return *(of((batch, length, n, head_dim), dtype) for n in (heads, kv_heads)), of((batch,), jnp.int32)


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "head_dim", "block", "dtype"),
    [
        (32768, 32, 8, 128, 128, jnp.bfloat16),
        (1048576, 28, 4, 128, 128, jnp.float16),
        (5000, 14, 2, 64, 64, jnp.bfloat16),
        (4096, 8, 4, 256, 256, jnp.float32),
    ],
)
def test_lowers_for_cuda_without_a_gpu(length, heads, kv_heads, head_dim, block, dtype):
    kernel = partial(column_mass_triton.column_mass, block_size=block, window=4096)
    assert kernels("triton", kernel, *_avals(length, heads, kv_heads, head_dim, dtype=dtype)) == 2


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "head_dim", "block", "dtype"),
    [
        (131072, 32, 8, 128, 128, jnp.bfloat16),
        (1048576, 28, 4, 128, 256, jnp.float16),
        (5000, 14, 2, 64, 128, jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("warpgroups", [2, 3])
def test_mosaic_lowers_for_cuda_without_a_gpu(length, heads, kv_heads, head_dim, block, dtype, warpgroups):
    one = MosaicPassConfig(warpgroups)
    config = MosaicColumnMassConfig(one, one)
    kernel = partial(column_mass_mosaic.column_mass, block_size=block, window=4096, config=config)
    assert kernels("mosaic", kernel, *_avals(length, heads, kv_heads, head_dim, dtype=dtype, batch=2)) == 2


@pytest.mark.parametrize(
    ("backend", "avals", "block", "message"),
    [
        ("triton", _avals(1024, 8, 2, 80), 128, "head dimension 80: must be a power of two from 16 to 256"),
        ("triton", _avals(1024, 8, 2, 64), 8, "block_size = 8: must be a multiple of 16"),
        (
            "triton",
            _avals(1024, 8, 2, 64, dtype=jnp.float8_e4m3fn),
            128,
            "must be one of bfloat16, float16 and float32",
        ),
        ("mosaic", _avals(1024, 8, 2, 128, dtype=jnp.float32), 128, "both bfloat16 or both float16, .* not float32"),
        ("mosaic", _avals(1024, 8, 2, 256), 128, "takes .* d 64 or 128 .* d = 256 and block_size = 128"),
        ("mosaic", _avals(1024, 8, 2, 128), 64, "block_size a multiple of 128, .* block_size = 64"),
    ],
)
def test_what_it_cannot_do_moves_auto_on(backend, avals, block, message):
    kernel = unchecked(KERNELS[backend])
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(partial(kernel, block_size=block, window=4096), *avals)


@pytest.mark.parametrize("block", [16, 48, 64, 128, 192, 1024])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_default_tiles_fit_the_blocks_and_the_shared_memory(block, head_dim, dtype):
    config = default_config(block, head_dim, dtype)
    assert block % config.columns.queries == 0
    assert block % config.columns.keys == 0
    for tiles, held in ((config.norms, config.norms.queries), (config.columns, config.columns.keys)):
        assert min(tiles.queries, tiles.keys) >= 16
        streamed = tiles.queries + tiles.keys - held
        assert (held + tiles.stages * streamed) * head_dim * jnp.dtype(dtype).itemsize <= 227 * 1024
