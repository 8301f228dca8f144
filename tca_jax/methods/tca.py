"""TCA-Attention (arXiv 2512.09238): every KV head keeps what its candidate's budgets allow, chosen from the prompt.

A head has a *reading*, how the prompt's own queries attend, and a *cache row*, what later queries attend to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32

from tca_jax.errors import UserError, explaining, require
from tca_jax.methods.base import CachePolicy, Heads, Layer, Method, PerHead
from tca_jax.methods.candidates import eviction_budgets, region_capacity
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.regions import Selection
from tca_jax.methods.selection import select_by_candidates
from tca_jax.methods.tca_prefill import READINGS, TCAPrefill
from tca_jax.pallas_kernels.backends import Backend

#: A row of `candidate_budgets` for each KV head, `[layers][H_kv]`, or one for all of them.
Rows = tuple[tuple[int, ...], ...] | int
#: A reading for each KV head, `[layers][H_kv]`, or one for all of them.
Readings = tuple[tuple[str, ...], ...] | str


@dataclasses.dataclass(frozen=True)
class TCACache(CachePolicy):
    """Every KV head keeps what its row of `candidate_budgets` allows, and its reserve."""

    candidates: Rows
    config: TCAConfig
    prefill_candidates: Rows | None = None
    readings: Readings = "sparse"

    @property
    def block_size(self) -> int:  # type: ignore[override]
        return self.config.block_size

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.config.window

    @property
    def num_queries(self) -> int:  # type: ignore[override]
        return self.config.num_queries

    @property
    def layers_differ(self) -> bool:  # type: ignore[override]
        readings = np.asarray(self.readings)
        return bool((readings != "sparse").any())

    def rows(self, layer: int | Array, num_kv_heads: int) -> Any:
        """Row of each KV head of a layer, of what the cache keeps."""
        rows = _of_layer(self.candidates, layer)
        return (jnp if isinstance(rows, Array) else np).broadcast_to(rows, (num_kv_heads,))

    def reads(self, layer: Any, num_kv_heads: int, reading: str) -> Bool[np.ndarray, " Hkv"]:
        """Which KV heads of a layer have a reading."""
        readings = self.readings if isinstance(self.readings, str) else self.readings[layer]
        return np.broadcast_to(np.asarray(readings) == reading, (num_kv_heads,))

    def prefill_rows(self, layer: int | Array, num_kv_heads: int) -> Any:
        """Row of each KV head of a layer, of what the prompt's queries attend to; None where no head's row differs.

        For heads that do not read "sparse" it is the cache row, which then decides alone what is kept.
        """
        if self.prefill_candidates is None:
            return None
        if isinstance(layer, Array):  # of a layer whose number is traced all heads read "sparse"
            return jnp.broadcast_to(_of_layer(self.prefill_candidates, layer), (num_kv_heads,))
        kept = self.rows(layer, num_kv_heads)
        rows = np.where(self.reads(layer, num_kv_heads, "sparse"), _of_layer(self.prefill_candidates, layer), kept)
        return rows if np.any(rows != kept) else None

    def capacities(self, layer: int, prompt_tokens: int) -> PerHead:
        heads = self.num_heads(layer)
        prefill = self.prefill_rows(layer, heads)
        both = () if prefill is None else (prefill,)
        return self._per_head(self._region_capacities(prompt_tokens, self.rows(layer, heads), *both))

    def prefill_capacities(self, layer: int, prompt_tokens: int) -> PerHead | None:
        heads = self.num_heads(layer)
        prefill = self.prefill_rows(layer, heads)
        if prefill is None:
            return None
        sparse, capacities = self.reads(layer, heads, "sparse"), self._region_capacities(prompt_tokens, prefill)
        return self._per_head(np.where(sparse, capacities, 0))

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> PerHead:
        kept_of_block = eviction_budgets(self.config)[self.rows(layer, self.num_heads(layer))]
        return self._per_head(kept_of_block * self.num_leaving_blocks(prompt_tokens, new_tokens))

    def select(
        self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Selection:
        rows, prefill_rows = self.rows(layer, heads.of_model), self.prefill_rows(layer, heads.of_model)
        return select_by_candidates(
            q,
            k,
            jnp.asarray(heads.of(rows)),
            lengths,
            self.config,
            backend,
            prefill_candidates=None if prefill_rows is None else jnp.asarray(heads.of(prefill_rows)),
            heads=jnp.asarray(heads.numbers),
        )

    def evict(
        self, layer: Layer, heads: Heads, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]
    ) -> Selection:
        batch, kv_heads = attention.shape[:2]
        rows = self.rows(layer, heads.of_model)
        table = eviction_budgets(self.config)
        budgets = heads.of(table[rows] if isinstance(rows, np.ndarray) else jnp.asarray(table)[rows])
        return Selection(attention.mean(axis=2), jnp.broadcast_to(budgets[:, None], (batch, kv_heads, 1)))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        for name in ("candidates", "prefill_candidates", "readings"):
            rows = getattr(self, name)
            if rows is None or isinstance(rows, int | str):
                continue
            heads = sorted({len(layer) for layer in rows})
            given = f"{name} has {len(rows)} layers of {'/'.join(map(str, heads))} KV heads"
            fits = len(rows) == num_layers and heads == [num_kv_heads]
            require(fits, f"{given}: must be {num_layers} of {num_kv_heads}")

    @property
    def _by_head(self) -> tuple[tuple[Any, ...], ...] | None:
        """What is given for every head, `[layers][H_kv]`; None where all heads are alike."""
        given = (self.candidates, self.prefill_candidates, self.readings)
        return next((each for each in given if isinstance(each, tuple)), None)

    def num_heads(self, layer: int) -> int:
        """KV heads of a layer, or 1 where all heads are alike."""
        return 1 if self._by_head is None else len(self._by_head[layer])

    def _per_head(self, values: Int[np.ndarray, " heads"]) -> PerHead:
        return int(values[0]) if self._by_head is None else tuple(values.tolist())

    def _region_capacities(self, prompt_tokens: int, *rows: Int32[np.ndarray, " heads"]) -> Int[np.ndarray, " heads"]:
        """Most tokens of a prompt that heads keep under one row of budgets, or under the larger of two."""
        ranked = self.num_ranked_blocks(prompt_tokens)

        def capacity(candidate: int, *prefill: int) -> int:
            return region_capacity(self.config, int(candidate), ranked, *map(int, prefill))

        return np.vectorize(capacity, otypes=[np.int64])(*rows)


def tca(
    candidates: Sequence[Sequence[int]] | np.ndarray | int,
    config: TCAConfig | None = None,
    prefill_candidates: Sequence[Sequence[int]] | np.ndarray | int | None = None,
    readings: Sequence[Sequence[str]] | np.ndarray | str = "sparse",
) -> Method:
    """TCA under given budgets; `tca_jax.calibrate` finds them, `lm.with_profile` takes them from a profile.

    Args:
        candidates: Row of `candidate_budgets` for each KV head, `[layers, H_kv]`, or one for all of them: what the
            cache keeps.
        config: Hyperparameters; None for the defaults.
        prefill_candidates: The same for what the prompt's own queries attend to in heads that read "sparse"; None: all
            that the cache keeps. Of every block the cache keeps the larger of the two budgets.
        readings: How the prompt's own queries attend, for each KV head, `[layers, H_kv]`, or for all of them:
            "sparse" (the window and what the head's row selects), "blocks" (the window and, for every block of queries,
            the `config.fetch` key blocks of the highest estimated attention) or "dense" (all tokens).

    Raises:
        ValueError: a candidate is not a row, or there is no such reading.
    """
    config = config or TCAConfig()
    rows = _checked_rows("candidates", candidates, config)
    prefill_rows = (
        None if prefill_candidates is None else _checked_rows("prefill_candidates", prefill_candidates, config)
    )
    cache = TCACache(rows, config, None if prefill_rows == rows else prefill_rows, _checked_readings(readings))
    return Method("tca", TCAPrefill(cache), cache)


def _checked_readings(value: Any) -> Readings:
    """`value` as hashable readings, one for all heads where all are the same; ValueError unless it is such."""
    with explaining("readings", ValueError):
        readings = np.asarray(value)
    named = readings.ndim in (0, 2) and readings.dtype.kind == "U"
    given = f"readings has shape {readings.shape}, dtype {readings.dtype}"
    require(named, f"{given}: must be names [layers, H_kv]")
    _require_all("readings", readings, np.isin(readings, READINGS), f"be one of {list(READINGS)}")
    alike = readings.size and (readings == readings.flat[0]).all()
    return str(readings.flat[0]) if alike else tuple(map(tuple, readings.tolist()))


def _checked_rows(name: str, value: Any, config: TCAConfig) -> Rows:
    """`value` as hashable rows of `candidate_budgets`; ValueError unless it is such."""
    with explaining(name, ValueError):
        rows = np.asarray(value)
    integers = rows.ndim in (0, 2) and np.issubdtype(rows.dtype, np.integer)
    require(integers, f"{name} has shape {rows.shape}, dtype {rows.dtype}: must be integers [layers, H_kv]")
    most = config.num_candidates
    _require_all(name, rows, (rows >= 0) & (rows <= most), f"lie in [0, {most}]")
    return int(rows) if rows.ndim == 0 else tuple(map(tuple, rows.tolist()))


def _require_all(name: str, values: Any, known: Any, allowed: str) -> None:
    """Raises ValueError, which names the first place, unless all values are known."""
    for place in np.argwhere(~known):
        where = "".join(f"[{i}]" for i in place)
        raise UserError(f"{name}{where} = {values[tuple(place)].item()!r}: must {allowed}")


def _of_layer(rows: Rows, layer: int | Array) -> Int32[Array | np.ndarray, "*heads"]:
    """Rows of a layer's KV heads `[H_kv]`, or the one of all heads as a scalar; data where the layer's number is."""
    if isinstance(layer, Array):
        return jnp.asarray(rows, jnp.int32) if isinstance(rows, int) else jnp.asarray(rows, jnp.int32)[layer]
    return np.asarray(rows if isinstance(rows, int) else rows[layer], np.int32)
