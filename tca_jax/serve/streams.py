"""Answers while they are being written: the engine's thread adds tokens, the caller takes pieces of text."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Literal

from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import require_tokenizer
from tca_jax.engine.request import Answer, AnswerOptions, AnswerReader, certain_characters
from tca_jax.errors import require

FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """An answer that has ended."""

    tokens: list[int]  # new ones, a stop token included
    finish_reason: FinishReason  # "stop" (a stop token or stop string), "length", or "cancelled"
    prompt_tokens: int  # after a document, of what was appended to it
    document_tokens: int  # 0 without a document
    document: str | None  # id of the document that the answer left, where it was asked with `keep`
    seconds_to_first_token: float  # from the request
    seconds: float  # from the request to the last token
    logprobs: list[float] | None  # of each new token, before temperature, filters and penalties; None unless requested
    top_logprobs: list[list[tuple[int, float]]] | None  # likeliest (token id, log-probability) at each place
    _text: str | None = dataclasses.field(repr=False)

    @property
    def text(self) -> str:
        """New text, without special tokens and stop strings. ValueError where the model has no tokenizer."""
        return require_tokenizer("completion.text", "the model", self._text, "use completion.tokens")


class Stream:
    """An answer that an engine is writing: an iterator of pieces of text, plain or asynchronous.

    Joined, the pieces are `result().text`; each iterator gives all of them. Text that may still become part of a stop
    string is held back.
    """

    def __init__(self, lm: LM, options: AnswerOptions, cancel: Callable[[Stream], None], *, keep: bool = False) -> None:
        self.options, self.keep, self._cancel = options, keep, cancel
        self._reader = AnswerReader(lm, options.stop, options.stop_tokens, options.min_new_tokens)
        self._changed = threading.Condition()
        self._reading = threading.Lock()  # several threads may read
        self._listeners: list[Callable[[], None]] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[int, float]]] = []
        self._ended: FinishReason | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self.asked, self.first_token_at, self.last_token_at = time.perf_counter(), 0.0, 0.0
        self.prompt_tokens = self.document_tokens = 0
        self.document: str | None = None

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        with self._changed:
            return list(self._tokens)

    def add(self, tokens: list[int], logprobs: list[float], top: list[list[tuple[int, float]]]) -> None:
        """More tokens."""
        now = time.perf_counter()
        with self._changed:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
            self._tokens += tokens
            self._logprobs += logprobs
            self._top += top
        self._tell()

    def end(self, reason: FinishReason, document: str | None = None) -> None:
        """Ends the answer; the first end stands."""
        with self._changed:
            if not self.ended:
                self._ended, self.document = reason, document
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Ends the answer with an error; the first end stands."""
        with self._changed:
            if not self.ended:
                self._error = error
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def cancel(self) -> None:
        """Ends the answer, whose tokens so far stay; nothing happens if it has ended."""
        self._cancel(self)

    def listen(self, listener: Callable[[], None]) -> None:
        """Has a function called whenever there is more, in the engine's thread, which it must not block."""
        with self._changed:
            self._listeners.append(listener)

    @property
    def ended(self) -> bool:
        """Whether nothing follows."""
        return self._ended is not None or self._error is not None

    def __iter__(self) -> Iterator[str]:
        sent = 0
        while True:
            with self._changed:
                seen = self._version()
            piece, finished = self._piece(sent)
            sent += len(piece)
            if piece:
                yield piece
            if finished:
                return
            with self._changed:
                self._changed.wait_for(functools.partial(self._is_newer, seen))

    async def __aiter__(self) -> AsyncIterator[str]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        sent = 0
        self.listen(listener)
        try:
            while True:
                changed.clear()
                piece, finished = self._piece(sent)
                sent += len(piece)
                if piece:
                    yield piece
                if finished:
                    return
                await changed.wait()
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def result(self, timeout: float | None = None) -> Completion:
        """The answer, when it has ended.

        Raises:
            TimeoutError: it has not ended within `timeout` seconds.
            Exception: the model computes NaN or infinity, the document is gone, the mask raises, or the engine fails.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                seen = self._version()
            if self._read()[1]:
                return self._completion()
            left = None if deadline is None else deadline - time.monotonic()
            with self._changed:
                newer = self._changed.wait_for(functools.partial(self._is_newer, seen), left)
                require(newer, f"the answer has not ended within {timeout} seconds", TimeoutError)

    async def completion(self) -> Completion:
        """As `result`, for asyncio."""
        async for _ in self:
            pass
        return self._completion()

    def _version(self) -> tuple[int, bool]:
        return len(self._tokens), self.ended

    def _is_newer(self, version: tuple[int, bool]) -> bool:
        return self._version() != version

    def _read(self) -> tuple[Answer, bool]:
        """The answer so far, and whether that is all."""
        with self._changed:
            tokens, ended, error = list(self._tokens), self._ended, self._error
        if error is not None:
            raise error
        with self._reading:
            answer = self._reader.read(tokens)
            cancels = answer.stopped and ended is None and not self._cancelled
            self._cancelled = self._cancelled or cancels
        if cancels:  # at a stop string, which only the reader sees
            self.cancel()
        return answer, ended is not None or (answer.stopped and not self.keep)

    def _piece(self, sent: int) -> tuple[str, bool]:
        """Text after the characters that were handed out, and whether it is the last."""
        answer, finished = self._read()
        certain = certain_characters(answer, self.options.stop, finished=finished)
        return (answer.text or "")[sent : max(sent, certain)], finished

    def _completion(self) -> Completion:
        answer, _ = self._read()
        count, options = len(answer.tokens), self.options
        reason: FinishReason = "stop" if answer.stopped else self._ended or "length"
        return Completion(
            tokens=answer.tokens,
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            document_tokens=self.document_tokens,
            document=self.document,
            seconds_to_first_token=max(0.0, self.first_token_at - self.asked),
            seconds=max(0.0, self.last_token_at - self.asked),
            logprobs=None if options.logprobs is None else self._logprobs[:count],
            top_logprobs=[of[: options.logprobs] for of in self._top[:count]] if options.logprobs else None,
            _text=answer.text,
        )
