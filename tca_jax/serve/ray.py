"""Replicas of a server under Ray Serve: `serve run tca_jax.serve.ray:app model=MODEL disk=FOLDER replicas=2`.

A front takes requests and finds the document that each is about. Ray routes the request by it to a replica, which has
an engine of its own. Replicas store documents in one folder: if one dies, the others find its documents there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from tca_jax.cli.errors import UsageError, usage_message
from tca_jax.cli.options import ModelArgument, ModelOptions, launched_in_order, with_options
from tca_jax.cli.serve import ServingOptions
from tca_jax.engine.mesh import parse_mesh_shape
from tca_jax.errors import UserError
from tca_jax.serve.access import Keys, Settings, read_body, refusal
from tca_jax.serve.protocol import RequestError, parse_json
from tca_jax.serve.responses import Json
from tca_jax.serve.server import Server

_DOCUMENTS, _CHAT = "/v1/documents", "/v1/chat/completions"
_MAX_REQUESTS = 10_000  # of a replica, for Ray: the server has bounds of its own, and its errors name them
_TRIES = 3  # replicas that are asked in turn, if one dies before it answers
_HEALTH_SECONDS = 2  # between two health checks of a replica
_STATES = ("device", "moving", "waiting", "host", "disk", "failed")  # the first that a replica reports is listed
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Options(NamedTuple):
    """The arguments of `app`."""

    model: str
    replicas: int
    gpus: int
    serving: ServingOptions
    running: ModelOptions


@with_options
def _options(
    model: ModelArgument,
    replicas: Annotated[int, typer.Option(help="Engines.", min=1)] = 1,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of an engine; 0 on a CPU.", min=0, show_default="devices of --mesh, or 1")
    ] = None,
    serving: ServingOptions = ServingOptions(),  # noqa: B008 (frozen)
    running: ModelOptions = ModelOptions(),  # noqa: B008 (frozen)
) -> Options:
    serving.check()
    if replicas > 1 and serving.disk is None:
        raise UserError(f"replicas = {replicas}: needs disk, the folder in which replicas find each other's documents")
    devices = math.prod(parse_mesh_shape(running.mesh, "mesh")) if running.mesh else 1
    return Options(model, replicas, devices if gpus is None else gpus, serving, running)


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application that Ray Serve runs.

    Args:
        args: Options of `tca-jax serve`, with "_" for "-", other than `host` and `port`, and
            `model`: as the first argument of `tca_jax.load`;
            `replicas`: engines (1);
            `gpus`: GPUs of each (the devices of `mesh`, or 1; 0 on a CPU).

    Returns:
        A front and its replicas.

    Raises:
        ValueError: an option is not known or not allowed; the message names it.
    """
    options = _parsed(args)
    settings = options.serving.settings(options.model, options.running)
    engines = serve.deployment(
        Replica,
        name="Engine",
        num_replicas=options.replicas,
        ray_actor_options={"num_gpus": options.gpus},
        max_ongoing_requests=_MAX_REQUESTS,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=2 * settings.grace_seconds + 1,  # for answers, and documents that are to be stored
        request_router_config=RequestRouterConfig(request_router_class=DocumentRouter),
    )
    front = serve.deployment(
        Front,
        name="Front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_REQUESTS,
        max_surge_percent=100,  # the next one takes requests before this one ends
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=settings.grace_seconds + 1,
    )
    return front.bind(engines.bind(options, settings), settings)


def _parsed(args: Mapping[str, Any]) -> Options:
    """Options by their names, checked as on a command line."""
    if args.get("model") is None:
        raise UserError("model is missing: pass model=, an alias, a Hugging Face Hub id or a local folder")
    given = {name: value for name, value in args.items() if value is not None}
    for name in {"model", "profile", "disk"} & given.keys():  # Ray's processes run in other folders
        if name == "disk" or Path(given[name]).exists():
            given[name] = Path(given[name]).absolute()
    model = str(given.pop("model"))
    line: list[str] = []
    for name, value in given.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            line += [f"--{name.replace('_', '-')}", str(each)]
    command = typer.Typer(add_completion=False)
    command.command()(_options)
    try:
        return typer.main.get_command(command).main([*line, "--", model], standalone_mode=False)
    except UsageError as error:
        option = getattr(getattr(error, "param", None), "name", None)
        named = f"{option} = {given[option]!r}: " if option in given else ""
        raise UserError(named + usage_message(error)) from None


class DocumentRouter(RequestRouter):
    """Sends all requests about a document to one replica, and requests about none to the shorter of two queues.

    Each document ranks the replicas by a hash of its id and theirs (rendezvous hashing): if a replica ends or starts,
    only its documents move.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`: of the candidates, the one with the shortest queue is taken."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        document = pending_request.metadata.session_id
        if not document:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

        def rank(replica: RunningReplica) -> bytes:
            return hashlib.sha256(f"{document} {replica.replica_id.unique_id}".encode()).digest()

        return [[max(candidate_replicas, key=rank)]]


class Sent(NamedTuple):
    """A request, as it goes from the front to a replica."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Head(NamedTuple):
    """Status and headers of a response."""

    status: int
    headers: dict[str, str]


class Whole(NamedTuple):
    """A response, and the replica that gave it."""

    head: Head
    body: bytes
    replica: str


class Replica:
    """One engine with its server, in a process of its own."""

    _server: Server | None = None  # as long as `__init__` has not set it: Ray calls `__del__` also if that failed

    def __init__(self, options: Options, settings: Settings) -> None:
        launched_in_order(options.running.mesh)
        self._engine = options.serving.engine(options.model, options.running)
        self._server, self._grace = Server(self._engine, settings), settings.grace_seconds
        self._id = serve.get_replica_context().replica_id.unique_id

    async def document_of(self, sent: Sent) -> str | None:
        """See `Server.document_of`."""
        assert self._server is not None
        content_type = dict(sent.headers).get(b"content-type", b"").decode("latin-1")
        return await asyncio.to_thread(self._server.document_of, sent.path, content_type, sent.body)

    async def answer(self, sent: Sent) -> AsyncIterator[Head | bytes]:
        """Answers a request: a `Head`, and then the pieces of its body. It is cancelled with its caller."""
        assert self._server is not None
        application = self._server.app
        messages: asyncio.Queue[Any] = asyncio.Queue()
        requests = [{"type": "http.request", "body": sent.body}]
        scope = {"type": "http", "method": sent.method, "path": sent.path, "headers": sent.headers}

        async def receive() -> Any:
            return requests.pop() if requests else await asyncio.Future()  # the caller cancels

        async def run() -> None:
            try:
                await application({**scope, "query_string": sent.query}, receive, messages.put)
            except Exception:
                _log.exception("%s %s failed", sent.method, sent.path)
            finally:
                messages.put_nowait(None)

        running = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
                    yield Head(message["status"], headers)
                elif body := message.get("body"):
                    yield body
        finally:
            running.cancel()

    async def whole(self, sent: Sent) -> Whole:
        """The whole response to a request."""
        head, *pieces = [each async for each in self.answer(sent)]
        assert isinstance(head, Head)
        return Whole(head, b"".join(piece for piece in pieces if isinstance(piece, bytes)), self._id)

    def check_health(self) -> None:
        """Raises RuntimeError if the engine has failed; Ray then starts another replica."""
        if (failure := self._engine.failure) is not None:
            raise RuntimeError(str(failure))

    def __del__(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        deadline = time.monotonic() + self._grace
        for document in self._engine.documents():  # what is not stored is lost
            try:
                self._engine.wait(document.id, max(0.0, deadline - time.monotonic()), stored=True)
            except Exception as error:  # the others are stored nevertheless
                _log.warning("document %s is not stored: %s", document.id, error)
        self._engine.close()


class Front:
    """Takes requests, finds the document that each is about, and passes it to the document's replica.

    Args:
        engines: The replicas.
        settings: Of their servers.
    """

    def __init__(self, engines: DeploymentHandle, settings: Settings) -> None:
        self._engines, self._settings, self._keys = engines, settings, Keys(settings.api_keys)

    async def __call__(self, request: Request) -> Response:
        """Answers a request."""
        try:
            path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
            if path != "/health":
                self._keys.require(request)
            body = await read_body(request, self._settings)
            query, headers = request.scope["query_string"], list(request.scope["headers"])
            sent = Sent(request.method, path, query, headers, body)
            if sent.method == "GET" and sent.path == "/metrics":
                return await self._metrics(sent)
            if sent.method == "GET" and sent.path == _DOCUMENTS:
                return await self._documents(sent)
            if sent.method == "DELETE":
                return await self._delete(sent)
            return await self._answer(sent, await self._document_of(sent))
        except ClientDisconnect:
            return Response(status_code=499)
        except RequestError as error:
            return refusal(error)
        except (RayActorError, DeploymentUnavailableError) as error:
            _log.warning("no replica answers: %s", error)
            return refusal(_no_replica())

    async def _document_of(self, sent: Sent) -> str:
        """The document that a request is about; "" for none."""
        if sent.path.startswith(f"{_DOCUMENTS}/"):
            return sent.path.removeprefix(f"{_DOCUMENTS}/")
        if sent.method != "POST":
            return ""
        if sent.path != _DOCUMENTS:
            fields = parse_json(sent.body)
            if isinstance(fields, dict) and isinstance(named := fields.get("document"), str):
                return named
            if sent.path != _CHAT or not 0 < self._settings.recognize_tokens <= len(sent.body):
                return ""
        return await _retried(lambda: self._engines.document_of.remote(sent)) or ""

    async def _answer(self, sent: Sent, document: str) -> Response:
        """The response of a document's replica."""
        engines = self._engines.options(stream=True, session_id=document)

        async def begin() -> tuple[Any, Head]:
            answer = engines.answer.remote(sent)
            try:
                return answer, await anext(answer)
            except BaseException:
                answer.cancel()
                raise

        answer, head = await _retried(begin)
        return StreamingResponse(_pieces(answer, head), head.status, head.headers)

    async def _everywhere(self, sent: Sent) -> list[Whole]:
        """The responses of all replicas; RequestError if there are none."""
        found = await self._engines.broadcast("whole", sent).results_async(return_exceptions=True)
        if not (responses := [each for each in found if isinstance(each, Whole)]):
            raise _no_replica()
        return responses

    async def _documents(self, sent: Sent) -> Response:
        found: dict[str, Json] = {}
        for each in await self._everywhere(sent):
            for document in json.loads(each.body)["data"]:
                other = found.setdefault(document["id"], document)
                if _STATES.index(document["state"]) < _STATES.index(other["state"]):
                    found[document["id"]] = document
        listed = sorted(found.values(), key=lambda document: document["created_at"])
        return Response(json.dumps({"object": "list", "data": listed}).encode(), media_type="application/json")

    async def _delete(self, sent: Sent) -> Response:
        """Drops a document at its replica, and then at all that know of it."""
        response = await self._answer(sent, await self._document_of(sent))
        if response.status_code == 200:
            await self._everywhere(sent)
        return response

    async def _metrics(self, sent: Sent) -> Response:
        registry = CollectorRegistry()
        registry.register(_OfReplicas(await self._everywhere(sent)))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")


class _OfReplicas:
    """The metrics of all replicas, with the label `replica`."""

    def __init__(self, found: Sequence[Whole]) -> None:
        self._families: dict[str, Metric] = {}
        for each in found:
            for family in text_string_to_metric_families(each.body.decode()):
                metric = Metric(family.name, family.documentation, family.type)
                self._families.setdefault(family.name, metric).samples += [
                    Sample(sample.name, {**sample.labels, "replica": each.replica}, sample.value)
                    for sample in family.samples
                ]

    def collect(self) -> list[Metric]:
        return list(self._families.values())


async def _retried(ask: Callable[[], Awaitable[_T]]) -> _T:
    """What a replica returns, or the next one if it dies first."""
    for _ in range(_TRIES - 1):
        try:
            return await ask()
        except RayActorError:
            pass
    return await ask()


def _no_replica() -> RequestError:
    return RequestError("no replica answers; try again later", status=503)


async def _pieces(answer: Any, head: Head) -> AsyncIterator[bytes]:
    """The body of a response. Its replica stops if nobody reads it any more."""
    try:
        async for piece in answer:
            yield piece
    except RayActorError as error:
        if not head.headers.get("content-type", "").startswith("text/event-stream"):
            raise
        _log.warning("an answer was cut off: %s", error)
        told = RequestError("the answer was cut off: its replica has ended; ask again", status=503).body()
        yield b"data: " + json.dumps(told).encode() + b"\n\n"
    finally:
        answer.cancel()
