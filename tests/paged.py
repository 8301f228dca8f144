"""One layer's paged cache in tests: filled by prompts, and looked into token by token."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tca_jax.engine.read import prefill_layer
from tca_jax.methods.base import Heads


def read_layer(method, layout, lengths, qkv, backend="auto", **options):
    """What attention gives, and the cache of one layer behind prompts; arguments of `prefill_layer`."""
    cache = layout.empty(qkv[1].shape[-1], jnp.float32, layout.window_start(lengths))
    heads = Heads.all(qkv[1].shape[2])
    return prefill_layer(method, 0, heads, *qkv, lengths, layout, cache, backend, **options)


def kept_tokens(cache, row, head):
    """Keys and values that a head keeps `[2, n, d]`."""
    tokens = np.arange(int(cache.kept[0][row, head]))
    pages = np.asarray(cache.tables[0])[row, head, tokens // cache.block_size]
    return np.stack([np.asarray(x)[pages, tokens % cache.block_size] for x in (cache.k, cache.v)])


def local_tokens(cache, row, positions):
    """Keys and values of positions in the window `[2, Hkv, n, d]`."""
    b = cache.block_size
    columns = cache.kept_columns[0] + (positions - int(cache.start[row])) // b
    pages = np.asarray(cache.tables[0])[row][:, columns]
    return np.stack([np.asarray(x)[pages, positions % b] for x in (cache.k, cache.v)])
