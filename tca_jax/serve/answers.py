"""Answers of a request: encoded, counted, timed, and cancelled when the client has gone."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from tca_jax.engine.prompts import DocumentTemplate, encode_continuation, encode_prompt, render_chat
from tca_jax.serve.constraints import Mask
from tca_jax.serve.documents import State
from tca_jax.serve.engine import Engine
from tca_jax.serve.protocol import DocumentRequest, RequestError, require_field
from tca_jax.serve.streams import Completion, Stream

_DOCUMENT = "\u2063document\u2063"  # stands for a document while a chat is rendered
_PREFIX = "tca_jax"
_FIRST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1)  # seconds


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A prompt for an engine."""

    document: str | None  # id; None for none
    tokens: list[int]  # after the document
    document_tokens: int = 0


class PromptEncoder:
    """Encodes documents, chats and prompts for the model of an engine. Thread-safe.

    A document is the beginning of the first user's message, so that a chat over it equals the chat that contains it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lm = engine, engine.lm
        self._has_template = bool(getattr(engine.lm.tokenizer, "chat_template", None))

    def upload(self, request: DocumentRequest) -> str:
        """Reads a document; returns its id at once. ValueError if it is too long, or a chat's without a template."""
        chat = self._has_template if request.chat is None else request.chat
        if chat or request.system is not None:
            self._require_template("system" if request.system is not None else "chat")
        if not chat:
            return self._engine.read(encode_prompt(self._lm, request.text, "text"))
        template = DocumentTemplate.of(self._lm, request.system)
        return self._engine.read(template.document(self._lm, request.text, "text"))

    def chat(self, messages: Sequence[dict[str, str]], document: str | None) -> EncodedPrompt:
        """Encodes a chat, about a named document or about the longest document whose tokens it begins with."""
        self._require_template("messages")
        if document is None:
            tokens = encode_prompt(self._lm, list(messages), "messages")
            found, length = self._engine.prefix_of(tokens) or (None, 0)
            return EncodedPrompt(found, tokens[length:], length)
        require_field(
            messages[0]["role"] == "user",
            "messages",
            f"messages[0].role = {messages[0]['role']}: must be user in a chat over a document; a system message "
            "stands before the document: give it as system when the document is uploaded",
        )
        first = {**messages[0], "content": f"{_DOCUMENT}\n\n{messages[0]['content']}"}
        _, *after = render_chat(self._lm, [first, *messages[1:]], "messages").split(_DOCUMENT)
        changes = f"messages: the chat template of {self._lm.name} changes messages: no document can be a part"
        require_field(len(after) == 1, "messages", changes)
        return self._append(document, after[0])

    def complete(self, prompt: str | list[int], document: str | None) -> EncodedPrompt:
        """Encodes a prompt: alone, or appended to a document."""
        if document is not None and isinstance(prompt, str):
            return self._append(document, prompt)
        tokens = encode_prompt(self._lm, prompt, "prompt")
        return EncodedPrompt(document, tokens, 0 if document is None else len(self._engine.tokens_of(document)))

    def _append(self, document: str, text: str) -> EncodedPrompt:
        before = self._engine.tokens_of(document)
        return EncodedPrompt(document, encode_continuation(self._lm, text, before, "prompt"), len(before))

    def _require_template(self, param: str) -> None:
        none = f"{self._lm.name} has no chat template; use /v1/completions, and documents with chat = false"
        require_field(self._has_template, param, f"{param}: {none}")


class AnswerCounter:
    """Asks an engine for answers, of which at most `most` wait or are written. Only the event loop calls it."""

    def __init__(self, engine: Engine, metrics: Metrics, most: int) -> None:
        self._engine, self.metrics, self._most = engine, metrics, most
        self._held = 0
        self._open: set[Answers] = set()

    async def ask(
        self,
        prompts: Sequence[EncodedPrompt],
        lengths: Sequence[int],
        samples: int,
        options: Mapping[str, Any],
        mask: Callable[[], Mask] | None,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> Answers:
        """Asks for all answers of a request: `samples` of at most `lengths[i]` tokens to prompt i, one after another.

        `mask` creates the mask of an answer; `in_thread` runs a function that may wait for the engine.
        """
        rows = len(prompts) * samples
        require_field(rows <= self._most, "n", f"n = {rows} answers: at most {self._most} may wait or be written")
        busy = f"{self._held} answers wait or are written, and {rows} more are requested: at most {self._most} may"
        full = self._held + rows > self._most
        require_field(not full, None, f"{busy}; try again later", status=429, code="rate_limit_exceeded")
        self._held += rows
        streams: list[Stream] = []

        def ask() -> None:
            for each, most in zip(prompts, lengths, strict=True):
                for _ in range(samples):
                    given = {"max_new_tokens": most, "sample": len(streams), **options}  # as the rows of `generate`
                    given["mask"] = None if mask is None else mask()
                    streams.append(self._engine.ask(each.document, each.tokens, **given))

        asking = asyncio.ensure_future(in_thread(ask))
        try:
            await asyncio.shield(asking)
        except BaseException:

            def give_back(_: Any) -> None:
                for stream in streams:
                    stream.cancel()
                self._held -= rows

            asking.add_done_callback(give_back)  # a thread that has begun goes on
            raise
        for stream in streams:
            self.metrics.begin(stream)
        answers = Answers(self, streams)
        self._open.add(answers)
        return answers

    def cancel_all(self) -> None:
        """Ends all answers; their clients get an error."""
        for answers in self._open:
            for stream in answers.streams:
                stream.cancel()

    def closed(self, answers: Answers) -> None:
        """A request has ended."""
        self._open.discard(answers)
        self._held -= len(answers.streams)


class Answers:
    """The answers of one request. `close` must be called: it cancels those that have not ended."""

    def __init__(self, counter: AnswerCounter, streams: Sequence[Stream]) -> None:
        self._counter, self.streams = counter, streams
        self._completions: dict[Stream, Completion] = {}
        self._closed = False

    async def completions(self, seconds: float) -> list[Completion]:
        """All of them, in order. RequestError if they take longer than `seconds`, or the server ends."""
        try:
            async with asyncio.timeout(seconds):
                return list(await asyncio.gather(*map(self._completion, self.streams)))
        except TimeoutError:
            raise _too_slow(seconds) from None

    async def pieces(self, seconds: float) -> AsyncIterator[tuple[int, str | Completion]]:
        """Pieces of text of each answer while they are written, and its completion at its end. Raises the same."""
        queue: asyncio.Queue[tuple[int, str | Completion | Exception]] = asyncio.Queue()

        async def pump(index: int, stream: Stream) -> None:
            try:
                async for piece in stream:
                    queue.put_nowait((index, piece))
                queue.put_nowait((index, await self._completion(stream)))
            except Exception as error:
                queue.put_nowait((index, error))

        pumps = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(self.streams)]
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            left = len(pumps)
            while left:
                try:
                    async with asyncio.timeout_at(deadline):
                        index, piece = await queue.get()
                except TimeoutError:
                    raise _too_slow(seconds) from None
                if isinstance(piece, Exception):
                    raise piece
                left -= isinstance(piece, Completion)
                yield index, piece
        finally:
            for each in pumps:
                each.cancel()

    async def _completion(self, stream: Stream) -> Completion:
        completion = await stream.completion()
        require_field(completion.finish_reason != "cancelled", None, "the server is shutting down", status=503)
        self._completions[stream] = completion
        return completion

    def close(self) -> None:
        """Cancels those that have not ended, and counts all."""
        if self._closed:
            return
        self._closed = True
        for stream in self.streams:
            if not stream.ended:
                stream.cancel()
            self._counter.metrics.end(stream, self._completions.get(stream))
        self._counter.closed(self)


def _too_slow(seconds: float) -> RequestError:
    return RequestError(f"the answer took more than {seconds:g} seconds, the most that are allowed", status=504)


class Metrics:
    """Prometheus metrics of one server."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._registry = engine, CollectorRegistry()
        made: dict[str, Any] = {"registry": self._registry, "namespace": _PREFIX}
        self._requests = Counter("requests", "Requests by path and HTTP status.", ["path", "status"], **made)
        self._answers = Counter("answers", "Answers by how they ended.", ["finish_reason"], **made)
        self._tokens = Counter("tokens", "Tokens of prompts, of their documents, of answers.", ["kind"], **made)
        name, words = "time_to_first_token_seconds", "From a request to its first token."
        self._first = Histogram(name, words, buckets=_FIRST_BUCKETS, **made)
        name, words = "time_per_token_seconds", "Of each token after the first."
        self._each = Histogram(name, words, buckets=_TOKEN_BUCKETS, **made)
        Gauge("rows_max", "Answers that are written at once.", **made).set(engine.max_rows)
        self._registry.register(self)
        self._streams: set[Stream] = set()
        self._lock = threading.Lock()

    def request(self, path: str, status: int) -> None:
        """Counts a request."""
        self._requests.labels(path, status).inc()

    def begin(self, stream: Stream) -> None:
        """Counts an answer that is asked for."""
        with self._lock:
            self._streams.add(stream)

    def end(self, stream: Stream, completion: Completion | None) -> None:
        """Counts an answer that has ended; None where it was cancelled, or failed."""
        with self._lock:
            self._streams.discard(stream)
        self._answers.labels("cancelled" if completion is None else completion.finish_reason).inc()
        if completion is None:
            return
        new = len(completion.tokens)
        self._tokens.labels("prompt").inc(completion.prompt_tokens)
        self._tokens.labels("document").inc(completion.document_tokens)
        self._tokens.labels("answer").inc(new)
        self._first.observe(completion.seconds_to_first_token)
        if new > 1:
            self._each.observe((completion.seconds - completion.seconds_to_first_token) / (new - 1))

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's metrics now, for the registry."""
        with self._lock:
            running = [bool(stream.first_token_at) for stream in self._streams]
        rows = {("waiting",): running.count(False), ("running",): running.count(True)}
        yield _gauge("rows", "Answers that wait for their first token, and that are written.", ["state"], rows)
        failed = {(): float(self._engine.failure is not None)}
        yield _gauge("engine_failed", "Whether the engine has failed, for good.", [], failed)
        pools = {"documents": self._engine.document_pages, "answers": self._engine.answer_pages}
        pages = {(of, name): getattr(pool, name) for of, pool in pools.items() for name in ("free", "total")}
        yield _gauge("pages", "Pages of each device, by their use.", ["of", "state"], pages)
        documents = self._engine.documents()
        sizes = {(state,): [each.num_bytes for each in documents if each.state == state] for state in get_args(State)}
        sizes["stored",] = [each.num_bytes for each in documents if each.stored]
        counts = {state: len(each) for state, each in sizes.items()}
        total = {state: sum(each) for state, each in sizes.items()}
        in_pages = {state: each // self._engine.page_bytes for state, each in total.items()}
        words = "Documents by where they are; those on disk as well as elsewhere are stored."
        yield _gauge("documents", words, ["state"], counts)
        yield _gauge("document_bytes", "Their keys and values.", ["state"], total)
        yield _gauge("document_pages", "Their pages on each device, or of as many bytes.", ["state"], in_pages)


def _gauge(name: str, words: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", words, labels=labels)
    for of, value in values.items():
        family.add_metric(list(of), value)
    return family
