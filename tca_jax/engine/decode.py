"""Answers: where they start, and the decoding loop, one `lax.while_loop` over a state pytree."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Key, UInt8

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, ROWS, SAME, OverMesh, any_row
from tca_jax.engine.pages import Rows, runtime_number
from tca_jax.engine.sampling import Sampling, sample
from tca_jax.methods.base import UNBOUNDED, CachePolicy, Heads
from tca_jax.models.projections import single_twice
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import scaled_scores
from tca_jax.pallas_kernels.paged_attention import paged_attention
from tca_jax.pallas_kernels.select_tokens import selection_mask
from tca_jax.programs import STEP, Program


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodingState:
    """Everything that one decoding step reads and writes. A row is one answer."""

    tokens: Int[Array, "B N"]  # new ones, padding behind; token t in column t mod N, which a server reads before reuse
    step: Int[Array, " B"]  # how many of them were drawn
    last: Int[Array, " B"]  # the newest token: the next step feeds it at position `lengths + step - 1`
    done: Bool[Array, " B"]  # rows whose answer has ended
    lengths: Int[Array, " B"]  # tokens before the answer
    keys: Key[Array, " B"]  # step t draws with `fold_in(key, t)`
    seen: Bool[Array, "B V"] | None  # tokens in prompt or answer; None without a repetition penalty
    stop_tokens: Int[Array, "*B S"]  # end a row; where rows differ, filled up with the vocabulary's size, no token
    min_new_tokens: Int[Array, "*B"] | None  # before which no stop token is drawn; None for none
    logprobs: Float[Array, "B N"] | None  # under the model, before any of the sampling's steps; None unless requested
    top: tuple[Int[Array, "B N n"], Float[Array, "B N n"]] | None  # likeliest ids and logprobs; None unless requested
    finite: Bool[Array, " B"]  # rows whose prompt led to finite logits
    cache: Rows  # what the answers continue from
    attended_share: Float32[Array, " B"] | None = None  # see `generation.Stats`; None of a server's rows


_BY_ROW: dict[str, Any] = {field.name: ROWS for field in dataclasses.fields(DecodingState)}
#: How a state lies on a mesh.
STATE = DecodingState(**_BY_ROW | dict.fromkeys(("stop_tokens", "min_new_tokens"), SAME) | {"cache": CACHES})


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps of decoding, and the arguments that they share."""

    lm: LM
    limit: Int[Array, "*B"]  # tokens of an answer
    sampling: Sampling
    allowed: Array | None
    backend: Backend

    def running(self, state: DecodingState) -> Bool[Array, " B"]:
        """Rows that take a step."""
        return ~state.done & (state.step < self.limit)

    def leaving(self, state: DecodingState) -> Bool[Array, " B"]:
        """Rows in which a block leaves the window at the next step."""
        return self.running(state) & state.cache.are_full(state.lengths + state.step - 1, state.cache.start)

    def summaries(self, rows: Rows) -> list[Any] | None:
        """Summaries by layer, valid until a block leaves a window, of a policy that chooses pages by them."""
        policy, layers = self.lm.method.cache, range(self.lm.config.num_layers)
        return [policy.summarize(i, rows.of_layer(i)[0]) for i in layers] if policy.chooses_pages else None

    def decode(self, state: DecodingState) -> DecodingState:
        """Draws tokens until every row has all or has ended, or a block leaves the window of some row: see `leave`."""
        lm = self.lm

        def more(state: DecodingState) -> Bool[Array, ""]:
            running = any_row(self.running(state), lm.mesh)
            return running if lm.method.cache.window >= UNBOUNDED else running & ~any_row(self.leaving(state), lm.mesh)

        return jax.lax.while_loop(more, functools.partial(self.take, summaries=self.summaries(state.cache)), state)

    def leave(self, state: DecodingState) -> DecodingState:
        """Has blocks leave the windows of rows that are full: by scores, or in a step, by its queries."""
        lm, leaving = self.lm, self.leaving(state)
        if not lm.method.cache.by_scores:
            return self.take(state, None, leaving)
        return dataclasses.replace(state, cache=evict_scored_block(lm, state.cache, leaving))

    def take(
        self, state: DecodingState, summaries: list[Any] | None, leaving: Bool[Array, " B"] | None = None
    ) -> DecodingState:
        """A step; without summaries blocks of rows that are `leaving` leave first, in each layer by its query."""
        lm, rows, fed = self.lm, state.cache, self.running(state)
        positions, decoder, policy = state.lengths + state.step - 1, lm.decoder, lm.method.cache
        before = rows.start
        start = before if leaving is None else before + jnp.where(leaving, rows.page_size, 0)
        # A single row is written and read without looking; others that take no step read nothing.
        new, newest = (None, positions) if fed.size == 1 else (fed[:, None], jnp.where(fed, positions, positions - 1))
        x = decoder.embed(single_twice(state.last[:, None]))
        cos, sin = decoder.angles(single_twice(positions[:, None]))
        inputs = list[Array]()

        def of_layer(weights: Any, x: Array, rows: Rows, layer: int | Array, known: Any) -> tuple[Array, Rows, Any]:
            module = lm.layer(weights)
            normed = module.attention_norm(x)[:, :1] if policy.by_scores else None

            def attention(q: Array, k: Array, v: Array, rows: Rows) -> tuple[Array, Rows]:
                q, k, v = (y[:, :1] for y in (q, k, v))
                if leaving is not None:
                    token = q[:, 0], k[:, 0]
                    rows = evict_block(
                        policy, layer, lm.heads(layer), *token, rows, before, positions, leaving, self.backend
                    )
                rows = rows.with_tokens(layer, k, v, positions[:, None], new, start)
                pages = rows.of_layer(layer, start, sliced=policy.chooses_pages)
                summary = policy.summarize(layer, pages[0]) if summaries is None else known
                pages = policy.attended(layer, q[:, 0], pages, (summary,))
                out, _ = paged_attention(q, pages, positions, newest, window=policy.window, backend=self.backend)
                return single_twice(out), rows

            return *module(x, cos, sin, attention, rows), normed

        step = of_layer if policy.layers_differ else jax.jit(of_layer)  # traced once
        for layer in range(lm.config.num_layers):
            number, known = layer if policy.layers_differ else runtime_number(layer), summaries and summaries[layer]
            x, rows, normed = step(lm.layer_params(layer), x, rows, number, known)
            inputs += [] if normed is None else [normed]
        if inputs:
            score = jax.vmap(lambda layer, x: lm.scores(layer, x, positions[:, None])[..., 0])
            rows = rows.with_scores(score(jnp.arange(len(inputs)), jnp.stack(inputs)), positions, fed, start)
        logits = decoder.logits(decoder.final_norm(x)[:, 0])
        rows = dataclasses.replace(rows, start=start, length=jnp.where(fed, positions + 1, rows.length))
        return draw(lm, dataclasses.replace(state, cache=rows), logits, self.sampling, fed, self.allowed)


def evict_scored_block(lm: LM, rows: Rows, leaving: Bool[Array, " R"]) -> Rows:
    """Keeps the tokens of high scores from the blocks that leave the windows of rows, in all layers at once."""
    policy: Any = lm.method.cache
    oldest = rows.scored.scores[..., : rows.page_size]  # type: ignore[union-attr]
    stays = jax.vmap(lambda layer, scores: policy.stays(lm.scored_settings(layer), scores))
    kept = rows.evict(None, leaving, stays(jnp.arange(len(oldest)), oldest), rows.start)
    return dataclasses.replace(kept, start=rows.start + jnp.where(leaving, rows.page_size, 0))


def evict_block(
    policy: CachePolicy,
    layer: int | Array,
    heads: Heads,
    q: Float[Array, "R Hq d"],  # query of the token that starts a block; `k` its key
    k: Float[Array, "R Hkv d"],
    rows: Rows,  # without that token
    start: Int[Array, " R"],  # of the windows
    positions: Int[Array, " R"],  # the token's
    leaving: Bool[Array, " R"],
    backend: Backend,
    *,
    rare: bool = False,  # whether there mostly are none, so that the device asks the host to leave out what is for them
) -> Rows:
    """Keeps the policy's choice from a leaving block, by the query's attention to all it sees, that block included."""
    before = jnp.maximum(positions - 1, 0)

    def log_sum_exp() -> Float32[Array, "R Hq"]:
        newest = jnp.where(leaving, before, before - 1)  # other rows ask nothing, which costs nothing
        pages = rows.of_layer(layer, start)
        return paged_attention(q[:, None], pages, before, newest, window=policy.window, backend=backend)[1][:, 0]

    # A pass over all that is kept, of which only the normaliser is wanted, and only in rows where a block leaves.
    nothing = functools.partial(jnp.zeros, q.shape[:2], jnp.float32)
    lse = jax.lax.cond(jnp.any(leaving), log_sum_exp, nothing) if rare else log_sum_exp()
    batch, kv_heads, head_dim = k.shape
    queries = q.reshape(batch, kv_heads, -1, head_dim)
    own = scaled_scores("bhgd,bhd->bhg", queries, k)
    lse = jnp.logaddexp(lse.reshape(own.shape), own)
    keys = rows.leaving_keys(layer, k.dtype)
    attention = jnp.exp(scaled_scores("bhgd,bhtd->bhgt", queries, keys) - lse[..., None])  # [R, H_kv, G, b]
    selection = policy.evict(layer, heads, attention, start // policy.block_size)
    chosen = selection_mask(selection.scores, selection.budgets, block_size=policy.block_size)
    return rows.evict(layer, leaving, chosen, start)


def draw(
    lm: LM,
    state: DecodingState,
    logits: Float[Array, "B V"],
    sampling: Sampling,
    running: Bool[Array, " B"] | None = None,
    allowed: UInt8[Array, "B W"] | None = None,  # a bit for each token that may be drawn, the lowest of a byte first
) -> DecodingState:
    """The state with the next token of each row, or of those that are `running`."""
    with jax.named_scope("sample"):
        rows, running = jnp.arange(logits.shape[0]), ~state.done if running is None else running
        drawable = logits
        if state.min_new_tokens is not None:
            # Compared, not scattered: a scatter copies all logits in every step.
            stops = (jnp.arange(logits.shape[1])[:, None] == state.stop_tokens[..., None, :]).any(axis=-1)
            drawable = jnp.where(stops & (state.step < state.min_new_tokens)[:, None], -jnp.inf, logits)
        if allowed is not None:
            bits = jnp.unpackbits(allowed, axis=-1, count=logits.shape[-1], bitorder="little")
            drawable = jnp.where(bits == 1, drawable, -jnp.inf)
        keys = None if sampling.temperature is None else jax.vmap(jax.random.fold_in)(state.keys, state.step)
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


def blank_state(lm: LM, rows: int, new_tokens: int, logprobs: int | None, **fields: Any) -> DecodingState:
    """Rows without new tokens, and these fields; the caller adds the cache. Numbers are those of `begin`."""
    shape, likeliest = (rows, new_tokens), (rows, new_tokens, logprobs or 0)
    state: dict[str, Any] = dict.fromkeys(("step", "last"), jnp.zeros(rows, jnp.int32)) | fields
    state["logprobs"] = None if logprobs is None else jnp.zeros(shape, jnp.float32)
    state["top"] = (jnp.zeros(likeliest, jnp.int32), jnp.zeros(likeliest, jnp.float32)) if logprobs else None
    return DecodingState(**state, tokens=jnp.full(shape, lm.pad_token_id, jnp.int32), cache=typing.cast(Rows, None))


def seen_tokens(rows: Sequence[Sequence[int]], vocabulary: int) -> Bool[np.ndarray, "B V"]:
    """Tokens of each row, for a repetition penalty."""
    seen = np.zeros((len(rows), vocabulary), bool)
    for of_row, ids in zip(seen, rows, strict=True):
        of_row[ids] = True
    return seen


def begin(
    lm: LM,
    logits: Float32[Array, "B V"],  # of the token after each prompt; R / B answers side by side continue it
    lengths: Int[Array, " R"],  # tokens before each answer
    seen: Bool[Array, "B V"] | None,  # tokens of each prompt; None without a repetition penalty
    keys: Key[Array, " R"],
    attended_share: Float32[Array, " B"] | None,
    sampling: Sampling,  # how tokens are drawn
    stop_tokens: Int[Array, "*R S"],  # tokens that end a row
    min_new_tokens: Int[Array, "*R"] | None = None,  # tokens before which no stop token is drawn
    allowed: UInt8[Array, "R W"] | None = None,  # as in `draw`
    *,
    new_tokens: int,  # room for new tokens, at least 1; static
    logprobs: int | None = None,  # likeliest tokens that are noted at each place; static
) -> DecodingState:
    """Draws the first new token of every answer."""
    given, times = (logits, seen, attended_share), len(lengths) // logits.shape[0]
    logits, seen, share = jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), given)
    fields: dict[str, Any] = {"keys": keys, "seen": seen, "stop_tokens": stop_tokens, "min_new_tokens": min_new_tokens}
    fields |= {"done": jnp.zeros(len(lengths), bool), "finite": jnp.isfinite(logits).all(axis=-1), "lengths": lengths}
    state = blank_state(lm, len(lengths), new_tokens, logprobs, **fields, attended_share=share)
    return draw(lm, state, logits, sampling, allowed=allowed)


begin_program = Program(OverMesh(begin, (ROWS, ROWS, ROWS, ROWS, ROWS, SAME, SAME, SAME), STATE))


def steps_program(steps: Callable[[Steps, DecodingState], DecodingState]) -> Program:
    def run(lm: LM, state: DecodingState, limit: Any, sampling: Sampling, *, backend: Backend) -> DecodingState:
        return steps(Steps(lm, limit, sampling, None, backend), state)

    run.__name__ = steps.__name__
    return Program(OverMesh(run, (STATE, SAME, SAME), STATE), donate=(1,), on_gpu=STEP)


decode_program, leave_program = map(steps_program, (Steps.decode, Steps.leave))
