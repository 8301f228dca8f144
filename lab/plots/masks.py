"""The tokens of a prompt that a method keeps, as masks over its tokens, a layer at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import pad_tokens
from tca_jax.engine.read import Calls
from tca_jax.lab.rivals.repetition import repeat
from tca_jax.layer_passes import TextPass, layer_program
from tca_jax.methods.base import CachePolicy, Heads, Method, last_queries
from tca_jax.methods.regions import Selection
from tca_jax.pallas_kernels.select_tokens import selection_mask


def masks_of(lm: LM, ids: Sequence[int]) -> list[Bool[Array, "1 Hkv L"]]:
    """The tokens of a prompt with ranked blocks that the model's method keeps in each layer; L is padded."""
    policy: Any = lm.method.cache
    if policy.reader is None:
        shared = policy.by_scores  # others may differ: a program for each layer
        layers = TextPass(lm, ids).layers(
            _read_layer,
            lambda number: (lm.settings_of(number),),
            of_layer=lambda number: {"layer": 0 if shared else number},
            method=lm.method,
        )
        return list(layers)
    tokens, lengths = map(jnp.asarray, pad_tokens([list(ids)]))
    scores = repeat(lm, policy.repetition, tokens, lengths, Calls())[1]
    heads = [Heads.all(lm.config.num_kv_heads)] * lm.config.num_layers
    selections = policy.select_repeated(heads, jnp.stack(scores), lengths)
    return list(jax.vmap(lambda selection: _mask(policy, selection, lengths))(selections))


def _mask(policy: CachePolicy, selection: Selection, lengths: Int[Array, " B"]) -> Bool[Array, "B Hkv L"]:
    """The window of the next query, and the selection left of it."""
    chosen = selection_mask(selection.scores, selection.budgets, block_size=policy.block_size)
    return chosen | _window(policy, chosen.shape[-1], lengths)


def _window(policy: CachePolicy, tokens: int, lengths: Int[Array, " B"]) -> Bool[Array, "B 1 L"]:
    return jnp.arange(tokens) >= (policy.num_ranked_blocks(lengths) * policy.block_size)[:, None, None]


@functools.partial(layer_program, static=("method", "layer"))
def _read_layer(
    module: Any,
    x: Float[Array, "1 L D"],
    cos: Array,
    sin: Array,
    settings: Any,
    lengths: Int[Array, " 1"],
    *,
    method: Method,
    layer: int,
) -> tuple[Array, Bool[Array, "1 Hkv L"]]:
    """A layer of a prompt under a method, and its mask."""
    prefill: Any = method.prefill
    policy: Any = method.cache

    def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, Array]:
        heads, queries = Heads.all(k.shape[2]), last_queries(q, lengths, policy.num_queries)
        if policy.by_scores:
            positions = jnp.minimum(jnp.arange(x.shape[1]), lengths[:, None] - 1)
            scores = policy.score(settings, module.attention_norm(x), positions)
            kept = policy.stays(settings, scores) | _window(policy, k.shape[1], lengths)
            kept = kept | policy.reserved(queries, k, lengths) if policy.reserve else kept
            chosen = prefill.choose(settings, q, k, v, scores, lengths, "auto")
            return prefill.attend_chosen(q, k, v, chosen, lengths, "auto").out, kept
        selection = policy.select(layer, heads, queries, k, v, lengths)
        out = prefill.attend(layer, heads, q, k, v, lengths, None, "auto").out  # selects again what it reads
        return out, _mask(policy, selection, lengths)

    return module(x, cos, sin, attention, None)
