"""Answers: where they start, and the decoding loop, one `lax.while_loop` over a state pytree."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Key, Shaped

from tca_jax.engine.cache import (
    LayerCache,
    decode_layer,
    gather_pools,
    rows_with_leaving_block,
    spread_pools,
)
from tca_jax.engine.extend import extend, open_caches
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, ROWS, SAME, any_row, every_row
from tca_jax.engine.read import read_prompts
from tca_jax.engine.sampling import Sampling, sample
from tca_jax.pallas_kernels.backends import Backend


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens",
        "step",
        "last",
        "done",
        "lengths",
        "prompt_lengths",
        "keys",
        "seen",
        "stop_tokens",
        "min_new_tokens",
        "logprobs",
        "top",
        "finite",
        "caches",
        "attended_share",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodingState:
    """Everything that one decoding step reads and writes. A row is one answer.

    Attributes:
        tokens: New tokens so far, int32 `[B, N]`, padding behind; N is the room for them.
        step: How many of them are there, int32 scalar.
        last: The newest token of each row, `[B]`: the next step feeds it at position `lengths + step - 1`.
        done: Rows whose answer has ended, `[B]`.
        lengths: Tokens before the answer, `[B]`.
        prompt_lengths: Those of them that the first prefill dealt with, `[B]`.
        keys: One PRNG key a row, `[B]`; step t draws with `fold_in(key, t)`.
        seen: Tokens in prompt or answer, `[B, V]`; None without a repetition penalty.
        stop_tokens: Tokens that end a row, `[S]`.
        min_new_tokens: Tokens before which no stop token is drawn, int32 scalar; None for none.
        logprobs: Log-probability of each new token under the model, before any of the sampling's steps, float32
            `[B, N]`; None where nobody asked.
        top: The likeliest tokens at each place and their log-probabilities, `[B, N, n]`; None where nobody asked.
        finite: Rows whose prompt led to finite logits, `[B]`.
        caches: One cache a layer.
        attended_share: See `generation.Stats`, float32 `[B]`; None behind a context, which knows it.
    """

    tokens: Int[Array, "B N"]
    step: Int[Array, ""]
    last: Int[Array, " B"]
    done: Bool[Array, " B"]
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]
    keys: Key[Array, " B"]
    seen: Bool[Array, "B V"] | None
    stop_tokens: Int[Array, " S"]
    min_new_tokens: Int[Array, ""] | None
    logprobs: Float[Array, "B N"] | None
    top: tuple[Int[Array, "B N n"], Float[Array, "B N n"]] | None
    finite: Bool[Array, " B"]
    caches: tuple[LayerCache, ...]
    attended_share: Float32[Array, " B"] | None = None


_BY_ROW: dict[str, Any] = {field.name: ROWS for field in dataclasses.fields(DecodingState)}
_SHARED: dict[str, Any] = dict.fromkeys(("step", "stop_tokens", "min_new_tokens"), SAME)
#: How a state lies on a mesh.
STATE = DecodingState(**{**_BY_ROW, **_SHARED, "caches": CACHES})


def decode(
    lm: LM, state: DecodingState, limit: Int[Array, ""], sampling: Sampling, *, backend: Backend = "auto"
) -> DecodingState:
    """Draws tokens until `limit` of them are there (never more than the state holds) or every row has ended."""
    limit = jnp.minimum(limit, state.tokens.shape[1])
    layout, evicts = state.caches[0].layout, any(cache.layout.evicts for cache in state.caches)

    def unfinished(state: DecodingState) -> Bool[Array, ""]:
        return (state.step < limit) & ~every_row(state.done, lm.mesh)

    def leaving(state: DecodingState) -> Bool[Array, " B"]:
        return rows_with_leaving_block(layout, state.lengths + state.step - 1, state.prompt_lengths)

    def step(state: DecodingState, evict: bool) -> DecodingState:
        positions = state.lengths + state.step - 1
        rows = leaving(state) if evict else None

        def attention(layer: int, q: Array, k: Array, v: Array, cache: LayerCache) -> tuple[Array, LayerCache]:
            return decode_layer(lm.method, layer, q, k, v, cache, positions, rows, backend)

        decoder = lm.decoder
        hidden, caches = decoder(state.last[:, None], positions[:, None], attention, spread_pools(state.caches))
        return draw(lm, dataclasses.replace(state, caches=gather_pools(caches)), decoder.logits(hidden[:, 0]), sampling)

    def plain_steps(state: DecodingState, until_leaving: bool) -> DecodingState:
        def more(state: DecodingState) -> Bool[Array, ""]:
            return unfinished(state) & ~any_row(leaving(state), lm.mesh) if until_leaving else unfinished(state)

        return jax.lax.while_loop(more, functools.partial(step, evict=False), state)

    if not evicts:
        return plain_steps(state, until_leaving=False)

    # A block leaves once in block_size steps. Loops of their own for the steps with and without spare the others a
    # branch in every layer.
    def run(state: DecodingState) -> DecodingState:
        state = plain_steps(state, until_leaving=True)
        return jax.lax.while_loop(
            lambda s: unfinished(s) & any_row(leaving(s), lm.mesh), functools.partial(step, evict=True), state
        )

    return jax.lax.while_loop(unfinished, run, state)


def draw(lm: LM, state: DecodingState, logits: Float[Array, "B V"], sampling: Sampling) -> DecodingState:
    """The state with each row's next token."""
    with jax.named_scope("sample"):
        allowed = logits
        if state.min_new_tokens is not None:
            stopless = logits.at[:, state.stop_tokens].set(-jnp.inf, mode="drop")
            allowed = jnp.where(state.step < state.min_new_tokens, stopless, logits)
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.keys, state.step)
        token = sample(allowed, keys, sampling, state.seen)
        token = jnp.where(state.done, lm.pad_token_id, token)
        seen, logprobs, top = state.seen, state.logprobs, state.top
        if seen is not None:
            seen = seen.at[jnp.arange(token.size), token].set(True)
        if logprobs is not None:
            of_all = jax.nn.log_softmax(logits)
            logprobs = logprobs.at[:, state.step].set(jnp.take_along_axis(of_all, token[:, None], axis=-1)[:, 0])
            if top is not None:
                values, likeliest = jax.lax.top_k(of_all, top[0].shape[-1])
                top = top[0].at[:, state.step].set(likeliest), top[1].at[:, state.step].set(values)
        return dataclasses.replace(
            state,
            tokens=state.tokens.at[:, state.step].set(token),
            step=state.step + 1,
            last=token,
            done=state.done | jnp.isin(token, state.stop_tokens),
            seen=seen,
            logprobs=logprobs,
            top=top,
        )


@functools.partial(jax.jit, static_argnames=("rows",))
def row_keys(key: Key[Array, ""], rows: int) -> Key[Array, " R"]:
    """One key for each of `rows` answers; a row's key does not depend on how many there are."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))


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
