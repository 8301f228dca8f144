"""What a server allows a request, and how it refuses one."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import json
import logging
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tca_jax.errors import UserError
from tca_jax.serve import protocol
from tca_jax.serve.protocol import RequestError
from tca_jax.serve.responses import Json

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a server allows.

    Attributes:
        model: Name of the model in requests.
        api_keys: Keys of which a request must have one; none for no keys.
        max_rows: Most answers that wait or are written.
        max_tokens: Most tokens of an answer.
        default_tokens: Those of an answer to a chat that names no number.
        max_body: Most bytes of a request.
        body_seconds: Most seconds that it may take to arrive.
        answer_seconds: Most seconds that an answer may take, waiting included; it is cancelled then.
        grace_seconds: Most seconds that running answers have at the end, and then documents that are being stored.
    """

    model: str
    api_keys: tuple[str, ...] = ()
    max_rows: int = 256
    max_tokens: int = 4096
    default_tokens: int = 512
    max_body: int = 64 * 2**20
    body_seconds: float = 60.0
    answer_seconds: float = 600.0
    grace_seconds: float = 10.0


class Keys:
    """The keys of which a request must have one."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [_digest(key) for key in keys]

    def require(self, request: Request) -> None:
        """Raises RequestError unless a request has one of the keys, where there are any."""
        if not self._keys:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, each) for each in self._keys]  # all of them: the time tells nothing
        if kind.lower() != "bearer" or not any(known):
            raise RequestError(
                "the request has no valid API key: send one as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )


async def read_body(request: Request, settings: Settings) -> bytes:
    """The body of a request. RequestError where it is beyond the bounds of size and time."""
    most, seconds = settings.max_body, settings.body_seconds
    too_large = RequestError(f"the body has more than {most:,} bytes, the most that are allowed", status=413)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {seconds:g} seconds", status=408) from None
    return bytes(body)


def refusal(error: RequestError) -> Response:
    """The response that tells of an error, in the protocol's form."""
    return json_response(error.body(), error.status, _headers_of(error))


def told(error: Exception) -> RequestError:
    """What a client is told of what went wrong with an answer; what is no fault of its is in the log."""
    if isinstance(error, UserError):
        return protocol.of_user_error(error)
    _log.error("an answer failed", exc_info=error)
    return RequestError(f"the answer failed: {type(error).__name__}", status=500)


def json_response(data: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of JSON."""
    return Response(json.dumps(data).encode(), status, headers, media_type="application/json")


def _headers_of(problem: RequestError) -> dict[str, str] | None:
    if problem.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {"Retry-After": "1"} if problem.status in (429, 503) else None


async def http_error(request: Request, error: Exception) -> Response:
    """The response to a request that no endpoint takes."""
    assert isinstance(error, HTTPException)
    problem = RequestError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    return json_response(problem.body(), error.status_code, dict(error.headers or {}))


async def unknown_error(request: Request, error: Exception) -> Response:
    """The response after an error of the server."""
    return json_response(RequestError("the server failed; its log says why", status=500).body(), 500)


def _digest(key: str) -> bytes:
    """A key, in as many bytes as any other."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
