"""Free pages of a pool with reference counts, and the page table of a row."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from tca_jax.engine.cache import CacheLayout, PagedCache
from tca_jax.engine.mesh import PerDevice, on_host
from tca_jax.methods.base import CachePolicy
from tca_jax.pallas_kernels.numerics import cdiv


class FreePages:
    """Reference counts of the `total` pages of a pool on each of D devices; number `total` stands for no page."""

    def __init__(self, total: int, devices: int = 1) -> None:
        self.total, self.devices = total, devices
        self._uses = np.zeros((devices, total), np.int32)
        self._stacks = np.tile(np.arange(total, dtype=np.int32)[::-1], (devices, 1))
        self._counts = np.full(devices, total)

    @property
    def free(self) -> int:
        """Free pages, on the device that has fewest."""
        return int(self._counts.min())

    def take(self, wanted: Bool[np.ndarray, "D n"]) -> Int32[np.ndarray, "D n"]:
        """A free page for each wanted place, `total` elsewhere. The caller has checked that there are enough."""
        numbers = np.full(wanted.shape, self.total, np.int32)
        for device, places in enumerate(wanted):
            count = int(places.sum())
            left = self._counts[device] - count
            assert left >= 0, "pages are counted before they are taken"
            numbers[device, places] = self._stacks[device, left : left + count]
            self._counts[device] = left
        self.share(numbers)
        return numbers

    def share(self, numbers: Int32[np.ndarray, "D n"]) -> None:
        """Adds a reference to pages."""
        for uses, own in zip(self._uses, numbers, strict=True):
            uses[own[own < self.total]] += 1

    def give_back(self, numbers: Int32[np.ndarray, "D n"]) -> None:
        """Removes a reference from pages."""
        for device, own in enumerate(numbers):
            held = own[own < self.total]
            self._uses[device, held] -= 1
            unused = held[self._uses[device, held] == 0]
            first = self._counts[device]
            self._stacks[device, first : first + len(unused)] = unused
            self._counts[device] += len(unused)


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(jax.tree_util.register_dataclass, data_fields=["pages"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PageNumbers(PerDevice):
    """Numbers of pages of a pool, int32 `[n]`."""

    pages: Int[Array, " n"]

    @classmethod
    def of(cls, numbers: Int32[np.ndarray, "D n"], on_mesh: bool) -> PageNumbers:
        """Those of each device, as they go into programs."""
        return cls(jnp.asarray(numbers[None] if on_mesh else numbers[0]))


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["table", "kept", "start", "end"], meta_fields=["kept_columns"]
)
@dataclasses.dataclass(frozen=True)
class RowTable(PerDevice):
    """The page table of one row of a `PagedCache`, of all layers."""

    table: Int[Array, "layers Hkv T"]  # page numbers
    kept: Int[Array, "layers Hkv"]  # kept tokens
    start: Int[Array, ""]  # position of the window's first token
    end: Int[Array, ""]  # position after the last that the window has pages for
    kept_columns: int  # entries for pages of kept tokens, in every layer; static

    def cache(self, pool: PagedCache) -> PagedCache:
        """The row as a cache over a pool."""
        layers = range(self.table.shape[0])
        tables = tuple(self.table[layer][None] for layer in layers)
        kept = tuple(self.kept[layer][None] for layer in layers)
        ends = self.start[None], self.end[None]
        return PagedCache(pool.k, pool.v, tables, kept, *ends, (self.kept_columns,) * len(layers))

    @classmethod
    def of(cls, cache: PagedCache) -> RowTable:
        """The inverse of `cache`, of a cache of one row whose layers have tables of one width."""
        table, kept = (jnp.stack(parts)[:, 0] for parts in (cache.tables, cache.kept))
        return cls(table, kept, cache.start[0], cache.end[0], cache.kept_columns[0])


def pool_only(cache: PagedCache) -> PagedCache:
    """The pool of a cache without page tables."""
    nothing: Any = None
    return PagedCache(cache.k, cache.v, (), (), nothing, nothing, ())


class TableWidths(typing.NamedTuple):
    """Entries of a row's table for pages of kept tokens, and of the window."""

    kept: int
    window: int

    def at_least(self, other: TableWidths) -> TableWidths:
        """The larger ones."""
        return TableWidths(max(self.kept, other.kept), max(self.window, other.window))


@dataclasses.dataclass(frozen=True)
class LocalTable:
    """The page table of a row whose pages are numbered from 0; on the host, with an axis for D devices in front."""

    table: Int32[np.ndarray, "D layers Hkv T"]  # page numbers; `num_pages` for no page
    kept: Int32[np.ndarray, "D layers Hkv"]  # kept tokens
    start: int  # position of the window's first token
    end: int  # position after the last that the window has pages for
    kept_columns: int  # entries for pages of kept tokens
    num_pages: int  # of a device

    @classmethod
    def of_row(cls, cache: PagedCache, row: int) -> LocalTable:
        """A row of a cache, whose pages keep their numbers, without empty pages of kept tokens."""
        size, host = cache.block_size, on_host((cache.tables, cache.kept, cache.start, cache.end))
        tables, kept, start, end = jax.tree.map(lambda x: _by_device(np.asarray(x), cache)[:, row], host)
        columns = max(cache.kept_columns)
        window = max(t.shape[-1] - c for t, c in zip(tables, cache.kept_columns, strict=True))
        widths = TableWidths(columns, window)
        wide = [
            widened(table, own, widths, cache.num_pages) for table, own in zip(tables, cache.kept_columns, strict=True)
        ]
        table, kept = np.stack(wide, axis=1).astype(np.int32), np.stack(kept, axis=1).astype(np.int32)
        filled = np.arange(columns) < -(-kept // size)[..., None]
        table[..., :columns][~filled] = cache.num_pages
        return cls(table, kept, int(start[0]), int(end[0]), columns, cache.num_pages)

    @classmethod
    def of_layout(cls, layout: CacheLayout, start: int) -> LocalTable:
        """An empty row of a layout of one row, whose window begins with a block."""
        table = _table_of(layout)
        kept, end = np.zeros(table.shape[:3], np.int32), start + layout.window_columns * layout.block_size
        return cls(table, kept, start, end, max(layout.kept_columns), layout.num_pages)

    @classmethod
    def exactly(
        cls, policy: CachePolicy, kept: Int32[np.ndarray, "D layers Hkv"], start: int, tokens: int
    ) -> tuple[LocalTable, CacheLayout]:
        """The table and layout of a row with no more pages than its kept tokens and the window need."""
        pages = -(-kept // policy.block_size)
        columns = min(cdiv(tokens, policy.block_size), policy.window // policy.block_size + 1)
        by_layer = tuple(tuple(map(tuple, of_layer)) for of_layer in pages.swapaxes(0, 1).tolist())
        layout = CacheLayout(policy.block_size, policy.window, 1, by_layer, columns, tokens)
        return dataclasses.replace(cls.of_layout(layout, start), kept=kept.astype(np.int32)), layout

    @property
    def widths(self) -> TableWidths:
        """Of the table."""
        return TableWidths(self.kept_columns, self.table.shape[-1] - self.kept_columns)

    @functools.cached_property
    def used(self) -> Bool[np.ndarray, "D P"]:
        """Pages that the table of each device names."""
        used = np.zeros((len(self.table), self.num_pages + 1), bool)
        for of_device, table in zip(used, self.table, strict=True):
            of_device[table] = True
        return used[:, :-1]

    @property
    def most_pages(self) -> int:
        """How many they are, on the device that has most of them."""
        return int(self.used.sum(axis=1).max())

    @property
    def parts(self) -> tuple[Int32[np.ndarray, "D layers Hkv C"], Int32[np.ndarray, "D layers Hkv W"]]:
        """The entries for pages of kept tokens, and those of the window."""
        return self.table[..., : self.kept_columns], self.table[..., self.kept_columns :]

    @property
    def in_window(self) -> Bool[np.ndarray, "D P"]:
        """Pages of each device that are the window's."""
        return dataclasses.replace(self, table=self.parts[1]).used

    def numbered(self, numbers: Int32[np.ndarray, "D P"], widths: TableWidths, no_page: int, on_mesh: bool) -> RowTable:
        """The row in a pool, where its pages have these numbers (`no_page` for unused ones), as wide as `widths`.

        `on_mesh`: arrays have axes for devices in front, as outside of programs over a mesh.
        """
        table = widened(self.in_pool(self.table, numbers, no_page), self.kept_columns, widths, no_page)
        start, end = (np.full(table.shape[0], x, np.int32) for x in (self.start, self.end))
        parts = {"table": table, "kept": self.kept, "start": start, "end": end}
        arrays: dict[str, Any] = {name: x[None] if on_mesh else x[0] for name, x in parts.items()}
        return RowTable(**arrays, kept_columns=widths.kept)

    def in_pool(
        self, entries: Int32[np.ndarray, "D ..."], numbers: Int32[np.ndarray, "D P"], no_page: int
    ) -> Int32[np.ndarray, "D ..."]:
        """Entries of the table as the numbers that pages have in a pool."""
        known = np.pad(numbers, ((0, 0), (0, 1)), constant_values=no_page)
        return np.take_along_axis(known, entries.reshape(len(entries), -1), axis=1).reshape(entries.shape)

    def chunked(self, numbers: Int32[np.ndarray, "D P"], size: int, no_page: int) -> list[Int32[np.ndarray, "D C"]]:
        """Numbers of the used pages in chunks of `size`; `no_page` pads the last one."""
        packed = np.full((len(numbers), cdiv(self.most_pages, size) * size), no_page, np.int32)
        for own, of_device, used in zip(packed, numbers, self.used, strict=True):
            own[: used.sum()] = of_device[used]
        return np.split(packed, packed.shape[1] // size, axis=1)

    def behind(
        self, parent: LocalTable, numbers: Int32[np.ndarray, "D Q"], own_start: int, block_size: int, no_page: int
    ) -> tuple[Int32[np.ndarray, "D P"], Int32[np.ndarray, "D P"]]:
        """Pages of the parent, by numbers in the pool, that pages of a row after it share, and that they copy first.

        Tokens from position `own_start` on are in the row's own pages; `no_page` stands for none.
        """
        shared, copied = np.full((2, len(self.table), self.num_pages + 1), no_page, np.int32)
        (kept, window), (their_kept, their_window) = self.parts, parent.parts
        columns = min(kept.shape[-1], their_kept.shape[-1])
        their_kept = parent.in_pool(their_kept[..., :columns], numbers, no_page)
        full, begun = parent.kept[..., None] // block_size, parent.kept[..., None] % block_size > 0
        column = np.arange(columns)
        blocks = self.start // block_size + np.arange(window.shape[-1])
        place = blocks - parent.start // block_size
        inside = (place >= 0) & (place < their_window.shape[-1]) & (blocks < own_start // block_size)
        their_window = parent.in_pool(their_window[..., place[inside]], numbers, no_page)
        for device in range(len(shared)):
            names = kept[device, ..., :columns]
            for found, mask in ((shared, column < full), (copied, (column == full) & begun)):
                found[device, names[mask[device]]] = their_kept[device][mask[device]]
            shared[device, window[device][..., inside]] = their_window[device]
        return shared[:, :-1], copied[:, :-1]

    def cache(self, k: Any, v: Any, kept_columns: Sequence[int], on_mesh: bool) -> PagedCache:
        """The row as a cache with a pool of its own; `kept_columns` of each layer's table."""
        kept, window = self.parts
        tables = [np.concatenate([kept[:, i, :, :n], window[:, i]], axis=-1) for i, n in enumerate(kept_columns)]
        ends = [np.full((len(self.table), 1), x, np.int32) for x in (self.start, self.end)]

        def as_cached(by_device: np.ndarray) -> Any:
            return by_device[None] if on_mesh else by_device[0]

        return PagedCache(
            k=k,
            v=v,
            tables=tuple(as_cached(x[:, None]) for x in tables),
            kept=tuple(as_cached(self.kept[:, i, None]) for i in range(len(tables))),
            start=as_cached(ends[0]),
            end=as_cached(ends[1]),
            kept_columns=tuple(kept_columns),
        )


@functools.lru_cache(maxsize=64)
def _table_of(layout: CacheLayout) -> Int32[np.ndarray, "D layers Hkv T"]:
    """The tables of all devices of a layout of one row, as wide in all layers."""
    columns, devices = max(layout.kept_columns), len(layout.kept_pages[0])
    widths = TableWidths(columns, layout.window_columns)
    by_device = [
        np.stack(
            [
                widened(np.asarray(table)[0], own, widths, layout.num_pages)
                for table, own in zip(layout.tables(device), layout.kept_columns, strict=True)
            ]
        )
        for device in range(devices)
    ]
    return np.stack(by_device).astype(np.int32)


def _by_device(x: np.ndarray, cache: PagedCache) -> np.ndarray:
    """An array of a cache with one axis for devices in front, then that of rows."""
    return x[0] if len(cache.k.shape) > 3 else x[None]


def widened(table: Any, kept_columns: int, widths: TableWidths, no_page: int) -> Any:
    """A table `[..., T]`, of NumPy or JAX, with more entries of either kind, which name no page."""
    library = np if isinstance(table, np.ndarray) else jnp
    parts, sides = (table[..., :kept_columns], table[..., kept_columns:]), [(0, 0)] * (table.ndim - 1)
    wide = [
        library.pad(part, (*sides, (0, width - part.shape[-1])), constant_values=no_page)
        for part, width in zip(parts, widths, strict=True)
    ]
    return library.concatenate(wide, axis=-1)
