"""Selections: each head's tokens in a layer's compact buffer, and the pairs (query, key) that they make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.errors import require
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.kv import REGION_ALIGNMENT, Pool
from tca_jax.pallas_kernels.numerics import round_up
from tca_jax.pallas_kernels.select_tokens import select_tokens

_LOW_BITS = 12  # of numbers that are summed in two parts


class Selection(NamedTuple):
    """Kept tokens of complete blocks: of block j the `budgets[j]` tokens of the highest scores.

    Attributes:
        scores: float32 `[B, Hkv, L]`; ties go to the lower position.
        budgets: Tokens to keep of every block, int32 `[B, Hkv, L // b]`, 0 for blocks that are not ranked. Data, not
            shape: they may depend on the prompt, within the capacities that the policy has named.
    """

    scores: Float32[Array, "B Hkv L"]
    budgets: Int[Array, "B Hkv nb"]

    @classmethod
    def of_tokens(cls, chosen: Bool[Array, "B Hkv L"], block_size: int) -> Selection:
        """The chosen tokens of complete blocks."""
        complete = chosen[..., : chosen.shape[-1] // block_size * block_size]
        budgets = complete.reshape(*complete.shape[:-1], -1, block_size).sum(axis=-1, dtype=jnp.int32)
        return cls(chosen.astype(jnp.float32), budgets)

    @classmethod
    def of_block(cls, attention: Float32[Array, "B Hkv G b"], budget: int | Int[Array, "B 1 1"]) -> Selection:
        """The first `budget` tokens of one block, whose attention `[B, Hkv, G, b]` is given: 0 for none, b for all."""
        batch, kv_heads, _, tokens = attention.shape
        budgets = jnp.full((batch, kv_heads, 1), budget, jnp.int32)
        return cls(jnp.zeros((batch, kv_heads, tokens), jnp.float32), budgets)


class Selected(NamedTuple):
    """A selection in a pool.

    Attributes:
        budgets: Tokens kept of every block, int32 `[B, Hkv, L // b]`.
        pool: The tokens, every region sorted by position.
    """

    budgets: Int32[Array, "B Hkv nb"]
    pool: Pool


@dataclasses.dataclass(frozen=True)
class Regions:
    """The regions of a pool, static: one for each row and KV head, those of a row side by side."""

    batch: int  # rows, B
    capacities: tuple[int, ...]  # tokens that each KV head's region can hold, `[H_kv]`, multiples of `alignment`
    alignment: int  # tokens, a multiple of `REGION_ALIGNMENT`
    # Tokens of a row's regions together, a multiple of `alignment`, where the prompt says how they divide them; None
    # where each has as many as it can hold.
    shared: int | None

    @classmethod
    def plan(cls, batch: int, capacities: Sequence[int], block_size: int = 1, shared: int | None = None) -> Regions:
        """Regions for at least `capacities` tokens of KV heads, together at most `shared`; ValueError past int32."""
        alignment = math.lcm(REGION_ALIGNMENT, block_size)
        sizes = tuple(round_up(int(tokens), alignment) for tokens in capacities)
        regions = cls(batch, sizes, alignment, None if shared is None else round_up(shared, alignment))
        selects = f"a batch of {batch} selects {regions.pool_tokens} tokens per layer"
        most = f"at most {2**31 - 1} can be addressed; use a smaller batch, or fewer tokens"
        require(regions.pool_tokens < 2**31, f"{selects}: {most}")
        return regions

    @property
    def row_tokens(self) -> int:
        """Tokens of a row's regions together."""
        return sum(self.capacities) if self.shared is None else min(self.shared, sum(self.capacities))

    @property
    def pool_tokens(self) -> int:
        """Tokens of the flat pool, at least one aligned region so that empty pools have an address."""
        return max(self.alignment, self.batch * self.row_tokens)

    def fill(
        self,
        selection: Selection,
        k: Float[Array, "B L Hkv d"],
        v: Float[Array, "B L Hkv d"],
        *,
        block_size: int,
        backend: Backend = "auto",
    ) -> Selected:
        """Copies selected tokens into a fresh pool; those past a region's capacity are dropped, last blocks first."""
        budgets, sizes = selection.budgets, np.tile(self.capacities, (self.batch, 1))
        offsets = jnp.asarray(np.cumsum(sizes).reshape(sizes.shape) - sizes, jnp.int32)  # of each region in the pool
        if self.shared is not None or min(self.capacities) < budgets.shape[-1] * block_size:  # not all may fit
            ends = jnp.cumsum(budgets, axis=-1, dtype=jnp.int32)
            capacities = jnp.asarray(self.capacities, jnp.int32)
            if self.shared is not None:
                offsets, capacities = self._divided(jnp.minimum(ends[..., -1], capacities))
            budgets = jnp.diff(jnp.minimum(ends, capacities[..., None]), axis=-1, prepend=0)
        operands, pool_tokens = (selection.scores, budgets, k, v, offsets), self.pool_tokens
        pool = select_tokens(*operands, block_size=block_size, pool_tokens=pool_tokens, backend=backend)
        return Selected(budgets, pool)

    def _divided(self, tokens: Int32[Array, "B Hkv"]) -> tuple[Int32[Array, "B Hkv"], Int32[Array, "B Hkv"]]:
        """First pool token of each region, and tokens that it can hold, where heads keep `tokens`."""
        room = -(-tokens // self.alignment) * self.alignment
        ends = jnp.minimum(jnp.cumsum(room, axis=-1, dtype=jnp.int32), self.row_tokens)
        starts = jnp.pad(ends, ((0, 0), (1, 0)))[:, :-1]
        rows = jnp.arange(self.batch, dtype=jnp.int32)[:, None] * self.row_tokens
        return rows + starts, ends - starts


def causal_pairs(lengths: Int[Array, " B"]) -> Float32[Array, " B"]:
    """Pairs (query i, key j <= i) of prompts of n tokens: n (n + 1) / 2."""
    n = lengths.astype(jnp.float32)
    return n * (n + 1) / 2


def sum_of_counts(counts: Int[Array, "*rows n"]) -> Float32[Array, "*rows"]:
    """Sums over the last axis, rounded at their end alone: of up to 2^20 numbers that are not negative.

    The sums may be past what int32 holds, and sums in float32 would round with every number.
    """
    low = jnp.sum(counts & (1 << _LOW_BITS) - 1, axis=-1, dtype=jnp.uint32)
    high = jnp.sum(counts >> _LOW_BITS, axis=-1, dtype=jnp.uint32) + (low >> _LOW_BITS)
    low &= (1 << _LOW_BITS) - 1
    return high.astype(jnp.float32) * (1 << _LOW_BITS) + low.astype(jnp.float32)


def selected_pairs(
    budgets: Int[Array, "B Hkv nb"], lengths: Int[Array, " B"], *, block_size: int, window: int
) -> Float32[Array, "B Hkv"]:
    """Causal pairs (query, key) that a KV head's queries attend to over their windows and a selection left of these.

    A query in block t has the tokens from max(0, t b - w) up to its own, and the selected ones of the blocks before.
    Counts are those of one query head of the group.
    """
    with jax.named_scope("count_pairs"):
        blocks = np.arange(budgets.shape[-1] + 1)  # of queries; a last one that is cut off has no budget
        edges = np.maximum(0, blocks - window // block_size)
        queries = jnp.clip(lengths[:, None] - blocks * block_size, 0, block_size)
        local = queries * ((blocks - edges) * block_size) + (queries * (queries + 1) >> 1)
        prefixes = jnp.pad(jnp.cumsum(budgets, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
        return sum_of_counts(local[:, None] + queries[:, None] * prefixes[..., edges])
