"""Answers of a request: asked for together, bounded in number, given back when the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from tca_jax.serve.constraints import Mask
from tca_jax.serve.conversations import EncodedPrompt
from tca_jax.serve.engine import Engine
from tca_jax.serve.metrics import Metrics
from tca_jax.serve.protocol import RequestError
from tca_jax.serve.streams import Completion, Stream


class Rows:
    """Asks an engine, and counts answers: at most `most` wait or are written. Only the event loop calls it."""

    def __init__(self, engine: Engine, metrics: Metrics, most: int) -> None:
        self._engine, self.metrics, self._most = engine, metrics, most
        self._held = 0
        self._open: set[Answers] = set()

    async def ask(
        self,
        asked: Sequence[EncodedPrompt],
        lengths: Sequence[int],
        samples: int,
        options: Mapping[str, Any],
        mask: Callable[[], Mask] | None,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> Answers:
        """Asks for all answers of a request; those to one prompt stand side by side.

        Args:
            asked: Prompts.
            lengths: Most tokens of the answers to each.
            samples: Answers to each.
            options: Others of `Engine.ask`.
            mask: Creates the mask of an answer; None for none.
            in_thread: Runs a function that may wait for the engine.

        Raises:
            RequestError: too many answers wait.
            ValueError: the engine does not allow it.
        """
        rows = len(asked) * samples
        self._take(rows)
        streams: list[Stream] = []

        def ask() -> None:
            for each, most in zip(asked, lengths, strict=True):
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
        """Ends all answers, whose clients are told that the server ends."""
        for answers in self._open:
            for stream in answers.streams:
                stream.cancel()

    def closed(self, answers: Answers) -> None:
        """A request has ended."""
        self._open.discard(answers)
        self._held -= len(answers.streams)

    def _take(self, rows: int) -> None:
        if rows > self._most:
            raise RequestError(f"n = {rows} answers: at most {self._most} may wait or be written", param="n")
        if self._held + rows > self._most:
            raise RequestError(
                f"{self._held} answers wait or are written, and {rows} more are requested: at most {self._most} may; "
                "try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        self._held += rows


class Answers:
    """The answers of one request. `close` must be called; what has not ended is then cancelled."""

    def __init__(self, rows: Rows, streams: Sequence[Stream]) -> None:
        self._rows, self.streams = rows, streams
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
