"""Quest: which pages a step attends to, against a plain transcription of the authors' rule, from pages to answers."""

import dataclasses
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
from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.decode import evict_block
from tca_jax.lab.rivals.quest import QuestCache
from tca_jax.methods.base import Heads
from tca_jax.pallas_kernels.paged_attention import paged_attention

B, W, D = 8, 16, 16


def pages_of_step(q, keys, pages):
    """Numbers of the pages that a KV head attends to: q [G, d], keys [n, b, d] of the pages left of its window."""
    bounds = np.zeros(len(keys))
    for query in q:
        sign = np.where(query > 0, 1, -1)
        bounds += (query * sign) @ (keys * sign).max(axis=1).T
    return oracle.highest(bounds / len(q), pages)


def attention_of_step(q, k, v, pages, position):
    """Output of one KV head's queries [G, d] behind keys and values [position + 1, d]."""
    edge = max(0, position // B * B - W)
    chosen = pages_of_step(q, k[:edge].reshape(-1, B, D), pages)
    seen = [p for p in range(position + 1) if p >= edge or p // B in chosen]
    return oracle.softmax(q @ k[seen].T / np.sqrt(D)) @ v[seen]


@functools.partial(jax.jit, static_argnums=0)
def feed(policy, rows, new, first):
    """Outputs of tokens that are fed one by one, `[T, R, Hq, d]`."""

    def step(rows, inputs):
        t, q, k, v = inputs
        positions, start = first + t, rows.start
        leaving = rows.are_full(positions, start)
        rows = evict_block(policy, 0, Heads.all(2), q, k, rows, start, positions, leaving, "xla")
        rows = dataclasses.replace(rows, start=start + jnp.where(leaving, B, 0))
        rows = rows.with_tokens(0, k[:, None], v[:, None], positions[:, None], None, rows.start)
        pages = rows.of_layer(0)
        pages = policy.attended(0, q, pages, (policy.summarize(0, pages[0]),))
        return rows, paged_attention(q[:, None], pages, positions, positions, window=W)[0][:, 0]

    steps = jnp.arange(new[0].shape[1])
    return jax.lax.scan(step, rows, (steps, *(jnp.swapaxes(x, 0, 1) for x in new)))[1]


@pytest.mark.parametrize(("group", "samples", "pages"), [(1, 1, 3), (4, 2, 1)])
def test_steps_attend_to_the_rules_pages(group, samples, pages):
    lengths, steps, rng = (61, 44), 26, np.random.default_rng(group + samples)
    count = len(lengths) * samples
    shapes = [(count, 64 + steps, heads, D) for heads in (2 * group, 2, 2)]
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    for x in (q, k, v):  # rows of a prompt begin with the same tokens
        x[:, :64] = np.repeat(x[::samples, :64], samples, axis=0)
    policy = QuestCache(W + pages * B, 0, W, B)
    method, n = methods.Method("quest", methods.get("full").prefill, policy), jnp.array(lengths, jnp.int32)
    layout = CacheLayout.plan(policy, 1, 2, len(lengths), 64, steps)
    rows = read_layer(method, layout, n, [jnp.asarray(x[::samples, :64]) for x in (q, k, v)], steps)[1]
    starts = np.repeat(lengths, samples)
    first = jnp.asarray(starts, jnp.int32)
    if samples > 1:
        rows = rows.with_pages(100).forked(jnp.repeat(jnp.arange(len(lengths)), samples), first + steps)
    new = [x[:, 64:] for x in (q, k, v)]
    out = np.asarray(feed(policy, rows, [jnp.asarray(x) for x in new], first))
    for row, t, head in np.ndindex(count, steps, 2):
        at, group_of = starts[row], slice(head * group, (head + 1) * group)
        keys, values = (
            np.concatenate([x[row, :at, head], y[row, : t + 1, head]]).astype(np.float64)
            for x, y in ((k, new[1]), (v, new[2]))
        )
        wanted = attention_of_step(new[0][row, t, group_of].astype(np.float64), keys, values, pages, at + t)
        np.testing.assert_allclose(out[t, row, group_of], wanted, atol=2e-5)


class AskingAnew(QuestCache):
    """Trusts nothing that was computed in an earlier step."""

    def attended(self, layer, q, caches, summaries):
        return super().attended(layer, q, caches, tuple(self.summarize(layer, pages) for pages in caches))


@pytest.mark.slow
def test_bounds_of_earlier_steps_stay_true():
    lm, prompts, answers = tiny_lm(), [random_prompt(seed, length) for seed, length in enumerate((90, 61, 77))], []
    for kind in (QuestCache, AskingAnew):
        model = lm.with_method(methods.Method("quest", methods.get("full").prefill, kind(W + B, 0, W, B)))
        options = {"max_new_tokens": 40, "stop_token_ids": ()}
        together = tca_jax.generate(model, prompts, **options).tokens
        context = tca_jax.prefill(model, prompts[0])
        answers.append((together, tca_jax.generate(model, prompts[1:], context=context, **options).tokens))
    assert answers[0] == answers[1]
