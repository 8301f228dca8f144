"""Prompt compression once more, naively, in float64 NumPy, from the papers' code: what tests compare with.

Scores are those of one prompt without padding: q [L, Hq, d], k and v [L, Hkv, d] -> [Hkv, L], by a method's options.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import oracle
from random_decoders import causal
from tiny import CONFIG

from tca_jax.models.rope import fixed_frequencies

FREQUENCIES = fixed_frequencies(CONFIG.head_dim, CONFIG.rope)


def observed_by_all(q, k):
    """Attention of all queries on all tokens, [Hkv, G, L, L]."""
    group = q.shape[1] // k.shape[1]
    heads = [oracle.probabilities(q[:, h], k[:, h // group]) for h in range(q.shape[1])]
    return np.array(heads).reshape(k.shape[1], group, len(q), len(k))


def observed(q, k, count):
    """Attention of the last queries on the tokens before them, [Hkv, G, count, L - count]."""
    return observed_by_all(q, k)[:, :, -count:, : len(q) - count]


def pooled(scores, kernel, pooling):
    """[Hkv, G, n] over each one's neighbours, with zeros past the ends; then the mean over groups."""
    half = kernel // 2
    padded = np.pad(scores, ((0, 0), (0, 0), (half, half)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)
    return (windows.max(axis=-1) if pooling == "max" else windows.mean(axis=-1)).mean(axis=1)


def snapkv_scores(q, k, v, observation, kernel=5, pooling="avg"):
    return pooled(observed(q, k, observation).sum(axis=2), kernel, pooling)


def cake_scores(q, k, v, observation, kernel=5, gamma=200.0):
    attention = observed(q, k, observation)
    return pooled(attention.mean(axis=2) + gamma * attention.var(axis=2, ddof=1), kernel, "avg")


def cake_preference(q, k, observation, tau1, tau2):
    attention = observed(q, k, observation)
    entropy = -(attention * np.log(attention + 1e-10)).sum()
    return entropy ** (1 / tau1) * attention.var(axis=2, ddof=1).sum() ** (1 / tau2)


def keydiff_scores(q, k, v):
    """1 less the cosine of each key and the mean of all keys at length 1."""
    units = k / np.linalg.norm(k, axis=-1, keepdims=True)
    anchors = units.mean(axis=0)
    return np.array([1 - units[:, h] @ anchor / np.linalg.norm(anchor) for h, anchor in enumerate(anchors)])


def tova_scores(q, k, v):
    attention = observed(q, k, 1)[:, :, 0]
    return np.broadcast_to(attention.mean(axis=(0, 1)), (len(attention), attention.shape[-1]))


def h2o_scores(q, k, v, average=False):
    """Column sums of the whole attention, or their means over the queries that see the token."""
    attention = observed_by_all(q, k).sum(axis=2)
    return (attention / np.arange(len(k), 0, -1) if average else attention).mean(axis=1)


def pyramidkv_budget(layer, layers, mean, ranked, window, beta):
    """Tokens of a layer, as the authors' code has them but for rounding."""
    if ranked + window < 2 * mean:
        return mean
    most, least = 2 * mean - mean / beta, mean / beta
    if most >= ranked:
        most, least = ranked, 2 * mean - ranked
    return round(most - layer * (most - least) / (layers - 1))


def rotation(position, factor=1.0):
    """RoPE of one position as a matrix [d, d]."""
    cos, sin = (np.diag(f(position * np.asarray(FREQUENCIES, np.float64))) for f in (np.cos, np.sin))
    return factor * np.block([[cos, -sin], [sin, cos]])


def expected_attention_scores(q, k, v, future, sinks, epsilon=0.0, factor=1.0):
    """`factor`: of the rotation of queries to come; the prompt's have none."""
    length, heads, head_dim = q.shape
    group = heads // k.shape[1]
    q = np.stack([x @ rotation(i) for i, x in enumerate(q)])  # before RoPE: R^-1 = R^T
    turn = np.mean([rotation(length + m, factor) for m in range(future)], axis=0)
    scores = np.zeros((heads, length))
    for h in range(heads):
        queries, keys = q[sinks:, h], k[sinks:, h // group]
        mean, covariance = turn @ queries.mean(axis=0), turn @ np.cov(queries.T, bias=True) @ turn.T
        logits = keys @ mean / np.sqrt(head_dim) + ((keys @ covariance) * keys).sum(axis=1) / (2 * head_dim)
        scores[h, sinks:] = oracle.softmax(logits)
    by_kv_head = scores.reshape(k.shape[1], group, length).mean(axis=1) + epsilon
    by_kv_head *= np.linalg.norm(v, axis=-1).T
    by_kv_head[:, :sinks] = np.inf
    return by_kv_head


def adakv_counts(scores, mean, safeguard, protects):
    """Tokens of each head: its part of the highest scores of all heads, `mean` for each, [H, n] -> [H]."""
    heads, tokens = scores.shape
    order = np.argsort(-scores, axis=1, kind="stable")
    protected = np.zeros(scores.shape, bool)
    if protects:
        np.put_along_axis(protected, order[:, : int(mean * safeguard)], True, axis=1)
    chosen = np.lexsort((-scores.ravel(), ~protected.ravel()))[: heads * mean]
    counts = np.bincount(chosen // tokens, minlength=heads)
    return counts if protects else np.rint(counts * (1 - safeguard) + int(mean * safeguard)).astype(int)


def full_attention_inputs(lm, ids):
    """q, k and v of every layer under full attention, float64, without an axis of rows."""
    inputs, padding = [], -len(ids) % 96  # behind the tokens, which do not see it: few shapes are compiled

    def attention(layer, q, k, v, state):
        inputs.append([np.asarray(x[0, : len(ids)], np.float64) for x in (q, k, v)])
        return causal(layer, q, k, v, state)

    tokens = jnp.array([[*ids, *[0] * padding]])
    lm.decoder(tokens, jnp.arange(tokens.shape[1])[None], attention, (None,) * CONFIG.num_layers)
    return inputs


def kvzip_scores(lm, prompt, chunk, sinks, opening=(), continuing=(), answer=()):
    """Attention that each token gets while the prompt is repeated, [layers, Hkv, L], by the authors' `_get_score`."""
    scores = np.zeros((CONFIG.num_layers, CONFIG.num_kv_heads, len(prompt)))
    scores[..., :sinks] = 2
    group = CONFIG.num_heads // CONFIG.num_kv_heads
    for start in range(sinks, len(prompt), chunk):
        ids, before = prompt[start : start + chunk], prompt[start - 8 : start]
        fed = [*(opening if start == sinks else [*continuing, *before]), *answer, *ids]
        columns = [*range(sinks), *range(start, start + len(ids)), *range(len(prompt), len(prompt) + len(fed))]
        seen = np.concatenate([np.ones((len(fed), sinks + len(ids)), bool), np.tri(len(fed), dtype=bool)], axis=1)
        for layer, (q, k, _) in enumerate(full_attention_inputs(lm, [*prompt, *fed])):
            for head in range(CONFIG.num_heads):
                logits = q[-len(fed) :, head] @ k[columns, head // group].T / np.sqrt(CONFIG.head_dim)
                weights = oracle.softmax(np.where(seen, logits, -np.inf))[:, sinks : sinks + len(ids)]
                of_chunk = scores[layer, head // group, start : start + len(ids)]
                np.maximum(of_chunk, weights.max(axis=0), out=of_chunk)
    return scores


def kvzip_kept(scores, share, level):
    """Which of the ranked tokens stay, bool [layers, Hkv, n]: the highest scores of all that share a budget."""
    layers, heads, tokens = scores.shape
    each = int(np.rint(share * tokens))
    groups = {"pair": (1, -1), "layer": (layers, -1), "uniform": (layers * heads, -1)}[level]
    flat = scores.reshape(groups)
    kept, order = np.zeros(flat.shape, bool), np.argsort(-flat, axis=1, kind="stable")
    np.put_along_axis(kept, order[:, : each * layers * heads // len(flat)], True, axis=1)
    return kept.reshape(scores.shape)
