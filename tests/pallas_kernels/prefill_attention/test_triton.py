"""Prefill attention through Triton against the XLA oracle: real kernels on a GPU, interpret mode elsewhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import poison, unchecked
from cuda_lowering import kernels

from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.prefill_attention import triton as prefill_attention_triton
from tca_jax.pallas_kernels.prefill_attention import xla as prefill_attention_xla
from tca_jax.pallas_kernels.prefill_attention.triton import PrefillConfig, default_config
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")

INTERPRET = jax.default_backend() != "gpu"
gpu = pytest.mark.skipif(INTERPRET, reason="needs an NVIDIA GPU; interpret mode takes too long at this size")

prefill = partial(prefill_attention_triton.prefill_attention, interpret=INTERPRET)


def _operands(lengths, length, heads, kv_heads, head_dim, block, window, *, budget=None, dtype=jnp.float32, seed=0):
    """Random prompts and pools; NaN wherever the kernel must not look.

    `budget` gives every ranked block's budget by KV head; without it they are random.
    """
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    q, k, v = (poison(rng.standard_normal((batch, length, n, head_dim)), lengths) for n in (heads, kv_heads, kv_heads))
    budgets = np.zeros((batch, kv_heads, length // block), np.int32)
    for row, n in enumerate(lengths):
        ranked = max(0, n // block - window // block)
        drawn = rng.integers(0, block + 1, (kv_heads, ranked))
        budgets[row, :, :ranked] = drawn if budget is None else np.array(budget)[:, None]
    totals = budgets.sum(axis=-1).ravel()
    starts = np.cumsum([0, *(-(-totals // 128) * 128)]).astype(np.int32)
    order = rng.permutation(totals.size)  # regions need not lie in the order of the heads
    offsets, begin = np.zeros(totals.size, np.int32), 0
    pools = np.full((2, max(128, starts[-1]), head_dim), np.nan)
    for region in order:
        offsets[region] = begin
        pools[:, begin : begin + totals[region]] = rng.standard_normal((2, totals[region], head_dim))
        begin += -(-totals[region] // 128) * 128
    q, k, v, *pools = (jnp.asarray(x, dtype) for x in (q, k, v, *pools))
    table = (jnp.asarray(x.reshape(batch, kv_heads), jnp.int32) for x in (offsets, totals))
    operands = (q, k, v, Pool(*pools, *table), jnp.asarray(budgets), jnp.asarray(lengths, jnp.int32))
    return operands, {"block_size": block, "window": window}


def _expected(operands, options):
    clean = jax.tree.map(lambda x: jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, operands)
    return prefill_attention_xla.prefill_attention(*clean, **options)


def _check(actual, operands, options):
    expected = _expected(operands, options)
    assert actual.dtype == expected.dtype
    tolerance = {jnp.float32: 1e-5, jnp.float16: 4e-3, jnp.bfloat16: 3e-2}[expected.dtype.type]
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)
    for row, length in enumerate(operands[-1].tolist()):
        assert not np.any(actual[row, length:])


@pytest.mark.parametrize(
    ("lengths", "length", "heads", "kv_heads", "head_dim", "block", "window", "options"),
    [
        pytest.param((75, 40), 75, 4, 2, 16, 16, 32, {}, id="ragged, odd length"),
        pytest.param((130, 1), 130, 7, 1, 16, 32, 32, {"dtype": jnp.bfloat16}, id="group of 7, one token"),
        pytest.param((160,), 160, 2, 2, 32, 16, 32, {"budget": (16, 0)}, id="dense fallback, empty prefix"),
        pytest.param((256,), 256, 3, 3, 16, 16, 16, {"budget": (1, 13, 1)}, id="one head much longer"),
        pytest.param((290,), 300, 2, 1, 16, 128, 128, {"dtype": jnp.float16}, id="default tiles"),
        pytest.param((100,), 100, 2, 1, 16, 128, 4096, {}, id="shorter than a block"),
    ],
)
def test_equals_the_oracle_and_never_reads_what_is_not_attended_to(
    lengths, length, heads, kv_heads, head_dim, block, window, options
):
    operands, sizes = _operands(lengths, length, heads, kv_heads, head_dim, block, window, **options)
    _check(prefill(*operands, **sizes), operands, sizes)


@pytest.mark.parametrize(
    "config", [PrefillConfig(16, 16, 4, 2), PrefillConfig(32, 16, 2, 1), PrefillConfig(64, 32, 4, 3)]
)
def test_tile_sizes_do_not_matter(config):
    operands, sizes = _operands((200, 129), 200, 2, 1, 16, 64, 64)
    _check(prefill(*operands, **sizes, config=config), operands, sizes)


def test_scores_past_the_range_of_exp_do_not_overflow():
    (q, *rest), sizes = _operands((96,), 96, 2, 1, 16, 16, 32)
    operands = (100 * q, *rest)
    np.testing.assert_allclose(prefill(*operands, **sizes), _expected(operands, sizes), atol=2e-3)


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block", "window"), [(8, 2, 128, 512), (7, 1, 64, 256), (2, 2, 256, 256)]
)
def test_equals_the_oracle_at_real_sizes(heads, kv_heads, block, window, head_dim, dtype):
    operands, sizes = _operands((3000, 1501), 3001, heads, kv_heads, head_dim, block, window, dtype=dtype)
    _check(prefill(*operands, **sizes), operands, sizes)


def _avals(length, heads, kv_heads, head_dim, block, *, batch=1, dtype=jnp.bfloat16, pool=4096):
    of = jax.ShapeDtypeStruct
    tokens = (of((batch, length, n, head_dim), dtype) for n in (heads, kv_heads, kv_heads))
    shapes = ((batch, kv_heads), (batch, kv_heads, length // block), (batch,))
    table, budgets, lengths = (of(shape, jnp.int32) for shape in shapes)
    pooled = of((pool, head_dim), dtype)
    return (*tokens, Pool(pooled, pooled, table, table), budgets, lengths)


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "head_dim", "block", "dtype"),
    [
        (131072, 32, 8, 128, 128, jnp.bfloat16),
        (1048576, 28, 4, 128, 128, jnp.float16),
        (5000, 14, 2, 64, 64, jnp.bfloat16),
        (4096, 8, 4, 256, 256, jnp.float32),
    ],
)
def test_lowers_for_cuda_without_a_gpu(length, heads, kv_heads, head_dim, block, dtype):
    kernel = partial(prefill_attention_triton.prefill_attention, block_size=block, window=4096)
    assert kernels("triton", kernel, *_avals(length, heads, kv_heads, head_dim, block, dtype=dtype, pool=1 << 20)) == 1


@pytest.mark.parametrize(
    ("avals", "block", "message"),
    [
        (_avals(1024, 8, 2, 80, 128), 128, "head dimension 80: must be a power of two from 16 to 256"),
        (_avals(1024, 8, 2, 64, 8), 8, "block_size = 8: must be a multiple of 16"),
        (_avals(1024, 8, 2, 64, 128, dtype=jnp.float8_e4m3fn), 128, "must be one of bfloat16, float16 and float32"),
    ],
)
def test_what_it_cannot_do_moves_auto_on(avals, block, message):
    kernel = unchecked(prefill_attention_triton.prefill_attention)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(partial(kernel, block_size=block, window=4096), *avals)


@pytest.mark.parametrize("block", [16, 48, 64, 128, 192, 1024])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_default_tiles_fit_the_blocks_and_the_shared_memory(block, head_dim, dtype):
    config = default_config(block, head_dim, dtype)
    assert block % config.queries == 0
    assert config.queries % config.keys == 0
    assert config.keys >= 16
    tokens = config.queries + 2 * config.stages * config.keys
    assert tokens * head_dim * jnp.dtype(dtype).itemsize <= 227 * 1024
