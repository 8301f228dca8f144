"""The jitted loop beneath generation: prefill, then one `lax.while_loop` over a state pytree."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from tca_jax.engine.buckets import bucket_length
from tca_jax.engine.cache import LayerCache, decode_layer, prefill_layer, rows_with_leaving_block, tail_queries
from tca_jax.engine.lm import LM
from tca_jax.engine.sampling import Sampling, sample
from tca_jax.methods.checks import check_integer
from tca_jax.pallas_kernels.backends import Backend, whole
from tca_jax.pallas_kernels.checks import as_int32, check_range, check_shapes


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens",
        "step",
        "last",
        "done",
        "lengths",
        "keys",
        "seen",
        "stop_tokens",
        "min_new_tokens",
        "logprobs",
        "finite",
        "caches",
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
        lengths: Prompt tokens, `[B]`.
        keys: One PRNG key a row, `[B]`; step t draws with `fold_in(key, t)`.
        seen: Tokens in prompt or answer, `[B, V]`; None without a repetition penalty.
        stop_tokens: Tokens that end a row, `[S]`.
        min_new_tokens: Tokens before which no stop token is drawn, int32 scalar; None for none.
        logprobs: Log-probability of each new token under the model, before any of the sampling's steps, float32
            `[B, N]`; None where nobody asked.
        finite: Rows whose prompt led to finite logits, `[B]`.
        caches: One cache a layer.
    """

    tokens: Int[Array, "B N"]
    step: Int[Array, ""]
    last: Int[Array, " B"]
    done: Bool[Array, " B"]
    lengths: Int[Array, " B"]
    keys: Key[Array, " B"]
    seen: Bool[Array, "B V"] | None
    stop_tokens: Int[Array, " S"]
    min_new_tokens: Int[Array, ""] | None
    logprobs: Float[Array, "B N"] | None
    finite: Bool[Array, " B"]
    caches: tuple[LayerCache, ...]


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
    logprobs: bool = False,
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
        logprobs: Whether to note the log-probability of every new token; static.
        backend: Kernel backend; static.
    """
    batch, padded = tokens.shape
    samples, tail = keys.shape[0] // batch, tail_queries(lm.method)
    layouts = lm.cache_layouts(batch, padded, new_tokens)

    def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, LayerCache]:
        cut = tail is not None and layer == len(layouts) - 1
        return prefill_layer(lm.method, layer, q, k, v, lengths, layouts[layer], backend, tail=cut)

    decoder, columns = lm.decoder, jnp.arange(padded)
    positions = jnp.minimum(columns, lengths[:, None] - 1)
    hidden, caches = decoder(tokens, positions, attention, (None,) * len(layouts), lengths=lengths, tail=tail)
    last = hidden[:, -1] if tail is not None else hidden[jnp.arange(batch), lengths - 1]
    logits = decoder.logits(last)
    seen = None
    if sampling.repetition_penalty is not None:
        real = jnp.where(columns < lengths[:, None], tokens, logits.shape[-1])  # padding falls out of range
        seen = jnp.zeros(logits.shape, bool).at[jnp.arange(batch)[:, None], real].set(True, mode="drop")
    if samples > 1:
        caches = tuple(cache.repeat_rows(samples) for cache in caches)
        logits, lengths, seen = jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), (logits, lengths, seen))
    rows = batch * samples
    state = DecodingState(
        tokens=jnp.full((rows, new_tokens), lm.pad_token_id, jnp.int32),
        step=jnp.int32(0),
        last=jnp.zeros(rows, jnp.int32),
        done=jnp.zeros(rows, bool),
        lengths=lengths,
        keys=keys,
        seen=seen,
        stop_tokens=stop_tokens,
        min_new_tokens=min_new_tokens,
        logprobs=jnp.zeros((rows, new_tokens), jnp.float32) if logprobs else None,
        finite=jnp.isfinite(logits).all(axis=-1),
        caches=caches,
    )
    return _draw(lm, state, logits, sampling)


def decode(
    lm: LM, state: DecodingState, limit: Int[Array, ""], sampling: Sampling, *, backend: Backend = "auto"
) -> DecodingState:
    """Draws tokens until `limit` of them are there (never more than the state holds) or every row has ended."""
    limit = jnp.minimum(limit, state.tokens.shape[1])
    layout = state.caches[0].layout

    def unfinished(state: DecodingState) -> Bool[Array, ""]:
        return (state.step < limit) & ~jnp.all(state.done)

    def leaving(state: DecodingState) -> Bool[Array, " B"]:
        return rows_with_leaving_block(layout, state.lengths + state.step - 1, state.lengths)

    def step(state: DecodingState, evict: bool) -> DecodingState:
        positions = state.lengths + state.step - 1
        rows = leaving(state) if evict else None

        def attention(layer: int, q: Array, k: Array, v: Array, cache: LayerCache) -> tuple[Array, LayerCache]:
            return decode_layer(lm.method, layer, q, k, v, cache, positions, rows, backend)

        decoder = lm.decoder
        hidden, caches = decoder(state.last[:, None], positions[:, None], attention, state.caches)
        return _draw(lm, dataclasses.replace(state, caches=caches), decoder.logits(hidden[:, 0]), sampling)

    def plain_steps(state: DecodingState, until_leaving: bool) -> DecodingState:
        def more(state: DecodingState) -> Bool[Array, ""]:
            return unfinished(state) & ~jnp.any(leaving(state)) if until_leaving else unfinished(state)

        return jax.lax.while_loop(more, functools.partial(step, evict=False), state)

    if not layout.evicts:
        return plain_steps(state, until_leaving=False)

    # A block leaves once in block_size steps. Loops of their own for the steps with and without spare the others a
    # branch in every layer.
    def run(state: DecodingState) -> DecodingState:
        state = plain_steps(state, until_leaving=True)
        return jax.lax.while_loop(
            lambda s: unfinished(s) & jnp.any(leaving(s)), functools.partial(step, evict=True), state
        )

    return jax.lax.while_loop(unfinished, run, state)


def _draw(lm: LM, state: DecodingState, logits: Float[Array, "B V"], sampling: Sampling) -> DecodingState:
    with jax.named_scope("sample"):
        allowed = logits
        if state.min_new_tokens is not None:
            stopless = logits.at[:, state.stop_tokens].set(-jnp.inf, mode="drop")
            allowed = jnp.where(state.step < state.min_new_tokens, stopless, logits)
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.keys, state.step)
        token = sample(allowed, keys, sampling, state.seen)
        token = jnp.where(state.done, lm.pad_token_id, token)
        seen, logprobs = state.seen, state.logprobs
        if seen is not None:
            seen = seen.at[jnp.arange(token.size), token].set(True)
        if logprobs is not None:
            drawn = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
            logprobs = logprobs.at[:, state.step].set(drawn)
        return dataclasses.replace(
            state,
            tokens=state.tokens.at[:, state.step].set(token),
            step=state.step + 1,
            last=token,
            done=state.done | jnp.isin(token, state.stop_tokens),
            seen=seen,
            logprobs=logprobs,
        )


def generate_tokens(
    lm: LM,
    tokens: Int[Array | np.ndarray, "B L"],
    lengths: Int[Array | np.ndarray, " B"],
    key: Key[Array, ""],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen, so one shared default is safe)
    stop_tokens: Sequence[int] | None = None,
    backend: str = "auto",
) -> Int[Array, "B N"]:
    """Generates token ids in one jitted call; callable inside the caller's own jit.

    Args:
        lm: The model, from `tca_jax.load`.
        tokens: Prompts, right-padded, int32 `[B, L]`. What the padding holds does not matter.
        lengths: True lengths, int32 `[B]`, from 1 to L. Traced: other lengths run the same program.
        key: A typed PRNG key (`jax.random.key`). Row i draws with `fold_in(key, i)`.
        max_new_tokens: Length of the answers; static, and compiled for in buckets, as prompts are.
        sampling: How tokens are drawn; greedy by default. Its numbers are traced.
        stop_tokens: Tokens that end a row; None takes the model's own, () never stops early. Static.
        backend: Kernel backend; static.

    Returns:
        int32 `[B, max_new_tokens]`: new tokens only, the stop token included, `lm.pad_token_id` behind it.

    Raises:
        ValueError: a shape or size is not allowed, or a length or token that is known; names the argument.
        TypeError: tokens or lengths are no integers.
    """
    kernels = whole(backend)
    tokens, lengths = as_int32("tokens", tokens), as_int32("lengths", lengths)
    sizes = check_shapes({"tokens": (tokens, "B L"), "lengths": (lengths, "B")})
    if sizes["L"] < 1:
        raise ValueError(f"tokens has shape {tokens.shape}: an empty prompt; at least one token is needed")
    positions = lm.config.max_context
    check_integer("max_new_tokens", max_new_tokens, at_least=1)
    max_new_tokens = int(max_new_tokens)
    if max_new_tokens >= positions:
        raise ValueError(
            f"max_new_tokens = {max_new_tokens}: must leave room for a prompt in the {positions} positions of {lm.name}"
        )
    check_range("lengths", lengths, 1, min(sizes["L"], positions - max_new_tokens))
    _check_vocabulary(lm, tokens, lengths)
    stops = tuple(int(t) for t in (lm.eos_token_ids if stop_tokens is None else stop_tokens))
    room = bucket_length(max_new_tokens)
    limit = jnp.int32(max_new_tokens)
    lm = lm.for_programs()
    return _generate_tokens(lm, tokens, lengths, key, sampling, limit, room, stops, kernels)[:, :max_new_tokens]


def _check_vocabulary(lm: LM, tokens: Any, lengths: Any) -> None:
    """Raises ValueError if a prompt that is known holds an id outside the vocabulary; padding may hold anything."""
    if isinstance(tokens, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    ids = np.asarray(tokens)
    outside = (ids < 0) | (ids >= lm.config.vocab_size)
    outside &= np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise ValueError(
            f"tokens[{row}, {column}] = {ids[row, column]}: ids of {lm.name} lie in [0, {lm.config.vocab_size})"
        )


@functools.partial(jax.jit, static_argnames=("room", "stop_tokens", "backend"))
def _generate_tokens(
    lm: LM,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    key: Key[Array, ""],
    sampling: Sampling,
    limit: Int[Array, ""],
    room: int,
    stop_tokens: tuple[int, ...],
    backend: Backend,
) -> Int[Array, "B N"]:
    stops = jnp.asarray(stop_tokens, jnp.int32)
    keys = row_keys(key, tokens.shape[0])
    state = prefill(lm, tokens, lengths, keys, sampling, stops, new_tokens=room, backend=backend)
    return decode(lm, state, limit, sampling, backend=backend).tokens


@functools.partial(jax.jit, static_argnames=("rows",))
def row_keys(key: Key[Array, ""], rows: int) -> Key[Array, " R"]:
    """One key for each of `rows` answers; a row's key does not depend on how many there are."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))
