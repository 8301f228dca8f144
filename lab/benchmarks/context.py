"""One document, many questions: what reading it costs, the first token of an answer, and appending to it.

tca-jax bench context                                             # the committed table, minutes on one GPU
tca-jax bench context --models llama3.1-8b --no-full --questions 1 --append-tokens 0
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

import tca_jax
from tca_jax.cli.options import BackendOption
from tca_jax.engine.lm import LM
from tca_jax.lab.benchmarks.common import (
    check_sizes,
    check_whole_models,
    find_layers,
    plot_bars,
    print_row,
    tca_config,
    write_results,
)
from tca_jax.lab.benchmarks.models import random_model, under_share
from tca_jax.lab.benchmarks.options import (
    RESULTS,
    LengthsOption,
    ModelsOption,
    NameOption,
    OutOption,
    RepeatsOption,
    WindowOption,
)
from tca_jax.lab.benchmarks.shares import FULL, BlockSharesOption, Share, check_shares, describe_config


@dataclasses.dataclass(frozen=True)
class Timing:
    """What is asked of a document, and how it is timed.

    Attributes:
        question_tokens: Tokens of a question.
        questions: Numbers of questions that are asked at once.
        append_tokens: Tokens that are appended to the document; 0 for none.
        backend: Kernel backend.
        repeats: Timed calls of each kind.
    """

    question_tokens: int
    questions: tuple[int, ...]
    append_tokens: int
    backend: str
    repeats: int

    def median(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The last result and the median seconds that a caller waits, less what compiling takes."""
        result, seconds = None, []
        for _ in range(self.repeats):
            result = None  # two would not fit beside each other
            start = time.perf_counter()
            result = call()
            seconds.append(time.perf_counter() - start - result.compile_seconds)
        return result, statistics.median(seconds)


def measure(lm: LM, tokens: int, timing: Timing) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reads a document, asks of it and appends to it.

    Returns:
        The row of the document, and one for each number of questions.
    """
    random = np.random.default_rng(0)

    def draw(count: int) -> list[int]:
        return random.integers(0, lm.config.vocab_size, count).tolist()

    document = draw(tokens)
    context, reading = timing.median(lambda: tca_jax.prefill(lm, document, backend=timing.backend))
    row = {
        "kept": context.stats.kept_share,
        "KV GB": context.stats.kv_cache_bytes / 1e9,
        "read s": reading,
        "read tokens/s": tokens / reading,
    }
    questions = [_measure_questions(lm, context, number, reading, draw, timing) for number in timing.questions]
    if timing.append_tokens:
        row |= _measure_appending(lm, context, tokens / reading, draw, timing)
    return row, questions


def _measure_questions(
    lm: LM, context: tca_jax.Context, number: int, reading: float, draw: Callable[[int], list[int]], timing: Timing
) -> dict[str, Any]:
    """Time to the first tokens of answers to so many questions at once; programs are compiled by questions before."""

    def ask() -> Any:
        questions = [draw(timing.question_tokens) for _ in range(number)]
        out = tca_jax.generate(lm, questions, context=context, max_new_tokens=1, backend=timing.backend)
        return out.stats

    first = ask()
    stats, seconds = timing.median(ask)
    return {
        "questions": number,
        "question tokens": timing.question_tokens,
        "first token ms": 1e3 * seconds,
        "% of reading": 100 * seconds / reading,
        "in the program ms": 1e3 * stats.prefill_seconds,
        "compile s": first.compile_seconds,
    }


def _measure_appending(
    lm: LM, context: tca_jax.Context, reading_rate: float, draw: Callable[[int], list[int]], timing: Timing
) -> dict[str, Any]:
    """Rate of appending; programs are compiled by an appending before."""

    def append() -> Any:
        return tca_jax.prefill(lm, draw(timing.append_tokens), context=context, backend=timing.backend)

    append()
    _, seconds = timing.median(append)
    rate = timing.append_tokens / seconds
    return {
        "appended": timing.append_tokens,
        "append s": seconds,
        "append tokens/s": rate,
        "over reading's rate": rate / reading_rate,
    }


def describe(config: tca_jax.TCAConfig, repeats: int) -> str:
    """What the columns mean."""
    return (
        "A whole model with random weights reads a document of random tokens once. TCA runs a synthetic profile, the "
        f"same in every layer: budgets {describe_config(config)}. `KV GB` is the context as allocated, `kept` the "
        "share of its tokens that it holds. `append tokens/s` is the rate at which further tokens are appended to it "
        "by `prefill(context=)`, as each would have been fed by decoding. The second table has questions that are "
        "asked of the context, several at once where `questions` says so: `first token ms` is what a caller of "
        "`generate` waits for the first token of every answer once questions as long have been asked before, `in the "
        f"program ms` what the last call spent in its program. All others are medians over {repeats} calls, without "
        "compilation."
    )


def main(
    lengths: LengthsOption = None,
    models: ModelsOption = None,
    shares: BlockSharesOption = None,
    full: Annotated[bool, typer.Option(help="Time full attention too.")] = True,
    question_tokens: Annotated[int, typer.Option(help="Tokens of a question.", min=1)] = 64,
    questions: Annotated[
        list[int] | None, typer.Option(help="Questions at once.", show_default="1 and 8", min=1)
    ] = None,
    append_tokens: Annotated[int, typer.Option(help="Tokens to append; 0 for none.", min=0)] = 10_000,
    layers: Annotated[int | None, typer.Option(help="Layers; all by default.", min=1)] = None,
    backend: BackendOption = "auto",
    window: WindowOption = tca_jax.TCAConfig.window,
    repeats: RepeatsOption = 3,
    out: OutOption = RESULTS,
    name: NameOption = "context",
) -> None:
    """Time a document that is read once, and the questions that follow.

    Example: [bold]tca-jax bench context --models llama3.1-8b --no-full[/]
    """
    lengths, shares = lengths or [2**17], shares or [Share(cache=0.25, prefill=0.05)]
    whole_models, config = find_layers(models), tca_config(window)
    timing = Timing(question_tokens, tuple(questions or (1, 8)), append_tokens, backend, repeats)
    check_shares(shares)
    check_whole_models(whole_models)
    check_sizes(lengths, config, [backend], out)
    rows, asked = [], []
    for layer in whole_models:
        most = max(lengths) + max(append_tokens, question_tokens + 1)
        lm = random_model(layer.name, jax.random.key(0), layers, max_positions=most)
        # All the benchmark needs of an identity; hashing the weights would be counted as reading.
        lm = dataclasses.replace(lm, checkpoint_fingerprint="random weights")
        for tokens in lengths:
            for share in (*shares, FULL) if full else shares:
                where = {"model": layer.name, "tokens": tokens, "attention": share.name}
                document, of_questions = measure(under_share(lm, share, config), tokens, timing)
                rows.append(where | document)
                asked += [where | row for row in of_questions]
                for row in (rows[-1], *asked[-len(of_questions) :]):
                    print_row(row)
        del lm
    write_results(name, "One document, many questions", rows, out, describe(config, repeats), {"Questions": asked})
    plot(rows, asked, out / f"{name}.png")


def plot(rows: list[dict[str, Any]], asked: list[dict[str, Any]], path: Path) -> None:
    """Seconds of reading, milliseconds to a first token, and the rate of appending."""
    panels = {"read s": "reading, s"}
    bars = [dict(row) for row in rows]
    for row, number in ((row, number) for row in bars for number in dict.fromkeys(each["questions"] for each in asked)):
        same = [
            each
            for each in asked
            if each["questions"] == number
            and (each["model"], each["tokens"], each["attention"]) == (row["model"], row["tokens"], row["attention"])
        ]
        row[f"{number}"] = same[0]["first token ms"]
        panels[f"{number}"] = f"first token of {number} question{'s' if number > 1 else ''}, ms"
    if "append tokens/s" in rows[0]:
        panels["append tokens/s"] = f"appending {rows[0]['appended']:,} tokens, tokens/s"
    plot_bars(bars, panels, "One document, many questions", path)
