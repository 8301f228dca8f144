"""An engine that serves many long documents: what it holds, its steps, first tokens, pauses, moves, and its own time.

tca-jax bench serve                                              # the committed table, minutes on one GPU
tca-jax bench serve --what documents --what steps --keep 0.25    # a part of it
tca-jax bench serve --what load --keep 0.1 --rate 4 --requests 200
tca-jax bench serve --model tiny --tokens 512 --window 128 --rows 4 --documents 6 --copy-bytes 1048576   # on a CPU
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import typer

import tca_jax
from tca_jax.cli.options import BackendOption
from tca_jax.engine.lm import LM
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.common import (
    COPIED_BYTES,
    check_sizes,
    check_whole_models,
    device_copy,
    find_layers,
    print_row,
    tca_config,
    write_results,
)
from tca_jax.lab.benchmarks.models import CONFIGS, random_model, under_share
from tca_jax.lab.benchmarks.options import RESULTS, CopyBytesOption, NameOption, OutOption, WindowOption
from tca_jax.lab.benchmarks.serve_parts import TIMED_STEPS, Load, Served
from tca_jax.lab.benchmarks.shares import FULL, Share, check_shares, describe_config

#: The parts, in their order, by the headings of their tables.
PARTS = {
    "documents": "Documents",
    "steps": "Steps",
    "first-token": "First tokens",
    "load": "Load",
    "host": "Back from host memory",
    "reading": "Reading while answers are written",
    "scheduler": "The scheduler's own time",
}
_OF_FULL = ("documents", "steps")  # the parts of full caches
_ONCE = ("load", "reading", "scheduler")  # the parts of the first kept share alone
_SCHEDULER_DOCUMENTS = 2  # that an engine for its own time holds
_COPY_REPEATS = 7
_PROFILE = "profile"  # the share of a checkpoint with its own method

#: What each figure must reach and is to reach, by the kept share; those of time are bounds from above.
TARGETS: dict[str, dict[float, tuple[float, float]]] = {
    "resident documents": {0.25: (15, 17), 0.1: (30, 35), 1.0: (5, 5)},
    "a step over its byte floor": {0.25: (1.4, 1.2), 0.1: (1.4, 1.2)},
    "tokens/s over one row": {0.25: (2.6, 3.1), 0.1: (4.5, 5.5)},
    "tokens/s over full caches": {0.25: (2.4, 2.9), 0.1: (4, 5)},
    "first token p50 ms": {0.25: (100, 60), 0.1: (100, 60)},
    "first token p99 ms": {0.25: (250, 150), 0.1: (250, 150)},
    "longest pause ms": {0.25: (300, 150), 0.1: (300, 150)},
    "back from host over bus": {0.25: (1.5, 1.15), 0.1: (1.5, 1.15)},
    "scheduler ms/step": {0.25: (1, 0.3), 0.1: (1, 0.3)},
}

Tables = dict[str, list[dict[str, Any]]]


def summary(tables: Tables) -> list[dict[str, Any]]:
    """The figures that have a target, from the tables of all parts."""
    found: dict[str, dict[Any, float]] = {name: {} for name in TARGETS}
    steps: dict[Any, list[dict[str, Any]]] = {}
    for row in tables.get(PARTS["steps"], ()):
        steps.setdefault(row["share"], []).append(row)
    most = {share: max(rows, key=lambda row: row["rows"]) for share, rows in steps.items()}
    for share, rows in steps.items():
        found["a step over its byte floor"][share] = most[share]["over floor"]
        if len(rows) > 1:
            one = min(rows, key=lambda row: row["rows"])
            found["tokens/s over one row"][share] = most[share]["tokens/s"] / one["tokens/s"]
        if FULL.cell in most:
            found["tokens/s over full caches"][share] = most[share]["tokens/s"] / most[FULL.cell]["tokens/s"]
    columns = {
        "resident documents": ("documents", "documents"),
        "first token p50 ms": ("first-token", "p50 ms"),
        "first token p99 ms": ("first-token", "p99 ms"),
        "longest pause ms": ("reading", "longest pause ms"),
        "back from host over bus": ("host", "over bus"),
        "scheduler ms/step": ("scheduler", "scheduler ms/step"),
    }
    for name, (part, column) in columns.items():
        found[name] = {row["share"]: row[column] for row in tables.get(PARTS[part], ())}
    return [
        {"what": name, "share": share, "measured": value, "at least": least, "reach for": reach}
        for name, by_share in found.items()
        for share, value in by_share.items()
        for least, reach in [TARGETS[name].get(share, ("", ""))]
        if (name, share) != ("tokens/s over full caches", FULL.cell)
    ]


def describe(name: str, load: Load, kept: str, copied: float, layers: int, problems: list[str]) -> str:
    """What the columns mean."""
    failed = f" Failed: {'; '.join(problems)}." if problems else ""
    return (
        f"{name} of {layers} layers, documents of {load.tokens:,} tokens, {load.rows} rows; {kept} `at least` and "
        "`reach for` are what LLaMA-3.1-8B is to reach on one H200 with documents of 131,072 tokens; of milliseconds "
        "and of what is over a floor they are bounds from above. Documents have random keys and values in pages of "
        "their own, as many as those that are read have, and were not read, but for the part about reading. "
        f"A step is the mean of {TIMED_STEPS} of one row while all rows decode, between tokens as a client gets them; "
        f"in as many, each row puts a block out of its window once. Its floor are the bytes of the weights and of the "
        f"rows' documents at the rate of a device copy's read and written bytes, {copied / 1e9:,.0f} GB/s. "
        "Full caches are served at as many rows as the device holds documents. One row is alone in the same engine. "
        f"Questions have {load.question_tokens} tokens and come at random (Poisson, {load.rate:g} a second, seed "
        f"{load.seed}) while all rows but one decode; their time runs from their arrival. A pause is the time "
        "between tokens of an answer that runs while a document is read; the last column has the longest one while "
        "none is. `bus` is the rate of plain copies of a document's pinned chunks to the device, the best of several. "
        "The scheduler's own time is all that a round of its thread takes beside waiting for the device and the call "
        "of a step's program (`call ms/step`), over the steps that it launches; the device is at work meanwhile. "
        "`queue` counts requests before one that wait for their "
        f"first token when it arrives.{failed}"
    )


class _Run:
    """Measures parts, and writes what there is after each."""

    def __init__(self, what: list[str], load: Load, copied: float, write: Callable[[Tables, list[str], bool], None]):
        self.what, self.load, self.copied, self._write = what, load, copied, write
        self.tables: Tables = {}
        self.problems: list[str] = []

    def measure(self, part: str, share: Any, call: Callable[[], Iterator[dict[str, Any]] | dict[str, Any]]) -> None:
        """A part under a share; what fails is noted, and the next part has its turn."""
        try:
            found = call()
            for row in [found] if isinstance(found, dict) else found:
                row = {"share": share} | row
                self.tables.setdefault(PARTS[part], []).append(row)
                print_row({"part": part} | row)
        except Exception as error:
            traceback.print_exc()
            self.problems.append(f"{part} at {share}: {type(error).__name__}: {str(error).splitlines()[0]}")
        self._write(self.tables, self.problems, False)

    def serve(self, lm: LM, share: Any, parts: list[str], documents: int | None, backend: str) -> None:
        """All parts of one share over one engine."""
        load, rows = self.load, self.load.rows
        if share == FULL.cell:  # a step computes all rows of an engine: as many as there are documents
            fitting = Served(lm, load, rows, documents, backend)
            rows = max(1, min(rows, fitting.most))
            fitting.close()
            del fitting
            gc.collect()
        served = Served(lm, load, rows, documents, backend)
        if "documents" not in parts:
            served.hold(rows)
        rows_of_steps = sorted({rows, 1}, reverse=True)
        calls: dict[str, Callable[[], Any]] = {
            "documents": served.count_documents,
            "steps": lambda: (served.time_steps(each, self.copied) for each in rows_of_steps),
            "first-token": served.time_first_tokens,
            "load": served.time_load,
            "host": served.time_coming_back,
            "reading": served.time_reading,
        }
        for part, call in calls.items():
            if part in parts:
                self.measure(part, share, call)
                served.settle()
        served.close()

    def time_scheduler(self, lm: LM, share: Any, backend: str) -> None:
        """Twice the rows, over a few documents."""

        def call() -> dict[str, Any]:
            served = Served(lm, self.load, 2 * self.load.rows, _SCHEDULER_DOCUMENTS, backend)
            served.hold(_SCHEDULER_DOCUMENTS)
            try:
                return served.time_steps(2 * self.load.rows, self.copied)
            finally:
                served.close()

        self.measure("scheduler", share, call)


def main(
    model: Annotated[
        str, typer.Option(help="Shape with random weights, as of bench decode; or alias, Hub id or folder.")
    ] = "llama3.1-8b",
    profile: Annotated[str | None, typer.Option(help="Profile folder of a checkpoint.", show_default="none")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a document.", min=1)] = 2**17,
    rows: Annotated[int, typer.Option(help="Answers that are written at once.", min=2)] = 16,
    keep: Annotated[
        list[Share] | None,
        typer.Option(
            help="Kept shares of the ranked blocks; 1 is the full cache.",
            parser=Share.parse,
            metavar="SHARE",
            show_default="0.25, 0.1, 1",
        ),
    ] = None,
    what: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PARTS)}.", show_default="all")] = None,
    documents: Annotated[
        int | None, typer.Option(help="Documents that pages suffice for.", show_default="what fits", min=2)
    ] = None,
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of question and answer.", min=256)] = 1024,
    question_tokens: Annotated[int, typer.Option(help="Tokens of a question.", min=1)] = 64,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt without a document.", min=1)] = 2048,
    rate: Annotated[float, typer.Option(help="Requests a second.", min=0.001)] = 4.0,
    requests: Annotated[int, typer.Option(help="Requests.", min=1)] = 64,
    layers: Annotated[int | None, typer.Option(help="Layers of a shape; all by default.", min=1)] = None,
    backend: BackendOption = "auto",
    window: WindowOption = tca_jax.TCAConfig.window,
    copy_bytes: CopyBytesOption = COPIED_BYTES,
    seed: Annotated[int, typer.Option(help="Of all that is random.", min=0)] = 0,
    out: OutOption = RESULTS,
    name: NameOption = "serve",
) -> None:
    """Time an engine that serves many long documents.

    Example: [bold]tca-jax bench serve --what documents --what steps --keep 0.25[/]
    """
    for part in what or ():
        if part not in PARTS:
            raise UserError(f"--what {part}: must be one of {list(PARTS)}")
    what = what or list(PARTS)
    config, load = (
        tca_config(window),
        Load(tokens, rows, answer_tokens, question_tokens, prompt_tokens, rate, requests, seed),
    )
    if question_tokens > answer_tokens - TIMED_STEPS - 2 * rows:
        raise UserError(
            f"--question-tokens {question_tokens}: must leave {TIMED_STEPS + 2 * rows} of --answer-tokens "
            f"{answer_tokens} for steps"
        )
    methods: dict[Any, LM]
    if model in CONFIGS:
        shares = keep or [Share(0.25), Share(0.1), FULL]
        check_shares([share for share in shares if share != FULL], "--keep")
        check_whole_models(find_layers([model]))
        check_sizes([tokens], config, [backend], out, "--tokens")
        lm = random_model(
            model, jax.random.key(seed), layers, max_positions=max(tokens, prompt_tokens) + 2 * answer_tokens
        )
        lm = dataclasses.replace(lm, checkpoint_fingerprint="random weights")  # nothing is stored
        methods = {share.cell: under_share(lm, share, config) for share in shares}
        kept = f"`share` 1 is the full cache, others are TCA caches {describe_config(config)}."
    else:
        if keep:
            raise UserError("--keep: a checkpoint is served under its profile")
        lm = tca_jax.load(model, profile=profile or ("shipped" if model == "recall-tiny" else None))
        if tokens % (size := lm.method.cache.block_size):
            raise UserError(f"--tokens {tokens}: must be a multiple of {size}")
        methods, kept = {_PROFILE: lm}, f"{lm.name} is served under its profile."
    copied = device_copy(copy_bytes, _COPY_REPEATS)
    print(f"device copy: {copied / 1e9:,.0f} GB/s", flush=True)

    def write(tables: Tables, problems: list[str], finished: bool) -> None:
        note = describe(lm.name, load, kept, copied, lm.config.num_layers, problems)
        write_results(name, "Serving long documents", summary(tables), out, note, tables, shown=finished)

    run = _Run(what, load, copied, write)
    for number, (share, served) in enumerate(methods.items()):
        parts = [part for part in what if share != FULL.cell or part in _OF_FULL]
        parts = [part for part in parts if number == 0 or part not in _ONCE]
        if set(parts) - {"scheduler"}:
            run.serve(served, share, parts, documents, backend)
            gc.collect()
        if "scheduler" in parts:
            run.time_scheduler(served, share, backend)
            gc.collect()
    write(run.tables, run.problems, True)
    for problem in run.problems:
        print(f"failed: {problem}", file=sys.stderr)
    if run.problems:
        raise typer.Exit(1)
