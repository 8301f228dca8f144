"""Sampling: each filter against its definition, the order of Hugging Face, and seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.engine.decode import row_keys
from tca_jax.engine.sampling import Sampling, filter_logits, sample


def _random_logits(seed, batch=3, vocabulary=50):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, vocabulary)) * 3, jnp.float32)


@pytest.mark.parametrize("temperature", [2e-38, np.float32(2e-38)[None]])
def test_the_smallest_temperature_is_greedy(temperature):
    logits = 10 * _random_logits(0)
    token = sample(logits, row_keys(jax.random.key(0), 3), Sampling(temperature=temperature, top_p=0.9))
    np.testing.assert_array_equal(token, np.argmax(logits, axis=-1))


def reference(logits, top_k=None, top_p=None, min_p=None):
    """Logits of what is kept, the others -inf: the filters one after another, as transformers has them."""
    logits = np.asarray(logits, np.float64).copy()
    for row in logits:
        if top_k is not None:
            row[np.argsort(-row)[top_k:]] = -np.inf
        order = np.argsort(-row)
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        if top_p is not None:  # the smallest set that reaches p
            row[order[1:][np.cumsum(probabilities[order])[:-1] >= top_p]] = -np.inf
        if min_p is not None:
            row[probabilities < min_p * probabilities.max()] = -np.inf
    return logits


@pytest.mark.parametrize(
    "filters",
    [
        *({"top_k": k} for k in (1, 7, 50, 80)),
        *({"top_p": p} for p in (1e-6, 0.3, 0.9, 0.999)),
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 5, "min_p": 0.3},
    ],
    ids=str,
)
def test_filters_equal_a_reference(filters):
    logits, seen = _random_logits(4, batch=4), np.zeros((4, 50), bool)
    seen[:, ::5] = True
    np.testing.assert_allclose(
        filter_logits(logits, Sampling(temperature=1.0, **filters)), reference(logits, **filters), rtol=1e-6
    )
    # a token is drawn behind the penalty, the temperature and the filters
    penalised = np.where(seen, np.where(logits > 0, logits / 1.3, logits * 1.3), logits)
    allowed, drawn = np.isfinite(reference(penalised / 0.7, **filters)), set()
    for seed in range(20):
        sampling = Sampling(temperature=0.7, repetition_penalty=1.3, **filters)
        token = sample(logits, row_keys(jax.random.key(seed), 4), sampling, jnp.asarray(seen))
        assert allowed[np.arange(4), token].all()
        drawn.add(int(token[0]))
    assert (len(drawn) > 1) == (allowed[0].sum() > 1)


def test_draws_follow_the_distribution():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    draw = jax.jit(jax.vmap(lambda key: sample(logits, key[None], Sampling(temperature=1.0))[0]))
    tokens = np.asarray(draw(jax.random.split(jax.random.key(0), 20000)))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20000, [0.5, 0.3, 0.15, 0.05], atol=0.015)
