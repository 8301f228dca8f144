"""Inputs that the tests of the method share."""

from __future__ import annotations

import inspect

import numpy as np


def qkv(seed, batch, tokens, heads, kv_heads, head_dim, scale=1.5):
    """Random q, k, v in float32; `scale` spreads the scores, so that rankings are far from ties."""
    rng = np.random.default_rng(seed)
    return tuple(
        (scale * rng.standard_normal((batch, tokens, n, head_dim))).astype(np.float32)
        for n in (heads, kv_heads, kv_heads)
    )


def poison(array, lengths, value=np.nan):
    """A copy of `array` [B, L, ...] with `value` past every row's length."""
    array = array.copy()
    for row, length in enumerate(lengths):
        array[row, length:] = value
    return array


def last_queries(q, lengths):
    """Query of each row's last token [B, Hq, d]."""
    return np.stack([q[row, length - 1] for row, length in enumerate(lengths)])


def observed_queries(q, lengths, count):
    """The last `count` queries of each row [B, count, Hq, d]; loud noise where a row has fewer."""
    out = 1e3 * np.random.default_rng(0).standard_normal((len(q), count, *q.shape[2:]))
    for row, length in enumerate(lengths):
        out[row, max(0, count - length) :] = q[row, max(0, length - count) : length]
    return out.astype(q.dtype)


def regions(q, k, v, lengths):
    """Yields (row, KV head, q [n, G, d], k [n, d], v [n, d]) in float64, n being the row's length."""
    group = q.shape[2] // k.shape[2]
    for row, length in enumerate(lengths):
        for head in range(k.shape[2]):
            yield (
                row,
                head,
                q[row, :length, head * group : (head + 1) * group].astype(np.float64),
                k[row, :length, head].astype(np.float64),
                v[row, :length, head].astype(np.float64),
            )


def unchecked(function):
    """The function as users have it: the run-time shape checks of the tests would refuse bad shapes first."""
    return inspect.unwrap(function)
