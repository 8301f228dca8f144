"""Pages of the KV cache: one pool for all layers, one table for all rows.

A page holds b tokens of one KV head. A row's table names, for each layer and KV head, the pages of its kept tokens and
then those of its window; and, where evicted tokens leave their means, pages of means. All numbers are data: they differ
between layers, heads and prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.engine.mesh import STATIC, PerDevice, on_host
from tca_jax.methods.base import BlockMeans
from tca_jax.pallas_kernels.kv import Pages, Stored, decode, empty, encode
from tca_jax.pallas_kernels.kv import Pool as CompactTokens
from tca_jax.pallas_kernels.numerics import MASKED, cdiv

_take = functools.partial(jnp.take_along_axis, mode="promise_in_bounds")


class Scored(NamedTuple):
    """Of rows whose tokens have scores: those of the window, and the means of evicted tokens."""

    scores: Float32[Array, "layers R H W"]  # of the window's tokens, by column and slot
    pages: Int32[Array, "layers R H M"]  # of the means, one for each block left of the window
    bias: Float32[Array, "layers R H Mb"]  # added to the logit of a block's mean; -1e30: nothing was evicted
    raised: Int32[Array, "layers R"]  # 1 where fewer tokens stay than the threshold says, for want of pages


class Widths(NamedTuple):
    """Entries of each head's table: for pages of kept tokens, of the window, and of means."""

    kept: int
    window: int
    means: int


class FreePages(NamedTuple):
    """Pages that programs may take, in order."""

    numbers: Int32[Array, " n"]
    taken: Int32[Array, ""]

    def take(self, counts: Int[Array, "*s"], most: int, none: int) -> tuple[Int32[Array, "*s most"], FreePages]:
        """`counts` pages for each, in `most` columns; `none` in others, and where no page is left."""
        ends = self.taken + jnp.cumsum(counts.ravel(), dtype=jnp.int32).reshape(counts.shape)
        column = jnp.arange(most, dtype=jnp.int32)
        index = (ends - counts)[..., None] + column
        there = (column < counts[..., None]) & (index < len(self.numbers))
        found = jnp.where(there, self.numbers.at[index].get(mode="clip"), none)
        taken = jnp.minimum(ends.ravel()[-1], len(self.numbers)) if counts.size else self.taken
        return found.astype(jnp.int32), FreePages(self.numbers, taken.astype(jnp.int32))


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows(PerDevice):
    """R rows of a page table with the pool that they name pages of.

    The first `columns` entries of a head's table name the pages of its kept tokens, which fill them in order; the
    others those of its window, oldest block first. An entry P names no page.
    """

    k: Stored  # the pool: keys [P, b, d] and values
    v: Stored
    free: FreePages
    pages: Int32[Array, "layers R H T"]
    kept: Int32[Array, "layers R H"]  # tokens outside the window
    start: Int32[Array, " R"]  # first position in the window, a multiple of b
    own: Int32[Array, " R"]  # from this position on no other row has the window's pages
    length: Int32[Array, " R"]
    scored: Scored | None
    window_pages: int = dataclasses.field(metadata=STATIC)
    # Whether the pages of a block of the window have consecutive numbers, head after head, in all rows.
    in_runs: bool = dataclasses.field(default=True, metadata=STATIC)

    @classmethod
    def create(
        cls,
        shape: tuple[int, int, int],  # layers, rows R, KV heads H
        pool: tuple[int, int, int],  # pages P, tokens of a page b, head size d
        widths: Widths,
        dtype: DTypeLike,
        *,
        scored: bool,  # whether tokens have scores
    ) -> Rows:
        """Rows without tokens; all pages are free."""
        pages, page_size, _ = pool
        scores = jnp.full((*shape, widths.window * page_size), -jnp.inf, jnp.float32)
        of_means = jnp.full((*shape, widths.means), pages, jnp.int32)
        bias = jnp.full((*shape, widths.means * page_size), MASKED, jnp.float32)
        of_scores = Scored(scores, of_means, bias, jnp.zeros(shape[:2], jnp.int32))
        k, v = empty(pool, dtype), empty(pool, dtype)  # no running row reads what no token fills
        free = FreePages(jnp.arange(pages, dtype=jnp.int32), jnp.int32(0))
        table = jnp.full((*shape, widths.kept + widths.window), pages, jnp.int32)
        kept = jnp.zeros(shape, jnp.int32)
        start, own, length = (jnp.zeros(shape[1], jnp.int32) for _ in range(3))
        return cls(
            k,
            v,
            free,
            table,
            kept,
            start=start,
            own=own,
            length=length,
            scored=of_scores if scored else None,
            window_pages=widths.window,
        )

    @property
    def page_size(self) -> int:
        """Tokens of a page, b."""
        return self.k.shape[-2]

    @property
    def num_pages(self) -> int:
        """Pages of the pool of a device, P."""
        return self.k.shape[-3]

    @property
    def columns(self) -> int:
        """Entries of the table for pages of kept tokens."""
        return self.pages.shape[-1] - self.window_pages

    @property
    def widths(self) -> Widths:
        """Entries of the tables."""
        return Widths(self.columns, self.window_pages, 0 if self.scored is None else self.scored.pages.shape[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, on all devices together."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.k, self.v)))

    def of_layer(
        self, layer: int | Array, start: Int[Array, " R"] | None = None, *, sliced: bool = True
    ) -> tuple[Pages, ...]:
        """Operands of paged attention: the rows' tokens, and means of evicted tokens.

        Arrays are those of the layer, copies, or if not `sliced` those of all layers.
        """
        start = self.start if start is None else start
        part = runtime_number(layer)
        most = start + self.window_pages * self.page_size  # the queries' positions say where rows end
        table, kept = (x.reshape(-1, *x.shape[2:]) for x in (self.pages, self.kept))
        found = [Pages(self.k, self.v, table, kept, start, most, self.columns, part=part)]
        if (scored := self.scored) is not None and (columns := scored.pages.shape[-1]):
            none = jnp.zeros_like(start)
            blocks = jnp.broadcast_to((start // self.page_size)[:, None], self.kept.shape).reshape(kept.shape)
            table, bias = (x.reshape(-1, *x.shape[2:]) for x in (scored.pages, scored.bias))
            found.append(Pages(self.k, self.v, table, blocks, none, none, columns, bias, part))
        return tuple(pages.sliced() if sliced else pages for pages in found)

    def with_prompts(
        self,
        layer: int | Array,
        row: int | Array,  # the first of their rows
        kept: CompactTokens | None,  # selected tokens; regions are whole pages. None: all tokens fit in the window
        k: Float[Array, "B L H d"],
        v: Float[Array, "B L H d"],
        lengths: Int[Array, " B"],
        most: Int[Array, " B"],  # tokens that the rows will have
        scores: Float32[Array, "B H L"] | None = None,
        means: BlockMeans | None = None,
        raised: Bool[Array, " B"] | None = None,  # see `Scored`
    ) -> Rows:
        """Writes a layer of prompts into pages of rows: the selected tokens, the window, and the means."""
        b, (batch, _, heads, _), none = self.page_size, k.shape, self.num_pages
        start = jnp.zeros_like(lengths) if kept is None else jnp.maximum((lengths // b - self.window_pages + 1) * b, 0)
        held, free = jnp.zeros((batch, heads), jnp.int32), self.free
        kept_pages = jnp.full((batch, heads, self.columns), none, jnp.int32)
        writes: list[tuple[Array, ...]] = []  # page numbers, and keys and values [n, b, d]
        if kept is not None and self.columns:
            fillable = min(self.columns, cdiv(k.shape[1], b))
            numbers, free = free.take(-(-kept.lengths // b), fillable, none)
            room = (numbers < none).sum(axis=-1, dtype=jnp.int32) * b
            held = jnp.minimum(kept.lengths, room).astype(jnp.int32)
            source = (kept.offsets // b)[..., None] + jnp.arange(fillable)
            compact = [x.reshape(-1, b, x.shape[-1]).at[source].get(mode="clip") for x in (kept.k, kept.v)]
            writes.append((numbers, *compact))
            kept_pages = kept_pages.at[..., :fillable].set(numbers)
        window = min(self.window_pages, cdiv(k.shape[1], b))  # pages that a prompt can fill
        counts = jnp.minimum(self.window_pages, -(-(most - start) // b))
        of_window, free = self._window_of(free, jnp.arange(self.window_pages) < counts[:, None], heads)
        place = start[:, None] + jnp.arange(window * b)
        index = jnp.minimum(place, k.shape[1] - 1)[..., None, None]
        writes.append((of_window[..., :window], *(_as_pages(_take(x, index, axis=1), b) for x in (k, v))))
        scored = self.scored
        if scored is not None and scores is not None:
            found = _take(scores, index[..., 0].swapaxes(1, 2), axis=2)
            found = jnp.where((place < lengths[:, None])[:, None], found, -jnp.inf)
            free_slots = scored.scores.shape[-1] - window * b
            found = jnp.pad(found, ((0, 0), (0, 0), (0, free_slots)), constant_values=-jnp.inf)
            scored = scored._replace(scores=_put(scored.scores, found, layer, row))
        if scored is not None and raised is not None:
            scored = scored._replace(raised=_put(scored.raised, raised, layer, row))
        if scored is not None and means is not None:
            columns, blocks = scored.pages.shape[-1], start // b
            rest = (0, columns * b - means.bias.shape[-1])
            number, free = free.take(jnp.repeat(-(-blocks // b)[:, None], heads, axis=1), columns, none)
            all_means = (jnp.pad(x, ((0, 0), rest, (0, 0), (0, 0))) for x in (means.k, means.v))
            writes.append((number, *(_as_pages(x, b) for x in all_means)))
            bias = jnp.pad(jnp.maximum(means.bias, MASKED), ((0, 0), (0, 0), rest), constant_values=MASKED)
            bias = jnp.where(jnp.arange(columns * b) < blocks[:, None, None], bias, MASKED)
            bias = _put(scored.bias, bias, layer, row)
            scored = scored._replace(pages=_put(scored.pages, number, layer, row), bias=bias)
        pools = self.k, self.v
        for numbers, *values in writes:
            flat = numbers.reshape(-1)
            flat = jnp.where(flat < none, flat, none + jnp.arange(len(flat)))  # none twice: a faster scatter
            new = tuple(encode(x.reshape(len(flat), b, -1), self.k) for x in values)
            pools = jax.tree.map(lambda x, y, at=flat: x.at[at].set(y, mode="drop", unique_indices=True), pools, new)
        table = jnp.concatenate([kept_pages, of_window], axis=-1)
        return dataclasses.replace(
            self,
            k=pools[0],
            v=pools[1],
            free=free,
            pages=_put(self.pages, table, layer, row),
            kept=_put(self.kept, held, layer, row),
            start=_put(self.start, start, row),
            own=_put(self.own, jnp.zeros_like(start), row),
            length=_put(self.length, lengths, row),
            scored=scored,
        )

    def _window_of(
        self, free: FreePages, wanted: Bool[Array, "*s C"], heads: int
    ) -> tuple[Int32[Array, "*s H C"], FreePages]:
        """Pages for columns of the window, those of a column side by side."""
        numbers, free = free.take(jnp.where(wanted, heads, 0), heads, self.num_pages)
        return numbers.swapaxes(-1, -2), free

    def with_tokens(
        self,
        layer: int | Array,
        k: Float[Array, "R m H d"],
        v: Float[Array, "R m H d"],
        positions: Int[Array, "R m"],  # of one block each row
        new: Bool[Array, "R m"] | None,  # columns that are tokens; None for all
        start: Int[Array, " R"],  # of the windows
        scores: Float32[Array, "R m H"] | None = None,
    ) -> Rows:
        """Writes tokens of each row to its window."""
        b, rows, layer = self.page_size, jnp.arange(len(start)), runtime_number(layer)
        column = jnp.clip((positions[:, 0] - start) // b, 0, self.window_pages - 1)
        if len(start) == 1:  # a slice is computed where it is used; a gather is a kernel of its own
            table = _of_layer(self.pages, layer)
            numbers = jax.lax.dynamic_index_in_dim(table, self.columns + column[0], axis=-1, keepdims=False)
        else:
            numbers = self.pages[layer, rows, :, self.columns + column]  # [R, H]
        slots = positions % b
        if positions.shape == (1, 1) and new is None and self.in_runs:
            # A scatter would be a slower kernel, and look whether it is out of bounds.
            def put(pool: Array, x: Array) -> Array:
                return _put(pool, x.swapaxes(1, 2)[0], numbers[0, 0], slots[0, 0])

        else:
            slots = slots if new is None else jnp.where(new, slots, b)  # out of bounds: dropped

            def put(pool: Array, x: Array) -> Array:
                return pool.at[numbers[:, None], slots[..., None]].set(x, mode="drop")

        pools = jax.tree.map(put, (self.k, self.v), tuple(encode(x, self.k) for x in (k, v)))
        scored = self.scored
        if scored is not None and scores is not None:
            place = jnp.where(slots < b, column[:, None] * b + slots, scored.scores.shape[-1])
            scored = scored._replace(scores=scored.scores.at[layer, rows[:, None], :, place].set(scores, mode="drop"))
        return dataclasses.replace(self, k=pools[0], v=pools[1], scored=scored)

    def with_scores(
        self,
        scores: Float32[Array, "layers R H"],  # of a token of each row
        positions: Int[Array, " R"],
        new: Bool[Array, " R"],  # rows that have one
        start: Int[Array, " R"],
    ) -> Rows:
        """Notes the scores of tokens of all layers at once: nothing reads them before a block leaves."""
        scored: Any = self.scored
        place = jnp.where(new, positions - start, scored.scores.shape[-1])
        filled = scored.scores.at[:, jnp.arange(len(start)), :, place].set(scores.swapaxes(0, 1), mode="drop")
        return dataclasses.replace(self, scored=scored._replace(scores=filled))

    def leaving_keys(self, layer: int | Array, dtype: Any) -> Array:
        """Keys [R, H, b, d] of the window's oldest block."""
        return decode(_read_first(self.k, _of_layer(self.pages, runtime_number(layer))[..., self.columns]), dtype)

    def evict(
        self,
        layer: int | Array | None,  # None for all layers at once
        leaving: Bool[Array, " R"],  # rows whose oldest block leaves the window
        chosen: Bool[Array, "*layers R H b"],  # its tokens that stay
        start: Int[Array, " R"],  # first positions of that block
    ) -> Rows:
        """Keeps the chosen tokens of the oldest block, and means of others; its page serves the next block.

        The caller moves `start`, which all layers share.
        """
        b, none, columns, layer = self.page_size, self.num_pages, self.columns, runtime_number(layer)
        table, kept, free = _of_layer(self.pages, layer), _of_layer(self.kept, layer), self.free
        oldest, out, stays = table[..., columns], leaving[:, None], leaving[:, None, None] & chosen
        pools, had = (self.k, self.v), -(-kept // b)
        blocks = _read_first(pools, oldest)
        kept_pages = table[..., :columns]
        if columns:
            counts = stays.sum(axis=-1, dtype=jnp.int32)
            needs = jnp.minimum(-(-(kept + counts) // b), columns)
            more, free = free.take(needs - had, 1, none)
            here = (jnp.arange(columns) == had[..., None]) & (needs > had)[..., None]
            kept_pages = jnp.where(here, more, kept_pages)
            room = (kept_pages < none).sum(axis=-1, dtype=jnp.int32) * b
            place = kept[..., None] + jnp.cumsum(stays, axis=-1) - 1  # among the kept tokens
            target = _take(kept_pages, jnp.clip(place // b, 0, columns - 1), axis=-1)
            target = jnp.where(stays & (place < room[..., None]), target, none)
            target, slots = jax.lax.optimization_barrier((target, place % b))  # else summed again for every number
            pools = jax.tree.map(lambda x, new: x.at[target, slots].set(new, mode="drop"), pools, blocks)
            kept = jnp.minimum(kept + counts, jnp.maximum(room, kept))
        scored = self.scored
        if scored is not None:
            number, columns_of_means = start // b, scored.pages.shape[-1]  # of the block
            scores, bias = _of_layer(scored.scores, layer), _of_layer(scored.bias, layer)
            if columns_of_means:
                opens = out & (number % b == 0)[:, None]
                fresh, free = free.take(jnp.broadcast_to(opens, oldest.shape).astype(jnp.int32), 1, none)
                column = (number // b)[:, None, None]
                here = (jnp.arange(columns_of_means) == column) & opens[..., None]
                mean_pages = jnp.where(here, fresh, _of_layer(scored.pages, layer))
                weights = jax.nn.softmax(jnp.where(stays, MASKED, scores[..., :b]), axis=-1) * ~stays
                entropy = jnp.where((~stays).any(axis=-1), jax.scipy.special.entr(weights).sum(axis=-1), MASKED)
                own = jnp.take_along_axis(mean_pages, jnp.broadcast_to(column, (*oldest.shape, 1)), axis=-1)[..., 0]
                own = jnp.where(out, own, none)
                slot = jnp.broadcast_to((number % b)[:, None], own.shape)
                means = (jnp.einsum("...b,...bd->...d", weights, decode(block, jnp.float32)) for block in blocks)
                new = tuple(encode(mean, self.k) for mean in means)
                pools = jax.tree.map(lambda x, y: x.at[own, slot].set(y, mode="drop"), pools, new)
                its = out[..., None] & (jnp.arange(columns_of_means * b) == number[:, None, None])
                bias = _put(scored.bias, jnp.where(its, entropy[..., None], bias), layer)
                scored = scored._replace(pages=_put(scored.pages, mean_pages, layer), bias=bias)
            shifted = jnp.concatenate([scores[..., b:], jnp.full_like(scores[..., :b], -jnp.inf)], axis=-1)
            scored = scored._replace(scores=_put(scored.scores, jnp.where(out[..., None], shifted, scores), layer))
        window, shared = table[..., columns:], out & (start < self.own)[:, None]
        fresh, free = free.take(jnp.broadcast_to(shared, oldest.shape).astype(jnp.int32), 1, none)
        fresh = jnp.where(shared[..., None], fresh, oldest[..., None])
        window = jnp.where(out[..., None], jnp.concatenate([window[..., 1:], fresh], axis=-1), window)
        (k, v), table = pools, jnp.concatenate([kept_pages, window], axis=-1)
        pages, kept = _put(self.pages, table, layer), _put(self.kept, kept, layer)
        return dataclasses.replace(self, k=k, v=v, free=free, pages=pages, kept=kept, scored=scored)

    def are_full(self, positions: Int[Array, " R"], start: Int[Array, " R"]) -> Bool[Array, " R"]:
        """Rows whose oldest block leaves before a token at this position."""
        return positions - start >= self.window_pages * self.page_size

    def with_pages(self, more: int) -> Rows:
        """The same rows in a pool of `more` pages more, which are free; pages that were free before are not used."""
        old, pages = self.num_pages, self.num_pages + more

        def wider(pool: Stored) -> Stored:
            return jax.tree.map(lambda x: jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1))), pool)

        def named(table: Array) -> Array:
            return jnp.where(table < old, table, pages)

        scored = None if self.scored is None else self.scored._replace(pages=named(self.scored.pages))
        free = FreePages(jnp.arange(pages, dtype=jnp.int32), jnp.int32(old))
        changed: dict[str, Any] = {"k": wider(self.k), "v": wider(self.v), "pages": named(self.pages)}
        return dataclasses.replace(self, **changed, free=free, scored=scored)

    def with_widths(self, widths: Widths) -> Rows:
        """The same rows, on the host or on devices, under tables of at least these numbers of entries."""
        on: Any = np if isinstance(self.pages, np.ndarray) else jnp
        more = Widths(*(max(0, wanted - own) for wanted, own in zip(widths, self.widths, strict=True)))

        def wider(x: Any, count: int, fill: float) -> Any:
            return on.pad(x, (*((0, 0),) * (x.ndim - 1), (0, count)), constant_values=fill)

        none, b, scored = self.num_pages, self.page_size, self.scored
        kept, window = self.pages[..., : self.columns], self.pages[..., self.columns :]
        pages = on.concatenate([wider(kept, more.kept, none), wider(window, more.window, none)], axis=-1)
        if scored is not None:
            scores, of_means = wider(scored.scores, more.window * b, -np.inf), wider(scored.pages, more.means, none)
            scored = Scored(scores, of_means, wider(scored.bias, more.means * b, MASKED), scored.raised)
        return dataclasses.replace(self, pages=pages, scored=scored, window_pages=self.window_pages + more.window)

    def forked(self, source: Int[Array, " N"], most: Int[Array, " N"]) -> Rows:
        """Rows that continue the rows `source` up to `most` tokens: they share full pages and copy the others."""
        b, none, free = self.page_size, self.num_pages, self.free
        pages, kept, scored = jax.tree.map(lambda x: x[:, source], (self.pages, self.kept, self.scored))
        start, length = self.start[source], self.length[source]
        rows = dataclasses.replace(self, kept=kept, start=start, own=length // b * b, length=length)
        copies: list[tuple[Array, Array]] = []

        def copied(table: Array, column: Array, begun: Array) -> Array:
            """A table with a page of its own where one is begun in a column."""
            nonlocal free
            number, free = free.take(begun.astype(jnp.int32), 1, none)
            here = (jnp.arange(table.shape[-1]) == column[..., None]) & begun[..., None]
            copies.append((jnp.where(here, table, 0).sum(axis=-1), jnp.where(begun, number[..., 0], none)))
            return jnp.where(here, number, table)

        kept_pages, window = jnp.split(pages, [self.columns], axis=-1)
        if self.columns:
            kept_pages = copied(kept_pages, kept // b, kept % b > 0)
        last = jnp.broadcast_to(((length - start) // b)[:, None], kept.shape)
        column = jnp.arange(self.window_pages)
        window = jnp.where(column <= last[..., None], window, none)  # pages without tokens are not shared
        window = copied(window, last, jnp.broadcast_to((length % b > 0)[:, None], kept.shape))
        window = jnp.where((column == last[..., None]) & (length % b == 0)[:, None, None], none, window)
        needed = jnp.minimum(self.window_pages, -(-(most - start) // b))[:, None, None]
        missing = (column < needed) & (window == none)  # the same for all heads
        more, free = self._window_of(free, missing[:, :, 0], missing.shape[2])
        window = jnp.where(missing, more, window)
        if scored is not None and scored.pages.shape[-1]:
            blocks = jnp.broadcast_to((start // b)[:, None], kept.shape)
            scored = scored._replace(pages=copied(scored.pages, blocks // b, blocks % b > 0))
        old, new = (jnp.concatenate([x.ravel() for x in each]) for each in zip(*copies, strict=True))
        pools, pages = (self.k, self.v), jnp.concatenate([kept_pages, window], axis=-1)
        k, v = jax.tree.map(lambda x, begun: x.at[new].set(begun, mode="drop"), pools, _read_first(pools, old))
        return dataclasses.replace(rows, k=k, v=v, free=free, pages=pages, scored=scored)

    def row(self, number: Int[Array, ""]) -> Rows:
        """A row of a table without pool, as a table of its own."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number, 1, axis=min(1, x.ndim - 1)), self)

    def with_row(self, one: Rows, number: Int[Array, ""]) -> Rows:
        """A table without pool, with a row of another one."""
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=number)
        return jax.tree.map(lambda old, x: put(old, x, axis=min(1, x.ndim - 1)), self, one)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that tables name, each counted once, on all devices together."""
        tables = on_host([self.pages] if self.scored is None else [self.pages, self.scored.pages])
        places = list(np.ndindex(*self.start.shape[:-1]))  # devices of a mesh
        named = [np.unique(np.concatenate([table[i].ravel() for table in tables])) for i in places]
        used = sum(int((numbers < self.num_pages).sum()) for numbers in named)
        return used * (self.num_bytes // (self.num_pages * len(places)))

    def kept_share(self, fed: np.ndarray) -> float:
        """Tokens in pages over tokens `fed` to each row, mean over rows, layers and KV heads."""
        kept, start = on_host((self.kept, self.start))
        if kept.ndim > 3:  # of the devices of a mesh: on "data", on "model", which agree on the start
            of_rows, start = kept.mean(axis=(1, 2, 4)).reshape(-1), start[:, 0].reshape(-1)
        else:
            of_rows = kept.mean(axis=(0, 2))
        return float(np.mean((of_rows + fed - start) / fed))

    def named_pages(self, live: Bool[Array, " R"] | None = None) -> Bool[Array, " P1"]:
        """Pages that tables name, of all rows or of `live` ones; the last entry is none."""
        named = jnp.zeros(self.num_pages + 1, bool)
        for table in [self.pages] if self.scored is None else [self.pages, self.scored.pages]:
            own = table if live is None else jnp.where(live[:, None, None], table, self.num_pages)
            named = named.at[own].set(True)
        return named

    def compacted(self, pages: int) -> Rows:
        """The same rows in a pool of `pages`: those that tables name, at most `pages` of them."""
        named = self.named_pages()
        source = jnp.flatnonzero(named[:-1], size=pages, fill_value=0)
        number = jnp.where(named, jnp.cumsum(named) - 1, pages).at[-1].set(pages).astype(jnp.int32)
        k, v = jax.tree.map(lambda x: x[source], (self.k, self.v))
        scored = None if self.scored is None else self.scored._replace(pages=number[self.scored.pages])
        free = FreePages(jnp.zeros(0, jnp.int32), jnp.int32(0))
        return dataclasses.replace(self, k=k, v=v, free=free, pages=number[self.pages], scored=scored)


#: Fields that a pool alone lacks, and a table alone.
NO_TABLE: Any = dict.fromkeys(("free", "pages", "kept", "start", "own", "length", "scored")) | {"window_pages": 0}
NO_POOL: Any = {"k": None, "v": None}


def renumbered(table: Rows, lookups: Sequence[np.ndarray] | np.ndarray) -> Rows:
    """A table of the host with other numbers, on each device: its own are places in a lookup, later ones the last."""

    def changed(x: Any) -> Any:
        devices = zip(lookups, x.reshape(len(lookups), -1), strict=True)
        return np.stack([new[np.minimum(old, len(new) - 1)] for new, old in devices]).reshape(x.shape)

    scored = None if table.scored is None else table.scored._replace(pages=changed(table.scored.pages))
    return dataclasses.replace(table, pages=changed(table.pages), scored=scored)


def bare(table: Rows) -> Rows:
    """A table alone: without pool and free pages."""
    return dataclasses.replace(table, **NO_POOL, free=None)  # type: ignore[arg-type]


def row_of(table: Rows, row: int) -> Rows:
    lead = table.start.ndim - 1
    return jax.tree.map(lambda x: np.take(x, [row], axis=lead + min(1, x.ndim - lead - 1)), table)


def runtime_number(layer: int | Array | None) -> Any:
    """A layer's number that XLA does not build into kernels, so that those of one layer serve all; None of None."""
    return None if layer is None else jax.lax.optimization_barrier(jnp.asarray(layer, jnp.int32))


def _of_layer(x: Array, layer: int | Array | None) -> Array:
    return x if layer is None else jax.lax.dynamic_index_in_dim(x, layer, keepdims=False, allow_negative_indices=False)


def _put(x: Array, new: Array, *place: Any) -> Array:
    """`x` with new entries from a place on; from None, all are new."""
    if place[0] is None:
        return new.astype(x.dtype)
    new = new.astype(x.dtype).reshape(*(1,) * (x.ndim - new.ndim), *new.shape)
    place = *(jnp.asarray(p, jnp.int32) for p in place), *(jnp.int32(0),) * (x.ndim - len(place))  # one type with x64
    return jax.lax.dynamic_update_slice(x, new, place, allow_negative_indices=False)


def _read_first(pool: Any, numbers: Array) -> Any:
    """Pages, read by a kernel of its own: on a mesh, XLA would copy a pool that one kernel reads and writes."""
    return jax.lax.optimization_barrier(jax.tree.map(lambda x: x.at[numbers].get(mode="clip"), pool))


def _as_pages(x: Float[Array, "B n H d"], b: int) -> Float[Array, "B H pages b d"]:
    batch, _, heads, width = x.shape
    return x.swapaxes(1, 2).reshape(batch, heads, -1, b, width)
