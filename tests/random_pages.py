"""Random pages of the tests of paged attention: kept tokens of unequal heads and windows, at shuffled places."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from tca_jax.pallas_kernels.kv import Pages


@dataclasses.dataclass
class Written:
    """Pages, and the tokens in them as a reference looks at them."""

    pages: Pages
    kept: dict  # (row, head) -> k and v [2, n, d]
    window: dict  # (row, head) -> {position: [2, d]}


def write_pages(rng, kept, windows, *, page, head_dim, columns=None, outside=50.0, dtype=np.float32):
    """Pages of rows whose heads have `kept[row][head]` kept tokens and the positions `windows[row] = (start, end)`.

    Pages lie in random order between unused ones; `outside` fills what no token is written to. `columns` are entries
    of the tables for kept pages and for the window.
    """
    kept = np.array(kept, np.int32)
    rows, heads = kept.shape
    most_kept, most_local = (-(-int(x) // page) for x in (kept.max(), max(end - start for start, end in windows)))
    kept_columns, local_columns = columns or (most_kept, most_local)
    total = rows * heads * (kept_columns + local_columns)
    table = rng.permutation(total + 3)[:total].reshape(rows, heads, -1).astype(np.int32)
    pool = np.full((2, total + 3, page, head_dim), outside)
    written = Written(None, {}, {})

    def draw(shape):
        return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype), np.float64)

    for row, head in np.ndindex(rows, heads):
        tokens = written.kept[row, head] = draw((2, kept[row, head], head_dim))
        for number in range(kept[row, head]):
            pool[:, table[row, head, number // page], number % page] = tokens[:, number]
        start, end = windows[row]
        local = written.window[row, head] = {p: draw((2, head_dim)) for p in range(start, end)}
        first = start // page * page
        for p, token in local.items():
            pool[:, table[row, head, kept_columns + (p - first) // page], p % page] = token
    starts = np.array([start // page * page for start, _ in windows], np.int32)
    ends = np.array([end for _, end in windows], np.int32)
    k, v = (jnp.asarray(x, dtype) for x in pool)
    written.pages = Pages(k, v, *map(jnp.asarray, (table, kept, starts, ends)), kept_columns)
    return written


def attend_to_pages(q, written, first, newest, *, page, window):
    """Attention over all that was written, a query at a time in float64; -1e30 is the log-sum-exp of padding."""
    batch, columns, heads, head_dim = q.shape
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -1e30)
    for row, column, head in np.ndindex(batch, columns, heads):
        position = first[row] + column
        if position > newest[row]:
            continue
        tokens, bias = [], []
        for cache in written:
            rows, kv_heads = cache.pages.kept.shape
            where = row // (batch // rows), head // (heads // kv_heads)
            tokens.append(cache.kept[where])
            added = np.zeros(10_000) if cache.pages.bias is None else np.asarray(cache.pages.bias[where], np.float64)
            bias.append(added[: tokens[-1].shape[1]])
            edge = max(0, newest[row] // page * page - window)
            local = [token for p, token in cache.window[where].items() if edge <= p <= position]
            tokens.append(np.reshape(local, (-1, 2, head_dim)).swapaxes(0, 1))
            bias.append(np.zeros(len(local)))
        k, v = np.concatenate(tokens, axis=1)
        scores = k @ np.asarray(q[row, column, head], np.float64) / np.sqrt(head_dim) + np.concatenate(bias)
        lse[row, column, head] = np.logaddexp.reduce(scores)
        out[row, column, head] = np.exp(scores - lse[row, column, head]) @ v
    return out, lse


def check_attention(actual, expected, tolerance=1e-5):
    """Output and log-sum-exp, held to a tenth of the output's tolerance, against those of `attend_to_pages`."""
    np.testing.assert_allclose(np.asarray(actual[0], np.float64), expected[0], atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(actual[1], expected[1], rtol=max(1e-5, tolerance / 10), atol=max(1e-5, tolerance / 10))
