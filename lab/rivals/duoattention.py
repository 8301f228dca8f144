"""DuoAttention (arXiv 2410.10819): retrieval heads keep every token, streaming heads the sinks and the latest ones.

Retrieval heads have the highest gates: the paper's full_attention_heads.tsv, or the `head_weights` of a profile of
predicted worth. Prompt queries of streaming heads see sinks and recent tokens; `dense_prefill` reads prompts in full,
as the code does for accuracy (mit-han-lab/duo-attention at fe93c31). What differs: recent tokens begin on a block
boundary; tied gates go by layer and head, not by random noise.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Float64, Int

from tca_jax.errors import check_flag, check_number, explaining
from tca_jax.lab.rivals.tables import check_shape, numbers_by_head
from tca_jax.methods.base import CachePolicy, Heads, Layer, Method, PerHead
from tca_jax.methods.full import FullPrefill
from tca_jax.methods.regions import Selection
from tca_jax.methods.sparse import SparsePrefill
from tca_jax.methods.streaming import StreamingCache


@dataclasses.dataclass(frozen=True)
class DuoAttentionCache(CachePolicy):
    retrieval: tuple[tuple[bool, ...], ...]  # whether a KV head is a retrieval head, `[layers][H_kv]`
    streaming: StreamingCache  # what the other heads keep
    option: ClassVar[str] = "gates"  # with the numbers of heads
    layers_differ: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("block_size", "window"):
            object.__setattr__(self, name, getattr(self.streaming, name))

    def capacities(self, layer: int, prompt_tokens: int) -> PerHead:
        everything = self.num_ranked_blocks(prompt_tokens) * self.block_size
        sizes = self.streaming.capacities(layer, prompt_tokens), everything
        return tuple(sizes[retrieval] for retrieval in self.retrieval[layer])

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> PerHead:
        everything = self.num_leaving_blocks(prompt_tokens, new_tokens) * self.block_size
        sizes = self.streaming.growth(layer, prompt_tokens, new_tokens), everything
        return tuple(sizes[retrieval] for retrieval in self.retrieval[layer])

    def select(self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array) -> Selection:
        scores, budgets = self.streaming.select(layer, heads, q, k, v, lengths)
        ranked = jnp.arange(budgets.shape[-1]) < self.num_ranked_blocks(lengths)[:, None, None]
        everything = jnp.where(ranked, jnp.int32(self.block_size), 0)
        return Selection(scores, jnp.where(self._retrieves(layer, heads), everything, budgets))

    def evict(
        self, layer: Layer, heads: Heads, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]
    ) -> Selection:
        scores, budgets = self.streaming.evict(layer, heads, attention, blocks)
        return Selection(scores, jnp.where(self._retrieves(layer, heads), jnp.int32(self.block_size), budgets))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        check_shape(self.option, self.retrieval, num_layers, num_kv_heads)

    def _retrieves(self, layer: Layer, heads: Heads) -> Bool[Array, "Hkv 1"]:
        return jnp.asarray(heads.of(jnp.asarray(self.retrieval)[layer]))[:, None]


def duoattention(
    # of every KV head, `[layers, H_kv]`, finite, clipped to [0, 1]; or the path of a published full_attention_heads.tsv
    gates: Sequence[Sequence[float]] | np.ndarray | str | os.PathLike[str],
    # of retrieval heads, those of the highest gates, rounded to heads. The paper takes 0.5 for models with grouped
    # queries and 0.25 for others; its sparsity is 1 - `share`.
    share: float = 0.5,
    sinks: int = 128,  # tokens that a streaming head keeps from the start; the published patterns' `sink_size`
    window: int = 256,  # least number of local tokens, a multiple of `block_size`; their `recent_size`
    block_size: int = 128,  # tokens in a block, a power of two
    dense_prefill: bool = False,  # whether the prompt's queries attend to everything in all heads, as in the code
) -> Method:
    """Retrieval and streaming heads, for the prompt's queries and for the cache."""
    check_flag("dense_prefill", dense_prefill)
    table = load_gates(gates) if isinstance(gates, str | os.PathLike) else gates
    retrieval = highest_heads(np.clip(numbers_by_head("gates", table), 0, 1), share)
    cache = DuoAttentionCache(retrieval, StreamingCache(sinks, window, block_size))
    return Method("duoattention", FullPrefill() if dense_prefill else SparsePrefill(cache), cache)


def highest_heads(numbers: Float64[np.ndarray, "layers Hkv"], share: float) -> tuple[tuple[bool, ...], ...]:
    """Whether each KV head is one of the share of the highest numbers, rounded; ties go to the lower layer and head."""
    check_number("share", share, above=0, at_most=1)
    order = np.argsort(-numbers, axis=None, kind="stable")
    marked: np.ndarray = np.isin(np.arange(order.size), order[: round(share * order.size)])
    return tuple(map(tuple, marked.reshape(numbers.shape).tolist()))


def load_gates(path: str | os.PathLike[str]) -> Float64[np.ndarray, "layers Hkv"]:
    """Gates of a published full_attention_heads.tsv: a row for each layer, a column for each KV head, tabs between."""
    message = f"{os.fspath(path)}: must hold rows of one length, of numbers with tabs between"
    with open(path, encoding="utf-8") as file, explaining(message, ValueError):
        rows = [[float(cell) for cell in line.split("\t")] for line in file if line.strip()]
        return np.array(rows, np.float64).reshape(len(rows), -1)
