"""Observation scores against the float64 oracle, on every backend; what they do with odd prompts, and their checks."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison, unchecked
from implementations import implementation, on_every_backend

from tca_jax.pallas_kernels.observation_scores import observation_scores
from tca_jax.pallas_kernels.observation_scores import xla as observation_scores_xla

OBSERVED, SPREAD = 20, 4


def _operands(lengths, tokens, heads, kv_heads, head_dim, dtype=jnp.float32, observed=OBSERVED, scale=1.5):
    """Queries that are NaN where their position is negative, keys that are NaN past their length, and the lengths."""
    rng = np.random.default_rng(0)
    q = scale * rng.standard_normal((len(lengths), observed, heads, head_dim))
    k = scale * rng.standard_normal((len(lengths), tokens, kv_heads, head_dim))
    for row, length in enumerate(lengths):
        q[row, : max(0, observed - length)] = np.nan
    return jnp.asarray(q, dtype), jnp.asarray(poison(k, lengths), dtype), jnp.array(lengths, jnp.int32)


def _expected(q_last, k, lengths, spread):
    """What the oracle makes of them [B, Hkv, L]."""
    q, k = (np.asarray(x, np.float64) for x in (q_last, k))
    batch, tokens, kv_heads, _ = k.shape
    group, scores = q.shape[2] // kv_heads, np.zeros((batch, kv_heads, tokens))
    for row, length in enumerate(lengths.tolist()):
        for head in range(kv_heads if length else 0):
            own = q[row, :, head * group : (head + 1) * group]
            scores[row, head, :length] = oracle.observation_scores(own, k[row, :length, head], spread)
    return scores


@on_every_backend("observation_scores")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (2, 2, 64, jnp.bfloat16),
        (2, 1, 128, jnp.bfloat16),
        (8, 2, 16, jnp.float32),
        (7, 1, 64, jnp.float32),
        (14, 2, 16, jnp.bfloat16),
    ],
)
def test_scores_equal_the_oracle_whatever_is_in_the_padding(heads, kv_heads, head_dim, dtype, backend):
    lengths = (75, 1, OBSERVED, 48, 19, 0)  # longer than the observation, shorter, as long, off the tiles, nothing
    operands = _operands(lengths, 75, heads, kv_heads, head_dim, dtype, scale=head_dim**-0.25 * 2.5)
    scores = implementation("observation_scores", backend)(*operands, spread=SPREAD)
    expected = _expected(*operands, SPREAD)
    assert expected.max() > 0.5  # there is something sharp to find
    np.testing.assert_allclose(scores, expected, rtol=5e-5, atol=1e-9)


@on_every_backend("observation_scores")
def test_a_token_hands_its_score_to_those_that_follow_and_to_no_others(backend):
    k = np.zeros((1, 48, 1, 16), np.float32)
    k[0, 21] = 8
    score = implementation("observation_scores", backend)
    scores = score(jnp.ones((1, 3, 1, 16)), jnp.asarray(k), jnp.array([40]), spread=5, decay=0.5)[0, 0]
    np.testing.assert_allclose(scores[21:26], 0.5 ** np.arange(5), rtol=1e-5)
    assert float(scores[:21].max()) < 1e-10
    assert float(scores[26:].max()) < 1e-10
    assert not np.any(scores[40:])


@on_every_backend("observation_scores")
@pytest.mark.parametrize("spread", [1, 1000])
def test_spread_of_one_token_or_past_the_prompt(spread, backend):
    operands = _operands((30, 11), 30, 2, 1, 16)
    scores = implementation("observation_scores", backend)(*operands, spread=spread)
    np.testing.assert_allclose(scores, _expected(*operands, spread), rtol=5e-5, atol=1e-9)


@on_every_backend("observation_scores")
def test_scores_past_the_range_of_exp_do_not_overflow(backend):
    operands = _operands((50,), 50, 4, 2, 16, scale=25.0)
    scores = implementation("observation_scores", backend)(*operands, spread=SPREAD)
    np.testing.assert_allclose(scores, _expected(*operands, SPREAD), rtol=2e-3, atol=1e-9)


def test_plain_jax_equals_the_oracle_over_several_tiles_of_keys():
    operands = _operands((1100, 1023, 513, 70), 1100, 2, 1, 16)
    scores = observation_scores_xla.observation_scores(*operands, spread=SPREAD)
    np.testing.assert_allclose(scores, _expected(*operands, SPREAD), rtol=5e-5, atol=1e-9)


@on_every_backend("observation_scores")
def test_array_without_tokens_has_no_scores(backend):
    scores = implementation("observation_scores", backend)(*_operands((0,), 0, 2, 1, 16), spread=SPREAD)
    assert scores.shape == (1, 1, 0)


def test_shapes_spread_and_decay_are_checked():
    q_last, k, lengths = jnp.ones((1, 3, 2, 16)), jnp.ones((1, 5, 1, 16)), jnp.array([5])
    with pytest.raises(ValueError, match=r"k has shape \(1, 5, 1, 8\)"):
        unchecked(observation_scores)(q_last, k[..., :8], lengths, spread=4)
    with pytest.raises(ValueError, match=r"q_last has shape \(1, 0, 2, 16\): must hold at least one query"):
        observation_scores(q_last[:, :0], k, lengths, spread=4)
    with pytest.raises(ValueError, match="spread = 0: must be at least 1"):
        observation_scores(q_last, k, lengths, spread=0)
    for decay in (0.0, 1.1):
        with pytest.raises(ValueError, match=rf"decay = {decay}: must lie in \(0, 1\]"):
            observation_scores(q_last, k, lengths, spread=4, decay=decay)
