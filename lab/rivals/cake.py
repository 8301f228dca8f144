"""CAKE (arXiv 2503.12491): layers share one budget by their preferences; variance of attention counts beside its mean.

Follows antgroup/cakekv. A head keeps the highest mean + gamma variance of the attention of the last queries, pooled,
averaged over the group. A layer's preference is H^(1/tau1) V^(1/tau2), with the entropy H of that attention over tokens
and its variance V over queries; its budget is its share of all preferences. What differs: `layer_preferences` measures
preferences on texts, the paper on each prompt. The code deals out once what passes a layer's tokens; here a `share` is
dealt out until all is placed, and a `capacity` is not, so that rows do not depend on longer ones in the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, on_host
from tca_jax.engine.prompts import Prompt
from tca_jax.errors import check_integer, check_not_negative, check_number, require
from tca_jax.lab.rivals.compression import over_heads, rival
from tca_jax.lab.rivals.scores import last_attention
from tca_jax.lab.rivals.snapkv import ObservingCache
from tca_jax.lab.rivals.tables import check_finite, encode_texts
from tca_jax.layer_passes import TextPass, attention_program
from tca_jax.methods.base import last_queries
from tca_jax.models.aliases import ALIASES
from tca_jax.pallas_kernels.causal_attention import causal_attention

#: tau1 and tau2 that CAKE's authors publish (their model2tau.json), by the last part of the Hub id in lower case, for
#: budgets of 128 and 1024 tokens a head.
TEMPERATURES = {
    "llama-3.1-8b-instruct": {128: (1.6, 0.6), 1024: (1.6, 0.4)},
    "qwen2.5-7b-instruct": {128: (0.4, 0.6), 1024: (1.5, 0.6)},
}


@dataclasses.dataclass(frozen=True)
class CAKECache(ObservingCache):
    """The window and the tokens of the highest mean + gamma variance; `capacity` and `share` are means over layers."""

    capacity: int | None = 1024
    preferences: Any = dataclasses.field(kw_only=True)  # of every layer, from `layer_preferences`; kept as a tuple
    gamma: float = 200.0  # weight of the variance

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative("gamma", self.gamma)
        check_integer("observation", self.observation, at_least=2)  # of which there is a variance
        array = np.asarray(self.preferences)
        fits = array.ndim == 1 and array.size and array.dtype.kind in "fiu"
        require(fits, f"preferences has shape {array.shape}, dtype {array.dtype}: must be numbers [layers]")
        allowed = array.any() and (np.isfinite(array) & (array >= 0)).all()
        require(allowed, f"preferences = {array.tolist()}: must be finite, not negative, and not all 0")
        object.__setattr__(self, "preferences", tuple(array.astype(np.float64).tolist()))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        given = len(self.preferences)
        require(given == num_layers, f"preferences has {given} layers: must be {num_layers}")

    def num_kept(self, layer: int, max_blocks: int) -> Int[np.ndarray, " N"]:
        ranked, layers = np.arange(max_blocks + 1) * self.block_size, len(self.preferences)
        if self.capacity is not None:
            total = (self.capacity - self.window) * layers
            return np.minimum(layer_budgets(self.preferences, total, most=total)[layer], ranked)
        totals = self.mean_kept(max_blocks) * layers
        sizes = zip(totals.tolist(), ranked.tolist(), strict=True)
        return np.array([layer_budgets(self.preferences, *each)[layer] for each in sizes], np.int32)

    def score(self, q: Array, k: Array, v: Array, lengths: Array) -> Array:
        attention = last_attention(q, k, lengths)
        return self.pooled(attention.mean(axis=2) + self.gamma * attention.var(axis=2, ddof=1), lengths)


cake = rival("cake", CAKECache)


@functools.lru_cache(maxsize=2**14)
def layer_budgets(preferences: tuple[float, ...], total: int, most: int) -> tuple[int, ...]:
    """Tokens of every layer: `total` by preference, at most `most`; the rest is dealt out evenly where room is."""
    weights = np.asarray(preferences)
    budgets = np.minimum(np.floor(weights / weights.sum() * total), most).astype(np.int64)
    while (rest := total - budgets.sum()) > 0:
        open_layers = np.flatnonzero(budgets < most)
        each, extra = divmod(int(rest), len(open_layers))
        budgets[open_layers] += each
        budgets[open_layers[:extra]] += 1
        budgets = np.minimum(budgets, most)
    return tuple(budgets.tolist())


def published_temperatures(model: str, capacity: int = 1024) -> dict[str, float]:
    """The temperatures that CAKE's authors tuned for a model, as `layer_preferences` takes them; 1 for other models.

    Args:
        model: Alias or Hub id, such as "llama3.1-8b-instruct" or "Qwen/Qwen2.5-7B-Instruct".
        capacity: Tokens that a KV head holds; those of the nearest published budget, by ratio.
    """
    name = model.rsplit("/", 1)[-1].lower()
    name = ALIASES.get(name, name).rsplit("/", 1)[-1].lower()
    by_capacity = TEMPERATURES.get(name, {capacity: (1.0, 1.0)})
    nearest = min(by_capacity, key=lambda known: abs(math.log(known / capacity)))
    return dict(zip(("tau1", "tau2"), by_capacity[nearest], strict=True))


def layer_preferences(
    lm: LM, texts: Prompt | Sequence[Prompt], *, observation: int = 32, tau1: float = 1.0, tau2: float = 1.0
) -> Float32[np.ndarray, " layers"]:
    """CAKE's layer preferences, measured on texts of the user's, for the method cake.

    One forward pass with full attention over each text. The paper tunes the temperatures for each model and budget
    (0.4 to 1.9; `published_temperatures` has those of its models); its code takes 1 where nothing is tuned.

    Args:
        lm: The model; its method plays no part.
        texts: One or several texts or sequences of token ids; best as long as the prompts to come, and of their kind.
        observation: Last queries of each text that count, at least 2.
        tau1: Temperature of the entropy over tokens, in (0, 100].
        tau2: Temperature of the variance over queries, in (0, 100].

    Returns:
        Each layer's share of all preferences, the mean over texts; sums to 1.
    """
    check_integer("observation", observation, at_least=2)
    check_number("tau1", tau1, above=0, at_most=100)
    check_number("tau2", tau2, above=0, at_most=100)
    shares = []
    for ids in encode_texts(lm, texts, observation=observation):
        layers = TextPass(lm, ids).layers(_spread_layer, observation=observation)
        spreads = np.array([on_host(each)[0].sum(axis=0, dtype=np.float64) for each in layers])
        preferences = (spreads ** [1 / tau1, 1 / tau2]).prod(axis=1)
        check_finite(lm, preferences)
        shares.append(preferences / preferences.sum())
    return np.mean(shares, axis=0).astype(np.float32)


@functools.partial(attention_program, static=("observation",), donate=True, outputs=(SAME, SECOND_HEADS))
def _spread_layer(q: Array, k: Array, v: Array, lengths: Array, observation: int) -> tuple[Array, Array]:
    """Full attention; of the observing queries of each KV head, the entropy over tokens and the variance, summed."""

    def of_head(q: Float[Array, "1 O G d"], k: Float[Array, "1 L d"]) -> Float32[Array, "1 2"]:
        before = jnp.arange(k.shape[1]) < (lengths - observation)[:, None]
        attention = jnp.where(before, last_attention(q, k, lengths), 0)
        entropy = -jnp.sum(attention * jnp.log(attention + 1e-10), axis=(1, 2, 3))
        return jnp.stack([entropy, attention.var(axis=2, ddof=1).sum(axis=(1, 2))], axis=-1)

    return causal_attention(q, k, v, lengths), over_heads(of_head, last_queries(q, lengths, observation), k)
