"""Extend attention through Triton against the XLA oracle: on a GPU for real, else in interpret mode."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import on_device, random_pool, random_ring
from cuda_lowering import kernels

from tca_jax.pallas_kernels.extend_attention import triton as extend_attention_triton
from tca_jax.pallas_kernels.extend_attention import xla as extend_attention_xla
from tca_jax.pallas_kernels.extend_attention.triton import ExtendConfig, default_config
from tca_jax.pallas_kernels.kv import Pool, Ring
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")

INTERPRET = jax.default_backend() != "gpu"
BLOCK, WINDOW = 16, 32
SMALL = ExtendConfig(keys=16, programs=24, warps=4, stages=2, merged=4, queries=16)

extend = partial(extend_attention_triton.extend_attention, interpret=INTERPRET)


def _inputs(first, newest, lengths, *, grown=None, queries=16, group=4, head_dim=16, ring=48, dtype=jnp.float32):
    """Random arguments; pool rows outside the regions and slots that are not local hold NaN."""
    rng = np.random.default_rng(0)
    batch, kv_heads = np.shape(lengths)
    pool = random_pool(rng, lengths, head_dim)
    local = random_ring(rng, newest, kv_heads, head_dim, ring, block_size=BLOCK, window=WINDOW)
    q = jnp.asarray(rng.standard_normal((batch, queries, kv_heads * group, head_dim)), dtype)
    options = {"block_size": BLOCK, "window": WINDOW, "capacity": int(pool.lengths.max())}
    if grown is not None:
        growth = random_pool(rng, grown, head_dim)
        options |= {"growth": on_device(growth, dtype), "growth_capacity": int(growth.lengths.max())}
    at = (jnp.array(x, jnp.int32) for x in (first, newest))
    return (q, on_device(pool, dtype), on_device(local, dtype), *at), options


def _check(actual, arguments, options):
    clean = jax.tree.map(lambda x: jnp.nan_to_num(x) if isinstance(x, jax.Array) else x, (arguments, options))
    out, lse = extend_attention_xla.extend_attention(*clean[0], **clean[1])
    tolerance = 1e-5 if out.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (actual[0], out)), atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(actual[1], lse, atol=1e-3 if out.dtype != jnp.float32 else 1e-5, rtol=1e-5)
    assert actual[0].dtype == out.dtype


@pytest.mark.parametrize(
    ("first", "newest", "shape"),
    [
        pytest.param((40, 48), (47, 63), {"group": 4}, id="four heads a group: many tiles of query rows"),
        pytest.param((40, 48), (47, 63), {"group": 1, "dtype": jnp.bfloat16}, id="a head a group"),
        pytest.param((130, 33), (136, 39), {"group": 7, "queries": 7, "head_dim": 64}, id="seven heads, odd"),
        pytest.param((150, 0), (150, 0), {"queries": 1, "head_dim": 128, "dtype": jnp.bfloat16}, id="one query"),
        pytest.param((145, 17), (159, 18), {"queries": 15, "dtype": jnp.float16}, id="float16, ragged"),
        pytest.param((0, 16), (15, 31), {"ring": 32}, id="a ring that holds everything"),
        pytest.param((48, 56), (47, 60), {"queries": 8}, id="a row without a query"),
    ],
)
def test_equals_the_oracle_and_never_reads_what_is_not_attended_to(first, newest, shape):
    arguments, options = _inputs(first, newest, [[5, 0], [16, 33]], grown=[[0, 40], [17, 16]], **shape)
    _check(extend(*arguments, **options, config=SMALL), arguments, options)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(None, id="the default"),
        pytest.param(ExtendConfig(keys=32, programs=1, warps=4, stages=2, queries=32), id="a chunk a region"),
        pytest.param(
            ExtendConfig(keys=16, programs=9999, warps=4, stages=2, merged=2, queries=64), id="a chunk a tile"
        ),
    ],
)
def test_any_split_gives_the_same(config):
    arguments, options = _inputs((83,), (90,), [[130, 9]], grown=[[0, 50]], queries=8)
    _check(extend(*arguments, **options, config=config), arguments, options)


def test_row_without_a_query_reads_nothing():
    (q, pool, ring, *at), options = _inputs((48, 52), (49, 51), [[5, 9], [16, 33]], queries=4)
    out, lse = extend(q, pool, ring, *at, **options, config=SMALL)
    # Were they read, the second row's own tokens would spread.
    start, length = (np.asarray(x[1]) for x in (pool.offsets, pool.lengths))
    for offset, tokens in zip(start, length, strict=True):
        pool = pool._replace(v=pool.v.at[offset : offset + tokens].set(jnp.nan))
    ring = ring._replace(v=ring.v.at[1].set(jnp.nan))
    again = extend(q, pool, ring, *at, **options, config=SMALL)
    for actual, expected in zip(again, (out, lse), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert not np.any(out[1])
    assert np.all(np.asarray(lse[1]) < -1e29)


def test_scores_far_from_zero_leave_no_trace_of_masked_tokens():
    (q, pool, ring, *at), options = _inputs((48,), (63,), [[5, 40]])
    arguments = (q * 300, pool, ring, *at)
    _check(extend(*arguments, **options, config=SMALL), arguments, options)


def _avals(batch, queries, kv_heads, group, head_dim, pool, ring, dtype):
    shapes = ((batch, queries, kv_heads * group, head_dim), (pool, head_dim), (batch, kv_heads, ring, head_dim))
    q, pooled, local = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    table, at = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, kv_heads), (batch,)))
    return q, Pool(pooled, pooled, table, table), Ring(local, local), at, at


@pytest.mark.parametrize(
    "avals",
    [
        pytest.param((1, 128, 8, 4, 128, 8 * 20480, 4224, jnp.bfloat16), id="LLaMA, a block"),
        pytest.param((1, 1, 8, 4, 128, 8 * 20480, 4224, jnp.bfloat16), id="LLaMA, a token"),
        pytest.param((3, 16, 4, 7, 128, 2**26, 4224, jnp.float16), id="past 2^31"),
        pytest.param((2, 33, 2, 4, 64, 20480, 4224, jnp.float32), id="float32"),
        pytest.param((1, 128, 1, 1, 256, 20480, 4224, jnp.bfloat16), id="d 256"),
    ],
)
def test_lowers_for_cuda_as_two_kernels(avals):
    function = partial(
        extend_attention_triton.extend_attention, block_size=128, window=4096, capacity=20480, growth_capacity=2048
    )
    arguments = _avals(*avals)
    assert kernels("triton", lambda *args: function(*args, growth=args[1]), *arguments) == 2
    assert kernels("triton", partial(function, growth_capacity=0), *arguments) == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 28, 64, 500])
def test_default_tiles_are_no_larger_than_the_queries_need_and_fit_a_multiprocessor(rows, head_dim, dtype):
    config, itemsize = default_config(rows, head_dim, dtype), jnp.dtype(dtype).itemsize
    assert 16 <= config.queries <= max(16, 2 * rows - 1, 1)
    assert config.queries & (config.queries - 1) == 0
    assert (config.queries + 2 * config.keys) * head_dim * itemsize <= 227 * 1024


def test_refuses_what_it_does_not_take():
    arguments, options = _inputs((47,), (47,), [[5]], head_dim=24, queries=1)
    with pytest.raises(NotImplementedError, match="head dimension 24"):
        extend(*arguments, **options)
    (q, *rest), options = _inputs((47,), (47,), [[5]], queries=1)
    with pytest.raises(NotImplementedError, match=r"types \['bfloat16', 'float32'\]"):
        extend(q.astype(jnp.bfloat16), *rest, **options)
