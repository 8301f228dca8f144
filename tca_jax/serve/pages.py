"""The pool of an engine, the programs over it beside those of `generate`, and page tables on the host.

A table is a `Rows` without `k` and `v`, and without `free` unless a row has free pages of its own. Programs get it with
the pool, which they overwrite.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32, UInt8

from tca_jax.engine.decode import STATE, DecodingState, Steps, begin, blank_state
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, SAME, OverMesh, part_of_device, place
from tca_jax.engine.pages import NO_POOL, NO_TABLE, FreePages, Rows, Widths, bare, renumbered
from tca_jax.engine.read import empty_rows
from tca_jax.engine.sampling import Sampling
from tca_jax.errors import require
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.kv import empty
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.programs import STEP, Program

#: Numbers of pages on each device of "model".
Numbers = list[np.ndarray]


class Allocator:
    """Counts the uses of each page on the host. Each device of "model" has pages of its own."""

    def __init__(self, pages: int, devices: int = 1) -> None:
        self._uses, self._free = np.zeros((devices, pages), np.int32), np.full(devices, pages)

    @property
    def free(self) -> int:
        """Pages that nothing uses, on the device that has fewest."""
        return int(self._free.min())

    def take(self, counts: int | Sequence[int]) -> Numbers:
        """Pages for one use each; a number of them for all devices, or one for each. Fewer are free: UserError."""
        wanted = np.broadcast_to(counts, self._free.shape)
        for count, free in zip(wanted, self._free, strict=True):
            require(count <= free, f"{count} pages are needed, {free} of {self._uses.shape[1]} are free")
        taken = [np.flatnonzero(uses == 0)[:n].astype(np.int32) for uses, n in zip(self._uses, wanted, strict=True)]
        self._free -= wanted
        self.share(taken)
        return taken

    def share(self, pages: Sequence[np.ndarray]) -> None:
        """Counts one more use of each page; a page may be in a device's list once."""
        for uses, numbers in zip(self._uses, pages, strict=True):
            uses[numbers] += 1

    def release(self, pages: Sequence[np.ndarray]) -> None:
        """Ends one use of each; pages without uses are free."""
        for device, numbers in enumerate(pages):
            self._uses[device, numbers] -= 1
            self._free[device] += int((self._uses[device, numbers] == 0).sum())


class PagePool:
    """One pool for documents and answers, on each device.

    Answers have `answers` pages, of which `free_answers` are not promised to requests. Programs take free ones of them,
    and find again those that no row names any more. The allocator counts the uses of the others, which are documents'.
    """

    def __init__(self, lm: LM, documents: int, answers: int) -> None:
        self._lm, self.documents, self.answers, self.free_answers = lm.without_weights, documents, answers, answers
        self.on_mesh, self.devices = lm.mesh is not None, 1 if lm.head_shards is None else lm.head_shards.devices
        self.block_size, self.page_bytes = lm.method.cache.block_size, lm.page_bytes * self.devices
        self.total, self._dtype = documents + answers, lm.cache_dtype
        self.allocator = Allocator(self.total, self.devices)
        self.of_answers = np.zeros((self.devices, self.total), bool)
        for device, numbers in enumerate(self.allocator.take(answers)):
            self.of_answers[device, numbers] = True
        self.renew()

    def renew(self) -> None:
        self.arrays: Any = None  # their memory is that of the new ones
        self.arrays = empty_pool.run(self._lm, pages=self.total, dtype=self._dtype)

    def lend(self, table: Rows | None, free: FreePages | None = None) -> Rows:
        """A table with the pool, and its own free pages or others; the caller gives it to a program."""
        pool = self.arrays if table is None else dataclasses.replace(table, k=self.arrays.k, v=self.arrays.v)
        return pool if free is None else dataclasses.replace(pool, free=free)

    def take_back(self, rows: Rows) -> Rows:
        """Takes the pool from a program's result; the table is left."""
        self.arrays = dataclasses.replace(self.arrays, k=rows.k, v=rows.v)
        return dataclasses.replace(rows, **NO_POOL)

    def padded(self, numbers: Numbers, count: int) -> np.ndarray:
        """Pages of each device in `count` places."""
        padded = np.full((self.devices, count), self.total, np.int32)
        for own, of_device in zip(padded, numbers, strict=True):
            own[: len(of_device)] = of_device
        return padded

    def free_pages(self, numbers: Numbers, count: int) -> FreePages:
        """Pages that a program may take, in `count` places."""
        free: Any = self.padded(numbers, count), np.zeros(self.devices, np.int32)
        return self.on_device(FreePages(*(x[None] if self.on_mesh else x[0] for x in free)))

    def empty_table(self, rows: int, widths: Widths, free: Numbers) -> Rows:
        """Rows without tokens, which may take these pages; they come in as many places as answers have pages."""
        table = empty_table.run(self._lm, rows=rows, widths=widths, pages=self.total)
        return dataclasses.replace(table, free=self.free_pages(free, max(self.answers, len(free[0]))))

    def keep(self, numbers: Numbers, make_room: Callable[[int], bool]) -> bool:
        """Counts a use of pages for a document, and gives answers others for theirs; not without room for these."""
        which = [of_device[own] for of_device, own in zip(self.of_answers, numbers, strict=True)]
        given = [own[inside] for own, inside in zip(numbers, which, strict=True)]
        if not make_room(max(map(len, given))):
            return False
        self.allocator.share([own[~inside] for own, inside in zip(numbers, which, strict=True)])
        taken = self.allocator.take(list(map(len, given)))
        for of_device, own, others in zip(self.of_answers, given, taken, strict=True):
            of_device[own], of_device[others] = False, True
        return True

    def on_device(self, table: Any) -> Any:
        """A table of the host, or free pages, on the devices."""
        mesh = self._lm.mesh
        put = jnp.asarray if mesh is None else functools.partial(place, CACHES, mesh=mesh)
        return jax.tree.map(lambda x: put(np.array(x)), table)  # copies, which programs may overwrite

    def numbered(self, rows: Rows, none: int) -> tuple[Rows, Numbers]:
        """A row's table on the host with its pages with tokens numbered from 0, and their old numbers below `none`."""
        b, held = self.block_size, (np.asarray(rows.length) - rows.start)[..., None, :, None, None]
        kept, window = np.split(np.asarray(rows.pages), [rows.columns], axis=-1)
        window = np.where(np.arange(window.shape[-1]) * b < held, window, none)
        named: Any = np.concatenate([kept[..., : cdiv(int(np.max(rows.kept)), b)], window], axis=-1)
        table = dataclasses.replace(bare(rows), pages=named, in_runs=False)
        numbers, lookups = [], np.zeros((self.devices, none + 1), np.int32)
        for each in [table.pages] if table.scored is None else [table.pages, table.scored.pages]:
            for lookup, of_device in zip(lookups, each.reshape(self.devices, -1), strict=True):
                lookup[np.minimum(of_device, none)] = 1
        numbers = [np.flatnonzero(lookup[:-1]).astype(np.int32) for lookup in lookups]
        for lookup, own in zip(lookups, numbers, strict=True):
            lookup[:], lookup[own] = max(map(len, numbers)), np.arange(len(own))
        return renumbered(table, lookups), numbers

    def in_pool(self, table: Rows, numbers: Numbers, widths: Widths) -> Rows:
        """A table from `numbered` that names pages of the pool, as wide as all documents', which share programs."""
        table = renumbered(table, [np.append(own, np.int32(self.total)) for own in numbers])
        return self.on_device(_widen(self._lm, table, widths=widths, pages=self.total))


# Programs


def _empty_pool(lm: LM, *, pages: int, dtype: jnp.dtype) -> Rows:
    k, v = (empty((pages, lm.method.cache.block_size, lm.config.head_dim), dtype) for _ in range(2))
    return Rows(k, v, **NO_TABLE)


def _empty_table(lm: LM, *, rows: int, widths: Widths, pages: int) -> Rows:
    """Rows without tokens; `pages` of the pool."""
    table = empty_rows(lm, rows, widths, pages, jnp.float32)  # whose pool is dropped
    return dataclasses.replace(bare(table), in_runs=False)


def _empty_state(lm: LM, *, rows: int, stops: int) -> DecodingState:
    """Ended rows without cache; with room for a token of each, as the host gets the output of each step."""
    fields: dict[str, Any] = dict.fromkeys(("lengths", "min_new_tokens"), jnp.zeros(rows, jnp.int32)) | {"seen": None}
    fields |= dict.fromkeys(("done", "finite"), jnp.ones(rows, bool))
    fields["stop_tokens"] = jnp.full((rows, stops), lm.config.vocab_size, jnp.int32)
    return blank_state(lm, rows, 1, 0, **fields, keys=jax.random.split(jax.random.key(0), rows))


def _place(lm: LM, pool: Rows, pages: Rows) -> Rows:
    """The pool with pages written to the numbers of its free ones; a number past its end drops the page."""
    to = pool.free.numbers
    k, v = jax.tree.map(lambda old, x: old.at[to].set(x, mode="drop"), (pool.k, pool.v), (pages.k, pages.v))
    return dataclasses.replace(pool, k=k, v=v)


def _fetch(lm: LM, pool: Rows) -> Rows:
    """Copies of the pages that are called free."""
    k, v = jax.tree.map(lambda x: x.at[pool.free.numbers].get(mode="clip"), (pool.k, pool.v))
    return Rows(k, v, **NO_TABLE)


def _widen(lm: LM, table: Rows, *, widths: Widths, pages: int) -> Rows:
    no_bytes: Any = np.zeros((pages, lm.method.cache.block_size, 0))  # the pool's size
    return dataclasses.replace(dataclasses.replace(table, k=no_bytes).with_widths(widths), **NO_POOL)


def _fork(lm: LM, pool: Rows, document: Rows, most: Int[Array, " 1"]) -> Rows:
    """A row that continues a document, on free pages of the pool, and will have `most` tokens."""
    rows = dataclasses.replace(document, k=pool.k, v=pool.v, free=pool.free)
    return rows.forked(jnp.zeros(1, jnp.int32), most)


def _put(lm: LM, table: Rows, one: Rows, row: Int[Array, ""]) -> Rows:
    """A table with a row, and the free pages that the row left."""
    return dataclasses.replace(table.with_row(bare(one), row), free=one.free)


def _add(
    lm: LM,
    table: Rows,  # with the pool
    of_answers: Bool[Array, "devices P"],
    live: Bool[Array, " R"],
    document: Rows,
    most: Int[Array, " 1"],
    row: Int[Array, ""],
) -> Rows:
    """A table with a row that continues a document, on pages of answers that no live row names: one of a request."""
    own = of_answers[0] if lm.head_shards is None else part_of_device(of_answers)
    unnamed = own & ~table.named_pages(live)[:-1]
    numbers = jnp.flatnonzero(unnamed, size=len(table.free.numbers), fill_value=len(own))
    free = FreePages(numbers.astype(jnp.int32), jnp.int32(0))
    one = _fork(lm, dataclasses.replace(table, free=free), document, most)
    return dataclasses.replace(_put(lm, bare(table), one, row), k=one.k, v=one.v)


def _admit(
    lm: LM,
    state: DecodingState,  # without cache
    row: Int[Array, ""],
    logits: Float32[Array, "1 V"],
    fields: tuple[Any, ...],  # of the row, from its length to `allowed`, as `begin` takes them
) -> tuple[DecodingState, Int32[Array, "4 R"]]:
    """Draws the first token of a row."""
    alone = begin(lm, logits, *fields, new_tokens=1, logprobs=0 if state.top is None else state.top[0].shape[-1])
    state = jax.tree.map(lambda all_rows, x: all_rows.at[row].set(x[0]), state, alone)
    return state, _packed(state)


def _packed(state: DecodingState) -> Int32[Array, "4 R"]:
    """Output of a step: step, done, finite, last. Copying ten small arrays to the host takes ten times as long."""
    return jnp.stack([x.astype(jnp.int32) for x in (state.step, state.done, state.finite, state.last)])


def _step(
    lm: LM,
    state: DecodingState,
    limit: Int[Array, " R"],  # tokens of an answer; 0 for free rows
    sampling: Sampling,
    allowed: UInt8[Array, "R W"] | None,  # as in `draw`
    *,
    evicts: bool,  # whether a block may leave a window
    backend: Backend,
) -> tuple[DecodingState, Int32[Array, "4 R"]]:
    """A step of the rows that have not ended and have fewer than `limit` tokens."""
    steps, by_scores = Steps(lm, limit, sampling, allowed, backend), lm.method.cache.by_scores
    given = steps.leave(state) if evicts else state  # without scores it takes the step, too
    after = given if evicts and not by_scores else steps.take(given, steps.summaries(given.cache))
    return after, _packed(after)


def _row(lm: LM, table: Rows, row: Int[Array, ""]) -> Rows:
    return table.row(row)


empty_pool = Program(OverMesh(_empty_pool, (), CACHES))
empty_table = Program(OverMesh(_empty_table, (), CACHES))
empty_state = Program(OverMesh(_empty_state, (), STATE))
place_pages = Program(OverMesh(_place, (CACHES, CACHES), CACHES), donate=(1,))
fetch_pages = Program(OverMesh(_fetch, (CACHES,), CACHES))
widen = Program(OverMesh(_widen, (CACHES,), CACHES))
add = Program(OverMesh(_add, (CACHES, SAME, SAME, CACHES, SAME, SAME), CACHES), donate=(1,))
fork = Program(OverMesh(_fork, (CACHES, CACHES, SAME), CACHES), donate=(1,))
put = Program(OverMesh(_put, (CACHES, CACHES, SAME), CACHES), donate=(1,))
admit = Program(OverMesh(_admit, (STATE, SAME, SAME, SAME), (STATE, SAME)), donate=(1,))
step = Program(OverMesh(_step, (STATE, SAME, SAME, SAME), (STATE, SAME)), donate=(1,), on_gpu=STEP)
row = Program(OverMesh(_row, (CACHES, SAME), CACHES))
