"""What other methods need to know of a model: MInference's patterns, CAKE's preferences, KVzip's scores of heads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, OverMesh, on_host
from tca_jax.engine.prompts import Prompt, encode_prompts, pad_tokens
from tca_jax.engine.repeat import attention_to_prompts, read_everything
from tca_jax.errors import UserError, check_integer, check_number
from tca_jax.layer_passes import HEADS, TextPass, attention_program
from tca_jax.methods.base import last_queries
from tca_jax.methods.cake import layer_preference, observed_spread
from tca_jax.methods.head_patterns import HeadPattern
from tca_jax.methods.pattern_search import CANDIDATES, FIRST_QUERY, pattern_scores
from tca_jax.models.aliases import ALIASES
from tca_jax.pallas_kernels.causal_attention import causal_attention

#: tau1 and tau2 that CAKE's authors publish (their model2tau.json), by the last part of the Hub id in lower case, for
#: budgets of 128 and 1024 tokens a head.
TEMPERATURES = MappingProxyType(
    {
        "llama-3.1-8b-instruct": {128: (1.6, 0.6), 1024: (1.6, 0.4)},
        "qwen2.5-7b-instruct": {128: (0.4, 0.6), 1024: (1.5, 0.6)},
    }
)


def search_patterns(
    lm: LM,
    text: Prompt,
    *,
    candidates: tuple[HeadPattern, ...] = CANDIDATES,
    first_query: int = FIRST_QUERY,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[list[Any]]]:
    """Finds a pattern for every query head by one pass of full attention over a text, layer after layer.

    Args:
        lm: The model.
        text: A text, or token ids, as long as the prompts to come; the published search takes 30,000 tokens.
        candidates: Patterns to compare; the first of equals is taken.
        first_query: Queries before this one do not count.
        progress: Called with the layers done and their number.

    Returns:
        For each layer a list with `[kind, columns, diagonals, kept]` a query head, `kept` the share of its attention
        that it keeps: what `methods.get("minference", patterns=...)` takes, and what JSON holds.

    Raises:
        ValueError: the text has no query that counts, it is several, or there are no candidates.
    """
    check_integer("first_query", first_query, at_least=0)
    if not candidates:
        raise UserError("candidates = (): must hold at least one pattern")
    sequences = encode_prompts(lm, text, "text")
    if len(sequences) != 1:
        raise UserError(f"text holds {len(sequences)} texts: must be one")
    tokens, layers = len(sequences[0]), lm.config.num_layers
    if tokens <= first_query:
        raise UserError(f"text has {tokens} tokens: must have more than first_query = {first_query}")
    tell, table = progress or (lambda done, total: None), list[list[Any]]()
    tell(0, layers)
    run = TextPass(lm, sequences[0], lambda: tell(len(table), layers))
    for kept in run.layers(_search_layer, candidates=tuple(candidates), first_query=first_query):
        by_kv_head = on_host(kept).reshape(lm.config.num_kv_heads, -1, len(candidates))
        own = lm.in_model_order(len(table), by_kv_head).reshape(-1, len(candidates))
        table.append([_best(scores, candidates) for scores in own])
    return table


def _best(scores: Float32[np.ndarray, " P"], candidates: tuple[HeadPattern, ...]) -> list[Any]:
    number = int(np.argmax(scores))
    return [*candidates[number], round(float(scores[number]), 6)]


@functools.partial(attention_program, static=("candidates", "first_query"), donate=True, outputs=(SAME, HEADS))
def _search_layer(
    q: Float[Array, "1 L Hq d"],
    k: Float[Array, "1 L Hkv d"],
    v: Float[Array, "1 L Hkv d"],
    lengths: Int32[Array, " 1"],
    candidates: tuple[HeadPattern, ...],
    first_query: int,
) -> tuple[Float[Array, "1 L Hq d"], Float32[Array, "Hq P"]]:
    """Full attention, and what its heads keep under each candidate."""
    scores = pattern_scores(q, k, lengths, candidates, first_query)[0]
    return causal_attention(q, k, v, lengths), scores


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


def repetition_scores(
    lm: LM, texts: Prompt | Sequence[Prompt], *, chunk: int = 2000, sinks: int = 4
) -> Float32[np.ndarray, "layers Hkv"]:
    """KVzip's scores of KV heads, measured on texts of the user's, for the method kvzip-heads.

    Each text is read with full attention and repeated to the model, as `kvzip` repeats a prompt. The authors take one
    text of natural language, and for code one more of code.

    Args:
        lm: The model; its method plays no part.
        texts: One or several texts or sequences of token ids, of more than `sinks` tokens.
        chunk: Tokens that are repeated at a time, at least 8.
        sinks: Tokens at the start of each text that do not count.

    Returns:
        The most attention that a token of any text gets in each head while its chunk is repeated, in [0, 1].

    Raises:
        ValueError: a number is not allowed, a text is too short or longer than the model's context, or the model
            computes NaN or infinity.
        TypeError: `texts` holds something else than text and token ids.
    """
    model = lm.with_method("kvzip", chunk=chunk, sinks=sinks)
    sequences = encode_prompts(lm, texts, "texts")
    for i, ids in enumerate(sequences):
        if not sinks < len(ids) <= lm.config.max_context:
            raise UserError(
                f"texts[{i}] has {len(ids)} tokens: must have more than sinks = {sinks} and at most the "
                f"{lm.config.max_context} positions of model {lm.name!r}"
            )
    found = []
    for ids in sequences:
        of_heads = on_host(_most_repeated(model.for_programs(), *map(jnp.asarray, pad_tokens([ids]))))
        found.append(np.stack([lm.in_model_order(layer, values) for layer, values in enumerate(of_heads)]))
    scores = np.max(found, axis=0)
    if not np.isfinite(scores).all():
        layer = int(np.argmin(np.isfinite(scores).all(axis=1)))
        raise UserError(f"model {lm.name!r} computes NaN or infinity in the attention of layer {layer}")
    return scores


def _most_repeated_program(
    lm: LM, tokens: Int32[Array, "1 L"], lengths: Int32[Array, " 1"]
) -> Float32[Array, "layers Hkv"]:
    repetition = lm.method.cache.repetition
    assert repetition is not None
    _, held = read_everything(lm, tokens, lengths)
    scores = attention_to_prompts(lm, repetition, held, tokens, lengths, lengths, tokens.shape[1])
    return scores[:, 0, :, repetition.sinks :].max(axis=-1)


_most_repeated = jax.jit(OverMesh(_most_repeated_program, (SAME, SAME), SECOND_HEADS))
