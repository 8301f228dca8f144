"""Observation scores through Triton against the XLA oracle: on a GPU for real, else in interpret mode."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import poison
from cuda_lowering import kernels
from implementations import INTERPRET, implementation

from tca_jax.pallas_kernels.observation_scores import triton as observation_scores_triton
from tca_jax.pallas_kernels.observation_scores import xla as observation_scores_xla
from tca_jax.pallas_kernels.observation_scores.triton import ObservationScoresConfig, PassConfig, default_config
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")

gpu = pytest.mark.skipif(INTERPRET, reason="needs an NVIDIA GPU; interpret mode takes too long at this size")

score = implementation("observation_scores", "triton")


def _operands(lengths, tokens, heads, kv_heads, head_dim, observed, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    q = 1.5 * rng.standard_normal((len(lengths), observed, heads, head_dim))
    k = 1.5 * rng.standard_normal((len(lengths), tokens, kv_heads, head_dim))
    return jnp.asarray(q, dtype), jnp.asarray(poison(k, lengths), dtype), jnp.array(lengths, jnp.int32)


def _check(operands, spread=16, tolerance=1e-4, **options):
    actual = score(*operands, spread=spread, **options)
    expected = observation_scores_xla.observation_scores(*operands, spread=spread)
    assert bool(jnp.isfinite(expected).all())
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * float(expected.mean()))


@pytest.mark.parametrize(
    ("norms", "maxima", "scores"),
    [
        pytest.param((16, 32, 64, 4, 2), (32, 16, 32, 4, 1), 64, id="more rows in the second pass"),
        pytest.param((64, 16, 16, 2, 1), (16, 64, 128, 4, 3), 32, id="more rows in the first, chunks of one tile"),
        pytest.param((128, 16, 256, 4, 2), (128, 32, 256, 8, 2), 16, id="one chunk, more rows than there are"),
    ],
)
def test_tile_sizes_do_not_matter(norms, maxima, scores):
    config = ObservationScoresConfig(PassConfig(*norms), PassConfig(*maxima), scores)
    # Of 82 tokens, the first of 20 queries sees all of the first 64 but one: that tile must have a mask.
    _check(_operands((150, 82, 3), 150, 6, 2, 16, 20), config=config)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "observed", "dtype"),
    [
        pytest.param(4, 1, 64, jnp.bfloat16, id="two tiles of rows"),
        pytest.param(7, 1, 64, jnp.float16, id="rows off the tiles"),
        pytest.param(2, 2, 1, jnp.float32, id="one row"),
        pytest.param(2, 1, 100, jnp.float32, id="more queries than a tile of keys"),
    ],
)
def test_default_tiles_equal_the_oracle(heads, kv_heads, observed, dtype):
    _check(_operands((300, 64), 300, heads, kv_heads, 64, observed, dtype))


@gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 1e-3), (jnp.float16, 1e-3), (jnp.float32, 1e-4)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (7, 1), (2, 2)])
def test_equals_the_oracle_at_real_sizes(heads, kv_heads, head_dim, dtype, tolerance):
    _check(_operands((9001, 63, 5000), 9001, heads, kv_heads, head_dim, 64, dtype), tolerance=tolerance)


def _avals(batch, tokens, heads, kv_heads, head_dim, dtype):
    of = jax.ShapeDtypeStruct
    k = of((batch, tokens, kv_heads, head_dim), dtype)
    return of((batch, 64, heads, head_dim), dtype), k, of((batch,), jnp.int32)


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
def test_lowers_for_cuda_as_three_kernels(sizes):
    function = partial(observation_scores_triton.observation_scores, spread=16)
    assert kernels("triton", function, *_avals(*sizes)) == 3


@pytest.mark.parametrize("length", [1, 5000, 2**17, 2**20])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, jnp.bfloat16), (256, jnp.bfloat16), (128, jnp.float32)])
def test_default_chunks_are_whole_tiles(length, head_dim, dtype):
    config = default_config(length, 256, 8, head_dim, dtype)
    assert config.norms.chunk % config.norms.keys == config.maxima.chunk % config.maxima.keys == 0


def test_refuses_what_it_does_not_take():
    q_last, k, lengths = _operands((8,), 8, 2, 1, 16, 4)
    with pytest.raises(NotImplementedError, match="head dimension 12"):
        score(q_last[..., :12], k[..., :12], lengths, spread=4)
    with pytest.raises(NotImplementedError, match="types"):
        score(q_last, k.astype(jnp.bfloat16), lengths, spread=4)
