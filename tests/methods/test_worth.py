"""Attention by predicted worth against loops over queries, part by part."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from tca_jax.methods.worth import ReadSettings, WorthPrefill, choose_by_worth

LENGTHS, TOKENS, BLOCK, WINDOW = [640, 503], 640, 128, 256
HEADS, GROUP, SIZE = 2, 2, 16


def drawn():
    keys = jax.random.split(jax.random.key(0), 4)
    q = 3 * jax.random.normal(keys[0], (2, TOKENS, HEADS * GROUP, SIZE))
    k, v = (jax.random.normal(key, (2, TOKENS, HEADS, SIZE)) for key in keys[1:3])
    return q, k, v, jax.random.normal(keys[3], (2, HEADS, TOKENS)), jnp.asarray(LENGTHS)


def attend(operands, theta, least, means=True, stride=16):
    chosen = choose_by_worth(*operands, ReadSettings(*map(jnp.asarray, (theta, least, means))), stride=stride)
    return WorthPrefill().attend_chosen(*operands[:3], chosen, operands[-1], "auto")


def by_loops(q, k, v, worth, length, theta, least, means, stride):
    """One row, query by query: attention, and pairs by KV head."""
    q, k, v, worth = (np.asarray(x, np.float64) for x in (q, k, v, worth))
    out, pairs = np.zeros_like(q[:length]), np.zeros(HEADS)
    for head in range(HEADS):
        of_group = slice(head * GROUP, (head + 1) * GROUP)
        chosen = (worth[head] >= theta) | (np.arange(len(q)) < 4)
        scores = np.einsum("lgd,md->glm", q[:, of_group], k[:, head]) / np.sqrt(SIZE)
        for start in range(0, length, BLOCK):
            first, largest = max(0, start - WINDOW), np.zeros(len(q) // BLOCK)
            for i in range(start + stride - 1, min(start + BLOCK, length), stride):
                visible = np.where(np.arange(len(q)) <= i, scores[:, i], -np.inf)
                p = np.exp(visible - visible.max(axis=-1, keepdims=True)).reshape(GROUP, -1, BLOCK).max(axis=-1)
                largest = np.maximum(largest, (p / p.sum(axis=-1, keepdims=True)).max(axis=0))
            fetched = [t for t in range(first // BLOCK) if largest[t] >= least]
            for i in range(start, min(start + BLOCK, length)):
                seen = [j for j in range(i + 1) if chosen[j] or j >= first or j // BLOCK in fetched]
                logits, values = [scores[:, i, j] for j in seen], [v[j, head] for j in seen]
                for t in range(first // BLOCK) if means else ():
                    rest = [j for j in range(t * BLOCK, (t + 1) * BLOCK) if not chosen[j]]
                    if t not in fetched and rest:
                        w = np.exp(worth[head, rest])
                        w /= w.sum()
                        logits.append(q[i, of_group] @ (w @ k[rest, head]) / np.sqrt(SIZE) - w @ np.log(w))
                        values.append(w @ v[rest, head])
                out[i, of_group] = oracle.softmax(np.stack(logits, axis=1)) @ np.stack(values)
                pairs[head] += len(values)
    return out, pairs


@pytest.mark.parametrize(
    ("theta", "least", "means", "stride"),
    [(1.5, 0.1, True, 16), (1.5, 0.3, True, 8), (1.5, np.inf, False, 16), (np.inf, np.inf, True, 16)],
)
def test_tokens_blocks_and_means_equal_loops(theta, least, means, stride):
    operands = drawn()
    out, pairs = attend(operands, theta, least, means, stride)
    for row, length in enumerate(LENGTHS):
        expected, attended = by_loops(*(x[row] for x in operands[:4]), length, theta, least, means, stride)
        np.testing.assert_allclose(out[row, :length], expected, atol=3e-5)
        np.testing.assert_allclose(pairs[row], attended.mean(), rtol=1e-6)
