"""Token selection through Triton against the XLA oracle: on a GPU for real, else in interpret mode."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import qkv
from cuda_lowering import kernels
from implementations import implementation

from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.select_tokens import triton as select_tokens_triton
from tca_jax.pallas_kernels.select_tokens import xla as select_tokens_xla
from tca_jax.pallas_kernels.select_tokens.triton import SelectConfig
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")

select = implementation("select_tokens", "triton")


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
    for name, ours, theirs in zip(Pool._fields, actual, expected, strict=True):
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


def _avals(batch, tokens, kv_heads, head_dim, dtype, block_size=128):
    kv = jax.ShapeDtypeStruct((batch, tokens, kv_heads, head_dim), dtype)
    scores = jax.ShapeDtypeStruct((batch, kv_heads, tokens), jnp.float32)
    budgets = jax.ShapeDtypeStruct((batch, kv_heads, tokens // block_size), jnp.int32)
    return scores, budgets, kv, kv, jax.ShapeDtypeStruct((batch, kv_heads), jnp.int32)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((1, 131072, 8, 128, jnp.bfloat16), id="LLaMA"),
        pytest.param((1, 2**20 + 64, 4, 128, jnp.bfloat16), id="Qwen2.5, a million tokens"),
        pytest.param((4, 2**20, 8, 128, jnp.float16), id="past 2^31"),
        pytest.param((3, 9000, 8, 64, jnp.float32), id="float32"),
        pytest.param((1, 1000, 1, 256, jnp.bfloat16), id="d 256"),
    ],
)
def test_lowers_for_cuda_as_two_kernels(sizes):
    function = partial(select_tokens_triton.select_tokens, block_size=128, pool_tokens=2**19)
    assert kernels("triton", function, *_avals(*sizes)) == 2


def test_refuses_what_it_does_not_take():
    scores, budgets, k, v, offsets = _selection([[0]], 512, 512)
    with pytest.raises(NotImplementedError, match="block_size = 512"):
        select(scores, budgets, k, v, offsets, block_size=512, pool_tokens=512)
    with pytest.raises(NotImplementedError, match=r"types \['float16', 'float32'\]"):
        select(scores, budgets, k.astype(jnp.float16), v, offsets, block_size=256, pool_tokens=512)
