"""Prompt compression once more, naively, in float64 NumPy, from the papers' code: what tests compare with.

Scores are those of one prompt without padding: q [L, Hq, d], k and v [L, Hkv, d] -> [Hkv, L].
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import oracle
from tiny import CONFIG


def observed_by_all(q, k):
    """Attention of all queries on all tokens, [Hkv, G, L, L]."""
    group = q.shape[1] // k.shape[1]
    heads = [oracle.probabilities(q[:, h], k[:, h // group]) for h in range(q.shape[1])]
    return np.array(heads).reshape(k.shape[1], group, len(q), len(k))


def observed(q, k, count):
    """Attention of the last queries on the tokens before them, [Hkv, G, count, L - count]."""
    return observed_by_all(q, k)[:, :, -count:, : len(q) - count]


def pooled(scores, kernel, pooling):
    """Of one head's scores: over each one's neighbours, with zeros past the ends."""
    half = kernel // 2
    padded = [0.0] * half + list(scores) + [0.0] * half
    reduce = max if pooling == "max" else lambda x: sum(x) / kernel
    return [reduce(padded[i : i + kernel]) for i in range(len(scores))]


def _by_kv_head(scores, kernel, pooling):
    """[Hkv, G, n] pooled, then the mean over groups."""
    return np.array([[pooled(head, kernel, pooling) for head in group] for group in scores]).mean(axis=1)


def snapkv_scores(q, k, observation, kernel, pooling):
    return _by_kv_head(observed(q, k, observation).sum(axis=2), kernel, pooling)


def cake_scores(q, k, observation, kernel, gamma):
    attention = observed(q, k, observation)
    return _by_kv_head(attention.mean(axis=2) + gamma * attention.var(axis=2, ddof=1), kernel, "avg")


def cake_preference(q, k, observation, tau1, tau2):
    attention = observed(q, k, observation)
    entropy = -(attention * np.log(attention + 1e-10)).sum()
    return entropy ** (1 / tau1) * attention.var(axis=2, ddof=1).sum() ** (1 / tau2)


def keydiff_scores(k):
    """1 less the cosine of each key and the mean of all keys at length 1."""
    units = k / np.linalg.norm(k, axis=-1, keepdims=True)
    anchors = units.mean(axis=0)
    return np.array([1 - units[:, h] @ anchor / np.linalg.norm(anchor) for h, anchor in enumerate(anchors)])


def tova_scores(q, k):
    attention = observed(q, k, 1)[:, :, 0]
    return np.broadcast_to(attention.mean(axis=(0, 1)), (len(attention), attention.shape[-1]))


def h2o_scores(q, k, average):
    """Column sums of the whole attention, or their means over the queries that see the token."""
    length = len(k)
    attention = observed_by_all(q, k).sum(axis=2)
    return (attention / np.arange(length, 0, -1) if average else attention).mean(axis=1)


def pyramidkv_budget(layer, layers, mean, ranked, window, beta):
    """Tokens of a layer, as the authors' code has them but for rounding."""
    if ranked + window < 2 * mean:
        return mean
    most, least = 2 * mean - mean / beta, mean / beta
    if most >= ranked:
        most, least = ranked, 2 * mean - ranked
    return round(most - layer * (most - least) / (layers - 1))


def rotation(position, frequencies, factor=1.0):
    """RoPE of one position as a matrix [d, d]."""
    cos, sin = (np.diag(f(position * np.asarray(frequencies, np.float64))) for f in (np.cos, np.sin))
    return factor * np.block([[cos, -sin], [sin, cos]])


def expected_attention_scores(q_before_rope, k, v, frequencies, *, future, sinks, epsilon, factor=1.0):
    """`k` after RoPE, the queries before it."""
    length, heads, head_dim = q_before_rope.shape
    group = heads // k.shape[1]
    turn = np.mean([rotation(length + m, frequencies, factor) for m in range(future)], axis=0)
    scores = np.zeros((heads, length))
    for h in range(heads):
        queries, keys = q_before_rope[sinks:, h], k[sinks:, h // group]
        mean, covariance = queries.mean(axis=0), np.cov(queries.T, bias=True)
        mean, covariance = turn @ mean, turn @ covariance @ turn.T
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


def highest(scores, count, ranked_tokens):
    """Positions of the highest scores of one head among its first tokens."""
    return set(np.argsort(-scores[:ranked_tokens], kind="stable")[:count].tolist())


def full_attention_inputs(lm, ids):
    """q, k and v of every layer under full attention, float64, without an axis of rows."""
    inputs, padding = [], -len(ids) % 96  # behind the tokens, which do not see it: few shapes are compiled

    def attention(layer, q, k, v, state):
        arrays = [np.asarray(x[0], np.float64) for x in (q, k, v)]
        inputs.append([x[: len(ids)] for x in arrays])
        group = CONFIG.num_heads // CONFIG.num_kv_heads
        heads = [oracle.probabilities(arrays[0][:, h], arrays[1][:, h // group]) for h in range(CONFIG.num_heads)]
        out = [head @ arrays[2][:, h // group] for h, head in enumerate(heads)]
        return jnp.asarray(np.stack(out, axis=1), jnp.float32)[None], None

    tokens = jnp.array([[*ids, *[0] * padding]])
    lm.decoder(tokens, jnp.arange(tokens.shape[1])[None], attention, (None,) * CONFIG.num_layers)
    return inputs


def repeated_inputs(prompt, chunk, sinks, opening, continuing, answer):
    """What KVzip's authors feed behind a prompt, chunk by chunk: (first position of the chunk, its tokens, all ids)."""
    context = prompt[sinks:]
    chunks = [context[start : start + chunk] for start in range(0, len(context), chunk)]
    for i, ids in enumerate(chunks):
        request = list(opening) if i == 0 else [*continuing, *chunks[i - 1][-8:]]
        yield sinks + i * chunk, ids, [*request, *answer, *ids]


def kvzip_scores(lm, prompt, chunk, sinks, opening=(), continuing=(), answer=()):
    """Attention that each token gets while the prompt is repeated, [layers, Hkv, L], by the authors' `_get_score`."""
    scores = np.zeros((CONFIG.num_layers, CONFIG.num_kv_heads, len(prompt)))
    scores[..., :sinks] = 2
    group = CONFIG.num_heads // CONFIG.num_kv_heads
    for start, ids, fed in repeated_inputs(prompt, chunk, sinks, opening, continuing, answer):
        columns = [*range(sinks), *range(start, start + len(ids)), *range(len(prompt), len(prompt) + len(fed))]
        causal = np.tri(len(fed), dtype=bool)
        seen = np.concatenate([np.ones((len(fed), sinks + len(ids)), bool), causal], axis=1)
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
