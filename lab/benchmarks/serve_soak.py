"""An engine under mixed load for as long as asked: nothing is lost, memory stays flat, answers are `generate`'s.

tca-jax bench serve-soak --minutes 30                               # the shipped model
tca-jax bench serve-soak --minutes 0.5 --model tiny --tokens 512    # a look
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer

import tca_jax
from tca_jax.cli.files import require_writable
from tca_jax.cli.options import BackendOption
from tca_jax.engine.lm import LM
from tca_jax.lab.benchmarks.common import tca_config, write_results
from tca_jax.lab.benchmarks.ending import Ending
from tca_jax.lab.benchmarks.models import CONFIGS, random_model, under_share
from tca_jax.lab.benchmarks.options import RESULTS, NameOption, OutOption
from tca_jax.lab.benchmarks.progress import Count, counted
from tca_jax.lab.benchmarks.serve_clients import FAILURES, KINDS, Client, References, Tallies
from tca_jax.lab.benchmarks.shares import Share
from tca_jax.lab.benchmarks.soak_report import Compilations, live_bytes
from tca_jax.lab.benchmarks.watching import percentiles
from tca_jax.pallas_kernels.backends import resolve_backend
from tca_jax.serve import Engine

_ROOM = 2.5  # documents for which the pool has pages
_HOST_ROOM = 2.2  # and host memory
_WARMING = 4  # requests of each kind
_SAMPLED_EVERY = 0.05  # seconds
_WARM = 0.4  # of the time has gone before memory is looked at
_QUIET = 0.8  # of it; what is compiled later does not shorten the time in which memory is looked at
_SLACK = 2**27  # bytes by which the process may grow then: the host's heap
_LIVE_SLACK = 2**16  # bytes by which arrays may
_SECONDS = 120.0  # most that anything is waited for
_WINDOW = 128  # of a model with random weights


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """Rounds of load over one folder of documents, each with an engine of its own.

    Args:
        references: What is asked, and what `generate` answers.
        rows: Rows of an engine.
        clients: Threads that ask.
        seed: Of what they ask.
        folder: Of documents on disk.
        backend: Kernel backend.
    """

    def __init__(self, references: References, rows: int, clients: int, seed: int, folder: Path, backend: str) -> None:
        self._references, self._rows, self._clients, self._folder = references, rows, clients, folder
        self._backend, self._random = backend, random.Random(seed)
        self.tallies, self.rounds, self.problems = Tallies(), list[dict[str, Any]](), list[str]()
        self.moves = dict.fromkeys(("device", "host", "disk"), 0)
        self.memory: list[Sample] = []
        self._ending, self.compilations = Ending(), Compilations()

    def warm_up(self) -> None:
        """A few requests one after the other, which compile nearly all programs."""
        with self._engine() as engine, counted("requests of warming up") as report:
            client = Client(engine, self._references, self.tallies, self._random.getrandbits(32))
            kinds = [kind for _ in range(_WARMING) for kind in KINDS]
            for number, kind in enumerate(kinds):
                report(number, len(kinds), kind)
                client.request(kind)
            self._settle(engine, 0, last=False)

    def run(self, rounds: int, ending: Ending) -> None:
        """All rounds; each finds what the one before has left on disk."""
        self._ending = ending
        with counted("requests") as report:
            for number in range(1, rounds + 1):
                self._round(number, number / rounds, report)
                gc.collect()
                self._look_at_arrays()
        if left := self._stored():
            self.problems.append(f"{len(left)} documents are on disk after all were forgotten")

    def _round(self, number: int, share: float, report: Count) -> None:
        begin, before, done = self._ending.elapsed, self._stored(), self.tallies.requests
        compiled = self.compilations.count
        with self._engine() as engine:
            found = {each.id for each in engine.documents()}
            if found != before:
                self.problems.append(f"round {number}: {len(before)} documents were stored, {len(found)} are found")
            seeds = [self._random.getrandbits(32) for _ in range(self._clients)]
            clients = [Client(engine, self._references, self.tallies, seed) for seed in seeds]
            for client in clients:
                client.start()
            states: dict[str, str] = {}
            while not (self._ending.reason or self._ending.time_is_up(share)):
                self._look(engine, states)
                report(self.tallies.requests, self.tallies.requests + 1, f"round {number}, {self._failed} failed")
                time.sleep(_SAMPLED_EVERY)
            for client in clients:
                client.stop()
            for client in clients:
                client.join(2 * _SECONDS)
            if any(client.is_alive() for client in clients):
                self.problems.append(f"round {number}: a request has not ended")
            self._settle(engine, number, last=share == 1)
        self.rounds.append(
            {
                "round": number,
                "s": self._ending.elapsed - begin,
                "requests": self.tallies.requests - done,
                "documents found": len(found),
                "programs compiled": self.compilations.count - compiled,
                "MB of the process": resident_bytes() / 1e6,
            }
        )

    @property
    def _failed(self) -> int:
        return sum(row[name] for row in self.tallies.rows for name in FAILURES)

    def _engine(self) -> Engine:
        references = self._references
        lm = references.lm
        return Engine(
            lm,
            max_rows=self._rows,
            pages=int(_ROOM * lm.cache_layout(1, max(map(len, references.documents))).num_pages),
            answer_tokens=references.most_own_tokens,
            host_memory=int(_HOST_ROOM * references.document_bytes),
            disk=self._folder,
            backend=self._backend,
        )

    def _look(self, engine: Engine, states: dict[str, str]) -> None:
        """Notes the process's memory, and which documents have moved."""
        self.memory.append(Sample(self._ending.elapsed, resident_bytes(), self.compilations.count))
        for each in engine.documents():
            before = states.get(each.id, each.state)
            if before != each.state and each.state in self.moves and before != "waiting":
                self.moves[each.state] += 1
            states[each.id] = each.state

    def _settle(self, engine: Engine, number: int, *, last: bool) -> None:
        """Waits until nothing is asked; then drops all documents, or those that clients made: all pages are free but
        those of documents that stay."""
        if not engine.idle(_SECONDS):
            self.problems.append(f"round {number}: the engine is not idle after {_SECONDS:.0f} seconds")
            return
        answers, documents = engine.answer_pages, engine._documents
        if answers.free != answers.total:
            self.problems.append(f"round {number}: {answers.total - answers.free} pages of answers are not free")
        stay = set() if last else {engine.read(document) for document in self._references.documents}
        for id_ in stay:
            engine.wait(id_, _SECONDS, stored=True)
        for each in engine.documents():
            if each.id not in stay:
                engine.forget(each.id)
        held = sum(each.num_pages for each in documents.all() if each.numbers is not None)
        pages = engine.document_pages
        if pages.total - pages.free != held:
            self.problems.append(f"round {number}: {pages.free} of {pages.total} pages are free, documents hold {held}")

    def _look_at_arrays(self) -> None:
        live = live_bytes()
        self.rounds[-1]["MB of live arrays"] = live / 1e6
        before = self.rounds[0]["MB of live arrays"]
        if live / 1e6 > before + _LIVE_SLACK / 1e6:
            self.problems.append(f"live arrays grew from {before:.2f} to {live / 1e6:.2f} MB")

    def _stored(self) -> set[str]:
        return {file.parent.name for file in self._folder.glob("*/document.json")}

    def memory_row(self) -> dict[str, Any]:
        """How the process has grown since it was warm; that this is too much is noted as a problem."""
        row = growth(self.memory)
        if row["grown MB"] * 1e6 > _SLACK:
            self.problems.append(f"the process grew by {row['grown MB']:.0f} MB after it was warm")
        return row


class Sample(NamedTuple):
    """What a process has at a moment: seconds since the load began, bytes, and programs that were compiled so far."""

    seconds: float
    held: int
    programs: int


def growth(samples: Sequence[Sample]) -> dict[str, Any]:
    """Columns of how bytes grew by a line through samples, and their peak.

    Of the samples behind the first part of the time, those count that came after the last program was compiled, which
    takes memory of its own; all of them if something was compiled nearly to the end.
    """
    end = max((each.seconds for each in samples), default=0.0)
    warm = [each for each in samples if each.seconds >= _WARM * end]
    quiet = [each for each in warm if each.programs == warm[-1].programs]
    if quiet and quiet[0].seconds < _QUIET * end:
        warm = quiet
    slope = 0.0
    if len(warm) > 1:
        seconds, held = (np.asarray(x, np.float64) for x in zip(*[each[:2] for each in warm], strict=True))
        slope = float(np.polyfit(seconds - seconds[0], held, 1)[0])
    span = warm[-1].seconds - warm[0].seconds if warm else 0.0
    return {
        "samples": len(warm),
        "over s": span,
        "programs compiled": warm[-1].programs - warm[0].programs if warm else 0,
        "MB/minute": 60 * slope / 1e6,
        "grown MB": slope * span / 1e6,
        "peak MB": max((each.held for each in samples), default=0) / 1e6,
    }


def describe(lm: LM, soak: Soak, ending: Ending, shape: str) -> str:
    """What ran, what the columns mean, and what came of it."""
    problems = soak.problems + [
        f"{row['kind']}: {row[name]} {name}" for row in soak.tallies.rows for name in FAILURES if row[name]
    ]
    moves = ", ".join(f"{count:,} to {tier}" for tier, count in soak.moves.items())
    interrupted = f", ended as {ending.reason}" if ending.signal is not None else ""
    return (
        f"{lm.name}, {shape}, {ending.elapsed:,.0f} s in all{interrupted}: {'; '.join(problems) or 'nothing failed'}. "
        f"{soak.tallies.new_tokens:,} new tokens. Every answer is compared with that of `generate`, in float32, "
        "sampled ones too; of a cancelled one, its tokens so far. A chat is two questions, the second behind the first "
        "one's answer. "
        "`forgotten meanwhile`: another client dropped the document, or used it while this one was to drop it. `not "
        "kept`: there was no room for the document that an answer leaves. Device and host memory have room for few of "
        f"the documents: moves that were seen between looks every {1e3 * _SAMPLED_EVERY:.0f} ms: {moves}. After each "
        "round no request waits, all pages are free but those of documents, and the next engine finds all documents "
        "on disk. Memory is that of the process after the first "
        f"{_WARM:.0%} of the time, and after the last program was compiled unless that was in the last "
        f"{1 - _QUIET:.0%}; `MB/minute` is the slope of a line through its samples."
    )


@contextlib.contextmanager
def _whole_products() -> Iterator[None]:
    """Products of float32 are not rounded to less, in any thread: else a row's tokens depend on the number of rows."""
    own = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", own)


def main(
    model: Annotated[str, typer.Option(help="tiny (random weights), or alias, Hub id or folder.")] = "recall-tiny",
    profile: Annotated[
        str | None, typer.Option(help='Profile folder; "shipped" for a shipped model.', show_default="shipped, if any")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Of load; models and right answers take time before.", min=0.01)] = 30,
    rounds: Annotated[int, typer.Option(help="Engines, one after the other.", min=1)] = 3,
    documents: Annotated[int, typer.Option(help="Documents that are asked about.", min=1)] = 6,
    tokens: Annotated[int, typer.Option(help="Most tokens of a document.", min=64)] = 1408,
    rows: Annotated[int, typer.Option(help="Answers that are written at once.", min=1)] = 4,
    clients: Annotated[int, typer.Option(help="Threads that ask.", min=1)] = 6,
    seed: Annotated[int, typer.Option(help="Other seeds, other requests.", min=0)] = 0,
    backend: BackendOption = "auto",
    out: OutOption = RESULTS,
    name: NameOption = "serve-soak",
) -> None:
    """Ask an engine at random for minutes, from several threads, and check that nothing is lost and nothing drifts.

    Fails where an answer is not that of `generate`, a request does not end, pages are not given back, memory grows, or
    a document is not found again.

    Example: [bold]tca-jax bench serve-soak --minutes 5[/]
    """
    require_writable(out, "--out")
    resolve_backend(backend)
    if model in CONFIGS:
        lm = random_model(model, jax.random.key(seed), max_positions=4 * tokens)
        lm = dataclasses.replace(lm, checkpoint_fingerprint=f"random weights of seed {seed}")
        lm = under_share(lm, Share(0.25), tca_config(_WINDOW))
    else:
        lm = tca_jax.load(model, dtype="float32", profile=profile or ("shipped" if model == "recall-tiny" else None))
    with tempfile.TemporaryDirectory() as folder, _whole_products():
        references = References(lm, documents, tokens, seed, backend)
        soak = Soak(references, rows, clients, seed, Path(folder), backend)
        soak.warm_up()
        ending = Ending(60 * minutes)
        with ending.told_by_signals():
            soak.run(rounds, ending)
    soak.compilations.close()
    memory = soak.memory_row()
    shape = f"{documents} documents of up to {tokens:,} tokens, {rows} rows, {clients} clients, seed {seed}"
    tables = {
        "Rounds": soak.rounds,
        "First tokens": [percentiles(soak.tallies.first_token_seconds or [0.0], 50, 90, 99)],
        "Memory": [memory],
    }
    write_results(name, "Soak of an engine", soak.tallies.rows, out, describe(lm, soak, ending, shape), tables)
    for problem in soak.problems:
        print(f"failed: {problem}", file=sys.stderr)
    failed = soak.problems or any(row[name] for row in soak.tallies.rows for name in FAILURES)
    if failed or ending.signal is not None:
        raise typer.Exit(130 if ending.signal == signal.SIGINT else 1)
