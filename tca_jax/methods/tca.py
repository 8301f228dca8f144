"""TCA-Attention (arXiv 2512.09238): every KV head keeps tokens by its candidate's budgets, chosen from the prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int32

from tca_jax.errors import UserError, explaining, require
from tca_jax.methods.base import CachePolicy, Heads, Layer, Method, PerHead
from tca_jax.methods.candidates import eviction_budgets, region_capacity
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.regions import Selection
from tca_jax.methods.selection import select_by_candidates
from tca_jax.methods.sparse import SparsePrefill

#: A row of `candidate_budgets` for each KV head, `[layers][H_kv]`, or one for all of them.
Rows = tuple[tuple[int, ...], ...] | int


@dataclasses.dataclass(frozen=True)
class TCACache(CachePolicy):
    """Every KV head keeps the tokens of its row of `candidate_budgets`, and its reserve."""

    candidates: Rows
    config: TCAConfig
    layers_differ: ClassVar[bool] = False

    @property
    def block_size(self) -> int:  # type: ignore[override]
        return self.config.block_size

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.config.window

    @property
    def num_queries(self) -> int:  # type: ignore[override]
        return self.config.num_queries

    def rows(self, layer: int | Array, num_kv_heads: int) -> Any:
        """Row of each KV head of a layer."""
        rows = _of_layer(self.candidates, layer)
        return (jnp if isinstance(rows, Array) else np).broadcast_to(rows, (num_kv_heads,))

    def capacities(self, layer: int, prompt_tokens: int) -> PerHead:
        return self._per_head(self._region_capacities(prompt_tokens, self.rows(layer, self.num_heads(layer))))

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> PerHead:
        kept_of_block = eviction_budgets(self.config)[self.rows(layer, self.num_heads(layer))]
        return self._per_head(kept_of_block * self.num_leaving_blocks(prompt_tokens, new_tokens))

    def select(self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array) -> Selection:
        rows = heads.of(self.rows(layer, heads.of_model))
        numbers = jnp.asarray(heads.numbers)
        return select_by_candidates(q, k, jnp.asarray(rows), lengths, self.config, numbers)

    def evict(
        self, layer: Layer, heads: Heads, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]
    ) -> Selection:
        batch, kv_heads = attention.shape[:2]
        rows = self.rows(layer, heads.of_model)
        table = eviction_budgets(self.config)
        budgets = heads.of(table[rows] if isinstance(rows, np.ndarray) else jnp.asarray(table)[rows])
        return Selection(attention.mean(axis=2), jnp.broadcast_to(budgets[:, None], (batch, kv_heads, 1)))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        if isinstance(self.candidates, int):
            return
        heads = sorted({len(layer) for layer in self.candidates})
        given = f"candidates has {len(self.candidates)} layers of {'/'.join(map(str, heads))} KV heads"
        fits = len(self.candidates) == num_layers and heads == [num_kv_heads]
        require(fits, f"{given}: must be {num_layers} of {num_kv_heads}")

    def num_heads(self, layer: int) -> int:
        """KV heads of a layer, or 1 where all heads have one row."""
        return 1 if isinstance(self.candidates, int) else len(self.candidates[layer])

    def _per_head(self, values: Int[np.ndarray, " heads"]) -> PerHead:
        return int(values[0]) if isinstance(self.candidates, int) else tuple(values.tolist())

    def _region_capacities(self, prompt_tokens: int, rows: Int32[np.ndarray, " heads"]) -> Int[np.ndarray, " heads"]:
        """Most tokens of a prompt that heads keep under a row of budgets each."""
        ranked = self.num_ranked_blocks(prompt_tokens)
        return np.array([region_capacity(self.config, int(row), ranked) for row in rows], np.int64)


def tca(candidates: Sequence[Sequence[int]] | np.ndarray | int, config: TCAConfig | None = None) -> Method:
    """TCA under given budgets; `tca_jax.calibrate` finds them, `lm.with_profile` takes them from a profile.

    Args:
        candidates: Row of `candidate_budgets` for each KV head, `[layers, H_kv]`, or one for all of them.
        config: Hyperparameters; None for the defaults.

    Raises:
        ValueError: a candidate is not a row.
    """
    config = config or TCAConfig()
    cache = TCACache(_checked_rows("candidates", candidates, config), config)
    return Method("tca", SparsePrefill(cache), cache)


def _checked_rows(name: str, value: Any, config: TCAConfig) -> Rows:
    """`value` as hashable rows of `candidate_budgets`; ValueError unless it is such."""
    with explaining(name, ValueError):
        rows = np.asarray(value)
    integers = rows.ndim in (0, 2) and np.issubdtype(rows.dtype, np.integer)
    require(integers, f"{name} has shape {rows.shape}, dtype {rows.dtype}: must be integers [layers, H_kv]")
    most = config.num_candidates
    for place in np.argwhere((rows < 0) | (rows > most)):
        where = "".join(f"[{i}]" for i in place)
        raise UserError(f"{name}{where} = {rows[tuple(place)].item()!r}: must lie in [0, {most}]")
    return int(rows) if rows.ndim == 0 else tuple(map(tuple, rows.tolist()))


def _of_layer(rows: Rows, layer: int | Array) -> Int32[Array | np.ndarray, "*heads"]:
    """Rows of a layer's KV heads `[H_kv]`, or the one of all heads as a scalar; data where the layer's number is."""
    if isinstance(layer, Array):
        return jnp.asarray(rows, jnp.int32) if isinstance(rows, int) else jnp.asarray(rows, jnp.int32)[layer]
    return np.asarray(rows if isinstance(rows, int) else rows[layer], np.int32)
