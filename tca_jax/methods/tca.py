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

Rows = tuple[tuple[int, ...], ...] | int  # of `candidate_budgets`, of each KV head, `[layers][H_kv]`, or one for all


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

    def capacities(self, layer: int, prompt_tokens: int) -> PerHead:
        ranked, rows = self.num_ranked_blocks(prompt_tokens), self._of_layer(layer)
        kept = [region_capacity(self.config, row, ranked) for row in rows.ravel().tolist()]
        return _per_head(np.reshape(kept, rows.shape))

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> PerHead:
        kept_of_block = eviction_budgets(self.config)[self._of_layer(layer)]
        return _per_head(np.asarray(kept_of_block * self.num_leaving_blocks(prompt_tokens, new_tokens)))

    def select(self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array) -> Selection:
        numbers = jnp.asarray(heads.numbers)
        return select_by_candidates(q, k, self._of_heads(layer, heads), lengths, self.config, numbers)

    def evict(
        self, layer: Layer, heads: Heads, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]
    ) -> Selection:
        batch, kv_heads = attention.shape[:2]
        budgets = jnp.asarray(eviction_budgets(self.config))[self._of_heads(layer, heads)]
        return Selection(attention.mean(axis=2), jnp.broadcast_to(budgets[:, None], (batch, kv_heads, 1)))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        if not isinstance(self.candidates, int):
            layers, heads = np.shape(self.candidates)
            given = f"candidates has {layers} layers of {heads} KV heads"
            require((layers, heads) == (num_layers, num_kv_heads), f"{given}: must be {num_layers} of {num_kv_heads}")

    def _of_layer(self, layer: Layer) -> Any:
        """Rows of a layer's KV heads `[H_kv]`, or a scalar for all of them; data where the layer's number is."""
        rows = np.asarray(self.candidates, np.int32)
        if rows.ndim:
            return jnp.asarray(rows)[layer] if isinstance(layer, Array) else rows[layer]
        return rows

    def _of_heads(self, layer: Layer, heads: Heads) -> Int32[Array, " Hkv"]:
        """Row of each of these KV heads."""
        return jnp.asarray(heads.of(jnp.broadcast_to(self._of_layer(layer), (heads.of_model,))))


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


def _per_head(values: Int[np.ndarray, "*heads"]) -> PerHead:
    return tuple(values.tolist()) if values.ndim else int(values)
