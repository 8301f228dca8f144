"""Sizes of rows of a page table (`engine.pages`), planned before anything is compiled, and the device's memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from tca_jax.engine.mesh import HeadShards
from tca_jax.engine.pages import Widths
from tca_jax.errors import require
from tca_jax.methods.base import CachePolicy, num_ranked_blocks, per_head
from tca_jax.methods.regions import Regions
from tca_jax.pallas_kernels.kv import REGION_ALIGNMENT, num_bytes
from tca_jax.pallas_kernels.numerics import cdiv, round_up, shared_size

_SPARE = 64  # at most this part of the memory


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Static sizes of rows, on each device of a mesh."""

    block_size: int  # tokens in a block and in a page, b
    window: int  # least number of local tokens, w, a multiple of b
    batch: int  # rows, B
    kept_pages: tuple[tuple[tuple[int, ...], ...], ...]  # of kept tokens, `[layers][devices][H_kv]`, heads of a device
    window_columns: int  # most blocks from the first in a row's window to the last that is ever fed
    prompt_tokens: int  # padded length of the prompts, L
    mean_pages: int  # of a head, for the means of evicted tokens
    begun_pages: int  # of a head, copies of pages that the rows that others follow have begun
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
        fed_tokens: int = 0,  # most tokens that are fed behind a prompt
        shards: HeadShards | None = None,  # how the heads are dealt out over a mesh; None on one device
        *,
        following: bool = False,  # whether prompts are in another cache, which these tokens follow
    ) -> CacheLayout:
        """The cache of prompts and of the tokens that follow them, or of these alone."""
        b, w, layers = policy.block_size, policy.window, range(num_layers)

        def of_heads(method: str, *args: int) -> Int[np.ndarray, " Hkv"]:
            source = f"{type(policy).__name__}.{method}{args}"
            return np.asarray(per_head(getattr(policy, method)(*args), num_kv_heads, source))

        def in_pages(tokens: list[np.ndarray], multiple: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
            counts = [-(-of_layer // multiple) * multiple // b for of_layer in tokens]
            if shards is not None:
                counts = [x[list(order)] for x, order in zip(counts, shards.order, strict=True)]
            devices = 1 if shards is None else shards.devices
            return tuple(tuple(map(tuple, x.reshape(devices, -1).tolist())) for x in counts)

        behind = [of_heads("growth", layer, prompt_tokens, fed_tokens) for layer in layers]
        kept = [of_heads("capacities", layer, prompt_tokens) + behind[layer] for layer in layers]
        if following:  # all but one token of the first block may have been there before
            pages = in_pages(behind, b)
            means, columns = mean_pages(policy, fed_tokens + b), max(1, cdiv(b - 1 + fed_tokens, b))
            return cls(b, w, batch, pages, columns, prompt_tokens, means, int(np.any(kept)) + (means > 0))
        columns = min(cdiv(prompt_tokens + fed_tokens, b), w // b + 1 + cdiv(fed_tokens, b))
        means = mean_pages(policy, prompt_tokens + columns * b)
        region = math.lcm(REGION_ALIGNMENT, b)  # a selection comes in such pieces
        pages = in_pages(kept, region)
        parts = shards.devices if shards is not None and policy.by_scores else 1  # each device chooses for itself
        budgets = policy.shared_capacities(prompt_tokens, num_layers, num_kv_heads // parts) or ()
        shared, together = [], num_layers // max(1, len(budgets))  # layers that share a budget
        for pool, most in enumerate(budgets):  # each head rounds up what it keeps of the prompt
            of_head = int(np.max(behind[pool * together : (pool + 1) * together]))
            shared.append((round_up(most, region) // b, (region + round_up(of_head, b)) // b))
        return cls(b, w, batch, pages, columns, prompt_tokens, means, 0, tuple(shared))

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
    def widths(self) -> Widths:
        """Entries of tables, numbers that other lengths share."""
        window = min(self.window // self.block_size + 1, shared_size(self.window_columns))
        return Widths(shared_size(max(self.kept_columns)), window, self.mean_pages)

    @property
    def kept_columns(self) -> tuple[int, ...]:
        """Entries of each layer's tables for pages of kept tokens: as many as any head has, on any device."""
        return tuple(max(map(max, of_layer)) for of_layer in self.kept_pages)

    @property
    def has_ranked_blocks(self) -> bool:
        """Whether a prompt of this shape can have ranked blocks; otherwise it fits its window."""
        return num_ranked_blocks(self.prompt_tokens, self.block_size, self.window) > 0

    @functools.cached_property
    def num_pages(self) -> int:
        """Pages of the pool, as many as the device needs that needs most."""
        of_head = self.num_window_pages + self.mean_pages + self.begun_pages
        own = np.asarray(self.kept_pages, np.int32).sum(axis=2).T.reshape(len(self.kept_pages[0]), -1, self.pool_layers)
        of_pools = own.sum(axis=2)  # [devices, pools]: pages of a row's kept tokens, by the layers that share them
        of_pools = np.minimum(of_pools, [self.shared_by_row(pool) for pool in range(of_pools.shape[1])])
        kept = int(of_pools.sum(axis=1).max())
        return self.batch * (self.num_layers * self.num_kv_heads * of_head + kept)

    @property
    def pool_layers(self) -> int:
        """Adjacent layers that share one range of pages for kept tokens; 1 without sharing."""
        return self.num_layers // len(self.shared_pages) if self.shared_pages else 1

    def shared_by_row(self, pool: int) -> int:
        """Most pages that the heads of a row and device share, in the layers of an entry of `shared_pages`."""
        together, of_head = self.shared_pages[pool] if self.shared_pages else (2**31 - 1, 0)
        return together + of_head * self.num_kv_heads * self.pool_layers

    def num_bytes(self, head_dim: int, dtype: Any) -> int:
        """Bytes of keys and values together, on a device."""
        return 2 * num_bytes(self.num_pages * self.block_size, head_dim, dtype)

    def regions(self, layer: int | None) -> Regions:
        """Where a layer's kept tokens go on their way to the pages: as large on all devices; None: in all layers."""
        pages = np.asarray(self.kept_pages if layer is None else self.kept_pages[layer])
        widest = pages.reshape(-1, pages.shape[-1]).max(axis=0) * self.block_size
        shared = self.shared_by_row((layer or 0) // self.pool_layers) * self.block_size if self.shared_pages else None
        return Regions.plan(self.batch, widest.tolist(), self.block_size, shared)


def mean_pages(policy: Any, tokens: int) -> int:
    """Pages of a head's means, of `tokens` tokens."""
    has_means, b = policy.by_scores and policy.means, policy.block_size
    return cdiv(shared_size(cdiv(tokens, b)), b) if has_means else 0


def spare_pages(pages: int, longest: int, page_bytes: int) -> int:
    """Pages that make a pool that of prompts of which the longest needs `longest`; 0 where they are much memory."""
    limit = memory_bytes()
    for size in (shared_size(longest), longest):  # the first may serve other shares of the cache, too
        if limit is None or (size - longest // 2) * page_bytes * _SPARE <= limit:
            return size - pages
    return 0


def small_pool(page_bytes: int) -> int:
    """Pages of a pool that is little memory of a GPU, for prompts of all octaves; 0 on a CPU, which clears memory."""
    return (allocator_limit() or 0) // _SPARE // page_bytes


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
