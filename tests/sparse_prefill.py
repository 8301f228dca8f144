"""What the sparse prefill methods attend to, naively in float64 NumPy, and what a tiny model then answers.

Each method's function takes q and k [n, d] of one query head and gives bool [n, n]: which token each query attends to.
"""

from __future__ import annotations

import math

import numpy as np
from oracle import highest, probabilities, softmax


def of_blocks(pairs, n, block):
    """Queries and keys of pairs (tile, key block)."""
    mask = np.zeros((n, n), bool)
    for tile, other in pairs:
        mask[tile * block : (tile + 1) * block, other * block : (other + 1) * block] = True
    return mask & np.tri(n, dtype=bool)


def xattention(q, k, *, threshold, stride, block, chunk=None):
    n, d = q.shape
    power = 1 << (n - 1).bit_length()
    chunk = max(min(max(2048, power), 128 * 1024 * 2048 // power), 2048) if chunk is None else chunk
    groups, size = math.ceil(n / stride), block // stride
    scores = np.full((groups, groups), -np.inf)
    for r in range(groups):
        for c in range(r + 1):
            meets = [(r * stride + stride - 1 - i, c * stride + i) for i in range(stride)]
            scores[r, c] = sum(q[a] @ k[b] for a, b in meets if a < n and b < n) / (math.sqrt(d) * stride)
    shares, pairs = softmax(scores), []
    for tile in range(math.ceil(n / block)):
        rows = shares[tile * size : (tile + 1) * size]
        sums = [rows[:, j * size : (j + 1) * size].sum() for j in range(tile + 1)]
        in_chunk = tile * block < chunk
        taken = {tile} if in_chunk else {0, tile}
        others = sorted(set(range(tile + 1)) - taken, key=lambda j: (-sums[j], j))
        held = sum(sums[i] for i in taken)
        # Of the authors' cumulative sums the first chunk reads the entry before: one block more.
        before = np.concatenate([[-np.inf] * in_chunk, held + np.cumsum([0] + [sums[j] for j in others])])
        taken |= {j for j, cumulated in zip(others, before, strict=False) if cumulated < threshold * sum(sums)}
        pairs += [(tile, j) for j in taken]
    return of_blocks(pairs, n, block)


def diagonal(attention, offset):
    """Attention of the last queries on the token `offset` before their own, summed."""
    count, n = attention.shape
    return sum(attention[a, n - count + a - offset] for a in range(max(0, count + offset - n), count))


def flexprefill(q, k, *, gamma, tau, min_budget, block):
    n, d = q.shape
    blocks, least = math.ceil(n / block), max(1, math.ceil(min_budget / block))
    if n <= max(2, least) * block:
        return np.tri(n, dtype=bool)
    attention = probabilities(q, k)[-block:]
    vertical = attention.mean(axis=0)
    slash = np.array([diagonal(attention, o) for o in range(n)]) / block
    inside = (n - 1) % block
    columns = np.array([vertical[j * block : (j + 1) * block].sum() for j in range(blocks)])
    diagonals = np.zeros(blocks)
    for o in range(n):
        diagonals[math.ceil(max(0, o - inside) / block)] += slash[o]
    keys = np.array([k[j * block : (j + 1) * block].mean(axis=0) for j in range(blocks)])
    estimated = softmax(q[-block:].mean(axis=0) @ keys.T / math.sqrt(d))
    middle = (estimated + columns) / 2
    terms = [np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / middle), 0).sum() for p in (estimated, columns)]
    aware, pairs, lines = math.sqrt(sum(terms) / 2) < tau, [], []
    for tokens, sums in ((vertical, columns), (slash, diagonals)):
        needed = 1 + int((np.cumsum(np.sort(tokens)[::-1]) < gamma).sum())
        number = least if aware else max(least, needed // block + 1)
        lines.append(highest(np.concatenate([[np.inf], sums[1:]]), number))
    pairs += [(t, j) for t in range(blocks) for j in lines[0] if j <= t]
    pairs += [(t, t - r) for t in range(blocks) for r in lines[1] if r <= t]
    if aware:
        queries = np.array([q[j * block : (j + 1) * block].mean(axis=0) for j in range(blocks)])
        shares = softmax(np.where(np.tri(blocks, dtype=bool), queries @ keys.T / math.sqrt(d), -np.inf)).ravel()
        order = np.argsort(-shares, kind="stable")
        taken = order[np.cumsum(shares[order]) <= gamma * blocks]
        pairs += [divmod(int(i), blocks) for i in taken]
    return of_blocks(pairs, n, block)


def vertical_slash(q, k, columns, diagonals, nearest=100):
    """The columns and diagonals that the last 64 queries have most attention on; 30 columns and the nearest first."""
    attention = probabilities(q, k)[-64:]
    vertical, slash = attention.sum(axis=0), np.array([diagonal(attention, o) for o in range(len(q))])
    vertical[:30], slash[:nearest] = np.inf, np.inf
    return highest(vertical, max(columns, 30)), highest(slash, max(diagonals, 50))


def minference(q, k, *, kind, columns, diagonals, block, blocks=100):
    n, count = len(q), math.ceil(len(q) / block)
    if kind == "block_sparse":
        sums = [np.array([x[j * block : (j + 1) * block].sum(axis=0) for j in range(count)]) for x in (q, k)]
        scores = sums[0] @ sums[1].T
        return of_blocks([(t, j) for t in range(count) for j in highest(scores[t, : t + 1], blocks) | {t}], n, block)
    if kind == "a_shape":
        taken, lines = set(range(min(columns, n))), set(range(min(diagonals, n)))
    else:
        taken, lines = vertical_slash(q, k, columns, diagonals)
    met = {o + r for o in lines | {0} for r in range(block)}
    mask = np.zeros((n, n), bool)
    for tile in range(count):
        end, place = (tile + 1) * block, 0
        rows = slice(tile * block, end)
        mask[rows, sorted(taken)] = True
        while place < end:
            if place in met:
                mask[rows, max(0, end - place - block) : max(0, end - place)] = True
                place += block
            else:
                place += 1
    mask &= np.tri(n, dtype=bool)
    assert all(mask[i, i - o] for o in lines for i in range(o, n))
    return mask


ORACLES = {"xattention": xattention, "flexprefill": flexprefill, "minference": minference}
