"""Answers: where they start, and the decoding loop, one `lax.while_loop` over a state pytree."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Key, UInt8

from tca_jax.engine.cache import PagedCache, before, shared_and_own, with_rows_repeated
from tca_jax.engine.extend import evict_block, extend, rows_with_leaving_block
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, ROWS, SAME, any_row, heads_of
from tca_jax.engine.read import read_prompts
from tca_jax.engine.sampling import Sampling, sample
from tca_jax.methods.base import CachePolicy, Heads
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.paged_attention import paged_attention

_T = TypeVar("_T")


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
        "cache",
        "attended_share",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodingState:
    """Everything that one decoding step reads and writes. A row is one answer."""

    # New tokens so far, int32 `[B, N]`, padding behind. Token t lies in column t mod N: where N is not room for all of
    # them, somebody takes them out in time.
    tokens: Int[Array, "B N"]
    step: Int[Array, " B"]  # how many of them were drawn, int32 `[B]`
    # The newest token of each row, `[B]`: the next step feeds it at position `lengths + step - 1`.
    last: Int[Array, " B"]
    done: Bool[Array, " B"]  # rows whose answer has ended, `[B]`
    lengths: Int[Array, " B"]  # tokens before the answer, `[B]`
    prompt_lengths: Int[Array, " B"]  # those of them that the first prefill dealt with, `[B]`
    keys: Key[Array, " B"]  # one PRNG key a row, `[B]`; step t draws with `fold_in(key, t)`
    seen: Bool[Array, "B V"] | None  # tokens in prompt or answer, `[B, V]`; None without a repetition penalty
    # Tokens that end a row, `[S]`, or `[B, S]` where rows differ, filled up with the vocabulary's size, which is no
    # token.
    stop_tokens: Int[Array, "*B S"]
    # Tokens before which no stop token is drawn, int32 scalar or `[B]`; None for none.
    min_new_tokens: Int[Array, "*B"] | None
    # Log-probability of each new token under the model, before any of the sampling's steps, float32 `[B, N]`; None
    # where nobody asked.
    logprobs: Float[Array, "B N"] | None
    # The likeliest tokens at each place and their log-probabilities, `[B, N, n]`; None where nobody asked.
    top: tuple[Int[Array, "B N n"], Float[Array, "B N n"]] | None
    finite: Bool[Array, " B"]  # rows whose prompt led to finite logits, `[B]`
    cache: PagedCache  # the answers' own cache: with `shared`, of what follows it
    # See `generation.Stats`, float32 `[B]`; None behind a context, which knows it.
    attended_share: Float32[Array, " B"] | None = None


_BY_ROW: dict[str, Any] = {field.name: ROWS for field in dataclasses.fields(DecodingState)}
_SHARED: dict[str, Any] = dict.fromkeys(("stop_tokens", "min_new_tokens"), SAME)
#: How a state lies on a mesh.
STATE = DecodingState(**{**_BY_ROW, **_SHARED, "cache": CACHES})


def decode(
    lm: LM,
    state: DecodingState,  # where the answers are
    shared: PagedCache | None,  # what they continue from
    limit: Int[Array, "*B"],  # tokens of an answer
    sampling: Sampling,  # how tokens are drawn
    *,
    allowed: UInt8[Array, "B W"] | None = None,  # see `draw`; the same in all steps
    backend: Backend = "auto",
) -> DecodingState:
    """Draws tokens until every row has `limit` of them or has ended. A row that has stays as it is."""
    steps = _Steps.of(lm, state, shared, limit, sampling, allowed, backend)

    def plain_steps(state: DecodingState, until_leaving: bool) -> DecodingState:
        def more(state: DecodingState) -> Bool[Array, ""]:
            return unfinished(state) & ~leaves(state) if until_leaving else unfinished(state)

        return jax.lax.while_loop(more, functools.partial(steps.take, of_own=steps.summaries(state.cache)), state)

    def unfinished(state: DecodingState) -> Bool[Array, ""]:
        return any_row(steps.running(state), lm.mesh)

    def leaves(state: DecodingState) -> Bool[Array, ""]:
        return any_row(steps.leaving(state), lm.mesh)

    if not any(state.cache.kept_columns):
        return plain_steps(state, until_leaving=False)

    # A block leaves once in block_size steps. Loops of their own for the steps with and without spare the others a
    # branch in every layer.
    def run(state: DecodingState) -> DecodingState:
        state = plain_steps(state, until_leaving=True)
        return jax.lax.while_loop(
            lambda s: unfinished(s) & leaves(s), functools.partial(steps.take, of_own=None), state
        )

    return jax.lax.while_loop(unfinished, run, state)


def decode_step(
    lm: LM,
    state: DecodingState,
    shared: PagedCache | None,
    limit: Int[Array, "*B"],
    sampling: Sampling,
    *,
    evicts: bool,
    allowed: UInt8[Array, "B W"] | None = None,
    backend: Backend = "auto",
) -> DecodingState:
    """One step of `decode`, for whoever calls it in a loop of their own: the device then never waits for the host.

    Args:
        evicts: Whether a block may leave the window of some row, see `rows_with_leaving_block`; static.

    The others are those of `decode`.
    """
    steps = _Steps.of(lm, state, shared, limit, sampling, allowed, backend)
    return steps.take(state, None if evicts else steps.summaries(state.cache))


@dataclasses.dataclass(frozen=True)
class _Steps:
    """State shared by all steps of an answer: arguments of `decode`, and the policy's summaries of `shared`."""

    lm: LM
    shared: PagedCache | None
    limit: Int[Array, "*B"]
    sampling: Sampling
    allowed: UInt8[Array, "B W"] | None
    backend: Backend
    of_shared: list[Any]

    @classmethod
    def of(
        cls,
        lm: LM,
        state: DecodingState,
        shared: PagedCache | None,
        limit: Int[Array, "*B"],
        sampling: Sampling,
        allowed: UInt8[Array, "B W"] | None,
        backend: Backend,
    ) -> _Steps:
        """Of the arguments of `decode`."""
        shared = None if shared is None else before(shared, state.cache)
        return cls(lm, shared, limit, sampling, allowed, backend, _summaries(lm, shared))

    def summaries(self, cache: PagedCache) -> list[Any]:
        """The policy's summaries of the rows' own cache, valid until a block leaves a window."""
        return _summaries(self.lm, cache)

    def running(self, state: DecodingState) -> Bool[Array, " B"]:
        """Rows that take a step."""
        return ~state.done & (state.step < self.limit)

    def leaving(self, state: DecodingState) -> Bool[Array, " B"]:
        """Rows in which a block leaves the window at the next step."""
        positions = state.lengths + state.step - 1
        leaving = rows_with_leaving_block(self.lm.method.cache, positions, state.prompt_lengths)
        return self.running(state) & leaving

    def take(self, state: DecodingState, of_own: list[Any] | None) -> DecodingState:
        """A step, without a look for blocks that leave where `of_own` is given."""
        lm, policy, shared = self.lm, self.lm.method.cache, self.shared
        positions, cache, fed = state.lengths + state.step - 1, state.cache, self.running(state)
        rows = self.leaving(state) if of_own is None else None

        def attention(layer: int, q: Array, k: Array, v: Array, nothing: None) -> tuple[Array, None]:
            nonlocal cache
            heads = heads_of(lm.head_shards, layer, k.shape[2])
            known = self.of_shared[layer], None if of_own is None else of_own[layer]
            sizes = positions, rows, self.backend
            out, cache = decode_layer(policy, layer, heads, q, k, v, shared, cache, *sizes, fed=fed, summaries=known)
            return out, None

        decoder, states = lm.decoder, (None,) * lm.config.num_layers
        hidden, _ = decoder(state.last[:, None], positions[:, None], attention, states)
        logits, after = decoder.logits(hidden[:, 0]), dataclasses.replace(state, cache=cache)
        return draw(lm, after, logits, self.sampling, fed, self.allowed)


def _summaries(lm: LM, cache: PagedCache | None) -> list[Any]:
    policy = lm.method.cache
    return [None if cache is None else policy.summarize(i, cache.pages(i)) for i in range(lm.config.num_layers)]


def decode_layer(
    policy: CachePolicy,
    layer: int,
    heads: Heads,
    q: Float[Array, "B 1 Hq d"],  # the new token's rotated query
    k: Float[Array, "B 1 Hkv d"],
    v: Float[Array, "B 1 Hkv d"],
    shared: PagedCache | None,  # what came before, or None
    cache: PagedCache,  # the rows' own cache
    positions: Int[Array, " B"],  # position of the new token
    leaving: Bool[Array, " B"] | None = None,  # rows in which a block leaves the window
    backend: Backend = "auto",
    *,
    fed: Bool[Array, " B"] | None = None,  # rows that have a new token
    summaries: tuple[Any, Any] = (None, None),  # what the policy knows of `shared` and of the rows' own cache
) -> tuple[Float[Array, "B 1 Hq d"], PagedCache]:
    """One step in a layer: evicts the block that leaves the window, writes the new token, attends.

    Returns:
        Attention output `[B, 1, H_q, d]` and the cache with the token in it.
    """
    if leaving is not None and cache.kept_columns[layer]:
        with jax.named_scope("evict_block"):
            token = q[:, 0], k[:, 0]
            cache = evict_block(policy, layer, heads, *token, shared, cache, positions, leaving, backend)
    new = (
        None if fed is None or fed.size == 1 else fed[:, None]
    )  # a single row is written without looking (`with_tokens`)
    cache = cache.with_tokens(layer, k, v, positions[:, None], new)
    held = [(c.pages(layer), known) for c, known in zip((shared, cache), summaries, strict=True) if c is not None]
    known = tuple(policy.summarize(layer, pages) if known is None else known for pages, known in held)
    pages = policy.attended(layer, q[:, 0], tuple(pages for pages, _ in held), known)
    out, _ = paged_attention(q, pages, positions, positions, window=policy.window, backend=backend)
    return out, cache


def draw(
    lm: LM,
    state: DecodingState,
    logits: Float[Array, "B V"],
    sampling: Sampling,
    running: Bool[Array, " B"] | None = None,
    allowed: UInt8[Array, "B W"] | None = None,
) -> DecodingState:
    """The state with the next token of each row, or of those that are `running`.

    Tokens whose bit of `allowed` is 0 are not drawn: bits of a row lie in W = ceil(V / 8) bytes, the lowest bit first.
    """
    with jax.named_scope("sample"):
        rows, running = jnp.arange(logits.shape[0]), ~state.done if running is None else running
        drawable = logits
        if state.min_new_tokens is not None:
            stopless = logits.at[rows[:, None], state.stop_tokens].set(-jnp.inf, mode="drop")
            drawable = jnp.where((state.step < state.min_new_tokens)[:, None], stopless, logits)
        if allowed is not None:
            bits = jnp.unpackbits(allowed, axis=-1, count=logits.shape[-1], bitorder="little")
            drawable = jnp.where(bits == 1, drawable, -jnp.inf)
        keys = jax.vmap(jax.random.fold_in)(state.keys, state.step)
        token = sample(drawable, keys, sampling, state.seen)
        token = jnp.where(running, token, lm.pad_token_id)
        room = state.tokens.shape[1]
        place = rows, jnp.where(running, state.step % room, room)  # out of bounds: dropped
        seen, logprobs, top = state.seen, state.logprobs, state.top
        if seen is not None:
            seen = seen.at[rows, jnp.where(running, token, seen.shape[1])].set(True, mode="drop")
        if logprobs is not None:
            of_all = jax.nn.log_softmax(logits)
            own = jnp.take_along_axis(of_all, token[:, None], axis=-1)[:, 0]
            logprobs = logprobs.at[place].set(own, mode="drop")
            if top is not None:
                values, likeliest = jax.lax.top_k(of_all, top[0].shape[-1])
                top = top[0].at[place].set(likeliest, mode="drop"), top[1].at[place].set(values, mode="drop")
        return dataclasses.replace(
            state,
            tokens=state.tokens.at[place].set(token, mode="drop"),
            step=state.step + running,
            last=jnp.where(running, token, state.last),
            done=state.done | (running & (token[:, None] == state.stop_tokens).any(axis=-1)),
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
#: How their results do.
STARTED = (STATE, CACHES)


def prefill(
    lm: LM,
    tokens: Int[Array, "B L"],  # prompts, right-padded
    lengths: Int[Array, " B"],  # true lengths, at least 1
    keys: Key[Array, " R"],  # one an answer; those of answers to one prompt side by side
    sampling: Sampling,  # how tokens are drawn
    stop_tokens: Int[Array, " S"],  # tokens that end a row
    min_new_tokens: Int[Array, ""] | None = None,  # tokens before which no stop token is drawn
    *,
    new_tokens: int,  # room for new tokens, at least 1; static
    logprobs: int | None = None,  # likeliest tokens that are noted at each place; static
    backend: Backend = "auto",
) -> tuple[DecodingState, PagedCache | None]:
    """Runs the prompts, fills the cache and draws the first new token of every answer.

    Returns:
        The state, and the prompts' cache where several answers share it; None where each prompt has one answer, whose
        cache holds the prompt, too.
    """
    batch, columns = tokens.shape
    samples, fed = keys.shape[0] // batch, new_tokens - 1  # the last new token is never fed
    layout = lm.cache_layout(batch, columns, fed if samples == 1 else 0)
    logits, cache, share, _ = read_prompts(lm, tokens, lengths, layout, backend=backend)
    assert cache is not None
    seen = None
    if sampling.repetition_penalty is not None:
        seen = _seen(tokens, jnp.arange(columns) < lengths[:, None], logits.shape[-1])
    shared = None
    if samples > 1:
        logits, lengths, seen, share = _rows((logits, lengths, seen, share), samples)
        shared, cache = shared_and_own(cache, lm.following_layout(batch * samples, columns, fed), lengths)
    drawing = _Drawing(keys, sampling, stop_tokens, min_new_tokens, new_tokens, logprobs)
    return _start(lm, cache, logits, lengths, lengths, seen, drawing, share), shared


def resume(
    lm: LM,  # the model, under the method of the context
    cache: PagedCache,  # the context's, of C rows: B, or 1 that all prompts share
    held: Int[Array, "C L"] | None,  # tokens of the context, right-padded; needed with a repetition penalty
    tokens: Int[Array, "B S"],  # prompts as `extend.align` lays them out
    starts: Int[Array, " C"],  # tokens of the context
    lengths: Int[Array, " B"],  # tokens of the prompts, at least 1
    prompt_lengths: Int[Array, " C"],  # tokens of the context that its first prefill dealt with
    keys: Key[Array, " R"],  # as for `prefill`, like all further arguments
    sampling: Sampling,  # how tokens are drawn
    stop_tokens: Int[Array, " S2"],  # tokens that end a row
    min_new_tokens: Int[Array, ""] | None = None,  # tokens before which no stop token is drawn
    *,
    context_tokens: int,  # most tokens that a row of the context may have; static
    new_tokens: int,  # room for new tokens; static
    logprobs: int | None = None,
    backend: Backend = "auto",
) -> DecodingState:
    """Appends prompts to a context and draws the first new token of every answer."""
    batch, columns = tokens.shape
    samples, times = keys.shape[0] // batch, batch // cache.batch
    context_starts, (starts, prompt_lengths) = starts, _rows((starts, prompt_lengths), times)
    sizes = context_tokens, columns + new_tokens - 1
    shared, own = shared_and_own(cache, lm.following_layout(batch, *sizes), starts)
    own, logits, _ = extend(lm, shared, own, tokens, starts, lengths, prompt_lengths, backend=backend)
    seen = None
    if sampling.repetition_penalty is not None and held is not None:
        vocabulary, places = logits.shape[-1], jnp.arange(columns) - (starts % cache.block_size)[:, None]
        seen = _seen(tokens, (places >= 0) & (places < lengths[:, None]), vocabulary)
        seen |= _rows(_seen(held, jnp.arange(held.shape[1]) < context_starts[:, None], vocabulary), times)
    if samples > 1:
        own = with_rows_repeated(own, lm.following_layout(batch * samples, *sizes))
        logits, starts, lengths, prompt_lengths, seen = _rows((logits, starts, lengths, prompt_lengths, seen), samples)
    drawing = _Drawing(keys, sampling, stop_tokens, min_new_tokens, new_tokens, logprobs)
    return _start(lm, own, logits, starts + lengths, prompt_lengths, seen, drawing)


def _rows(arrays: _T, times: int) -> _T:
    """Every row of some arrays `times` times, side by side."""
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), arrays)


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
    cache: PagedCache,
    logits: Float[Array, "R V"],
    lengths: Int[Array, " R"],
    prompt_lengths: Int[Array, " R"],
    seen: Bool[Array, "R V"] | None,
    drawing: _Drawing,
    attended_share: Float32[Array, " R"] | None = None,
) -> DecodingState:
    """The state after the first new token of every answer."""
    rows = drawing.keys.shape[0]
    state = DecodingState(
        tokens=jnp.full((rows, drawing.new_tokens), lm.pad_token_id, jnp.int32),
        step=jnp.zeros(rows, jnp.int32),
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
        cache=cache,
        attended_share=attended_share,
    )
    return draw(lm, state, logits, drawing.sampling)


def _no_top(rows: int, new_tokens: int, count: int) -> tuple[Int[Array, "R N n"], Float32[Array, "R N n"]]:
    shape = rows, new_tokens, count
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
