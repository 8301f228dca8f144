"""Quest: which pages a step attends to, against a plain transcription of the authors' rule, from pages to answers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from paged import read_layer
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax import methods
from tca_jax.engine.cache import CacheLayout, shared_and_own
from tca_jax.engine.decode import decode_layer
from tca_jax.engine.extend import rows_with_leaving_block
from tca_jax.lab.rivals.quest import QuestCache
from tca_jax.methods.base import Heads

B, W, D = 8, 16, 16


def pages_of_step(q, keys, pages):
    """Numbers of the pages that a KV head attends to: q [G, d], keys [n, b, d] of the pages left of its window."""
    bounds = np.zeros(len(keys))
    for query in q:
        sign = np.where(query > 0, 1, -1)
        bounds += (query * sign) @ (keys * sign).max(axis=1).T
    return set(np.argsort(-bounds / len(q), kind="stable")[:pages].tolist())


def attention_of_step(q, k, v, pages, position):
    """Output of one KV head's queries [G, d] behind keys and values [position + 1, d]."""
    edge = max(0, position // B * B - W)
    chosen = pages_of_step(q, k[:edge].reshape(-1, B, D), pages)
    seen = [p for p in range(position + 1) if p >= edge or p // B in chosen]
    weights = oracle.softmax(q @ k[seen].T / np.sqrt(D))
    return weights @ v[seen]


@functools.partial(jax.jit, static_argnums=0)
def feed(policy, shared, cache, new, first, prompt_lengths):
    """Outputs of tokens that are fed one by one, `[T, B, Hq, d]`."""

    def step(cache, inputs):
        t, *token = inputs
        positions = first + t
        leaving = rows_with_leaving_block(policy, positions, prompt_lengths)
        token = [x[:, None] for x in token]
        out, cache = decode_layer(policy, 0, Heads.all(2), *token, shared, cache, positions, leaving)
        return cache, out[:, 0]

    steps = jnp.arange(new[0].shape[1])
    return jax.lax.scan(step, cache, (steps, *(jnp.swapaxes(x, 0, 1) for x in new)))[1]


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("samples", [1, 2], ids=["one cache", "rows that share what was read"])
@pytest.mark.parametrize("pages", [1, 3])
def test_steps_attend_to_the_pages_that_the_rule_names(group, samples, pages):
    lengths, steps, rng = (61, 44), 26, np.random.default_rng(group + samples)
    rows = len(lengths) * samples
    shapes = [(rows, 64 + steps, heads, D) for heads in (2 * group, 2, 2)]
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    for x in (q, k, v):  # rows of a prompt begin with the same tokens
        x[:, :64] = np.repeat(x[::samples, :64], samples, axis=0)
    policy = QuestCache(W + pages * B, 0, W, B)
    method, n = methods.Method("quest", methods.get("full").prefill, policy), jnp.array(lengths, jnp.int32)
    layout = CacheLayout.plan(policy, 1, 2, len(lengths), 64, steps if samples == 1 else 0)
    prompts = [jnp.asarray(x[::samples, :64]) for x in (q, k, v)]
    shared, cache = None, read_layer(method, layout, n, prompts)[1]
    starts = np.repeat(lengths, samples)
    if samples > 1:
        following = CacheLayout.plan_following(policy, 1, 2, rows, 64, steps)
        shared, cache = shared_and_own(cache, following, jnp.asarray(starts, jnp.int32))
    new = [np.stack([x[row, 64 : 64 + steps] for row in range(rows)]) for x in (q, k, v)]
    first = jnp.asarray(starts, jnp.int32)
    out = np.asarray(feed(policy, shared, cache, [jnp.asarray(x) for x in new], first, first))
    for row, t in np.ndindex(rows, steps):
        at = starts[row]
        ks, vs = (
            np.concatenate([x[row, :at], y[row, : t + 1]]).astype(np.float64) for x, y in ((k, new[1]), (v, new[2]))
        )
        for head in range(2):
            queries = new[0][row, t, head * group : (head + 1) * group].astype(np.float64)
            wanted = attention_of_step(queries, ks[:, head], vs[:, head], pages, at + t)
            np.testing.assert_allclose(out[t, row, head * group : (head + 1) * group], wanted, atol=2e-5)


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.mark.slow
def test_a_budget_of_all_and_dense_layers_are_full_attention(lm):
    ids, options = random_prompt(0, 90), {"max_new_tokens": 30, "stop_token_ids": ()}
    expected = tca_jax.generate(lm, ids, **options).tokens
    sizes = {"window": W, "block_size": B}
    assert (
        tca_jax.generate(lm.with_method("quest", budget=200, dense_layers=0, **sizes), ids, **options).tokens
        == expected
    )
    assert (
        tca_jax.generate(lm.with_method("quest", budget=24, dense_layers=2, **sizes), ids, **options).tokens == expected
    )
    few = tca_jax.generate(lm.with_method("quest", budget=24, dense_layers=0, **sizes), ids, **options)
    assert few.tokens != expected
    assert few.stats.kept_share == 1


class AskingAnew(QuestCache):
    """Trusts nothing that was computed in an earlier step."""

    def attended(self, layer, q, caches, summaries):
        return super().attended(layer, q, caches, tuple(self.summarize(layer, pages) for pages in caches))


@pytest.mark.slow
def test_what_steps_know_of_a_cache_is_true_in_ragged_batches(lm):
    prompts = [random_prompt(seed, length) for seed, length in enumerate((90, 61, 77))]
    answers = []
    for kind in (QuestCache, AskingAnew):
        method = methods.Method("quest", methods.get("full").prefill, kind(W + B, 0, W, B))
        model = lm.with_method(method)
        options = {"max_new_tokens": 40, "stop_token_ids": ()}
        together = tca_jax.generate(model, prompts, **options).tokens
        context = tca_jax.prefill(model, prompts[0])
        behind = tca_jax.generate(model, prompts[1:], context=context, **options).tokens
        answers.append((together, behind))
    assert answers[0] == answers[1]
