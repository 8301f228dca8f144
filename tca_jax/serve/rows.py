"""Answers of a request: asked for together, bounded for each client, given back when the client has gone."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from tca_jax.serve.constraints import Constraint
from tca_jax.serve.conversations import EncodedPrompt
from tca_jax.serve.engine import Engine
from tca_jax.serve.metrics import Metrics
from tca_jax.serve.protocol import RequestError
from tca_jax.serve.streams import Completion, Stream


class Rows:
    """Asks an engine, and counts what each client has. Only the event loop calls it.

    Args:
        engine: The engine.
        metrics: Told of each answer.
        most_of_client: Most answers of a client that wait or are written.
        most: Most answers of all clients that do.
    """

    def __init__(self, engine: Engine, metrics: Metrics, most_of_client: int, most: int) -> None:
        self._engine, self.metrics, self._most_of_client, self._most = engine, metrics, most_of_client, most
        self._held: collections.Counter[bytes] = collections.Counter()
        self._open: set[Answers] = set()

    async def ask(
        self,
        client: bytes,
        asked: Sequence[EncodedPrompt],
        lengths: Sequence[int],
        samples: int,
        options: Mapping[str, Any],
        constraint: Callable[[], Constraint] | None,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> Answers:
        """Asks for all answers of a request; those to one prompt stand side by side.

        Args:
            client: Whose they are.
            asked: Prompts.
            lengths: Most tokens of the answers to each.
            samples: Answers to each.
            options: Others of `Engine.ask`.
            constraint: Makes the constraint of an answer; None for none.
            in_thread: Runs a function that may wait for the engine.

        Raises:
            RequestError: the client, or all of them, have too many answers.
            ValueError: the engine does not allow it.
        """
        rows = len(asked) * samples
        self._take(client, rows)
        streams: list[Stream] = []

        def ask() -> None:
            for each, most in zip(asked, lengths, strict=True):
                for _ in range(samples):
                    given = {"max_new_tokens": most, "sample": len(streams), **options}  # as the rows of `generate`
                    given["constraint"] = None if constraint is None else constraint()
                    streams.append(self._engine.ask(each.document, each.tokens, **given))

        asking = asyncio.ensure_future(in_thread(ask))
        try:
            await asyncio.shield(asking)
        except BaseException:

            def give_back(_: Any) -> None:
                for stream in streams:
                    stream.cancel()
                self.give_back(client, rows)

            asking.add_done_callback(give_back)  # a thread that has begun goes on
            raise
        for stream in streams:
            self.metrics.begin(stream)
        answers = Answers(self, client, streams)
        self._open.add(answers)
        return answers

    def cancel_all(self) -> None:
        """Ends all answers, whose clients are told that the server ends."""
        for answers in self._open:
            for stream in answers.streams:
                stream.cancel()

    def closed(self, answers: Answers) -> None:
        """A request has ended."""
        self._open.discard(answers)
        self.give_back(answers.client, len(answers.streams))

    def _take(self, client: bytes, rows: int) -> None:
        for held, most, whose in (
            (self._held[client], self._most_of_client, "of this key"),
            (self._held.total(), self._most, "of all clients"),
        ):
            if rows > most:
                raise RequestError(f"n = {rows} answers: at most {most} {whose} may wait or be written", param="n")
            if held + rows > most:
                raise RequestError(
                    f"{held} answers {whose} wait or are written, and {rows} more are asked for: {most} may be; "
                    "try again later",
                    status=429,
                    code="rate_limit_exceeded",
                )
        self._held[client] += rows

    def give_back(self, client: bytes, rows: int) -> None:
        """So many answers of a client have ended."""
        self._held[client] -= rows
        if not self._held[client]:
            del self._held[client]


class Answers:
    """The answers of one request. `close` must be called; what has not ended is then cancelled."""

    def __init__(self, rows: Rows, client: bytes, streams: Sequence[Stream]) -> None:
        self._rows, self.client, self.streams = rows, client, streams
        self._completions: dict[Stream, Completion] = {}
        self._closed = False

    async def completions(self, seconds: float) -> list[Completion]:
        """All of them, in order.

        Raises:
            RequestError: they take longer than so many seconds, or the server ends.
            ValueError: the model computes NaN or infinity, or the document is gone.
        """
        try:
            async with asyncio.timeout(seconds):
                return list(await asyncio.gather(*map(self._completion, self.streams)))
        except TimeoutError:
            raise _too_slow(seconds) from None

    async def pieces(self, seconds: float) -> AsyncIterator[tuple[int, str | Completion]]:
        """Pieces of text of each answer while they are written, and the whole of each at its end. Raises the same."""
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
                        index, said = await queue.get()
                except TimeoutError:
                    raise _too_slow(seconds) from None
                if isinstance(said, Exception):
                    raise said
                left -= isinstance(said, Completion)
                yield index, said
        finally:
            for each in pumps:
                each.cancel()

    async def _completion(self, stream: Stream) -> Completion:
        completion = await stream.completion()
        if completion.finish_reason == "cancelled":
            raise RequestError("the server is shutting down", status=503)
        self._completions[stream] = completion
        return completion

    def close(self) -> None:
        """Cancels those that have not ended, and gives back their rows."""
        if self._closed:
            return
        self._closed = True
        for stream in self.streams:
            if not stream.ended:
                stream.cancel()
            self._rows.metrics.end(stream, self._completions.get(stream))
        self._rows.closed(self)


def _too_slow(seconds: float) -> RequestError:
    return RequestError(f"the answer took more than {seconds:g} seconds, the most that are allowed", status=504)
