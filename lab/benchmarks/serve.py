"""`tca-jax bench serve`: an engine with many long documents: steps by rows, requests at random times."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, TypeVar

import numpy as np
import typer

import tca_jax
from tca_jax.cli.options import BackendOption, with_options
from tca_jax.engine.lm import LM
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks import common
from tca_jax.lab.benchmarks import models as shapes
from tca_jax.serve import Engine
from tca_jax.serve.streams import Stream

STEPS = 128  # timed steps; a block leaves the window of every row once

_COPY_REPEATS = 7
_SECONDS = 600.0  # longest wait for the engine

NOTE = (
    "Documents of {tokens:,} random tokens; `fit`: how many of them the device holds. A step is the mean of {steps} "
    "with `rows` answers about different documents, as a client gets them; `over floor`: over weights and documents "
    "at the rate of a device copy, {copied:,.0f} GB/s. Load: {requests} requests, a Poisson process of {rate:g} per "
    "second (seed {seed}); a share of {prompts:g} has {prompt_tokens:,} tokens of its own, the others ask "
    "{question_tokens} tokens about a random document; answers have at most {answer_tokens} tokens. `first token` "
    "runs from the arrival, `inter-token` between tokens of an answer. {shares}"
)
T = TypeVar("T")


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


class TokenTimes:
    """Arrival times of a stream's tokens."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.times: list[tuple[float, int]] = []  # seconds of perf_counter, tokens so far
        self._changed = threading.Condition()
        stream.listen(self._note)
        self._note()

    def _note(self) -> None:
        with self._changed:
            count = len(self.stream.tokens)
            if count > self._count:
                self.times.append((time.perf_counter(), count))
            self._changed.notify_all()

    @property
    def _count(self) -> int:
        return self.times[-1][1] if self.times else 0

    def wait(self, tokens: int, timeout: float = _SECONDS) -> None:
        """Waits for a number of tokens; TimeoutError, or the stream's error, where they do not come."""
        with self._changed:
            self._changed.wait_for(lambda: self.stream.ended or self._count >= tokens, timeout)
        if self._count < tokens:
            if self.stream.ended:
                self.stream.result()
            raise TimeoutError(f"{self._count} of {tokens} tokens came within {timeout:.0f} seconds")

    def gaps(self) -> list[float]:
        """Seconds between arrivals."""
        return [after - before for (before, _), (after, _) in itertools.pairwise(self.times)]


class Served:
    """An engine with documents of random tokens."""

    def __init__(self, lm: LM, load: Load, backend: str) -> None:
        self.lm, self.load, self._random = lm, load, np.random.default_rng(load.seed)
        room = load.question_tokens + max(load.answer_tokens, STEPS + 4 * load.rows)
        self.engine = Engine(lm, max_rows=load.rows, answer_tokens=room, backend=backend)
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
        streams = [self.ask(id_, STEPS + 4 * rows) for id_ in ids]
        last = TokenTimes(streams[-1])
        for stream in streams:
            TokenTimes(stream).wait(1)
        last.wait(1)
        (begin, before), target = last.times[-1], last.times[-1][1] + STEPS
        last.wait(target)
        end, after = next(each for each in last.times if each[1] >= target)
        for stream in streams:
            stream.cancel()
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

        return at_random(count, load.rate, load.seed, request)

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


def at_random(count: int, rate: float, seed: int, call: Callable[[int, float], T]) -> list[T]:
    """Calls `call(number, moment)` at the times of a Poisson process, in threads, so that no call delays another."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)) + time.perf_counter()
    calls: list[Future[T]] = []
    with ThreadPoolExecutor(count) as pool:
        for number, at in enumerate(times.tolist()):
            time.sleep(max(0.0, at - time.perf_counter()))
            calls.append(pool.submit(call, number, at))
        return [each.result() for each in calls]


@with_options
def main(
    model: Annotated[str, typer.Option(help="As --models of bench end-to-end.")] = "llama3.1-8b",
    profile: Annotated[str | None, typer.Option(help="Profile of a checkpoint.", show_default="none")] = None,
    shares: shapes.BlockSharesOption = None,
    full: Annotated[bool, typer.Option(help="Measure full attention, too.")] = True,
    load: Load = Load(),
    layers: Annotated[int | None, typer.Option(help="Layers of random weights; all by default.", min=1)] = None,
    backend: BackendOption = "auto",
    window: common.WindowOption = tca_jax.TCAConfig.window,
    copy_bytes: common.CopyBytesOption = common.COPIED_BYTES,
    out: common.OutOption = common.RESULTS,
    name: common.NameOption = "serve",
) -> None:
    """Time an engine that serves many long documents.

    Example: [bold]tca-jax bench serve --block-shares 0.1 --rate 4 --requests 200[/]
    """
    config = common.tca_config(window)
    common.check_lengths([load.tokens], config, out, "--tokens")
    if model in shapes.CONFIGS and profile:
        raise UserError(f"--profile {profile}: {model} has random weights; pass --block-shares")
    own = load.question_tokens + max(load.answer_tokens, STEPS + 4 * load.rows)
    lm = shapes.open_model(model, profile, layers=layers, max_positions=max(load.tokens, load.prompt_tokens) + own)
    shares = shares or ([] if profile else [shapes.Share(0.25), shapes.Share(0.1)])
    sizes_of_model = lm.config.num_kv_heads, lm.config.num_layers
    tested = shapes.named_methods(config, shares, *sizes_of_model, full=full, profile=lm.method if profile else None)
    copied = common.copy_rate(copy_bytes, _COPY_REPEATS)
    sizes = {**dataclasses.asdict(load), "steps": STEPS, "copied": copied / 1e9}
    note = NOTE.format(**sizes, shares=shapes.describe_shares(config))
    results = common.Results(out, name, f"Serving {lm.name}", note)
    for attention, method in tested.items():
        served = Served(lm.with_method(method), load, backend)
        with served.engine:
            results.add("Documents", {"attention": attention, **served.documents()})
            for each in sorted({1, min(load.rows, len(served.ids))}):
                results.add("Steps", {"attention": attention, **served.time_steps(each, copied)})
            results.add("Load", {"attention": attention, **served.time_load()})
        del served
    results.finish()
