"""`tca-jax bench serve`: an engine with many documents: steps by rows, requests at random times, and a soak."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import gc
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer

import tca_jax
from tca_jax.cli.options import BackendOption, MeshOption, SeedOption, with_options
from tca_jax.engine.lm import LM
from tca_jax.engine.placement import parse_mesh
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
_SLACK = 2**26  # bytes by which the process may grow in each third of a soak
_Request = tuple[list[int] | None, list[int], common.Row, list[int]]  # document, prompt, options, expected answer
_SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 1}

NOTE = (
    "Documents of {tokens:,} to {longest:,} random tokens; `fit`: how many of them the device holds. A step is the "
    "mean of {steps} with `rows` answers about different documents, as a client gets them; `over floor`: over weights "
    "and documents at the rate of a device copy, {copied:,.0f} GB/s. Load: {requests} requests, a Poisson process "
    "(seed {seed}); a share of {prompts:g} has {prompt_tokens:,} tokens of its own, {new:g} ask about a document that "
    "has to be read first, the others {question_tokens} tokens about a random one; answers have at most "
    "{answer_tokens} tokens. `first token` runs from the arrival (of questions about documents that were read), "
    "`inter-token` between tokens of an answer. {shares}"
)
SOAK_NOTE = (
    "{documents} documents of {tokens:,} tokens in float32, few of which fit memory, {rows} rows, seed {seed}. Clients "
    "send requests one after the other; answers are compared with those of `generate`, of a cancelled one the tokens "
    "so far. `process MB`: the process at the end, without documents; `grown MB`: least growth in a third. {shares}"
)


@dataclasses.dataclass(frozen=True)
class Load:
    """Documents and requests, as options of the command."""

    tokens: Annotated[int, typer.Option(help="Least tokens of a document.", min=1)] = 2**17
    most_tokens: Annotated[int | None, typer.Option(help="Most.", show_default="--tokens", min=1)] = None
    documents: Annotated[int, typer.Option(help="Documents, as many as fit.", min=1)] = 16
    rows: Annotated[int, typer.Option(help="Answers at once.", min=1)] = 16
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=2)] = 512
    question_tokens: Annotated[int, typer.Option(help="Tokens of a question.", min=1)] = 64
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt without a document.", min=1)] = 2048
    prompts: Annotated[float, typer.Option(help="Share of requests without a document.", min=0, max=1)] = 0.2
    new: Annotated[float, typer.Option(help="Share about a document that was not read yet.", min=0, max=1)] = 0
    requests: Annotated[int, typer.Option(help="Requests.", min=2)] = 64
    seed: SeedOption = 0

    @property
    def longest(self) -> int:
        """Most tokens of a document."""
        return max(self.tokens, self.most_tokens or 0)

    @property
    def room(self) -> int:
        """Tokens of a question and its answer, or of timed steps."""
        return self.question_tokens + max(self.answer_tokens, 2 * STEPS + 4 * self.rows)


class Served:
    """An engine with documents of random tokens."""

    def __init__(self, lm: LM, load: Load, backend: str) -> None:
        self.lm, self.load, self._random, self._compiled = lm, load, np.random.default_rng(load.seed), False
        self.engine = Engine(lm, max_rows=load.rows, answer_tokens=load.room, backend=backend)
        self.ids, seconds, read, pages = list[str](), list[float](), 0, self.engine.document_pages.free
        for length in self._lengths(self._random, load.documents):
            free = self.engine.document_pages.free
            if read and (pages - free) * length > free * read:  # as many pages a token as before
                break
            begin = time.perf_counter()
            self.ids.append(self.engine.read(self._tokens(length)))
            self.engine.wait(self.ids[-1], _SECONDS)
            seconds.append(time.perf_counter() - begin)
            read += length
        self.bytes_each = statistics.mean(self.engine.document(id_).num_bytes for id_ in self.ids)
        self.documents: common.Row = {"documents": len(self.ids), "GB each": self.bytes_each / 1e9}
        fit = pages * len(self.ids) // (pages - self.engine.document_pages.free)
        self.documents |= {"fit": fit, "read s": statistics.median(seconds)}

    def time_steps(self, rows: int, copied: float) -> common.Row:
        """A decoding step with `rows` answers about different documents; `copied` is the rate of its floor."""
        ids = [self.ids[i % len(self.ids)] for i in range(rows)]
        streams = [self._ask(id_, 2 * STEPS + 4 * rows) for id_ in ids]
        for stream in streams:
            wait_for(stream, 1)
        before = len(streams[-1].tokens) + STEPS  # until then, all programs of steps are there
        wait_for(streams[-1], before)
        begin = time.perf_counter()
        wait_for(streams[-1], before + STEPS)
        step = (time.perf_counter() - begin) / STEPS
        for stream in streams:
            stream.cancel()
        self.engine.idle(_SECONDS)
        floor = (shapes.weight_bytes(self.lm) + rows * self.bytes_each) / copied
        sizes = {"rows": rows, "documents": len(set(ids)), "ms/step": 1e3 * step}
        return {**sizes, "over floor": step / floor, "tokens/s": rows / step}

    def time_load(self, rate: float) -> common.Row:
        """Latency of requests that arrive at random; the first call also compiles their programs, untimed."""
        if not self._compiled:
            self._requests(rate)
            self._compiled = True
        begin = time.perf_counter()
        of_new, first, gaps, tokens = zip(*self._requests(rate), strict=True)
        found: common.Row = {"per second": rate, "requests": self.load.requests}
        for name, kind in ({"first token": False} | ({"new document's": True} if any(of_new) else {})).items():
            found |= common.percentiles(name, [each for new, each in zip(of_new, first, strict=True) if new == kind])
        found |= common.percentiles("inter-token", list(itertools.chain.from_iterable(gaps)))
        return {**found, "tokens/s": sum(tokens) / (time.perf_counter() - begin)}

    def _requests(self, rate: float) -> list[tuple[bool, float, list[float], int]]:
        """Of requests of a Poisson process: about a new document or not, seconds to the first token, gaps, tokens."""
        load, random, count = self.load, np.random.default_rng(self.load.seed), self.load.requests
        kinds = random.choice(3, count, p=[load.prompts, load.new, 1 - load.prompts - load.new])
        known = random.choice(self.ids, count).tolist()
        sizes = self._lengths(random, count)
        new = [self._tokens(size) if kind == 1 else None for kind, size in zip(kinds, sizes, strict=True)]
        lengths = random.integers(max(2, load.answer_tokens // 4), load.answer_tokens + 1, count).tolist()

        def request(number: int, at: float) -> tuple[bool, float, list[float], int]:
            document = new[number]
            id_ = [None, document and self.engine.read(document), known[number]][kinds[number]]
            stream, times = self._ask(id_, lengths[number]), list[float]()
            with stream.listening(lambda: times.append(time.perf_counter())):
                tokens = stream.result(_SECONDS).tokens
            if document:
                self.engine.forget(id_)
            gaps = [after - before for before, after in itertools.pairwise(times[:-1])]  # the last one is the end
            return document is not None, stream.first_token_at - at, gaps, len(tokens)

        arrivals = np.cumsum(random.exponential(1 / rate, count)) + time.perf_counter()
        with ThreadPoolExecutor(count) as pool:  # so that no request delays another
            calls = []
            for number, at in enumerate(arrivals.tolist()):
                time.sleep(max(0.0, at - time.perf_counter()))
                calls.append(pool.submit(request, number, at))
            return [call.result() for call in calls]

    def _ask(self, id_: str | None, new_tokens: int) -> Stream:
        """A question of random tokens, or without a document a prompt."""
        tokens = self._tokens(self.load.prompt_tokens if id_ is None else self.load.question_tokens)
        return self.engine.ask(id_, tokens, max_new_tokens=new_tokens, stop_token_ids=())

    def _lengths(self, random: np.random.Generator, count: int) -> list[int]:
        """Tokens of documents."""
        return random.integers(self.load.tokens, self.load.longest + 1, count).tolist()

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(0, self.lm.config.vocab_size, count).tolist()


def wait_for(stream: Stream, tokens: int) -> None:
    """Waits for a number of tokens of an answer, or its end."""
    end = time.monotonic() + _SECONDS
    while len(stream.tokens) < tokens and not stream.ended:
        require(time.monotonic() < end, f"no {tokens} tokens came within {_SECONDS:.0f} seconds", TimeoutError)
        time.sleep(1e-3)


class Soak:
    """Clients of an engine whose documents do not fit memory; each answer must be `generate`'s."""

    def __init__(self, lm: LM, load: Load, backend: str, disk: Path) -> None:
        sizes = (load.documents, load.tokens), (_QUESTIONS, load.question_tokens), (_QUESTIONS, load.prompt_tokens)
        draw, words = np.random.default_rng(load.seed).integers, lm.config.vocab_size
        self.documents, questions, prompts = (draw(1, words, size).tolist() for size in sizes)
        self.lm, self.load = lm, load
        self.requests: list[_Request] = []
        options: common.Row = {"max_new_tokens": load.answer_tokens, "stop_token_ids": ()}
        for document in (*self.documents, None):
            context = None if document is None else tca_jax.prefill(lm, document, backend=backend)
            for prompt, more in itertools.product(prompts if document is None else questions, ({}, _SAMPLED)):
                out = tca_jax.generate(lm, prompt, context=context, backend=backend, **options | more)
                self.requests.append((document, prompt, options | more, out.tokens[0]))
        layout = lm.cache_layout(1, load.tokens)
        host_memory = int(_HOST_ROOM * layout.num_bytes(lm.config.head_dim, lm.cache_dtype))
        self.options: common.Row = {"max_rows": load.rows, "answer_tokens": load.room, "host_memory": host_memory}
        self.options |= {"pages": int(_DEVICE_ROOM * layout.num_pages), "disk": disk, "backend": backend}
        self.outcomes, self.first_tokens = list[str](), list[float]()

    def run(self, seconds: float) -> tuple[common.Row, list[str]]:
        """Figures of a load that lasts `seconds`, and its problems."""
        with Engine(self.lm, **self.options) as engine:
            for request in self.requests:  # compile
                self._ask(engine, request)
            held = [self._bytes_after(engine, seconds / 3) for _ in range(3)]
            pages = engine.answer_pages
            ids = {engine.wait(engine.read(each), _SECONDS, stored=True).id for each in self.documents}
        with Engine(self.lm, **self.options) as engine:
            lost = ids - {each.id for each in engine.documents()}
        # The least of two: a leak is in both, a pool that had to hold more copies than before in one.
        outcomes, grown = collections.Counter(self.outcomes), min(held[1] - held[0], held[2] - held[1])
        bad = {each: outcomes[each] for each in ("other answers", "errors")} | {"lost documents": len(lost)}
        bad |= {"pages that answers keep": pages.total - pages.free, "MB of growth": grown // 10**6 * (grown > _SLACK)}
        problems = [f"{count:,} {kind}" for kind, count in bad.items() if count]
        row = {"s": seconds, "requests": outcomes.total(), **outcomes}
        row |= common.percentiles("first token", self.first_tokens)
        return {**row, "process MB": held[-1] / 1e6, "grown MB": grown / 1e6}, problems

    def _bytes_after(self, engine: Engine, seconds: float) -> int:
        """Memory of this process after a load, without documents: those that move make it swing by several."""
        end, clients = time.perf_counter() + seconds, self.load.rows + 2
        with ThreadPoolExecutor(clients) as pool:
            seeds = [random.Random(self.load.seed + number) for number in range(clients)]
            list(pool.map(lambda draw: self._send(engine, draw, end), seeds))  # raises what a client raised
        require(engine.idle(_SECONDS), f"the engine is not idle after {_SECONDS:.0f} seconds", TimeoutError)
        for document in engine.documents():
            engine.forget(document.id)
        time.sleep(5)  # moves end
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _send(self, engine: Engine, random: random.Random, end: float) -> None:
        """Requests, one after the other, until `end`; a fifth is cancelled."""
        while time.perf_counter() < end:
            time.sleep(random.expovariate(50))
            cancelled = random.randrange(1, self.load.answer_tokens) if random.random() < 0.2 else None
            try:
                self._ask(engine, random.choice(self.requests), cancelled)
            except Exception:
                traceback.print_exc()
                self.outcomes.append("errors")

    def _ask(self, engine: Engine, request: _Request, cancelled: int | None = None) -> None:
        """A request, which may be cancelled after some tokens."""
        document, prompt, options, expected = request
        stream = engine.ask(None if document is None else engine.read(document), prompt, **options)
        if cancelled is not None:
            wait_for(stream, cancelled)
            stream.cancel()
        out = stream.result(_SECONDS)
        self.first_tokens.append(out.seconds_to_first_token)
        if out.tokens == (expected if cancelled is None else expected[: len(out.tokens)]):
            self.outcomes.append("equal" if cancelled is None else "cancelled")
        else:
            self.outcomes.append("other answers")
            print(f"other answer: {prompt}: {out.tokens} instead of {expected}", file=sys.stderr, flush=True)


@with_options
def main(
    model: Annotated[str, typer.Option(help="As --models of bench end-to-end.")] = "llama3.1-8b",
    profile: Annotated[str | None, typer.Option(help="Profile of a checkpoint.", show_default="none")] = None,
    shares: shapes.BlockSharesOption = None,
    worth: shapes.WorthOption = None,
    load: Load = Load(),
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests per second; may be repeated.", show_default="4", min=0.001)
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Soak: check every answer for so long, and that memory stays flat.", min=0.01)
    ] = None,
    mesh: MeshOption = None,
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
    common.check_lengths([load.tokens, load.longest], config, out, "--tokens")
    require(load.prompts + load.new <= 1, f"--prompts {load.prompts:g} --new {load.new:g}: must be at most 1 in all")
    random_weights = f"--profile {profile}: {model} has random weights; pass --block-shares"
    require(not profile or model not in shapes.CONFIGS, random_weights)
    if minutes:  # a row's tokens must not depend on the number of rows
        jax.config.update("jax_default_matmul_precision", "highest")
    options = {"mesh": parse_mesh(mesh, "--mesh") if mesh else None, "dtype": "float32" if minutes else None}
    positions = {"max_positions": max(load.longest, load.prompt_tokens) + load.room}
    lm = shapes.open_model(model, profile, sizes=positions, **options)
    shares = shares or ([] if profile or worth else [0.25, 0.1])
    tested = shapes.named_models(lm, config, shares, worth or (), load.longest)
    shares_text = shapes.describe_shares(config)
    sizes = dataclasses.asdict(load) | {"longest": load.longest, "steps": STEPS, "shares": shares_text}
    if minutes:
        results = common.Results(out, name, f"Soak of {lm.name}", SOAK_NOTE.format(**sizes))
        attention, of_method = list(tested.items())[-1]
        with tempfile.TemporaryDirectory() as disk:
            row, problems = Soak(of_method, load, backend, Path(disk)).run(60 * minutes)
        results.add("Soak", {"attention": attention, **row})
        results.finish("Failed: " + "; ".join(problems) + "." if problems else "Nothing failed.")
        require(not problems, "; ".join(problems))
        return
    copied = common.copy_rate(_COPY_REPEATS) * (1 if lm.mesh is None else lm.mesh.size)
    results = common.Results(out, name, f"Serving {lm.name}", NOTE.format(**sizes, copied=copied / 1e9))
    for attention, of_method in tested.items():
        served = Served(of_method, load, backend)
        with served.engine:
            results.add("Documents", {"attention": attention, **shapes.mesh_entry(lm), **served.documents})
            for each in sorted({1, min(load.rows, len(served.ids))}):
                results.add("Steps", {"attention": attention, **served.time_steps(each, copied)})
            for per_second in rate or [4.0]:
                results.add("Load", {"attention": attention, **served.time_load(per_second)})
        del served
    results.finish()
