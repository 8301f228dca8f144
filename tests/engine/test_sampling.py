"""Sampling: each filter against its definition, the order of Hugging Face, and seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.engine.decode import row_keys
from tca_jax.engine.sampling import Sampling, filter_logits, sample


def _random_logits(seed, batch=3, vocabulary=50):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, vocabulary)) * 3, jnp.float32)


def _kept(logits):
    return np.isfinite(np.asarray(logits))


def test_greedy_takes_the_highest_logit():
    logits = _random_logits(0)
    for seed in range(3):
        token = sample(logits, row_keys(jax.random.key(seed), 3), Sampling())
        np.testing.assert_array_equal(token, np.argmax(logits, axis=-1))


@pytest.mark.parametrize("temperature", [2e-38, np.float32(2e-38)[None]])
def test_the_smallest_temperature_is_greedy(temperature):
    logits = 10 * _random_logits(0)
    token = sample(logits, row_keys(jax.random.key(0), 3), Sampling(temperature=temperature, top_p=0.9))
    np.testing.assert_array_equal(token, np.argmax(logits, axis=-1))


@pytest.mark.parametrize("k", [1, 7, 50, 80])
def test_top_k_keeps_the_k_highest(k):
    logits = _random_logits(1)
    kept = _kept(filter_logits(logits, Sampling(temperature=1.0, top_k=k)))
    expected = np.argsort(np.argsort(-np.asarray(logits), axis=-1), axis=-1) < k
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set(p):
    logits = _random_logits(2)
    kept = _kept(filter_logits(logits, Sampling(temperature=1.0, top_p=p)))
    probabilities = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)
    for row, probs in zip(kept, probabilities, strict=True):
        mass, count = probs[row].sum(), row.sum()
        assert mass >= p - 1e-6
        assert count == 1 or mass - probs[row].min() < p
        assert probs[row].min() >= probs[~row].max(initial=0.0)


def test_min_p_keeps_probable_tokens():
    logits = _random_logits(3)
    kept = _kept(filter_logits(logits, Sampling(temperature=1.0, min_p=0.2)))
    probabilities = np.asarray(jax.nn.softmax(logits, axis=-1))
    np.testing.assert_array_equal(kept, probabilities >= 0.2 * probabilities.max(axis=-1, keepdims=True))


def test_filters_agree_with_transformers():
    torch = pytest.importorskip("torch", reason="parity with transformers needs PyTorch")
    from transformers.generation import logits_process as hf

    logits = _random_logits(4, batch=4, vocabulary=64)
    scores = torch.tensor(np.asarray(logits))
    seen = np.random.default_rng(0).integers(0, 64, (4, 9))
    ids = torch.tensor(seen)
    processors = [
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.TemperatureLogitsWarper(0.7),
        hf.TopKLogitsWarper(20),
        hf.TopPLogitsWarper(0.8),
        hf.MinPLogitsWarper(0.05),
    ]
    for processor in processors:
        scores = processor(ids, scores)
    mask = np.zeros(logits.shape, bool)
    np.put_along_axis(mask, seen, True, axis=1)
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.3)
    penalised = np.where(mask, np.where(logits > 0, logits / 1.3, logits * 1.3), logits)
    ours = filter_logits(jnp.asarray(penalised) / 0.7, sampling)
    np.testing.assert_allclose(ours, scores.numpy(), rtol=1e-5)
    # and `sample` draws only from that set
    for seed in range(20):
        token = sample(logits, row_keys(jax.random.key(seed), 4), sampling, jnp.asarray(mask))
        assert all(np.isfinite(scores.numpy()[row, t]) for row, t in enumerate(np.asarray(token)))


def test_draws_follow_the_distribution():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    draw = jax.jit(jax.vmap(lambda key: sample(logits, key[None], Sampling(temperature=1.0))[0]))
    tokens = np.asarray(draw(jax.random.split(jax.random.key(0), 20000)))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20000, [0.5, 0.3, 0.15, 0.05], atol=0.015)


def test_draws_do_not_depend_on_other_rows():
    logits = _random_logits(5)
    sampling = Sampling(temperature=1.0)
    together = sample(logits, row_keys(jax.random.key(7), 3), sampling)
    alone = sample(logits[:1], row_keys(jax.random.key(7), 1), sampling)
    assert int(together[0]) == int(alone[0])


def test_repetition_penalty_also_bends_greedy_choice():
    logits = jnp.array([[2.0, 1.9, -1.0]])
    seen = jnp.array([[True, False, False]])
    token = sample(logits, row_keys(jax.random.key(0), 1), Sampling(repetition_penalty=1.5), seen)
    assert int(token[0]) == 1


def test_neutral_values_switch_a_filter_off():
    assert Sampling(temperature=0.5, top_p=1.0, min_p=0.0, repetition_penalty=1.0) == Sampling(temperature=0.5)
    assert Sampling(temperature=0.0, top_k=5, top_p=0.5) == Sampling()
