"""What a server counts and times, for Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from tca_jax.pallas_kernels.kv import num_bytes
from tca_jax.serve.engine import Engine
from tca_jax.serve.streams import Completion, Stream

_PREFIX = "tca_jax"
_FIRST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The metrics of one server.

    Args:
        engine: The engine that it serves.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self._registry, "namespace": _PREFIX}
        self._requests = Counter("requests", "Requests by path and HTTP status.", ["path", "status"], **made)
        self._answers = Counter("answers", "Answers by how they ended.", ["finish_reason"], **made)
        self._tokens = Counter("tokens", "Tokens of prompts, of documents behind them, of answers.", ["kind"], **made)
        self._first = Histogram(
            "time_to_first_token_seconds", "From a request to its first token.", buckets=_FIRST_BUCKETS, **made
        )
        self._each = Histogram(
            "time_per_token_seconds", "Of each token after the first.", buckets=_TOKEN_BUCKETS, **made
        )
        Gauge("rows_max", "Answers that are written at once.", **made).set(engine.max_rows)
        self._registry.register(_OfEngine(engine, self))
        self._streams: set[Stream] = set()
        self._lock = threading.Lock()

    def request(self, path: str, status: int) -> None:
        """Counts a request."""
        self._requests.labels(path, status).inc()

    def begin(self, stream: Stream) -> None:
        """An answer is asked for."""
        with self._lock:
            self._streams.add(stream)

    def end(self, stream: Stream, completion: Completion | None) -> None:
        """An answer has ended; None where it was cancelled, or failed."""
        with self._lock:
            self._streams.discard(stream)
        self._answers.labels("cancelled" if completion is None else completion.finish_reason).inc()
        if completion is None:
            return
        new = len(completion.tokens)
        self._tokens.labels("prompt").inc(completion.prompt_tokens)
        self._tokens.labels("document").inc(completion.document_tokens)
        self._tokens.labels("answer").inc(new)
        self._first.observe(completion.seconds_to_first_token)
        if new > 1:
            self._each.observe((completion.seconds - completion.seconds_to_first_token) / (new - 1))

    def rows(self) -> tuple[int, int]:
        """Answers that wait for their first token, and those that are being written."""
        with self._lock:
            streams = list(self._streams)
        running = sum(1 for stream in streams if stream.first_token_at)
        return len(streams) - running, running

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)


class _OfEngine:
    """What an engine has now."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        lm = engine.lm
        devices = 1 if lm.head_shards is None else lm.head_shards.devices
        size = 2 * num_bytes(lm.method.cache.block_size, lm.config.head_dim, lm.cache_dtype)
        self._page_bytes = size * devices

    def collect(self) -> Iterator[Metric]:
        waiting, running = self._metrics.rows()
        rows = GaugeMetricFamily(
            f"{_PREFIX}_rows", "Answers that wait for their first token, and that are written.", labels=["state"]
        )
        rows.add_metric(["waiting"], waiting)
        rows.add_metric(["running"], running)
        yield rows
        failed = self._engine.failure is not None
        yield GaugeMetricFamily(f"{_PREFIX}_engine_failed", "Whether the engine has failed, for good.", value=failed)
        pages = GaugeMetricFamily(
            f"{_PREFIX}_pages", "Pages of each device, by what they are for.", labels=["of", "state"]
        )
        for of, pool in (("documents", self._engine.document_pages), ("answers", self._engine.answer_pages)):
            pages.add_metric([of, "free"], pool.free)
            pages.add_metric([of, "total"], pool.total)
        yield pages
        documents = self._engine.documents()
        states = ("waiting", "device", "moving", "host", "disk", "failed")
        of_state = {state: [each.num_bytes for each in documents if each.state == state] for state in states}
        stored = [each.num_bytes for each in documents if each.stored]
        of_tier = {**of_state, "stored": stored}
        for name, words, value in (
            ("documents", "Documents by where they are; those on disk as well as elsewhere are stored.", len),
            ("document_bytes", "Their keys and values.", sum),
            ("document_pages", "Their pages on each device, or of as many bytes.", self._pages),
        ):
            family = GaugeMetricFamily(f"{_PREFIX}_{name}", words, labels=["state"])
            for state, sizes in of_tier.items():
                family.add_metric([state], value(sizes))
            yield family

    def _pages(self, sizes: list[int]) -> int:
        return sum(sizes) // self._page_bytes
