"""The pool of an engine: pages of documents and answers on the devices, their uses, and page tables on the host."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, on_host, place
from tca_jax.engine.pages import Allocator, FreePages, Numbers, Rows, Scored
from tca_jax.engine.read import mean_columns, page_bytes
from tca_jax.methods.base import UNBOUNDED, ScoredCache
from tca_jax.pallas_kernels.numerics import MASKED, cdiv
from tca_jax.serve import programs


class Widths(NamedTuple):
    """Columns of a table: for pages of kept tokens, of the window, and of means."""

    kept: int
    window: int
    means: int

    @classmethod
    def of(cls, table: Rows) -> Widths:
        return cls(table.columns, table.window_pages, 0 if table.scored is None else table.scored.pages.shape[-1])

    @classmethod
    def of_row(cls, lm: LM, kept: int, tokens: int) -> Widths:
        """Those of a row of `kept` pages of kept tokens and of `tokens` tokens."""
        policy, bounded = lm.method.cache, lm.method.cache.window < UNBOUNDED
        window = policy.window // policy.block_size + 1 if bounded else cdiv(tokens, policy.block_size)
        return cls(kept, window, mean_columns(policy, tokens))

    @classmethod
    def of_layout(cls, lm: LM, layout: CacheLayout) -> Widths:
        """Those of rows that a layout plans."""
        means = mean_columns(lm.method.cache, layout.most_tokens)
        return cls(max(layout.kept_columns), layout.num_window_pages, means)


class PagePool:
    """One pool for documents and answers, on each device.

    Answers have `answers` pages, of which `reserved` are promised to requests; the others are documents'. Tables are
    `Rows` without `k`, `v` and `free`: programs get them with the pool, which they overwrite.
    """

    def __init__(self, lm: LM, documents: int, answers: int) -> None:
        self._lm, self.documents, self.answers = lm.without_weights(), documents, answers
        self.on_mesh, self.devices = lm.mesh is not None, 1 if lm.head_shards is None else lm.head_shards.devices
        self.block_size, self.page_bytes = lm.method.cache.block_size, page_bytes(lm) * self.devices
        self.total, self.reserved, self._dtype = documents + answers, 0, lm.cache_dtype
        self.allocator = Allocator(self.total, self.devices)
        self.arrays: Any = None
        self.renew()

    @property
    def free(self) -> int:
        """Free pages of documents, on the device that has fewest."""
        return self.allocator.free - self.free_answers

    @property
    def free_answers(self) -> int:
        """Pages of answers that no request has reserved."""
        return self.answers - self.reserved

    def renew(self) -> None:
        """Replaces the arrays."""
        self.arrays = None  # their memory is that of the new ones
        self.arrays = programs.empty_pool.run(self._lm, pages=self.total, dtype=self._dtype)

    def lend(self, table: Rows | None, free: FreePages | None = None) -> Rows:
        """A table with the pool, and its own free pages or others; the caller gives it to a program."""
        pool = self.arrays if table is None else dataclasses.replace(table, k=self.arrays.k, v=self.arrays.v)
        return pool if free is None else dataclasses.replace(pool, free=free)

    def take_back(self, rows: Rows) -> Rows:
        """Takes the pool from a program's result; the table is left."""
        self.arrays = dataclasses.replace(self.arrays, k=rows.k, v=rows.v)
        none: Any = None
        return dataclasses.replace(rows, k=none, v=none)

    def free_pages(self, numbers: Numbers, count: int) -> FreePages:
        """Pages that a program may take, in `count` places."""
        padded = np.full((self.devices, count), self.total, np.int32)
        for own, of_device in zip(padded, numbers, strict=True):
            own[: len(of_device)] = of_device
        free: Any = padded, np.zeros(self.devices, np.int32)
        return self.on_device(FreePages(*(x[None] if self.on_mesh else x[0] for x in free)))

    def left(self, free: FreePages) -> Numbers:
        """Pages that programs may still take."""
        numbers, taken = (np.reshape(x, (self.devices, -1)) for x in on_host(free))
        parts = [own[count:] for own, (count,) in zip(numbers, taken, strict=True)]
        return [own[own < self.total] for own in parts]

    def empty_table(self, lm: LM, rows: int, widths: Widths) -> Rows:
        """A table of rows without tokens, on the host."""
        lead = (1, self.devices) if self.on_mesh else ()
        shape, b = (*lead, lm.config.num_layers, rows, lm.config.num_kv_heads // self.devices), self.block_size
        scored: Any = None
        if isinstance(lm.method.cache, ScoredCache):
            scored = {
                "scores": np.full((*shape, widths.window * b), -np.inf, np.float32),
                "pages": np.full((*shape, widths.means), self.total, np.int32),
                "bias": np.full((*shape, widths.means * b), MASKED, np.float32),
                "raised": np.zeros(shape[:-1], np.int32),
            }
            scored = Scored(**scored)
        table: Any = {name: np.zeros((*lead, rows), np.int32) for name in ("start", "own", "length")}
        table |= {"kept": np.zeros(shape, np.int32), "scored": scored, "window_pages": widths.window}
        table["pages"] = np.full((*shape, widths.kept + widths.window), self.total, np.int32)
        return Rows(**{**programs.NO_TABLE, "k": None, "v": None, **table})

    def on_device(self, table: Any) -> Any:
        """A table of the host, or free pages, on the devices."""
        mesh = self._lm.mesh
        put = jnp.asarray if mesh is None else functools.partial(place, CACHES, mesh=mesh)
        return jax.tree.map(lambda x: put(np.array(x)), table)  # copies, which programs may overwrite

    def fitted(self, table: Rows, widths: Widths) -> Rows:
        """A table of the host in other widths; columns that it loses name no page."""

        def fit(x: Any, count: int, fill: float) -> Any:
            more = (*((0, 0),) * (x.ndim - 1), (0, max(0, count - x.shape[-1])))
            return np.pad(x[..., :count], more, constant_values=fill)

        kept, window = np.split(np.asarray(table.pages), [table.columns], axis=-1)
        parts = [fit(part, count, self.total) for part, count in zip((kept, window), widths, strict=False)]
        b, scored = self.block_size, table.scored
        if scored is not None:
            scored = scored._replace(
                scores=fit(scored.scores, widths.window * b, -np.inf),
                pages=fit(scored.pages, widths.means, self.total),
                bias=fit(scored.bias, widths.means * b, MASKED),
            )
        pages: Any = np.concatenate(parts, axis=-1)
        return dataclasses.replace(table, pages=pages, scored=scored, window_pages=widths.window)

    def exact(self, table: Rows) -> Rows:
        """A row's table, on the host, that names only pages which hold tokens."""
        b, held = self.block_size, (np.asarray(table.length) - table.start)[..., None, :, None, None]
        kept, window = np.split(np.asarray(table.pages), [table.columns], axis=-1)
        window = np.where(np.arange(window.shape[-1]) * b < held, window, self.total)
        pages: Any = np.concatenate([kept, window], axis=-1).astype(np.int32)
        widths = Widths.of(table)._replace(kept=cdiv(int(np.max(table.kept)), b))
        return self.fitted(dataclasses.replace(table, pages=pages), widths)

    def named(self, table: Rows, none: int | None = None) -> Numbers:
        """Pages that a table of the host names, on each device; numbers from `none` on are no pages."""
        none, found = self.total if none is None else none, []
        tables = [table.pages] if table.scored is None else [table.pages, table.scored.pages]
        for at in np.ndindex(*table.start.shape[:-1]):
            named = np.zeros(none + 1, bool)
            for each in tables:
                named[np.minimum(each[at], none)] = True
            found.append(np.flatnonzero(named[:-1]).astype(np.int32))
        return found

    def renumbered(self, table: Rows, old: Numbers, new: Numbers, none: int | None = None) -> Rows:
        """A table of the host whose pages have new numbers; `none` stands for no page, the pool's own by default."""
        none = self.total if none is None else none

        def changed(x: Any) -> Any:
            out = np.full(x.shape, none, np.int32)
            for at, before, after in zip(np.ndindex(*table.start.shape[:-1]), old, new, strict=True):
                lookup = np.full(int(before.max()) + 2, none, np.int32)
                lookup[before] = after
                out[at] = lookup[np.minimum(x[at], len(lookup) - 1)]
            return out

        scored = table.scored
        scored = None if scored is None else scored._replace(pages=changed(scored.pages))
        return dataclasses.replace(table, pages=changed(table.pages), scored=scored)


def row_of(table: Rows, row: int) -> Rows:
    """A row of a table of the host."""
    lead = table.start.ndim - 1
    return jax.tree.map(lambda x: np.take(x, [row], axis=lead + min(1, x.ndim - lead - 1)), table)


def without(numbers: Numbers, others: Numbers) -> Numbers:
    """Pages of each device that are none of others."""
    found = []
    for own, of_others in zip(numbers, others, strict=True):
        left = np.zeros(1 + max(own.max(initial=0), of_others.max(initial=0)), bool)
        left[own] = True
        left[of_others] = False
        found.append(np.flatnonzero(left).astype(np.int32))
    return found


def counts(numbers: Numbers) -> list[int]:
    """How many pages these are on each device."""
    return list(map(len, numbers))
