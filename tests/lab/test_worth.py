"""Predicted worth by masks: sparse reading against loops, kept shares, variants on a small model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.calibration.predicted_worth import SHARES, WorthMaps
from tca_jax.lab.sparse_reading import BLOCK, _attend
from tca_jax.lab.worth import KEEPINGS, Keeping, _with_reserve, kept_masks, masked_read

HEADS, GROUP, SIZE = 2, 2, 16


def drawn(tokens: int):
    keys = jax.random.split(jax.random.key(0), 4)
    q = 3 * jax.random.normal(keys[0], (tokens, HEADS * GROUP, SIZE))
    k, v = (jax.random.normal(key, (tokens, HEADS, SIZE)) for key in keys[1:3])
    return q, k, v, jax.random.uniform(keys[3], (HEADS, tokens)) < 0.05


def by_loops(q, k, v, selected, length, weight, mass, window, means, stride):
    """DESIGN 2.5, query by query."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, pairs = np.zeros_like(q), np.zeros(HEADS)
    for head in range(HEADS):
        chosen = selected[head] | (np.arange(len(q)) < 4)
        scores = np.einsum("lgd,md->glm", q[:, head * GROUP : (head + 1) * GROUP], k[:, head]) / np.sqrt(SIZE)
        for tile in range(len(q) // BLOCK):
            first = max(0, tile * BLOCK - window)
            largest = np.zeros(len(q) // BLOCK)
            for i in range(tile * BLOCK + stride - 1, (tile + 1) * BLOCK, stride):
                p = np.exp(scores[:, i, : i + 1] - scores[:, i, : i + 1].max(axis=-1, keepdims=True))
                p = np.pad(p / p.sum(axis=-1, keepdims=True), ((0, 0), (0, len(q) - i - 1)))
                largest = np.maximum(largest, p.reshape(GROUP, -1, BLOCK).sum(axis=-1).max(axis=0))
            fetched = [t for t in range(first // BLOCK) if largest[t] * weight[head] >= mass]
            for i in range(tile * BLOCK, min((tile + 1) * BLOCK, length)):
                seen = [j for j in range(i + 1) if chosen[j] or j >= first or j // BLOCK in fetched]
                logits, values = [scores[:, i, j] for j in seen], [v[j, head] for j in seen]
                for t in range(first // BLOCK) if means else ():
                    rest = [j for j in range(t * BLOCK, (t + 1) * BLOCK) if not chosen[j]]
                    if t not in fetched and rest:
                        query = q[i, head * GROUP : (head + 1) * GROUP]
                        logits.append(query @ k[rest, head].mean(axis=0) / np.sqrt(SIZE) + np.log(len(rest)))
                        values.append(v[rest, head].mean(axis=0))
                p = np.exp(np.stack(logits) - np.max(logits, axis=0))
                out[i, head * GROUP : (head + 1) * GROUP] = (p / p.sum(axis=0)).T @ np.stack(values)
                pairs[head] += len(values)
    return out, pairs


@pytest.mark.parametrize(("mass", "window", "means"), [(0.1, 128, True), (0.3, 0, False), (np.inf, 256, True)])
def test_reading_is_that_of_loops(mass, window, means):
    tokens, length, weight = 5 * BLOCK, 5 * BLOCK - 9, np.array([0.5, 2.0], np.float32)
    q, k, v, selected = drawn(tokens)
    settings = (jnp.float32(mass), jnp.int32(window), jnp.asarray(means))
    out, pairs = _attend(q, k, v, selected, jnp.int32(length), jnp.asarray(weight), *settings, 16)
    expected, expected_pairs = by_loops(q, k, v, np.asarray(selected), length, weight, mass, window, means, 16)
    np.testing.assert_allclose(np.asarray(out)[:length], expected[:length], atol=2e-5)
    np.testing.assert_allclose(pairs, expected_pairs)


def test_every_variant_keeps_its_share():
    rng = np.random.default_rng(0)
    predicted = {
        name: rng.normal(size=(4, 16 * BLOCK)).astype(np.float32) for name in ("worth", "probability", "effect")
    }
    zeros = np.zeros((2, 2), np.float32)
    maps = {
        name: WorthMaps(
            np.zeros((2, 2, 3), np.float32), np.quantile(each, 1 - SHARES).astype(np.float32), zeros, zeros, zeros
        )
        for name, each in predicted.items()
    }
    for keeping in KEEPINGS:
        kept = kept_masks(keeping, predicted, maps, 0.6, 2)
        assert kept.mean() == pytest.approx(0.6, abs=0.02), keeping
        assert kept[:, -keeping.window :].all()
        assert kept[:, :4].all()
    per_head = kept_masks(Keeping(budget="head"), predicted, maps, 0.6, 2)
    np.testing.assert_allclose(per_head.mean(axis=1), 0.6, atol=0.01)
    assert kept_masks(Keeping(), predicted, maps, 1.0, 2).all()


def test_means_stand_for_evicted_tokens():
    tokens = 2 * BLOCK
    _, k, v, kept = drawn(tokens)
    kept = np.asarray(kept)
    read, share = masked_read(range(tokens), [(k[None], v[None])], kept, 1.0, means=True)
    (mean_k, _), bias = read.keys[0], np.asarray(read.masks[0])[0]
    np.testing.assert_allclose(mean_k[0, tokens, 1], np.asarray(k)[:BLOCK][~kept[1, :BLOCK], 1].mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(bias[1, tokens], np.log((~kept[1, :BLOCK]).sum()), rtol=1e-6)
    assert np.array_equal(bias[:, :tokens] == 0, kept)
    assert share == pytest.approx(kept.mean() + 1 / BLOCK)


def test_a_reserve_is_each_heads_own():
    kept = jnp.zeros((1, 2, 64), bool).at[0, 1, 40].set(True)
    scores = jnp.zeros((1, 2, 64)).at[0, 0, 5].set(0.9).at[0, 0, 50].set(0.5).at[0, 1, 40].set(0.8).at[0, 1, 3].set(0.1)
    found = np.asarray(_with_reserve(kept, scores, 20))[0]
    assert np.array_equal(np.flatnonzero(found[0]), [*range(5, 21), *range(50, 64)])  # ties of the second are kept
    assert found[1, 3:19].all()
    assert found[1, 40:56].all()
