"""The demo: questions about a long document with full attention, with TCA and as published.

SmolLM2 gets them after it has read the document, recall-tiny under all three protocols.
"""

from __future__ import annotations

import dataclasses
import importlib.util
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
from tca_jax.engine.contexts import prefill
from tca_jax.engine.generation import generate
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import DocumentTemplate
from tca_jax.errors import UserError
from tca_jax.lab.models import find, models_folder
from tca_jax.lab.plots.inspection import kept_tokens, local_start, token_texts
from tca_jax.lab.recall import PROTOCOLS, Question, build_document, is_correct
from tca_jax.lab.recall.documents import hide
from tca_jax.lab.recall.facts import Fact, draw_keys
from tca_jax.lab.recall.protocols import completion
from tca_jax.loading import Checkpoint, open_checkpoint

#: The default is the first one that is there.
MODELS = SMOLLM2, RECALL_TINY = "smollm2", "recall-tiny"
#: The methods side by side: name in the table, and folder of the model's profile; None is full attention.
METHODS = {"full": None, "tca": "profile", "paper()": "profile-paper"}
#: Tasks of recall-tiny's questions, in this order; short answers, for the demo runs on any machine.
_TASKS = ("digits", "words", "keys", "tracking", "hex", "queries", "values")
#: Kinds of SmolLM2's facts with their values; # is a digit. Chosen by full attention's answers: of each
#: kind, at least 3 of 4 are right at 3,000 tokens.
# "Question: " in front of them: 25 of 30 right at 4,096 tokens, 23 without it.
_VALUES = {
    "access code": ("######",),
    "captain": ("Alice", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Irene", "Jonas"),
    "color": ("black", "blue", "brown", "green", "orange", "pink", "purple", "red", "white", "yellow"),
    "home town": ("Bergen", "Dublin", "Granada", "Hamburg", "Krakow", "Lisbon", "Oslo", "Porto", "Riga", "Turin"),
    "meeting day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "phone number": ("555-####",),
}
_QUESTIONS = {SMOLLM2: len(_VALUES), RECALL_TINY: len(_TASKS)}
_ANSWER_TOKENS = {SMOLLM2: 32, RECALL_TINY: 320}
_SPARE_TOKENS = 512  # positions for a question and its answer
_WHOLE_PROMPTS = 2  # questions that are asked with the document in the prompt, under each of the two protocols
_LEAST_TOKENS = 3000  # all facts of `_TASKS`, and a little text between them; several times SmolLM2's window

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
    model: str = RECALL_TINY

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
        return {**dataclasses.asdict(self), "picture": str(self.picture)}


@dataclasses.dataclass(frozen=True)
class Exam:
    """A document and questions about it, as every method gets them."""

    document: list[int]  # token ids of what is read once
    asked: tuple[Question, ...]
    late: tuple[str, ...]  # what is appended to the document for each question
    whole: tuple[str, ...]  # prompts with document and question: each under "prefix", then under "preamble"; or none
    drawn: str | list[int]  # the prompt in the picture
    fact_span: tuple[int, int]  # in it, the first question's fact: its first token, and the one past its last
    answer_tokens: int  # room for an answer


def choose_model(name: str | None = None) -> str:
    """The model of this name; by default SmolLM2 where its file and the gguf package are there, else recall-tiny.

    Raises:
        ValueError: another name, or SmolLM2's file is missing.
    """
    if name is None:
        return SMOLLM2 if find(SMOLLM2) and importlib.util.find_spec("gguf") else RECALL_TINY
    if name not in MODELS:
        raise UserError(f"model = {name!r}: must be one of {list(MODELS)}")
    if name == SMOLLM2 and find(name) is None:
        raise UserError(f"model = {name!r}: its file is not in {models_folder()}; `make models` fetches it")
    return name


def open_model(model: str, tokens: int, questions: int) -> Checkpoint:
    """Opens one of `MODELS` for a demo of this size.

    Raises:
        ValueError: `tokens` or `questions` is out of range; the message names it.
    """
    if not 1 <= questions <= _QUESTIONS[model]:
        raise UserError(f"questions = {questions}: must lie in [1, {_QUESTIONS[model]}]")
    checkpoint = open_checkpoint(find(model) if model == SMOLLM2 else model)
    most = checkpoint.config.max_context - _SPARE_TOKENS
    if not _LEAST_TOKENS <= tokens <= most:
        raise UserError(f"tokens = {tokens}: must lie in [{_LEAST_TOKENS}, {most}]")
    return checkpoint


def model_line(model: str) -> str:
    """Names the model; for the shipped one, how to get a real one."""
    if model == SMOLLM2:
        return "Model: SmolLM2-135M-Instruct"
    remedy = "needs the gguf package: pip install gguf" if find(SMOLLM2) else "is a real one: `make models` fetches it"
    return f"Model: {RECALL_TINY}, which ships with the package. SmolLM2-135M-Instruct {remedy}."


def run_demo(
    tokens: int, questions: int, seed: int, out: Path, report: Report | None = None, model: str = RECALL_TINY
) -> DemoResult:
    """Builds the document, asks the questions under all protocols and methods, and draws what TCA kept.

    Args:
        tokens: Tokens of the document; SmolLM2's may have a few fewer, since it ends with a line.
        questions: Questions asked of the context; recall-tiny gets the first two also with the document in the prompt.
        seed: Draws the document.
        out: Folder of the picture.
        report: Called as `report(step, done, total)` when a step begins; None where a step cannot be counted.
        model: One of `MODELS`.

    Returns:
        The answers and the path of the picture.

    Raises:
        ValueError: an argument is out of range; the message names it.
        FileNotFoundError: this Python has no standard library source to make the document from.
    """
    report = report or (lambda step, done, total: None)
    checkpoint = open_model(model, tokens, questions)
    build = _fact_exam if model == SMOLLM2 else _recall_exam
    exam = build(checkpoint, tokens, questions, np.random.default_rng(seed))
    full = checkpoint.load(progress=lambda done, total: report(f"loading {checkpoint.name}", done, total))
    profiles = Path(__file__).parent / "profiles" / model if model == SMOLLM2 else checkpoint.folder
    models = {name: full if p is None else full.with_profile(Profile.load(profiles / p)) for name, p in METHODS.items()}
    kept = _compile(models, exam, report)
    answers: list[Answer] = []
    readings: list[Reading] = []
    steps = 2 * len(models)
    for number, (name, lm) in enumerate(models.items()):
        if exam.whole:
            report(f"{name}: answering whole prompts", 2 * number, steps)
            answers += _ask_whole_prompts(name, lm, exam)
        report(f"{name}: reading the document, then answering", 2 * number + 1, steps)
        late, reading = _ask_late(name, lm, exam)
        answers += late
        readings.append(reading)
    report("drawing what tca kept", None, None)
    return DemoResult(len(exam.document), answers, readings, _draw(models["tca"], kept, exam, out), model)


def _recall_exam(checkpoint: Checkpoint, tokens: int, questions: int, rng: np.random.Generator) -> Exam:
    """Questions of recall-tiny's tasks; a byte is a token."""
    frame = DocumentTemplate.of(checkpoint)
    document = build_document(rng, tokens - 2, _TASKS)  # 2: the tokens bos and user
    asked = document.questions[:questions]
    late = tuple(frame.question(question.text, follows_answer=False) for question in asked)
    chats = (frame.before_document + document.text + text for text in late[:_WHOLE_PROMPTS])
    whole = (*(completion(document.text, question) for question in asked[:_WHOLE_PROMPTS]), *chats)
    fact = asked[0].facts[0]
    start = document.place(fact) + 1  # 1: the bos token
    read = frame.document(checkpoint, document.text, "document")
    return Exam(read, asked, late, whole, whole[0], (start, start + len(fact.line)), _ANSWER_TOKENS[RECALL_TINY])


def _fact_exam(checkpoint: Checkpoint, tokens: int, questions: int, rng: np.random.Generator) -> Exam:
    """Facts of different kinds, asked for in the order in which they stand: the first ones are far outside a window."""
    frame, keys = DocumentTemplate.of(checkpoint), draw_keys(rng)
    known = []
    for kind, values in _VALUES.items():
        value = "".join(str(rng.integers(10)) if char == "#" else char for char in str(rng.choice(values)))
        of = f"the {kind} for {(key := next(keys))}"
        known.append(Question("fact", (Fact(kind, key, value),), f"Question: What is {of}?", f"T{of[1:]} is ", value))
    num_bytes, seed = 3 * tokens, rng.integers(2**32)
    for _ in range(4):  # toward the number of tokens
        document = hide(np.random.default_rng(seed), num_bytes, known, "held-out")
        read = frame.document(checkpoint, document.text, "document")
        num_bytes = num_bytes * tokens // len(read)
    asked = tuple(sorted(known, key=lambda question: document.place(question.facts[0]))[:questions])
    late = tuple(frame.question(question.text, follows_answer=False) for question in asked)
    fact = asked[0].facts[0]
    ends = (document.place(fact), document.place(fact) + len(fact.line))
    start, stop = (len(frame.document(checkpoint, document.text[:end], "document")) for end in ends)
    return Exam(read[:tokens], asked, late, (), read[:tokens], (start, stop), _ANSWER_TOKENS[SMOLLM2])


def _compile(models: dict[str, LM], exam: Exam, report: Report) -> Bool[np.ndarray, "layers Hkv L"]:
    """Runs all programs once, side by side, before the first one is timed: compiling is most of a first run's time.

    Returns:
        What TCA keeps of the prompt in the picture; no time is reported of it, so it is computed here as well.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kept = pool.submit(kept_tokens, models["tca"], exam.drawn)
        jobs: list[Future[Any]] = [kept]
        for lm in reversed(models.values()):  # full attention's programs are the small ones: last
            if exam.whole:
                jobs.append(pool.submit(generate, lm, exam.whole, max_new_tokens=exam.answer_tokens))
            jobs.append(pool.submit(_compile_late, lm, exam))
        for done, job in enumerate(as_completed(jobs)):
            report("compiling", done, len(jobs))
            job.result()
    return kept.result()


def _compile_late(lm: LM, exam: Exam) -> None:
    context = prefill(lm, exam.document)
    for text in exam.late:
        generate(lm, text, context=context, max_new_tokens=exam.answer_tokens)


def _ask_whole_prompts(name: str, lm: LM, exam: Exam) -> list[Answer]:
    """The protocols whose prompts hold document and question: all in one batch."""
    out = generate(lm, exam.whole, max_new_tokens=exam.answer_tokens)
    seconds = out.stats.prefill_seconds + out.stats.seconds_per_token * max(out.stats.new_tokens)
    pairs = [(protocol, question) for protocol in ("prefix", "preamble") for question in exam.asked[:_WHOLE_PROMPTS]]
    return [_answer(name, *pair, text, seconds) for pair, text in zip(pairs, out.text, strict=True)]


def _ask_late(name: str, lm: LM, exam: Exam) -> tuple[list[Answer], Reading]:
    """Reads the document once, then asks one question after the other."""
    context = prefill(lm, exam.document)
    answers = []
    for question, text in zip(exam.asked, exam.late, strict=True):
        start = time.perf_counter()
        out = generate(lm, text, context=context, max_new_tokens=exam.answer_tokens)
        seconds = time.perf_counter() - start - out.stats.compile_seconds
        answers.append(_answer(name, "late", question, out.text[0], seconds))
    stats = context.stats
    held = stats.kv_cache_bytes, stats.full_kv_cache_bytes
    return answers, Reading(name, stats.prefill_seconds, *held, stats.attended_share)


def _answer(method: str, protocol: str, question: Question, text: str, seconds: float) -> Answer:
    # recall-tiny was trained to answer in one form; of any other answer the value counts.
    right = is_correct(question, text, protocol) if question.task in _TASKS else question.answer in text
    return Answer(protocol, method, question.text, question.sentence, text, right, seconds)


def _draw(lm: LM, kept: Bool[np.ndarray, "layers Hkv L"], exam: Exam, out: Path) -> Path:
    """The heat map of kept shares, and what the heads that look at the answer kept around it."""
    from tca_jax.lab.plots import plot_kept_tokens

    out.mkdir(parents=True, exist_ok=True)
    return plot_kept_tokens(
        kept,
        "\0" + exam.drawn if isinstance(exam.drawn, str) else token_texts(lm, exam.drawn),
        exam.fact_span,
        exam.asked[0].facts[0].key,
        f"{lm.name}, {lm.method.name}",
        out / "demo.png",
        block_size=lm.method.cache.block_size,
        window_start=local_start(lm, kept.shape[-1]),
    )


def protocol_table(result: DemoResult) -> Table:
    """Right answers of each method by protocol, narrow enough for a terminal of 80 columns."""
    table = Table(title=f"{result.model}: right answers about {result.tokens:,} tokens of text", box=box.SIMPLE)
    for column in ("protocol", "the question comes"):
        table.add_column(column)
    for name in METHODS:
        table.add_column(name, justify="right")
    when = {
        "prefix": "with the answer's first words",
        "preamble": "in a chat, at its end",
        "late": "after the reading, later on",
    }
    for protocol in PROTOCOLS if result.model == RECALL_TINY else ("late",):
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
