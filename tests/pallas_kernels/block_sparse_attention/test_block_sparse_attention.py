"""Block-sparse attention on every backend against float64, and on CUDA's lowering: lists, columns, ragged rows."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_lists import attended, attention, random_blocks, random_columns
from cases import poison, qkv, unchecked
from cuda_lowering import kernels
from implementations import INTERPRET, implementation, on_every_backend

from tca_jax.pallas_kernels.block_sparse_attention import BlockLists, Columns, block_sparse_attention
from tca_jax.pallas_kernels.block_sparse_attention import triton as block_sparse_attention_triton
from tca_jax.pallas_kernels.block_sparse_attention.lists import columns_of_mask, lists_of_mask
from tca_jax.pallas_kernels.block_sparse_attention.triton import BlockSparseConfig, default_config
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")
_ALIGNED_ONLY = ("mosaic",)  # in a file of its own
gpu = pytest.mark.skipif(INTERPRET, reason="needs an NVIDIA GPU; interpret mode takes too long at this size")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a call."""

    lengths: tuple
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    tile: int
    columns: int | None = None  # their capacity
    shared: bool = False
    dtype: type = jnp.float32

    def draw(self, seed=0):
        """(operands, what they should give); NaN wherever the operation must not look."""
        rng = np.random.default_rng(seed)
        arrays = qkv(seed, len(self.lengths), self.length, self.heads, self.kv_heads, self.head_dim, scale=1.0)
        arrays = [np.asarray(jnp.asarray(x, self.dtype), np.float32) for x in arrays]
        sizes = {"block": self.block, "tile": self.tile}
        blocks = random_blocks(rng, self.lengths, self.length, self.heads, shared=self.shared, **sizes)
        columns = None
        if self.columns is not None:
            columns = random_columns(rng, len(self.lengths), self.length, self.heads, self.columns)
        expected = attention(*arrays, blocks, columns, self.lengths, **sizes)
        q, k, v = (jnp.asarray(poison(x, self.lengths), self.dtype) for x in arrays)
        return (q, k, v, blocks, jnp.asarray(self.lengths, jnp.int32), columns), expected

    @property
    def options(self):
        return {"block_size": self.block, "tile_size": self.tile}


def apply(function, **options):
    """The function of operands of which the columns are the last."""
    return lambda *operands: function(*operands[:-1], columns=operands[-1], **options)


def check(actual, expected, dtype, lengths):
    assert actual.dtype == dtype
    tolerance = {jnp.float32: 2e-5, jnp.float16: 4e-3, jnp.bfloat16: 3e-2}[dtype]
    actual = np.asarray(actual, np.float64)
    np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)
    for row, length in enumerate(lengths):
        assert not np.any(actual[row, length:])


@on_every_backend("block_sparse_attention", but=_ALIGNED_ONLY)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((75, 40), 75, 4, 1, 16, 16, 16), id="ragged, group of 4, odd length"),
        pytest.param(Case((130, 1), 130, 7, 1, 16, 16, 32, dtype=jnp.bfloat16), id="group of 7, tiles of two blocks"),
        pytest.param(Case((96, 33), 100, 2, 2, 32, 32, 32, shared=True), id="lists that tiles share"),
        pytest.param(Case((90, 70), 96, 4, 2, 16, 16, 32, 37, shared=True), id="columns, room for no whole tile"),
        pytest.param(Case((64,), 64, 2, 1, 64, 32, 64, 1, True, jnp.float16), id="one column, d 64"),
        pytest.param(Case((17, 5), 20, 1, 1, 16, 32, 64, 20, shared=True), id="shorter than a block"),
    ],
)
def test_equals_what_the_lists_say_and_never_reads_anything_else(case, backend):
    operands, expected = case.draw()
    out = apply(implementation("block_sparse_attention", backend), **case.options)(*operands)
    check(out, expected, case.dtype, case.lengths)


@pytest.mark.parametrize(
    "config", [BlockSparseConfig(16, 16, 4, 2), BlockSparseConfig(32, 32, 2, 1), BlockSparseConfig(64, 16, 4, 3)]
)
def test_tile_sizes_do_not_matter(config):
    case = Case((200, 129), 200, 2, 1, 16, 32, 64, 50, shared=True)
    operands, expected = case.draw(1)
    kernel = implementation("block_sparse_attention", "triton")
    check(apply(kernel, **case.options, config=config)(*operands), expected, jnp.float32, case.lengths)


@on_every_backend("block_sparse_attention", but=_ALIGNED_ONLY)
def test_scores_past_the_range_of_exp_do_not_overflow(backend):
    case = Case((96,), 96, 2, 1, 16, 16, 16, 20, shared=True)
    (q, k, v, blocks, lengths, columns), _ = case.draw(2)
    expected = attention(*map(np.asarray, (100 * q, k, v)), blocks, columns, case.lengths, block=16, tile=16)
    kernel = apply(implementation("block_sparse_attention", backend), **case.options)
    out = kernel(100 * q, k, v, blocks, lengths, columns)
    np.testing.assert_allclose(out, expected, atol=2e-3)


def test_lists_and_columns_of_masks_say_what_the_masks_say():
    rng = np.random.default_rng(0)
    mask, tokens = rng.random((2, 3, 6, 6)) < 0.5, rng.random((2, 3, 96)) < 0.3
    mask[0, 0], mask[1, 2], tokens[0, 1] = True, False, False
    blocks = jax.jit(partial(lists_of_mask, block_size=16))(jnp.asarray(mask))
    columns = columns_of_mask(jnp.asarray(tokens), 96)
    np.testing.assert_array_equal(blocks.counts, (mask & np.tri(6, dtype=bool)).sum(axis=-1))
    for row, head in np.ndindex(2, 3):
        wide = np.kron(mask[row, head], np.ones((16, 16), bool)) & np.tri(96, dtype=bool)
        np.testing.assert_array_equal(attended(blocks, None, row, head, 96, block=16, tile=16), wide)
        np.testing.assert_array_equal(
            columns.tokens[row, head, : columns.counts[row, head]], np.flatnonzero(tokens[row, head])
        )
    few = columns_of_mask(jnp.asarray(tokens), 5)
    assert int(few.counts.max()) == 5
    np.testing.assert_array_equal(few.tokens[1, 0], np.flatnonzero(tokens[1, 0])[:5])


def test_the_work_follows_what_is_listed_and_not_the_capacity():
    """Entries that do not count may name anything: nothing of them is read."""
    case = Case((64,), 64, 2, 1, 16, 16, 16)
    (q, k, v, blocks, lengths, _), expected = case.draw(3)
    wild = jnp.where(
        jnp.arange(blocks.distances.shape[-1]) < blocks.counts[..., None], blocks.distances, jnp.int32(2**31 - 1)
    )
    kernel = implementation("block_sparse_attention", "triton")
    out = kernel(q, k, v, blocks._replace(distances=wild), lengths, **case.options)
    check(out, expected, jnp.float32, case.lengths)


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block", "tile", "columns"),
    [(8, 2, 128, 128, None), (7, 1, 64, 64, 300), (2, 2, 64, 128, 1000), (4, 4, 128, 256, None)],
)
def test_equals_the_oracle_at_real_sizes(heads, kv_heads, block, tile, columns, head_dim, dtype):
    case = Case((1500, 801), 1501, heads, kv_heads, head_dim, block, tile, columns, columns is not None, dtype)
    operands, expected = case.draw()
    out = apply(implementation("block_sparse_attention", "triton"), **case.options)(*operands)
    check(out, expected, dtype, case.lengths)


def _avals(length, heads, kv_heads, head_dim, block, tile, *, shared=False, columns=None, dtype=jnp.bfloat16):
    of, tiles = jax.ShapeDtypeStruct, -(-length // tile)
    tokens = (of((1, length, n, head_dim), dtype) for n in (heads, kv_heads, kv_heads))
    blocks = BlockLists(
        of((1, heads, 1 if shared else tiles, -(-length // block)), jnp.int32), of((1, heads, tiles), jnp.int32)
    )
    listed = None
    if columns is not None:
        listed = Columns(of((1, heads, columns), jnp.int32), of((1, heads), jnp.int32))
    return (*tokens, blocks, of((1,), jnp.int32), listed)


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "head_dim", "block", "tile", "options"),
    [
        (131072, 32, 8, 128, 128, 128, {}),
        (131072, 32, 8, 128, 64, 64, {"shared": True, "columns": 1000}),
        (1048576, 28, 4, 128, 128, 128, {"shared": True, "columns": 3500, "dtype": jnp.float16}),
        (5000, 14, 2, 64, 64, 128, {}),
        (4096, 8, 4, 256, 128, 256, {"dtype": jnp.float32}),
    ],
)
def test_lowers_for_cuda_without_a_gpu(length, heads, kv_heads, head_dim, block, tile, options):
    kernel = apply(block_sparse_attention_triton.block_sparse_attention, block_size=block, tile_size=tile)
    assert kernels("triton", kernel, *_avals(length, heads, kv_heads, head_dim, block, tile, **options)) == 1


@pytest.mark.parametrize(
    ("avals", "block", "message"),
    [
        (_avals(1024, 8, 2, 80, 128, 128), 128, "head dimension 80: must be a power of two from 16 to 256"),
        (_avals(1024, 8, 2, 64, 8, 8), 8, "block_size = 8: must be a multiple of 16"),
        (_avals(1024, 8, 2, 64, 128, 128, dtype=jnp.float8_e4m3fn), 128, "must be one of bfloat16, float16 and float"),
    ],
)
def test_what_it_cannot_do_moves_auto_on(avals, block, message):
    kernel = unchecked(block_sparse_attention_triton.block_sparse_attention)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(apply(kernel, block_size=block, tile_size=block), *avals)


def _call(avals, block=128, tile=128):
    function = apply(unchecked(block_sparse_attention), block_size=block, tile_size=tile)
    return lambda: jax.eval_shape(function, *avals)


def _with(avals, **shapes):
    q, k, v, blocks, lengths, columns = avals
    replaced = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    return (q, k, v, blocks._replace(**replaced), lengths, columns)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_call(_avals(512, 4, 2, 64, 128, 128), 0), "block_size = 0: must be at least 1"),
        (_call(_avals(512, 4, 2, 64, 128, 128), 128, 192), "tile_size = 192: must be a positive multiple of block_s"),
        (
            _call(_avals(512, 4, 2, 64, 128, 128), 128, 256),
            r"blocks.counts has 4 tiles: must be ceil\(L / tile_size\) = 2",
        ),
        (
            _call(_with(_avals(512, 4, 2, 64, 128, 128), distances=(1, 4, 3, 4))),
            "distances has 3 tiles: must be 4, or 1",
        ),
        (_call(_with(_avals(512, 4, 2, 64, 128, 128), distances=(1, 4, 4, 0))), "must have room for one block"),
        (_call(_with(_avals(512, 4, 2, 64, 128, 128), counts=(1, 2, 4))), r"must be \[B = 1, Hq = 4, N\]"),
        (_call(_avals(512, 4, 3, 64, 128, 128)), "4 query heads and 3 KV heads"),
        (_call(_avals(512, 4, 2, 64, 128, 128, columns=3)), "columns beside blocks.distances of 4 tiles"),
        (_call(_avals(512, 4, 2, 64, 128, 128, columns=0, shared=True)), "room for one column at least"),
    ],
)
def test_misfits_are_refused_before_anything_is_compiled(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("block", "tile"), [(16, 16), (64, 64), (64, 128), (128, 128), (128, 256), (192, 384)])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_default_tiles_fit_the_lists_and_the_shared_memory(block, tile, head_dim, dtype):
    config = default_config(block, tile, head_dim, dtype)
    assert tile % config.queries == 0
    assert block % config.keys == 0
    assert config.keys >= 16
    tokens = config.queries + 2 * config.stages * config.keys
    assert tokens * head_dim * jnp.dtype(dtype).itemsize <= 227 * 1024
