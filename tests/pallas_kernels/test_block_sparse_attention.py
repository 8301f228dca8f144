"""Block-sparse attention against float64 on every backend: lists, columns, ragged rows, tilings, extremes."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_lists import attended, attention, random_blocks, random_columns
from cases import poison, qkv
from implementations import check_output, gpu, implementation, on_every_backend, unused

from tca_jax.pallas_kernels.block_sparse_attention.lists import columns_of_mask, lists_of_mask
from tca_jax.pallas_kernels.triton_call import AttentionTiles


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
    aligned: bool = False

    def draw(self, backend, scale=1):
        """(operands, what they should give); `unused` wherever the operation must not look."""
        rng = np.random.default_rng(0)
        arrays = qkv(0, len(self.lengths), self.length, self.heads, self.kv_heads, self.head_dim, scale=1.0)
        q, k, v = (np.asarray(jnp.asarray(x, self.dtype), np.float32) for x in (scale * arrays[0], *arrays[1:]))
        sizes = {"block": self.block, "tile": self.tile}
        blocks = random_blocks(rng, self.lengths, self.length, self.heads, shared=self.shared, **sizes)
        if self.aligned:
            mask = rng.random(blocks.counts.shape + blocks.counts.shape[-1:]) < 0.4  # not always the diagonal
            blocks = lists_of_mask(jnp.asarray(mask), self.block)
        columns = None
        if self.columns is not None:
            columns = random_columns(rng, len(self.lengths), self.length, self.heads, self.columns)
        expected = attention(q, k, v, blocks, columns, self.lengths, **sizes)
        q, k, v = (jnp.asarray(poison(x, self.lengths, unused(backend)), self.dtype) for x in (q, k, v))
        return (q, k, v, blocks, jnp.asarray(self.lengths, jnp.int32), columns), expected

    def apply(self, function, q, k, v, blocks, lengths, columns, **options):
        sizes = {"block_size": self.block, "tile_size": self.tile, "aligned": self.aligned}
        return function(q, k, v, blocks, lengths, columns=columns, **sizes, **options)


@on_every_backend("block_sparse_attention")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((75, 40), 75, 4, 1, 16, 16, 16), id="ragged, group of 4, odd length"),
        pytest.param(Case((130, 1), 130, 7, 1, 128, 16, 32, dtype=jnp.bfloat16), id="group of 7, tiles of two blocks"),
        pytest.param(Case((96, 33), 100, 2, 2, 32, 32, 32, shared=True), id="lists that tiles share"),
        pytest.param(Case((90, 70), 96, 6, 1, 16, 16, 32, 37, shared=True), id="columns, room for no whole tile"),
        pytest.param(Case((64,), 64, 2, 1, 64, 32, 64, 1, True, jnp.float16), id="one column, d 64"),
        pytest.param(Case((60, 31), 60, 2, 1, 16, 16, 32), id="two tiles"),
        pytest.param(Case((17, 5), 20, 1, 1, 16, 32, 64, 20, shared=True), id="shorter than a block"),
        pytest.param(Case((75, 40), 75, 4, 1, 16, 16, 16, aligned=True), id="aligned"),
        *(
            pytest.param(Case(lengths, lengths[0], *heads, block, block, dtype=dtype, aligned=True), marks=gpu)
            for lengths, heads, block in [
                ((2048,), (8, 2, 128), 128),
                ((1501, 777), (4, 4, 64), 128),
                ((1999, 300), (7, 1, 128), 256),
                ((640, 1), (8, 2, 128), 128),
            ]
            for dtype in (jnp.bfloat16, jnp.float16)
        ),
        *(
            pytest.param(Case((1500, 801), 1501, *sizes[:2], d, *sizes[2:], sizes[4] is not None, dtype), marks=gpu)
            for sizes in [(8, 2, 128, 128, None), (7, 1, 64, 64, 300), (2, 2, 64, 128, 1000), (4, 4, 128, 256, None)]
            for d in (64, 128, 256)
            for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        ),
    ],
)
def test_equals_the_oracle(case, backend):
    function = implementation("block_sparse_attention", backend)
    operands, expected = case.draw(backend)
    try:
        check_output(case.apply(function, *operands), expected, case.lengths)
    except NotImplementedError as error:
        pytest.skip(str(error))
    if case.dtype == jnp.float32:  # scores past the range of exp
        operands, expected = case.draw(backend, 100)
        check_output(case.apply(function, *operands), expected, case.lengths, 2e-3)


@pytest.mark.parametrize("config", [(16, 16, 4, 2), (32, 32, 2, 1), (64, 16, 4, 3)])
def test_tile_sizes_do_not_matter(config):
    case = Case((200, 129), 200, 2, 1, 16, 32, 64, 50, shared=True)
    operands, expected = case.draw("triton")
    kernel = implementation("block_sparse_attention", "triton")
    check_output(case.apply(kernel, *operands, config=AttentionTiles(*config)), expected, case.lengths)


def test_lists_and_columns_of_masks():
    rng = np.random.default_rng(0)
    mask, tokens = rng.random((2, 3, 6, 6)) < 0.5, rng.random((2, 3, 96)) < 0.3
    mask[0, 0], mask[1, 2], tokens[0, 1] = True, False, False
    blocks = jax.jit(partial(lists_of_mask, block_size=16))(jnp.asarray(mask))
    columns = columns_of_mask(jnp.asarray(tokens), 96)
    np.testing.assert_array_equal(blocks.counts, (mask & np.tri(6, dtype=bool)).sum(axis=-1))
    for row, head in np.ndindex(2, 3):
        wide = np.kron(mask[row, head], np.ones((16, 16), bool)) & np.tri(96, dtype=bool)
        np.testing.assert_array_equal(attended(blocks, None, row, head, 96, block=16, tile=16), wide)
        listed = columns.tokens[row, head, : columns.counts[row, head]]
        np.testing.assert_array_equal(listed, np.flatnonzero(tokens[row, head]))
    few = columns_of_mask(jnp.asarray(tokens), 5)
    assert int(few.counts.max()) == 5
    np.testing.assert_array_equal(few.tokens[1, 0], np.flatnonzero(tokens[1, 0])[:5])
