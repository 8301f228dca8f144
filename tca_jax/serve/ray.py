"""Replicas of a server under Ray Serve: `serve run tca_jax.serve.ray:app model=MODEL disk=FOLDER replicas=2`.

A front takes requests and asks for the document that each is about. Ray routes them by it to a replica, which has an
engine of its own. Documents are stored in a folder that replicas share: where one dies, others find them there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

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
from tca_jax.serve.protocol import RequestError, parse_json
from tca_jax.serve.responses import Json
from tca_jax.serve.server import Keys, Server, Settings, read_body, refusal

_DOCUMENTS, _CHAT = "/v1/documents", "/v1/chat/completions"
_ASKED_AT_ONCE = 10_000  # requests that Ray hands on: servers have bounds of their own, and tell of them
_TRIES = 3  # replicas that are asked in turn, where one dies before it answers
_HEALTH_SECONDS = 2  # between looks at a replica: so long one that died is missing before another is started
_STATES = ("device", "moving", "waiting", "host", "disk", "failed")  # of one document, the first tells most
_log = logging.getLogger(__name__)


class Options(NamedTuple):
    """What `app` is told."""

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
        raise UserError(f"replicas = {replicas} need disk: the folder in which they find each other's documents")
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
        max_ongoing_requests=_ASKED_AT_ONCE,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=2 * settings.grace_seconds + 1,  # answers, and then documents that are stored
        request_router_config=RequestRouterConfig(request_router_class=DocumentRouter),
    )
    front = serve.deployment(
        Front,
        name="Front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_ASKED_AT_ONCE,
        max_surge_percent=100,  # the next one takes requests before this one ends
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=settings.grace_seconds + 1,
    )
    return front.bind(engines.bind(options, settings), settings)


def _parsed(args: Mapping[str, Any]) -> Options:
    """Options by their names, checked as on a command line."""
    given = {name: value for name, value in args.items() if name != "model" and value is not None}
    if "model" not in args:
        raise UserError("model is missing: pass model=, an alias, a Hugging Face Hub id or a local folder")
    line: list[str] = []
    for name, value in given.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            line += [f"--{name.replace('_', '-')}", str(each)]
    command = typer.Typer(add_completion=False)
    command.command()(_options)
    try:
        parsed = typer.main.get_command(command).main([*line, "--", str(args["model"])], standalone_mode=False)
    except UsageError as error:
        raise UserError(usage_message(error)) from None
    return parsed


class DocumentRouter(RequestRouter):
    """Sends requests about a document to one replica as long as that lives, and others to one that has little to do.

    Each document ranks the replicas by a hash of its id and theirs (rendezvous hashing): where one goes or comes, only
    the documents of that one move.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`: candidates, of which the one with the shortest queue is taken."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        document = pending_request.metadata.session_id
        if not document:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

        def rank(replica: RunningReplica) -> bytes:
            return hashlib.sha256(f"{document} {replica.replica_id.unique_id}".encode()).digest()

        return [[max(candidate_replicas, key=rank)]]


@dataclasses.dataclass(frozen=True)
class Sent:
    """A request, as it goes from the front to a replica."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def content_type(self) -> str:
        """The header of this name."""
        return dict(self.headers).get(b"content-type", b"").decode("latin-1")


class Head(NamedTuple):
    """What comes before the body of a response."""

    status: int
    headers: dict[str, str]


class Whole(NamedTuple):
    """A response, and the replica that it is from."""

    head: Head
    body: bytes
    replica: str


class Replica:
    """One engine with its server, in a process of its own."""

    _server: Server | None = None  # Ray ends also what has not begun

    def __init__(self, options: Options, settings: Settings) -> None:
        launched_in_order(options.running.mesh)
        self._engine = options.serving.engine(options.model, options.running)
        self._server, self._grace = Server(self._engine, settings), settings.grace_seconds
        self._id = serve.get_replica_context().replica_id.unique_id

    async def document_of(self, sent: Sent) -> str | None:
        """See `Server.document_of`."""
        assert self._server is not None
        return await asyncio.to_thread(self._server.document_of, sent.path, sent.content_type, sent.body)

    async def answer(self, sent: Sent) -> AsyncIterator[Head | bytes]:
        """Answers a request: a `Head`, and then the pieces of its body. Ends with its caller."""
        assert self._server is not None
        application = self._server.app
        messages: asyncio.Queue[Any] = asyncio.Queue()
        requests = [{"type": "http.request", "body": sent.body}]
        scope = {
            "type": "http",
            "method": sent.method,
            "path": sent.path,
            "query_string": sent.query,
            "headers": sent.headers,
        }

        async def receive() -> Any:
            return requests.pop() if requests else await asyncio.Future()  # the caller cancels

        async def run() -> None:
            try:
                await application(scope, receive, messages.put)
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
        """Answers a request at once."""
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
        for document in self._engine.documents():  # they are nowhere else until they are stored
            try:
                self._engine.wait(document.id, max(0.0, deadline - time.monotonic()), stored=True)
            except Exception as error:  # whatever it is, the others are to be stored
                _log.warning("document %s is not stored: %s", document.id, error)
        self._engine.close()


class Front:
    """Takes requests, finds out which document each is about, and hands it to the replica that has it.

    Args:
        engines: The replicas.
        settings: Theirs.
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
            match sent.method, sent.path:
                case "GET", "/metrics":
                    return await self._metrics(sent)
                case "GET", "/v1/documents":
                    return await self._documents(sent)
                case "DELETE", _:
                    return await self._delete(sent)
            return await self._answer(sent, await self._document_of(sent))
        except ClientDisconnect:
            return Response(status_code=499)
        except RequestError as error:
            return refusal(error)
        except (RayActorError, DeploymentUnavailableError) as error:
            _log.warning("no replica answers: %s", error)
            return refusal(RequestError("no replica answers; try again later", status=503))

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
        for last in (False, True):
            try:
                return await self._engines.document_of.remote(sent) or ""
            except RayActorError:
                if last:
                    raise
        raise AssertionError

    async def _answer(self, sent: Sent, document: str) -> Response:
        """The response of the replica that has a document, or of the next one where it dies before it answers."""
        engines = self._engines.options(stream=True, session_id=document)
        for left in reversed(range(_TRIES)):
            answer = engines.answer.remote(sent)
            try:
                head = await anext(answer)
            except RayActorError:
                if not left:
                    raise
            except BaseException:
                answer.cancel()
                raise
            else:
                return StreamingResponse(_pieces(answer, head), head.status, head.headers)
        raise AssertionError

    async def _everywhere(self, sent: Sent) -> list[Whole]:
        """The responses of all replicas; RequestError where one refuses."""
        found = await self._engines.broadcast("whole", sent).results_async(return_exceptions=True)
        return [each for each in found if isinstance(each, Whole)]

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
        """Drops a document where it is, and then wherever it has been."""
        response = await self._answer(sent, await self._document_of(sent))
        if response.status_code == 200:
            await self._everywhere(sent)
        return response

    async def _metrics(self, sent: Sent) -> Response:
        registry = CollectorRegistry()
        registry.register(_OfReplicas(await self._everywhere(sent)))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")


class _OfReplicas:
    """The metrics of all replicas, each under its id."""

    def __init__(self, found: Sequence[Whole]) -> None:
        self._families: dict[str, Metric] = {}
        for each in found:
            for family in text_string_to_metric_families(each.body.decode()):
                joined = self._families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                joined.samples += [
                    Sample(sample.name, {**sample.labels, "replica": each.replica}, sample.value)
                    for sample in family.samples
                ]

    def collect(self) -> list[Metric]:
        return list(self._families.values())


async def _pieces(answer: Any, head: Head) -> AsyncIterator[bytes]:
    """The body of a response. Its replica stops when nobody reads it any more."""
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
