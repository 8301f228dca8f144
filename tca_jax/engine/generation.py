"""`generate` and `stream`: prompts in, text, tokens and statistics out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Sequence
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.contexts import Context, kept_share
from tca_jax.engine.decode import DecodingState, begin_program, decode_all_program, row_keys
from tca_jax.engine.generation_config import GenerationConfig, GenerationOptions
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import agreed, num_devices, on_host, rows_of_device
from tca_jax.engine.prompts import (
    Prompt,
    bucket_length,
    check_token_ids,
    decode_continuation,
    is_single,
    require_tokenizer,
)
from tca_jax.engine.read import Calls, read
from tca_jax.engine.request import Request, certain_characters
from tca_jax.engine.sampling import Sampling, pairs
from tca_jax.errors import check_integer, require, require_type
from tca_jax.pallas_kernels.backends import Backend, resolve_backend
from tca_jax.pallas_kernels.checks import as_int32, check_range, check_shapes

_STOP_STRING_STRIDE = 16  # tokens between looks at the text for stop strings
_STREAM_GROWTH = 4  # most times that a piece is as long as the one before: the first ones may mislead
_STREAM_SECONDS = 0.03  # a piece of a stream comes about this often, or with every token where those take longer


@dataclasses.dataclass(frozen=True)
class Stats:
    """Costs of a call.

    Attributes:
        prompt_tokens: Tokens of each prompt; with a context, of what was appended to it.
        new_tokens: Tokens of each answer.
        compile_seconds: Tracing and compiling, 0 when programs of these shapes were there; in no other figure.
        prefill_seconds: From the prompt's ids to the first new token.
        seconds_per_token: Mean time of each further step (one token for every row), 0 if there was none.
        kv_cache_bytes: Bytes of the pages that answers use, on all devices; those that several share count once.
        full_kv_cache_bytes: Bytes of the pages that they would use under full attention.
        kept_share: Share of the tokens so far that the caches hold, mean over rows, layers and KV heads.
        attended_share: Share of the prompt's causal pairs (query, key) that its queries attended to, mean over rows,
            layers and query heads: 1 under full attention. With a context that of the context's own first reading, for
            what is appended attends to what the cache keeps.
        context_tokens: Tokens of the context before each prompt; none without one.
        devices: Devices that share the model. Each of them allocates as much.
        raised_layers: Under predicted worth, layers of all rows that keep fewer tokens than the threshold says, since
            the row was full.
    """

    prompt_tokens: list[int]
    new_tokens: list[int]
    compile_seconds: float
    prefill_seconds: float
    seconds_per_token: float
    kv_cache_bytes: int
    full_kv_cache_bytes: int
    kept_share: float
    attended_share: float
    context_tokens: list[int] = dataclasses.field(default_factory=list)
    devices: int = 1
    raised_layers: int = 0

    @property
    def kv_cache_bytes_per_device(self) -> int:
        """Bytes of the call's caches on each device."""
        return self.kv_cache_bytes // self.devices


@dataclasses.dataclass(frozen=True)
class Output:
    """Result of `generate`: the new part only, one entry an answer, answers to one prompt side by side.

    Attributes:
        tokens: New token ids, a stop token included.
        finish_reasons: "stop" (a stop token or stop string) or "length".
        stats: What the call cost.
        logprobs: Natural log-probability of each new token under the model, before temperature, filters and penalties;
            None unless requested.
        top_logprobs: At the place of each new token the likeliest tokens, as pairs (token id, log-probability), most
            likely first; None unless a number of them is requested.
    """

    tokens: list[list[int]]
    finish_reasons: list[Literal["stop", "length"]]
    stats: Stats
    logprobs: list[list[float]] | None
    _text: list[str] | None = dataclasses.field(repr=False)
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None

    @property
    def text(self) -> list[str]:
        """New text, without special tokens and stop strings. ValueError where the model has no tokenizer."""
        return require_tokenizer("out.text", "the model", self._text, "use out.tokens")


def generate(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    config: GenerationConfig | None = None,
    *,
    context: Context | None = None,
    backend: str = "auto",
    **options: Unpack[GenerationOptions],
) -> Output:
    """Answers one prompt or a batch of prompts of any lengths.

    Args:
        lm: From `tca_jax.load`. Without a profile it runs exact full attention.
        prompts: Strings, chats (lists of {"role", "content"}) or token ids; one or a sequence.
        config: How answers are drawn and where they end.
        context: From `tca_jax.prefill`, what the model has read before: prompts are appended to it as they are (no
            token is put before text; a chat must begin with all that the context holds, and what follows is
            appended). One prompt for each of its rows, or any number where it has one row, whose cache they share. It
            stays what it is.
        backend: Kernel backend: "auto", "xla", "triton" or "mosaic".
        **options: Fields of `GenerationConfig`, which replace those of `config`: `max_new_tokens=64`.

    Returns:
        `Output` with `text`, `tokens`, `finish_reasons`, `logprobs`, `top_logprobs` and `stats`.

    Raises:
        ValueError: a prompt or number is not allowed, raised before anything is compiled; or the model computes NaN or
            infinity, with the layer.
        TypeError: an argument is of a wrong type, or an option is unknown.
    """
    request = Request.create(lm, prompts, context, GenerationConfig.of(config, options), backend)
    state = request.start()
    stride = _STOP_STRING_STRIDE if request.config.stop else request.config.max_new_tokens
    while not request.is_finished(state):
        state = request.advance(state, stride)
    return output_of(request, state)


def stream(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    config: GenerationConfig | None = None,
    *,
    context: Context | None = None,
    backend: str = "auto",
    **options: Unpack[GenerationOptions],
) -> Generator[Any, None, Output]:
    """Yields the answer to a prompt, or the answers to a batch, piece by piece, as soon as a piece is certain.

    A piece holds the tokens of about 30 ms, or one token where that takes longer. Arguments are those of `generate`.

    Yields:
        Of one answer, pieces of text; of several, lists with a piece for each, "" where there is nothing new. Joined
        they are `generate(...).text`. A piece never splits a character, and text that may still turn out to be part of
        a stop string is held back.

    Returns:
        At its end the generator returns what `generate` does: `out = yield from stream(...)`.

    Raises:
        ValueError: as for `generate`; also a model without a tokenizer. Raised by the call, not by the first piece.
        TypeError: as for `generate`.
    """
    decode_continuation(lm, [])  # no tokenizer: an error before anything is compiled
    request = Request.create(lm, prompts, context, GenerationConfig.of(config, options), backend)
    return _pieces(request, single=is_single(prompts) and len(request.prompts.row_lengths) == 1)


def _pieces(request: Request, *, single: bool) -> Generator[Any, None, Output]:
    """New text, whenever there is some: a string of the only row, or a list with one of each."""
    state, sent, stride = request.start(), [0] * len(request.prompts.row_lengths), 1
    if not request.is_finished(state):
        request.prepare_steps(state)  # before the first piece: a reader waits once
    while True:
        finished = request.is_finished(state)
        pieces = []
        for row, answer in enumerate(request.answers(state)):
            certain = max(sent[row], certain_characters(answer, request.config.stop, finished=finished))
            pieces.append((answer.text or "")[sent[row] : certain])
            sent[row] = certain
        if any(pieces):
            yield pieces[0] if single else pieces
        if finished:
            return output_of(request, state)
        before, steps = request.decode_seconds, request.steps(state)
        state = request.advance(state, stride)
        steps_a_second = (request.steps(state) - steps) / max(request.decode_seconds - before, 1e-9)
        stride = max(1, min(_STREAM_GROWTH * stride, int(_STREAM_SECONDS * steps_a_second)))
        stride = agreed(stride, request.lm.mesh)


def output_of(request: Request, state: DecodingState) -> Output:
    """Answers and costs of a request so far."""
    answers = request.answers(state)
    steps, devices = request.steps(state), num_devices(request.lm.mesh)
    stats = Stats(
        prompt_tokens=[len(ids) for ids in request.prompts.ids],
        new_tokens=[len(answer.tokens) for answer in answers],
        compile_seconds=request.calls.compile_seconds,
        prefill_seconds=request.prefill_seconds,
        seconds_per_token=request.decode_seconds / (steps - 1) if steps > 1 else 0.0,
        kv_cache_bytes=state.cache.used_bytes,
        full_kv_cache_bytes=request.prompts.full_bytes,
        kept_share=kept_share(state.cache, on_host(state.lengths + state.step) - 1),  # without the newest token
        attended_share=float(np.mean(on_host(state.attended_share))),
        context_tokens=[] if request.prompts.context is None else request.prompts.starts,
        devices=devices,
        raised_layers=0 if (scored := state.cache.scored) is None else int(on_host(scored.raised).sum()),
    )
    reasons: list[Literal["stop", "length"]] = ["stop" if answer.stopped else "length" for answer in answers]
    logprobs, top = _logprobs(state, [len(answer.tokens) for answer in answers])
    text = None if request.lm.tokenizer is None else [answer.text or "" for answer in answers]
    return Output([answer.tokens for answer in answers], reasons, stats, logprobs, text, top)


def _logprobs(
    state: DecodingState, lengths: Sequence[int]
) -> tuple[list[list[float]] | None, list[list[list[tuple[int, float]]]] | None]:
    """`Output.logprobs` and `Output.top_logprobs` of answers of these lengths."""
    if state.logprobs is None:
        return None, None
    own, top = on_host((state.logprobs, state.top))
    logprobs = [row[:length].tolist() for row, length in zip(own, lengths, strict=True)]
    return logprobs, top and [pairs(*each) for each in zip(*top, lengths, strict=True)]


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
        TypeError: tokens or lengths are no integers, `lm` is no LM, or `sampling` no Sampling.
    """
    require_lm(lm)
    require_type("sampling", sampling, Sampling, "a Sampling")
    kernels = resolve_backend(backend)
    tokens, lengths = as_int32("tokens", tokens), as_int32("lengths", lengths)
    sizes = check_shapes({"tokens": (tokens, "B L"), "lengths": (lengths, "B")})
    require(sizes["L"], f"tokens has shape {tokens.shape}: an empty prompt; at least one token is needed")
    rows_of_device(lm, sizes["B"], "rows of tokens")
    positions = lm.config.max_context
    check_integer("max_new_tokens", max_new_tokens, at_least=1)
    max_new_tokens = int(max_new_tokens)
    room_for_prompt = f"must leave room for a prompt in the {positions} positions of {lm.name}"
    require(max_new_tokens < positions, f"max_new_tokens = {max_new_tokens}: {room_for_prompt}")
    check_range("lengths", lengths, 1, min(sizes["L"], positions - max_new_tokens))
    _check_vocabulary(lm, tokens, lengths)
    stops = tuple(int(t) for t in (lm.eos_token_ids if stop_tokens is None else stop_tokens))
    room = bucket_length(max_new_tokens)
    limit = jnp.int32(max_new_tokens)
    layout = lm.cache_layout(rows_of_device(lm, sizes["B"], "rows of tokens"), sizes["L"], room - 1)
    given = lm.for_programs(), tokens, lengths, key, sampling, limit
    return _generate_tokens(*given, room, stops, layout, kernels)[:, :max_new_tokens]


def _check_vocabulary(lm: LM, tokens: Any, lengths: Any) -> None:
    """Raises ValueError if a prompt that is known holds an id outside the vocabulary; padding may hold anything."""
    if isinstance(tokens, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    ids = np.asarray(tokens)
    outside = (ids < 0) | (ids >= lm.config.vocab_size)
    outside &= np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]
    for row, column in np.argwhere(outside)[:1]:
        check_token_ids(lm, [int(ids[row, column])], f"tokens[{row}, {column}] is")


@functools.partial(jax.jit, static_argnames=("room", "stop_tokens", "layout", "backend"))
def _generate_tokens(
    lm: LM,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    key: Key[Array, ""],
    sampling: Sampling,
    limit: Int[Array, ""],
    room: int,
    stop_tokens: tuple[int, ...],
    layout: CacheLayout,
    backend: Backend,
) -> Int[Array, "B N"]:
    calls, batch = Calls(traced=True), tokens.shape[0]
    logits, rows, shares = read(lm, tokens, lengths, lengths + room - 1, layout, calls, backend=backend)
    held = None if sampling.repetition_penalty is None else (tokens, lengths)
    drawing = row_keys(key, batch), shares, sampling, jnp.asarray(stop_tokens, jnp.int32), None
    state = calls(begin_program, lm.without_weights(), rows, logits, lengths, held, *drawing, new_tokens=room)
    return calls(decode_all_program, lm, state, limit, sampling, backend=backend).tokens
