"""The page table against lists of tokens: prompts, steps, eviction, forks, and attention through it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.engine.pages import Allocator, FreePages, PageTable, Pool, append, evict, fork, row_pages, write_layer
from tca_jax.methods.regions import Regions, Selection
from tca_jax.methods.worth import block_means
from tca_jax.pallas_kernels.paged_attention import paged_attention

B, W, LAYERS, ROWS, HEADS, D = 128, 2, 2, 3, 2, 16  # tokens of a page, pages of a window
COLUMNS, PAGES = 8, 300


class Tokens:
    """What each head of a row should hold."""

    def __init__(self, rng, length):
        self.k, self.v = rng.normal(size=(2, LAYERS, 2_000, HEADS, D)).astype(np.float32)
        self.worth = rng.normal(size=(LAYERS, HEADS, 2_000)).astype(np.float32)
        self.length = length

    @property
    def start(self):
        return max(0, (self.length // B - W + 1) * B)

    def kept(self, layer, head, theta, start):
        return np.flatnonzero(self.worth[layer, head, :start] >= theta)

    def means(self, layer, head, theta, start):
        """Of the others of each block: mean key, mean value and the entropy of the weights."""
        for block in range(start // B):
            tokens = block * B + np.flatnonzero(self.worth[layer, head, block * B : (block + 1) * B] < theta)
            w = np.exp(self.worth[layer, head, tokens].astype(np.float64))
            w /= w.sum()
            yield w @ self.k[layer, tokens, head], w @ self.v[layer, tokens, head], -w @ np.log(w)


def free_pages(allocator, count):
    return FreePages(jnp.asarray(allocator.take(count), jnp.int32), jnp.int32(0))


def put_back(allocator, free):
    allocator.release(np.asarray(free.numbers)[int(free.taken) :].tolist())


def read_prompt(pool, table, allocator, row, tokens, theta):
    free, length = free_pages(allocator, 80), tokens.length
    write = jax.jit(write_layer)
    for layer in range(LAYERS):
        k, v, worth = (jnp.asarray(x[layer]) for x in (tokens.k, tokens.v, tokens.worth))
        k, v, worth = k[:length], v[:length], worth[:, :length]
        chosen = (worth >= theta) & (jnp.arange(length) < tokens.start)
        budgets = chosen[:, : length // B * B].reshape(HEADS, -1, B).sum(-1)[None]
        regions = Regions.plan(1, [length] * HEADS, B)
        selected = regions.fill(Selection(chosen.astype(jnp.float32)[None], budgets), k[None], v[None], block_size=B)
        means = tuple(x[0] for x in block_means(k[None], v[None], worth[None], (worth < theta)[None], B))
        pool, table, free = write(pool, table, free, layer, row, selected.pool, k, v, worth, means, jnp.int32(length))
    put_back(allocator, free)
    return pool, table


def step(pool, table, rows):
    """Appends each row's next token, and evicts."""
    at = [tokens.length for tokens in rows]
    for layer in range(LAYERS):
        new = (jnp.stack([getattr(t, name)[layer][i] for t, i in zip(rows, at, strict=True)]) for name in ("k", "v"))
        worth = jnp.stack([t.worth[layer][:, i] for t, i in zip(rows, at, strict=True)])
        pool, table = append(pool, table, layer, *new, worth)
    for tokens in rows:
        tokens.length += 1
    return pool, table._replace(length=table.length + 1)


def check(pool, table, rows, theta):
    start = np.asarray(table.start)
    for layer, (row, tokens) in ((layer, each) for layer in range(LAYERS) for each in enumerate(rows)):
        pages, means = table.of_layer(pool, layer)
        for head in range(HEADS):
            expected = tokens.kept(layer, head, theta, start[row])
            numbers = np.asarray(pages.table)[row, head]
            flat = np.asarray(pool.k)[numbers[:COLUMNS]].reshape(-1, D)[: int(pages.kept[row, head])]
            np.testing.assert_array_equal(flat, tokens.k[layer, expected, head])
            window = np.asarray(pool.v)[numbers[COLUMNS:]].reshape(-1, D)[: tokens.length - start[row]]
            np.testing.assert_array_equal(window, tokens.v[layer, start[row] : tokens.length, head])
        q = np.random.default_rng(layer).normal(size=(len(rows), 1, 2 * HEADS, D)).astype(np.float32)
        newest = table.length - 1
        out, _ = paged_attention(jnp.asarray(q), (pages, means), newest, newest, window=(W - 1) * B)
        for head in range(2 * HEADS):
            kept = tokens.kept(layer, head // 2, theta, start[row])
            first = max(0, (tokens.length - 1) // B * B - (W - 1) * B)
            seen = np.concatenate([kept, np.arange(max(first, start[row]), tokens.length)])
            keys, values, bias = tokens.k[layer, seen, head // 2], tokens.v[layer, seen, head // 2], np.zeros(len(seen))
            for mean_k, mean_v, entropy in tokens.means(layer, head // 2, theta, start[row]):
                keys, values = np.vstack([keys, mean_k]), np.vstack([values, mean_v])
                bias = np.append(bias, entropy)
            logits = keys @ q[row, 0, head] / np.sqrt(D) + bias
            p = np.exp(logits - logits.max())
            np.testing.assert_allclose(out[row, 0, head], p @ values / p.sum(), atol=2e-5)


def test_rows_of_a_table_hold_their_tokens():
    rng, theta, allocator = np.random.default_rng(0), 0.8, Allocator(PAGES)
    pool = Pool.empty(PAGES, B, D, jnp.float32)
    table = PageTable.empty(LAYERS, ROWS, HEADS, COLUMNS, W, 1, B)
    rows = [Tokens(rng, length) for length in (700, 130, 384)]
    for row, tokens in enumerate(rows):
        pool, table = read_prompt(pool, table, allocator, row, tokens, theta)
    check(pool, table, rows, theta)
    jitted = jax.jit(step_of_layers)
    for _ in range(300):
        pool, table = jitted(pool, table, *stacked(rows))
        for tokens in rows:
            tokens.length += 1
        if any(tokens.length % B == 0 for tokens in rows):
            free = free_pages(allocator, 2 * LAYERS * ROWS * HEADS)
            pool, table, free = evict(pool, table, free, jnp.float32(theta))
            put_back(allocator, free)
    assert [int(x) for x in table.start] == [(t.length // B - W + 1) * B for t in rows]
    check(pool, table, rows, theta)

    # A row that is forked, twice: the copies go on by themselves, and all pages come back.
    before = allocator.free
    pool, table = fork(pool, table, allocator, 0, [1, 2])
    copies = [rows[0], *(Tokens(rng, 0) for _ in range(2))]
    for copy in copies[1:]:
        for name in ("k", "v", "worth"):
            of_copy, of_row = getattr(copy, name), getattr(rows[0], name)
            cut = rows[0].length
            if name == "worth":
                of_copy[..., :cut] = of_row[..., :cut]
            else:
                of_copy[:, :cut] = of_row[:, :cut]
        copy.length = rows[0].length
    full, written = row_pages(table, 0, B)
    assert before - allocator.free == 2 * len(written)
    pool, table = step(pool, table, copies)
    check(pool, table, copies, theta)
    for row in (1, 2):
        allocator.release(np.concatenate(row_pages(table, row, B)).tolist())
    assert allocator.free == before
    allocator.release([*full.tolist(), *written.tolist()])


def stacked(rows):
    return [
        jnp.stack([x[:, t.length] for t, x in ((t, getattr(t, name)) for t in rows)], axis=1) for name in ("k", "v")
    ] + [jnp.stack([t.worth[..., t.length] for t in rows], axis=1)]


def step_of_layers(pool, table, k, v, worth):
    for layer in range(LAYERS):
        pool, table = append(pool, table, layer, k[layer], v[layer], worth[layer])
    return pool, table._replace(length=table.length + 1)


def test_pages_have_uses():
    allocator = Allocator(4)
    first = allocator.take(3)
    allocator.share(first[:1])
    allocator.release(first)
    assert allocator.free == 3
    with pytest.raises(ValueError, match="4 pages are needed, 3 of 4 are free"):
        allocator.take(4)
    allocator.release(first[:1])
    assert sorted(allocator.take(4)) == [0, 1, 2, 3]
