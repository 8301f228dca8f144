"""Prefill attention against float64 on every backend: prefix and window, ragged rows, tilings, extremes."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison
from implementations import INTERPRET, check_output, gpu, implementation, on_every_backend, unused

from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.prefill_attention import FarBlocks, mosaic, mosaic_fp8
from tca_jax.pallas_kernels.tiles import Tiles
from tca_jax.pallas_kernels.triton_call import AttentionTiles


def _operands(backend, lengths, length, heads, kv_heads, head_dim, block, window, dtype=jnp.float32, budget=None):
    """Random prompts and pools, `unused` where no kernel must look; `budget` of each block by KV head, or random."""
    rng, batch = np.random.default_rng(0), len(lengths)
    shapes = ((batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads))
    q, k, v = (poison(rng.standard_normal(shape), lengths, unused(backend)) for shape in shapes)
    budgets = np.zeros((batch, kv_heads, length // block), np.int32)
    for row, n in enumerate(lengths):
        ranked = max(0, n // block - window // block)
        drawn = rng.integers(0, block + 1, (kv_heads, ranked))
        budgets[row, :, :ranked] = drawn if budget is None else np.array(budget)[:, None]
    totals = budgets.sum(axis=-1).ravel()
    offsets, begin = np.zeros(totals.size, np.int32), 0
    # XLA reads whole tiles of a pool, whose gaps are zeros; other backends read no gaps.
    pools = np.full(
        (2, max(128, (-(-totals // 128) * 128).sum()), head_dim), 0 if backend == "xla" else unused(backend)
    )
    for region in rng.permutation(totals.size):  # regions need not lie in the order of the heads
        offsets[region] = begin
        pools[:, begin : begin + totals[region]] = rng.standard_normal((2, totals[region], head_dim))
        begin += -(-totals[region] // 128) * 128
    q, k, v, *pools = (jnp.asarray(x, dtype) for x in (q, k, v, *pools))
    table = (jnp.asarray(x.reshape(batch, kv_heads), jnp.int32) for x in (offsets, totals))
    return q, k, v, Pool(*pools, *table), jnp.asarray(budgets), jnp.asarray(lengths, jnp.int32)


def _expected(q, k, v, pool, budgets, lengths, far=None, *, block_size, window):
    q, k, v, *pools = (np.asarray(x, np.float64) for x in (q, k, v, pool.k, pool.v))
    pool, budgets, far = jax.tree.map(np.asarray, (pool, budgets, far))
    out, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for row, n in enumerate(lengths.tolist()):
        for block, head in np.ndindex(-(-n // block_size), q.shape[2]):
            begin, end, kv = block * block_size, min((block + 1) * block_size, n), head // group
            first, bias = max(0, begin - window), np.zeros(0)
            offset, prefix = int(pool.offsets[row, kv]), int(budgets[row, kv, : first // block_size].sum())
            parts = [[x[row, first:end, kv] for x in (k, v)], [x[offset : offset + prefix] for x in pools]]
            if far is not None:
                place = row, kv, block
                blocks = far.blocks[place][: far.counts[place]]
                tokens = [t for b in blocks for t in range(b, b + block_size) if not far.selected[row, kv, t]]
                bias = np.float64(far.mean_bias[place][: far.mean_counts[place]])
                means = np.flatnonzero(bias > -np.inf)
                bias, of_blocks = bias[means], (np.asarray(x, np.float64) for x in (far.mean_k, far.mean_v))
                parts += [[x[row, tokens, kv] for x in (k, v)], [x[row, means, kv] for x in of_blocks]]
            keys, values = map(np.concatenate, zip(*parts, strict=True))
            logits = q[row, begin:end, head] @ keys.T / np.sqrt(q.shape[-1])
            logits[:, len(keys) - len(bias) :] += bias
            seen = np.arange(len(keys)) + first <= np.arange(begin, end)[:, None]
            seen[:, end - first :] = True
            out[row, begin:end, head] = oracle.softmax(np.where(seen, logits, -np.inf)) @ values
    return out


@on_every_backend("prefill_attention")
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(((75, 40), 75, 4, 2, 16, 16, 32), id="ragged, odd length"),
        pytest.param(((130, 1), 130, 7, 1, 64, 32, 32, jnp.bfloat16), id="group of 7, one token"),
        pytest.param(((160,), 160, 2, 2, 32, 16, 32, jnp.float32, (16, 0)), id="dense fallback, empty prefix"),
        pytest.param(((256,), 256, 18, 3, 16, 16, 16, jnp.float32, (1, 13, 1)), id="one head much longer, group of 6"),
        pytest.param(((300, 290), 300, 4, 1, 128, 128, 128, jnp.float16), id="default tiles, group of 4"),
        pytest.param(((100,), 100, 2, 1, 16, 128, 4096), id="shorter than a block"),
        *(
            pytest.param(((1501, 801), 1501, heads, kv_heads, d, b, w, dtype), marks=gpu)
            for heads, kv_heads, b, w in [(8, 2, 128, 512), (7, 1, 64, 256), (2, 2, 256, 256), (28, 4, 128, 4096)]
            for d in (64, 128, 256)
            for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        ),
    ],
)
def test_equals_the_oracle(sizes, backend):
    operands, (lengths, *_, block, window) = _operands(backend, *sizes), sizes[:7]
    options = {"block_size": block, "window": window}
    function = partial(implementation("prefill_attention", backend), **options)
    try:
        check_output(function(*operands), _expected(*operands, **options), lengths)
    except NotImplementedError as error:
        pytest.skip(str(error))
    if operands[0].dtype == jnp.float32:  # scores past the range of exp
        large = 100 * operands[0], *operands[1:]
        check_output(function(*large), _expected(*large, **options), lengths, 2e-3)


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        *(("xla", {"tiles": Tiles(*tiles)}) for tiles in [(64, 8, 1), (192, 512, 3), (256, 1024, 1)]),
        *(("triton", {"config": AttentionTiles(*tiles)}) for tiles in [(16, 16, 4, 2), (64, 32, 4, 3)]),
    ],
)
def test_tile_sizes_do_not_matter(backend, config):
    operands, options = _operands(backend, (200, 129), 200, 2, 1, 16, 64, 64), {"block_size": 64, "window": 64}
    function = implementation("prefill_attention", backend)
    check_output(function(*operands, **options, **config), _expected(*operands, **options), (200, 129))


def _far(operands, block_size, window, shift):
    """Random lists of blocks from token `shift` on, means and selected tokens; what is not used is NaN or negative."""
    rng, k = np.random.default_rng(1), operands[1]
    batch, length, heads, d = k.shape
    blocks = -(-length // block_size)
    edges = np.maximum(np.arange(blocks) - window // block_size, 0)
    listed = np.full((batch, heads, blocks, max(1, blocks)), -1, np.int32)
    counts = np.zeros((batch, heads, blocks), np.int32)
    bias = np.where(rng.random((batch, heads, blocks, blocks)) < 0.7, rng.normal(size=(blocks, blocks)), -np.inf)
    for place in np.ndindex(counts.shape):
        chosen = np.flatnonzero(rng.random(max(0, edges[place[-1]] - (shift > 0))) < 0.5)
        counts[place] = len(chosen)
        listed[place][: len(chosen)] = chosen * block_size + shift
        bias[place][chosen] = -np.inf
    bias[..., 0] = np.nan  # past every count below
    bias = np.roll(bias, -1, axis=-1)
    means = rng.normal(size=(2, batch, blocks, heads, d))
    selected = rng.random((batch, heads, length)) < 0.3
    mean_counts = np.minimum(np.broadcast_to(edges, counts.shape), blocks - 1) * (rng.random(counts.shape) < 0.8)
    arrays = listed, counts, selected, *means.astype(np.float32), bias.astype(np.float32), mean_counts.astype(np.int32)
    far = FarBlocks(*map(jnp.asarray, arrays))
    return far._replace(mean_k=far.mean_k.astype(k.dtype), mean_v=far.mean_v.astype(k.dtype))


LARGE = (8, 2, 128, 128, 256), (7, 1, 64, 64, 256), (14, 2, 64, 128, 256), (4, 4, 128, 256, 256), (4, 4, 128, 128, 0)


@on_every_backend("prefill_attention")
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(((135, 130), 135, 4, 2, 16, 16, 32), id="ragged, odd length"),
        pytest.param(((160,), 160, 7, 1, 64, 32, 32, jnp.bfloat16), id="group of 7"),
        pytest.param(((75, 40), 75, 6, 1, 16, 16, 0), id="no window, group of 6"),
        pytest.param(((40,), 40, 4, 4, 16, 16, 64), id="window longer than the prompt"),
        *(
            pytest.param(((1501, 801), 1501, *sizes, dtype), marks=gpu)
            for sizes in LARGE
            for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        ),
    ],
)
def test_far_blocks_equal_the_oracle(sizes, backend):
    operands, (lengths, *_, block, window) = _operands(backend, *sizes), sizes[:7]
    options = {"block_size": block, "window": window}
    far = _far(operands, **options, shift=0 if backend == "mosaic" else block // 3)
    try:
        out = implementation("prefill_attention", backend)(*operands, far=far, **options)
    except NotImplementedError as error:
        pytest.skip(str(error))
    check_output(out, _expected(*operands, far, **options), lengths)


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("spread", [1, 4])
@pytest.mark.parametrize(
    "sizes", [LARGE[0], LARGE[2], (28, 4, 128, 128, 4096), (14, 2, 64, 128, 256), (7, 1, 64, 128, 0)]
)
def test_eight_bits_are_near_the_oracle(sizes, spread, dtype):
    """Between values that are independent: a mean over few of them has the whole error of each."""
    (*shape, block, window), lengths = sizes, (1501, 801)
    q, *operands = _operands("mosaic_fp8", lengths, 1501, *shape, block, window, dtype)
    operands, options = (spread * q, *operands), {"block_size": block, "window": window}
    for far in (None, _far(operands, **options, shift=0)):
        out = np.asarray(mosaic_fp8.prefill_attention(*operands, far=far, **options), np.float64)
        expected = _expected(*operands, far, **options)
        assert np.linalg.norm(out - expected) < 0.06 * np.linalg.norm(expected)
        assert not any(np.any(out[row, length:]) for row, length in enumerate(lengths))


@gpu
def test_eight_bits_add_up_over_long_prompts():
    """Equal scores, values of one in the first half of the prompt: Hopper's own sums of e4m3 stop at 14 bits."""
    length, no_pool = 32768, jnp.zeros((128, 128), jnp.bfloat16)
    q, k = (jnp.zeros((1, length, heads, 128), jnp.bfloat16) for heads in (2, 1))
    v = jnp.broadcast_to((jnp.arange(length) < length // 2).astype(q.dtype)[None, :, None, None], k.shape)
    pool = Pool(no_pool, no_pool, *[jnp.zeros((1, 1), jnp.int32)] * 2)
    budgets, n = jnp.zeros((1, 1, length // 128), jnp.int32), jnp.array([length], jnp.int32)
    out = mosaic_fp8.prefill_attention(q, k, v, pool, budgets, n, block_size=128, window=length)
    np.testing.assert_allclose(np.float64(out[0, -1]), 0.5, rtol=0.01)


def test_operands_past_the_range_of_codes_are_finite():
    """Large scores, zeros, and float16 whose rotation passes its range."""
    for scale, dtype in ((1e4, jnp.bfloat16), (0, jnp.bfloat16), (1e4, jnp.float16)):
        q, k, v, *rest = _operands("mosaic", (300,), 384, 2, 1, 64, 128, 128, dtype)
        q = jnp.full_like(q, scale) if dtype == jnp.float16 else (scale * q).astype(dtype)
        given = q, (scale * k).astype(dtype), v, *rest
        operands = mosaic.kernel_operands(*given, None, unit=1, block_size=128, window=128)
        rounding = jax.jit(partial(mosaic_fp8.round_operands, interpret=INTERPRET))(operands).rounding
        softmax = SimpleNamespace(rows=rounding.rows, key_scales=rounding.keys[0, 0])
        scales = mosaic_fp8.EightBitSoftmax.scale_of(softmax, 0)
        assert bool(jnp.isfinite(1 / scales).all())
        assert float(scales.max()) <= 1  # from 1.3 on 1.5 2^23 times it is no float32 with a last bit of one


def test_rounded_operands_give_nearly_the_same_products():
    """Keys with a large mean and large channels, and one large key, which spoils its own tile of 128 alone."""
    lengths, (block, window) = (384, 230), (128, 128)
    q, k, v, pool, budgets, n = _operands("mosaic", lengths, 384, 4, 2, 64, block, window, jnp.bfloat16)
    budgets = budgets.at[0, 0].set(0)  # an empty region where another one begins
    pool = pool._replace(offsets=pool.offsets.at[0, 0].set(pool.offsets[1, 1]), lengths=pool.lengths.at[0, 0].set(0))
    channels = 1 + 20 * (jnp.arange(64) % 16 == 3).astype(k.dtype)
    k, pool = (k + 8) * channels, pool._replace(k=(pool.k / 2 + 8) * channels)
    k = k.at[:, 200].multiply(20)
    far = _far((q, k, v), block, window, 0)
    far = far._replace(mean_k=(far.mean_k / 2 + 8) * channels)
    operands = mosaic.kernel_operands(q, k, v, pool, budgets, n, far, unit=1, block_size=block, window=window)
    rounded = jax.jit(partial(mosaic_fp8.round_operands, interpret=INTERPRET))(operands)
    scales = [np.repeat(np.float64(x[..., 0]), 128, axis=-1) for x in rounded.rounding[1:4]]

    def products(q, k, scale):
        return np.einsum("qd,kd->qk", np.float64(q), np.float64(k)) * np.float64(scale)[:, None]

    for row, head in np.ndindex(2, 4):
        there, kv, unit = slice(lengths[row]), head // 2, np.full(lengths[row], np.log2(np.e))
        others = np.r_[:128, 256 : lengths[row]]
        ours, offset = rounded.rounding.rows[row, head, there], int(pool.offsets[row, kv])
        inside = slice(offset, offset + int(operands.prefixes[row, kv, -1]))
        expected = products(q[row, there, head], k[row, others, kv], unit)
        wide = lambda codes, scales: np.float64(codes) * scales[: len(codes), None]  # noqa: E731
        attended = np.flatnonzero((operands.far.mean_bias[row, kv] > -1e8).any(axis=0))
        of_prompt = k[row, others, kv], wide(rounded.k[row, there, kv], scales[0][row, kv])[others]
        of_mean = (products(rounded.q[row, there, head], of_prompt[1], ours) - expected).mean(axis=1)
        means = far.mean_k[row, :, kv], wide(rounded.far.mean_k[row, :, kv], scales[2][row, kv])
        means = [x[attended] for x in means]
        of_pool = pool.k[inside], wide(rounded.pool_k[inside], scales[1][inside])
        for keys, codes in (of_prompt, of_pool, means):
            theirs = products(q[row, there, head], keys, unit)
            error = products(rounded.q[row, there, head], codes, ours) - theirs - of_mean[:, None]
            assert np.linalg.norm(error) <= 0.02 * expected.std(axis=1).mean() * np.sqrt(error.size)
            if len(keys) > 100:  # no factor is off
                theirs -= theirs.mean(axis=1, keepdims=True)
                assert abs(np.vdot(error, theirs)) < 0.003 * np.vdot(theirs, theirs)
        order = np.arange(384).reshape(-1, 2, 4, 2).swapaxes(1, 2).ravel()
        values = np.float64(rounded.v[row, kv].T) * float(rounded.rounding.values[row, kv])
        actual = np.float64(v[row, :, kv])[order]
        keep = order < lengths[row]
        np.testing.assert_allclose(values[keep], actual[keep], rtol=0.07, atol=0.01)
        assert not values[(order >= lengths[row]) & (order < 256)].any()  # of the tile that the prompt ends in


def test_codes_are_a_logarithm():
    """Read as e4m3, code c is within 9% of 2 ** (c / 8 - 7), 4% above it on average, and the top code 3%."""
    codes = np.arange(8, 127)
    values = np.float64(jax.lax.bitcast_convert_type(jnp.asarray(codes, jnp.uint8), jnp.float8_e4m3fn))
    excess = values / 2 ** (codes / 8 - 7)
    assert excess.min() >= 1
    assert excess.max() < 1.09
    np.testing.assert_allclose([excess.mean(), excess[codes == mosaic_fp8._TOP][0]], [1.04, 1.03], atol=0.01)
