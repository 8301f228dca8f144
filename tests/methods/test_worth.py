"""Attention by predicted worth against loops over queries, part by part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.methods.worth import ReadSettings, WorthPrefill, block_representatives, choose_by_worth

LENGTHS, TOKENS, BLOCK, WINDOW = [640, 503], 640, 128, 256
HEADS, GROUP, SIZE = 2, 2, 16


def drawn(scale=3.0):
    keys = jax.random.split(jax.random.key(0), 4)
    q = scale * jax.random.normal(keys[0], (2, TOKENS, HEADS * GROUP, SIZE))
    k, v = (jax.random.normal(key, (2, TOKENS, HEADS, SIZE)) for key in keys[1:3])
    return q, k, v, jax.random.normal(keys[3], (2, HEADS, TOKENS)), jnp.asarray(LENGTHS)


def attend(operands, theta, mass, means=True, stride=16):
    chosen = choose_by_worth(*operands, ReadSettings(*map(jnp.asarray, (theta, mass, means))), stride=stride)
    return WorthPrefill().attend_chosen(*operands[:3], chosen, operands[-1], "auto")


def weights(worth):
    """Those of a mean, and their entropy."""
    w = np.exp(worth) / np.exp(worth).sum()
    return w, -w @ np.log(w)


def represented(k, worth):
    """The 31 best keys of a block and the mean of the others; additions to their logits."""
    best, others = np.split(np.argsort(-worth, kind="stable"), [31])
    w, entropy = weights(worth[others])
    return np.concatenate([k[best], [w @ k[others]]]), np.append(np.zeros(31), entropy)


def by_loops(q, k, v, worth, length, theta, mass, means, stride):
    """One row, query by query: attention, and pairs by KV head."""
    q, k, v, worth = (np.asarray(x, np.float64) for x in (q, k, v, worth))
    out, pairs = np.zeros_like(q[:length]), np.zeros(HEADS)
    for head in range(HEADS):
        of_group = slice(head * GROUP, (head + 1) * GROUP)
        chosen = (worth[head] >= theta) | (np.arange(len(q)) < 4)
        each = list(map(represented, *(np.split(x, TOKENS // BLOCK) for x in (k[:, head], worth[head]))))
        scores = np.einsum("lgd,md->glm", q[:, of_group], k[:, head]) / np.sqrt(SIZE)
        for start in range(0, length, BLOCK):
            first, largest = max(0, start - WINDOW), np.zeros(len(q) // BLOCK)
            for i in range(start + stride - 1, min(start + BLOCK, length), stride):
                far = [np.exp(q[i, of_group] @ keys.T / np.sqrt(SIZE) + bias) for keys, bias in each[: first // BLOCK]]
                sums = [np.exp(scores[:, i, first : i + 1]).sum(axis=-1), *(x.sum(axis=-1) for x in far)]
                for t in range(first // BLOCK):
                    largest[t] = max(largest[t], (sums[t + 1] / sum(sums)).max())
            fetched = [t for t in range(first // BLOCK) if largest[t] >= mass]
            for i in range(start, min(start + BLOCK, length)):
                seen = [j for j in range(i + 1) if chosen[j] or j >= first or j // BLOCK in fetched]
                logits, values = [scores[:, i, j] for j in seen], [v[j, head] for j in seen]
                for t in range(first // BLOCK) if means else ():
                    rest = [j for j in range(t * BLOCK, (t + 1) * BLOCK) if not chosen[j]]
                    if t not in fetched and rest:
                        w, entropy = weights(worth[head, rest])
                        logits.append(q[i, of_group] @ (w @ k[rest, head]) / np.sqrt(SIZE) + entropy)
                        values.append(w @ v[rest, head])
                p = np.exp(np.stack(logits) - np.max(logits, axis=0))
                out[i, of_group] = (p / p.sum(axis=0)).T @ np.stack(values)
                pairs[head] += len(values)
    return out, pairs


@pytest.mark.parametrize(
    ("scale", "theta", "mass", "means", "stride"),
    [
        (3.0, 1.5, 0.1, True, 16),
        (3.0, 1.5, 0.3, True, 8),
        (0.3, 1.5, 0.22, True, 16),  # attention is even: the mean of a block has most of its mass
        (3.0, 1.5, np.inf, False, 16),
        (3.0, np.inf, np.inf, True, 16),
    ],
)
def test_tokens_blocks_and_means_equal_loops(scale, theta, mass, means, stride):
    operands = drawn(scale)
    out, pairs = attend(operands, theta, mass, means, stride)
    for row, length in enumerate(LENGTHS):
        expected, attended = by_loops(*(x[row] for x in operands[:4]), length, theta, mass, means, stride)
        np.testing.assert_allclose(out[row, :length], expected, atol=3e-5)
        np.testing.assert_allclose(pairs[row], attended.mean(), rtol=1e-6)


def test_representatives_are_the_best_tokens_and_a_mean():
    _, k, v, worth, _ = drawn()
    expected = represented(*(np.asarray(x[1, 1, 128:256], np.float64) for x in (k.swapaxes(1, 2), worth)))
    for actual, wanted in zip(block_representatives(k, v, worth, 32), expected, strict=True):
        np.testing.assert_allclose(actual[1, 1, 1], wanted, atol=1e-5)
