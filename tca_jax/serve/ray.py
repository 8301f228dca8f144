"""Replicas under Ray Serve: its model multiplexing routes by document; `serve run tca_jax.serve.ray:app model=...`."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from ray import serve
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tca_jax.cli.errors import UsageError
from tca_jax.cli.options import ModelArgument, ModelOptions, launched_in_order, with_options
from tca_jax.cli.serve import ServingOptions
from tca_jax.engine.placement import parse_mesh_shape
from tca_jax.errors import UserError, require
from tca_jax.serve.server import Server


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application that Ray Serve runs.

    Args:
        args: `model`, as for `tca_jax.load`; `replicas` (1); `gpus` of each (the devices of `mesh`, or 1; 0 on a CPU);
            other options of `tca-jax serve`, with "_" for "-", except `host` and `port`.
    """
    given = dict(args)
    require("model" in given, "model is missing: pass model=, an alias, a Hugging Face Hub id or a local folder")
    for name in {"model", "profile", "disk"} & given.keys():  # Ray's processes run in other folders
        if name == "disk" or Path(given[name]).exists():
            given[name] = Path(given[name]).absolute()
    model = str(given.pop("model"))
    line = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = typer.Typer(add_completion=False)
    command.command()(_application)
    try:  # options are checked as on a command line
        return typer.main.get_command(command).main([*line, "--", model], standalone_mode=False)
    except UsageError as error:
        raise UserError(error.format_message()) from None


@with_options
def _application(
    model: ModelArgument,
    replicas: Annotated[int, typer.Option(help="Engines.", min=1)] = 1,
    gpus: Annotated[int | None, typer.Option(help="GPUs of an engine.", min=0)] = None,
    serving: ServingOptions = ServingOptions(),  # noqa: B008 (frozen)
    running: ModelOptions = ModelOptions(),  # noqa: B008 (frozen)
) -> serve.Application:
    serving.check()
    own = f"belongs to one engine, and replicas = {replicas}; leave it out"
    require(replicas == 1 or serving.disk is None, f"disk = {str(serving.disk)!r}: {own}")
    actor = {"num_gpus": math.prod(parse_mesh_shape(running.mesh, "mesh")) if running.mesh else 1}
    if gpus is not None:
        actor["num_gpus"] = gpus
    static: dict[str, Any] = {"num_replicas": replicas, "ray_actor_options": actor}
    static["graceful_shutdown_timeout_s"] = 2 * serving.grace + 1  # for answers, then for documents to be stored
    static["max_ongoing_requests"] = 10_000  # the server has bounds of its own
    return serve.deployment(Replica, name="Engine", **static).bind(model, serving, running)


@serve.ingress()
class Replica:
    """One engine and its server, in a process of its own."""

    def __init__(self, model: str, serving: ServingOptions, running: ModelOptions) -> None:
        launched_in_order(running.mesh)
        self._engine = serving.engine(model, running)
        self._server = Server(self._engine, serving.settings(model))
        self._server.app.router.lifespan_context = self._lifespan

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        self._server.close()
        await asyncio.to_thread(self._engine.close)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def register(message: Message) -> None:
                if scope.get("method") == "POST" and scope["path"] == "/v1/documents":
                    for document in self._engine.documents():
                        await self.document(document.id)
                await send(message)

            await self._server.app(scope, receive, register)

        return answer

    @serve.multiplexed(max_num_models_per_replica=-1)
    async def document(self, id_: str) -> str:
        """Registers a document with Ray as one of this replica."""
        return id_

    def check_health(self) -> None:
        """Raises RuntimeError if the engine has failed; Ray then starts another replica."""
        require(self._engine.failure is None, str(self._engine.failure), RuntimeError)
