"""Methods that score every token once, by its hidden state: scores say what stays and what prompts attend to."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.methods.base import Attended, CachePolicy, Heads, Layer, PrefillPolicy
from tca_jax.methods.regions import Selected, Selection
from tca_jax.pallas_kernels.backends import Backend


class BlockMeans(NamedTuple):
    """A mean of each block of a prompt, and what is added to its logit; -inf for blocks without one."""

    k: Float[Array, "B N H d"]
    v: Float[Array, "B N H d"]
    bias: Float32[Array, "B H N"]


class ScoredCache(CachePolicy):
    """Tokens stay by their scores, which are stored while they are in the window. `settings` are a layer's arrays.

    Attributes:
        means: Whether evicted tokens of a block leave their mean.
    """

    means: bool

    @abc.abstractmethod
    def of_heads(self, settings: Any, heads: Heads) -> Any:
        """Settings of a layer for some of its KV heads."""

    @abc.abstractmethod
    def score(self, settings: Any, x: Float[Array, "B L D"], positions: Int[Array, "B L"]) -> Float32[Array, "B H L"]:
        """Scores by the hidden states at the input of the layer's projections."""

    @abc.abstractmethod
    def part_of_pages(self, settings: Any) -> Float32[Array, ""]:
        """Of the pages that are left for a row's kept tokens, the part that a layer may take."""

    @abc.abstractmethod
    def stays(self, settings: Any, scores: Float32[Array, "*t H n"]) -> Bool[Array, "*t H n"]:
        """Which tokens stay outside of the window."""

    @abc.abstractmethod
    def block_means(
        self,
        k: Float[Array, "B L H d"],
        v: Float[Array, "B L H d"],
        scores: Float32[Array, "B H L"],
        members: Bool[Array, "B H L"],
    ) -> BlockMeans:
        """Means of the members of each block."""

    def selection(self, stays: Bool[Array, "B H L"]) -> Selection:
        """Chosen tokens of whole blocks as a selection."""
        b = self.block_size
        whole = stays[..., : stays.shape[-1] // b * b]
        budgets = whole.reshape(*whole.shape[:-1], -1, b).sum(axis=-1, dtype=jnp.int32)
        return Selection(stays.astype(jnp.float32), budgets)

    def select(
        self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Selection:
        raise AssertionError("tokens are selected by their scores")


class ScoredPrefill(PrefillPolicy):
    """Prompt queries attend to what scores say."""

    @abc.abstractmethod
    def attend_scored(
        self,
        settings: Any,
        q: Float[Array, "B L Hq d"],
        k: Float[Array, "B L Hkv d"],
        v: Float[Array, "B L Hkv d"],
        scores: Float32[Array, "B Hkv L"],
        lengths: Int[Array, " B"],
        backend: Backend,
    ) -> Attended:
        """Causal attention of whole prompts, right-padded, by `ScoredCache.score`."""

    def attend(
        self,
        layer: Layer,
        heads: Heads,
        q: Array,
        k: Array,
        v: Array,
        lengths: Array,
        selected: Selected | None,
        backend: Backend,
    ) -> Attended:
        raise AssertionError("scores are needed")
