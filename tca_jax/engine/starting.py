"""Where answers start: prompts that are read, or appended to a context, and the first new token of each."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Key, Shaped

from tca_jax.engine.cache import LayerCache, gather_pools, prefill_layer, tail_queries
from tca_jax.engine.decoding import DecodingState, draw
from tca_jax.engine.extending import extend
from tca_jax.engine.layouts import CacheLayout
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, ROWS, SAME, mean_of_devices
from tca_jax.engine.sampling import Sampling
from tca_jax.methods.pairs import attended_share
from tca_jax.pallas_kernels.backends import Backend

#: How the arguments of `prefill` lie on a mesh, and how those that say how answers are drawn.
_DRAWING = (ROWS, SAME, SAME, SAME)
PROMPTS = (ROWS, ROWS, *_DRAWING)
#: The same of `resume`.
APPENDED = (CACHES, ROWS, ROWS, ROWS, ROWS, ROWS, *_DRAWING)


def prefill(
    lm: LM,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " R"],
    sampling: Sampling,
    stop_tokens: Int[Array, " S"],
    min_new_tokens: Int[Array, ""] | None = None,
    *,
    new_tokens: int,
    logprobs: int | None = None,
    backend: Backend = "auto",
) -> DecodingState:
    """Runs the prompts, fills the caches and draws the first new token of every answer.

    Args:
        lm: The model.
        tokens: Prompts, right-padded, int32 `[B, L]`.
        lengths: True lengths, `[B]`, at least 1.
        keys: One typed PRNG key an answer, `[R]`; R is B or a multiple of it, answers to one prompt side by side.
        sampling: How tokens are drawn.
        stop_tokens: Tokens that end a row, `[S]`.
        min_new_tokens: Tokens before which no stop token is drawn, int32 scalar; None for none.
        new_tokens: Room for new tokens, at least 1; static.
        logprobs: None, or how many of the likeliest tokens are noted beside the log-probability of every new token;
            static.
        backend: Kernel backend; static.
    """
    layouts = lm.cache_layouts(tokens.shape[0], tokens.shape[1], new_tokens)
    logits, caches, share = read_prompts(lm, tokens, lengths, layouts, backend=backend)
    seen = None
    if sampling.repetition_penalty is not None:
        seen = _seen(tokens, jnp.arange(tokens.shape[1]) < lengths[:, None], logits.shape[-1])
    drawing = _Drawing(keys, sampling, stop_tokens, min_new_tokens, new_tokens, logprobs)
    return _start(lm, caches, logits, lengths, lengths, seen, drawing, share)


def resume(
    lm: LM,
    caches: tuple[LayerCache, ...],
    held: Int[Array, "C L"] | None,
    tokens: Int[Array, "B S"],
    starts: Int[Array, " C"],
    lengths: Int[Array, " B"],
    prompt_lengths: Int[Array, " C"],
    keys: Key[Array, " R"],
    sampling: Sampling,
    stop_tokens: Int[Array, " S2"],
    min_new_tokens: Int[Array, ""] | None = None,
    *,
    new_tokens: int,
    logprobs: int | None = None,
    backend: Backend = "auto",
) -> DecodingState:
    """Appends prompts to a context and draws the first new token of every answer.

    Args:
        lm: The model, under the method of the context.
        caches: The context's, of C rows: B, or 1 that all prompts share.
        held: Tokens of the context, right-padded, `[C, L]`; needed with a repetition penalty.
        tokens: Prompts as `extending.align` lays them out, `[B, S]`.
        starts: Tokens of the context, `[C]`.
        lengths: Tokens of the prompts, `[B]`, at least 1.
        prompt_lengths: Tokens of the context that its first prefill dealt with, `[C]`.
        keys: One typed PRNG key an answer, `[R]`; as for `prefill`, with all further arguments.
        sampling: How tokens are drawn.
        stop_tokens: Tokens that end a row.
        min_new_tokens: Tokens before which no stop token is drawn.
        new_tokens: Room for new tokens; static.
        logprobs: As for `prefill`; static.
        backend: Kernel backend; static.
    """
    batch, columns = tokens.shape
    caches = open_caches(lm, caches, batch, columns + new_tokens - 1)
    context_starts, starts = starts, _rows(starts, batch)
    prompt_lengths = _rows(prompt_lengths, batch)
    seen = None
    caches, logits, _ = extend(lm, caches, tokens, starts, lengths, prompt_lengths, backend=backend)
    if sampling.repetition_penalty is not None and held is not None:
        vocabulary, places = logits.shape[-1], jnp.arange(columns) - (starts % caches[0].layout.block_size)[:, None]
        seen = _seen(tokens, (places >= 0) & (places < lengths[:, None]), vocabulary)
        seen |= _rows(_seen(held, jnp.arange(held.shape[1]) < context_starts[:, None], vocabulary), batch)
    drawing = _Drawing(keys, sampling, stop_tokens, min_new_tokens, new_tokens, logprobs)
    return _start(lm, caches, logits, starts + lengths, prompt_lengths, seen, drawing)


def read_prompts(
    lm: LM, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], layouts: tuple[CacheLayout, ...], *, backend: Backend
) -> tuple[Float[Array, "B V"], tuple[LayerCache, ...], Float32[Array, " B"]]:
    """Logits behind right-padded prompts, what the caches keep of them, and the share of their pairs attended to."""
    last_layer = len(layouts) - 1
    tail, before = tail_queries(lm.method, last_layer), None

    def attention(
        layer: int, q: Array, k: Array, v: Array, state: None
    ) -> tuple[Array, tuple[LayerCache, Float32[Array, " B"]]]:
        nonlocal before
        cut = tail is not None and layer == last_layer
        sizes = lengths, layouts[layer], backend
        (out, pairs), before = prefill_layer(lm.method, layer, q, k, v, *sizes, tail=cut, before=before)
        return out, (before, pairs)

    positions = jnp.minimum(jnp.arange(tokens.shape[1]), lengths[:, None] - 1)
    hidden, read = lm.decoder(tokens, positions, attention, (None,) * len(layouts), lengths=lengths, tail=tail)
    caches, pairs = zip(*read, strict=True)
    last = hidden[:, -1] if tail is not None else hidden[jnp.arange(tokens.shape[0]), lengths - 1]
    share = mean_of_devices(attended_share(pairs, lengths), lm.head_shards)
    return lm.decoder.logits(last), gather_pools(caches), share


def open_caches(lm: LM, caches: tuple[LayerCache, ...], rows: int, fed_tokens: int) -> tuple[LayerCache, ...]:
    """A context's caches with `rows` rows, and room for what leaves the window while `fed_tokens` are fed; static."""

    def opened(layer: int, cache: LayerCache) -> LayerCache:
        cache = cache.repeat_rows(rows // cache.layout.batch)
        return cache.with_growth(cache.layout.with_growth(lm.method.cache, layer, fed_tokens).growth)

    return tuple(opened(layer, cache) for layer, cache in enumerate(caches))


def _rows(x: Shaped[Array, "C ..."], rows: int) -> Shaped[Array, "B ..."]:
    """A context's rows as often as answers share them."""
    return jnp.repeat(x, rows // x.shape[0], axis=0)


def _seen(tokens: Int[Array, "B L"], real: Bool[Array, "B L"], vocabulary: int) -> Bool[Array, "B V"]:
    """Which tokens of the vocabulary a row holds."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    places = jnp.where(real, tokens, vocabulary)  # padding falls out of range
    return jnp.zeros((tokens.shape[0], vocabulary), bool).at[rows, places].set(True, mode="drop")


class _Drawing(NamedTuple):
    """How answers are drawn: see `prefill`."""

    keys: Key[Array, " R"]
    sampling: Sampling
    stop_tokens: Int[Array, " S"]
    min_new_tokens: Int[Array, ""] | None
    new_tokens: int
    logprobs: int | None


def _start(
    lm: LM,
    caches: tuple[LayerCache, ...],
    logits: Float[Array, "B V"],
    lengths: Int[Array, " B"],
    prompt_lengths: Int[Array, " B"],
    seen: Bool[Array, "B V"] | None,
    drawing: _Drawing,
    attended_share: Float32[Array, " B"] | None = None,
) -> DecodingState:
    """The state behind the first new token of every answer."""
    rows = drawing.keys.shape[0]
    samples = rows // lengths.shape[0]
    if samples > 1:
        caches = tuple(cache.repeat_rows(samples) for cache in caches)
        per_row = (logits, lengths, prompt_lengths, seen, attended_share)
        repeated = jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), per_row)
        logits, lengths, prompt_lengths, seen, attended_share = repeated
    state = DecodingState(
        tokens=jnp.full((rows, drawing.new_tokens), lm.pad_token_id, jnp.int32),
        step=jnp.int32(0),
        last=jnp.zeros(rows, jnp.int32),
        done=jnp.zeros(rows, bool),
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        keys=drawing.keys,
        seen=seen,
        stop_tokens=drawing.stop_tokens,
        min_new_tokens=drawing.min_new_tokens,
        logprobs=None if drawing.logprobs is None else jnp.zeros((rows, drawing.new_tokens), jnp.float32),
        top=_no_top(rows, drawing.new_tokens, drawing.logprobs) if drawing.logprobs else None,
        finite=jnp.isfinite(logits).all(axis=-1),
        caches=caches,
        attended_share=attended_share,
    )
    return draw(lm, state, logits, drawing.sampling)


def _no_top(rows: int, new_tokens: int, count: int) -> tuple[Int[Array, "R N n"], Float32[Array, "R N n"]]:
    shape = rows, new_tokens, count
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
