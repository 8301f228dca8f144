"""One call of generation: checked arguments, compiled programs and their times, and how answers end."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.cache import require_memory
from tca_jax.engine.contexts import Prompts
from tca_jax.engine.decode import DecodingState, begin_program, decode_program, leave_program, row_keys
from tca_jax.engine.generation_config import GenerationConfig
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import bucket_length, decode_continuation
from tca_jax.engine.read import Calls
from tca_jax.engine.sampling import Sampling
from tca_jax.methods.base import UNBOUNDED
from tca_jax.pallas_kernels.backends import Backend, resolve_backend
from tca_jax.pallas_kernels.numerics import shared_size
from tca_jax.programs import Program

_LEAST_ROOM = 256  # for new tokens, so that shorter answers share programs
#: Keys of answers by seed and rows, on the device: to make them takes as long as to call a program.
_keys = functools.lru_cache(maxsize=256)(lambda seed, rows: row_keys(jax.random.key(seed), rows))


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
        """The tokens up to the one that completes a stop string first, and the text in front of that string.

        Which one is first does not depend on the number of looks.
        """
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
        raw, text = self._raw(tokens), decode_continuation(self.lm, tokens)
        if text == raw:
            return text[:place]
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


@dataclasses.dataclass
class Request:
    """State of a call on the host; its state on the device is a `DecodingState`."""

    lm: LM
    prompts: Prompts
    config: GenerationConfig  # from `for_model`
    backend: Backend
    calls: Calls = dataclasses.field(default_factory=Calls)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    _prepared: dict[Program, Callable[..., DecodingState]] = dataclasses.field(default_factory=dict)

    @classmethod
    def create(cls, lm: Any, prompts: Any, context: Any, config: GenerationConfig, backend: str) -> Request:
        """Checks all that can be checked before a program is compiled, types included; see `generation.generate`."""
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
    def _program_lm(self) -> LM:
        return self.lm.for_programs()

    @functools.cached_property
    def _readers(self) -> list[AnswerReader]:
        return [AnswerReader(self.lm, self.config) for _ in self.prompts.row_lengths]

    @functools.cached_property
    def _sampling(self) -> Sampling:
        return self.config.sampling

    def start(self) -> DecodingState:
        """Prefill and the first token.

        Raises:
            ValueError: the model computes NaN or infinity; names the layer.
        """
        begun = time.perf_counter()
        state = jax.block_until_ready(self._begin())
        self.prefill_seconds = time.perf_counter() - begun - self.calls.compile_seconds
        self.prompts.require_finite(on_host(state.finite)[:: self.config.num_samples])
        return self._end_at_stop_strings(state)

    def _begin(self) -> DecodingState:
        """Reads the prompts and draws the first token of every answer."""
        lm, config, calls, held = self._program_lm, self.config, self.calls, None
        if self._sampling.repetition_penalty is not None:
            held = tuple(map(jnp.asarray, self.prompts.with_contexts))
        keys, least = _keys(config.seed, len(self.prompts.row_lengths)), config.min_new_tokens
        drawing = self._sampling, np.asarray(config.stop_token_ids, np.int32), np.int32(least) if least else None
        room = shared_size(max(_LEAST_ROOM, self.prompts.fed_tokens + 1))
        static: dict[str, Any] = {"new_tokens": room, "logprobs": config.num_logprobs}

        def compile_decoding(logits: Any, rows: Any, shares: Any) -> None:
            given = lm.without_weights(), rows, logits, self.prompts.row_lengths, held, keys, shares
            state = calls.compile_ahead(begin_program, *given, *drawing, **static)
            if state is not None and config.max_new_tokens > 1:
                for program in self._programs:
                    calls.compile_ahead(program, lm, state, jnp.int32(0), self._sampling, backend=self.backend)

        then = compile_decoding if config.num_samples == 1 else None
        logits, rows, shares = self.prompts.read(calls, self.backend, then)
        given = lm.without_weights(), rows, logits, self.prompts.row_lengths, held, keys, shares
        return calls(begin_program, *given, *drawing, **static)

    @property
    def _programs(self) -> list[Program]:
        """Programs that answers may need after their first token."""
        policy, most = self.lm.method.cache, self.config.max_new_tokens
        enters = any(end % policy.block_size + most > policy.block_size for end in self.prompts.ends)
        may_leave = policy.window < UNBOUNDED and enters
        return [decode_program, leave_program] if may_leave else [decode_program]

    def advance(self, state: DecodingState, steps: int) -> DecodingState:
        """Up to `steps` more tokens per row."""
        args = jnp.int32(min(self.steps(state) + steps, self.config.max_new_tokens)), self._sampling
        step, start, compiled = self._prepare(decode_program, state), time.perf_counter(), self.calls.compile_seconds
        state = step(self._program_lm, state, *args)
        while self._leaves(state, int(args[0])):
            leave = self._prepare(leave_program, state)
            state = step(self._program_lm, leave(self._program_lm, state, *args), *args)
        state = jax.block_until_ready(state)
        self.decode_seconds += time.perf_counter() - start - (self.calls.compile_seconds - compiled)
        return self._end_at_stop_strings(state)

    def _leaves(self, state: DecodingState, limit: int) -> bool:
        """Whether a block leaves the window of a row that goes on."""
        if self.lm.method.cache.window >= UNBOUNDED:
            return False
        rows = state.cache
        done, step, lengths, start = on_host((state.done, state.step, state.lengths, rows.start))
        start = start if start.ndim == 1 else start[:, 0].reshape(-1)  # devices on "model" agree
        full = lengths + step - 1 - start >= rows.window_pages * rows.page_size
        return bool((~done & (step < limit) & full).any())

    def prepare_steps(self, state: DecodingState) -> None:
        """Compiles all that the answers may need, so that none of their pieces waits for it."""
        for program in self._programs:
            self._prepare(program, state)

    def _prepare(self, program: Program, state: DecodingState) -> Callable[..., DecodingState]:
        if program not in self._prepared:
            args = self._program_lm, state, jnp.int32(self.config.max_new_tokens), self._sampling
            self._prepared[program] = self.calls.prepare(program, *args, backend=self.backend)
        return self._prepared[program]

    def _end_at_stop_strings(self, state: DecodingState) -> DecodingState:
        if not self.config.stop or self.steps(state) < self.config.min_new_tokens:  # no text is needed before
            return state
        stopped = jnp.asarray([answer.stopped for answer in self.answers(state)])
        return dataclasses.replace(state, done=state.done | stopped)

    def is_finished(self, state: DecodingState) -> bool:
        """Whether no row will say more."""
        return self.steps(state) >= self.config.max_new_tokens or bool(on_host(state.done).all())

    def steps(self, state: DecodingState) -> int:
        """Tokens of the longest answer so far."""
        return int(np.max(on_host(state.step)))

    def answers(self, state: DecodingState) -> list[Answer]:
        """Each row's answer so far, cut at its stop token or stop string."""
        tokens, steps = on_host((state.tokens, state.step))
        rows = zip(self._readers, tokens, steps, strict=True)
        return [reader.read(of_row[:step].tolist()) for reader, of_row, step in rows]
