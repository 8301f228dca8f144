"""Prefill attention against the oracle: prefix and window, tile sizes, where regions lie."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison, qkv, regions, unchecked

from tca_jax.methods.config import TCAConfig
from tca_jax.pallas_kernels.prefill_attention import prefill_attention
from tca_jax.pallas_kernels.prefill_attention import xla as prefill_attention_xla
from tca_jax.pallas_kernels.select_tokens import select_tokens, selection_mask
from tca_jax.pallas_kernels.tiles import Tiles

CONFIG = TCAConfig(block_size=8, window=16)
LENGTHS = np.array([75, 40], np.int32)


def _case(dtype=jnp.float32, heads=8):
    """Inputs of the operation with random budgets, unequal over heads, and the tokens they keep."""
    q, k, v = (np.asarray(jnp.asarray(x, dtype), np.float32) for x in qkv(0, 2, 75, heads, 2, 16))
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.random((2, 2, 75)), jnp.float32)
    budgets = rng.integers(0, 9, (2, 2, 9)).astype(np.int32)
    budgets[:, 1] //= 4
    for row, length in enumerate(LENGTHS.tolist()):
        budgets[row, :, CONFIG.num_ranked_blocks(length) :] = 0
    offsets = jnp.array([[384, 0], [128, 256]])  # the first region ends the pool
    padded = [jnp.asarray(poison(x, LENGTHS), dtype) for x in (q, k, v)]
    pool = select_tokens(scores, jnp.asarray(budgets), *padded[1:], offsets, block_size=8, pool_tokens=512)
    kept = np.asarray(selection_mask(scores, jnp.asarray(budgets), block_size=8))
    args = (*padded, pool, jnp.asarray(budgets), jnp.asarray(LENGTHS))
    return (q, k, v), kept, args


def _expected(arrays, kept, config=CONFIG):
    q, k, _ = arrays
    out, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for row, head, qs, ks, vs in regions(*arrays, LENGTHS):
        for g in range(group):
            out[row, : len(ks), head * group + g] = oracle.attend(qs[:, g], ks, vs, kept[row, head, : len(ks)], config)
    return out


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(jnp.float32, 2e-5), (jnp.bfloat16, 3e-2), (jnp.float16, 4e-3)],
    ids=["f32", "bf16", "f16"],
)
def test_equals_the_oracle(dtype, tolerance):
    arrays, kept, args = _case(dtype)
    out = prefill_attention(*args, block_size=8, window=16)
    assert out.dtype == dtype
    expected = _expected(arrays, kept)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=tolerance, rtol=tolerance)
    assert not np.any(np.asarray(out)[1, 40:])


@pytest.mark.parametrize(
    "tiles",
    [Tiles(8, 8, 1), Tiles(16, 24, 1), Tiles(24, 256, 4), Tiles(80, 512, 3), Tiles(256, 1024, 1)],
    ids=lambda tiles: f"{tiles.queries}x{tiles.keys}x{tiles.parallel}",
)
def test_tile_sizes_do_not_matter(tiles):
    arrays, kept, args = _case(heads=2)
    out = prefill_attention_xla.prefill_attention(*args, block_size=8, window=16, tiles=tiles)
    np.testing.assert_allclose(out, _expected(arrays, kept), atol=2e-5)


def test_window_of_at_least_the_length_is_exact_causal_attention():
    arrays, kept, args = _case()
    out = prefill_attention(*args, block_size=8, window=80)
    np.testing.assert_allclose(out, _expected(arrays, kept & False, TCAConfig(block_size=8, window=80)), atol=2e-5)


def test_scores_past_the_range_of_exp_do_not_overflow():
    arrays, kept, args = _case()
    q, *rest = args
    out = prefill_attention(100 * q, *rest, block_size=8, window=16)
    np.testing.assert_allclose(out, _expected((100 * arrays[0], *arrays[1:]), kept), atol=2e-3)


def test_misfits_are_refused():
    _, _, args = _case()
    with pytest.raises(ValueError, match="window = 20: must be a positive multiple of block_size = 8"):
        prefill_attention(*args, block_size=8, window=20)
    with pytest.raises(ValueError, match=r"budgets has 9 blocks: must be L // block_size = 75 // 16 = 4"):
        prefill_attention(*args, block_size=16, window=32)
    *tokens, pool, budgets, lengths = args
    short = pool._replace(v=pool.v[:128])
    with pytest.raises(ValueError, match=r"pool\.v has shape \(128, 16\): must be \[P = 512, d = 16\]"):
        unchecked(prefill_attention)(*tokens, short, budgets, lengths, block_size=8, window=16)
