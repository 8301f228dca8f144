"""Random lists, and what they mean in float64 NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import oracle

from tca_jax.pallas_kernels.block_sparse_attention import BlockLists, Columns


def random_blocks(rng, lengths, length, heads, *, block, tile, shared=False, share=0.5, room=1):
    """Lists of disjoint blocks at any distance; what does not count is noise.

    Args:
        share: Of the blocks that fit, how many are listed.
        room: Entries of noise at the end of the lists.
    """
    batch, tiles = len(lengths), -(-length // tile)
    capacity = -(-tiles * tile // block) + room
    distances = rng.integers(-9, 9 * length, (batch, heads, 1 if shared else tiles, capacity))
    counts = np.zeros((batch, heads, tiles), np.int32)
    for row, head, index in np.ndindex(distances.shape[:3]):
        last = tiles if shared else index + 1
        begin, listed = int(rng.integers(1, block + 1)), []
        while begin < last * tile + block - 1:
            if rng.random() < share:
                listed.append(begin)
                begin += block
            else:
                begin += int(rng.integers(1, block))
        distances[row, head, index, : len(listed)] = listed
        for t in range(tiles) if shared else (index,):
            ends = np.asarray(listed, int) < (t + 1) * tile + block
            counts[row, head, t] = ends.sum()
    counts[rng.random(counts.shape) < 0.1] = 0  # a tile that nothing is listed for
    return BlockLists(jnp.asarray(distances, jnp.int32), jnp.asarray(counts, jnp.int32))


def random_columns(rng, batch, length, heads, capacity):
    """Columns, among them none and all that there is room for."""
    tokens = np.full((batch, heads, capacity), 7 * length)
    counts = rng.integers(0, min(capacity, length) + 1, (batch, heads))
    counts.flat[0], counts.flat[-1] = 0, min(capacity, length)
    for row, head in np.ndindex(counts.shape):
        n = counts[row, head]
        tokens[row, head, :n] = np.sort(rng.choice(length, n, replace=False))
    return Columns(jnp.asarray(tokens, jnp.int32), jnp.asarray(counts, jnp.int32))


def attended(blocks, columns, row, head, length, *, block, tile):
    """bool [length, length]: which token each query attends to, from the operation's docstring."""
    mask = np.zeros((length, length), bool)
    lists, counts = np.asarray(blocks.distances)[row, head], np.asarray(blocks.counts)[row, head]
    for t in range(-(-length // tile)):
        for distance in lists[t if len(lists) > 1 else 0][: counts[t]]:
            begin = (t + 1) * tile - int(distance)
            mask[t * tile : (t + 1) * tile, max(0, begin) : max(0, begin + block)] = True
    if columns is not None:
        tokens = np.asarray(columns.tokens)[row, head][: int(columns.counts[row, head])]
        mask[:, tokens[tokens < length]] = True
    return mask & np.tri(length, dtype=bool)


def attention(q, k, v, blocks, columns, lengths, *, block, tile):
    """float64 [B, L, Hq, d]."""
    out, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for row, n in enumerate(lengths):
        for head in range(q.shape[2]):
            mask = attended(blocks, columns, row, head, n, block=block, tile=tile)
            queries, keys, values = (
                x[row, :n, h].astype(np.float64) for x, h in ((q, head), (k, head // group), (v, head // group))
            )
            some = mask.any(axis=-1)
            logits = np.where(mask, queries @ keys.T / np.sqrt(q.shape[-1]), -np.inf)[some]
            out[row, :n, head][some] = oracle.softmax(logits) @ values
    return out
