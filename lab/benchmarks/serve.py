"""`tca-jax bench serve`: an engine with many documents: steps by rows, requests at random times, and a soak."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer

import tca_jax
from tca_jax.cli.options import BackendOption, with_options
from tca_jax.engine.lm import LM
from tca_jax.errors import require
from tca_jax.lab.benchmarks import common
from tca_jax.lab.benchmarks import models as shapes
from tca_jax.serve import Engine
from tca_jax.serve.streams import Stream

STEPS = 128  # timed steps; a block leaves the window of every row once

_COPY_REPEATS = 7
_SECONDS = 600.0  # longest wait for the engine
_QUESTIONS = 3  # of a soak, about each document
_DEVICE_ROOM, _HOST_ROOM = 2.5, 2.2  # documents of a soak that fit the device and host memory
_SLACK = 2**27  # bytes by which the process may grow
_SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 1}

NOTE = (
    "Documents of {tokens:,} random tokens; `fit`: how many of them the device holds. A step is the mean of {steps} "
    "with `rows` answers about different documents, as a client gets them; `over floor`: over weights and documents "
    "at the rate of a device copy, {copied:,.0f} GB/s. Load: {requests} requests, a Poisson process of {rate:g} per "
    "second (seed {seed}); a share of {prompts:g} has {prompt_tokens:,} tokens of its own, the others ask "
    "{question_tokens} tokens about a random document; answers have at most {answer_tokens} tokens. `first token` "
    "runs from the arrival, `inter-token` between tokens of an answer. {shares}"
)
SOAK_NOTE = (
    "{documents} documents of {tokens:,} tokens in float32, few of which fit memory, {rows} rows, seed {seed}. Clients "
    "send requests one after the other; answers are compared with those of `generate`, of a cancelled one the tokens "
    "so far. `grown MB`: growth of the process in the second half of the time. {shares}"
)


@dataclasses.dataclass(frozen=True)
class Load:
    """Documents and requests, as options of the command."""

    tokens: Annotated[int, typer.Option(help="Tokens of a document.", min=1)] = 2**17
    documents: Annotated[int, typer.Option(help="Documents, as many as fit.", min=1)] = 16
    rows: Annotated[int, typer.Option(help="Answers at once.", min=1)] = 16
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=2)] = 512
    question_tokens: Annotated[int, typer.Option(help="Tokens of a question.", min=1)] = 64
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt without a document.", min=1)] = 2048
    prompts: Annotated[float, typer.Option(help="Share of requests without a document.", min=0, max=1)] = 0.2
    rate: Annotated[float, typer.Option(help="Requests per second.", min=0.001)] = 4.0
    requests: Annotated[int, typer.Option(help="Requests.", min=2)] = 64
    seed: common.SeedOption = 0

    @property
    def room(self) -> int:
        """Tokens of a question and its answer, or of timed steps."""
        return self.question_tokens + max(self.answer_tokens, STEPS + 4 * self.rows)


class TokenTimes:
    """Arrival times of a stream's tokens."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.times = [(time.perf_counter(), len(stream.tokens))]  # with tokens so far
        stream.listen(self._note)

    def _note(self) -> None:
        if (count := len(self.stream.tokens)) > self.times[-1][1]:
            self.times.append((time.perf_counter(), count))

    def wait(self, tokens: int) -> None:
        """Waits for a number of tokens; TimeoutError, or the stream's error, where they do not come."""
        end = time.monotonic() + _SECONDS
        while not self.stream.ended and self.times[-1][1] < tokens and time.monotonic() < end:
            time.sleep(1e-3)
        if self.stream.ended:
            self.stream.result()
            self._note()
        came = self.times[-1][1]
        require(came >= tokens, f"{came} of {tokens} tokens came within {_SECONDS:.0f} seconds", TimeoutError)

    def gaps(self) -> list[float]:
        """Seconds between arrivals."""
        return [after - before for (before, count), (after, _) in itertools.pairwise(self.times) if count]


class Served:
    """An engine with documents of random tokens."""

    def __init__(self, lm: LM, load: Load, backend: str) -> None:
        self.lm, self.load, self._random = lm, load, np.random.default_rng(load.seed)
        self.engine = Engine(lm, max_rows=load.rows, answer_tokens=load.room, backend=backend)
        self.read_seconds: list[float] = []
        free = self.engine.document_pages.free
        self.ids = [self._read()]
        each = free - self.engine.document_pages.free
        self.fit = self.engine.document_pages.total // max(each, 1)
        self.ids += [self._read() for _ in range(min(load.documents, self.fit) - 1)]
        self.bytes_each = self.engine.document(self.ids[0]).num_bytes

    def documents(self) -> common.Row:
        """How many documents fit, and how long one takes to read."""
        seconds = statistics.median(self.read_seconds)
        return {"documents": len(self.ids), "fit": self.fit, "GB each": self.bytes_each / 1e9, "read s": seconds}

    def time_steps(self, rows: int, copied: float) -> common.Row:
        """A decoding step with `rows` answers about different documents; `copied` is the rate of the floor."""
        ids = [self.ids[i % len(self.ids)] for i in range(rows)]
        answers = [TokenTimes(self.ask(id_, STEPS + 4 * rows)) for id_ in ids]
        for each in answers:
            each.wait(1)
        last = answers[-1]
        (begin, before), target = last.times[-1], last.times[-1][1] + STEPS
        last.wait(target)
        end, after = next(each for each in last.times if each[1] >= target)
        for each in answers:
            each.stream.cancel()
        self.engine.idle(_SECONDS)
        step = (end - begin) / (after - before)
        floor = (shapes.weight_bytes(self.lm) + rows * self.bytes_each) / copied
        sizes = {"rows": rows, "documents": len(set(ids)), "ms/step": 1e3 * step}
        return {**sizes, "over floor": step / floor, "tokens/s": rows / step}

    def time_load(self) -> common.Row:
        """Latency of requests that arrive at random; a few requests before compile their programs."""
        load = self.load
        self._requests(min(8, load.requests))
        begin = time.perf_counter()
        found = self._requests(load.requests)
        seconds = time.perf_counter() - begin
        first, gaps = [each for each, _ in found], [gap for _, times in found for gap in times.gaps()]
        return {
            "requests": load.requests,
            "per second": load.rate,
            **common.percentiles("first token", first),
            **common.percentiles("inter-token", gaps),
            "tokens/s": sum(len(times.stream.tokens) for _, times in found) / seconds,
        }

    def _requests(self, count: int) -> list[tuple[float, TokenTimes]]:
        """Seconds to the first token, and the times of all tokens, of requests that arrive at random."""
        load, random = self.load, np.random.default_rng(self.load.seed)
        about = [None if random.random() < load.prompts else random.choice(self.ids) for _ in range(count)]
        lengths = random.integers(max(2, load.answer_tokens // 4), load.answer_tokens + 1, count).tolist()

        def request(number: int, at: float) -> tuple[float, TokenTimes]:
            times = TokenTimes(self.ask(about[number], lengths[number]))
            times.stream.result(_SECONDS)
            return times.stream.first_token_at - at, times

        arrivals = np.cumsum(random.exponential(1 / load.rate, count)) + time.perf_counter()
        with ThreadPoolExecutor(count) as pool:  # so that no request delays another
            calls = []
            for number, at in enumerate(arrivals.tolist()):
                time.sleep(max(0.0, at - time.perf_counter()))
                calls.append(pool.submit(request, number, at))
            return [call.result() for call in calls]

    def ask(self, id_: str | None, new_tokens: int) -> Stream:
        """A question of random tokens, or without a document a prompt."""
        tokens = self._tokens(self.load.prompt_tokens if id_ is None else self.load.question_tokens)
        return self.engine.ask(id_, tokens, max_new_tokens=new_tokens, stop_token_ids=())

    def _read(self) -> str:
        begin = time.perf_counter()
        id_ = self.engine.read(self._tokens(self.load.tokens))
        self.engine.wait(id_, _SECONDS)
        self.read_seconds.append(time.perf_counter() - begin)
        return id_

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(0, self.lm.config.vocab_size, count).tolist()


class Soak:
    """Clients of an engine whose documents do not fit memory; each answer must be `generate`'s."""

    def __init__(self, lm: LM, load: Load, backend: str, disk: Path) -> None:
        self.lm, self.load, self.backend = lm, load, backend
        sizes = (load.documents, load.tokens), (_QUESTIONS, load.question_tokens), (_QUESTIONS, load.prompt_tokens)
        draw, words = np.random.default_rng(load.seed).integers, lm.config.vocab_size
        self.documents, self.questions, self.prompts = (draw(1, words, size).tolist() for size in sizes)
        self.contexts = [tca_jax.prefill(lm, each, backend=backend) for each in self.documents]
        room = int(_DEVICE_ROOM * lm.cache_layout(1, load.tokens).num_pages)
        self.options: common.Row = {"max_rows": load.rows, "pages": room, "answer_tokens": load.room, "disk": disk}
        self.options |= {"host_memory": int(_HOST_ROOM * self.contexts[0].stats.kv_cache_bytes), "backend": backend}
        self.outcomes, self.first_tokens = collections.Counter[str](), list[float]()
        self._answers: dict[tuple[int | None, int, bool], list[int]] = {}
        self._lock = threading.RLock()

    def run(self, seconds: float) -> tuple[common.Row, list[str]]:
        """Load for so many seconds; also all problems."""
        stopping, problems, count = threading.Event(), list[str](), self.load.rows + 2
        first, *others = (random.Random(self.load.seed + number) for number in range(1 + count))
        with Engine(self.lm, **self.options) as engine, ThreadPoolExecutor(count) as pool:
            for _ in range(4 * self.load.documents):  # compile
                self.outcomes[self._request(engine, first)] += 1
            clients = [pool.submit(self._send, engine, each, stopping) for each in others]
            time.sleep(seconds / 2)
            half = resident_bytes()
            time.sleep(seconds / 2)
            grown = resident_bytes() - half
            stopping.set()
            for client in clients:
                client.result(_SECONDS)
            problems += [] if engine.idle(_SECONDS) else ["the engine is not idle"]
            pages = engine.answer_pages
            problems += [] if pages.free == pages.total else [f"pages of answers stay taken: {pages}"]
            ids = {engine.wait(engine.read(each), _SECONDS, stored=True).id for each in self.documents}
        with Engine(self.lm, **self.options) as engine:
            lost = ids - {each.id for each in engine.documents()}
            problems += [f"{len(lost)} documents are lost"] if lost else []
        problems += [f"the process grew by {grown / 1e6:.0f} MB"] if grown > _SLACK else []
        problems += [f"{self.outcomes[bad]} {bad}" for bad in ("other answers", "errors") if self.outcomes[bad]]
        row = {"s": seconds, "requests": self.outcomes.total(), **self.outcomes}
        row |= common.percentiles("first token", self.first_tokens)
        return {**row, "process MB": resident_bytes() / 1e6, "grown MB": grown / 1e6}, problems

    def _send(self, engine: Engine, random: random.Random, stopping: threading.Event) -> None:
        """Requests, one after the other, until `stopping`."""
        while not stopping.wait(random.expovariate(50)):
            try:
                outcome = self._request(engine, random)
            except Exception:
                traceback.print_exc()
                outcome = "errors"
            with self._lock:
                self.outcomes[outcome] += 1

    def _request(self, engine: Engine, random: random.Random) -> str:
        """The outcome of a random request: greedy or sampled, complete or cancelled."""
        number = None if random.random() < self.load.prompts else random.randrange(len(self.documents))
        question, cancelled = random.randrange(_QUESTIONS), random.random() < 0.2
        asked = number, question, not cancelled and random.random() < 0.5
        id_ = None if number is None else engine.read(self.documents[number])
        prompt, options = self._prompt(*asked)
        stream = engine.ask(id_, prompt, **options)
        if cancelled:
            TokenTimes(stream).wait(random.randrange(1, self.load.answer_tokens))
            stream.cancel()
        out, expected = stream.result(_SECONDS), self._expected(*asked)
        if out.tokens != (expected[: len(out.tokens)] if cancelled else expected):
            print(f"other answer: {asked}: {out.tokens} instead of {expected}", file=sys.stderr, flush=True)
            return "other answers"
        self.first_tokens.append(out.seconds_to_first_token)
        return "cancelled" if cancelled else "equal"

    def _prompt(self, document: int | None, question: int, sampled: bool) -> tuple[list[int], common.Row]:
        options = {**_SAMPLED, "stop_token_ids": (3, 5)} if sampled else {"stop_token_ids": ()}
        prompt = (self.prompts if document is None else self.questions)[question]
        return prompt, {"max_new_tokens": self.load.answer_tokens, **options}

    def _expected(self, document: int | None, question: int, sampled: bool) -> list[int]:
        """The tokens of `generate`, computed once."""
        with self._lock:
            if (asked := (document, question, sampled)) not in self._answers:
                prompt, options = self._prompt(*asked)
                context = None if document is None else self.contexts[document]
                out = tca_jax.generate(self.lm, prompt, context=context, backend=self.backend, **options)
                self._answers[asked] = out.tokens[0]
            return self._answers[asked]


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@with_options
def main(
    model: Annotated[str, typer.Option(help="As --models of bench end-to-end.")] = "llama3.1-8b",
    profile: Annotated[str | None, typer.Option(help="Profile of a checkpoint.", show_default="none")] = None,
    shares: shapes.BlockSharesOption = None,
    load: Load = Load(),
    minutes: Annotated[
        float | None, typer.Option(help="Soak: check every answer for so long, and that memory stays flat.", min=0.01)
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of random weights; all by default.", min=1)] = None,
    backend: BackendOption = "auto",
    window: common.WindowOption = tca_jax.TCAConfig.window,
    out: common.OutOption = common.RESULTS,
    name: common.NameOption = "serve",
) -> None:
    """Time an engine that serves many long documents; with --minutes, look for wrong answers and leaks.

    A soak takes the last method. It fails on an answer that is not `generate`'s, a request that does not end, pages
    that stay taken, a lost document, or memory that grows.

    Example: [bold]tca-jax bench serve --block-shares 0.1 --rate 4 --requests 200[/]
    """
    config = common.tca_config(window)
    common.check_lengths([load.tokens], config, out, "--tokens")
    random_weights = f"--profile {profile}: {model} has random weights; pass --block-shares"
    require(not profile or model not in shapes.CONFIGS, random_weights)
    if minutes:  # a row's tokens must not depend on the number of rows
        jax.config.update("jax_default_matmul_precision", "highest")
    positions = max(load.tokens, load.prompt_tokens) + load.room
    dtype = "float32" if minutes else None
    lm = shapes.open_model(model, profile, layers=layers, max_positions=positions, dtype=dtype)
    shares = shares or ([] if profile else [shapes.Share(0.25), shapes.Share(0.1)])
    sizes_of_model = lm.config.num_kv_heads, lm.config.num_layers
    tested = shapes.named_methods(config, shares, *sizes_of_model, profile=lm.method if profile else None)
    sizes = {**dataclasses.asdict(load), "steps": STEPS, "shares": shapes.describe_shares(config)}
    if minutes:
        results = common.Results(out, name, f"Soak of {lm.name}", SOAK_NOTE.format(**sizes))
        attention, method = list(tested.items())[-1]
        with tempfile.TemporaryDirectory() as disk:
            row, problems = Soak(lm.with_method(method), load, backend, Path(disk)).run(60 * minutes)
        results.add("Soak", {"attention": attention, **row})
        results.finish("Failed: " + "; ".join(problems) + "." if problems else "Nothing failed.")
        require(not problems, "; ".join(problems))
        return
    copied = common.copy_rate(_COPY_REPEATS)
    results = common.Results(out, name, f"Serving {lm.name}", NOTE.format(**sizes, copied=copied / 1e9))
    for attention, method in tested.items():
        served = Served(lm.with_method(method), load, backend)
        with served.engine:
            results.add("Documents", {"attention": attention, **served.documents()})
            for each in sorted({1, min(load.rows, len(served.ids))}):
                results.add("Steps", {"attention": attention, **served.time_steps(each, copied)})
            results.add("Load", {"attention": attention, **served.time_load()})
        del served
    results.finish()
