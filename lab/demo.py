"""The demo: questions about a long document under three protocols, with full attention, with TCA and as published."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from rich import box
from rich.table import Table
from rich.text import Text

from tca_jax.calibration.profile import Profile
from tca_jax.engine.contexts import compile_prefill, prefill
from tca_jax.engine.generation import compile_generate, generate
from tca_jax.engine.lm import LM
from tca_jax.errors import UserError
from tca_jax.inspection import kept_tokens, local_start
from tca_jax.lab.recall import PROTOCOLS, Document, Question, build_document, is_correct
from tca_jax.lab.recall.protocols import chat_document, chat_question, completion
from tca_jax.loading import checkpoint_folder, load
from tca_jax.models.config import read_config

MODEL = "recall-tiny"
#: The methods side by side: name in the table, and folder of the profile beside the model; None is full attention.
METHODS = {"full": None, "tca": "profile", "paper()": "profile-paper"}
#: What is asked, in this order; short answers, for the demo runs on any machine.
_TASKS = ("digits", "words", "keys", "tracking", "hex", "queries", "values")
_ANSWER_TOKENS = 320
_SPARE_TOKENS = 512  # positions for a question and its answer
_WHOLE_PROMPTS = 2  # questions that are asked with the document in the prompt, under each of the two protocols
_FACT_BYTES = 3000  # all facts of `_TASKS`, and a little text between them

Report = Callable[[str, int | None, int | None], None]


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer of one method to one question under one protocol.

    Attributes:
        seconds: From the question to the end of the answer, compilation aside; for questions of one prompt in a batch
            the batch's.
    """

    protocol: str
    method: str
    question: str
    expected: str
    text: str
    correct: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a method did with the document.

    Attributes:
        seconds: Of reading it once, compilation aside.
        kv_cache_bytes: Of the context that remains.
        full_kv_cache_bytes: The same under full attention.
        attended_share: Share of the document's causal pairs (query, key) that its queries attended to.
    """

    method: str
    seconds: float
    kv_cache_bytes: int
    full_kv_cache_bytes: int
    attended_share: float


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """Everything that the demo shows."""

    tokens: int
    answers: list[Answer]
    readings: list[Reading]
    picture: Path

    def of(self, protocol: str, method: str) -> list[Answer]:
        return [a for a in self.answers if (a.protocol, a.method) == (protocol, method)]

    def summary(self) -> str:
        """The figures that matter, in sentences that also hold where TCA is not the better one."""
        late = {name: self.of("late", name) for name in METHODS}
        right = {name: sum(answer.correct for answer in answers) for name, answers in late.items()}
        reading = next(r for r in self.readings if r.method == "tca")
        share = reading.kv_cache_bytes / reading.full_kv_cache_bytes
        asked = len(late["tca"])
        return (
            f"The question comes after {self.tokens:,} tokens were read without it: full attention answers "
            f"{right['full']} of {asked} right, tca {right['tca']} with {share:.0%} of the KV cache, the method as "
            f"published {right['paper()']}. Reading took tca {reading.seconds:.1f} s, each further question "
            f"{np.mean([answer.seconds for answer in late['tca']]):.1f} s."
        )

    def to_json(self) -> dict[str, Any]:
        return {"model": MODEL, **dataclasses.asdict(self), "picture": str(self.picture)}


def run_demo(tokens: int, questions: int, seed: int, out: Path, report: Report | None = None) -> DemoResult:
    """Builds the document, asks the questions under all protocols and methods, and draws what TCA kept.

    Args:
        tokens: Tokens of the document.
        questions: Questions asked of the context; the first two also with the document in the prompt.
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
    if not 1 <= questions <= len(_TASKS):
        raise UserError(f"questions = {questions}: must lie in [1, {len(_TASKS)}]")
    most = read_config(checkpoint_folder(MODEL)).max_context - _SPARE_TOKENS
    if not _FACT_BYTES <= tokens <= most:
        raise UserError(f"tokens = {tokens}: must lie in [{_FACT_BYTES}, {most}]")
    document = build_document(np.random.default_rng(seed), tokens - 2, _TASKS)  # 2: the tokens bos and user
    full = load(MODEL, progress=lambda done, total: report(f"loading {MODEL}", done, total))
    models = {name: _with_profile(full, folder) for name, folder in METHODS.items()}
    asked = document.questions[:questions]
    kept = _compile(models, document, asked, report)
    answers: list[Answer] = []
    readings: list[Reading] = []
    steps = 2 * len(models)
    for number, (name, lm) in enumerate(models.items()):
        report(f"{name}: answering whole prompts", 2 * number, steps)
        answers += _ask_whole_prompts(name, lm, document, asked[:_WHOLE_PROMPTS])
        report(f"{name}: reading the document, then answering", 2 * number + 1, steps)
        late, reading = _ask_late(name, lm, document, asked)
        answers += late
        readings.append(reading)
    report("drawing what tca kept", None, None)
    return DemoResult(tokens, answers, readings, _draw(models["tca"], kept, document, asked[0], out))


def _with_profile(lm: LM, folder: str | None) -> LM:
    return lm if folder is None else lm.with_profile(Profile.load(checkpoint_folder(MODEL) / folder))


def _compile(
    models: dict[str, LM], document: Document, asked: tuple[Question, ...], report: Report
) -> Bool[np.ndarray, "layers Hkv L"]:
    """Compiles all programs before the first one is timed, side by side: that is most of a first run's time.

    Returns:
        What TCA keeps of the first question's prompt; no time is reported of it, so it is computed here as well.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kept = pool.submit(kept_tokens, models["tca"], completion(document.text, asked[0]))
        jobs: list[Future[Any]] = [kept]
        for lm in reversed(models.values()):  # full attention's programs are the small ones: last
            prompts = _whole_prompts(document, asked[:_WHOLE_PROMPTS])
            jobs.append(pool.submit(compile_generate, lm, prompts, max_new_tokens=_ANSWER_TOKENS))
            jobs.append(pool.submit(_compile_late, lm, document, asked))
        for done, job in enumerate(as_completed(jobs)):
            report("compiling", done, len(jobs))
            job.result()
    return kept.result()


def _compile_late(lm: LM, document: Document, asked: tuple[Question, ...]) -> None:
    context = compile_prefill(lm, chat_document(document.text))
    for question in asked:
        compile_generate(lm, chat_question(question), context=context, max_new_tokens=_ANSWER_TOKENS)


def _whole_prompts(document: Document, asked: tuple[Question, ...]) -> list[str]:
    """The prompts that hold document and question: each question under the first protocol, then under the second."""
    chats = [chat_document(document.text) + chat_question(question) for question in asked]
    return [completion(document.text, question) for question in asked] + chats


def _ask_whole_prompts(name: str, lm: LM, document: Document, asked: tuple[Question, ...]) -> list[Answer]:
    """The protocols whose prompts hold document and question: all in one batch."""
    out = generate(lm, _whole_prompts(document, asked), max_new_tokens=_ANSWER_TOKENS)
    seconds = out.stats.prefill_seconds + out.stats.seconds_per_token * max(out.stats.new_tokens)
    pairs = [(protocol, question) for protocol in ("prefix", "preamble") for question in asked]
    return [_answer(name, *pair, text, seconds) for pair, text in zip(pairs, out.text, strict=True)]


def _ask_late(name: str, lm: LM, document: Document, asked: tuple[Question, ...]) -> tuple[list[Answer], Reading]:
    """Reads the document once, then asks one question after the other."""
    context = prefill(lm, chat_document(document.text))
    answers = []
    for question in asked:
        start = time.perf_counter()
        out = generate(lm, chat_question(question), context=context, max_new_tokens=_ANSWER_TOKENS)
        seconds = time.perf_counter() - start - out.stats.compile_seconds
        answers.append(_answer(name, "late", question, out.text[0], seconds))
    stats = context.stats
    held = stats.kv_cache_bytes, stats.full_kv_cache_bytes
    return answers, Reading(name, stats.prefill_seconds, *held, stats.attended_share)


def _answer(method: str, protocol: str, question: Question, text: str, seconds: float) -> Answer:
    right = is_correct(question, text, protocol)
    return Answer(protocol, method, question.text, question.sentence, text, right, seconds)


def _draw(lm: LM, kept: Bool[np.ndarray, "layers Hkv L"], document: Document, question: Question, out: Path) -> Path:
    """The heat map of kept shares, and what the heads that look at the answer kept around it."""
    from tca_jax.plots import plot_kept_tokens

    fact = question.facts[0]
    start = document.place(fact) + 1  # 1: the bos token
    out.mkdir(parents=True, exist_ok=True)
    return plot_kept_tokens(
        kept,
        "\0" + completion(document.text, question),
        (start, start + len(fact.line)),
        fact.key,
        f"{lm.name}, {lm.method.name}",
        out / "demo.png",
        block_size=lm.method.cache.block_size,
        window_start=local_start(lm, kept.shape[-1]),
    )


def protocol_table(result: DemoResult) -> Table:
    """Right answers of each method by protocol, narrow enough for a terminal of 80 columns."""
    table = Table(title=f"{MODEL}: right answers about {result.tokens:,} tokens of text", box=box.SIMPLE)
    for column in ("protocol", "the question comes"):
        table.add_column(column)
    for name in METHODS:
        table.add_column(name, justify="right")
    when = {
        "prefix": "with the answer's first words",
        "preamble": "in a chat, at its end",
        "late": "after the reading, later on",
    }
    for protocol in PROTOCOLS:
        cells = []
        for name in METHODS:
            answers = result.of(protocol, name)
            right = sum(answer.correct for answer in answers)
            color = "green" if right == len(answers) else "red"
            cells.append(f"[{color}]{right} of {len(answers)}[/]")
        table.add_row(protocol, when[protocol], *cells)
    table.add_section()
    for row, values in (
        ("KV cache MB", [f"{reading.kv_cache_bytes / 1e6:.1f}" for reading in result.readings]),
        ("pairs attended", [f"{reading.attended_share:.0%}" for reading in result.readings]),
        ("s to read", [f"{reading.seconds:.1f}" for reading in result.readings]),
    ):
        table.add_row(row, "the document, once", *values)
    return table


def context_table(result: DemoResult) -> Table:
    """The questions that were asked of one context of TCA, with the time of each."""
    table = Table(title="One context of tca, several questions", box=box.SIMPLE)
    table.add_column("question", ratio=1)
    table.add_column("answer", ratio=1)
    table.add_column("")
    table.add_column("s", justify="right")
    for answer in result.of("late", "tca"):
        mark = "[green]right[/]" if answer.correct else "[red]wrong[/]"
        # No markup in what a model says: it may say anything.
        cells = (Text(_printable(answer.question)), Text(_printable(answer.text)))
        table.add_row(*cells, mark, f"{answer.seconds:.1f}")
    return table


def _printable(text: str) -> str:
    """The text on one line, with a dot for what would move the cursor."""
    return "".join(char if char.isprintable() else "·" for char in text)
