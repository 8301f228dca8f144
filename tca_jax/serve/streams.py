"""Answers while they are being written: the engine's thread adds tokens, the caller takes pieces of text."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from tca_jax.engine.generation import AnswerReader
from tca_jax.engine.generation_config import GenerationConfig
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import require_tokenizer
from tca_jax.errors import require

FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """An answer that has ended."""

    tokens: list[int]  # new ones, a stop token included
    finish_reason: FinishReason  # "stop" (a stop token or stop string), "length", or "cancelled"
    prompt_tokens: int  # after a document, of what was appended to it
    document_tokens: int  # 0 without a document
    document: str | None  # id of the document that the answer became, with `keep`
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
    """An answer that an engine is writing: an iterator of pieces of text.

    Joined, the pieces are `result().text`; each iterator gives all of them. Text that may still become part of a stop
    string is held back.
    """

    def __init__(
        self, lm: LM, config: GenerationConfig, cancel: Callable[[Stream], None], keep: bool, lengths: tuple[int, int]
    ) -> None:
        self.config, self.sampling, self.keep, self._cancel = config, config.sampling, keep, cancel
        self._reader, self._reading = AnswerReader(lm, config), threading.Lock()
        self._listeners: list[Callable[[], object]] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[int, float]]] = []
        self._ended: FinishReason | BaseException | None = None
        self._cancelled = False
        self.begun, self.first_token_at, self.last_token_at = time.perf_counter(), 0.0, 0.0
        self.prompt_tokens, self.document_tokens = lengths
        self.document: str | None = None

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return list(self._tokens)

    @property
    def ended(self) -> bool:
        """Whether nothing follows."""
        return self._ended is not None

    def add(self, tokens: list[int], logprobs: list[float], top: list[list[tuple[int, float]]]) -> None:
        self.last_token_at = time.perf_counter()
        self.first_token_at = self.first_token_at or self.last_token_at
        self._logprobs += logprobs
        self._top += top
        self._tokens += tokens
        self._notify()

    def end(self, how: FinishReason | BaseException, document: str | None = None) -> None:
        """Ends the answer, perhaps with an error; the first end stands."""
        if not self.ended:
            self.document = document
            self._ended = how  # last: other threads look at it first
            self._notify()

    def cancel(self) -> None:
        """Ends the answer, whose tokens so far stay; nothing happens if it has ended."""
        self._cancel(self)

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """Inside, a function is called whenever there is more, in the engine's thread, which it must not block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()

    def __iter__(self) -> Iterator[str]:
        return self._pieces(None)

    def result(self, timeout: float | None = None) -> Completion:
        """The answer, when it has ended.

        Raises:
            TimeoutError: it has not ended within `timeout` seconds.
            Exception: the model computes NaN or infinity, the document is gone, the mask raises, or the engine fails.
        """
        for _ in self._pieces(timeout):
            pass
        end: Any = self.piece(0)[1]
        return end

    def _pieces(self, timeout: float | None) -> Iterator[str]:
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if timeout is None else timeout)
        changed, sent, end = threading.Event(), 0, None
        with self.listening(changed.set):
            while end is None:
                changed.clear()
                piece, end = self.piece(sent)
                sent += len(piece)
                if piece:
                    yield piece
                in_time = end is not None or changed.wait(deadline - time.monotonic())
                require(in_time, f"the answer has not ended within {timeout} seconds", TimeoutError)

    def piece(self, sent: int) -> tuple[str, Completion | None]:
        """Text after the characters that were handed out, and the answer if that is all. Raises its error."""
        ended = self._ended
        if isinstance(ended, BaseException):
            raise ended
        with self._reading:
            answer = self._reader.read(self.tokens)
            cancels = answer.stopped and ended is None and not self._cancelled
            self._cancelled = self._cancelled or cancels
        if cancels:  # at a stop string, which only the reader sees
            self.cancel()
        reason = "stop" if answer.stopped and (ended or not self.keep) else ended
        text = self._reader.piece(answer, sent, finished=reason is not None)
        if reason is None:
            return text, None
        count, most = len(answer.tokens), self.config.num_logprobs
        return text, Completion(
            tokens=answer.tokens,
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            document_tokens=self.document_tokens,
            document=self.document,
            seconds_to_first_token=max(0.0, self.first_token_at - self.begun),
            seconds=max(0.0, self.last_token_at - self.begun),
            logprobs=None if most is None else self._logprobs[:count],
            top_logprobs=[of[:most] for of in self._top[:count]] if most else None,
            _text=answer.text,
        )
