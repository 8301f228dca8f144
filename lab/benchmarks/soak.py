"""`tca-jax bench soak`: an engine under mixed load: answers equal those of `generate`, memory stays flat."""

from __future__ import annotations

import collections
import gc
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer

import tca_jax
from tca_jax.cli.files import require_writable
from tca_jax.cli.options import BackendOption
from tca_jax.engine.lm import LM
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks import common
from tca_jax.lab.benchmarks import models as shapes
from tca_jax.lab.benchmarks.serve import TokenTimes
from tca_jax.serve import Engine
from tca_jax.serve.streams import Stream

_QUESTIONS, _PROMPTS = 3, 4
_QUESTION_TOKENS, _NEW_TOKENS = 40, 24  # at most
_FEWER = 100  # tokens that a document or prompt may lack: all take a few programs
_THINKING = 0.02  # mean seconds between an answer and the client's next request
_SECONDS = 120.0  # longest wait for an answer
_GONE = "unknown document", "is no longer there", "is in use"  # errors that another client's `forget` causes
_DEVICE_ROOM, _HOST_ROOM = 2.5, 2.2  # documents that fit the device and host memory
_WARM = 0.4  # share of a round before memory is watched
_SLACK, _LIVE_SLACK = 2**27, 2**16  # bytes by which the process and live arrays may grow
_WINDOW = 128  # of random weights

_SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 1}
_OPTIONS: tuple[common.Row, ...] = ({"stop_token_ids": ()}, {**_SAMPLED, "stop_token_ids": (3, 5)})

NOTE = (
    "{model} in float32, {documents} documents of up to {tokens:,} tokens, few of which fit memory, {rows} rows, "
    "{clients} clients, seed {seed}, {rounds} engines in turn over one folder. Answers are compared with those of "
    "`generate`; of a cancelled one the tokens so far. `gone`: another client dropped the document, or a chat found "
    "no room. After a round all pages are free, and the next engine finds all documents. `grown MB`: growth of the "
    "process after the first {warm:.0%} of a round, without compiling."
)


class Question(NamedTuple):
    """A request with one right answer."""

    document: int | None  # number of the document; None for a prompt
    number: int  # of the question or prompt
    options: int  # index into _OPTIONS
    turn: bool = False  # whether it follows a first question and its answer


class References:
    """Documents, prompts and questions, and the answers of `generate`, each computed once."""

    def __init__(self, lm: LM, documents: int, tokens: int, seed: int, backend: str) -> None:
        random = np.random.default_rng(seed)

        def draw(most: int, fewer: int) -> list[int]:
            return random.integers(1, lm.config.vocab_size, most - random.integers(min(fewer, most))).tolist()

        self.lm, self._backend = lm, backend
        self.documents = [draw(tokens, _FEWER) for _ in range(documents)]
        self.questions = [draw(_QUESTION_TOKENS, _QUESTION_TOKENS) for _ in range(_QUESTIONS)]
        self.prompts = [draw(tokens // 3, _FEWER) for _ in range(_PROMPTS)]
        self.contexts = [tca_jax.prefill(lm, each, backend=backend) for each in self.documents]
        self._answers: dict[Question, list[int]] = {}
        self._lock = threading.RLock()

    def answer(self, question: Question) -> list[int]:
        """The tokens of `generate`."""
        with self._lock:
            if question not in self._answers:
                options = {"max_new_tokens": _NEW_TOKENS, "backend": self._backend, **_OPTIONS[question.options]}
                context = None if question.document is None else self.contexts[question.document]
                prompt = (self.prompts if context is None else self.questions)[question.number]
                if question.turn:  # the last token of an answer is not part of the kept document
                    more = self.questions[0] + self.answer(Question(question.document, 0, 0))[:-1]
                    context = tca_jax.prefill(self.lm, [more], context=context, backend=self._backend)
                self._answers[question] = tca_jax.generate(self.lm, [prompt], context=context, **options).tokens[0]
            return self._answers[question]


class Client:
    """Sends random requests to an engine, one after the other."""

    def __init__(self, engine: Engine, references: References, seed: int) -> None:
        self._engine, self._references, self._random = engine, references, random.Random(seed)
        self.outcomes = collections.Counter[tuple[str, str]]()  # by kind of request
        self.first_tokens: list[float] = []  # seconds

    def run(self, stopping: threading.Event) -> None:
        """Requests until `stopping`."""
        while not stopping.wait(self._random.expovariate(1 / _THINKING)):
            self.request(*self._random.choices(list(KINDS), list(KINDS.values())))

    def request(self, kind: str) -> None:
        """One request; its outcome is counted."""
        try:
            outcome = self._outcome(kind)
        except Exception as error:
            gone = isinstance(error, UserError) and any(text in str(error) for text in _GONE)
            outcome = "gone" if gone else "errors"
            if not gone:
                traceback.print_exc()
        self.outcomes[kind, outcome] += 1

    def _outcome(self, kind: str) -> str:
        draw, number = self._random.randrange, self._random.randrange(len(self._references.documents))
        drawn = Question(number, draw(_QUESTIONS), draw(len(_OPTIONS)), turn=kind == "chat")
        if kind == "prompt":
            drawn = Question(None, draw(_PROMPTS), drawn.options)
            return self._checked(drawn, self._ask(None, drawn))
        id_ = self._engine.read(self._references.documents[number])
        if kind == "forget":
            self._engine.forget(id_)
            return "equal"
        if kind == "cancelled":
            drawn = drawn._replace(options=0)
            stream = self._ask(id_, drawn)
            if count := draw(_NEW_TOKENS // 2):
                TokenTimes(stream).wait(count, _SECONDS)
            stream.cancel()
            return self._checked(drawn, stream, whole=False)
        if kind != "chat":
            return self._checked(drawn, self._ask(id_, drawn))
        first = Question(number, 0, 0)
        stream = self._ask(id_, first, keep=True)
        if (outcome := self._checked(first, stream)) != "equal":
            return outcome
        if (kept := stream.result().document) is None:
            return "gone"
        outcome = self._checked(drawn, self._ask(kept, drawn))
        self._engine.forget(kept)
        return outcome

    def _ask(self, document: str | None, question: Question, *, keep: bool = False) -> Stream:
        prompts = self._references.prompts if document is None else self._references.questions
        options = {"max_new_tokens": _NEW_TOKENS, **_OPTIONS[question.options]}
        return self._engine.ask(document, prompts[question.number], keep=keep, **options)

    def _checked(self, question: Question, stream: Stream, *, whole: bool = True) -> str:
        out, expected = stream.result(_SECONDS), self._references.answer(question)
        self.first_tokens += [out.seconds_to_first_token] if whole else []
        if out.tokens == (expected if whole else expected[: len(out.tokens)]):
            return "equal"
        print(f"other answer: {question}: {out.tokens} instead of {expected}", file=sys.stderr, flush=True)
        return "other answers"


#: Kinds of requests, with how often each is drawn.
KINDS = {"question": 8, "prompt": 3, "cancelled": 3, "chat": 3, "forget": 0.5}
OUTCOMES = ("equal", "gone", "other answers", "errors")


def growth(samples: Sequence[tuple[float, int, int]]) -> float:
    """Bytes by which a process grew, by a line through warm samples (seconds, bytes, programs compiled so far)."""
    warm = [each[:2] for each in samples if each[0] >= _WARM * samples[-1][0] and each[2] == samples[-1][2]]
    if len(warm) < 2:
        return 0.0
    seconds, held = np.asarray(warm, np.float64).T
    return float(np.polyfit(seconds - seconds[0], held, 1)[0] * (seconds[-1] - seconds[0]))


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """Rounds of load on engines with `options`; `problems` lists all that went wrong."""

    def __init__(self, references: References, options: dict[str, Any], clients: int, seed: int) -> None:
        self._references, self._options, self._clients = references, options, clients
        self._random, self._compilations, self._live = random.Random(seed), common.Compilations(), 0
        self.outcomes, self.first_tokens = collections.Counter[tuple[str, str]](), list[float]()
        self.problems: list[str] = []

    def run_round(self, number: int, seconds: float, *, last: bool) -> common.Row:
        """Load for so many seconds; the first round begins with each kind of request, which compiles."""
        begin, stored, samples = time.monotonic(), self._stored(), list[tuple[float, int, int]]()
        with Engine(self._references.lm, **self._options) as engine:
            found = {each.id for each in engine.documents()}
            self._require(found == stored, f"round {number}: {len(found)} of {len(stored)} documents were found")
            clients = [Client(engine, self._references, self._random.getrandbits(32)) for _ in range(self._clients)]
            for kind in KINDS if number == 1 else ():
                clients[0].request(kind)
            stopping, start = threading.Event(), time.monotonic()
            threads = [threading.Thread(target=client.run, args=(stopping,), daemon=True) for client in clients]
            for thread in threads:
                thread.start()
            while (elapsed := time.monotonic() - start) < seconds:
                samples.append((elapsed, resident_bytes(), self._compilations.count))
                time.sleep(0.05)
            stopping.set()
            for thread in threads:
                thread.join(2 * _SECONDS)
                self._require(not thread.is_alive(), "a request has not ended")
            self._settle(engine, number, last=last)
        for client in clients:
            self.outcomes += client.outcomes
            self.first_tokens += client.first_tokens
        gc.collect()
        live, grown = sum(array.nbytes for array in jax.live_arrays()), growth(samples)
        self._live = self._live or live
        self._require(live <= self._live + _LIVE_SLACK, f"round {number}: live arrays grew to {live:,} bytes")
        self._require(grown <= _SLACK, f"round {number}: the process grew by {grown / 1e6:.0f} MB")
        requests = sum(client.outcomes.total() for client in clients)
        row = {"round": number, "s": time.monotonic() - begin, "requests": requests, "documents found": len(found)}
        return {**row, "live MB": live / 1e6, "process MB": resident_bytes() / 1e6, "grown MB": grown / 1e6}

    def _settle(self, engine: Engine, number: int, *, last: bool) -> None:
        """Checks that nothing is held after the requests; keeps the documents alone, or none after the last round."""
        self._require(engine.idle(_SECONDS), f"round {number}: the engine is not idle after {_SECONDS:.0f} seconds")
        pages, documents = engine.answer_pages, self._references.documents
        self._require(pages.free == pages.total, f"round {number}: pages of answers stay taken: {pages}")
        kept = () if last else self._read(engine, documents)
        for each in engine.documents():
            if each.id not in kept:
                engine.forget(each.id)
        if last:  # copies of prompts make room for documents
            ids = self._read(engine, documents[: int(_DEVICE_ROOM)])
            states = {engine.document(id_).state for id_ in ids}
            self._require(states == {"device"}, f"after all: documents that fit the device are {states}")
            for id_ in ids:
                engine.forget(id_)
            self._require(not self._stored(), f"after all: {len(self._stored())} documents are on disk")

    def _read(self, engine: Engine, documents: Sequence[list[int]]) -> list[str]:
        """Ids of documents that are read and stored."""
        ids = [engine.read(document) for document in documents]
        for id_ in ids:
            engine.wait(id_, _SECONDS, stored=True)
        return ids

    def _require(self, holds: bool, problem: str) -> None:
        self.problems += [] if holds else [problem]

    def _stored(self) -> set[str]:
        return {file.parent.name for file in self._options["disk"].glob("*/document.json")}


def main(
    model: Annotated[str, typer.Option(help="tiny (random weights), alias, Hub id, folder or file.")] = "recall-tiny",
    profile: Annotated[str | None, typer.Option(help="Profile.", show_default="the shipped one, if any")] = None,
    minutes: Annotated[float, typer.Option(help="Minutes of load.", min=0.01)] = 30,
    rounds: Annotated[int, typer.Option(help="Engines, one after the other.", min=1)] = 3,
    documents: Annotated[int, typer.Option(help="Documents.", min=1)] = 6,
    tokens: Annotated[int, typer.Option(help="Most tokens of a document.", min=64)] = 1408,
    rows: Annotated[int, typer.Option(help="Answers at once.", min=1)] = 4,
    clients: Annotated[int, typer.Option(help="Threads that send requests.", min=1)] = 6,
    seed: common.SeedOption = 0,
    backend: BackendOption = "auto",
    out: common.OutOption = common.RESULTS,
    name: common.NameOption = "soak",
) -> None:
    """Send random requests to an engine for minutes; fail where an answer differs or something leaks.

    Failures: an answer that is not `generate`'s, a request that does not end, pages that stay taken, a document that
    is lost, memory that grows.

    Example: [bold]tca-jax bench soak --minutes 5[/]
    """
    require_writable(out, "--out")
    # Products of float32 in full precision, in all threads: a row's tokens do not depend on the number of rows.
    jax.config.update("jax_default_matmul_precision", "highest")
    if model in shapes.CONFIGS:
        lm = shapes.open_model(model, max_positions=4 * tokens)
        budgets = shapes.Share(0.25).method(common.tca_config(_WINDOW), lm.config.num_kv_heads, lm.config.num_layers)
        lm = lm.with_method(budgets)
    else:
        profile = profile or ("shipped" if model == "recall-tiny" else None)
        lm = tca_jax.load(model, dtype="float32", profile=profile)
    sizes = {"documents": documents, "tokens": tokens, "rows": rows, "clients": clients, "seed": seed, "rounds": rounds}
    results = common.Results(out, name, "Soak of an engine", NOTE.format(model=lm.name, warm=_WARM, **sizes))
    references = References(lm, documents, tokens, seed, backend)
    with tempfile.TemporaryDirectory() as folder:
        longest = max(map(len, references.documents))
        held = max(context.stats.kv_cache_bytes for context in references.contexts)
        options = {"max_rows": rows, "disk": Path(folder), "backend": backend}
        options["answer_tokens"] = 2 * (_QUESTION_TOKENS + _NEW_TOKENS)
        options["pages"] = int(_DEVICE_ROOM * lm.cache_layout(1, longest).num_pages)
        options["host_memory"] = int(_HOST_ROOM * held)
        soak = Soak(references, options, clients, seed)
        for number in range(1, rounds + 1):
            results.add("Rounds", soak.run_round(number, 60 * minutes / rounds, last=number == rounds))
    for kind in KINDS:
        results.add("Requests", {"kind": kind, **{outcome: soak.outcomes[kind, outcome] for outcome in OUTCOMES}})
    results.add("First tokens", common.percentiles("first token", soak.first_tokens))
    failed = {outcome: sum(soak.outcomes[kind, outcome] for kind in KINDS) for outcome in OUTCOMES[2:]}
    problems = soak.problems + [f"{count} {outcome}" for outcome, count in failed.items() if count]
    results.finish("Failed: " + "; ".join(problems) + "." if problems else "Nothing failed.")
    if problems:
        print(f"failed: {'; '.join(problems)}", file=sys.stderr)
        raise typer.Exit(1)
