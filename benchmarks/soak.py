"""Hundreds of generations in one process: memory stays flat, no program is compiled twice, answers repeat.

tca-jax bench soak                                   # 500 generations of the shipped model, minutes
tca-jax bench soak --generations 20 --lengths 96     # a look
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import sys
import time
import traceback
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

import tca_jax
from tca_jax import methods
from tca_jax.benchmarks.common import COMPILED_AT_ONCE, write_results
from tca_jax.benchmarks.options import RESULTS, BackendOption, LengthsOption, NameOption, OutOption
from tca_jax.engine.buckets import bucket_length
from tca_jax.engine.contexts import Context, compile_prefill
from tca_jax.engine.extending import num_columns
from tca_jax.engine.lm import LM
from tca_jax.engine.request import Request
from tca_jax.engine.sampling import Sampling

_LENGTHS = (96, 640, 1408, 3072)
_REPEATED = 0.4  # share of requests that an earlier one is asked again
_STREAMED = 0.3  # share of the repeats that are streamed, where streams know the options
_PAIRS = 2  # of methods, joined by "+"
_QUESTION_TOKENS = 48  # most of a question
_DEVICE_SLACK, _HOST_SLACK = 2**24, 2**27  # bytes that may come on top: an allocator's rounding, the host's heap
_COMPILED = "/jax/core/compile/backend_compile_duration"

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


@dataclasses.dataclass(frozen=True)
class Shape:
    """All of a request that programs are compiled for.

    Attributes:
        method: Label of the attention method.
        tokens: Bucket of the prompts, or of the document that a context holds.
        prompts: Prompts at once.
        samples: Answers to each.
        room: Bucket of the answers.
        settings: Options of `generate` that are on.
        context: Whether a document is read first, and questions are asked of it.
        appended: Whether more is appended to the document before.
    """

    method: str
    tokens: int
    prompts: int
    samples: int
    room: int
    settings: frozenset[str]
    context: bool = False
    appended: bool = False


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request: its shape, and the seed that all else is drawn from."""

    shape: Shape
    seed: int


@dataclasses.dataclass
class Tally:
    """What happened under one method."""

    requests: int = 0
    repeats: int = 0
    new_tokens: int = 0
    programs: set[Hashable] = dataclasses.field(default_factory=set)
    compiled_again: int = 0
    mismatches: int = 0
    errors: int = 0

    @property
    def failed(self) -> int:
        return self.compiled_again + self.mismatches + self.errors


class Compilations:
    """Counts what XLA compiles in this process, whoever asks for it."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == _COMPILED

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)


@dataclasses.dataclass(frozen=True)
class Question:
    """A request as `generate` takes it.

    Attributes:
        lm: The model under the request's method.
        prompts: Token ids.
        context: What the model has read before.
        samples: Answers to a prompt.
        options: All else.
        key: What its programs depend on.
    """

    lm: LM
    prompts: list[list[int]]
    context: Context | None
    samples: int
    options: dict[str, Any]
    key: Hashable

    def compile(self) -> None:
        """Compiles its programs, and runs nothing."""
        options = {"stop": ()} | self.options
        sampling = {each.name: options.pop(each.name) for each in dataclasses.fields(Sampling) if each.name in options}
        Request.create(
            self.lm, self.prompts, self.context, num_samples=self.samples, sampling=Sampling(**sampling), **options
        ).compile()

    def answer(self, streamed: bool) -> list[list[int]]:
        """Its answers, as a stream where that is asked for and streams know the options."""
        if streamed and self.lm.tokenizer is not None and self.samples == 1 and "logprobs" not in self.options:
            return drain(tca_jax.stream(self.lm, self.prompts, context=self.context, **self.options)).tokens
        out = tca_jax.generate(self.lm, self.prompts, context=self.context, num_samples=self.samples, **self.options)
        return out.tokens


class Soak:
    """The models, the contexts, and the first answers to all requests so far."""

    def __init__(self, models: dict[str, LM], lengths: Sequence[int], shapes: int, seed: int, backend: str) -> None:
        self.models, self.backend = models, backend
        self.rng = random.Random(seed)
        self.shapes = draw_shapes(list(models), lengths, shapes, self.rng)
        self.contexts: dict[tuple[str, int], Context] = {}
        self.first: dict[Asked, list[list[int]]] = {}
        self.seen: set[Hashable] = set()
        self.tallies = {label: Tally() for label in models}
        self.compilations = Compilations()

    def warm_up(self) -> None:
        """Reads the documents and runs a request of every shape, one by one once all are compiled: a GPU's libraries
        may not be loaded by one program while another one's launches are recorded."""
        documents = sorted({(shape.method, shape.tokens) for shape in self.shapes if shape.context})
        read = [(self.models[method], self._document(method, tokens)) for method, tokens in documents]
        requests = [Asked(shape, self.rng.getrandbits(31)) for shape in self.shapes]
        with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
            list(pool.map(lambda of: compile_prefill(*of), read))
            self.contexts = {at: tca_jax.prefill(*of) for at, of in zip(documents, read, strict=True)}
            list(pool.map(Question.compile, [self._question(request) for request in requests]))
        for request in requests:
            self._note(request, *self._caught(request), compiled=True)

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

    def _question(self, request: Asked) -> Question:
        """The prompts and options of a request; what is appended to its context is read here."""
        shape, rng = request.shape, np.random.default_rng(request.seed)
        lm = self.models[shape.method]
        options = draw_options(shape, lm, rng) | {"backend": self.backend}
        key: Hashable = shape
        context = None
        if shape.context:
            context, key = self.contexts[shape.method, shape.tokens], (key, "context")
            if shape.appended:
                more = [self._draw(lm, rng, _QUESTION_TOKENS)]
                key = key, _columns(context, more)
                context = tca_jax.prefill(lm, more, context=context, backend=self.backend)
            prompts = [self._draw(lm, rng, _QUESTION_TOKENS) for _ in range(shape.prompts)]
            key = key, context.layouts, context.tokens.shape, _columns(context, prompts)
        else:
            longest = int(rng.integers(_least(shape.tokens), shape.tokens + 1))
            lengths = [longest, *rng.integers(1, longest + 1, shape.prompts - 1).tolist()]
            prompts = [rng.integers(0, lm.config.vocab_size, n).tolist() for n in lengths]
        return Question(lm, prompts, context, shape.samples, options, key)

    def _document(self, label: str, tokens: int) -> list[list[int]]:
        rng = np.random.default_rng(tokens)
        return [rng.integers(0, self.models[label].config.vocab_size, tokens - 5).tolist()]

    @staticmethod
    def _draw(lm: LM, rng: np.random.Generator, most: int) -> list[int]:
        return rng.integers(0, lm.config.vocab_size, int(rng.integers(1, most + 1))).tolist()


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
    most = int(rng.integers(_least(shape.room), shape.room + 1))
    seed = int(rng.integers(2**32))
    return {"stop_token_ids": ()} | options | {"max_new_tokens": most, "seed": seed}


def drain(pieces: Generator[Any, None, tca_jax.Output]) -> tca_jax.Output:
    """What a stream returns at its end."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            out: tca_jax.Output = end.value
            return out


def _least(bucket: int) -> int:
    """Smallest length of a bucket."""
    return next((n + 1 for n in range(bucket, 0, -1) if bucket_length(n) < bucket), 1)


def _columns(context: Context, prompts: Sequence[Sequence[int]]) -> int:
    """Columns that appended prompts are laid out in."""
    b, held = context.layouts[0].block_size, np.asarray(context.lengths)
    return num_columns(int(np.max(held % b + np.array([len(ids) for ids in prompts]))), b)


def models_under(lm: LM, window: int, rng: random.Random) -> dict[str, LM]:
    """The model under every registered method that needs no calibration, under its profile, and under some pairs."""
    found, options = {}, {}
    for name in methods.names():
        # The window is an option, or one of a configuration, or there is none; a method that asks for more is left out.
        for given in ({"window": window}, {"config": tca_jax.TCAConfig(window=window)}, {}):
            try:
                found[name], options[name] = lm.with_method(name, **given), given
                break
            except ValueError:
                continue
    pairs = list(itertools.permutations(found, 2))
    for prefill, cache in rng.sample(pairs, min(_PAIRS, len(pairs))):
        name = f"{prefill}+{cache}"
        found[name] = lm.with_method(name, **{part: options[part] for part in (prefill, cache)})
    if lm.method.name not in ("full", *found):
        found["profile"] = lm
    return found


def memory() -> tuple[int, bool]:
    """Bytes in use of the device, or of the process where the device does not say; whether it is the device's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_in_use" in stats:
        return int(stats["bytes_in_use"]), True
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096, False


def live_bytes() -> int:
    """Bytes of all arrays that something refers to."""
    return sum(array.nbytes for array in jax.live_arrays())


def main(
    model: Annotated[str, typer.Option(help="Alias, Hub id or folder.")] = "recall-tiny",
    profile: Annotated[
        str | None, typer.Option(help='Profile folder; "shipped" for a shipped model.', show_default="shipped, if any")
    ] = None,
    generations: Annotated[int, typer.Option(help="Calls of generate.", min=1)] = 500,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long.", show_default="none")] = None,
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
    begin = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    lm = tca_jax.load(model, profile=profile or ("shipped" if model == "recall-tiny" else None))
    models = models_under(lm, window, random.Random(seed))
    soak = Soak(models, lengths or _LENGTHS, min(shapes, generations), seed, backend)
    try:
        measured = run(soak, generations, None if minutes is None else begin + 60 * minutes)
    finally:
        soak.compilations.close()
    rows = [
        {
            "method": label,
            "requests": tally.requests,
            "of them repeats": tally.repeats,
            "new tokens": tally.new_tokens,
            "distinct programs": len(tally.programs),
            "compiled again": tally.compiled_again,
            "other answers": tally.mismatches,
            "errors": tally.errors,
        }
        for label, tally in soak.tallies.items()
    ]
    failures = [f"{row['method']}: {n} {what}" for row in rows for what, n in list(row.items())[-3:] if n]
    failures += leaks(measured)
    note = describe(lm, len(soak.shapes), time.monotonic() - begin, failures)
    write_results(name, "Soak", rows, out, note, {"Memory": measured})
    if failures:
        for failure in failures:
            print(f"failed: {failure}", file=sys.stderr)
        raise typer.Exit(1)


def run(soak: Soak, generations: int, deadline: float | None) -> list[dict[str, Any]]:
    """The requests, and the memory before, after each shape has run, and in the end."""
    measured = [_measurement("start", 0)]
    soak.warm_up()
    measured.append(_measurement("each shape has run", 0))
    of_programs = 0
    while sum(tally.requests for tally in soak.tallies.values()) < generations:
        if deadline is not None and time.monotonic() > deadline:
            break
        before = memory()[0]
        if soak.step():
            of_programs += memory()[0] - before
    return [*measured, _measurement("end", of_programs)]


def _measurement(at: str, of_programs: int) -> dict[str, Any]:
    gc.collect()
    held, on_device = memory()
    return {
        "at": at,
        f"MB of the {'device' if on_device else 'process'}": held / 1e6,
        "of them for programs compiled later": of_programs / 1e6,
        "MB of live arrays": live_bytes() / 1e6,
    }


def leaks(measured: list[dict[str, Any]]) -> list[str]:
    """What has grown between the last two measurements beyond the slack."""
    (_, warm, end), found = measured, []
    _, held, later, live = warm
    slack = (_DEVICE_SLACK if "device" in held else _HOST_SLACK) / 1e6
    grown = end[held] - end[later] - warm[held]
    if grown > slack:
        found.append(f"{held} grew by {grown:,.1f}")
    if end[live] > warm[live] * 1.001 + 0.1:
        found.append(f"{live} grew from {warm[live]:,.2f} to {end[live]:,.2f}")
    return found


def describe(lm: LM, shapes: int, seconds: float, failures: Sequence[str]) -> str:
    """What ran, what the columns mean, and what came of it."""
    came = "; ".join(failures) or "nothing failed"
    return (
        f"{lm.name}, {shapes} shapes of requests (method, lengths, batch, samples, settings, half of them over "
        f"contexts), random lengths and numbers within each, {seconds:,.0f} s in all: {came}. `distinct programs` "
        "counts the combinations that may compile; `compiled again` the requests for which something was compiled "
        "though their combination had run before; `other answers` the repeats whose tokens were not those of the first "
        "time, sampled ones too, which have a seed. Memory must not grow between the last two measurements, but for "
        "programs that are new."
    )
