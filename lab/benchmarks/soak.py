"""Hundreds of generations in one process: memory stays flat, no program is compiled twice, answers repeat.

tca-jax bench soak                                   # 500 generations of the shipped model, minutes
tca-jax bench soak --minutes 8                       # as many of them as there is time for
tca-jax bench soak --generations 20 --lengths 96     # a look
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Annotated, Any

import numpy as np
import typer

import tca_jax
from tca_jax.cli.files import require_writable
from tca_jax.cli.options import BackendOption
from tca_jax.engine.contexts import Context, prefill
from tca_jax.engine.extend import num_columns
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import bucket_length
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.common import COMPILED_AT_ONCE, tca_config, write_results
from tca_jax.lab.benchmarks.ending import Ending
from tca_jax.lab.benchmarks.options import RESULTS, LengthsOption, NameOption, OutOption
from tca_jax.lab.benchmarks.progress import counted
from tca_jax.lab.benchmarks.soak_report import (
    Compilations,
    Phases,
    Tally,
    describe,
    describe_extent,
    leaks,
    measurement,
    memory,
)
from tca_jax.lab.benchmarks.soak_requests import Asked, Question, Shape, models_under

_LENGTHS = (96, 640, 1408, 3072)
_REPEATED = 0.4  # share of requests that an earlier one is asked again
_STREAMED = 0.3  # share of the repeats that are streamed, where streams know the options
_QUESTION_TOKENS = 48  # most of a question
_COMPILING = 0.6  # share of the time; the shapes that are not compiled by then are dropped
_RUN_ANYWAY = 2  # shapes, however late it is: the first of prompts and the first over a context
_WRITTEN_EVERY = 30.0  # seconds; what a killed process leaves is no older
#: Threads that compile: XLA, where nine tenths of the time go, holds no lock of Python's, and these programs are small.
_THREADS = max(COMPILED_AT_ONCE, min(16, os.cpu_count() or 1))

#: What is switched on of the options of `generate`; programs depend on that, and not on the numbers.
_SETTINGS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        [
            (),
            (),
            (),
            ("repetition_penalty",),
            ("logprobs",),
            ("min_new_tokens", "stop_token_ids"),
            ("temperature", "top_k"),
            ("temperature", "top_p", "repetition_penalty"),
            ("temperature", "min_p"),
        ],
    )
)


class Soak:
    """The models, the contexts, and the first answers to all requests so far."""

    def __init__(
        self, models: dict[str, LM], lengths: Sequence[int], shapes: int, seed: int, backend: str, ending: Ending
    ) -> None:
        self.models, self.backend, self.ending = models, backend, ending
        self.rng = random.Random(seed)
        self.shapes = draw_shapes(list(models), lengths, shapes, self.rng)
        self.dropped: list[Shape] = []
        self.contexts: dict[tuple[str, int], Context] = {}
        self.first: dict[Asked, list[list[int]]] = {}
        self.seen: set[Hashable] = set()
        self.tallies = {label: Tally() for label in models}
        self.compilations = Compilations()
        self.phases = Phases(self.compilations)
        self.program_bytes = 0  # of what `step` has compiled
        self._blocks: dict[Shape, tuple[int, ...]] = {}  # see `_following`
        self._document_locks = {shape.document: threading.Lock() for shape in self.shapes}

    @property
    def requests(self) -> int:
        """How many have run."""
        return sum(tally.requests for tally in self.tallies.values())

    @property
    def failed(self) -> int:
        """How often something was wrong."""
        return sum(tally.failed for tally in self.tallies.values())

    def compile(self) -> list[Asked]:
        """Compiles the programs of a request of each shape, side by side, and returns those whose turn came in time.

        Nothing else runs meanwhile: a GPU's libraries may not be loaded by one program while another one's launches
        are recorded. What cannot be compiled fails when it runs, and is counted there.
        """
        asked = [Asked(shape, self.rng.getrandbits(31)) for shape in self.shapes]
        with self.phases.timed("compiling"):
            ready = self._each("shapes of requests compiled", asked, self._compile, _THREADS)
        longer = [request for request in ready if request.shape.appended]
        late: set[Asked] = set()
        if longer:
            questions: dict[Asked, Question] = {}
            with self.phases.timed("appending to contexts"):
                due = self._each("contexts appended to", longer, lambda of: questions.update({of: self._question(of)}))
                late |= {*longer} - {*due}
            with self.phases.timed("compiling for appended contexts"):
                longer = list(questions)
                due = self._each("appended shapes compiled", longer, lambda of: questions[of].compile(), _THREADS)
                late |= {*longer} - {*due}
        return [request for request in ready if request not in late]

    def run_each(self, ready: Sequence[Asked], write: Callable[[], None]) -> None:
        """Runs these requests, one of a shape; shapes that are not among them or come too late are dropped."""
        ran = []
        with self.phases.timed("running each shape"), counted("shapes run") as report:
            for request in filter(self._is_due, ready):
                self._note(request, *self._caught(request), compiled=True)
                ran.append(request.shape)
                report(len(ran), len(ready), f"last {request.shape}")
                write()
        self.dropped = [shape for shape in self.shapes if shape not in ran]
        self.shapes = ran

    def generate(self, generations: int, write: Callable[[], None]) -> None:
        """Requests until so many have run, or the time is up."""
        with self.phases.timed("generations"), counted("generations") as report:
            report(self.requests, generations, f"{self.failed} failed")
            while self.requests < generations and not self.ending.reason:
                before = memory()[0]
                if self.step():
                    self.program_bytes += memory()[0] - before
                report(self.requests, generations, f"{self.failed} failed")
                write()

    def _is_due(self, request: Asked, share: float = 1.0) -> bool:
        """Whether a shape's turn comes before this share of the time has gone; that of the first few always does."""
        if self.ending.signal is not None:
            return False
        return not self.ending.time_is_up(share) or request.shape in self.shapes[:_RUN_ANYWAY]

    def _each(
        self, what: str, requests: Sequence[Asked], call: Callable[[Asked], None], threads: int = 1
    ) -> list[Asked]:
        """Calls with each request whose turn comes while there is time for compiling, and returns these."""

        def turn(request: Asked) -> bool:
            due = self._is_due(request, _COMPILING)
            if due:
                with contextlib.suppress(Exception):
                    call(request)
            return due

        with counted(what) as report, ThreadPoolExecutor(threads) as pool:
            report(0, len(requests), f"{threads} at once")
            turns = {pool.submit(turn, request): request for request in requests}
            for done, future in enumerate(as_completed(turns), start=1):
                last = f"last {turns[future].shape}" if future.result() else "no time is left for the rest"
                report(done, len(requests), f"{self.compilations.count} programs so far, {last}")
        return [request for future, request in turns.items() if future.result()]

    def _compile(self, request: Asked) -> None:
        """Compiles what a request needs, as far as that can be done before anything has run."""
        shape, context = request.shape, None
        if shape.context:
            with self._document_locks[shape.document]:  # several shapes may be over one document
                context = prefill(*self._document(shape), backend=self.backend)
        if not shape.appended:
            self._question(request, context).compile()

    def step(self) -> bool:
        """One request, new or an earlier one again; whether anything was compiled for it."""
        repeated = bool(self.first) and self.rng.random() < _REPEATED
        if repeated:
            request = self.rng.choice(list(self.first))
            self.tallies[request.shape.method].repeats += 1
        else:
            request = Asked(self.rng.choice(self.shapes), self.rng.getrandbits(31))
        before = self.compilations.count
        key, answers = self._caught(request, streamed=repeated and self.rng.random() < _STREAMED)
        compiled = self.compilations.count > before
        self._note(request, key, answers, compiled)
        return compiled

    def _note(self, request: Asked, key: Hashable, answers: list[list[int]] | None, compiled: bool) -> None:
        tally = self.tallies[request.shape.method]
        tally.requests += 1
        if answers is None:
            tally.errors += 1
            return
        tally.new_tokens += sum(map(len, answers))
        if compiled and key in self.seen:
            tally.compiled_again += 1
            print(f"compiled again: {request}", file=sys.stderr)
        self.seen.add(key)
        tally.programs.add(key)
        if self.first.setdefault(request, answers) != answers:
            tally.mismatches += 1
            print(f"another answer than at first: {request}", file=sys.stderr)

    def _caught(self, request: Asked, streamed: bool = False) -> tuple[Hashable, list[list[int]] | None]:
        try:
            return self._answer(request, streamed)
        except Exception:  # the soak goes on, and fails in the end
            print(f"{request}:\n{traceback.format_exc()}", file=sys.stderr)
            return request.shape, None

    def _answer(self, request: Asked, streamed: bool) -> tuple[Hashable, list[list[int]]]:
        """What the programs of a request depend on, and its answers, as a stream where there is one of the kind."""
        question = self._question(request)
        return question.key, question.answer(streamed)

    def _question(self, request: Asked, context: Context | None = None) -> Question:
        """The prompts and options of a request, over `context` in place of the one that its shape is about, if given;
        what is appended to that is read here."""
        shape, rng = request.shape, np.random.default_rng(request.seed)
        lm = self.models[shape.method]
        options = draw_options(shape, lm, rng) | {"backend": self.backend}
        key: Hashable = shape
        if shape.context:
            context, key = context or self._context(shape), (key, "context")
            more, asked = self._following(shape, context, rng)
            if shape.appended:
                context = tca_jax.prefill(lm, _draw(lm, rng, [more]), context=context, backend=self.backend)
            prompts = _draw(lm, rng, asked)
            key = key, context.layout, context.tokens.shape
        else:
            longest = int(rng.integers(_least(shape.tokens), shape.tokens + 1))
            lengths = [longest, *rng.integers(1, longest + 1, shape.prompts - 1).tolist()]
            prompts = _draw(lm, rng, lengths)
        return Question(lm, prompts, context, shape.samples, options, key)

    def _context(self, shape: Shape) -> Context:
        """The document of a shape, read once."""
        if shape.document not in self.contexts:
            self.contexts[shape.document] = tca_jax.prefill(*self._document(shape), backend=self.backend)
        return self.contexts[shape.document]

    def _document(self, shape: Shape) -> tuple[LM, list[list[int]]]:
        lm, rng = self.models[shape.method], np.random.default_rng(shape.tokens)
        return lm, _draw(lm, rng, [shape.tokens - 5])

    def _following(self, shape: Shape, context: Context, rng: np.random.Generator) -> tuple[int, list[int]]:
        """Tokens that are appended to a context, if any are, and those of the questions behind them.

        Programs are compiled for the blocks that these go into: all requests of a shape go into as many as its first.
        """
        held, b = int(np.asarray(context.lengths)[0]), context.layout.block_size
        while True:
            more = int(rng.integers(1, _QUESTION_TOKENS + 1)) if shape.appended else 0
            asked = rng.integers(1, _QUESTION_TOKENS + 1, shape.prompts).tolist()
            columns = num_columns(held % b + more, b), num_columns((held + more) % b + max(asked), b)
            blocks = *columns, bucket_length(held + more)
            if self._blocks.setdefault(shape, blocks) == blocks:
                return more, asked


def draw_shapes(labels: Sequence[str], lengths: Sequence[int], count: int, rng: random.Random) -> list[Shape]:
    """So many shapes at most, every method among them as far as they go, every other one over a context."""
    shapes: dict[Shape, None] = {}
    for i in range(count):
        round_of_all, place = divmod(i, len(labels))
        label, context = labels[place], (round_of_all + place) % 2 == 1
        shape = Shape(
            method=label,
            tokens=bucket_length(rng.choice(list(lengths))),
            prompts=rng.choice((1, 2, 3)),
            samples=rng.choice((1, 1, 2)),
            room=rng.choice((16, 32)),
            settings=rng.choice(_SETTINGS),
            context=context,
            appended=context and rng.random() < 0.5,
        )
        shapes[shape] = None
    return list(shapes)


def draw_options(shape: Shape, lm: LM, rng: np.random.Generator) -> dict[str, Any]:
    """Options of `generate` for a shape."""
    drawn: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: float(rng.uniform(1.05, 1.5)),
        "logprobs": lambda: True,
        "min_new_tokens": lambda: int(rng.integers(1, 8)),
        "stop_token_ids": lambda: rng.integers(0, lm.config.vocab_size, 3).tolist(),
        "temperature": lambda: float(rng.uniform(0.3, 1.5)),
        "top_k": lambda: int(rng.integers(2, 50)),
        "top_p": lambda: float(rng.uniform(0.5, 0.99)),
        "min_p": lambda: float(rng.uniform(0.01, 0.2)),
    }
    options = {name: drawn[name]() for name in sorted(shape.settings)}
    least = max(_least(shape.room), options.get("min_new_tokens", 1), 2)  # one token alone needs no decoding program
    most = int(rng.integers(least, shape.room + 1))
    seed = int(rng.integers(2**32))
    return {"stop_token_ids": ()} | options | {"max_new_tokens": most, "seed": seed}


def _draw(lm: LM, rng: np.random.Generator, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths."""
    return [rng.integers(0, lm.config.vocab_size, n).tolist() for n in lengths]


def _least(bucket: int) -> int:
    """Smallest length of a bucket."""
    return next((n + 1 for n in range(bucket, 0, -1) if bucket_length(n) < bucket), 1)


def main(
    model: Annotated[str, typer.Option(help="Alias, Hub id or folder.")] = "recall-tiny",
    profile: Annotated[
        str | None, typer.Option(help='Profile folder; "shipped" for a shipped model.', show_default="shipped, if any")
    ] = None,
    generations: Annotated[int, typer.Option(help="Calls of generate.", min=1)] = 500,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so long, compilation included.", show_default="none")
    ] = None,
    shapes: Annotated[int, typer.Option(help="Shapes of requests; each compiles its programs.", min=1)] = 24,
    lengths: LengthsOption = None,
    window: Annotated[int, typer.Option(help="Window of the methods that have one.")] = 512,
    seed: Annotated[int, typer.Option(help="Other seeds, other requests.", min=0)] = 0,
    backend: BackendOption = "auto",
    out: OutOption = RESULTS,
    name: NameOption = "soak",
) -> None:
    """Run many generations of random lengths, batches, methods and settings, and check that nothing drifts.

    Fails where memory grows, something is compiled a second time, or an answer differs from its first time.

    Example: [bold]tca-jax bench soak --generations 100[/]
    """
    ending = Ending(None if minutes is None else 60 * minutes)
    require_writable(out, "--out")
    tca_config(window)
    for length in lengths or ():
        if length < 1:
            raise UserError(f"--lengths {length}: must be at least 1")
    lm = tca_jax.load(model, profile=profile or ("shipped" if model == "recall-tiny" else None))
    models = models_under(lm, window, random.Random(seed))
    soak = Soak(models, lengths or _LENGTHS, min(shapes, generations), seed, backend, ending)

    def write(measured: Sequence[dict[str, Any]], *, finished: bool = False) -> list[str]:
        """Writes what there is so far; returns what has failed."""
        rows = [tally.row(label) for label, tally in soak.tallies.items()]
        failures = [f"{row['method']}: {n} {what}" for row in rows for what, n in list(row.items())[-3:] if n]
        failures += leaks(measured)
        why = ending.reason if finished else "it was still running when this was written"
        extent = describe_extent(soak.requests, generations, why, soak.shapes, soak.dropped)
        note = describe(lm, extent, ending.elapsed, failures)
        write_results(name, "Soak", rows, out, note, {"Memory": measured, "Time": soak.phases.rows}, shown=finished)
        return failures

    try:
        failures = write(run(soak, generations, write), finished=True)
    finally:
        soak.compilations.close()
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    if ending.signal is not None:
        print("interrupted", file=sys.stderr)
    if failures or ending.signal is not None:
        raise typer.Exit(130 if ending.signal == signal.SIGINT else 1)


def run(soak: Soak, generations: int, write: Callable[[Sequence[dict[str, Any]]], object]) -> list[dict[str, Any]]:
    """The requests, and the memory before, after each shape has run, and in the end.

    What is measured so far is handed to `write` now and then, for a process that is killed to leave it.
    """
    measured, written = [measurement("start", 0)], time.monotonic()

    def write_now_and_then() -> None:
        nonlocal written
        if time.monotonic() - written > _WRITTEN_EVERY:
            write([*measured, measurement("so far", soak.program_bytes)])
            written = time.monotonic()

    ready = soak.compile()
    with soak.ending.told_by_signals():
        soak.run_each(ready, write_now_and_then)
        measured.append(measurement("each shape has run", 0))
        soak.generate(generations, write_now_and_then)
        return [*measured, measurement("end", soak.program_bytes)]
