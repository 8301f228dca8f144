"""A server as a process runs it: until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import threading
import time
import types
from collections.abc import AsyncIterator, Callable

import uvicorn
from starlette.applications import Starlette

from tca_jax.serve.access import Settings
from tca_jax.serve.engine import Engine
from tca_jax.serve.server import Server

_CANCELLING_SECONDS = 3  # until connections are closed whose answers were cancelled


class _Ending(uvicorn.Server):
    """A web server that lets running answers end for some seconds, and then cancels them."""

    def __init__(self, server: Server, config: uvicorn.Config, seconds: float) -> None:
        super().__init__(config)
        self._server, self._seconds = server, seconds
        self.interrupted = False

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        self.interrupted = self.interrupted or sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cancelling = asyncio.get_running_loop().call_later(self._seconds, self._server.cancel_answers)
        try:
            await super().shutdown(sockets)
        finally:
            cancelling.cancel()


def serve(engine: Engine, settings: Settings, listening: socket.socket, ready: Callable[[], None]) -> tuple[bool, bool]:
    """Serves an engine until the process is told to end (SIGINT, SIGTERM), and closes the engine.

    Args:
        engine: The engine.
        settings: What is allowed.
        listening: A socket that is bound.
        ready: Called when requests are answered.

    Returns:
        Whether the engine, and what it was storing, ended within as many seconds as `settings` grants running answers;
        and whether Ctrl-C ended the server.
    """
    server = Server(engine, settings)
    closing = threading.Thread(target=engine.close, name="tca-jax-close", daemon=True)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        ready()
        yield
        closing.start()
        server.close()
        deadline = time.monotonic() + settings.grace_seconds
        while closing.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    server.app.router.lifespan_context = lifespan
    config = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=math.ceil(settings.grace_seconds) + _CANCELLING_SECONDS,
    )
    ending = _Ending(server, config, settings.grace_seconds)
    ending.run(sockets=[listening])
    return closing.ident is not None and not closing.is_alive(), ending.interrupted
