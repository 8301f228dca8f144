"""Prometheus metrics of a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from tca_jax.serve.documents import State
from tca_jax.serve.engine import Engine
from tca_jax.serve.streams import Completion

_FIRST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1)  # seconds


class Metrics:
    """Prometheus metrics of one server; `open` are its answers that wait or are written."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.registry, self.open = engine, CollectorRegistry(), set[Any]()
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
        groups = {(state,): [each for each in documents if each.state == state] for state in get_args(State)}
        groups["stored",] = [each for each in documents if each.stored]
        counts = {state: len(group) for state, group in groups.items()}
        held = {state: sum(each.num_bytes for each in group) for state, group in groups.items()}
        of_pages = {state: sum(each.num_pages for each in group) for state, group in groups.items()}
        rows = {("waiting",): begun.count(False), ("running",): begun.count(True)}
        gauges: list[tuple[str, str, Mapping[Any, float]]] = [
            ("rows", "Answers that wait for their first token, and that are written.", rows),
            ("rows_max", "Answers that are written at once.", {(): engine.max_rows}),
            ("engine_failed", "Whether the engine has failed, for good.", {(): engine.failure is not None}),
            ("pages", "Pages of each device, by their use.", pages),
            ("documents", "Documents by where they are; those on disk as well as elsewhere are stored.", counts),
            ("document_bytes", "Their keys and values.", held),
            ("document_pages", "Their pages on each device, there or elsewhere.", of_pages),
        ]
        for name, words, values in gauges:
            family = GaugeMetricFamily(f"tca_jax_{name}", words, labels=["of", "state"][name != "pages" :])
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
