"""The Mosaic kernel: against the oracle on a Hopper GPU, lowered for CUDA anywhere, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import unchecked
from cuda_lowering import kernels

from tca_jax.pallas_kernels.backends import can_run
from tca_jax.pallas_kernels.block_sparse_attention import BlockLists, Columns
from tca_jax.pallas_kernels.block_sparse_attention import mosaic as block_sparse_attention_mosaic
from tca_jax.pallas_kernels.block_sparse_attention import xla as block_sparse_attention_xla
from tca_jax.pallas_kernels.block_sparse_attention.lists import lists_of_mask

needs_hopper = pytest.mark.skipif(not can_run("mosaic"), reason="needs a Hopper GPU")


@needs_hopper
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "d", "lengths", "block"),
    [
        (2048, 8, 2, 128, (2048,), 128),
        (1501, 4, 4, 64, (1501, 777), 128),
        (2000, 7, 1, 128, (1999, 300), 256),
        (640, 8, 2, 128, (640, 1), 128),
    ],
)
def test_equals_the_oracle(length, heads, kv_heads, d, lengths, block, dtype):
    rng, tiles = np.random.default_rng(length), -(-length // block)
    q, k, v = (jnp.asarray(rng.normal(size=(len(lengths), length, h, d)), dtype) for h in (heads, kv_heads, kv_heads))
    mask = rng.random((len(lengths), heads, tiles, tiles)) < 0.4  # the diagonal is not always listed
    mask[:, 0] = False
    blocks = lists_of_mask(jnp.asarray(mask), block)
    operands = (q, k, v, blocks, jnp.asarray(lengths, jnp.int32))
    sizes = {"block_size": block, "tile_size": block, "aligned": True}
    out = block_sparse_attention_mosaic.block_sparse_attention(*operands, **sizes)
    expected = block_sparse_attention_xla.block_sparse_attention(*operands, **sizes)
    error = jnp.linalg.norm((out - expected).astype(jnp.float32)) / jnp.linalg.norm(expected.astype(jnp.float32))
    assert float(error) < 5e-3
    assert not np.any(np.asarray(out[:, :, 0], np.float32))
    for row, n in enumerate(lengths):
        assert not np.any(np.asarray(out[row, n:], np.float32))


def _shapes(length, heads, kv_heads, d, dtype=jnp.bfloat16, block=128, shared=False):
    of, tiles = jax.ShapeDtypeStruct, -(-length // block)
    tokens = (of((2, length, n, d), dtype) for n in (heads, kv_heads, kv_heads))
    lists = BlockLists(of((2, heads, 1 if shared else tiles, tiles), jnp.int32), of((2, heads, tiles), jnp.int32))
    return (*tokens, lists, of((2,), jnp.int32))


@pytest.mark.parametrize(("length", "heads", "kv_heads", "d"), [(131072, 32, 8, 128), (1000, 28, 4, 64)])
@pytest.mark.parametrize("block", [128, 256])
def test_lowers_for_cuda_without_a_gpu(length, heads, kv_heads, d, block):
    kernel = functools.partial(
        block_sparse_attention_mosaic.block_sparse_attention, block_size=block, tile_size=block, aligned=True
    )
    for shared in (False, True):
        assert kernels("mosaic", kernel, *_shapes(length, heads, kv_heads, d, block=block, shared=shared)) == 1


COLUMNS = Columns(jnp.zeros((2, 8, 1), jnp.int32), jnp.zeros((2, 8), jnp.int32))


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (_shapes(1024, 8, 2, 128, jnp.float32), {}, "takes bfloat16 and float16, not float32"),
        (_shapes(1024, 8, 2, 256), {}, "not d = 256 and block_size = 128"),
        (_shapes(1024, 8, 2, 128, block=64), {"block_size": 64, "tile_size": 64}, "not d = 128 and block_size = 64"),
        (_shapes(1024, 8, 2, 128), {"aligned": False}, "takes aligned blocks, and no columns"),
        (_shapes(1024, 8, 2, 128, shared=True), {"columns": COLUMNS}, "takes aligned blocks, and no columns"),
    ],
)
def test_what_it_cannot_do_moves_auto_on(shapes, options, message):
    kernel = unchecked(block_sparse_attention_mosaic.block_sparse_attention)
    options = {"block_size": 128, "tile_size": 128, "aligned": True, **options}
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(kernel, **options), *shapes)
