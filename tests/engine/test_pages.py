"""The page table against lists of tokens: prompts, steps, eviction, forks, and attention through it."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from tca_jax.engine.pages import Rows, Widths
from tca_jax.methods.base import BlockMeans
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


def prompt_of(rows, row, tokens, theta):
    """The prompt of a row in its pages."""
    length, write = tokens.length, jax.jit(Rows.with_prompts)
    for layer in range(LAYERS):
        k, v, worth = (jnp.asarray(x[layer])[None] for x in (tokens.k, tokens.v, tokens.worth))
        k, v, worth = k[:, :length], v[:, :length], worth[..., :length]
        chosen = (worth >= theta) & (jnp.arange(length) < tokens.start)
        budgets = chosen[..., : length // B * B].reshape(1, HEADS, -1, B).sum(-1)
        selected = Regions.plan(1, [length] * HEADS, B).fill(
            Selection(chosen.astype(jnp.float32), budgets.astype(jnp.int32)), k, v, block_size=B
        )
        means = BlockMeans(*block_means(k, v, worth, worth < theta, B))
        where = row, selected.pool, k, v, jnp.array([length]), jnp.array([2_000])
        rows = write(rows, jnp.int32(layer), *where, worth, means)
    return rows


@jax.jit
def step(rows, k, v, worth, theta):
    """Feeds a token to each row; blocks leave full windows first."""
    positions = rows.length
    leaving = rows.are_full(positions, rows.start)
    start = rows.start + jnp.where(leaving, B, 0)
    for layer in range(LAYERS):
        rows = rows.evict(layer, leaving, rows.scored.scores[layer][..., :B] >= theta, rows.start)
        new = k[layer][:, None], v[layer][:, None]
        rows = rows.with_tokens(layer, *new, positions[:, None], None, start, worth[layer][:, None])
    return dataclasses.replace(rows, start=start, length=positions + 1)


def fed(rows, tokens, theta, steps=1):
    for _ in range(steps):
        new = [jnp.stack([getattr(t, name)[:, t.length] for t in tokens], axis=1) for name in ("k", "v")]
        rows = step(rows, *new, jnp.stack([t.worth[..., t.length] for t in tokens], axis=1), theta)
        for each in tokens:
            each.length += 1
    return rows


def check(rows, tokens, theta):
    start = np.asarray(rows.start)
    # A block that fills the window leaves with the token after it.
    assert all(s in (t.start, t.start - B) for s, t in zip(start, tokens, strict=True))
    for layer, (row, of_row) in ((layer, each) for layer in range(LAYERS) for each in enumerate(tokens)):
        pages, means = rows.of_layer(layer)
        for head in range(HEADS):
            expected = of_row.kept(layer, head, theta, start[row])
            numbers = np.asarray(pages.table)[row, head]
            kept = np.asarray(rows.k)[numbers[: rows.columns] % rows.num_pages].reshape(-1, D)
            kept = kept[: int(pages.kept[row, head])]
            np.testing.assert_array_equal(kept, of_row.k[layer, expected, head])
            window = np.asarray(rows.v)[numbers[rows.columns :] % rows.num_pages].reshape(-1, D)
            window = window[: of_row.length - start[row]]
            np.testing.assert_array_equal(window, of_row.v[layer, start[row] : of_row.length, head])
        q = np.random.default_rng(layer).normal(size=(len(tokens), 1, 2 * HEADS, D)).astype(np.float32)
        newest = rows.length - 1
        out, _ = paged_attention(jnp.asarray(q), (pages, means), newest, newest, window=(W - 1) * B)
        for head in range(2 * HEADS):
            kept = of_row.kept(layer, head // 2, theta, start[row])
            first = max(0, (of_row.length - 1) // B * B - (W - 1) * B)
            seen = np.concatenate([kept, np.arange(max(first, start[row]), of_row.length)])
            keys, values, bias = of_row.k[layer, seen, head // 2], of_row.v[layer, seen, head // 2], np.zeros(len(seen))
            for mean_k, mean_v, entropy in of_row.means(layer, head // 2, theta, start[row]):
                keys, values = np.vstack([keys, mean_k]), np.vstack([values, mean_v])
                bias = np.append(bias, entropy)
            logits = keys @ q[row, 0, head] / np.sqrt(D) + bias
            np.testing.assert_allclose(out[row, 0, head], oracle.softmax(logits) @ values, atol=5e-5)


@pytest.fixture(scope="module")
def read():
    """Rows of three prompts, and what they hold."""
    rng, theta = np.random.default_rng(0), 0.8
    rows = Rows.create((LAYERS, ROWS, HEADS), (PAGES, B, D), Widths(COLUMNS, W, 1), jnp.float32, scored=True)
    tokens = [Tokens(rng, length) for length in (700, 130, 384)]
    for row, of_row in enumerate(tokens):
        with jax.enable_x64(row == 1):
            rows = prompt_of(rows, row, of_row, theta)
    return rows, tokens, theta


def test_rows_hold_their_tokens(read):
    rows, tokens, theta = read[0], copy.deepcopy(read[1]), read[2]
    check(rows, tokens, theta)
    check(fed(rows, tokens, theta, 300), tokens, theta)


def test_forked_rows_go_on_by_themselves(read):
    rows, theta = read[0], read[2]
    tokens = [copy.deepcopy(read[1][i]) for i in (0, 2, 0)]
    rng = np.random.default_rng(1)
    for each in tokens[1:]:  # from here on each has other tokens
        for x in (each.k, each.v):
            x[:, each.length :] = rng.normal(size=x[:, each.length :].shape)
    before = np.asarray(rows.k).copy()
    taken = int(rows.free.taken)
    forks = jax.jit(Rows.forked)(rows, jnp.array([0, 2, 0]), jnp.array([2_000] * 3))
    assert int(forks.free.taken) - taken <= 3 * LAYERS * HEADS * 3  # begun pages: kept, window, means
    forks = fed(forks, tokens, theta, 300)
    check(forks, tokens, theta)
    used = np.unique(np.asarray(rows.pages))
    np.testing.assert_array_equal(np.asarray(forks.k)[used[used < PAGES]], before[used[used < PAGES]])


def test_rows_move_to_another_pool(read):
    rows, tokens, theta = read[0], copy.deepcopy(read[1]), read[2]
    named = int(rows.named_pages()[:-1].sum())
    assert rows.used_bytes == named * 2 * B * D * 4
    moved = rows.compacted(named).with_pages(60).with_widths(Widths(COLUMNS + 3, W, 2))
    assert moved.num_pages == named + 60
    check(jax.jit(Rows.forked)(moved, jnp.arange(3), jnp.array([2_000] * 3)), tokens, theta)
