"""Prefill: logits after prompts, the caches they leave, and the source of values that are not finite.

A prompt is read in one program (`read_prompts`), or in several, each of neighbouring layers: `begin_reading`,
`read_layers` from the first layer to the last, `end_reading`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.cache import CacheLayout, PagedCache
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, OverMesh, heads_of, mean_of_devices, on_host
from tca_jax.errors import UserError
from tca_jax.methods.base import Attended, Heads, Method, last_queries, selection_for_prefill
from tca_jax.methods.pairs import causal_pairs, selected_pairs
from tca_jax.methods.regions import Selected
from tca_jax.models.names import parameters
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.kv import Pages
from tca_jax.pallas_kernels.paged_attention import paged_attention


class Read(NamedTuple):
    """Result of `read_prompts`."""

    logits: Float[Array, "B V"]  # of the token behind each prompt, float32 `[B, V]`
    cache: PagedCache | None  # what stays of the prompts; None unless a layout was given
    # Share of each prompt's causal pairs (query, key) that its queries attended to, float32 `[B]`.
    attended_share: Float32[Array, " B"]
    hidden: Float[Array, "B L D"] | None  # the decoder's output of all tokens, `[B, L, D]`; None unless `keep_hidden`


class Reading(NamedTuple):
    """Prompts between layers; `[B, m, D]` after the last one if it needs `tail_queries` only."""

    x: Float[Array, "B _ D"]  # the residual stream, `[B, L, D]`
    lengths: Int[Array, " B"]  # true lengths, `[B]`
    # Shares of causal pairs as in `Read.attended_share`, summed over the layers so far, float32 `[B]`.
    shares: Float32[Array, " B"]


def read_prompts(
    lm: LM,
    tokens: Int[Array, "B L"],  # prompts, right-padded
    lengths: Int[Array, " B"],  # true lengths, at least 1
    layout: CacheLayout | None,  # of the cache that is filled; None for none
    *,
    keep_hidden: bool = False,  # whether `Read.hidden` is wanted
    backend: Backend = "auto",
) -> Read:
    """Runs the model over prompts."""
    if (reader := own_reader(lm, layout)) is not None:
        return reader(lm, tokens, lengths, layout, keep_hidden=keep_hidden, backend=backend)
    begun = begin_reading(lm, tokens, lengths, layout)
    layers = 0, lm.config.num_layers
    reading, cache = read_layers(lm, *begun, layers, layout, keep_hidden=keep_hidden, backend=backend)
    return end_reading(lm, reading, cache, keep_hidden=keep_hidden)


def own_reader(lm: LM, layout: CacheLayout | None) -> Callable[..., Read] | None:
    """The method's own way of reading prompts, in one program; None where these are read layer by layer."""
    return lm.method.cache.reader if layout is not None and layout.has_ranked_blocks else None


def begin_reading(
    lm: LM, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], layout: CacheLayout | None
) -> tuple[Reading, PagedCache | None]:
    """Prompts in front of the first layer, and an empty cache. Arguments are those of `read_prompts`."""
    cache = None if layout is None else layout.empty(lm.config.head_dim, lm.cache_dtype, layout.window_start(lengths))
    return Reading(lm.decoder.embed(tokens), lengths, jnp.zeros(lengths.shape, jnp.float32)), cache


def read_layers(
    lm: LM,
    reading: Reading,  # the prompts, in front of these layers
    cache: PagedCache | None,  # with the layers before these in it; None without a layout
    layers: tuple[int, int],  # the first of them, and the one behind the last; static
    layout: CacheLayout | None,
    *,
    keep_hidden: bool = False,
    backend: Backend = "auto",
) -> tuple[Reading, PagedCache | None]:
    """Runs some layers over prompts.

    Returns:
        The prompts behind these layers, and the cache with what stays of them.
    """
    (x, lengths, shares), (first, end) = reading, layers
    last_layer = lm.config.num_layers - 1
    tail = None if keep_hidden else tail_queries(lm.method, last_layer)

    def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, Float32[Array, " B"]]:
        nonlocal cache
        heads = heads_of(lm.head_shards, layer, k.shape[2])
        if layout is None or cache is None:
            # Counted before the model goes on: lists of blocks would stay until then.
            attended = lm.method.prefill.attend(layer, heads, q, k, v, lengths, None, backend)
            out, pairs = jax.lax.optimization_barrier(attended)
            return out, pairs
        last = tail is not None and layer == last_layer
        sizes = lengths, layout, cache, backend
        (out, pairs), cache = prefill_layer(lm.method, layer, heads, q, k, v, *sizes, last_query=last)
        return out, pairs

    positions = jnp.minimum(jnp.arange(x.shape[1]), lengths[:, None] - 1)
    states = (None,) * (end - first)
    x, pairs = lm.decoder.run_layers(x, positions, attention, states, first=first, lengths=lengths, tail=tail)
    of_layers = sum(attended / causal_pairs(lengths) for attended in pairs)
    return Reading(x, lengths, shares + mean_of_devices(of_layers, lm.head_shards)), cache


def end_reading(lm: LM, reading: Reading, cache: PagedCache | None, *, keep_hidden: bool = False) -> Read:
    """Result of prefill after all layers have run; arguments are those of `read_layers`."""
    (x, lengths, shares), layers = reading, lm.config.num_layers
    hidden = lm.decoder.final_norm(x)
    tail = None if keep_hidden else tail_queries(lm.method, layers - 1)
    last = hidden[:, -1] if tail is not None else hidden[jnp.arange(len(lengths)), lengths - 1]
    return Read(lm.decoder.logits(last), cache, shares / layers, hidden if keep_hidden else None)


def prefill_layer(
    method: Method,
    layer: int,
    heads: Heads,
    q: Float[Array, "B M Hq d"],  # rotated queries of whole prompts (M = L)
    k: Float[Array, "B L Hkv d"],  # rotated keys; `v` the values
    v: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],  # true prompt lengths, at least 1
    layout: CacheLayout,  # of the cache, for prompts of L tokens
    cache: PagedCache,  # with the layers before this one in it
    backend: Backend = "auto",
    *,
    last_query: bool = False,  # whether only the last query is answered
) -> tuple[Attended, PagedCache]:
    """Attention of prompts in a layer, and the cache with their kept tokens and window.

    Returns:
        Attention, its output `[B, M, H_q, d]` (zero past a length), and the cache. With `last_query` the pairs are
        those that all queries of the prompts would have attended to, by what is selected for them.
    """
    policy, kept, readable = method.cache, None, None
    if layout.has_ranked_blocks:
        queries = q if last_query else last_queries(q, lengths, policy.num_queries)
        selection = policy.select(layer, heads, queries, k, v, lengths, backend)
        with jax.named_scope("select"):
            kept = layout.regions(layer).fill(selection, k, v, block_size=layout.block_size, backend=backend)
        readable = selection_for_prefill(method, layer, heads, selection, kept, k, v, backend)
    cache = cache.with_prompt(layout, layer, None if kept is None else kept.pool, k, v)
    if last_query:
        with jax.named_scope("prefill_attention"):
            out = _attend_last(q, cache.pages(layer), readable, lengths, layout, backend)
        attended = Attended(out, _selected_pairs(readable, lengths, layout))
    else:
        attended = method.prefill.attend(layer, heads, q, k, v, lengths, readable, backend)
    # The cache is filled before the model goes on. Left to itself the compiler puts that off to the end, and keeps all
    # layers' k and v until then: 17 GB at 131,072 tokens of LLaMA-3.1-8B. Nor do lists of blocks stay for the sake of
    # the pairs that they have.
    return jax.lax.optimization_barrier((attended, cache))


def tail_queries(method: Method, layer: int) -> int | None:
    """Last queries that a prefill needs of its last layer, or None where it needs all of them.

    Where prompt queries attend to what the cache keeps, the last of them can be answered from the cache, and nobody
    reads what the others would give.
    """
    from_cache = method.prefill_reads_cache and method.prefill.answers_from_cache(layer)
    return method.cache.num_queries if from_cache else None


def _attend_last(
    q: Float[Array, "B M Hq d"],
    pages: Pages,
    readable: Selected | None,
    lengths: Int[Array, " B"],
    layout: CacheLayout,
    backend: Backend,
) -> Float[Array, "B M Hq d"]:
    """Attention of each prompt's last query over its window and the tokens selected before it; zeros for other queries.

    The selection may hold a block more than is left of this query's window: the one that leaves before the next token.
    """
    window = dataclasses.replace(pages, kept=jnp.zeros_like(pages.kept))
    parts: tuple[Pages, ...] = (window,)
    if readable is not None:
        edge = jnp.maximum(0, (lengths - 1) // layout.block_size - layout.window // layout.block_size)
        left = jnp.arange(readable.budgets.shape[-1]) < edge[:, None, None]
        kept = jnp.sum(readable.budgets, axis=-1, where=left, dtype=jnp.int32)
        parts = (window, readable.pages(layout.block_size, kept))
    last, _ = paged_attention(q[:, -1:], parts, lengths - 1, lengths - 1, window=layout.window, backend=backend)
    # Not scattered: of one query the scatter's index has no elements, which crashes Shardy (`over_mesh`).
    return jnp.pad(last, ((0, 0), (q.shape[1] - 1, 0), (0, 0), (0, 0)))


def _selected_pairs(readable: Selected | None, lengths: Int[Array, " B"], layout: CacheLayout) -> Float32[Array, " B"]:
    """Causal pairs of prompts whose queries attend to their windows and to the tokens selected before them."""
    if readable is None:  # the prompt fits its window
        return causal_pairs(lengths)
    sizes = {"block_size": layout.block_size, "window": layout.window}
    return selected_pairs(readable.budgets, lengths, **sizes).mean(axis=1)


def require_finite(
    lm: LM,
    tokens: Int[np.ndarray, "B L"],
    lengths: Int[np.ndarray, " B"],
    finite: Bool[np.ndarray, " B"],
    argument: str,
) -> None:
    """Raises ValueError unless the logits of all rows are finite; the message names the cause in one row."""
    if finite.all():
        return
    row = int(np.argmin(finite))
    cause = _cause(lm, tokens[row, : lengths[row]])
    raise UserError(f"{lm.name} computes NaN or infinity for {argument}[{row}]: {cause}")


def _cause(lm: LM, prompt: Int[np.ndarray, " L"]) -> str:
    for parameter in parameters(lm.decoder):
        tensors = parameter.layout.split(parameter.variable[...])
        for name, tensor in zip(parameter.names, tensors, strict=True):
            if not bool(jnp.isfinite(tensor).all()):
                return f"the weight {name} is not finite"
    layers = on_host(_finite_layers(lm, jnp.asarray(prompt)[None])).all(axis=1)
    if layers.all():
        return f"the values behind layer {len(layers) - 1} are not finite, in dtype {lm.dtype.name}"
    first = int(np.argmin(layers))
    return f"its weights are finite, the values in layer {first} are not, in dtype {lm.dtype.name}; try another dtype"


def _finite_heads(lm: LM, tokens: Int[Array, "1 L"]) -> Bool[Array, "layers 1"]:
    """Whether each layer's queries, keys, values and attention are finite, on a device."""
    lengths = jnp.array([tokens.shape[1]], jnp.int32)

    def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, Array]:
        out = causal_attention(q, k, v, lengths)
        return out, jnp.all(jnp.stack([jnp.isfinite(x).all() for x in (q, k, v, out)]))

    positions = jnp.arange(tokens.shape[1])[None]
    _, finite = lm.decoder(tokens, positions, attention, (None,) * lm.config.num_layers)
    return jnp.stack(finite)[:, None]


_finite_layers = jax.jit(OverMesh(_finite_heads, (SAME,), SECOND_HEADS))
