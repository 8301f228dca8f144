"""CAKE (arXiv 2503.12491): layers share one budget by their preferences, and unsteady attention counts beside its mean.

Follows the published code (antgroup/cakekv). A head keeps the highest mean + gamma variance of the attention of the
last queries, pooled, averaged over the group. A layer's preference is H^(1/tau1) V^(1/tau2), with the entropy H of that
attention (spatial) and its variance V over the queries (temporal); its budget is its share of all layers' preferences.
What differs:

- When preferences are measured. The paper measures them on each prompt, and shrinks the caches of earlier layers while
  it reads the later ones. Here a layer's cache has a size that is known before any data, so preferences are measured
  before, on texts of the user's (`layer_preferences`), and are the same for all prompts. It costs
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
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, on_host
from tca_jax.engine.prompts import Prompt, encode_prompts
from tca_jax.errors import UserError, check_integer, check_not_negative, check_number
from tca_jax.lab.rivals.compression import PromptCompression
from tca_jax.lab.rivals.observation import check_observation, observed_attention, pool
from tca_jax.layer_passes import TextPass, attention_program
from tca_jax.methods.base import Heads, Method, last_queries
from tca_jax.methods.full import FullPrefill
from tca_jax.models.aliases import ALIASES
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.causal_attention import causal_attention

#: tau1 and tau2 that CAKE's authors publish (their model2tau.json), by the last part of the Hub id in lower case, for
#: budgets of 128 and 1024 tokens a head.
TEMPERATURES = MappingProxyType(
    {
        "llama-3.1-8b-instruct": {128: (1.6, 0.6), 1024: (1.6, 0.4)},
        "qwen2.5-7b-instruct": {128: (0.4, 0.6), 1024: (1.5, 0.6)},
    }
)
#: Fewest queries that have a variance.
_FEWEST = 2


@dataclasses.dataclass(frozen=True)
class CAKECache(PromptCompression):
    """The window and the tokens of the highest mean + gamma variance, in some layers more than in others.

    `capacity` and `share` are means over the layers. Under a capacity, a layer holds prompts whole that are shorter
    than its own.
    """

    preferences: tuple[float, ...] = ()  # of every layer, not negative, from `layer_preferences`
    gamma: float = 200.0  # weight of the variance
    observation: int = 32  # last prompt queries that are looked at, 2 to `window`; the code's `window_size`
    kernel: int = 5  # neighbours that scores are averaged over, odd

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
    """Full attention for the prompt's queries, CAKE's selection in the cache; options are the fields of `CAKECache`."""
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


def published_temperatures(model: str, capacity: int = 1024) -> dict[str, float]:
    """The temperatures that CAKE's authors tuned for a model, as `layer_preferences` takes them; 1 for other models.

    Args:
        model: Alias or Hub id, such as "llama3.1-8b-instruct" or "Qwen/Qwen2.5-7B-Instruct".
        capacity: Tokens that a KV head holds; those of the nearest published budget, by ratio.
    """
    name = _last_part(model)
    by_capacity = TEMPERATURES.get(_last_part(ALIASES.get(name, name)))
    if by_capacity is None:
        return {"tau1": 1.0, "tau2": 1.0}
    tau1, tau2 = by_capacity[min(by_capacity, key=lambda known: abs(math.log(known / capacity)))]
    return {"tau1": tau1, "tau2": tau2}


def _last_part(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower()


def layer_preferences(
    lm: LM, texts: Prompt | Sequence[Prompt], *, observation: int = 32, tau1: float = 1.0, tau2: float = 1.0
) -> Float32[np.ndarray, " layers"]:
    """CAKE's layer preferences, measured on texts of the user's, for the method cake.

    One forward pass with full attention over each text. The paper tunes the temperatures for each model and budget
    (0.4 to 1.9; `published_temperatures` has those of its models); its code takes 1 where nothing is tuned.

    Args:
        lm: The model; its method plays no part.
        texts: One or several texts or sequences of token ids; best as long as the prompts to come, and of their kind.
        observation: Last queries of each text that are looked at, at least 2.
        tau1: Temperature of the entropy over tokens, in (0, 100].
        tau2: Temperature of the variance over queries, in (0, 100].

    Returns:
        Each layer's share of all preferences, the mean over texts; sums to 1.

    Raises:
        ValueError: a number is not allowed, a text is not longer than `observation` tokens or longer than the model's
            context, or the model computes NaN or infinity.
        TypeError: `texts` holds something else than text and token ids.
    """
    check_integer("observation", observation, at_least=2)
    for name, tau in (("tau1", tau1), ("tau2", tau2)):
        check_number(name, tau, above=0, at_most=100)
    sequences = encode_prompts(lm, texts, "texts")
    for i, ids in enumerate(sequences):
        if not observation < len(ids) <= lm.config.max_context:
            raise UserError(
                f"texts[{i}] has {len(ids)} tokens: must have more than observation = {observation} and at most the "
                f"{lm.config.max_context} positions of model {lm.name!r}"
            )
    return np.mean([_shares(lm, ids, observation, tau1, tau2) for ids in sequences], axis=0).astype(np.float32)


def _shares(lm: LM, ids: Sequence[int], observation: int, tau1: float, tau2: float) -> np.ndarray:
    """Of each layer in one text."""
    layers = TextPass(lm, ids).layers(_spread_layer, observation=observation)
    preferences = np.array([layer_preference(on_host(each)[0], tau1, tau2) for each in layers], np.float64)
    if not np.isfinite(preferences).all():
        layer = int(np.argmin(np.isfinite(preferences)))
        raise UserError(f"model {lm.name!r} computes NaN or infinity in the attention of layer {layer}")
    return preferences / preferences.sum()


@functools.partial(attention_program, static=("observation",), donate=True, outputs=(SAME, SECOND_HEADS))
def _spread_layer(
    q: Float[Array, "1 L Hq d"],
    k: Float[Array, "1 L Hkv d"],
    v: Float[Array, "1 L Hkv d"],
    lengths: Int32[Array, " 1"],
    observation: int,
) -> tuple[Float[Array, "1 L Hq d"], Float32[Array, "1 Hkv 2"]]:
    """Full attention, and how it is spread."""
    spread = observed_spread(last_queries(q, lengths, observation), k, lengths)
    return causal_attention(q, k, v, lengths), spread
