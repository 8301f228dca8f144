"""Token scores through Triton against the XLA oracle: on a GPU for real, else in interpret mode."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import last_queries, poison, qkv
from cuda_lowering import kernels
from implementations import implementation

from tca_jax.pallas_kernels.token_scores import triton as token_scores_triton
from tca_jax.pallas_kernels.token_scores import xla as token_scores_xla
from tca_jax.pallas_kernels.token_scores.triton import TokenScoresConfig
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")

SMALL = TokenScoresConfig(keys=16, chunk=32, stages=2, scores=32)

score = implementation("token_scores", "triton")


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


def _avals(batch, tokens, heads, kv_heads, head_dim, dtype):
    of = jax.ShapeDtypeStruct
    k = of((batch, tokens, kv_heads, head_dim), dtype)
    return of((batch, heads, head_dim), dtype), k, of((batch,), jnp.int32)


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
def test_lowers_for_cuda_as_two_kernels(sizes):
    assert kernels("triton", partial(token_scores_triton.token_scores, block_size=128), *_avals(*sizes)) == 2


def test_refuses_what_it_does_not_take():
    q_last, k, _ = _scored((8,), 8, 2, 1, jnp.float32)
    with pytest.raises(NotImplementedError, match="block_size = 6"):
        score(q_last, k, jnp.array([8]), block_size=6)
    with pytest.raises(NotImplementedError, match="head dimension 12"):
        score(q_last[..., :12], k[..., :12], jnp.array([8]), block_size=8)
