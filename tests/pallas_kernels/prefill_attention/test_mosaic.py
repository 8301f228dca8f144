"""The Mosaic prefill kernel: against the oracle on a Hopper GPU, lowered for CUDA anywhere, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import unchecked

from tca_jax.methods.config import TCAConfig
from tca_jax.methods.selection import head_budgets
from tca_jax.pallas_kernels.backends import can_run
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.prefill_attention import mosaic as prefill_attention_mosaic
from tca_jax.pallas_kernels.prefill_attention import xla as prefill_attention_xla
from tca_jax.pallas_kernels.select_tokens import select_tokens
from tca_jax.pallas_kernels.token_scores import token_scores

needs_hopper = pytest.mark.skipif(not can_run("mosaic"), reason="needs a Hopper GPU")


def _operands(seed, batch, length, heads, kv_heads, d, candidates, lengths, config, dtype=jnp.bfloat16):
    """Random prompts with their pools, as prefill hands them to the kernel; unwritten pool rows are poisoned."""
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.normal(size=(batch, length, h, d)), dtype) for h in (heads, kv_heads, kv_heads))
    lengths = jnp.asarray(lengths, jnp.int32)
    q_last = jnp.take_along_axis(q, (lengths - 1)[:, None, None, None], axis=1)[:, 0]
    scored = token_scores(q_last, k, lengths, block_size=config.block_size)
    budgets = head_budgets(scored, jnp.asarray(candidates, jnp.int32), lengths, config)
    capacity = -(-int(budgets.sum(-1).max()) // 128) * 128
    offsets = (capacity * jnp.arange(batch * kv_heads, dtype=jnp.int32)).reshape(batch, kv_heads)
    tokens = max(128, capacity * batch * kv_heads)
    pool = select_tokens(scored.scores, budgets, k, v, offsets, block_size=config.block_size, pool_tokens=tokens)
    row = jnp.arange(tokens)
    used = jnp.any((row >= offsets.ravel()[:, None]) & (row < (offsets + pool.lengths).ravel()[:, None]), axis=0)
    poisoned = (jnp.where(used[:, None], x, 1e4).astype(dtype) for x in (pool.k, pool.v))
    return q, k, v, Pool(*poisoned, offsets, pool.lengths), budgets, lengths


@needs_hopper
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "d", "candidates", "lengths", "window"),
    [
        (1, 2048, 8, 2, 128, (3, 9), (2048,), 256),
        (2, 1501, 4, 4, 64, (0, 5, 14, 2), (1501, 777), 128),
        (2, 2000, 7, 1, 128, (6,), (1999, 300), 512),
        (1, 640, 8, 2, 128, (0, 0), (640,), 4096),
        (3, 1024, 28, 4, 128, (14, 0, 1, 0), (1024, 1, 640), 256),
    ],
)
def test_equals_the_oracle(batch, length, heads, kv_heads, d, candidates, lengths, window, dtype):
    config = TCAConfig(window=window)
    operands = _operands(length, batch, length, heads, kv_heads, d, candidates, lengths, config, dtype)
    sizes = {"block_size": config.block_size, "window": window}
    out = jax.jit(functools.partial(prefill_attention_mosaic.prefill_attention, **sizes))(*operands)
    expected = prefill_attention_xla.prefill_attention(*operands, **sizes)
    error = jnp.linalg.norm((out - expected).astype(jnp.float32)) / jnp.linalg.norm(expected.astype(jnp.float32))
    assert float(error) < 5e-3
    for row, n in enumerate(lengths):
        assert not np.any(np.asarray(out[row, n:], np.float32))


def _shapes(length, heads, kv_heads, d, dtype=jnp.bfloat16, pool=4096, block_size=128):
    of = jax.ShapeDtypeStruct
    pooled, table = of((pool, d), dtype), of((2, kv_heads), jnp.int32)
    return (
        of((2, length, heads, d), dtype),
        of((2, length, kv_heads, d), dtype),
        of((2, length, kv_heads, d), dtype),
        Pool(pooled, pooled, table, table),
        of((2, kv_heads, length // block_size), jnp.int32),
        of((2,), jnp.int32),
    )


@pytest.mark.parametrize(("length", "heads", "kv_heads", "d"), [(131072, 32, 8, 128), (1000, 28, 4, 64)])
@pytest.mark.parametrize("block_size", [128, 256])
def test_lowers_for_cuda_without_a_gpu(length, heads, kv_heads, d, block_size):
    kernel = functools.partial(prefill_attention_mosaic.prefill_attention, block_size=block_size, window=4096)
    shapes = _shapes(length, heads, kv_heads, d, block_size=block_size)
    assert "mosaic_gpu" in jax.jit(kernel).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("shapes", "block_size", "message"),
    [
        (_shapes(1024, 8, 2, 128, jnp.float32), 128, "takes bfloat16 and float16, not float32"),
        (_shapes(1024, 8, 2, 256), 128, "not d = 256 and block_size = 128"),
        (_shapes(1024, 8, 2, 128, block_size=64), 64, "block_size a multiple of 128, not d = 128 and block_size = 64"),
    ],
)
def test_what_it_cannot_do_moves_auto_on(shapes, block_size, message):
    kernel = unchecked(prefill_attention_mosaic.prefill_attention)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(kernel, block_size=block_size, window=4096), *shapes)
