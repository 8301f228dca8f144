"""The KV cache in pages: a pool of pages for all layers, and for each row and KV head a table of those that it uses.

A page is a block of b tokens of one KV head. What a head keeps lies in pages of its own, so heads with different
budgets cost what they keep; the window lies in pages that serve it in turn. Shapes are planned before anything is
compiled. Rows that continue from the same tokens share their pages: what follows lies in a second cache, in which each
row has its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tca_jax.engine.mesh import HeadShards, PerDevice, part_of_device
from tca_jax.errors import require
from tca_jax.methods.base import CachePolicy, num_ranked_blocks, per_head
from tca_jax.methods.regions import Regions
from tca_jax.pallas_kernels.kv import CODES, REGION_ALIGNMENT, Pages, Pool, Stored, decode, empty, encode, num_bytes
from tca_jax.pallas_kernels.numerics import cdiv, round_up


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Static shape of a cache, on each device of a mesh.

    In the pool the pages of windows come first, by layer, row, page of the window and KV head; then those of kept
    tokens, by layer, row and KV head.
    """

    block_size: int  # tokens in a block and in a page, b
    window: int  # least number of local tokens, w, a multiple of b
    batch: int  # rows, B
    # Pages of kept tokens, `[layers][devices][H_kv]`, H_kv the KV heads of a device.
    kept_pages: tuple[tuple[tuple[int, ...], ...], ...]
    window_columns: int  # most blocks from the first in a row's window to the last that is ever fed
    prompt_tokens: int  # padded length of the prompts, L
    # Pages of kept tokens that the KV heads of a row share, and how many each head adds to them, where the prompt says
    # how many a head has (`kept_pages` is then the most that it may have): for each layer, or one entry for all layers
    # together. Empty where each head has its own.
    shared_pages: tuple[tuple[int, int], ...] = ()

    @classmethod
    def plan(
        cls,
        policy: CachePolicy,
        num_layers: int,  # layers of the model
        num_kv_heads: int,  # KV heads of the model
        batch: int,  # prompts, B; of a device
        prompt_tokens: int,  # padded prompt length, L
        fed_tokens: int,  # most tokens that are fed behind a prompt
        shards: HeadShards | None = None,  # how the heads are dealt out over a mesh; None on one device
    ) -> CacheLayout:
        """The cache of prompts and of the tokens that follow them.

        Raises:
            ValueError: the policy names no capacity for each KV head.
        """

        def kept(layer: int) -> Int[np.ndarray, " Hkv"]:
            return kept_of_prompt(policy, layer, prompt_tokens, num_kv_heads) + kept_behind(
                policy, layer, prompt_tokens, fed_tokens, num_kv_heads
            )

        b, w = policy.block_size, policy.window
        columns = min(cdiv(prompt_tokens + fed_tokens, b), w // b + 1 + cdiv(fed_tokens, b))
        region = math.lcm(REGION_ALIGNMENT, b)  # a selection comes in such pieces
        pages = tuple(_pages_by_device(kept(layer), b, region, shards, layer) for layer in range(num_layers))
        budgets = policy.shared_capacities(prompt_tokens, num_layers, num_kv_heads) or ()
        shared, together = [], num_layers // max(1, len(budgets))  # layers that share a budget
        for pool, most in enumerate(budgets):  # each head rounds up what it keeps of the prompt
            behind = max(
                kept_behind(policy, layer, prompt_tokens, fed_tokens, num_kv_heads).max()
                for layer in range(pool * together, (pool + 1) * together)
            )
            shared.append((round_up(most, region) // b, (region + round_up(int(behind), b)) // b))
        return cls(b, w, batch, pages, columns, prompt_tokens, tuple(shared))

    @classmethod
    def plan_following(
        cls,
        policy: CachePolicy,
        num_layers: int,
        num_kv_heads: int,
        batch: int,
        prompt_tokens: int,
        fed_tokens: int,
        shards: HeadShards | None = None,
    ) -> CacheLayout:
        """The cache of tokens that follow those of another cache; arguments are those of `plan`."""
        b = policy.block_size
        pages = tuple(
            _pages_by_device(kept_behind(policy, layer, prompt_tokens, fed_tokens, num_kv_heads), b, b, shards, layer)
            for layer in range(num_layers)
        )
        # All but one token of the first block may have been there before.
        return cls(b, policy.window, batch, pages, max(1, cdiv(b - 1 + fed_tokens, b)), prompt_tokens)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.kept_pages)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a device, H_kv."""
        return len(self.kept_pages[0][0])

    @property
    def num_window_pages(self) -> int:
        """Pages of a row's window in each layer and KV head, which serve it in turn."""
        return min(self.window // self.block_size + 1, self.window_columns)

    @property
    def kept_columns(self) -> tuple[int, ...]:
        """Entries of each layer's tables for pages of kept tokens: as many as any head has, on any device."""
        return tuple(max(map(max, of_layer)) for of_layer in self.kept_pages)

    @property
    def has_ranked_blocks(self) -> bool:
        """Whether a prompt of this shape can have ranked blocks; otherwise it fits its window."""
        return num_ranked_blocks(self.prompt_tokens, self.block_size, self.window) > 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool, as many as the device needs that needs most."""
        kept = int(self._row_pages.sum(axis=1).max())
        return self.batch * (self.num_layers * self.num_kv_heads * self.num_window_pages + kept)

    @property
    def pool_layers(self) -> int:
        """Adjacent layers that share one range of pages for kept tokens; 1 without sharing."""
        return self.num_layers // len(self.shared_pages) if self.shared_pages else 1

    @functools.cached_property
    def _row_pages(self) -> Int[np.ndarray, "devices pools"]:
        """Pages of kept tokens of a row on each device, by the layers that share them."""
        own = np.asarray(self.kept_pages, np.int32).sum(axis=2).T
        pools = own.reshape(len(own), -1, self.pool_layers).sum(axis=2)
        return np.minimum(pools, [self.shared_by_row(pool) for pool in range(pools.shape[1])])

    def shared_by_row(self, pool: int) -> int:
        """Most pages that the heads of a row and device share, in the layers of an entry of `shared_pages`."""
        together, of_head = self.shared_pages[pool] if self.shared_pages else (2**31 - 1, 0)
        return together + of_head * self.num_kv_heads * self.pool_layers

    def num_bytes(self, head_dim: int, dtype: Any) -> int:
        """Bytes of keys and values together, on a device."""
        return 2 * num_bytes(self.num_pages * self.block_size, head_dim, dtype)

    def regions(self, layer: int | None) -> Regions:
        """Where a selection puts a layer's kept tokens on their way to the pages: as large on all devices.

        None: as large for all layers.
        """
        pages = np.asarray(self.kept_pages if layer is None else self.kept_pages[layer])
        widest = pages.reshape(-1, pages.shape[-1]).max(axis=0) * self.block_size
        layer = layer or 0
        shared = self.shared_by_row(layer // self.pool_layers) * self.block_size if self.shared_pages else None
        return Regions.plan(self.batch, widest.tolist(), self.block_size, shared)

    def tables(
        self, device: int | None = None, held: Sequence[Int[Array, "B Hkv"]] | None = None
    ) -> tuple[Int[Array, "B Hkv T"], ...]:
        """Each layer's page numbers, `num_pages` for no page."""
        if held is None:
            held = [jnp.zeros((self.batch, self.num_kv_heads), jnp.int32)] * self.num_layers
        return tuple(
            jnp.concatenate([self.kept_table(layer, held, device), self._window_table(layer)], axis=-1)
            for layer in range(self.num_layers)
        )

    def kept_table(
        self, layer: int, held: Sequence[Int[Array, "B Hkv"]], device: int | None = None
    ) -> Int[Array, "B Hkv C"]:
        """The part of a layer's table that names the pages of kept tokens; see `tables`.

        Of `held` only the layers count that share their pages with this one.
        """
        column, rows = jnp.arange(self.kept_columns[layer], dtype=jnp.int32), np.arange(self.batch)
        pool, place = divmod(layer, self.pool_layers)
        in_pool, before = self._row_pages[:, pool], self._row_pages[:, :pool].sum(axis=1)
        starts = self.batch * before[:, None] + rows * in_pool[:, None]  # [devices, B]
        starts = (starts + self.batch * self.num_layers * self.num_kv_heads * self.num_window_pages).astype(np.int32)
        layers = slice(layer - place, layer - place + self.pool_layers)
        most = np.concatenate(np.asarray(self.kept_pages[layers], np.int32), axis=1)  # [devices, heads of the layers]
        if len(starts) == 1:
            device = 0
        if not self.shared_pages:
            firsts = starts[..., None] + (most.cumsum(axis=1, dtype=np.int32) - most)[:, None]
            first, pages = (part_of_device(x) if device is None else jnp.asarray(x[device]) for x in (firsts, most))
            return jnp.where(column < pages[:, None], first[..., None] + column, self.num_pages)
        of_devices = starts, most, in_pool
        start, each, whole = (part_of_device(x) if device is None else jnp.asarray(x[device]) for x in of_devices)
        ends = self._divided(jnp.concatenate(held[layers], axis=1), each, whole)
        pages = jnp.diff(ends, axis=-1, prepend=0)
        first = start[:, None] + ends - pages
        own = slice(place * self.num_kv_heads, (place + 1) * self.num_kv_heads)
        return jnp.where(column < pages[:, own, None], first[:, own, None] + column, self.num_pages)

    def _divided(self, held: Int[Array, "B H"], most: Int[Array, " H"], whole: Int[Array, ""]) -> Int[Array, "B H"]:
        """End of each head's pages among those of its row: the pages it needs, and an even part of the spare ones."""
        needed = -(-held // self.block_size)
        spare = jnp.maximum(whole - needed.sum(axis=-1, keepdims=True, dtype=jnp.int32), 0)
        pages = jnp.minimum(needed + spare // held.shape[1], most)
        return jnp.minimum(jnp.cumsum(pages, axis=-1, dtype=jnp.int32), whole)

    def _window_table(self, layer: int) -> Int[Array, "B Hkv T2"]:
        """The part of a layer's table that names the pages of windows."""
        turn = jnp.arange(self.window_columns, dtype=jnp.int32) % self.num_window_pages
        row = jnp.arange(self.batch, dtype=jnp.int32)[:, None, None]
        head = jnp.arange(self.num_kv_heads, dtype=jnp.int32)[:, None]
        return ((layer * self.batch + row) * self.num_window_pages + turn) * self.num_kv_heads + head

    def window_start(self, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        """First position in the window of the last query of prompts with these lengths."""
        return jnp.maximum((lengths - 1) // self.block_size * self.block_size - self.window, 0)

    def empty(
        self, head_dim: int, dtype: Any, starts: Int[Array, " B"], held: Sequence[Int[Array, "B Hkv"]] | None = None
    ) -> PagedCache:
        """A cache without tokens, in eight bits if `dtype` is e4m3; windows begin with the blocks of `starts`.

        `held` is what heads will keep, as in `tables`.
        """
        k, v = (empty((self.num_pages, self.block_size, head_dim), dtype) for _ in range(2))
        nothing = tuple(jnp.zeros((self.batch, self.num_kv_heads), jnp.int32) for _ in range(self.num_layers))
        starts = starts // self.block_size * self.block_size
        ends = starts + self.window_columns * self.block_size
        return PagedCache(k, v, self.tables(held=held), nothing, starts, ends, self.kept_columns)


def kept_of_prompt(policy: CachePolicy, layer: int, tokens: int, num_kv_heads: int) -> Int[np.ndarray, " Hkv"]:
    """Most tokens that each of the model's KV heads keeps of a prompt's ranked blocks."""
    source = f"{type(policy).__name__}.capacities({layer}, {tokens})"
    return np.asarray(per_head(policy.capacities(layer, tokens), num_kv_heads, source))


def kept_behind(
    policy: CachePolicy, layer: int, prompt_tokens: int, fed_tokens: int, num_kv_heads: int
) -> Int[np.ndarray, " Hkv"]:
    """Most tokens that each of the model's KV heads keeps of the blocks that leave while tokens are fed."""
    source = f"{type(policy).__name__}.growth({layer}, {prompt_tokens}, {fed_tokens})"
    return np.asarray(per_head(policy.growth(layer, prompt_tokens, fed_tokens), num_kv_heads, source))


def _pages_by_device(
    tokens: Int[np.ndarray, " Hkv"], block_size: int, multiple: int, shards: HeadShards | None, layer: int
) -> tuple[tuple[int, ...], ...]:
    """Pages that hold `tokens` of each KV head, rounded up to a multiple, `[devices][Hkv]`."""
    pages = -(-tokens // multiple) * multiple // block_size
    by_device = pages[None] if shards is None else shards.by_device(layer, pages)
    return tuple(map(tuple, by_device.tolist()))


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "tables", "kept", "start", "end"],
    meta_fields=["kept_columns"],
)
@dataclasses.dataclass(frozen=True)
class PagedCache(PerDevice):
    """Keys and values of all layers in one pool. A layer's queries attend to `pages(layer)`."""

    k: Stored  # Keys `[P, b, d]`; an array, or in eight bits
    v: Stored  # values `[P, b, d]`
    # Page numbers of each layer, int32 `[B, Hkv, T]`, as `Pages.table` has them; P for no page. The pages of a block of
    # the window lie side by side, in the order of the KV heads.
    tables: tuple[Int[Array, "B Hkv T"], ...]
    kept: tuple[Int[Array, "B Hkv"], ...]  # Kept tokens of each layer, int32 `[B, Hkv]`
    start: Int[Array, " B"]  # position of the window's first token, int32 `[B]`, a multiple of b
    # Position past the last that the window has pages for, int32 `[B]`; where what follows lies in a cache of its own
    # (`before`), past the last token that counts.
    end: Int[Array, " B"]
    kept_columns: tuple[int, ...]  # of each layer, see `Pages`; static

    @property
    def batch(self) -> int:
        """Rows, B."""
        return self.start.shape[-1]

    @property
    def block_size(self) -> int:
        """Tokens of a page, b."""
        return self.k.shape[-2]

    @property
    def num_pages(self) -> int:
        """Pages of the pool of a device, P."""
        return self.k.shape[-3]

    @property
    def head_dim(self) -> int:
        """Width of a key, d."""
        return self.k.shape[-1]

    @property
    def dtype(self) -> Any:
        """Dtype of stored keys and values."""
        return self.k.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, on all devices together."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.k, self.v)))

    def pages(self, layer: int) -> Pages:
        """The pages that a layer's queries attend to."""
        table, kept = self.tables[layer], self.kept[layer]
        return Pages(self.k, self.v, table, kept, self.start, self.end, self.kept_columns[layer])

    def window_pages(self, layer: int, blocks: Int[Array, " R"]) -> Int[Array, "R Hkv"]:
        """Pages of a block of each row's window, by its number; R / B adjacent entries belong to one row."""
        times = blocks.shape[0] // self.batch
        column = self.kept_columns[layer] + blocks - jnp.repeat(self.start // self.block_size, times)
        if blocks.shape[0] == 1:  # a slice is computed where it is used; a gather is a kernel of its own
            column = jnp.clip(column[0], 0, self.tables[layer].shape[-1] - 1)
            return jax.lax.dynamic_index_in_dim(self.tables[layer], column, axis=-1, keepdims=False)
        rows = jnp.arange(blocks.shape[0]) // times
        return self.tables[layer].at[rows, :, column].get(mode="clip")

    def window_block(
        self, layer: int, blocks: Int[Array, " R"], dtype: Any
    ) -> tuple[Float[Array, "R Hkv b d"], Float[Array, "R Hkv b d"]]:
        """Keys and values of a block of each row's window."""
        k, v = _at((self.k, self.v), self.window_pages(layer, blocks))
        return decode(k, dtype), decode(v, dtype)

    def with_prompt(
        self,
        layout: CacheLayout,  # the cache's
        layer: int,
        kept: Pool | None,  # what is kept left of the windows, in the layout's `regions`; None for nothing
        k: Float[Array, "B L Hkv d"],  # keys of whole prompts, of which the window takes its own; `v` the values
        v: Float[Array, "B L Hkv d"],
    ) -> PagedCache:
        """Writes a layer's part of prompts: the kept tokens and the window."""
        pools = [self._with_window(layer, pool, x, layout.num_window_pages) for pool, x in ((self.k, k), (self.v, v))]
        if kept is None or not self.kept_columns[layer]:
            return dataclasses.replace(self, k=pools[0], v=pools[1])
        if layout.shared_pages and layout.pool_layers == 1:  # else the tables were made for what all hold
            return self._with_divided_pages(layout, layer, kept.lengths)._with_selection(layer, kept, pools)
        return self._with_selection(layer, kept, pools)

    def _with_divided_pages(self, layout: CacheLayout, layer: int, held: Int[Array, "B Hkv"]) -> PagedCache:
        """Assigns a layer's pages by the number of kept tokens of each head."""
        window = self.tables[layer][..., self.kept_columns[layer] :]
        table = jnp.concatenate([layout.kept_table(layer, self._with_lengths(layer, held)), window], axis=-1)
        return dataclasses.replace(self, tables=(*self.tables[:layer], table, *self.tables[layer + 1 :]))

    def _with_selection(self, layer: int, kept: Pool, pools: list[Stored]) -> PagedCache:
        """Writes the kept tokens of prompts to these pools."""
        pages = [encode(x.reshape(-1, *self.k.shape[1:]), self.k) for x in (kept.k, kept.v)]
        numbers = self._pages_of_selection(layer, kept, pages[0].shape[0])
        pools = _with(pools, numbers, pages)
        table = self.tables[layer][..., : self.kept_columns[layer]]
        most = jnp.sum(table < self.num_pages, axis=-1, dtype=jnp.int32) * self.block_size
        lengths = self._with_lengths(layer, jnp.minimum(kept.lengths, most))
        return dataclasses.replace(self, k=pools[0], v=pools[1], kept=lengths)

    def _with_lengths(self, layer: int, lengths: Int[Array, "B Hkv"]) -> tuple[Int[Array, "B Hkv"], ...]:
        return (*self.kept[:layer], lengths, *self.kept[layer + 1 :])

    def _pages_of_selection(self, layer: int, kept: Pool, count: int) -> Int[Array, " n"]:
        """Where each page of a selection goes: past the pool where it holds nothing, or nothing of this device's."""
        first, b = kept.offsets.reshape(-1) // self.block_size, self.block_size
        page = jnp.arange(count, dtype=jnp.int32)
        region = jnp.searchsorted(first, page, side="right").astype(jnp.int32) - 1
        column, table = page - first[region], self.tables[layer][..., : self.kept_columns[layer]]
        number = table.reshape(-1, table.shape[-1]).at[region, column].get(mode="fill", fill_value=self.num_pages)
        return jnp.where(column * b < kept.lengths.reshape(-1)[region], number, self.num_pages)

    def _with_window(self, layer: int, pool: Stored, x: Float[Array, "B L Hkv d"], most: int) -> Stored:
        """Writes at most `most` last blocks of prompts; entries past a prompt's end are arbitrary but finite."""
        b, first, (batch, length, heads, head_dim) = self.block_size, self.kept_columns[layer], x.shape
        count = min(cdiv(length, b), most)
        if count * b < length:
            positions = jnp.minimum(self.start[:, None] + jnp.arange(count * b), length - 1)
            x = jnp.take_along_axis(x, positions[..., None, None], axis=1)
        else:  # the window begins where the prompts do
            x = jnp.pad(x, ((0, 0), (0, count * b - length), (0, 0), (0, 0)))
        pages = x.reshape(batch, count, b, heads, head_dim).swapaxes(2, 3)
        for row in range(batch):  # those of a row are a run
            run = encode(pages[row].reshape(-1, b, head_dim), pool)
            put = functools.partial(
                jax.lax.dynamic_update_slice_in_dim, start_index=self.tables[layer][row, 0, first], axis=0
            )
            pool = jax.tree.map(put, pool, run)
        return pool

    def with_tokens(
        self,
        layer: int,
        k: Float[Array, "B m Hkv d"],
        v: Float[Array, "B m Hkv d"],
        positions: Int[Array, "B m"],
        new: Bool[Array, "B m"] | None = None,
    ) -> PagedCache:
        """The cache with tokens of one block of each row written to its window; columns that are not `new` are not."""
        b = self.block_size
        pages, slots = self.window_pages(layer, positions[:, 0] // b), positions % b
        if new is None and positions.shape == (1, 1):
            # A scatter would read what is there, in case a place were out of bounds.
            def put(pool: Array, x: Array) -> Array:
                start = (pages[0, 0], slots[0, 0], 0)[: pool.ndim]
                return jax.lax.dynamic_update_slice(pool, x.swapaxes(1, 2)[0], start)

        else:
            slots = slots if new is None else jnp.where(new, slots, b)  # out of bounds: dropped

            def put(pool: Array, x: Array) -> Array:
                return pool.at[pages[:, None], slots[..., None]].set(x, mode="drop")

        pools = self.k, self.v
        k, v = jax.tree.map(put, pools, tuple(encode(x, self.k) for x in (k, v)))
        return dataclasses.replace(self, k=k, v=v)

    def with_kept(
        self,
        layer: int,
        chosen: Bool[Array, "B Hkv n"],
        k: Float[Array, "B Hkv n d"],
        v: Float[Array, "B Hkv n d"],
    ) -> PagedCache:
        """Appends the chosen tokens to the kept tokens of each head, as far as it has pages."""
        if not self.kept_columns[layer]:
            return self
        b, kept = self.block_size, self.kept[layer]
        slot = kept[..., None] + jnp.cumsum(chosen, axis=-1, dtype=jnp.int32) - 1
        table = self.tables[layer][..., : self.kept_columns[layer]]
        column = jnp.where(chosen, slot // b, table.shape[-1])
        pages = jnp.where(
            column < table.shape[-1], jnp.take_along_axis(table, column, axis=-1, mode="clip"), self.num_pages
        )
        kept = kept + jnp.sum(pages < self.num_pages, axis=-1, dtype=jnp.int32)
        pools = _with((self.k, self.v), (pages, slot % b), [encode(x, self.k) for x in (k, v)])
        return dataclasses.replace(self, k=pools[0], v=pools[1], kept=self._with_lengths(layer, kept))


def _at(pools: Any, index: Any) -> Any:
    """Entries of pools at an index."""
    return jax.tree.map(lambda pool: pool[index], pools)


def _with(pools: Sequence[Stored], index: Any, values: Sequence[Stored]) -> list[Stored]:
    """Pools with values there; those for places out of bounds are dropped."""
    return jax.tree.map(lambda pool, x: pool.at[index].set(x, mode="drop"), list(pools), list(values))


def shared_and_own(cache: PagedCache, layout: CacheLayout, lengths: Int[Array, " R"]) -> tuple[PagedCache, PagedCache]:
    """Forks a cache: rows share its pages, and each row gets a cache of its own for the tokens that follow.

    Returns:
        `cache` without what was copied, and the other one; see `continued`.
    """
    return continued(cache, layout.empty(cache.head_dim, cache.dtype, lengths))


def continued(cache: PagedCache, own: PagedCache) -> tuple[PagedCache, PagedCache]:
    """A cache, and an empty one that continues it.

    The last block of the window, which is not full, is copied: each row writes on in its own.
    """
    blocks, layers = own.start // cache.block_size, range(len(cache.tables))
    copied, to = (jnp.stack([x.window_pages(layer, blocks) for layer in layers]) for x in (cache, own))
    k, v = _with((own.k, own.v), to, _at([cache.k, cache.v], copied))
    return before(cache, own), dataclasses.replace(own, k=k, v=v)


def before(shared: PagedCache, own: PagedCache) -> PagedCache:
    """The shared cache up to the first token of the rows' own cache."""
    return dataclasses.replace(shared, end=own.start[:: own.batch // shared.batch])


def with_rows_repeated(cache: PagedCache, layout: CacheLayout) -> PagedCache:
    """A cache as often as a layout of the same sizes has more rows, copies side by side."""
    times = layout.batch // cache.batch
    out = layout.empty(cache.head_dim, cache.dtype, jnp.repeat(cache.start, times))
    k, v = out.k, out.v
    for to, source in zip(out.tables, cache.tables, strict=True):
        pages = jnp.repeat(source, times, axis=0)
        k, v = _with((k, v), to, _at([cache.k, cache.v], pages))
    kept = tuple(jnp.repeat(lengths, times, axis=0) for lengths in cache.kept)
    return dataclasses.replace(out, k=k, v=v, kept=kept)


def joined(shared: PagedCache, own: PagedCache, layout: CacheLayout, starts: Int[Array, " R"]) -> PagedCache:
    """One cache of all that two hold, as `shared_and_own` gave them; its windows begin with the blocks of `starts`.

    Each KV head must have at least as many pages for kept tokens as in `shared`, or share enough for all.
    """
    times = own.batch // shared.batch
    held = [jnp.repeat(s, times, axis=0) + o for s, o in zip(shared.kept, own.kept, strict=True)]
    out = layout.empty(own.head_dim, own.dtype, starts, held)
    layers = range(layout.num_layers)
    k, v = out.k, out.v
    for sharer in range(times):  # whole pages go where the same entries of the other tables say
        to = jnp.full(shared.num_pages, out.num_pages, jnp.int32)
        for layer in layers:
            columns = shared.kept_columns[layer]
            entries = out.tables[layer][sharer::times, :, :columns]
            to = to.at[shared.tables[layer][..., :columns]].set(entries, mode="drop")
        k, v = _with((k, v), to, [shared.k, shared.v])
    kept = tuple(jnp.repeat(lengths, times, axis=0) for lengths in shared.kept)
    return joined_into(dataclasses.replace(out, k=k, v=v, kept=kept), shared, own, layout.num_window_pages)


def joined_into(out: PagedCache, shared: PagedCache, own: PagedCache, window_pages: int) -> PagedCache:
    """Adds the kept tokens of `own`, and the window of both, to a cache with the kept tokens of `shared`."""
    blocks = out.start[:, None] // own.block_size + jnp.arange(window_pages)
    for layer in range(len(out.tables)):
        out = _with_joined(out, layer, own, _joined_windows(shared, own, layer, blocks), blocks)
    return out


def _joined_windows(shared: PagedCache, own: PagedCache, layer: int, blocks: Int[Array, "R W"]) -> list[Stored]:
    """Keys and values of the blocks of rows' windows, `[R, W, Hkv, b, d]`, from the cache that has them."""

    def take(cache: PagedCache) -> Any:
        pages = jax.vmap(lambda of_row: cache.window_pages(layer, of_row), in_axes=1, out_axes=1)(blocks)
        return _at([cache.k, cache.v], pages)

    is_own = blocks * own.block_size >= own.start[:, None]

    def choose(mine: Array, theirs: Array) -> Array:
        return jnp.where(is_own.reshape(*is_own.shape, *(1,) * (mine.ndim - 2)), mine, theirs)

    return jax.tree.map(choose, take(own), take(shared))


def _with_joined(
    out: PagedCache, layer: int, own: PagedCache, window: list[Stored], blocks: Int[Array, "R W"]
) -> PagedCache:
    """Adds a layer's window, and appends the rows' own kept tokens to those kept so far."""
    windows = jax.vmap(lambda of_row: out.window_pages(layer, of_row), in_axes=1, out_axes=1)(blocks)
    k, v = _with((out.k, out.v), windows, window)
    out, table = dataclasses.replace(out, k=k, v=v), own.tables[layer][..., : own.kept_columns[layer]]
    stored = jax.tree.map(lambda pool: pool.at[table].get(mode="clip"), [own.k, own.v])
    k, v = (decode(x, jnp.float32 if own.dtype == CODES else own.dtype) for x in stored)
    k, v = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (k, v))
    return out.with_kept(layer, jnp.arange(k.shape[2]) < own.kept[layer][..., None], k, v)


def allocator_limit() -> int | None:
    """Memory limit of the default device's allocator in bytes; None without one (some report 0)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit") or None


def memory_bytes() -> int | None:
    """Memory of the default device in bytes, the host's for the CPU; None if it is not reported."""
    limit = allocator_limit()
    if limit is not None or jax.local_devices()[0].platform != "cpu":
        return limit
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not know these names
        return None


def require_memory(kv_cache_bytes: int, what: str) -> None:
    """Raises ValueError if a KV cache exceeds the device's memory; `what` names its purpose in the message."""
    limit = memory_bytes()
    if limit is not None:
        need = f"{what} need {kv_cache_bytes / 1e9:,.1f} GB of KV cache"
        require(kv_cache_bytes <= limit, f"{need}: the device has {limit / 1e9:,.1f} GB")
