"""`generate` and `stream`; `Answers` are those of one call, an `AnswerReader` finds where an answer ends."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Generator, Sequence
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.cache import require_memory
from tca_jax.engine.decode import DecodingState, begin_program, decode_program, leave_program, row_keys, seen_tokens
from tca_jax.engine.generation_config import GenerationConfig, GenerationOptions
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import agreed, on_host
from tca_jax.engine.prompt_rows import ContextLike, Prompts
from tca_jax.engine.prompts import Prompt, bucket_length, decode_continuation, is_single, require_tokenizer
from tca_jax.engine.read import Calls
from tca_jax.engine.sampling import pairs
from tca_jax.methods.base import UNBOUNDED
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.programs import Program

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
    context: ContextLike | None = None,
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
    answers = Answers.create(lm, prompts, context, GenerationConfig.of(config, options), backend)
    answers.start()
    stride = _STOP_STRING_STRIDE if answers.config.stop else answers.config.max_new_tokens
    while not answers.are_finished:
        answers.step(stride)
    return answers.output()


def stream(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    config: GenerationConfig | None = None,
    *,
    context: ContextLike | None = None,
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
    require_lm(lm)
    require_tokenizer("stream", lm.name, lm.tokenizer, "use generate")
    answers = Answers.create(lm, prompts, context, GenerationConfig.of(config, options), backend)
    return _pieces(answers, single=is_single(prompts) and len(answers.prompts.row_lengths) == 1)


def _pieces(answers: Answers, *, single: bool) -> Generator[Any, None, Output]:
    """New text, whenever there is some: a string of the only row, or a list with one of each."""
    sent, stride = [0] * len(answers.prompts.row_lengths), 1
    answers.start()
    if not answers.are_finished:
        answers.prepare_steps()  # before the first piece: a reader waits once
    while True:
        finished = answers.are_finished
        rows = zip(answers.readers, answers.read(), sent, strict=True)
        pieces = [reader.piece(answer, before, finished=finished) for reader, answer, before in rows]
        sent = [before + len(piece) for before, piece in zip(sent, pieces, strict=True)]
        if any(pieces):
            yield pieces[0] if single else pieces
        if finished:
            return answers.output()
        before, steps = answers.decode_seconds, answers.steps
        answers.step(stride)
        steps_a_second = (answers.steps - steps) / max(answers.decode_seconds - before, 1e-9)
        stride = max(1, min(_STREAM_GROWTH * stride, int(_STREAM_SECONDS * steps_a_second)))
        stride = agreed(stride, answers.lm.mesh)


@dataclasses.dataclass
class Answers:
    """The answers of a call, in rows that are read together and step together."""

    lm: LM
    prompts: Prompts
    config: GenerationConfig  # from `for_model`
    backend: Backend
    readers: list[AnswerReader]
    state: Any = None  # a `DecodingState` after `start`
    calls: Calls = dataclasses.field(default_factory=Calls)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    _started: dict[Program, Any] = dataclasses.field(default_factory=dict)  # programs of steps

    @classmethod
    def create(cls, lm: Any, prompts: Any, context: Any, config: GenerationConfig, backend: str) -> Answers:
        """Checks all that can be checked before a program is compiled, types included; see `generate`."""
        require_lm(lm)
        kernels, config = lm.kernels(backend), config.for_model(lm)
        # A bucket of new tokens, so that another `max_new_tokens` seldom compiles anything.
        sizes: dict[str, Any] = {"times": config.num_samples, "fed_tokens": bucket_length(config.max_new_tokens) - 1}
        checked = dataclasses.replace(Prompts.of(lm, prompts, context), **sizes)
        checked.require_positions(config.max_new_tokens)
        readers = [AnswerReader(lm, config) for _ in checked.row_lengths]
        require_memory(checked.kv_cache_bytes, f"{len(readers)} answers of up to {config.max_new_tokens} tokens")
        return cls(lm, checked, config, kernels, readers)

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
            seen = seen_tokens(self.prompts.all_tokens, lm.config.vocab_size)
        keys, least = _keys(config.seed, len(self.prompts.row_lengths)), config.min_new_tokens
        drawing = config.sampling, np.asarray(config.stop_token_ids, np.int32), np.int32(least) if least else None
        static: dict[str, Any] = {"new_tokens": self.prompts.room, "logprobs": config.num_logprobs}

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

    def step(self, n: int) -> None:
        """Up to `n` more tokens per row."""
        limit, start, compiled = self.steps + n, time.perf_counter(), self.calls.compile_seconds
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
            stopped = jnp.asarray([answer.stopped for answer in self.read()])
            self.state = dataclasses.replace(self.state, done=self.state.done | stopped)

    @property
    def are_finished(self) -> bool:
        """Whether all rows have ended."""
        return not self._runs(self.config.max_new_tokens)

    def _runs(self, limit: int) -> bool:
        """Whether a row has not ended and has fewer tokens than that."""
        done, step = on_host((self.state.done, self.state.step))
        return bool((~done & (step < limit)).any())

    @property
    def steps(self) -> int:
        """Tokens of the longest answer so far."""
        return int(np.max(on_host(self.state.step)))

    def read(self) -> list[Answer]:
        """Each row's answer so far, cut at its stop token or stop string."""
        tokens, steps = on_host((self.state.tokens, self.state.step))
        rows = zip(self.readers, tokens, steps, strict=True)
        return [reader.read(of_row[:step].tolist()) for reader, of_row, step in rows]

    def output(self) -> Output:
        """Answers and costs so far."""
        answers, steps, state, lm = self.read(), self.steps, self.state, self.lm
        new_tokens = [len(answer.tokens) for answer in answers]
        raised = np.zeros((1, 1)) if (scored := state.cache.scored) is None else on_host(scored.raised)
        stats = Stats(
            prompt_tokens=[len(ids) for ids in self.prompts.ids],
            new_tokens=new_tokens,
            compile_seconds=self.calls.compile_seconds,
            prefill_seconds=self.prefill_seconds,
            seconds_per_token=self.decode_seconds / (steps - 1) if steps > 1 else 0.0,
            kv_cache_bytes=state.cache.used_bytes,
            full_kv_cache_bytes=self.prompts.full_bytes,
            kept_share=state.cache.kept_share(on_host(state.lengths + state.step) - 1),  # without the newest token
            attended_share=float(np.mean(on_host(state.attended_share))),
            context_tokens=self.prompts.starts if self.prompts.context_columns else [],
            devices=1 if lm.mesh is None else lm.mesh.size,
            raised_layers=int((raised if lm.mesh is None else raised.max(axis=1)).sum()),  # "model" shares layers
        )
        reasons: list[Literal["stop", "length"]] = ["stop" if answer.stopped else "length" for answer in answers]
        own, top = on_host((state.logprobs, state.top))
        logprobs = None if own is None else [row[:count].tolist() for row, count in zip(own, new_tokens, strict=True)]
        top = top and [pairs(*each) for each in zip(*top, new_tokens, strict=True)]
        text = None if lm.tokenizer is None else [answer.text or "" for answer in answers]
        return Output([answer.tokens for answer in answers], reasons, stats, logprobs, text, top)


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

    def piece(self, answer: Answer, sent: int, *, finished: bool) -> str:
        """Text after the `sent` characters that stays, whatever comes: no part of a character, or of a stop string."""
        text = answer.text or ""
        certain = len(text.rstrip("\ufffd")) - (max(map(len, self.config.stop), default=1) - 1)
        return text[sent:] if finished or answer.stopped else text[sent : max(sent, certain)]

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
