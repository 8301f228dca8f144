"""TCA-Attention: every KV head keeps the tokens that its candidate's budgets allow, chosen from the prompt itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int32

from tca_jax.methods.base import CachePolicy, Method, PerHead
from tca_jax.methods.candidates import eviction_budgets, region_capacity
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.regions import Selection
from tca_jax.methods.selection import select_by_candidates
from tca_jax.methods.sparse import SparsePrefill
from tca_jax.pallas_kernels.backends import Backend


@dataclasses.dataclass(frozen=True)
class TCACache(CachePolicy):
    """Every KV head keeps what its row of `candidate_budgets` allows.

    Attributes:
        candidates: Row of each KV head, `[layers][H_kv]`, or one row for all heads.
        config: Hyperparameters.
    """

    candidates: tuple[tuple[int, ...], ...] | int
    config: TCAConfig

    @property
    def block_size(self) -> int:  # type: ignore[override]
        return self.config.block_size

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.config.window

    def rows(self, layer: int, num_kv_heads: int) -> Int32[np.ndarray, " Hkv"]:
        """Row of each KV head of a layer."""
        rows = self.candidates if isinstance(self.candidates, int) else self.candidates[layer]
        return np.broadcast_to(np.asarray(rows, np.int32), (num_kv_heads,))

    def capacities(self, layer: int, prompt_tokens: int, new_tokens: int) -> PerHead:
        ranked, leaving = self.num_ranked_blocks(prompt_tokens), self.num_leaving_blocks(prompt_tokens, new_tokens)

        def capacity(row: int) -> int:
            return region_capacity(self.config, row, ranked) + leaving * int(eviction_budgets(self.config)[row])

        if isinstance(self.candidates, int):
            return capacity(self.candidates)
        return tuple(capacity(row) for row in self.candidates[layer])

    def select(self, layer: int, q: Array, k: Array, v: Array, lengths: Array, backend: Backend) -> Selection:
        rows = jnp.asarray(self.rows(layer, k.shape[2]))
        return select_by_candidates(q[:, -1], k, rows, lengths, self.config, backend)

    def evict(self, layer: int, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]) -> Selection:
        batch, kv_heads = attention.shape[:2]
        budgets = eviction_budgets(self.config)[self.rows(layer, kv_heads)]
        return Selection(attention.mean(axis=2), jnp.broadcast_to(budgets[:, None], (batch, kv_heads, 1)))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        if isinstance(self.candidates, int):
            return
        if len(self.candidates) != num_layers or any(len(rows) != num_kv_heads for rows in self.candidates):
            heads = sorted({len(rows) for rows in self.candidates})
            raise ValueError(
                f"candidates has {len(self.candidates)} layers of {'/'.join(map(str, heads))} KV heads: must be "
                f"{num_layers} of {num_kv_heads}"
            )


def tca(candidates: Sequence[Sequence[int]] | np.ndarray | int, config: TCAConfig | None = None) -> Method:
    """TCA under given budgets; `tca_jax.calibrate` finds them, `lm.with_profile` takes them from a profile.

    Args:
        candidates: Row of `candidate_budgets` for each KV head, `[layers, H_kv]`, or one for all of them.
        config: Hyperparameters; None for the defaults.

    Raises:
        ValueError: a candidate is not a row.
    """
    config = config or TCAConfig()
    rows = np.asarray(candidates)
    if rows.ndim not in (0, 2) or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"candidates has shape {rows.shape}, dtype {rows.dtype}: must be integers [layers, H_kv]")
    for place in np.argwhere((rows < 0) | (rows > config.num_candidates)):
        where = "".join(f"[{i}]" for i in place)
        raise ValueError(f"candidates{where} = {rows[tuple(place)]}: must lie in [0, {config.num_candidates}]")
    cache = TCACache(int(rows) if rows.ndim == 0 else tuple(map(tuple, rows.tolist())), config)
    return Method("tca", SparsePrefill(cache), cache)
