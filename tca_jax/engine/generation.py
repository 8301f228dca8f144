"""`generate` and `stream`: prompts in, text, tokens and statistics out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.buckets import bucket_length
from tca_jax.engine.decoding import DecodingState, decode, prefill, row_keys
from tca_jax.engine.lm import LM
from tca_jax.engine.programs import Program
from tca_jax.engine.prompts import Prompt, decode_tokens, encode_prompt, encode_prompts
from tca_jax.engine.sampling import Sampling
from tca_jax.pallas_kernels.backends import check_backend

_prefill = Program(prefill)
_decode = Program(decode, donate=(1,))
_STOP_STRING_STRIDE = 16  # tokens between looks at the text for stop strings


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a call cost.

    Attributes:
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens of each answer.
        compile_seconds: Tracing and compiling, 0 when programs of these shapes were there; in no other figure.
        prefill_seconds: From the prompt's ids to the first new token.
        seconds_per_token: Mean time of each further step (one token for every row), 0 if there was none.
        kv_cache_bytes: Bytes of all caches of this call, as allocated.
        full_kv_cache_bytes: Bytes that the same call allocates under full attention.
        kept_share: Share of the tokens so far that the caches hold, mean over rows, layers and KV heads.
    """

    prompt_tokens: list[int]
    new_tokens: list[int]
    compile_seconds: float
    prefill_seconds: float
    seconds_per_token: float
    kv_cache_bytes: int
    full_kv_cache_bytes: int
    kept_share: float


@dataclasses.dataclass(frozen=True)
class Output:
    """Result of `generate`: the new part only, one entry a prompt.

    Attributes:
        tokens: New token ids, a stop token included.
        finish_reasons: "stop" (a stop token or stop string) or "length".
        stats: What the call cost.
    """

    tokens: list[list[int]]
    finish_reasons: list[Literal["stop", "length"]]
    stats: Stats
    _text: list[str] | None = dataclasses.field(repr=False)

    @property
    def text(self) -> list[str]:
        """New text, without special tokens and stop strings. ValueError where the model has no tokenizer."""
        if self._text is None:
            raise ValueError("out.text: the model was loaded without a tokenizer; use out.tokens")
        return self._text


def generate(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] | None = None,
    backend: str = "auto",
) -> Output:
    """Answers one prompt or a batch of prompts of any lengths.

    Args:
        lm: From `tca_jax.load`. Without a profile it runs exact full attention.
        prompts: Strings, chats (lists of {"role", "content"}) or token ids; one or a sequence.
        max_new_tokens: Most tokens an answer may have.
        temperature: 0 is greedy.
        top_k: Keep the k best tokens.
        top_p: Keep the smallest set of tokens whose probability reaches p.
        min_p: Keep tokens at least this share as probable as the best.
        repetition_penalty: Above 1 discourages tokens that the prompt or answer already holds.
        seed: Same seed, same draws. Row i's draws depend on the seed and i, not on the other rows.
        stop: Strings that end an answer; they are cut from the text.
        stop_token_ids: Tokens that end an answer; None takes the model's own, () none.
        backend: Kernel backend: "auto", "xla", "triton" or "mosaic".

    Returns:
        `Output` with `text`, `tokens`, `finish_reasons` and `stats`.

    Raises:
        ValueError: a prompt or number is not allowed; raised before anything is compiled.
        TypeError: `prompts` is no prompt.
    """
    request = _Request.create(
        lm,
        encode_prompts(lm, prompts),
        max_new_tokens=max_new_tokens,
        sampling=Sampling.create(temperature, top_k, top_p, min_p, repetition_penalty),
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        backend=backend,
    )
    state = request.start()
    stride = _STOP_STRING_STRIDE if request.stop else max_new_tokens
    while not request.is_finished(state):
        state = request.advance(state, stride)
    return request.output(state)


def stream(lm: LM, prompt: Prompt, **options: Any) -> Generator[str, None, Output]:
    """Yields the answer to one prompt piece by piece, as soon as a piece is certain.

    Args:
        lm: From `tca_jax.load`.
        prompt: A string, a chat or token ids.
        **options: As for `generate`.

    Yields:
        Pieces of text. Joined they are `generate(...).text[0]`. A piece never splits a character, and text that may
        still turn out to be part of a stop string is held back.

    Returns:
        At its end the generator returns what `generate` does: `out = yield from stream(...)`.

    Raises:
        ValueError: as for `generate`; also a model without a tokenizer. Raised by the call, not by the first piece.
    """
    ids = encode_prompt(lm, prompt)
    decode_tokens(lm, [])  # no tokenizer: say so before anything is compiled
    defaults = {
        "max_new_tokens": 256,
        "seed": 0,
        "stop": (),
        "stop_token_ids": None,
        "backend": "auto",
    }
    request_options = {name: options.pop(name, value) for name, value in defaults.items()}
    sampling = Sampling.create(**options)
    return _pieces(_Request.create(lm, [ids], sampling=sampling, **request_options))


def _pieces(request: _Request) -> Generator[str, None, Output]:
    state, sent = request.start(), 0
    held_back = max((len(s) for s in request.stop), default=1) - 1
    while True:
        finished = request.is_finished(state)
        text = request.answers(state)[0].text or ""
        certain = len(text) if finished else len(text.rstrip("\ufffd")) - held_back
        if certain > sent:
            yield text[sent:certain]
            sent = certain
        if finished:
            return request.output(state)
        state = request.advance(state, 1)


@dataclasses.dataclass(frozen=True)
class _Answer:
    tokens: list[int]
    text: str | None
    stopped: bool


@dataclasses.dataclass
class _Request:
    """One call: its inputs, its compiled programs' times, and how its answers end."""

    lm: LM
    prompt_ids: list[list[int]]
    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    seed: int
    backend: str
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @classmethod
    def create(
        cls,
        lm: LM,
        prompt_ids: list[list[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        stop: str | Sequence[str],
        stop_token_ids: Sequence[int] | None,
        backend: str,
    ) -> _Request:
        stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        check_backend(backend)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise ValueError(f"seed = {seed!r}: must be an integer")
        if any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop = {list(stop)!r}: must be non-empty strings")
        if stop and lm.tokenizer is None:
            raise ValueError(f"stop: {lm.name} was loaded without a tokenizer; use stop_token_ids")
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {max_new_tokens!r}: must be an integer of at least 1")
        allowed = lm.config.max_context
        for i, ids in enumerate(prompt_ids):
            if len(ids) + max_new_tokens > allowed:
                raise ValueError(
                    f"prompts[{i}] has {len(ids)} tokens; with max_new_tokens = {max_new_tokens} that is "
                    f"{len(ids) + max_new_tokens}, and {lm.name} has {allowed} positions"
                )
        stop_tokens = lm.eos_token_ids if stop_token_ids is None else tuple(int(t) for t in stop_token_ids)
        return cls(lm, prompt_ids, int(max_new_tokens), sampling, stop, stop_tokens, seed, backend)

    @property
    def program_lm(self) -> LM:
        """The model without what programs do not depend on, so that another tokenizer or name compiles nothing."""
        return dataclasses.replace(self.lm, name="", tokenizer=None, eos_token_ids=())

    @property
    def padded_tokens(self) -> int:
        return bucket_length(max(len(ids) for ids in self.prompt_ids))

    def start(self) -> DecodingState:
        """Prefill and the first token."""
        batch = len(self.prompt_ids)
        tokens = np.full((batch, self.padded_tokens), self.lm.pad_token_id, np.int32)
        for row, ids in zip(tokens, self.prompt_ids, strict=True):
            row[: len(ids)] = ids
        lengths = jnp.asarray([len(ids) for ids in self.prompt_ids], jnp.int32)
        keys = row_keys(jax.random.key(self.seed), batch)
        stops = jnp.asarray(self.stop_tokens, jnp.int32)
        args = (self.program_lm, jnp.asarray(tokens), lengths, keys, self.sampling, stops)
        program, seconds = _prefill.prepare(*args, max_new_tokens=self.max_new_tokens, backend=self.backend)
        self.compile_seconds += seconds
        start = time.perf_counter()
        state = jax.block_until_ready(program(*args))
        self.prefill_seconds = time.perf_counter() - start
        return self._end_at_stop_strings(state)

    def advance(self, state: DecodingState, steps: int) -> DecodingState:
        """Up to `steps` more tokens a row."""
        args = (self.program_lm, state, state.step + steps, self.sampling)
        program, seconds = _decode.prepare(*args, backend=self.backend)
        self.compile_seconds += seconds
        start = time.perf_counter()
        state = jax.block_until_ready(program(*args))
        self.decode_seconds += time.perf_counter() - start
        return self._end_at_stop_strings(state)

    def _end_at_stop_strings(self, state: DecodingState) -> DecodingState:
        if not self.stop:
            return state
        stopped = jnp.asarray([answer.stopped for answer in self.answers(state)])
        return dataclasses.replace(state, done=state.done | stopped)

    def is_finished(self, state: DecodingState) -> bool:
        return int(state.step) >= self.max_new_tokens or bool(np.all(state.done))

    def answers(self, state: DecodingState) -> list[_Answer]:
        """What each row has said so far, cut at its stop token or stop string."""
        return [self._cut(row.tolist()) for row in np.asarray(state.tokens)[:, : int(state.step)]]

    def _cut(self, tokens: list[int]) -> _Answer:
        ends = [i for i, token in enumerate(tokens) if token in self.stop_tokens]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        if self.lm.tokenizer is None:
            return _Answer(tokens, None, bool(ends))
        text = decode_tokens(self.lm, tokens)
        found = [position for s in self.stop if (position := text.find(s)) >= 0]
        if not found:
            return _Answer(tokens, text, bool(ends))
        shortest = next(n for n in range(1, len(tokens) + 1) if self._has_stop(tokens[:n]))
        return _Answer(tokens[:shortest], text[: min(found)], True)

    def _has_stop(self, tokens: list[int]) -> bool:
        text = decode_tokens(self.lm, tokens)
        return any(s in text for s in self.stop)

    def output(self, state: DecodingState) -> Output:
        answers = self.answers(state)
        steps, batch = int(state.step), len(self.prompt_ids)
        head_dim, dtype = self.lm.config.head_dim, state.caches[0].k_ring.dtype
        full = self.lm.with_profile(None).cache_layouts(batch, self.padded_tokens, self.max_new_tokens)
        stats = Stats(
            prompt_tokens=[len(ids) for ids in self.prompt_ids],
            new_tokens=[len(answer.tokens) for answer in answers],
            compile_seconds=self.compile_seconds,
            prefill_seconds=self.prefill_seconds,
            seconds_per_token=self.decode_seconds / (steps - 1) if steps > 1 else 0.0,
            kv_cache_bytes=sum(cache.layout.num_bytes(head_dim, dtype) for cache in state.caches),
            full_kv_cache_bytes=sum(layout.num_bytes(head_dim, dtype) for layout in full),
            kept_share=kept_share(state),
        )
        text = None if self.lm.tokenizer is None else [answer.text or "" for answer in answers]
        reasons: list[Literal["stop", "length"]] = ["stop" if answer.stopped else "length" for answer in answers]
        return Output([answer.tokens for answer in answers], reasons, stats, text)


def kept_share(state: DecodingState) -> float:
    """Tokens in pools and windows over tokens fed, mean over rows, layers and KV heads."""
    config = state.caches[0].layout.config
    fed = np.asarray(state.lengths) + int(state.step) - 1  # the newest token is not in the cache yet
    edge = (fed - 1) // config.block_size * config.block_size - config.window
    if int(state.step) == 1:  # nothing decoded: prefill keeps the window of the first new token
        edge = fed // config.block_size * config.block_size - config.window
    local = fed - np.maximum(0, edge)
    kept = np.stack([np.asarray(cache.kept) for cache in state.caches])  # [layers, B, H_kv]
    return float(np.mean((kept + local[:, None]) / fed[:, None]))
