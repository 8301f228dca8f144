"""DuoAttention (arXiv 2410.10819): retrieval heads keep every token, streaming heads the sinks and the latest ones.

A KV head is a retrieval head if its gate is among the highest. Gates are what the paper finds by optimisation,
published as full_attention_heads.tsv; without them, 1 minus the probe score of the sparsest row does
(`tca_jax.calibration.head_gates`): how much of what a small cache drops a head needs where it matters.

Prompt queries of streaming heads see sinks and recent tokens too, as in the paper. The code (mit-han-lab/duo-attention
at fe93c31) evaluates accuracy with a prompt that is read under full attention: `dense_prefill`. What differs: the left
edge of the recent tokens is on a block boundary; gates that tie go by layer and head, not by random noise.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Float64, Int

from tca_jax.errors import UserError, check_flag, check_number
from tca_jax.lab.rivals.head_tables import numbers_by_head
from tca_jax.methods.base import CachePolicy, Heads, Method, PerHead
from tca_jax.methods.full import FullPrefill
from tca_jax.methods.regions import Selection
from tca_jax.methods.sparse import SparsePrefill
from tca_jax.methods.streaming import StreamingCache
from tca_jax.pallas_kernels.backends import Backend


@dataclasses.dataclass(frozen=True)
class DuoAttentionCache(CachePolicy):
    """Everything in retrieval heads, sinks and a window in the others."""

    retrieval: tuple[tuple[bool, ...], ...]  # whether a KV head is a retrieval head, `[layers][H_kv]`
    streaming: StreamingCache  # what the other heads keep
    #: The option that says which heads these are.
    option: ClassVar[str] = "gates"

    @property
    def block_size(self) -> int:  # type: ignore[override]
        return self.streaming.block_size

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.streaming.window

    def capacities(self, layer: int, prompt_tokens: int) -> PerHead:
        everything = self.num_ranked_blocks(prompt_tokens) * self.block_size
        return self._by_head(layer, everything, self.streaming.capacities(layer, prompt_tokens))

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> PerHead:
        everything = self.num_leaving_blocks(prompt_tokens, new_tokens) * self.block_size
        return self._by_head(layer, everything, self.streaming.growth(layer, prompt_tokens, new_tokens))

    def select(
        self, layer: int, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Selection:
        scores, budgets, _ = self.streaming.select(layer, heads, q, k, v, lengths, backend)
        ranked = jnp.arange(budgets.shape[-1]) < self.num_ranked_blocks(lengths)[:, None, None]
        everything = jnp.where(ranked, jnp.int32(self.block_size), 0)
        return Selection(scores, jnp.where(self._retrieves(layer, heads), everything, budgets))

    def evict(
        self, layer: int, heads: Heads, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]
    ) -> Selection:
        scores, budgets, _ = self.streaming.evict(layer, heads, attention, blocks)
        return Selection(scores, jnp.where(self._retrieves(layer, heads), jnp.int32(self.block_size), budgets))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        shape = len(self.retrieval), len(self.retrieval[0])
        if shape != (num_layers, num_kv_heads):
            raise UserError(
                f"{self.option} has {shape[0]} layers of {shape[1]} KV heads: must be {num_layers} of {num_kv_heads}"
            )

    def _by_head(self, layer: int, everything: int, little: int) -> PerHead:
        return tuple(everything if retrieval else little for retrieval in self.retrieval[layer])

    def _retrieves(self, layer: int, heads: Heads) -> Bool[Array, "Hkv 1"]:
        return jnp.asarray(heads.of(np.asarray(self.retrieval[layer])))[:, None]


def duoattention(
    gates: Sequence[Sequence[float]] | np.ndarray | str | os.PathLike[str],
    share: float = 0.5,
    sinks: int = 128,
    window: int = 256,
    block_size: int = 128,
    dense_prefill: bool = False,
) -> Method:
    """Retrieval and streaming heads, for the prompt's queries and for the cache.

    Args:
        gates: Of every KV head, `[layers, H_kv]`, finite, clipped to [0, 1]; or the path of a published
            full_attention_heads.tsv.
        share: Share of retrieval heads, those of the highest gates, in (0, 1], rounded to whole heads. The paper takes
            0.5 for models with grouped queries and 0.25 for others; its sparsity is 1 - `share`.
        sinks: Tokens that a streaming head keeps from the start of the sequence; the published patterns' `sink_size`.
        window: Least number of local tokens, a multiple of `block_size`; the published patterns' `recent_size`.
        block_size: Tokens in a block, a power of two.
        dense_prefill: Whether the prompt's queries attend to everything in all heads, as in the code.

    Raises:
        ValueError: an option is not allowed, or the file holds no table of numbers.
        FileNotFoundError: there is no such file.
    """
    if isinstance(gates, str | os.PathLike):
        gates = load_gates(gates)
    check_number("share", share, above=0, at_most=1)
    check_flag("dense_prefill", dense_prefill)
    table = np.clip(numbers_by_head("gates", gates, "[layers, H_kv]", np.isfinite, "must be finite"), 0, 1)
    cache = DuoAttentionCache(highest_heads(table, share), StreamingCache(sinks, window, block_size))
    return Method("duoattention", FullPrefill() if dense_prefill else SparsePrefill(cache), cache)


def highest_heads(table: Float64[np.ndarray, "layers Hkv"], share: float) -> tuple[tuple[bool, ...], ...]:
    """Whether each KV head is one of the share of the highest numbers, rounded; ties go to the lower layer and head."""
    highest = np.argsort(-table, axis=None, kind="stable")[: round(share * table.size)]
    marked = np.zeros(table.size, bool)
    marked[highest] = True
    return tuple(map(tuple, marked.reshape(table.shape).tolist()))


def load_gates(path: str | os.PathLike[str]) -> Float64[np.ndarray, "layers Hkv"]:
    """Gates as they are published: a row for each layer, a column for each KV head, tabs between.

    Args:
        path: Of a full_attention_heads.tsv.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no table of numbers; the message names it.
    """
    with open(path, encoding="utf-8") as file:
        try:
            rows = [[float(cell) for cell in line.split("\t")] for line in file if line.strip()]
        except (ValueError, UnicodeDecodeError) as error:
            raise UserError(f"{os.fspath(path)}: must hold numbers with tabs between: {error}") from None
    if len({len(row) for row in rows}) != 1:
        widths = sorted({len(row) for row in rows})
        raise UserError(f"{os.fspath(path)}: must hold rows of one length, has rows of {widths or 'nothing'}")
    return np.array(rows, np.float64)
