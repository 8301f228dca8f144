"""Decode attention through Triton against the XLA oracle: on a GPU for real, else in interpret mode."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import on_device, random_pool, random_ring
from cuda_lowering import abstract_mesh, kernels
from jax.sharding import PartitionSpec

from tca_jax.pallas_kernels.decode_attention import triton as decode_attention_triton
from tca_jax.pallas_kernels.decode_attention import xla as decode_attention_xla
from tca_jax.pallas_kernels.decode_attention.triton import DecodeConfig
from tca_jax.pallas_kernels.kv import Pool, Ring
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")

INTERPRET = jax.default_backend() != "gpu"
BLOCK, WINDOW = 16, 32
SMALL = DecodeConfig(keys=16, programs=12, warps=4, stages=3, merged=4)

decode = partial(decode_attention_triton.decode_attention, interpret=INTERPRET)


def _inputs(positions, lengths, *, grown=None, group=2, head_dim=16, ring=48, dtype=jnp.float32, seed=0):
    """Random arguments; pool rows outside the regions and slots that are not local hold NaN."""
    rng = np.random.default_rng(seed)
    batch, kv_heads = np.shape(lengths)
    pool = random_pool(rng, lengths, head_dim)
    local = random_ring(rng, positions, kv_heads, head_dim, ring, block_size=BLOCK, window=WINDOW)
    q = jnp.asarray(rng.standard_normal((batch, kv_heads * group, head_dim)), dtype)
    options = {"block_size": BLOCK, "window": WINDOW, "capacity": int(pool.lengths.max())}
    if grown is not None:
        growth = random_pool(rng, grown, head_dim)
        options |= {"growth": on_device(growth, dtype), "growth_capacity": int(growth.lengths.max())}
    return (q, on_device(pool, dtype), on_device(local, dtype), jnp.array(positions, jnp.int32)), options


def _without_nan(arguments):
    return jax.tree.map(lambda x: jnp.nan_to_num(x) if isinstance(x, jax.Array) else x, arguments)


def _expected(arguments, options):
    return decode_attention_xla.decode_attention(*_without_nan(arguments), **_without_nan(options))


def _check(actual, arguments, options):
    out, lse = _expected(arguments, options)
    tolerance = 1e-5 if out.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (actual[0], out)), atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(actual[1], lse, atol=1e-3 if out.dtype != jnp.float32 else 1e-5, rtol=1e-5)
    assert actual[0].dtype == out.dtype


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "positions", "lengths"),
    [
        pytest.param(2, 16, jnp.float32, (47, 48), [[5, 0], [16, 33]], id="ring about to wrap"),
        pytest.param(1, 16, jnp.float32, (0, 150), [[0, 0], [0, 0]], id="empty pool, first token"),
        pytest.param(7, 32, jnp.bfloat16, (1001,), [[1, 200, 3]], id="one head much longer"),
        pytest.param(4, 16, jnp.float16, (33, 7), [[17, 15], [0, 32]], id="float16"),
        pytest.param(20, 16, jnp.float32, (64,), [[40]], id="more heads a group than a matrix unit's rows"),
    ],
)
def test_equals_the_oracle_and_never_reads_what_is_not_attended_to(group, head_dim, dtype, positions, lengths):
    arguments, options = _inputs(positions, lengths, group=group, head_dim=head_dim, dtype=dtype)
    _check(decode(*arguments, **options, config=SMALL), arguments, options)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(None, id="the default"),
        pytest.param(DecodeConfig(keys=32, programs=1, warps=4, stages=2), id="a chunk a region"),
        pytest.param(DecodeConfig(keys=16, programs=1000, warps=4, stages=2, merged=2), id="a chunk a tile"),
    ],
)
@pytest.mark.parametrize("grown", [None, [[0, 50]]])
def test_any_split_gives_the_same(config, grown):
    arguments, options = _inputs((90,), [[130, 9]], grown=grown, seed=1)
    _check(decode(*arguments, **options, config=config), arguments, options)


def test_remainders_of_many_heads_leave_no_chunk_without_a_program():
    arguments, options = _inputs((0,), [[96, 96, 48]])
    config = DecodeConfig(keys=16, programs=6, warps=4, stages=2)  # 7, 7 and 4 tiles: in threes, they make 8 chunks
    _check(decode(*arguments, **options, config=config), arguments, options)


def test_ring_that_holds_everything_has_no_need_of_a_pool():
    arguments, options = _inputs((70,), [[0, 0]], ring=112)
    options |= {"window": 4096, "capacity": 0}
    arguments = _without_nan(arguments)
    _check(decode(*arguments, **options, config=SMALL), arguments, options)


@pytest.mark.parametrize(
    ("lengths", "grown"),
    [
        pytest.param([[5, 0], [16, 33]], [[0, 40], [17, 16]], id="unequal and empty regions"),
        pytest.param([[0, 0], [0, 0]], [[3, 1], [0, 31]], id="an empty pool"),
    ],
)
def test_second_pool_equals_the_oracle_and_never_reads_what_is_not_attended_to(lengths, grown):
    arguments, options = _inputs((47, 48), lengths, grown=grown, dtype=jnp.bfloat16)
    _check(decode(*arguments, **options, config=SMALL), arguments, options)


def test_head_without_tokens_gives_zeros():
    arguments, options = _inputs((-1,), [[0, 4]])
    out, lse = decode(*arguments, **options, config=SMALL)
    assert not np.any(out[0, :2])
    assert np.all(np.asarray(lse[0, :2]) < -1e29)
    assert np.all(np.isfinite(out))


#: Axes of the arguments that are mapped over rows: all rows' regions lie in one pool.
_ROWS = (0, Pool(None, None, 0, 0), 0, 0)


def _batched(row):
    """One row's arguments as a batch of one."""
    q, pool, ring, position = row
    pool = pool._replace(offsets=pool.offsets[None], lengths=pool.lengths[None])
    return q[None], pool, Ring(*(x[None] for x in ring)), position[None]


def test_vmap_over_rows_equals_the_batch():
    arguments, options = _inputs((47, 90), [[5, 0], [16, 33]])

    def one_row(*row):
        return decode(*_batched(row), **options, config=SMALL)

    out, lse = jax.vmap(one_row, _ROWS)(*arguments)
    _check((out[:, 0], lse[:, 0]), arguments, options)


def test_runs_under_shard_map():
    arguments, options = _inputs((47,), [[5, 16]])
    heads, whole = PartitionSpec(None, "x"), PartitionSpec()
    specs = (heads, Pool(whole, whole, heads, heads), heads, whole)
    sharded = jax.shard_map(
        partial(decode, **options, config=SMALL),
        mesh=jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=specs,
        out_specs=(heads, heads),
        check_vma=not INTERPRET,  # JAX's interpreter of Pallas does not track what varies
    )
    _check(sharded(*arguments), arguments, options)


def _avals(batch, kv_heads, group, head_dim, pool, ring, dtype):
    shapes = ((batch, kv_heads * group, head_dim), (pool, head_dim), (batch, kv_heads, ring, head_dim))
    q, pooled, local = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    table, positions = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, kv_heads), (batch,)))
    return q, Pool(pooled, pooled, table, table), Ring(local, local), positions


@pytest.mark.parametrize(
    ("avals", "options"),
    [
        pytest.param((1, 8, 4, 128, 8 * 20480, 4224, jnp.bfloat16), {"window": 4096, "capacity": 20480}, id="LLaMA"),
        pytest.param((1, 8, 4, 128, 128, 131200, jnp.bfloat16), {"window": 131072, "capacity": 0}, id="full cache"),
        pytest.param((8, 4, 7, 128, 2**26, 4224, jnp.float16), {"window": 4096, "capacity": 2**20}, id="past 2^31"),
        pytest.param((2, 2, 4, 64, 2048, 640, jnp.float32), {"window": 512, "capacity": 512}, id="float32"),
        pytest.param((1, 1, 1, 256, 2048, 640, jnp.bfloat16), {"window": 512, "capacity": 512}, id="d 256"),
    ],
)
def test_lowers_for_cuda_as_two_kernels(avals, options):
    function = partial(decode_attention_triton.decode_attention, block_size=128, **options)
    arguments = _avals(*avals)
    assert kernels("triton", function, *arguments) == 2
    grown = partial(function, growth_capacity=128)
    assert kernels("triton", lambda *args: grown(*args, growth=args[1]), *arguments) == 2


def test_lowers_for_cuda_under_shard_map_and_vmap():
    avals = _avals(2, 8, 4, 128, 4096, 640, jnp.bfloat16)
    function = partial(decode_attention_triton.decode_attention, block_size=128, window=512, capacity=512)
    heads, whole = PartitionSpec(None, "model"), PartitionSpec()
    sharded = jax.shard_map(
        function,
        mesh=abstract_mesh(model=2),
        in_specs=(heads, Pool(whole, whole, heads, heads), heads, whole),
        out_specs=(heads, heads),
    )
    assert kernels("triton", sharded, *avals) == 2
    rows = jax.vmap(lambda *row: function(*_batched(row)), _ROWS)
    assert kernels("triton", rows, *avals) == 2


def test_refuses_what_it_does_not_take():
    arguments, options = _inputs((47,), [[5]], head_dim=24)
    with pytest.raises(NotImplementedError, match="head dimension 24"):
        decode(*arguments, **options)
    (q, *rest), options = _inputs((47,), [[5]])
    with pytest.raises(NotImplementedError, match=r"types \['bfloat16', 'float32'\]"):
        decode(q.astype(jnp.bfloat16), *rest, **options)
