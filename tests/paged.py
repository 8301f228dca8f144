"""Rows of a page table in tests: one layer filled by prompts, and looked into token by token."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tca_jax.engine.pages import Rows, Widths
from tca_jax.engine.read import attend_selected
from tca_jax.methods.base import Heads


def read_layer(method, layout, lengths, qkv, fed=0, layer=0, backend="auto"):
    """What attention gives, and rows of one layer that hold prompts, with pages for `fed` tokens more."""
    _, k, v = qkv
    pool = layout.num_pages, layout.block_size, k.shape[-1]
    widths = Widths(layout.kept_columns[0], layout.num_window_pages, 0)
    rows = Rows.create((1, len(lengths), k.shape[2]), pool, widths, jnp.float32, scored=False)
    attended, kept = attend_selected(method, layer, Heads.all(k.shape[2]), *qkv, lengths, layout, backend)
    return attended, rows.with_prompts(0, 0, kept, k, v, lengths, lengths + fed)


def kept_tokens(rows, row, head, layer=0):
    """Keys and values that a head keeps `[2, n, d]`."""
    tokens = np.arange(int(rows.kept[layer, row, head]))
    pages = np.asarray(rows.pages)[layer, row, head, tokens // rows.page_size]
    return np.stack([np.asarray(x)[pages, tokens % rows.page_size] for x in (rows.k, rows.v)])
