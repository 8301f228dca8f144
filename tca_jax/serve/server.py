"""The HTTP server: the OpenAI protocol over an engine, with documents and metrics beside it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import inspect
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import uvicorn
from anyio import CapacityLimiter, to_thread
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from tca_jax.engine.contexts import DocumentTemplate
from tca_jax.engine.generation_config import GenerationConfig
from tca_jax.engine.prompts import encode_continuation, encode_prompt, render_chat, require_tokenizer
from tca_jax.serve import protocol
from tca_jax.serve.constraints import Grammars, Mask
from tca_jax.serve.engine import Engine, UnknownDocument
from tca_jax.serve.metrics import Metrics
from tca_jax.serve.protocol import ChatRequest, CompletionRequest, Json, RequestError, require_field
from tca_jax.serve.streams import Completion, Stream

Endpoint = Callable[[Request], Response | Json | Awaitable[Response | Json]]
Prompt = tuple[str | None, list[int]]  # a document's id, and the tokens after it
_DOCUMENT = "\u2063document\u2063"  # stands for a document while a chat is rendered
_CANCELLING_SECONDS = 3  # until connections are closed whose answers were cancelled
_SCHEMA = "response_format.json_schema.schema"  # the field, in errors
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Bounds of a server."""

    model: str  # its name in requests
    api_keys: tuple[str, ...] = ()  # of which a request must have one; none for no keys
    max_waiting: int = 256  # answers that wait or are written
    max_tokens: int = 4096  # of an answer
    default_tokens: int = 512  # of an answer to a chat that names no number
    max_body: int = 64 * 2**20  # bytes of a request
    body_seconds: float = 60.0  # until it has arrived, and until a client takes a piece of an answer
    timeout: float = 600.0  # seconds until an answer is cancelled, waiting included
    grace: float = 10.0  # seconds at the end for running answers, then for documents that are being stored


class Answers:
    """The answers of one request, within `seconds`. `close` must be called: it cancels those that have not ended."""

    def __init__(
        self, metrics: Metrics, prompts: Sequence[tuple[Prompt, GenerationConfig]], samples: int, seconds: float
    ) -> None:
        self._metrics, self._prompts, self._samples, self._seconds = metrics, prompts, samples, seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._changed, self._is_ending = asyncio.Queue[int](), False
        self.streams: list[Stream] = []
        self.completions: dict[int, Completion] = {}  # of those that have ended
        self.rows = samples * len(prompts)
        metrics.open.add(self)

    async def begin(self, engine: Engine, mask: Callable[[], Mask] | None, threads: CapacityLimiter) -> None:
        """Has an engine begin them, as the rows of `generate`, by a thread; `mask` creates the mask of each."""

        def begin() -> None:
            for i in range(self.rows):
                if self in self._metrics.open:  # the client still waits
                    (document, tokens), config = self._prompts[i // self._samples]
                    self.streams.append(engine.ask(document, tokens, config, sample=i, mask=mask and mask()))
            if self not in self._metrics.open:
                self.cancel()

        try:
            begun = asyncio.ensure_future(to_thread.run_sync(begin, limiter=threads))  # waits for the engine's thread
            begun.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it
            begun.add_done_callback(lambda _: self._changed.put_nowait(0))
            await self._next()
            await begun
        except BaseException:
            self.close()
            raise

    async def _next(self) -> int:
        """The number of the next answer that has changed. RequestError past the deadline, or if the server ends."""
        try:
            async with asyncio.timeout_at(self._deadline):
                index = await self._changed.get()
        except TimeoutError:
            most = f"the answer took more than {self._seconds:g} seconds, the most that are allowed"
            raise RequestError(most, status=504) from None
        if self not in self._metrics.open:
            raise ClientDisconnect
        require_field(not self._is_ending, None, "the server is shutting down", status=503)
        return index

    async def pieces(self) -> AsyncIterator[tuple[int, str | Completion]]:
        """Pieces of text of each answer, and its completion. RequestError past the deadline, or if the server ends."""
        loop, changed, sent = asyncio.get_running_loop(), self._changed, [0] * self.rows

        def notify(index: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.put_nowait, index)

        with contextlib.ExitStack() as listening:
            for index, stream in enumerate(self.streams):
                listening.enter_context(stream.listening(functools.partial(notify, index)))
                changed.put_nowait(index)
            while len(self.completions) < self.rows:
                now = {await self._next()}
                while not changed.empty():
                    now.add(changed.get_nowait())
                for index in sorted(now - self.completions.keys()):
                    piece, end = self.streams[index].piece(sent[index])
                    sent[index] += len(piece)
                    if piece:
                        yield index, piece
                    if end is not None:
                        require_field(end.finish_reason != "cancelled", None, "the server is shutting down", status=503)
                        self.completions[index] = end
                        yield index, end

    def usage(self) -> Json:
        """Counts of tokens: of prompts with their documents, of answers, and of documents."""
        prompts, new = self.streams[:: self._samples], sum(len(each.tokens) for each in self.completions.values())
        cached = sum(each.document_tokens for each in prompts)
        prompt = cached + sum(each.prompt_tokens for each in prompts)
        total = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**total, "prompt_tokens_details": {"cached_tokens": cached}}

    def cancel(self) -> None:
        """Ends those that have not ended; the client gets an error, also while the engine is busy."""
        self._is_ending = True
        self._changed.put_nowait(0)  # `_next` looks at why
        for stream in self.streams:
            stream.cancel()

    def close(self) -> None:
        """Cancels those that have not ended, and counts all."""
        if self in self._metrics.open:
            self._metrics.open.remove(self)
            self.cancel()
            for index in range(self.rows):
                self._metrics.count(self.completions.get(index))


class Server:
    """The application: a web server runs `app`. ValueError if the engine's model has no tokenizer."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        require_tokenizer("a server", engine.lm.name, engine.lm.tokenizer, "serve a model that has one")
        self._engine, self._settings, self._lm = engine, settings, engine.lm
        self._has_template, self._metrics = bool(getattr(engine.lm.tokenizer, "chat_template", None)), Metrics(engine)
        self._keys = [os.fsencode(key) for key in settings.api_keys]
        self._created, self._threads = int(time.time()), CapacityLimiter(settings.max_waiting)
        self._compiling = asyncio.Lock()  # one schema at a time, which leaves the other threads to requests without one
        answers: dict[tuple[str, str], Endpoint] = {
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): lambda _: Response(generate_latest(self._metrics.registry), media_type=_METRICS_TYPE),
            ("GET", "/v1/models"): lambda _: {"object": "list", "data": [self._model()]},
            ("GET", "/v1/models/{model:path}"): lambda request: self._model(request.path_params["model"]),
            ("POST", "/v1/chat/completions"): lambda request: self._answer(request, ChatRequest),
            ("POST", "/v1/completions"): lambda request: self._answer(request, CompletionRequest),
            ("POST", "/v1/documents"): self._upload,
            ("GET", "/v1/documents"): lambda _: {"object": "list", "data": [x.as_json() for x in engine.documents()]},
            ("GET", "/v1/documents/{id}"): lambda request: engine.document(request.path_params["id"]).as_json(),
            ("DELETE", "/v1/documents/{id}"): self._delete,
        }
        routes = [Route(path, self._checked(path, each), methods=[method]) for (method, path), each in answers.items()]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    # All requests

    def _checked(self, path: str, answer: Endpoint) -> Endpoint:
        """An endpoint that requires the key, answers errors in the protocol's form, and is counted."""

        async def endpoint(request: Request) -> Response:
            response = Response(status_code=499)  # as nginx counts clients that have gone
            try:
                if path != "/health":
                    self._require_key(request)
                found = answer(request)
                found = await found if inspect.isawaitable(found) else found
                response = found if isinstance(found, Response) else _json(found)
            except ClientDisconnect:
                pass
            except Exception as error:
                response = _error(protocol.of_error(error))
            finally:
                self._metrics.requests.labels(path, response.status_code).inc()
            return response

        return endpoint

    def _require_key(self, request: Request) -> None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # as Starlette decodes headers
        known = [hmac.compare_digest(given, each) for each in self._keys]  # all of them: in constant time
        valid = not known or (kind.lower() == "bearer" and any(known))
        missing = "the request has no valid API key: send one as Authorization: Bearer KEY"
        require_field(valid, None, missing, status=401, code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        """The body of a request. RequestError where it is beyond the bounds of size and time."""
        most, seconds, body = self._settings.max_body, self._settings.body_seconds, bytearray()
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    body += chunk
                    require_field(len(body) <= most, None, f"request body exceeds {most:,} bytes", status=413)
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {seconds:g} seconds", status=408) from None
        return bytes(body)

    def _health(self, request: Request) -> Response:
        if (failure := self._engine.failure) is not None:
            return _json({"status": "failed", "error": str(failure)}, 503)
        return _json({"status": "ok"})

    def _model(self, name: str | None = None) -> Json:
        known, own = self._settings.model, {"created": self._created, "max_model_len": self._lm.config.max_context}
        text = f"model = {json.dumps(name)}: must be {known}"
        require_field(name in (None, known), "model", text, status=404, code="model_not_found")
        return {"id": known, "object": "model", "owned_by": "tca-jax", **own}

    async def _upload(self, request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        wanted = protocol.read_request(protocol.DocumentRequest, await self._body(request), content_type)
        document = await run_in_threadpool(lambda: self._engine.read(self._document_of(wanted)))
        return _json(self._engine.document(document).as_json(), 201)

    def _document_of(self, wanted: protocol.DocumentRequest) -> list[int]:
        """Tokens of a text, or of a document as a chat over it has them: they begin the first user's message."""
        if not (self._has_template if wanted.chat is None else wanted.chat) and wanted.system is None:
            return encode_prompt(self._lm, wanted.text, "text")
        self._require_template("chat" if wanted.system is None else "system")
        return DocumentTemplate.of(self._lm, wanted.system).document(self._lm, wanted.text, "text")

    def _require_template(self, param: str) -> None:
        none = f"{self._lm.name} has no chat template; use /v1/completions, and documents with chat = false"
        require_field(self._has_template, param, f"{param}: {none}")

    async def _delete(self, request: Request) -> Json:
        document = request.path_params["id"]
        await run_in_threadpool(self._engine.forget, document)
        return {"id": document, "object": "document.deleted", "deleted": True}

    # Answers

    def _prompts(self, wanted: ChatRequest | CompletionRequest) -> list[Prompt]:
        """Encodes prompts; a chat without a document is about the longest one whose tokens it begins with."""
        if isinstance(wanted, CompletionRequest):
            texts = wanted.prompt
        else:
            self._require_template("messages")
            messages = [message.as_dict() for message in wanted.messages]
            if wanted.document is None:
                tokens = encode_prompt(self._lm, messages, "messages")
                found = self._engine.prefix_of(tokens)
                return [(None, tokens) if found is None else (found.id, tokens[len(found.tokens) :])]
            role, remedy = messages[0]["role"], "give a system message, which precedes it, as system with the upload"
            must = f"messages[0].role = {role}: must be user in a chat over a document; {remedy}"
            require_field(role == "user", "messages", must)
            messages[0]["content"] = f"{_DOCUMENT}\n\n{messages[0]['content']}"
            _, *texts = render_chat(self._lm, messages, "messages").split(_DOCUMENT)
            changes = f"messages: the chat template of {self._lm.name} changes messages: no document can be a part"
            require_field(len(texts) == 1, "messages", changes)
        known = None if wanted.document is None else self._engine.document(wanted.document)

        def encode(text: str | list[int]) -> list[int]:
            if known is None or not isinstance(text, str):
                return encode_prompt(self._lm, text, "prompt")
            return encode_continuation(self._lm, text, known.tokens, "prompt")

        return [(wanted.document, encode(each)) for each in texts]

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._lm)  # takes about a second

    async def _answer(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        wanted: ChatRequest | CompletionRequest = protocol.read_request(kind, await self._body(request))
        self._model(wanted.model)
        form = (protocol.Chat if kind is ChatRequest else protocol.Text)(self._settings.model, self._lm.tokenizer)
        mask = None
        if isinstance(wanted, ChatRequest) and (schema := wanted.response_format.schema_of_answer) is not None:
            async with self._compiling:
                mask = await run_in_threadpool(lambda: self._grammars.json(schema, _SCHEMA))
        answers = await self._begin(wanted, mask)
        if wanted.stream:
            events = self._events(answers, form, wanted.stream_options.include_usage)
            return _Events(events, answers, self._settings.body_seconds)

        async def close_when_gone() -> None:  # all of the request's body has been read
            while (await request.receive())["type"] != "http.disconnect":
                pass
            answers.close()

        gone = asyncio.ensure_future(close_when_gone())
        try:
            async for _ in answers.pieces():
                pass
        finally:
            gone.cancel()
            answers.close()
        return _json(form.response([each for _, each in sorted(answers.completions.items())], answers.usage()))

    async def _begin(self, wanted: ChatRequest | CompletionRequest, mask: Callable[[], Mask] | None) -> Answers:
        """Begins the answers to a request. RequestError where they are too many."""
        try:
            prompts = await run_in_threadpool(self._prompts, wanted)
            begun = [(each, protocol.generation_config(wanted, self._max_tokens(wanted, *each))) for each in prompts]
            rows, held = len(prompts) * wanted.n, sum(each.rows for each in self._metrics.open)
            most = self._settings.max_waiting
            require_field(rows <= most, "n", f"n = {rows} answers: at most {most} may wait or be written")
            busy = f"{held} answers wait or are written, and {rows} more are requested: at most {most} may"
            code = "rate_limit_exceeded"
            require_field(held + rows <= most, None, f"{busy}; try again later", status=429, code=code)
            answers = Answers(self._metrics, begun, wanted.n, self._settings.timeout)
            await answers.begin(self._engine, mask, self._threads)
        except UnknownDocument:
            if wanted.document is not None:
                raise
            return await self._begin(wanted, mask)  # what the chat began with was deleted meanwhile
        return answers

    async def _events(self, answers: Answers, form: protocol.Chat, include_usage: bool) -> AsyncIterator[bytes]:
        for first in form.begin(answers.rows):
            yield _event(first)
        try:
            async for index, piece in answers.pieces():
                yield _event(form.event(index, piece))
            if include_usage:
                yield _event(form.usage(answers.usage()))
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield _event(protocol.of_error(error).body())

    def _max_tokens(self, wanted: ChatRequest | CompletionRequest, document: str | None, new: list[int]) -> int:
        """Most tokens of an answer: as requested, or a default within the model's positions."""
        most, given = self._settings.max_tokens, wanted.max_tokens or wanted.max_completion_tokens
        for name, tokens in (("min_tokens", wanted.min_tokens), ("max_tokens", given or 0)):
            require_field(tokens <= most, name, f"{name} = {tokens}: must be at most {most}")
        if given is not None:
            return given
        held = 0 if document is None else len(self._engine.document(document).tokens)
        left = self._lm.config.max_context - held - len(new)
        return max(1, wanted.min_tokens, min(wanted.default_tokens or self._settings.default_tokens, most, left))

    def close(self) -> None:
        """Ends all answers that are being written; their clients get an error."""
        for answers in self._metrics.open:
            answers.cancel()


class _Events(StreamingResponse):
    """Server-sent events, whose rows are free when they end, also because the client has gone or reads no more."""

    def __init__(self, events: AsyncIterator[bytes], answers: Answers, seconds: float) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answers, self._seconds = answers, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._seconds):
                await send(message)

        with contextlib.closing(self._answers), contextlib.suppress(ClientDisconnect, TimeoutError):
            await super().__call__(scope, receive, send_in_time)


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _json(data: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(data), status, headers, media_type="application/json")


def _error(problem: RequestError) -> Response:
    later = {"Retry-After": "1"}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: later, 503: later}.get(problem.status)
    return _json(problem.body(), problem.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = RequestError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    return _json(problem.body(), error.status_code, error.headers)


def serve(engine: Engine, settings: Settings, listening: socket.socket, ready: Callable[[], None]) -> tuple[bool, bool]:
    """Serves an engine at a bound socket until a signal; `ready` is called first.

    Returns whether the engine, and documents being stored, ended within `settings.grace`; and whether Ctrl-C ended it.
    """
    server = Server(engine, settings)
    closing = threading.Thread(target=engine.close, name="tca-jax-close", daemon=True)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        ready()
        yield
        closing.start()
        await asyncio.to_thread(closing.join, settings.grace)

    server.app.router.lifespan_context = lifespan
    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "on", "ws": "none"}
    options["timeout_graceful_shutdown"] = math.ceil(settings.grace) + _CANCELLING_SECONDS
    web, interrupted = uvicorn.Server(uvicorn.Config(server.app, **options)), False
    begin_exit = web.handle_exit

    def handle_exit(sig: int, frame: Any) -> None:
        nonlocal interrupted
        interrupted = interrupted or sig == signal.SIGINT
        asyncio.get_running_loop().call_later(settings.grace, server.close)  # answers may end until then
        begin_exit(sig, frame)

    web.handle_exit = handle_exit  # type: ignore[method-assign]
    web.run(sockets=[listening])
    return closing.ident is not None and not closing.is_alive(), interrupted
