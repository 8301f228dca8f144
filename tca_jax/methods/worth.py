"""Predicted worth: selected tokens, blocks by score, means of the others (docs/worth.md)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.methods.base import Attended, BlockMeans, CachePolicy, Heads, Method, PrefillPolicy
from tca_jax.methods.regions import Regions, Selected, Selection, causal_pairs, selected_pairs, sum_of_counts
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.block_scores import block_scores
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.numerics import MASKED, cdiv
from tca_jax.pallas_kernels.observation_scores import observation_scores
from tca_jax.pallas_kernels.prefill_attention import FarBlocks, prefill_attention
from tca_jax.pallas_kernels.reserve_tokens import reserve_tokens

FIRST = 4  # first tokens, which every query sees
BLOCK = 128
WINDOW = 256
RESERVE = WINDOW // 2  # tokens of each head for a question in the prompt
OBSERVED, SPREAD = 64, 16  # last queries that choose them, and tokens that a chosen one's score reaches
IN_FULL = 4096  # tokens up to which prompts are read in full: sparse reading would launch more than it saves
_SIZES: Any = {"block_size": BLOCK, "window": WINDOW}


class ReadSettings(NamedTuple):
    """How prompts are read; all data, so that one program serves every profile."""

    theta: Float32[Array, "*layers"]  # tokens of at least this predicted worth are selected; inf: none
    score: Float32[Array, "*layers"]  # blocks of at least this score in a sampled query are read; inf: none
    means: Bool[Array, "*layers"]  # whether the other blocks' means are read


class WorthSettings(NamedTuple):
    """Arrays of layers, from a profile."""

    maps: Float32[Array, "*layers Hkv D1"]  # of hidden states to predicted log worth; the last entry is the constant
    theta: Float32[Array, "*layers"]  # tokens of at least this predicted worth stay
    read: ReadSettings
    left: Float32[Array, "*layers"]  # of the pages that are left, the part that this layer may take


class Chosen(NamedTuple):
    """Tokens, blocks and means that the queries of a layer attend to besides their window."""

    kept: Selected  # tokens
    far: FarBlocks  # blocks and means of the others
    pairs: Float32[Array, " B"]  # of a query and a key or mean, mean over heads


@dataclasses.dataclass(frozen=True)
class WorthCache(CachePolicy):
    """Tokens of at least a predicted worth stay, and a reserve; the others of a block leave their mean."""

    capacity: float = 1.0  # share of the tokens of all heads that a row has pages for
    block_size: int = BLOCK
    window: int = WINDOW
    means: bool = True
    reserve: int = RESERVE
    num_queries = OBSERVED
    layers_differ: ClassVar[bool] = False
    by_scores: ClassVar[bool] = True

    def for_programs(self) -> WorthCache:
        return dataclasses.replace(self, capacity=1.0)

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return self.num_ranked_blocks(prompt_tokens) * self.block_size

    def shared_capacities(self, prompt_tokens: int, num_layers: int, num_kv_heads: int) -> tuple[int, ...]:
        most = self.capacities(0, prompt_tokens)
        return (min(most, math.ceil(self.capacity * most) + self.reserve) * num_layers * num_kv_heads,)

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> int:
        return self.num_leaving_blocks(prompt_tokens, new_tokens) * self.block_size

    def select(self, *_: Any, **__: Any) -> Selection:
        raise AssertionError("tokens are selected by their scores")

    def of_heads(self, settings: WorthSettings, heads: Heads) -> WorthSettings:
        """Settings of a layer for some of its KV heads."""
        return settings if heads.axis is None else settings._replace(maps=settings.maps[heads.numbers])

    def score(
        self, settings: WorthSettings, x: Float[Array, "B L D"], positions: Int[Array, "B L"]
    ) -> Float32[Array, "B H L"]:
        """Predicted worth, by the hidden states at the input of the layer's projections."""
        maps = settings.maps[:, :-1].astype(x.dtype)  # profiles store bfloat16
        worth = jnp.einsum("bld,hd->blh", x, maps, preferred_element_type=jnp.float32)
        worth += settings.maps[:, -1]
        return jnp.where(positions[..., None] < FIRST, jnp.inf, worth).swapaxes(1, 2)

    def stays(self, settings: WorthSettings, scores: Float32[Array, "*t H n"]) -> Bool[Array, "*t H n"]:
        """Which tokens stay outside of the window."""
        return scores >= settings.theta

    def reserved(self, q_last: Array, k: Array, lengths: Array) -> Bool[Array, "B H L"]:
        """The `reserve` tokens of each head, by the last `num_queries` prompt queries."""
        scores = observation_scores(q_last, k, lengths, spread=SPREAD)
        ranked = self.num_ranked_blocks(lengths) * self.block_size
        return reserve_tokens(scores, ranked, reserve=self.reserve)

    def block_means(self, k: Array, v: Array, scores: Array, members: Array) -> BlockMeans:
        """Means of the members of each block."""
        return block_means(k, v, scores, members, self.block_size)


@dataclasses.dataclass(frozen=True)
class WorthPrefill(PrefillPolicy):
    """Prompts attend to selected tokens, blocks by score and means of the others."""

    layers_differ: ClassVar[bool] = False
    by_scores: ClassVar[bool] = True

    def attend(self, *_: Any, **__: Any) -> Attended:
        raise AssertionError("scores are needed")

    def choose(
        self, settings: WorthSettings, q: Array, k: Array, v: Array, scores: Array, lengths: Array, backend: Backend
    ) -> Chosen | None:
        """Chosen tokens, blocks and means; None where queries attend to all that they can."""
        if k.shape[1] <= IN_FULL:
            return None
        return choose_by_worth(q, k, v, scores, lengths, settings.read, backend=backend)

    def attend_chosen(
        self, q: Array, k: Array, v: Array, chosen: Chosen | None, lengths: Array, backend: Backend
    ) -> Attended:
        """Attention to those and to the window."""
        if chosen is None:
            return Attended(causal_attention(q, k, v, lengths, backend=backend), causal_pairs(lengths))
        of_tokens = chosen.kept.pool, chosen.kept.budgets
        out = prefill_attention(q, k, v, *of_tokens, lengths, far=chosen.far, **_SIZES, backend=backend)
        return Attended(out, chosen.pairs)


def by_worth(capacity: float = 1.0) -> Method:
    """The method of `WorthSettings`; `capacity` is the share of all heads' tokens that a row has pages for."""
    return Method("worth", WorthPrefill(), WorthCache(capacity))


def choose_by_worth(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    worth: Float32[Array, "B Hkv L"],  # predicted
    lengths: Int[Array, " B"],
    settings: ReadSettings,
    *,
    stride: int = 16,  # every which query of a tile scores blocks
    backend: Backend = "auto",
) -> Chosen:
    """Tokens of high predicted worth, blocks of high score for each tile of queries, and means of the other blocks."""
    length, blocks = k.shape[1], cdiv(k.shape[1], BLOCK)
    place, block = jnp.arange(length), jnp.arange(blocks)
    there = (place < lengths[:, None])[:, None]
    selected = ((worth >= settings.theta) | (place < FIRST)) & there
    regions = Regions.plan(k.shape[0], [length] * k.shape[2], BLOCK)
    kept = regions.fill(Selection.of_tokens(selected, BLOCK), k, v, block_size=BLOCK, backend=backend)

    before = block < jnp.maximum(block[:, None] - WINDOW // BLOCK, 0)  # [tile, block]
    scores = block_scores(q, k, lengths, block_size=BLOCK, stride=stride, backend=backend)
    read = before & ((scores >= settings.score) | (lengths <= IN_FULL)[:, None, None, None])
    ends = jnp.cumsum(read, axis=-1, dtype=jnp.int32)
    first, slots = jnp.broadcast_to(block * BLOCK, read.shape), jnp.where(read, ends - 1, blocks)
    listed = jnp.put_along_axis(jnp.zeros_like(ends), slots, first, axis=-1, mode="drop", inplace=False)
    counts = ends[..., -1]
    mean_k, mean_v, entropy = block_means(k, v, worth, ~selected & there, BLOCK)
    bias = jnp.where(before & ~read, entropy[:, :, None], -jnp.inf)
    mean_counts = jnp.broadcast_to(jnp.where(settings.means, before.sum(axis=-1), 0), counts.shape)
    means = mean_k.astype(k.dtype), mean_v.astype(v.dtype)
    far = FarBlocks(listed, counts, selected, *means, bias, mean_counts.astype(jnp.int32))
    queries = jnp.clip(lengths[:, None] - block * BLOCK, 0, BLOCK)[:, None]  # of each tile
    rest = jnp.pad(kept.budgets, ((0, 0), (0, 0), (0, blocks - kept.budgets.shape[-1])))
    keys = jnp.where(read, BLOCK - rest[:, :, None], settings.means & (bias > -jnp.inf)).sum(axis=-1)
    pairs = selected_pairs(kept.budgets, lengths, **_SIZES) + sum_of_counts(queries * keys)
    return Chosen(kept, far, pairs.mean(axis=-1))


def block_means(
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    worth: Float32[Array, "B Hkv L"],
    members: Bool[Array, "B Hkv L"],
    block_size: int,
) -> BlockMeans:
    """Mean key and value of each block's members, with weights proportional to exp(worth); the weights' entropy.

    With p the weights, a query's log sum of exp(q.k_j) is at least q.(sum p_j k_j) + entropy(p). -inf without members.
    """
    (batch, length, kv_heads, _), blocks = k.shape, cdiv(k.shape[1], block_size)
    if rest := blocks * block_size - length:
        members, worth = (jnp.pad(x, ((0, 0), (0, 0), (0, rest))) for x in (members, worth))
        k, v = (jnp.pad(x, ((0, 0), (0, rest), (0, 0), (0, 0))) for x in (k, v))
    there, worth = (x.reshape(batch, kv_heads, blocks, block_size) for x in (members, worth))
    logits = jnp.where(there, worth, MASKED)
    logits -= logits.max(axis=-1, keepdims=True)
    p = jnp.where(there, jnp.exp(logits), 0)
    total = jnp.maximum(p.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    p /= total
    entropy = (jnp.log(total) - (p * logits).sum(axis=-1, keepdims=True))[..., 0]

    def mean(x: Array) -> Float32[Array, "B N Hkv d"]:
        # The means of each head's weights over all heads' tokens: for products per head XLA would transpose k and v.
        shape, tokens = (batch, blocks, kv_heads, kv_heads, -1), x.reshape(batch, blocks, block_size, -1)
        means = jnp.einsum("bhnt,bntx->bnhx", p.astype(x.dtype), tokens, preferred_element_type=jnp.float32)
        return jnp.einsum("bnhhd->bnhd", means.reshape(shape))

    return BlockMeans(mean(k), mean(v), jnp.where(there.any(axis=-1), entropy, -jnp.inf))
