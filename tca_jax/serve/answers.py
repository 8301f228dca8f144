"""Answers of a request: begun, counted, timed, and cancelled when the client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from tca_jax.engine.generation_config import GenerationConfig
from tca_jax.serve.constraints import Mask
from tca_jax.serve.documents import State
from tca_jax.serve.engine import Engine
from tca_jax.serve.protocol import Json, RequestError, require_field
from tca_jax.serve.streams import Completion, Stream

_FIRST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1)  # seconds


class Answers:
    """The answers of one request. `close` must be called: it cancels those that have not ended."""

    def __init__(self, metrics: Metrics, rows: int, samples: int) -> None:
        self._metrics, self.rows, self._samples = metrics, rows, samples
        self.streams: list[Stream] = []
        self.completions: dict[int, Completion] = {}  # of those that have ended
        metrics.open.add(self)

    async def begin(
        self,
        engine: Engine,
        prompts: Sequence[tuple[str | None, list[int], GenerationConfig]],  # the first: a document's id
        mask: Callable[[], Mask] | None,  # creates the mask of an answer
    ) -> None:
        """Has an engine begin them, as the rows of `generate`."""

        def begin() -> None:
            for i in range(self.rows):
                document, tokens, config = prompts[i // self._samples]
                self.streams.append(engine.ask(document, tokens, config, sample=i, mask=mask and mask()))

        try:
            await run_in_threadpool(begin)
        except BaseException:
            self.close()
            raise

    async def pieces(self, seconds: float) -> AsyncIterator[tuple[int, str | Completion]]:
        """Pieces of text of each answer while they are written, and its completion at its end.

        RequestError if they take longer than `seconds`, or the server ends; ClientDisconnect if they are closed.
        """
        loop, changed, sent = asyncio.get_running_loop(), asyncio.Queue[int](), [0] * self.rows

        def notify(index: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.put_nowait, index)

        most = f"the answer took more than {seconds:g} seconds, the most that are allowed"
        deadline = loop.time() + seconds
        with contextlib.ExitStack() as listening:
            for index, stream in enumerate(self.streams):
                listening.enter_context(stream.listening(functools.partial(notify, index)))
                changed.put_nowait(index)
            while len(self.completions) < self.rows:
                try:
                    async with asyncio.timeout_at(deadline):
                        now = {await changed.get()}
                except TimeoutError:
                    raise RequestError(most, status=504) from None
                while not changed.empty():
                    now.add(changed.get_nowait())
                for index in sorted(now - self.completions.keys()):
                    piece, end = self.streams[index].piece(sent[index])
                    sent[index] += len(piece)
                    if piece:
                        yield index, piece
                    if end is not None:
                        if self not in self._metrics.open:
                            raise ClientDisconnect
                        ended = end.finish_reason != "cancelled"
                        require_field(ended, None, "the server is shutting down", status=503)
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
        """Ends those that have not ended; the client gets an error."""
        for stream in self.streams:
            stream.cancel()

    def close(self) -> None:
        """Cancels those that have not ended, and counts all."""
        if self in self._metrics.open:
            self._metrics.open.remove(self)
            self.cancel()
            for index in range(len(self.streams)):
                self._metrics.count(self.completions.get(index))


class Metrics:
    """Prometheus metrics of one server; `open` are its answers that wait or are written."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.open, self.registry = engine, set[Answers](), CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry, "namespace": "tca_jax"}
        self.requests = Counter("requests", "Requests by path and HTTP status.", ["path", "status"], **made)
        self._answers = Counter("answers", "Answers by how they ended.", ["finish_reason"], **made)
        self._tokens = Counter("tokens", "Tokens of prompts, of their documents, of answers.", ["kind"], **made)
        first, each = "From a request to its first token.", "Of each token after the first."
        self._first = Histogram("time_to_first_token_seconds", first, buckets=_FIRST_BUCKETS, **made)
        self._each = Histogram("time_per_token_seconds", each, buckets=_TOKEN_BUCKETS, **made)
        self.registry.register(self)

    def count(self, completion: Completion | None) -> None:
        """Counts an answer that has ended; None where it was cancelled, or failed."""
        self._answers.labels("cancelled" if completion is None else completion.finish_reason).inc()
        if completion is None:
            return
        new = len(completion.tokens)
        counts = {"prompt": completion.prompt_tokens, "document": completion.document_tokens, "answer": new}
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)
        self._first.observe(completion.seconds_to_first_token)
        if new > 1:
            self._each.observe((completion.seconds - completion.seconds_to_first_token) / (new - 1))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Those of the engine, as they are now."""
        engine, documents = self._engine, self._engine.documents()
        begun = [bool(stream.first_token_at) for answers in self.open for stream in answers.streams]
        pools = {"documents": engine.document_pages, "answers": engine.answer_pages}
        pages = {(of, state): getattr(pool, state) for of, pool in pools.items() for state in ("free", "total")}
        sizes = {(state,): [each.num_bytes for each in documents if each.state == state] for state in get_args(State)}
        sizes["stored",] = [each.num_bytes for each in documents if each.stored]
        counts, held = ({state: count(each) for state, each in sizes.items()} for count in (len, sum))
        of_pages = {state: num_bytes // engine.page_bytes for state, num_bytes in held.items()}
        rows = {("waiting",): begun.count(False), ("running",): begun.count(True)}
        gauges: list[tuple[str, str, Mapping[Any, float]]] = [
            ("rows", "Answers that wait for their first token, and that are written.", rows),
            ("rows_max", "Answers that are written at once.", {(): engine.max_rows}),
            ("engine_failed", "Whether the engine has failed, for good.", {(): engine.failure is not None}),
            ("pages", "Pages of each device, by their use.", pages),
            ("documents", "Documents by where they are; those on disk as well as elsewhere are stored.", counts),
            ("document_bytes", "Their keys and values.", held),
            ("document_pages", "Their pages on each device, or of as many bytes.", of_pages),
        ]
        for name, words, values in gauges:
            of_each = ["of", "state"][name != "pages" :]
            family = GaugeMetricFamily(f"tca_jax_{name}", words, labels=of_each)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
