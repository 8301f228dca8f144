"""The demo: questions about a long document, answered with full attention and with the shipped profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from tca_jax.calibration.profile import Profile
from tca_jax.engine.generation import Stats, generate
from tca_jax.engine.lm import LM
from tca_jax.inspection import kept_tokens, local_start
from tca_jax.loading import checkpoint_folder, load
from tca_jax.models.config import read_config
from tca_jax.needles import (
    CODE_DIGITS,
    MAX_NEEDLES,
    NEEDLE_BYTES,
    QUESTION_BYTES,
    Document,
    Question,
    build_document,
    is_correct,
)

MODEL = "recall-tiny"
_NEEDLES = 8
_ANSWER_TOKENS = CODE_DIGITS + 1  # the code and its full stop, a byte each

Report = Callable[[str, int | None, int | None], None]


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer of one method to one question: the access code for `key`."""

    key: str
    expected: str
    method: str
    text: str
    correct: bool
    stats: Stats


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """Everything that the demo shows; answers come in pairs, the baseline's first."""

    tokens: int
    answers: list[Answer]
    picture: Path

    @property
    def methods(self) -> tuple[str, str]:
        """The baseline's name and that of the method beside it."""
        return self.answers[0].method, self.answers[1].method

    def of(self, method: str) -> list[Answer]:
        return [answer for answer in self.answers if answer.method == method]

    def summary(self) -> str:
        """The figures that matter in a sentence that also holds where the second method is the slower or larger one."""
        baseline, other = (self.of(method) for method in self.methods)
        name = self.methods[1]
        speeds = [f"{name}'s prefill is {_compared_speed(baseline, other, 'prefill_seconds')}"]
        if all(answer.stats.seconds_per_token > 0 for answer in self.answers):
            speeds.append(f"its decoding {_compared_speed(baseline, other, 'seconds_per_token')}")
        return (
            f"Over {self.tokens:,} tokens {self.methods[0]} attention answers {sum(a.correct for a in baseline)} of "
            f"{len(baseline)} right, {name} {sum(a.correct for a in other)} of {len(other)} with "
            f"{_compared_bytes(baseline, other)}; on this machine {' and '.join(speeds)}."
        )

    def to_json(self) -> dict[str, Any]:
        answers = [dataclasses.asdict(answer) for answer in self.answers]
        return {"model": MODEL, "tokens": self.tokens, "answers": answers, "picture": str(self.picture)}


def run_demo(tokens: int, questions: int, seed: int, out: Path, report: Report | None = None) -> DemoResult:
    """Builds the document, asks the questions under both methods and draws what the second kept.

    Args:
        tokens: Tokens of the document with a question.
        questions: Questions asked.
        seed: Draws the document.
        out: Folder of the picture.
        report: Called as `report(step, done, total)` when a step begins; None where a step cannot be counted.

    Returns:
        The answers and the path of the picture.

    Raises:
        ValueError: an argument is out of range; the message names it.
        FileNotFoundError: this Python has no standard library source to make the document from.
    """
    report = report or (lambda step, done, total: None)
    if not 1 <= questions <= MAX_NEEDLES:
        raise ValueError(f"questions = {questions}: must lie in [1, {MAX_NEEDLES}]")
    needles = max(_NEEDLES, questions)
    _check_tokens(tokens, needles)
    document = build_document(np.random.default_rng(seed), tokens - 1, needles)  # 1: the bos token
    full = load(MODEL, progress=lambda done, total: report(f"loading {MODEL}", done, total))
    models = (full, full.with_profile(Profile.load(checkpoint_folder(MODEL) / "profile")))
    asked = document.questions[:questions]
    answers: list[Answer] = []
    for number, question in enumerate(asked, start=1):
        for lm in models:
            action = "compiling and answering" if number == 1 else "answering"
            step = f"{lm.method.name} attention: {action} question {number} of {len(asked)}"
            report(step, len(answers), len(models) * len(asked))
            answers.append(_ask(lm, document, question))
    report(f"drawing what {models[-1].method.name} kept", None, None)
    picture = _draw(models[-1], document, asked[0], out)
    return DemoResult(answers[0].stats.prompt_tokens[0], answers, picture)


def _check_tokens(tokens: int, needles: int) -> None:
    """Raises unless a document of that length holds the needles, and the model has positions for its answer."""
    fewest = 1 + QUESTION_BYTES + needles * NEEDLE_BYTES
    most = read_config(checkpoint_folder(MODEL)).max_context - _ANSWER_TOKENS
    if not fewest <= tokens <= most:
        raise ValueError(f"tokens = {tokens}: with {needles} needles it must lie in [{fewest}, {most}]")


def _ask(lm: LM, document: Document, question: Question) -> Answer:
    out = generate(lm, document.prompt(question), max_new_tokens=_ANSWER_TOKENS)
    return Answer(
        key=question.needle.key,
        expected=question.answer,
        method=lm.method.name,
        text=out.text[0],
        correct=is_correct(question, out.text[0]),
        stats=out.stats,
    )


def _draw(lm: LM, document: Document, question: Question, out: Path) -> Path:
    """The heat map of kept shares, and what the heads that look at the needle kept around it."""
    from tca_jax.plots import plot_kept_tokens

    prompt = document.prompt(question)
    kept = kept_tokens(lm, prompt)
    start = question.needle.position + 1  # 1: the bos token
    span = (start, start + len(question.needle.line))
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "demo.png"
    return plot_kept_tokens(
        kept,
        "\0" + prompt,
        span,
        question.needle.key,
        f"{lm.name}, {lm.method.name}",
        picture,
        block_size=lm.method.cache.block_size,
        window_start=local_start(lm, kept.shape[-1]),
    )


def demo_table(result: DemoResult) -> Table:
    """The answers side by side, narrow enough for a terminal of 80 columns."""
    baseline = result.methods[0]
    asked = len(result.of(baseline))
    title = f"{MODEL}: {asked} question{'s'[: asked > 1]} about {result.tokens:,} tokens of real text"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("access code for", "method", "answer", ""):
        table.add_column(column)
    for column in ("prefill s", "ms/token", "KV MB", "kept"):
        table.add_column(column, justify="right")
    for answer in result.answers:
        stats = answer.stats
        first = answer.method == baseline
        table.add_row(
            answer.key if first else f"expected {answer.expected}",
            answer.method,
            Text(_printable(answer.text)),  # no markup: a model may say anything
            "[green]right[/]" if answer.correct else "[red]wrong[/]",
            f"{stats.prefill_seconds:.2f}",
            f"{1000 * stats.seconds_per_token:.1f}",
            f"{stats.kv_cache_bytes / 1e6:.2f}",
            f"{stats.kept_share:.0%}",
            end_section=not first,
        )
    return table


def _printable(text: str) -> str:
    """The text on one line, with a dot for what would move the cursor."""
    return "".join(char if char.isprintable() else "·" for char in text)


def _compared_speed(baseline: list[Answer], other: list[Answer], field: str) -> str:
    """How fast the second method is against the first, within 5% equal."""
    ratio = _mean(baseline, field) / _mean(other, field)
    if 1 / 1.05 < ratio < 1.05:
        return "as fast"
    return f"{ratio:.1f}x faster" if ratio > 1 else f"{1 / ratio:.1f}x slower"


def _compared_bytes(baseline: list[Answer], other: list[Answer]) -> str:
    """How much KV cache the second method takes against the first."""
    change = round(100 * (_mean(other, "kv_cache_bytes") / _mean(baseline, "kv_cache_bytes") - 1))
    if change == 0:
        return "the same KV cache"
    return f"{abs(change)}% {'less' if change < 0 else 'more'} KV cache"


def _mean(answers: list[Answer], field: str) -> float:
    return float(np.mean([getattr(answer.stats, field) for answer in answers]))
