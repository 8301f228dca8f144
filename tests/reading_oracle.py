"""What heads attend to under each reading, naively in float64 NumPy, from the method's specification alone."""

from __future__ import annotations

import numpy as np
import oracle


def fetched(q, k, config):
    """Which token each query of a KV head attends to that reads blocks, and how far the choice is from a tie.

    Args: q [L, G, d], k [L, d]. Returns: (bool [L, L], margin).
    """
    length, b = len(k), config.block_size
    stride, left = min(config.fetch_stride, b), config.window // b
    mask, margin = np.zeros((length, length), bool), np.inf
    logits = np.where(np.tri(length, dtype=bool), q.swapaxes(0, 1) @ k.T / np.sqrt(k.shape[1]), -np.inf)  # [G, L, L]
    highest = np.stack([logits[..., j : j + b].max(axis=-1) for j in range(0, length, b)], axis=-1)
    shares = oracle.softmax(highest).sum(axis=0)  # of every query's blocks, each taken as its best key
    for tile in range(-(-length // b)):
        samples = [min(tile * b + run * stride + stride - 1, length - 1) for run in range(b // stride)]
        mass = shares[samples, : max(0, tile - left)].sum(axis=0)
        order = np.argsort(-mass, kind="stable")
        if len(order) > config.fetch:
            margin = min(margin, 1 - mass[order[config.fetch]] / mass[order[config.fetch - 1]])
        for j in [*order[: config.fetch], *range(max(0, tile - left), tile + 1)]:
            mask[tile * b : (tile + 1) * b, j * b : (j + 1) * b] = True
    return mask & np.tri(length, dtype=bool), margin


def read(q, k, reading, row, config):
    """The same of a head that has a reading; its row counts where it reads sparse."""
    if reading == "dense" or not config.num_ranked_blocks(len(k)):
        return np.tri(len(k), dtype=bool), np.inf
    if reading == "blocks":
        return fetched(q, k, config)
    kept, margin = oracle.select(q[-config.observation :], k, row, config)
    return oracle.attended(kept, config), margin


def attend_by(masks, q, k, v):
    """Attention of one prompt, q [L, Hq, d], k and v [L, Hkv, d], by a mask of each KV head."""
    group, out = q.shape[1] // k.shape[1], np.zeros(q.shape)
    for head in range(q.shape[1]):
        logits = np.where(masks[head // group], q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[-1]), -np.inf)
        out[:, head] = oracle.softmax(logits) @ v[:, head // group]
    return out
