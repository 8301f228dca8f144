"""CAKE (arXiv 2503.12491): layers share one budget by their preferences, and unsteady attention counts beside its mean.

Follows the published code (antgroup/cakekv). A head keeps the highest mean + gamma variance of the attention of the
last queries, pooled, averaged over the group. A layer's preference is H^(1/tau1) V^(1/tau2), with the entropy H of that
attention (spatial) and its variance V over the queries (temporal); its budget is its share of all layers' preferences.
What differs:

- When preferences are measured. The paper measures them on each prompt, and shrinks the caches of earlier layers while
  it reads the later ones. Here a layer's cache has a size that is known before any data, so preferences are measured
  before, on texts of the user's (`tca_jax.calibration.layer_preferences`), and are the same for all prompts. It costs
  the adaption of layers to single prompts; the tokens within a layer are chosen from the prompt as in the paper.
- What passes a layer's tokens. The code deals it out among the other layers once and cuts off what is then too much.
  Here a `share` is dealt out until all is placed. Of a `capacity` it is left over: the tokens that a layer keeps of a
  short prompt must not depend on the longer ones beside it in a batch, nor may a long prompt's cache have room for what
  a layer would take of a short one.
- While decoding. The code goes on evicting, so that budgets stay what they are after the prompt; here tokens behind the
  prompt stay.
- The window. There, the last `observation` tokens stay; here at least `window`, with the left edge on a block boundary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from tca_jax.errors import UserError, check_not_negative
from tca_jax.methods.base import Heads, Method
from tca_jax.methods.compression import PromptCompression
from tca_jax.methods.full import FullPrefill
from tca_jax.methods.observation import check_observation, observed_attention, pool
from tca_jax.pallas_kernels.backends import Backend

#: Fewest queries that have a variance.
_FEWEST = 2


@dataclasses.dataclass(frozen=True)
class CAKECache(PromptCompression):
    """The window and the tokens of the highest mean + gamma variance, in some layers more than in others.

    `capacity` and `share` are means over the layers. Under a capacity, a layer holds prompts whole that are shorter
    than its own.

    Attributes:
        preferences: Of every layer, not negative.
        gamma: Weight of the variance.
        observation: Prompt queries that are looked at, counted from the last; at most `window`.
        kernel: Neighbours that a token's score is averaged over, odd.
    """

    preferences: tuple[float, ...]
    gamma: float = 200.0
    observation: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative("gamma", self.gamma)
        check_observation(self.observation, self.kernel, self.window, at_least=_FEWEST)

    @property
    def num_queries(self) -> int:  # type: ignore[override]
        return self.observation

    def num_kept(self, layer: int, max_blocks: int) -> Int[np.ndarray, " N"]:
        if self.capacity is None:
            mean = tuple(self.mean_kept(max_blocks).tolist())
            return _budget_table(self.preferences, mean, self.block_size)[:, layer]
        total = (self.capacity - self.window) * len(self.preferences)
        budget = layer_budgets(np.asarray(self.preferences), total, most=total)[layer]
        return np.minimum(budget, np.arange(max_blocks + 1) * self.block_size)

    def scores(
        self, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Float32[Array, "B Hkv L"]:
        def indicator(attention: Float32[Array, "B Hkv G O t"]) -> Float32[Array, "B Hkv G t"]:
            return attention.mean(axis=-2) + self.gamma * attention.var(axis=-2, ddof=1)

        return pool(observed_attention(q, k, lengths, indicator), self.kernel).mean(axis=2)

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        if len(self.preferences) != num_layers:
            raise UserError(f"preferences has {len(self.preferences)} layers: must be {num_layers}")


def cake(
    preferences: Sequence[float] | np.ndarray,
    capacity: int = 1024,
    share: float | None = None,
    gamma: float = 200.0,
    observation: int = 32,
    kernel: int = 5,
    window: int = 128,
    block_size: int = 128,
) -> Method:
    """Full attention for the prompt's queries, CAKE's selection in the cache.

    Args:
        preferences: Of every layer, `[layers]`, not negative, from `tca_jax.calibration.layer_preferences`; equal
            numbers give all layers the same budget.
        capacity: Tokens of a prompt that a KV head holds, the mean over layers, the window counted as `window`; the
            code's `cache_size`.
        share: Instead: kept share of the tokens left of the window, the mean over layers, in (0, 1].
        gamma: Weight of the variance.
        observation: Last prompt queries that are looked at, 2 to `window`; the code's `window_size`.
        kernel: Neighbours that scores are averaged over, odd.
        window: Least number of local tokens, a multiple of `block_size`.
        block_size: Tokens in a block, a power of two.

    Raises:
        ValueError: an option is not allowed.
    """
    weights = _checked_preferences(preferences)
    cache = CAKECache(capacity, share, window, block_size, weights, gamma, observation, kernel)
    return Method("cake", FullPrefill(), cache)


def observed_spread(
    q_last: Float[Array, "B O Hq d"], k: Float[Array, "B L Hkv d"], lengths: Int[Array, " B"]
) -> Float32[Array, "B Hkv 2"]:
    """Of each KV head the entropy over tokens and the variance over queries, summed over its observing queries.

    Args:
        q_last: Last prompt queries after RoPE `[B, O, Hq, d]`, O at least 2.
        k: Prompt keys after RoPE `[B, L, Hkv, d]`, right-padded.
        lengths: Prompt lengths `[B]`.
    """

    def of_keys(attention: Float32[Array, "B Hkv G O t"]) -> tuple[Array, Array]:
        entropy = -jnp.sum(attention * jnp.log(attention + 1e-10), axis=-2)
        return entropy, attention.var(axis=-2, ddof=1)

    return jnp.stack([x.sum(axis=(2, 3)) for x in observed_attention(q_last, k, lengths, of_keys)], axis=-1)


def layer_preference(spread: Float32[np.ndarray, "Hkv 2"], tau1: float = 1.0, tau2: float = 1.0) -> float:
    """How much cache a layer wants: H^(1/tau1) V^(1/tau2), H and V summed over heads.

    Args:
        spread: Entropy and variance of each KV head, from `observed_spread`.
        tau1: Temperature of the entropy.
        tau2: Temperature of the variance.
    """
    entropy, variance = spread.sum(axis=0, dtype=np.float64).tolist()
    return entropy ** (1 / tau1) * variance ** (1 / tau2)


def layer_budgets(preferences: Float[np.ndarray, " layers"], total: int, most: int) -> Int[np.ndarray, " layers"]:
    """Tokens of every layer: `total` in proportion to the preferences, and at most `most` in each.

    What passes `most` is dealt out evenly among the layers that have room.
    """
    budgets = np.minimum(np.floor(preferences / preferences.sum() * total), most).astype(np.int64)
    while (rest := total - budgets.sum()) > 0:
        open_layers = np.flatnonzero(budgets < most)
        each, extra = divmod(int(rest), len(open_layers))
        budgets[open_layers] += each
        budgets[open_layers[:extra]] += 1
        budgets = np.minimum(budgets, most)
    return budgets


@functools.lru_cache(maxsize=64)
def _budget_table(
    preferences: tuple[float, ...], mean_kept: tuple[int, ...], block_size: int
) -> Int[np.ndarray, "N layers"]:
    """Budgets of all layers for every number of ranked blocks, given the mean over layers."""
    weights = np.asarray(preferences)
    rows = [layer_budgets(weights, kept * len(weights), n * block_size) for n, kept in enumerate(mean_kept)]
    table = np.stack(rows).astype(np.int32)
    table.flags.writeable = False
    return table


def _checked_preferences(value: Any) -> tuple[float, ...]:
    array = np.asarray(value)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "fiu":
        raise UserError(f"preferences has shape {array.shape}, dtype {array.dtype}: must be numbers [layers]")
    if not (np.isfinite(array) & (array >= 0)).all() or not array.any():
        raise UserError(f"preferences = {array.tolist()}: must be finite, not negative, and not all 0")
    return tuple(array.astype(np.float64).tolist())
