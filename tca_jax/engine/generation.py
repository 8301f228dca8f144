"""`generate`, `stream` and `generate_tokens`; a `Request` is one call, an `AnswerReader` finds where an answer ends."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Generator, Sequence
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from tca_jax.engine.cache import CacheLayout, require_memory
from tca_jax.engine.contexts import Context, Prompts, kept_share
from tca_jax.engine.decode import (
    DecodingState,
    begin_program,
    decode_all_program,
    decode_program,
    leave_program,
    row_keys,
    seen_tokens,
)
from tca_jax.engine.generation_config import GenerationConfig, GenerationOptions
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import agreed, on_host, rows_of_device
from tca_jax.engine.prompts import (
    Prompt,
    bucket_length,
    check_token_ids,
    decode_continuation,
    is_single,
    require_tokenizer,
)
from tca_jax.engine.read import Calls, read
from tca_jax.engine.sampling import Sampling, pairs
from tca_jax.errors import check_integer, require, require_type
from tca_jax.methods.base import UNBOUNDED
from tca_jax.pallas_kernels.backends import Backend, resolve_backend
from tca_jax.pallas_kernels.checks import as_int32, check_range, check_shapes
from tca_jax.pallas_kernels.numerics import shared_size
from tca_jax.programs import Program

_LEAST_ROOM = 256  # for new tokens, so that shorter answers share programs
#: Keys of answers by seed and rows, on the device: to make them takes as long as to call a program.
_keys = functools.lru_cache(maxsize=256)(lambda seed, rows: row_keys(jax.random.key(seed), rows))
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
    request.start()
    stride = _STOP_STRING_STRIDE if request.config.stop else request.config.max_new_tokens
    while not request.is_finished:
        request.advance(stride)
    return output_of(request)


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
    sent, stride = [0] * len(request.prompts.row_lengths), 1
    request.start()
    if not request.is_finished:
        request.prepare_steps()  # before the first piece: a reader waits once
    while True:
        pieces, finished = [], request.is_finished
        for row, answer in enumerate(request.answers()):
            certain = max(sent[row], certain_characters(answer, request.config.stop, finished=finished))
            pieces.append((answer.text or "")[sent[row] : certain])
            sent[row] = certain
        if any(pieces):
            yield pieces[0] if single else pieces
        if finished:
            return output_of(request)
        before, steps = request.decode_seconds, request.steps
        request.advance(stride)
        steps_a_second = (request.steps - steps) / max(request.decode_seconds - before, 1e-9)
        stride = max(1, min(_STREAM_GROWTH * stride, int(_STREAM_SECONDS * steps_a_second)))
        stride = agreed(stride, request.lm.mesh)


def output_of(request: Request) -> Output:
    """Answers and costs of a request so far."""
    answers, steps, state = request.answers(), request.steps, request.state
    new_tokens = [len(answer.tokens) for answer in answers]
    stats = Stats(
        prompt_tokens=[len(ids) for ids in request.prompts.ids],
        new_tokens=new_tokens,
        compile_seconds=request.calls.compile_seconds,
        prefill_seconds=request.prefill_seconds,
        seconds_per_token=request.decode_seconds / (steps - 1) if steps > 1 else 0.0,
        kv_cache_bytes=state.cache.used_bytes,
        full_kv_cache_bytes=request.prompts.full_bytes,
        kept_share=kept_share(state.cache, on_host(state.lengths + state.step) - 1),  # without the newest token
        attended_share=float(np.mean(on_host(state.attended_share))),
        context_tokens=[] if request.prompts.context is None else request.prompts.starts,
        devices=1 if request.lm.mesh is None else request.lm.mesh.size,
        raised_layers=0 if (scored := state.cache.scored) is None else int(on_host(scored.raised).sum()),
    )
    reasons: list[Literal["stop", "length"]] = ["stop" if answer.stopped else "length" for answer in answers]
    own, top = on_host((state.logprobs, state.top))
    logprobs = None if own is None else [row[:count].tolist() for row, count in zip(own, new_tokens, strict=True)]
    top = top and [pairs(*each) for each in zip(*top, new_tokens, strict=True)]
    text = None if request.lm.tokenizer is None else [answer.text or "" for answer in answers]
    return Output([answer.tokens for answer in answers], reasons, stats, logprobs, text, top)


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
    rows = rows_of_device(lm, sizes["B"], "rows of tokens")
    positions = lm.config.max_context
    check_integer("max_new_tokens", max_new_tokens, at_least=1)
    max_new_tokens = int(max_new_tokens)
    room_for_prompt = f"must leave room for a prompt in the {positions} positions of {lm.name}"
    require(max_new_tokens < positions, f"max_new_tokens = {max_new_tokens}: {room_for_prompt}")
    check_range("lengths", lengths, 1, min(sizes["L"], positions - max_new_tokens))
    if not isinstance(tokens, jax.core.Tracer) and not isinstance(lengths, jax.core.Tracer):
        ids, real = np.asarray(tokens), np.arange(sizes["L"]) < np.asarray(lengths)[:, None]
        for row, column in np.argwhere(real & ((ids < 0) | (ids >= lm.config.vocab_size)))[:1]:
            check_token_ids(lm, [int(ids[row, column])], f"tokens[{row}, {column}] is")
    stops = tuple(int(t) for t in (lm.eos_token_ids if stop_tokens is None else stop_tokens))
    room, limit = bucket_length(max_new_tokens), jnp.int32(max_new_tokens)
    layout = lm.cache_layout(rows, sizes["L"], room - 1)
    given = lm.for_programs, tokens, lengths, key, sampling, limit
    return _generate_tokens(*given, room, stops, layout, kernels)[:, :max_new_tokens]


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
    seen = None
    if sampling.repetition_penalty is not None:
        own = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, logits.shape[-1])  # no padding
        seen = jnp.zeros(logits.shape, bool).at[jnp.arange(batch)[:, None], own].set(True, mode="drop")
    drawing = row_keys(key, batch), shares, sampling, jnp.asarray(stop_tokens, jnp.int32)
    state = calls(begin_program, lm.without_weights, logits, lengths, seen, *drawing, new_tokens=room)
    given = lm, dataclasses.replace(state, cache=rows), limit, sampling
    return calls(decode_all_program, *given, backend=backend).tokens


@dataclasses.dataclass
class Request:
    """A call: its state on the device and on the host."""

    lm: LM
    prompts: Prompts
    config: GenerationConfig  # from `for_model`
    backend: Backend
    state: Any = None  # a `DecodingState` after `start`
    calls: Calls = dataclasses.field(default_factory=Calls)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    _started: dict[Program, Any] = dataclasses.field(default_factory=dict)  # programs of steps

    @classmethod
    def create(cls, lm: Any, prompts: Any, context: Any, config: GenerationConfig, backend: str) -> Request:
        """Checks all that can be checked before a program is compiled, types included; see `generate`."""
        require_lm(lm)
        kernels, config = resolve_backend(backend), config.for_model(lm)
        checked = Prompts.create(lm, prompts, context)
        checked.require_positions(config.max_new_tokens)
        # A bucket of new tokens, so that another `max_new_tokens` seldom compiles anything.
        fed = bucket_length(config.max_new_tokens) - 1
        checked = dataclasses.replace(checked, times=config.num_samples, fed_tokens=fed)
        answers = len(checked.row_lengths)
        require_memory(checked.kv_cache_bytes, f"{answers} answers of up to {config.max_new_tokens} tokens")
        return cls(lm, checked, config, kernels)

    @functools.cached_property
    def _readers(self) -> list[AnswerReader]:
        return [AnswerReader(self.lm, self.config) for _ in self.prompts.row_lengths]

    def start(self) -> None:
        """Prefill and the first token; ValueError, which names the layer, if the model computes NaN or infinity."""
        begun = time.perf_counter()
        self.state = jax.block_until_ready(self._begin())
        self.prefill_seconds = time.perf_counter() - begun - self.calls.compile_seconds
        self.prompts.require_finite(on_host(self.state.finite)[:: self.config.num_samples])
        self._end_at_stop_strings()

    def _begin(self) -> DecodingState:
        """Reads the prompts and draws the first token of every answer."""
        lm, config, calls = self.lm.for_programs, self.config, self.calls
        seen = None
        if config.sampling.repetition_penalty is not None:
            seen = seen_tokens(self.prompts.with_contexts, lm.config.vocab_size)
        keys, least = _keys(config.seed, len(self.prompts.row_lengths)), config.min_new_tokens
        drawing = config.sampling, np.asarray(config.stop_token_ids, np.int32), np.int32(least) if least else None
        room = shared_size(max(_LEAST_ROOM, self.prompts.fed_tokens + 1))
        static: dict[str, Any] = {"new_tokens": room, "logprobs": config.num_logprobs}

        def given(logits: Any, shares: Any) -> tuple[Any, ...]:
            return lm.without_weights, logits, self.prompts.row_lengths, seen, keys, shares, *drawing

        def compile_decoding(logits: Any, rows: Any, shares: Any) -> None:
            state = calls.start(begin_program, *given(logits, shares), **static).shapes
            for program in self._programs if config.max_new_tokens > 1 else ():
                self._start(program, dataclasses.replace(state, cache=rows))

        then = compile_decoding if config.num_samples == 1 else None
        logits, rows, shares = self.prompts.read(calls, self.backend, then)
        return dataclasses.replace(calls(begin_program, *given(logits, shares), **static), cache=rows)

    @property
    def _programs(self) -> list[Program]:
        """Programs that answers may need after their first token."""
        policy, most = self.lm.method.cache, self.config.max_new_tokens
        enters = any(end % policy.block_size + most > policy.block_size for end in self.prompts.ends)
        return [decode_program, leave_program] if policy.window < UNBOUNDED and enters else [decode_program]

    def advance(self, steps: int) -> None:
        """Up to `steps` more tokens per row."""
        limit, start, compiled = self.steps + steps, time.perf_counter(), self.calls.compile_seconds
        limit = min(limit, self.config.max_new_tokens)
        self._run(decode_program, limit)
        while self._runs(limit):  # a block leaves the window of some row
            self._run(leave_program, limit)
            self._run(decode_program, limit)
        jax.block_until_ready(self.state)
        self.decode_seconds += time.perf_counter() - start - (self.calls.compile_seconds - compiled)
        self._end_at_stop_strings()

    def prepare_steps(self) -> None:
        """Compiles all that the answers may need, so that none of their pieces waits for it."""
        for program in self._programs:
            self.calls.wait(self._start(program, self.state))

    def _start(self, program: Program, state: DecodingState) -> Any:
        """A program of steps for a state, or for its shapes: to look it up takes longer than a step."""
        if program not in self._started:
            args = self.lm.for_programs, state, np.int32(0), self.config.sampling
            self._started[program] = self.calls.start(program, *args, backend=self.backend)
        return self._started[program]

    def _run(self, program: Program, limit: int) -> None:
        run = self.calls.wait(self._start(program, self.state))
        self.state = run(self.lm.for_programs, self.state, np.int32(limit), self.config.sampling)

    def _end_at_stop_strings(self) -> None:
        if self.config.stop and self.steps >= self.config.min_new_tokens:  # no text is needed before
            stopped = jnp.asarray([answer.stopped for answer in self.answers()])
            self.state = dataclasses.replace(self.state, done=self.state.done | stopped)

    @property
    def is_finished(self) -> bool:
        """Whether no row will say more."""
        return not self._runs(self.config.max_new_tokens)

    def _runs(self, limit: int) -> bool:
        """Whether a row has not ended and has fewer tokens than that."""
        done, step = on_host((self.state.done, self.state.step))
        return bool((~done & (step < limit)).any())

    @property
    def steps(self) -> int:
        """Tokens of the longest answer so far."""
        return int(np.max(on_host(self.state.step)))

    def answers(self) -> list[Answer]:
        """Each row's answer so far, cut at its stop token or stop string."""
        tokens, steps = on_host((self.state.tokens, self.state.step))
        rows = zip(self._readers, tokens, steps, strict=True)
        return [reader.read(of_row[:step].tolist()) for reader, of_row, step in rows]


@dataclasses.dataclass(frozen=True)
class Answer:
    """A row's answer so far, cut at its stop token or stop string."""

    tokens: list[int]
    text: str | None
    stopped: bool


@dataclasses.dataclass
class AnswerReader:
    """Reads one answer again and again while it grows."""

    lm: LM  # whose tokenizer makes text of tokens
    config: GenerationConfig  # from `for_model`
    _ended: Answer | None = None
    _looked: int = 0  # tokens that hold no stop string

    def read(self, tokens: list[int]) -> Answer:
        """The answer that these tokens are, all that were drawn so far; once it has ended, it stays as it is."""
        if self._ended is not None:
            return self._ended
        stops, least = self.config.stop_token_ids or (), self.config.min_new_tokens
        end = next((i for i, token in enumerate(tokens) if token in stops and i >= least), None)
        answer = self._cut_at_stop_string(tokens if end is None else tokens[: end + 1])
        if end is not None or answer.stopped:
            answer = self._ended = dataclasses.replace(answer, stopped=True)
        return answer

    def _cut_at_stop_string(self, tokens: list[int]) -> Answer:
        """The tokens up to the one that completes a stop string first, and the text in front of that string."""
        if self.lm.tokenizer is None:
            return Answer(tokens, None, False)
        # A stop string that is complete before `min_new_tokens` tokens are there ends nothing. A character of several
        # tokens may not be complete then; it is not counted.
        early = len(self._raw(tokens[: self.config.min_new_tokens]).rstrip("\ufffd")) if self.config.stop else 0
        if not self.config.stop or self._stop_place(self._raw(tokens), early) is None:
            self._looked = len(tokens)
            return Answer(tokens, decode_continuation(self.lm, tokens), False)
        count = self._looked + 1
        while (place := self._stop_place(self._raw(tokens[:count]), early)) is None:
            count += 1
        return Answer(tokens[:count], self._text_before(place, tokens[:count]), True)

    def _raw(self, tokens: list[int]) -> str:
        """Text with its special tokens, which stop strings may be."""
        return decode_continuation(self.lm, tokens, special=True)

    def _text_before(self, place: int, tokens: list[int]) -> str:
        """Text without special tokens, up to a place of the raw text."""
        raw = self._raw(tokens)
        for count in range(len(tokens), -1, -1):  # the last tokens that end before the place
            before = self._raw(tokens[:count])
            if len(before) <= place and raw.startswith(before):
                break
        text = decode_continuation(self.lm, tokens[:count])
        part = decode_continuation(self.lm, tokens[: count + 1])[len(text) :]  # none of a special token
        return text + (raw[len(before) : place] if part else "")

    def _stop_place(self, text: str, early: int) -> int | None:
        """Place of the earliest stop string that ends after the first `early` characters; None without any."""
        places = (text.find(s, max(0, early - len(s) + 1)) for s in self.config.stop)
        return min((place for place in places if place >= 0), default=None)


def certain_characters(answer: Answer, stop: Sequence[str], *, finished: bool) -> int:
    """Characters of an answer's text that stay, whatever comes: no part of a character, or of a stop string."""
    text = answer.text or ""
    if finished or answer.stopped:
        return len(text)
    return len(text.rstrip("\ufffd")) - (max(map(len, stop), default=1) - 1)
