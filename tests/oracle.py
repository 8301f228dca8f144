"""The method once more, naively, in float64 NumPy, from docs/method.md alone: the tests' reference."""

from __future__ import annotations

import math

import numpy as np


def sizes(config):
    return [2**i for i in range(int(math.log2(config.block_size)) + 1)]


def distributions(config):
    """p_k of every candidate, then dense."""
    b, num = config.block_size, config.num_candidates
    rows = []
    for i in range(1, num + 1):
        mu = math.log2(1 + (i - 1) * (b - 1) / (num - 1))
        weights = [math.exp(-((math.log2(k) - mu) ** 2) / (2 * config.sigma**2)) for k in sizes(config)]
        rows.append([weight / sum(weights) for weight in weights])
    return [*rows, [0.0] * (len(sizes(config)) - 1) + [1.0]]


def psi(config, candidate, blocks):
    """The ascending list of `blocks` budgets: largest remainder, ties to the smaller budget."""
    quotas = [blocks * p for p in distributions(config)[candidate]]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (-(quotas[i] - math.floor(quotas[i])), i))
    for i in by_remainder[: blocks - sum(counts)]:
        counts[i] += 1
    return [k for k, count in zip(sizes(config), counts, strict=True) for _ in range(count)]


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def probabilities(q, k):
    """Full causal attention of one query head, [L, d] x [L, d] -> [L, L]."""
    logits = q @ k.T / math.sqrt(q.shape[-1])
    return softmax(np.where(np.tri(len(q), dtype=bool), logits, -np.inf))


def edges(length, config):
    """First local token of every query."""
    b = config.block_size
    return np.array([max(0, i // b * b - config.window) for i in range(length)])


def token_scores(q_last, k):
    """s of one KV head: q_last [G, d], k [L, d] -> [L]."""
    return softmax(q_last @ k.T / math.sqrt(k.shape[-1])).mean(axis=0)


def observation_scores(q_last, k, spread, decay=0.98):
    """s_f of one KV head: q_last [o, G, d], the queries of the last o positions (negative ones ignored), k [L, d]."""
    observed = np.zeros(len(k))
    for position, q in enumerate(q_last, len(k) - len(q_last)):
        if position >= 0:
            most = softmax(q @ k[: position + 1].T / math.sqrt(k.shape[-1])).max(axis=0)
            observed[: position + 1] = np.maximum(observed[: position + 1], most)
    return np.array([max(decay**a * observed[j - a] for a in range(min(spread, j + 1))) for j in range(len(k))])


def highest(values, count):
    """Indices of the `count` highest values, ties to the lower one."""
    return set(np.argsort(-np.asarray(values), kind="stable")[:count].tolist())


def reserve_tokens(scores, ranked, reserve):
    """Bool [L]: the `reserve` highest of the first `ranked` scores [L], ties to the lower position."""
    marked = np.zeros(len(scores), bool)
    marked[np.argsort(-scores[:ranked], kind="stable")[:reserve]] = True
    return marked


def density(scores, config):
    """Densities of the n ranked blocks of one KV head."""
    b = config.block_size
    out = []
    for j in range(config.num_ranked_blocks(len(scores))):
        block = scores[j * b : (j + 1) * b]
        mass = block.sum()
        if config.index == "hhi":
            index = (block**2).sum() / mass**2
        else:
            share = block / mass
            index = 1.0 if b == 1 else 1 + (share * np.log(share)).sum() / math.log(b)
        if config.density == "paper":
            index = 1 - index
        out.append((1 - config.alpha) * mass + config.alpha * index)
    return np.array(out)


def select(q_last, k, candidate, config, densities=None):
    """Global tokens of one KV head of one prompt, and how far the choice is from a tie.

    Args: q_last [G, d] or [o, G, d], k [L, d]; densities replace the config's own (the library draws a random order).
    Returns: (bool [L], margin), the margin being the smallest relative gap that decided anything.
    """
    b, queries = config.block_size, q_last if q_last.ndim == 3 else q_last[None]
    scores = token_scores(queries[-1], k)
    if densities is None:
        densities = density(scores, config)
    order, margin = np.argsort(densities, kind="stable"), np.inf
    budgets = psi(config, candidate, len(order))
    reserved = np.zeros(len(k), bool)
    if config.reserve_tokens and len(order):
        observed = observation_scores(queries[-config.observation :], k, config.spread)
        reserved = reserve_tokens(observed, len(order) * b, config.reserve_tokens)
        left = observed[: len(order) * b][~reserved[: len(order) * b]]
        margin = 1 - left.max(initial=0) / observed[reserved].min()
    kept = np.zeros(len(k), bool)
    for rank, j in enumerate(order):
        block, first = scores[j * b : (j + 1) * b], reserved[j * b : (j + 1) * b]
        best = np.lexsort((np.arange(b), -block, ~first))  # the reserve, then the highest scores
        t = max(budgets[rank], first.sum())
        kept[j * b + best[:t]] = True
        if t < b and t > first.sum():
            margin = min(margin, 1 - block[best[t]] / block[best[t - 1]])
        if rank and budgets[rank - 1] != budgets[rank]:
            below = densities[order[rank - 1]]
            margin = min(margin, (densities[j] - below) / max(abs(below), 1e-30))
    return kept, margin


def attend(q, k, v, kept, config):
    """Eq. 3 for one query head: q [L, d], kept [L] -> [L, d]."""
    logits = q @ k.T / math.sqrt(q.shape[-1])
    return softmax(np.where(attended(kept, config), logits, -np.inf)) @ v


def attended(kept, config):
    """[L, L]: which token each query attends to: its local range and the kept tokens left of it."""
    column, edge = np.arange(len(kept)), edges(len(kept), config)[:, None]
    local = (column >= edge) & np.tri(len(kept), dtype=bool)
    return local | (kept & (column < edge))


def dropped_mass(q, k, kept, config):
    """Gamma of one query head [L]."""
    return np.where(attended(kept, config), 0, probabilities(q, k)).sum(axis=-1)


def column_mass(q, k, config):
    """(near, far) of one KV head: q [L, G, d], k [L, d] -> [L] each."""
    attention = np.mean([probabilities(q[:, g], k) for g in range(q.shape[1])], axis=0)
    far = np.arange(len(k)) < edges(len(k), config)[:, None]
    return np.where(far, 0, attention).sum(axis=0), np.where(far, attention, 0).sum(axis=0)


def calibration_score(q, k, kept, config):
    """Score of one candidate of one KV head: q [L, G, d], k [L, d], kept [L]."""
    length, b = len(k), config.block_size
    if config.criterion != "column_mean":
        outside = [i for i in range(length) if (i // b) * b > config.window]
        gammas = [dropped_mass(q[:, g], k, kept, config)[outside] for g in range(q.shape[1])]
        return 1 - np.mean(gammas) if outside else 1.0
    attention = np.mean([probabilities(q[:, g], k) for g in range(q.shape[1])], axis=0)
    means = attention.sum(axis=0) / (length - np.arange(length))
    return means[kept | (np.arange(length) >= config.num_ranked_blocks(length) * b)].sum() / means.sum()
