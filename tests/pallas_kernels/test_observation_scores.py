"""Observation scores against float64 on every backend: groups, types, odd prompts, extremes, tilings."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison
from implementations import gpu, implementation, on_every_backend

from tca_jax.pallas_kernels.observation_scores.triton import ObservationScoresConfig, PassConfig, default_config

OBSERVED, SPREAD = 20, 4


def _operands(lengths, tokens, heads, kv_heads, head_dim, dtype=jnp.float32, observed=OBSERVED, scale=1.5):
    """Queries that are NaN where their position is negative, keys that are NaN past their length, and the lengths."""
    rng = np.random.default_rng(0)
    q = scale * rng.standard_normal((len(lengths), observed, heads, head_dim))
    k = scale * rng.standard_normal((len(lengths), tokens, kv_heads, head_dim))
    for row, length in enumerate(lengths):
        q[row, : max(0, observed - length)] = np.nan
    return jnp.asarray(q, dtype), jnp.asarray(poison(k, lengths), dtype), jnp.array(lengths, jnp.int32)


def _check(function, operands, spread=SPREAD, rtol=5e-5):
    q, k = (np.asarray(x, np.float64) for x in operands[:2])
    (batch, tokens, kv_heads, _), group = k.shape, q.shape[2] // k.shape[2]
    expected = np.zeros((batch, kv_heads, tokens))
    for row, length in enumerate(operands[2].tolist()):
        for head in range(kv_heads if length else 0):
            own = q[row, :, head * group : (head + 1) * group]
            expected[row, head, :length] = oracle.observation_scores(own, k[row, :length, head], spread)
    np.testing.assert_allclose(function(*operands, spread=spread), expected, rtol=rtol, atol=1e-9)


@on_every_backend("observation_scores")
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "dtype", "observed"),
    [
        # Longer than the observation, shorter, as long, off the tiles, nothing.
        ((75, 1, OBSERVED, 48, 19, 0), 2, 2, 64, jnp.bfloat16, OBSERVED),
        ((75, 30, 11), 6, 1, 16, jnp.float32, OBSERVED),
        ((150, 64), 7, 1, 64, jnp.float32, 64),
        ((150, 64), 4, 1, 128, jnp.bfloat16, 100),
        ((75, 19), 2, 1, 16, jnp.float32, 1),
    ],
)
def test_equals_the_oracle(lengths, heads, kv_heads, head_dim, dtype, observed, backend):
    sizes = (lengths, lengths[0], heads, kv_heads, head_dim, dtype, observed)
    function = implementation("observation_scores", backend)
    _check(function, _operands(*sizes, scale=head_dim**-0.25 * 2.5))
    if dtype == jnp.float32:  # scores past the range of exp
        _check(function, _operands(*sizes, scale=25.0), rtol=2e-3)


@on_every_backend("observation_scores")
def test_score_reaches_the_tokens_that_follow(backend):
    k = np.zeros((1, 48, 1, 16), np.float32)
    k[0, 21] = 8
    score = implementation("observation_scores", backend)
    scores = score(jnp.ones((1, 3, 1, 16)), jnp.asarray(k), jnp.array([40]), spread=5, decay=0.5)[0, 0]
    np.testing.assert_allclose(scores[21:26], 0.5 ** np.arange(5), rtol=1e-5)
    assert max(float(scores[:21].max()), float(scores[26:].max())) < 1e-10
    assert not np.any(scores[40:])


@on_every_backend("observation_scores")
@pytest.mark.parametrize("spread", [1, 1000])
def test_spread_of_one_token_or_past_the_prompt(spread, backend):
    _check(implementation("observation_scores", backend), _operands((30, 11), 30, 2, 1, 16), spread)


def test_several_tiles_of_keys_in_xla():
    _check(implementation("observation_scores", "xla"), _operands((1100, 1023, 513, 70), 1100, 2, 1, 16))


@on_every_backend("observation_scores")
def test_array_without_tokens_has_no_scores(backend):
    scores = implementation("observation_scores", backend)(*_operands((0,), 0, 2, 1, 16), spread=SPREAD)
    assert scores.shape == (1, 1, 0)


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
    function = partial(implementation("observation_scores", "triton"), config=config)
    _check(function, _operands((150, 82, 3), 150, 6, 2, 16), spread=16, rtol=1e-4)


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (7, 1, 128), (2, 2, 256)])
def test_real_sizes_equal_xla(heads, kv_heads, head_dim, dtype):
    operands = _operands((9001, 63, 5000), 9001, heads, kv_heads, head_dim, dtype, observed=64)
    operands = jnp.nan_to_num(operands[0]), *operands[1:]
    ours, theirs = (implementation("observation_scores", name)(*operands, spread=16) for name in ("triton", "xla"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.mean()))


@pytest.mark.parametrize("length", [1, 5000, 2**17, 2**20])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, jnp.bfloat16), (256, jnp.bfloat16), (128, jnp.float32)])
def test_default_chunks_are_whole_tiles(length, head_dim, dtype):
    config = default_config(length, 256, 8, head_dim, dtype)
    assert config.norms.chunk % config.norms.keys == config.maxima.chunk % config.maxima.keys == 0
