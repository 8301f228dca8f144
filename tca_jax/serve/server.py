"""The HTTP server: the OpenAI protocol over an engine, with documents and metrics beside it."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tca_jax.errors import Unsupported, UserError
from tca_jax.serve import protocol
from tca_jax.serve.access import (
    Keys,
    Settings,
    http_error,
    json_response,
    read_body,
    refusal,
    told,
    unknown_error,
)
from tca_jax.serve.constraints import Grammars, Mask
from tca_jax.serve.conversations import Conversations, EncodedPrompt
from tca_jax.serve.engine import Engine
from tca_jax.serve.loop import EngineEnded
from tca_jax.serve.metrics import Metrics
from tca_jax.serve.protocol import Answering, RequestError
from tca_jax.serve.responses import Chat, Json, Text, document_json, usage_of
from tca_jax.serve.rows import Answers, Rows
from tca_jax.serve.streams import Completion

_T = TypeVar("_T")
_THREADS = 64  # that wait for the engine
_log = logging.getLogger(__name__)


class Server:
    """The application: `app` is what a web server runs.

    Args:
        engine: Its model needs a tokenizer.
        settings: What is allowed.

    Raises:
        ValueError: the model has no tokenizer.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        if engine.lm.tokenizer is None:
            raise UserError(f"{engine.lm.name} was loaded without a tokenizer: a server needs one")
        self._engine, self._settings, self._lm = engine, settings, engine.lm
        self._conversations = Conversations(engine)
        self._metrics = Metrics(engine)
        self._rows = Rows(engine, self._metrics, settings.max_rows)
        self._keys = Keys(settings.api_keys)
        self._created = int(time.time())
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tca-jax-request")
        self._compiling = asyncio.Lock()  # one schema at a time, which leaves the other threads to requests without one
        routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics_text),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{model:path}", self._model),
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._complete),
            ("POST", "/v1/documents", self._upload),
            ("GET", "/v1/documents", self._documents),
            ("GET", "/v1/documents/{document}", self._document),
            ("DELETE", "/v1/documents/{document}", self._delete),
        ]
        self.app = Starlette(
            routes=[Route(path, self._checked(path, answer), methods=[method]) for method, path, answer in routes],
            exception_handlers={HTTPException: http_error, Exception: unknown_error},
        )

    # What all requests have in common

    def _checked(
        self, path: str, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that asks for the key, answers errors in the protocol's form, and is counted."""

        async def endpoint(request: Request) -> Response:
            status = 500
            try:
                if path != "/health":
                    self._keys.require(request)
                response = await answer(request)
                status = response.status_code
                return response
            except ClientDisconnect:
                status = 499  # as nginx counts them
                return Response(status_code=status)
            except UserError as error:
                response = refusal(protocol.of_user_error(error))
                status = response.status_code
                return response
            finally:
                self._metrics.request(path, status)

        return endpoint

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._settings)

    async def _in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """Runs what may wait for the engine, or for a tokenizer, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(function, *args))

    # Models, metrics

    async def _health(self, request: Request) -> Response:
        if (failure := self._engine.failure) is not None:
            return json_response({"status": "failed", "error": str(failure)}, 503)
        return json_response({"status": "ok"})

    async def _metrics_text(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_json()]})

    async def _model(self, request: Request) -> Response:
        self._require_model(request.path_params["model"])
        return json_response(self._model_json())

    def _model_json(self) -> Json:
        return {
            "id": self._settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "tca-jax",
            "max_model_len": self._lm.config.max_context,
        }

    def _require_model(self, name: str | None) -> None:
        if name not in (None, self._settings.model):
            raise RequestError(
                f"model = {json.dumps(name)}: must be {self._settings.model}",
                param="model",
                status=404,
                code="model_not_found",
            )

    # Documents

    async def _upload(self, request: Request) -> Response:
        wanted = _document_request(request.headers.get("content-type", ""), await self._body(request))
        document = await self._in_thread(self._conversations.upload, wanted)
        return json_response(document_json(self._engine.document(document)), 201)

    async def _documents(self, request: Request) -> Response:
        found = await self._in_thread(self._engine.documents)
        return json_response({"object": "list", "data": [document_json(each) for each in found]})

    async def _document(self, request: Request) -> Response:
        return json_response(document_json(self._known(request)))

    async def _delete(self, request: Request) -> Response:
        document = self._known(request).id
        try:
            await self._in_thread(self._engine.forget, document)
        except EngineEnded:
            raise
        except UserError as error:
            raise RequestError(str(error), status=409, code="document_in_use") from None
        return json_response({"id": document, "object": "document.deleted", "deleted": True})

    def _known(self, request: Request) -> Any:
        try:
            return self._engine.document(request.path_params["document"])
        except UserError as error:
            raise RequestError(str(error), param="document", status=404, code="document_not_found") from None

    # Answers

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        wanted = protocol.chat_request(protocol.parse_json(body), self._settings.default_tokens)
        self._require_model(wanted.answering.model)
        mask = None
        if wanted.schema is not None:
            async with self._compiling:
                mask = await self._in_thread(self._mask, wanted.schema)
        asked = await self._in_thread(self._conversations.chat, wanted.messages, wanted.answering.document)
        form = Chat(self._settings.model, self._lm.tokenizer)
        return await self._answer(request, wanted.answering, [asked], form, mask)

    def _mask(self, schema: Json) -> Callable[[], Mask]:
        """Creates masks of answers that are JSON of a schema."""
        try:
            return self._grammars.json(schema, protocol.SCHEMA)
        except Unsupported as error:
            raise RequestError(f"response_format: {error}", param="response_format", code="unsupported") from None

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._lm)  # takes about a second

    async def _complete(self, request: Request) -> Response:
        wanted = protocol.completion_request(protocol.parse_json(await self._body(request)))
        answering, texts = wanted.answering, Text(self._settings.model, self._lm.tokenizer)
        self._require_model(answering.model)

        def encode() -> list[EncodedPrompt]:
            return [self._conversations.complete(prompt, answering.document) for prompt in wanted.prompts]

        asked = await self._in_thread(encode)
        return await self._answer(request, answering, asked, texts)

    async def _answer(
        self,
        request: Request,
        wanted: Answering,
        asked: Sequence[EncodedPrompt],
        form: Chat,
        mask: Callable[[], Mask] | None = None,
    ) -> Response:
        answers = await self._ask(request, wanted, asked, mask)
        if wanted.stream:
            return _Events(self._events(answers, form, wanted.include_usage, asked), answers)
        completions = await self._ended(request, answers)
        return json_response(form.whole(completions, _usage(asked, completions)))

    async def _ask(
        self,
        request: Request,
        wanted: Answering,
        asked: Sequence[EncodedPrompt],
        mask: Callable[[], Mask] | None = None,
    ) -> Answers:
        """Asks the engine for all answers of a request."""
        lengths = [self._max_tokens(wanted, each) for each in asked]
        options = {**wanted.options, "logprobs": wanted.logprobs or wanted.logprobs is not None}
        return await self._rows.ask(asked, lengths, wanted.n, options, mask, self._in_thread)

    def _max_tokens(self, wanted: Answering, asked: EncodedPrompt) -> int:
        """Most tokens of an answer: what is asked for, or as many as the model has positions for."""
        most, given = self._settings.max_tokens, wanted.max_tokens
        if given is not None:
            if given > most:
                raise RequestError(f"max_tokens = {given}: must be at most {most}", param="max_tokens")
            return given
        left = self._lm.config.max_context - asked.document_tokens - len(asked.tokens)
        least = wanted.options["min_new_tokens"]
        return max(1, least, min(wanted.default_tokens, most, left))

    async def _ended(self, request: Request, answers: Answers) -> list[Completion]:
        """All answers of a request, whose rows are free when this returns, also because the client has gone."""
        ended = asyncio.ensure_future(answers.completions(self._settings.answer_seconds))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise ClientDisconnect
            return ended.result()
        except ClientDisconnect:
            raise
        except Exception as error:
            raise told(error) from None
        finally:
            gone.cancel()
            ended.cancel()
            answers.close()

    async def _events(
        self, answers: Answers, form: Chat, include_usage: bool, asked: Sequence[EncodedPrompt]
    ) -> AsyncIterator[bytes]:
        """The server-sent events of an answer."""
        completions = []
        for index in range(len(answers.streams)):
            if (first := form.begin(index)) is not None:
                yield _event(first)
        try:
            async for index, said in answers.pieces(self._settings.answer_seconds):
                if isinstance(said, Completion):
                    completions.append(said)
                    yield _event(form.end(index, said))
                else:
                    yield _event(form.piece(index, said))
        except Exception as error:
            yield _event(told(error).body())
            return
        if include_usage:
            yield _event(form.usage(_usage(asked, completions)))
        yield b"data: [DONE]\n\n"

    def cancel_answers(self) -> None:
        """Ends all answers that are being written."""
        self._rows.cancel_all()

    def close(self) -> None:
        """Frees the threads that wait for the engine."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Events(StreamingResponse):
    """Server-sent events, whose rows are free when they end, also because the client has gone."""

    def __init__(self, events: AsyncIterator[bytes], answers: Answers) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.close()


async def _disconnected(request: Request) -> None:
    """Waits until a client, all of whose body has been read, closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _usage(asked: Sequence[EncodedPrompt], completions: Sequence[Completion]) -> Json:
    prompts = [(len(each.tokens), each.document_tokens) for each in asked]
    return usage_of(prompts, sum(len(each.tokens) for each in completions))


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _document_request(content_type: str, body: bytes) -> protocol.DocumentRequest:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json":
        return protocol.document_request(protocol.parse_json(body))
    if kind == "text/plain":
        return protocol.DocumentRequest(_utf8(body))
    raise RequestError(f"Content-Type = {json.dumps(kind)}: must be text/plain, or application/json", status=415)


def _utf8(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 text: {error}") from None
