"""`tca-jax serve`: answers requests of the OpenAI protocol over HTTP."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from tca_jax.cli import spare_one_ctrl_c
from tca_jax.cli.files import require_writable
from tca_jax.cli.models import opened
from tca_jax.cli.options import LARGEST, ModelArgument, ModelOptions, with_options
from tca_jax.errors import require
from tca_jax.files import naming

if TYPE_CHECKING:
    from tca_jax.serve import Engine
    from tca_jax.serve.server import Settings

_GB = 10**9
_KEY = "TCA_JAX_API_KEY"


def _keys(given: list[str] | None) -> list[str]:
    """Keys as they are given, or the one of the environment, which Click would split at white space."""
    return given or [key for key in [os.environ.get(_KEY)] if key is not None]


@dataclasses.dataclass(frozen=True)
class ServingOptions:
    """Options of a server that answers over HTTP, wherever it listens."""

    api_key: Annotated[
        list[str] | None,
        Option(
            help="Key that requests must have; may be repeated. TCA_JAX_API_KEY keeps it out of lists of processes.",
            show_default="no key",
            callback=_keys,
        ),
    ] = None
    model_name: Annotated[
        str | None, Option(help="Name of the model in requests.", show_default="as it is given, without folders")
    ] = None
    max_rows: Annotated[int, Option(help="Answers that are written at once.", min=1)] = 8
    answer_tokens: Annotated[
        int, Option(help="Tokens of question and answer for which each row has memory.", min=1, max=LARGEST)
    ] = 1024
    pages: Annotated[
        int | None, Option(help="Pages of documents on the device.", min=1, show_default="what is free")
    ] = None
    host_memory: Annotated[
        float | None, Option(help="GB of host memory for documents off the device.", min=0, show_default="a quarter")
    ] = None
    disk: Annotated[
        Path | None,
        Option(help="Folder in which documents are stored, and found at the next start.", show_default="none"),
    ] = None
    disk_gb: Annotated[float | None, Option(help="Most GB in it.", min=0, show_default="no bound")] = None
    max_waiting: Annotated[int, Option(help="Answers that wait or are written.", min=1)] = 256
    max_tokens: Annotated[int, Option(help="Most tokens of an answer.", min=1, max=LARGEST)] = 4096
    max_body: Annotated[float, Option(help="Most MB of a request.", min=0.001)] = 64.0
    timeout: Annotated[float, Option(help="Most seconds of an answer, waiting included.", min=0.001)] = 600.0
    grace: Annotated[float, Option(help="Seconds that running answers have at the end.", min=0)] = 10.0

    def check(self) -> None:
        """Raises ValueError if a package is missing, or an option is not allowed that no parser checks."""
        needed = ("starlette", "uvicorn", "prometheus_client", "llguidance")
        missing = [name for name in needed if find_spec(name) is None]
        require(not missing, f"tca-jax serve needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        blank = f"--api-key '' or {_KEY}: must not be blank; give none for a server without keys"
        require(all(key.strip() for key in self.api_key or ()), blank)
        if self.disk is not None:
            require_writable(self.disk, "--disk")

    def engine(self, model: str, running: ModelOptions) -> Engine:
        """An engine for a model, whose weights are read; the caller closes it."""
        from tca_jax.serve import Engine

        with opened(model, running) as (_, load):
            lm = load()
        same = {name: getattr(self, name) for name in ("max_rows", "pages", "answer_tokens", "disk")}
        memory = None if self.host_memory is None else int(self.host_memory * _GB)
        disk = None if self.disk_gb is None else max(1, int(self.disk_gb * _GB))
        return Engine(lm, host_memory=memory, disk_bytes=disk, backend=running.backend, **same)

    def settings(self, model: str) -> Settings:
        """Settings of a server for a model."""
        from tca_jax.serve.server import Settings

        name = self.model_name or (Path(model).resolve().name if Path(model).exists() else model)
        keys = tuple(key.strip() for key in self.api_key or ())
        same = {name: getattr(self, name) for name in ("max_waiting", "max_tokens", "timeout", "grace")}
        return Settings(name, keys, max_body=int(self.max_body * 10**6), **same)


@with_options
def serve(
    model: ModelArgument,
    host: Annotated[str, Option(help="Address to listen on; others reach the server from elsewhere.")] = "127.0.0.1",
    port: Annotated[int, Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    serving: ServingOptions = ServingOptions(),
    running: ModelOptions = ModelOptions(),  # noqa: B008 (frozen)
) -> None:
    """Serve a model over HTTP: chats, completions and documents, as OpenAI's clients ask for them.

    The first Ctrl-C, or SIGTERM, lets running answers end for --grace seconds and then cancels them. The next Ctrl-C
    ends the process at once.

    Example: [bold]tca-jax serve recall-tiny --profile shipped --port 8000[/]
    """
    serving.check()
    with _bound(host, port) as listening:
        from tca_jax.serve import server

        engine, settings = serving.engine(model, running), serving.settings(model)
        where = listening.getsockname()[:2]

        def ready() -> None:
            address = f"[{where[0]}]" if ":" in where[0] else where[0]
            print(f"serving {settings.model} on http://{address}:{where[1]}/v1", flush=True)

        signal.signal(signal.SIGTERM, lambda number, frame: None)  # the server raises it again when it has ended
        with spare_one_ctrl_c():
            closed, interrupted = server.serve(engine, settings, listening, ready)
            if closed and interrupted:
                raise KeyboardInterrupt
    if not closed:
        print(f"the engine did not end within {serving.grace:g} seconds; documents may not be stored", file=sys.stderr)
        os._exit(1)


def _bound(host: str, port: int) -> socket.socket:
    """A socket at an address, before weights are read. OSError where it is taken, or there is none of this name."""
    with naming(f"--host {host} --port {port}"):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    return bound
