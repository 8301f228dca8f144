"""The reserve through Triton against the XLA oracle: tilings, large sizes on a GPU, and lowering for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import kernels
from implementations import INTERPRET, implementation

from tca_jax.pallas_kernels.reserve_tokens import triton as reserve_tokens_triton
from tca_jax.pallas_kernels.reserve_tokens import xla as reserve_tokens_xla
from tca_jax.pallas_kernels.reserve_tokens.triton import ReserveConfig
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")

gpu = pytest.mark.skipif(INTERPRET, reason="needs an NVIDIA GPU; interpret mode takes too long at this size")

reserve_tokens = implementation("reserve_tokens", "triton")


def _check(scores, ranked, reserve, **options):
    marked = reserve_tokens(scores, ranked, reserve=reserve, **options)
    np.testing.assert_array_equal(marked, reserve_tokens_xla.reserve_tokens(scores, ranked, reserve=reserve))


def _scores(shape, values, seed=0):
    """Of so many different values, so that ties lie within and across tiles and chunks."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.exponential(size=values)[rng.integers(0, values, shape)], jnp.float32)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ReserveConfig(chunk=32, tile=16, bits=4), id="chunks of two tiles"),
        pytest.param(ReserveConfig(chunk=16, tile=16, bits=8), id="chunks of one tile, digits of a byte"),
        pytest.param(ReserveConfig(chunk=512, tile=64, bits=5), id="one chunk, digits that do not divide the bits"),
    ],
)
def test_tiles_and_digits_do_not_matter(config):
    for values in (4, 1000):
        _check(_scores((2, 3, 300), values), jnp.array([300, 77]), reserve=100, config=config)


def test_default_tiles_equal_the_oracle_over_several_chunks():
    _check(_scores((2, 1, 2500), 20), jnp.array([2500, 1100]), reserve=512)


@gpu
@pytest.mark.parametrize("values", [1, 50, 10**6])
@pytest.mark.parametrize("shape", [(1, 8, 131072), (2, 4, 33000), (1, 2, 2**20 + 7)])
def test_equals_the_oracle_at_real_sizes(shape, values):
    ranked = jnp.full(shape[0], shape[2] - 4096)
    for reserve in (512, 5000):
        _check(_scores(shape, values), ranked, reserve)


def _avals(batch, kv_heads, tokens):
    return jax.ShapeDtypeStruct((batch, kv_heads, tokens), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)


@pytest.mark.parametrize("sizes", [(1, 8, 131072), (4, 8, 2**20 + 64), (3, 2, 100)])
def test_lowers_for_cuda_as_eight_digits_and_the_marks(sizes):
    function = partial(reserve_tokens_triton.reserve_tokens, reserve=512)
    assert kernels("triton", function, *_avals(*sizes)) == 9
