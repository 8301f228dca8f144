"""Token scores and selection through Triton against the XLA oracles: on a GPU for real, else in interpret mode."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import last_queries, poison, qkv
from cuda_lowering import abstract_mesh, kernels
from jax.sharding import PartitionSpec

from tca_jax.pallas_kernels.select_tokens import triton as select_tokens_triton
from tca_jax.pallas_kernels.select_tokens import xla as select_tokens_xla
from tca_jax.pallas_kernels.select_tokens.triton import SelectConfig
from tca_jax.pallas_kernels.token_scores import triton as token_scores_triton
from tca_jax.pallas_kernels.token_scores import xla as token_scores_xla
from tca_jax.pallas_kernels.token_scores.triton import TokenScoresConfig
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")

INTERPRET = jax.default_backend() != "gpu"
SMALL = TokenScoresConfig(keys=16, chunk=32, stages=2, scores=32)

score = partial(token_scores_triton.token_scores, interpret=INTERPRET)
select = partial(select_tokens_triton.select_tokens, interpret=INTERPRET)


def _scored(lengths, tokens, heads, kv_heads, dtype):
    """Last queries, keys that are NaN past the lengths, and keys that are not."""
    q, k, _ = qkv(0, len(lengths), tokens, heads, kv_heads, 16)
    arrays = (last_queries(q, lengths), poison(k, lengths), k)
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def _check_scores(actual, expected):
    for name, ours, theirs in zip(("scores", "mass", "hhi"), actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("lengths", "tokens", "heads", "kv_heads", "dtype", "block_size", "config"),
    [
        pytest.param((75, 1, 40), 75, 6, 2, jnp.float32, 8, SMALL, id="ragged, a tail past the blocks"),
        pytest.param((64,), 64, 7, 1, jnp.bfloat16, 16, SMALL, id="group of 7"),
        pytest.param((50,), 64, 2, 2, jnp.float16, 32, SMALL, id="padded"),
        pytest.param((5,), 5, 4, 1, jnp.float32, 8, None, id="shorter than a block"),
        pytest.param((33,), 48, 20, 1, jnp.float32, 1, None, id="blocks of one token"),
    ],
)
def test_scores_equal_the_oracle_and_keys_past_a_length_do_not_matter(
    lengths, tokens, heads, kv_heads, dtype, block_size, config
):
    q_last, poisoned, k = _scored(lengths, tokens, heads, kv_heads, dtype)
    lengths = jnp.array(lengths, jnp.int32)
    actual = score(q_last, poisoned, lengths, block_size=block_size, config=config)
    expected = token_scores_xla.token_scores(q_last, k, lengths, block_size=block_size)
    _check_scores(actual, expected)
    assert actual[1].shape == expected[1].shape


def test_row_of_length_zero_has_no_scores():
    q_last, k, _ = _scored((1,), 16, 2, 1, jnp.float32)
    scores, mass, hhi = score(q_last, k, jnp.array([0]), block_size=8)
    assert not np.any(scores)
    assert not np.any(mass)
    np.testing.assert_allclose(hhi, np.full((1, 1, 2), 1 / 8))


def test_hhi_survives_scores_whose_squares_underflow():
    k = np.zeros((1, 16, 1, 16), np.float32)
    k[0, 8:] = 60 / 4  # the first block's scores are exp(-60): their squares are not float32
    _, mass, hhi = score(jnp.ones((1, 1, 16)), jnp.asarray(k), jnp.array([16]), block_size=8)
    np.testing.assert_allclose(mass[0, 0, 0], np.exp(-60), rtol=1e-4)
    np.testing.assert_allclose(hhi[0, 0], [1 / 8, 1 / 8], rtol=1e-5)


def _selection(offsets, tokens, block_size, dtype=jnp.float32, seed=0):
    """Scores with many ties, and budgets from nothing to whole blocks."""
    rng = np.random.default_rng(seed)
    batch, kv_heads = np.shape(offsets)
    _, k, v = qkv(seed, batch, tokens, kv_heads, kv_heads, 16)
    scores = rng.integers(0, 6, (batch, kv_heads, tokens)) / 8
    budgets = rng.integers(0, block_size + 1, (batch, kv_heads, tokens // block_size))
    arrays = [jnp.asarray(scores, jnp.float32), jnp.asarray(budgets, jnp.int32), jnp.asarray(k, dtype)]
    return *arrays, jnp.asarray(v, dtype), jnp.asarray(offsets, jnp.int32)


def _check_pools(actual, arguments, **options):
    expected = select_tokens_xla.select_tokens(*arguments, **options)
    for name, ours, theirs in zip(("k_pool", "v_pool", "kept"), actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (ours, theirs)), err_msg=name)


@pytest.mark.parametrize(
    ("offsets", "tokens", "block_size", "pool_tokens", "dtype", "config"),
    [
        pytest.param([[128, 0], [384, 256]], 45, 8, 520, jnp.bfloat16, None, id="regions in any order"),
        pytest.param([[64]], 77, 16, 300, jnp.float32, SelectConfig(rows=4, cleared=32), id="more tiles than one"),
        pytest.param([[4]], 32, 16, 12, jnp.float16, None, id="tokens past the pool"),
        pytest.param([[0, 64]], 5, 8, 128, jnp.float32, None, id="no whole block"),
    ],
)
def test_pool_holds_the_chosen_tokens_by_position_and_zeros_elsewhere(
    offsets, tokens, block_size, pool_tokens, dtype, config
):
    arguments = _selection(offsets, tokens, block_size, dtype)
    options = {"block_size": block_size, "pool_tokens": pool_tokens}
    _check_pools(select(*arguments, **options, config=config), arguments, **options)


@pytest.mark.parametrize("empty", [[], [0], [1, 2], [0, 1, 2, 3]])
def test_gaps_are_cleared_around_empty_regions_that_share_an_offset(empty):
    arguments = _selection([[64, 64, 64, 200]], 40, 8)
    budgets = np.array(arguments[1])
    budgets[0, :3] *= np.arange(3)[:, None] == next((i for i in range(3) if i not in empty), 3)
    budgets[0, [i for i in empty if i == 3]] = 0
    arguments = (arguments[0], jnp.asarray(budgets), *arguments[2:])
    options = {"block_size": 8, "pool_tokens": 256}
    _check_pools(select(*arguments, **options), arguments, **options)


def test_vmap_over_rows_equals_the_batch():
    q_last, k, _ = _scored((30, 40), 40, 4, 2, jnp.float32)
    k = jnp.nan_to_num(k)
    lengths = jnp.array([30, 40])
    rows = jax.vmap(lambda q, k, n: [x[0] for x in score(q[None], k[None], n[None], block_size=8, config=SMALL)])
    _check_scores(rows(q_last, k, lengths), token_scores_xla.token_scores(q_last, k, lengths, block_size=8))

    arguments = _selection([[0, 64], [32, 128]], 40, 8)
    options = {"block_size": 8, "pool_tokens": 192}
    pools = jax.vmap(lambda *row: select(*(x[None] for x in row), **options))(*arguments)
    for row in range(2):
        _check_pools([pools[0][row], pools[1][row], pools[2][row]], [x[row : row + 1] for x in arguments], **options)


def test_runs_under_shard_map():
    heads, tokens = PartitionSpec(None, "x"), PartitionSpec(None, None, "x")
    arguments = _selection([[0, 64]], 40, 8)
    options = {"block_size": 8, "pool_tokens": 128}
    sharded = jax.shard_map(
        partial(select, **options),
        mesh=jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(heads, heads, tokens, tokens, heads),
        out_specs=(PartitionSpec("x"), PartitionSpec("x"), heads),
        check_vma=not INTERPRET,  # JAX's interpreter of Pallas does not track what varies
    )
    _check_pools(sharded(*arguments), arguments, **options)


def _avals(batch, tokens, heads, kv_heads, head_dim, dtype, block_size=128):
    q_last = jax.ShapeDtypeStruct((batch, heads, head_dim), dtype)
    kv = jax.ShapeDtypeStruct((batch, tokens, kv_heads, head_dim), dtype)
    scores = jax.ShapeDtypeStruct((batch, kv_heads, tokens), jnp.float32)
    budgets = jax.ShapeDtypeStruct((batch, kv_heads, tokens // block_size), jnp.int32)
    offsets = jax.ShapeDtypeStruct((batch, kv_heads), jnp.int32)
    return (q_last, kv, jax.ShapeDtypeStruct((batch,), jnp.int32)), (scores, budgets, kv, kv, offsets)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((1, 131072, 32, 8, 128, jnp.bfloat16), id="LLaMA"),
        pytest.param((1, 2**20 + 64, 28, 4, 128, jnp.bfloat16), id="Qwen2.5, a million tokens"),
        pytest.param((4, 2**20, 32, 8, 128, jnp.float16), id="past 2^31"),
        pytest.param((3, 9000, 8, 8, 64, jnp.float32), id="float32"),
        pytest.param((1, 1000, 4, 1, 256, jnp.bfloat16), id="d 256"),
    ],
)
def test_lower_for_cuda_as_two_kernels_each(sizes):
    for_scores, for_selection = _avals(*sizes)
    assert kernels("triton", partial(token_scores_triton.token_scores, block_size=128), *for_scores) == 2
    function = partial(select_tokens_triton.select_tokens, block_size=128, pool_tokens=2**19)
    assert kernels("triton", function, *for_selection) == 2


def test_lower_for_cuda_under_shard_map_and_vmap():
    for_scores, for_selection = _avals(2, 1024, 8, 4, 128, jnp.bfloat16)
    score = partial(token_scores_triton.token_scores, block_size=128)
    select = partial(select_tokens_triton.select_tokens, block_size=128, pool_tokens=1024)
    heads, tokens, whole = PartitionSpec(None, "model"), PartitionSpec(None, None, "model"), PartitionSpec()
    over_heads = partial(jax.shard_map, mesh=abstract_mesh(model=2))
    sharded = over_heads(score, in_specs=(heads, tokens, whole), out_specs=heads)
    assert kernels("triton", sharded, *for_scores) == 2
    specs = (PartitionSpec("model"), PartitionSpec("model"), heads)
    sharded = over_heads(select, in_specs=(heads, heads, tokens, tokens, heads), out_specs=specs)
    assert kernels("triton", sharded, *for_selection) == 2
    for function, avals in ((score, for_scores), (select, for_selection)):
        rows = jax.vmap(lambda *row, function=function: function(*(x[None] for x in row)))
        assert kernels("triton", rows, *avals) == 2


def test_refuse_what_they_do_not_take():
    q_last, k, _ = _scored((8,), 8, 2, 1, jnp.float32)
    with pytest.raises(NotImplementedError, match="block_size = 6"):
        score(q_last, k, jnp.array([8]), block_size=6)
    with pytest.raises(NotImplementedError, match="head dimension 12"):
        score(q_last[..., :12], k[..., :12], jnp.array([8]), block_size=8)
    scores, budgets, k, v, offsets = _selection([[0]], 512, 512)
    with pytest.raises(NotImplementedError, match="block_size = 512"):
        select(scores, budgets, k, v, offsets, block_size=512, pool_tokens=512)
    with pytest.raises(NotImplementedError, match=r"types \['float16', 'float32'\]"):
        select(scores, budgets, k.astype(jnp.float16), v, offsets, block_size=256, pool_tokens=512)
