"""What heads attend to and what tokens say, next to a dense computation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax.lab.plots.inspection import attention_received, token_texts


def dense_attention(lm: tca_jax.LM, ids: list[int]) -> np.ndarray:
    """Column sums of every layer's attention matrix, mean over the query heads of a KV head."""
    sums = []

    def attention(layer, q, k, v, state):
        length, group = q.shape[1], q.shape[2] // k.shape[2]
        scores = jnp.einsum("blhd,bmhd->bhlm", q, jnp.repeat(k, group, axis=2)) / q.shape[-1] ** 0.5
        mass = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf))
        sums.append(mass.sum(axis=2)[0].reshape(-1, group, length).mean(axis=1))
        return jnp.einsum("bhlm,bmhd->blhd", mass, jnp.repeat(v, group, axis=2)), None

    tokens = jnp.asarray([ids])
    lm.decoder(tokens, jnp.arange(len(ids))[None], attention, (None,) * lm.config.num_layers)
    return np.stack(sums)


@pytest.mark.parametrize("method", [{}, {"window": 16, "block_size": 8}])
def test_attention_received_is_the_column_sums_of_full_attention_under_any_method(method):
    lm = tiny_lm()
    ids = random_prompt(0, 70)
    received = attention_received(lm.with_method("streaming", **method) if method else lm, ids)
    assert received.shape == (2, 2, 70)
    np.testing.assert_allclose(received, dense_attention(lm, ids), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(received.sum(axis=-1), 70, rtol=1e-5)


def test_texts_of_tokens_add_up_to_the_prompt():
    lm = tca_jax.load("recall-tiny")
    assert token_texts(lm, "x = 1\n") == ["<|bos|>", *"x = 1\n"]


def test_tokens_without_a_tokenizer_have_no_text():
    with pytest.raises(ValueError, match="tiny has no tokenizer: its tokens have no text"):
        token_texts(dataclasses.replace(tiny_lm(), tokenizer=None), [1, 2])


def test_a_prompt_past_the_models_positions_is_refused():
    with pytest.raises(ValueError, match=r"prompt has 4097 tokens: tiny has 4096 positions"):
        attention_received(tiny_lm(), [1] * 4097)
