"""The static shape of a layer's cache: all that follows from method and sizes before any data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from tca_jax.methods.base import CachePolicy, per_head
from tca_jax.methods.blocks import num_ranked_blocks
from tca_jax.methods.heads import HeadShards
from tca_jax.methods.regions import Regions
from tca_jax.pallas_kernels.integers import round_up


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Static shape of one layer's cache.

    Attributes:
        block_size: Tokens in a block, b.
        window: Least number of local tokens, w, a multiple of b.
        prompt_tokens: Padded length of what was read, L.
        ring_tokens: Slots of the ring, R: w + b, or less where all that is ever fed is shorter.
        batch: Rows, B. Several of them may share a row of the pool.
        regions: Regions of the pool, which is never written after prefill.
        heads: How the model's KV heads are dealt out over a mesh, whose every device has a cache of this shape; None on
            one device. Rows and heads are then a device's.
        growth: Regions, B rows of them, of what is kept of blocks that leave the window later; None where nothing is.
    """

    block_size: int
    window: int
    prompt_tokens: int
    ring_tokens: int
    batch: int
    regions: Regions
    growth: Regions | None = None
    heads: HeadShards | None = None

    @classmethod
    def plan(
        cls,
        policy: CachePolicy,
        layer: int,
        num_kv_heads: int,
        batch: int,
        prompt_tokens: int,
        new_tokens: int | None,
        heads: HeadShards | None = None,
    ) -> CacheLayout:
        """Sizes a layer's cache for prompts of up to `prompt_tokens`.

        Args:
            policy: Cache policy.
            layer: The layer.
            num_kv_heads: KV heads of the model.
            batch: Prompts, B; of a device.
            prompt_tokens: Padded prompt length, L.
            new_tokens: Most tokens of an answer, for which there is room then. None for a context: its ring serves any
                number of tokens, and room for what leaves the window is planned by whoever continues it, `with_growth`.
            heads: How these heads are dealt out over a mesh; None on one device.

        Raises:
            ValueError: the policy names no capacity for each KV head, ranks other blocks than those left of its
                window, has a window that depends on the length (in a context), or the pool is too large to be
                addressed.
        """
        name, b = type(policy).__name__, policy.block_size
        total = prompt_tokens + (new_tokens or 0)
        window = policy.local_window(total)
        if new_tokens is None and window != policy.window:
            raise ValueError(
                f"{name}.local_window({total}) = {window} is not its window, {policy.window}: the window of a context "
                "must not depend on its length; see CachePolicy.for_contexts"
            )
        if num_ranked_blocks(prompt_tokens, b, window) != policy.num_ranked_blocks(prompt_tokens):
            raise ValueError(
                f"{name}.local_window({total}) = {window}, but its num_ranked_blocks({prompt_tokens}) "
                f"is {policy.num_ranked_blocks(prompt_tokens)}: blocks must be ranked exactly left of the window"
            )
        source = f"{name}.capacities({layer}, {prompt_tokens})"
        capacities = per_head(policy.capacities(layer, prompt_tokens), num_kv_heads, source)
        layout = cls(
            block_size=b,
            window=window,
            prompt_tokens=prompt_tokens,
            ring_tokens=window + b if new_tokens is None else min(window + b, round_up(total, b)),
            batch=batch,
            regions=Regions.plan(batch, capacities if heads is None else heads.widest(layer, capacities)),
            heads=heads,
        )
        # The last new token is never fed back.
        return layout if new_tokens is None else layout.with_growth(policy, layer, new_tokens - 1)

    def with_growth(self, policy: CachePolicy, layer: int, fed_tokens: int) -> CacheLayout:
        """The same with room for what is kept of the blocks that leave while up to `fed_tokens` more are fed."""
        most = self.most_growth(policy, layer, fed_tokens)
        return dataclasses.replace(self, growth=Regions.plan(self.batch, most) if any(most) else None)

    def most_growth(self, policy: CachePolicy, layer: int, fed_tokens: int) -> tuple[int, ...]:
        """Most tokens that each KV head keeps of the blocks that leave while up to `fed_tokens` more are fed."""
        source = f"{type(policy).__name__}.growth({layer}, {self.prompt_tokens}, {fed_tokens})"
        growth, heads = policy.growth(layer, self.prompt_tokens, fed_tokens), self.heads
        if heads is None:
            return per_head(growth, self.num_kv_heads, source)
        return heads.widest(layer, per_head(growth, self.num_kv_heads * heads.devices, source))

    def repeat_rows(self, times: int) -> CacheLayout:
        """Every row `times` times; the pool stays what it is."""
        growth = self.growth and dataclasses.replace(self.growth, batch=self.growth.batch * times)
        return dataclasses.replace(self, batch=self.batch * times, growth=growth)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a device, H_kv."""
        return len(self.regions.capacities)

    @property
    def ranks(self) -> bool:
        """Whether a prompt of this shape can have ranked blocks; otherwise it fits its window."""
        return num_ranked_blocks(self.prompt_tokens, self.block_size, self.window) > 0

    @property
    def evicts(self) -> bool:
        """Whether anything can be kept of a block that leaves the window."""
        return self.growth is not None

    def num_bytes(self, head_dim: int, dtype: Any) -> int:
        """Bytes of K and V together, on a device: pool, which rows may share, growth and ring."""
        ring = self.batch * self.num_kv_heads * self.ring_tokens
        growth = 0 if self.growth is None else self.growth.pool_tokens
        return 2 * (self.regions.pool_tokens + growth + ring) * head_dim * jnp.dtype(dtype).itemsize

    def local_tokens(self, fed: Int[np.ndarray, " B"], prompt_lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Tokens in the window after `fed` of them; behind a bare prompt it is already the next token's window."""
        last = np.where(fed > prompt_lengths, fed - 1, fed)
        return fed - np.maximum(0, last // self.block_size * self.block_size - self.window)


def total_bytes(layouts: Sequence[CacheLayout], head_dim: int, dtype: Any) -> int:
    """Bytes of the caches of all layers, on a device."""
    return sum(layout.num_bytes(head_dim, dtype) for layout in layouts)
