"""Pages of the KV cache: one pool for a device, one table for all layers and rows, one allocator (DESIGN section 5).

A page holds b tokens of one KV head. A row's table names, for each layer and KV head, the pages of its kept tokens and
then those of its window; and those of means, one for each block left of the window. All numbers are data: they differ
between layers, heads and prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Int32

from tca_jax.errors import UserError
from tca_jax.pallas_kernels.kv import Pages, Stored, decode, empty, encode
from tca_jax.pallas_kernels.kv import Pool as CompactTokens
from tca_jax.pallas_kernels.numerics import MASKED


class Pool(NamedTuple):
    """All pages of a device."""

    k: Stored  # [P, b, d]
    v: Stored

    @classmethod
    def empty(cls, pages: int, page_size: int, head_dim: int, dtype: DTypeLike) -> Pool:
        """Pages of zeros, so that what no token fills is finite."""
        shape = (pages, page_size, head_dim)
        return cls(empty(shape, dtype), empty(shape, dtype))

    @property
    def page_size(self) -> int:
        """Tokens of a page, b."""
        return self.k.shape[1]


class PageTable(NamedTuple):
    """Pages of R rows: `columns` for kept tokens, then those of the window, oldest block first."""

    pages: Int32[Array, "layers R H T"]
    kept: Int32[Array, "layers R H"]  # tokens outside the window
    worth: Float32[Array, "layers R H W"]  # predicted, of the window's tokens, by column and slot
    means: Int32[Array, "layers R H M"]  # pages of the means of evicted tokens, one for each block
    mean_bias: Float32[Array, "layers R H Mb"]  # added to the logit of a block's mean; -1e30: nothing was evicted
    start: Int32[Array, " R"]  # first position in the window, a multiple of b
    length: Int32[Array, " R"]

    @classmethod
    def empty(
        cls, layers: int, rows: int, heads: int, columns: int, window_pages: int, mean_pages: int, page_size: int
    ) -> PageTable:
        """Rows without tokens."""
        shape = (layers, rows, heads)
        return cls(
            jnp.zeros((*shape, columns + window_pages), jnp.int32),
            jnp.zeros(shape, jnp.int32),
            jnp.full((*shape, window_pages * page_size), -jnp.inf),
            jnp.zeros((*shape, mean_pages), jnp.int32),
            jnp.full((*shape, mean_pages * page_size), MASKED),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros(rows, jnp.int32),
        )

    def window_pages(self, page_size: int) -> int:
        """Pages of a window."""
        return self.worth.shape[-1] // page_size

    def of_layer(self, pool: Pool, layer: int) -> tuple[Pages, Pages]:
        """What attention to pages takes: tokens, and means."""
        columns, none = self.pages.shape[-1] - self.window_pages(pool.page_size), jnp.zeros_like(self.start)
        tokens = Pages(*pool, self.pages[layer], self.kept[layer], self.start, self.length, columns)
        blocks = jnp.broadcast_to((self.start // pool.page_size)[:, None], self.kept.shape[1:])
        means = Pages(*pool, self.means[layer], blocks, none, none, self.means.shape[-1], self.mean_bias[layer])
        return tokens, means


class FreePages(NamedTuple):
    """Pages that a program may take, in order."""

    numbers: Int32[Array, " n"]
    taken: Int32[Array, ""]

    def take(self, counts: Int[Array, "*s"], most: int) -> tuple[Int32[Array, "*s most"], FreePages]:
        """`counts` pages for each, in `most` columns; others are -1, also those that there are no pages for."""
        ends = self.taken + jnp.cumsum(counts.ravel(), dtype=jnp.int32).reshape(counts.shape)
        column = jnp.arange(most, dtype=jnp.int32)
        index = (ends - counts)[..., None] + column
        there = (column < counts[..., None]) & (index < len(self.numbers))
        numbers = jnp.where(there, self.numbers[jnp.minimum(index, len(self.numbers) - 1)], -1)
        return numbers.astype(jnp.int32), FreePages(self.numbers, ends.ravel()[-1])


def write_layer(
    pool: Pool,
    table: PageTable,
    free: FreePages,
    layer: Int[Array, ""],
    row: Int[Array, ""],
    selected: CompactTokens,  # of one prompt [1, H]; regions are whole pages
    k: Float[Array, "L H d"],
    v: Float[Array, "L H d"],
    worth: Float32[Array, "H L"],
    means: tuple[Float[Array, "N H d"], Float[Array, "N H d"], Float32[Array, "H N"]],  # of `block_means`
    length: Int[Array, ""],
) -> tuple[Pool, PageTable, FreePages]:
    """Writes a prompt's selected tokens, its means and its window into pages of a row, taken from `free`."""
    b, heads = pool.page_size, k.shape[1]
    window = table.window_pages(b)
    columns = table.pages.shape[-1] - window
    kept = selected.lengths[0].astype(jnp.int32)
    kept_pages, free = free.take(-(-kept // b), columns)
    start = jnp.maximum((length // b - (window - 1)) * b, 0)
    window_pages, free = free.take(jnp.full(heads, window, jnp.int32), window)
    blocks, columns_of_means = start // b, table.means.shape[-1]
    counts = jnp.broadcast_to(-(-blocks // b), heads).astype(jnp.int32)
    mean_pages, free = free.take(counts, columns_of_means)
    place = start + jnp.arange(window * b)
    inside = place < length

    def window_of(x: Float[Array, "L H d"]) -> Float[Array, "pages b d"]:
        tokens = jnp.where(inside[:, None, None], x[jnp.minimum(place, len(x) - 1)], 0)
        return tokens.swapaxes(0, 1).reshape(heads * window, b, -1)

    source = (selected.offsets[0] // b)[:, None] + jnp.arange(columns)

    def as_pages(x: Float[Array, "N H d"]) -> Float[Array, "pages b d"]:
        rest = columns_of_means * b - len(x)
        x = jnp.pad(x, ((0, max(0, rest)), (0, 0), (0, 0)))[: columns_of_means * b]
        return x.swapaxes(0, 1).reshape(-1, b, x.shape[-1])

    def written(pages: Stored, compact: Float[Array, "P d"], tokens: Float[Array, "L H d"], mean: Array) -> Stored:
        compact = compact.reshape(-1, b, compact.shape[-1])
        of_kept = compact[jnp.minimum(source, len(compact) - 1)].reshape(-1, b, compact.shape[-1])
        own = jnp.concatenate([of_kept, window_of(tokens), as_pages(mean).astype(of_kept.dtype)])
        return _set(pages, jnp.concatenate([x.ravel() for x in (kept_pages, window_pages, mean_pages)]), own)

    pool = Pool(written(pool.k, selected.k, k, means[0]), written(pool.v, selected.v, v, means[1]))
    entropy = jnp.maximum(means[2], MASKED)
    bias = jnp.pad(entropy, ((0, 0), (0, max(0, columns_of_means * b - entropy.shape[1]))), constant_values=MASKED)
    bias = jnp.where(jnp.arange(columns_of_means * b) < blocks, bias[:, : columns_of_means * b], MASKED)
    of_window = jnp.where(inside, worth[:, jnp.minimum(place, worth.shape[1] - 1)], -jnp.inf)
    named = jnp.maximum(jnp.concatenate([kept_pages, window_pages], axis=1), 0)
    table = PageTable(
        table.pages.at[layer, row].set(named),
        table.kept.at[layer, row].set(kept),
        table.worth.at[layer, row].set(of_window),
        table.means.at[layer, row].set(jnp.maximum(mean_pages, 0)),
        table.mean_bias.at[layer, row].set(bias),
        table.start.at[row].set(start),
        table.length.at[row].set(length),
    )
    return pool, table, free


def append(
    pool: Pool,
    table: PageTable,
    layer: int,
    k: Float[Array, "R H d"],
    v: Float[Array, "R H d"],
    worth: Float32[Array, "R H"],
) -> tuple[Pool, PageTable]:
    """Writes one token of each row at its position `length`; `advance` follows after the last layer."""
    b, rows = pool.page_size, jnp.arange(len(table.length))
    column = (table.length - table.start) // b
    columns = table.pages.shape[-1] - table.window_pages(b)
    pages, slot = table.pages[layer, rows, :, columns + column], (table.length % b)[:, None]
    stored = Pool(*(_set_slots(x, pages, slot, new) for x, new in zip(pool, (k, v), strict=True)))
    return stored, table._replace(worth=table.worth.at[layer, rows, :, column * b + table.length % b].set(worth))


@functools.partial(jax.jit, donate_argnums=(0,))
def evict(
    pool: Pool, table: PageTable, free: FreePages, theta: Float32[Array, ""]
) -> tuple[Pool, PageTable, FreePages]:
    """The oldest block leaves the window of each row whose window is full: its tokens of at least `theta` are kept.

    The others leave their mean. The block's page serves the window's next block. Rows with room in their window stay as
    they are.
    """
    b = pool.page_size
    window = table.window_pages(b)
    columns = table.pages.shape[-1] - window
    full = (table.length - table.start >= window * b)[:, None]
    worth = table.worth[..., :b]
    stays = full[..., None] & (worth >= theta)  # [layers, R, H, b]
    place = table.kept[..., None] + jnp.cumsum(stays, axis=-1) - 1  # among the kept tokens
    count = stays.sum(axis=-1, dtype=jnp.int32)
    had, needs = -(-table.kept // b), -(-(table.kept + count) // b)
    more, free = free.take(needs - had, 1)
    column = jnp.arange(columns)
    kept_pages = jnp.where((column == had[..., None]) & (needs > had)[..., None], more, table.pages[..., :columns])
    oldest = table.pages[..., columns]
    target = jnp.take_along_axis(kept_pages, jnp.clip(place // b, 0, columns - 1), axis=-1)
    target = jnp.where(stays & (place // b < columns), target, -1)

    number, columns_of_means = table.start // b, table.means.shape[-1]  # of the block
    opens = full & (number % b == 0)[:, None]
    fresh, free = free.take(jnp.broadcast_to(opens, oldest.shape).astype(jnp.int32), 1)
    here = jnp.arange(columns_of_means) == (number // b)[:, None, None]
    mean_pages = jnp.where(here & opens[..., None], fresh, table.means)
    weights = jax.nn.softmax(jnp.where(stays, MASKED, worth), axis=-1) * ~stays
    entropy = -jnp.where(weights > 0, weights * jnp.log(weights), 0).sum(axis=-1)
    entropy = jnp.where((~stays).any(axis=-1), entropy, MASKED)
    own = jnp.take_along_axis(mean_pages, jnp.broadcast_to((number // b)[:, None, None], (*oldest.shape, 1)), axis=-1)
    own = jnp.where(full, own[..., 0], -1)

    def moved(pages: Stored) -> Stored:
        tokens = jax.tree.map(lambda x: x[oldest], pages)  # [layers, R, H, b, ...]
        at = jnp.where(target < 0, pages.shape[0], target)
        pages = jax.tree.map(lambda x, new: x.at[at, place % b].set(new, mode="drop"), pages, tokens)
        mean = jnp.einsum("lrhb,lrhbd->lrhd", weights, decode(tokens, jnp.float32))
        slot = jnp.broadcast_to((number % b)[:, None], own.shape)
        at = jnp.where(own < 0, pages.shape[0], own)
        return jax.tree.map(lambda x, new: x.at[at, slot].set(new, mode="drop"), pages, encode(mean, pages))

    rolled = jnp.where(full[..., None], jnp.roll(table.pages[..., columns:], -1, axis=-1), table.pages[..., columns:])
    emptied = jnp.roll(table.worth, -b, axis=-1).at[..., -b:].set(-jnp.inf)
    table = PageTable(
        jnp.concatenate([kept_pages, rolled], axis=-1),
        table.kept + count,
        jnp.where(full[..., None], emptied, table.worth),
        mean_pages,
        jnp.where(
            full[..., None] & (jnp.arange(columns_of_means * b) == number[:, None, None]),
            entropy[..., None],
            table.mean_bias,
        ),
        table.start + jnp.where(full[:, 0], b, 0),
        table.length,
    )
    return Pool(moved(pool.k), moved(pool.v)), table, free


@functools.partial(jax.jit, donate_argnums=(0,))
def copy_pages(pool: Pool, source: Int[Array, " n"], target: Int[Array, " n"]) -> Pool:
    """Copies pages; a target of -1 is left out."""
    at = jnp.where(target < 0, pool.k.shape[0], target)
    return jax.tree.map(lambda x: x.at[at].set(x[source], mode="drop"), pool)


class Allocator:
    """Counts the uses of each page on the host."""

    def __init__(self, pages: int) -> None:
        self._uses = np.zeros(pages, np.int32)
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nothing uses."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages for one use each.

        Raises:
            UserError: fewer are free.
        """
        if count > self.free:
            raise UserError(f"{count} pages are needed, {self.free} of {len(self._uses)} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._uses[taken] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Counts one more use of each."""
        np.add.at(self._uses, list(pages), 1)

    def release(self, pages: Iterable[int]) -> None:
        """Ends one use of each; pages without uses are free."""
        for page in pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                self._free.append(page)


def row_pages(table: PageTable, row: int, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Full pages of a row's kept tokens and means, and the pages that may still be written to."""
    pages, kept = np.asarray(table.pages[:, row]), np.asarray(table.kept[:, row])
    columns = pages.shape[-1] - table.window_pages(page_size)
    column = np.arange(columns)
    full = pages[..., :columns][column < (kept // page_size)[..., None]]
    partial = pages[..., :columns][(column == (kept // page_size)[..., None]) & (kept % page_size > 0)[..., None]]
    means, count = np.asarray(table.means[:, row]), int(table.start[row]) // page_size
    whole, started = means[..., : count // page_size].ravel(), means[..., count // page_size : -(-count // page_size)]
    return np.concatenate([full, whole]), np.concatenate([partial, pages[..., columns:].ravel(), started.ravel()])


def fork(pool: Pool, table: PageTable, allocator: Allocator, row: int, into: Sequence[int]) -> tuple[Pool, PageTable]:
    """Makes rows `into` continue row `row`: they share its full pages and have copies of the others."""
    full, written = row_pages(table, row, pool.page_size)
    pages, means = np.asarray(table.pages[:, row]), np.asarray(table.means[:, row])
    of_rows, of_means, source, target = [], [], [], []
    for _ in into:
        copies = allocator.take(len(written))
        allocator.share(full.tolist())
        renamed = np.arange(pool.k.shape[0])
        renamed[written] = copies
        of_rows.append(renamed[pages])
        of_means.append(renamed[means])
        source += written.tolist()
        target += copies
    pool = copy_pages(pool, jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32))
    at = jnp.asarray(into)
    return pool, table._replace(
        pages=table.pages.at[:, at].set(jnp.asarray(np.stack(of_rows, axis=1), jnp.int32)),
        means=table.means.at[:, at].set(jnp.asarray(np.stack(of_means, axis=1), jnp.int32)),
        **{
            name: getattr(table, name).at[:, at].set(getattr(table, name)[:, row, None])
            for name in ("kept", "worth", "mean_bias")
        },
        **{name: getattr(table, name).at[at].set(getattr(table, name)[row]) for name in ("start", "length")},
    )


def _set(pages: Stored, numbers: Int[Array, " n"], new: Float[Array, "n b d"]) -> Stored:
    at = jnp.where(numbers < 0, pages.shape[0], numbers)
    return jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), pages, encode(new, pages))


def _set_slots(
    pages: Stored, numbers: Int[Array, "R H"], slot: Int[Array, "R 1"], new: Float[Array, "R H d"]
) -> Stored:
    return jax.tree.map(lambda x, y: x.at[numbers, slot].set(y), pages, encode(new, pages))
