"""search_patterns: which of MInference's patterns each query head of a model keeps most attention under."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from tca_jax.calibration.layer_programs import HEADS, attention_program
from tca_jax.calibration.passes import ForwardPass
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, on_host
from tca_jax.engine.prompts import Prompt, encode_prompts
from tca_jax.errors import UserError
from tca_jax.methods.checks import check_integer
from tca_jax.methods.head_patterns import HeadPattern
from tca_jax.methods.pattern_search import CANDIDATES, FIRST_QUERY, pattern_scores
from tca_jax.pallas_kernels.causal_attention import causal_attention


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
    run = ForwardPass(lm, sequences[0])
    for kept in run.layers(_search_layer, candidates=tuple(candidates), first_query=first_query):
        by_kv_head = on_host(kept).reshape(lm.config.num_kv_heads, -1, len(candidates))
        own = lm.in_model_order(len(table), by_kv_head).reshape(-1, len(candidates))
        table.append([_best(scores, candidates) for scores in own])
        tell(len(table), layers)
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
