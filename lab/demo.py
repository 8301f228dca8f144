"""The demo: questions about a read document under full attention, predicted worth, and a window of its bytes."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from tca_jax.calibration.profile import Profile
from tca_jax.engine.contexts import ContextStats, DocumentTemplate, prefill
from tca_jax.engine.generation import generate
from tca_jax.errors import require, require_name
from tca_jax.lab.models import find, models_folder
from tca_jax.lab.plots import plot_selected_tokens
from tca_jax.lab.recall import Document, Question, build_document, is_correct
from tca_jax.lab.recall.documents import hide
from tca_jax.lab.recall.facts import Fact, draw_keys
from tca_jax.loading import Checkpoint, open_checkpoint
from tca_jax.methods.worth import BLOCK
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.progress import Report

#: The default is the first one that is there.
MODELS = SMOLLM2, RECALL_TINY = "smollm2", "recall-tiny"
#: Columns: full attention, predicted worth, and streaming attention (first tokens and a window) with its bytes.
METHODS = "full", "worth", "window"
#: Tasks of recall-tiny's questions, in this order; short answers, for the demo runs on any machine.
_TASKS = ("digits", "words", "keys", "tracking", "hex", "queries", "values")
#: Kinds of SmolLM2's facts with their values; # is a digit. Chosen by full attention's answers: of each kind, at least
#: 3 of 4 are right at 3,000 tokens. "Question: " in front of them: 25 of 30 right at 4,096 tokens, 23 without it.
_VALUES = {
    "access code": ("######",),
    "captain": ("Alice", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Irene", "Jonas"),
    "color": ("black", "blue", "brown", "green", "orange", "pink", "purple", "red", "white", "yellow"),
    "home town": ("Bergen", "Dublin", "Granada", "Hamburg", "Krakow", "Lisbon", "Oslo", "Porto", "Riga", "Turin"),
    "meeting day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "phone number": ("555-####",),
}
DEFAULT_QUESTIONS = {SMOLLM2: len(_VALUES), RECALL_TINY: 3}
_MOST_QUESTIONS = {SMOLLM2: len(_VALUES), RECALL_TINY: len(_TASKS)}
_ANSWER_TOKENS = {SMOLLM2: 32, RECALL_TINY: 320}
_SPARE_TOKENS = 512  # positions for a question and its answer
_LEAST_TOKENS = 3000  # all facts of `_TASKS`, and a little text between them; several times SmolLM2's window


@dataclasses.dataclass(frozen=True)
class Column:
    """Costs of the document and answers of one method."""

    stats: ContextStats  # of the document
    texts: list[str]  # of the answers
    right: list[bool]
    seconds: list[float]  # from a question to the end of its answer, without compilation

    @property
    def share(self) -> float:
        """KV cache bytes over full attention's."""
        return self.stats.kv_cache_bytes / self.stats.full_kv_cache_bytes


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """Answers and costs of all methods."""

    model: str
    tokens: int  # of the document
    window: int  # tokens, of the third method
    questions: list[str]
    columns: dict[str, Column]  # by method
    picture: Path

    def summary(self) -> str:
        """The figures in one sentence."""
        full, worth, window = self.columns.values()
        kept = f"predicted worth {sum(worth.right)} with {worth.share:.0%} of the KV cache"
        return (
            f"Asked after {self.tokens:,} tokens were read: full attention answers {sum(full.right)} of "
            f"{len(self.questions)} questions, {kept}, "
            f"a window of {self.window:,} tokens with {window.share:.0%} of it {sum(window.right)}."
        )

    def lost(self) -> list[list[str]]:
        """Questions that predicted worth answers and the window does not, with both answers."""
        _, worth, window = self.columns.values()
        of_both = zip(self.questions, worth.texts, window.texts, worth.right, window.right, strict=True)
        return [[*map(printable, each)] for *each, right, also in of_both if right and not also]


def choose_model(name: str | None = None) -> str:
    """The model of this name; by default SmolLM2 where its file and the gguf package are there, else recall-tiny."""
    if name is None:
        return SMOLLM2 if find(SMOLLM2) and importlib.util.find_spec("gguf") else RECALL_TINY
    require_name(f"model = {name!r}", name, MODELS)
    missing = name == SMOLLM2 and find(name) is None
    require(not missing, f"model = {name!r}: its file is not in {models_folder()}; `make models` fetches it")
    return name


def open_model(model: str, tokens: int, questions: int) -> Checkpoint:
    """Opens one of `MODELS` for a demo of this size."""
    most = _MOST_QUESTIONS[model]
    require(1 <= questions <= most, f"questions = {questions}: must lie in [1, {most}]")
    checkpoint = open_checkpoint(find(model) if model == SMOLLM2 else model)
    most = checkpoint.config.max_context - _SPARE_TOKENS
    require(_LEAST_TOKENS <= tokens <= most, f"tokens = {tokens}: must lie in [{_LEAST_TOKENS}, {most}]")
    return checkpoint


def model_line(model: str) -> str:
    """Names the model; for the shipped one, how to get a real one."""
    if model == SMOLLM2:
        return "Model: SmolLM2-135M-Instruct"
    remedy = "needs the gguf package: pip install gguf" if find(SMOLLM2) else "is a real one: `make models` fetches it"
    remark = "" if choose_model() == SMOLLM2 else f" SmolLM2-135M-Instruct {remedy}."
    return f"Model: {RECALL_TINY}, which ships with the package.{remark}"


def run_demo(
    checkpoint: Checkpoint, tokens: int, questions: int, seed: int, out: Path, report: Report | None = None
) -> DemoResult:
    """Answers questions about a document under each method, and draws the tokens that predicted worth keeps."""
    report = report or (lambda step, done, total: None)
    model = RECALL_TINY if checkpoint.name == RECALL_TINY else SMOLLM2
    frame, rng = DocumentTemplate.of(checkpoint), np.random.default_rng(seed)
    if model == SMOLLM2:
        document, known = _with_facts(checkpoint, tokens, rng)
    else:  # a byte is a token; 2: the tokens bos and user
        document = build_document(rng, tokens - 2, _TASKS)
        known = list(document.questions[:questions])
    # In the order of their facts: the first ones are far outside a window.
    asked = sorted(known, key=lambda question: document.place(question.facts[0]))[:questions]
    ids = frame.document(checkpoint, document.text, "document")[:tokens]
    full = checkpoint.load(progress=lambda done, total: report(f"loading {checkpoint.name}", done, total))
    profiles = Path(__file__).parent / "profiles" / model if model == SMOLLM2 else checkpoint.folder
    worth = full.with_profile(Profile.load(profiles / "profile"))
    window, columns = full, dict[str, Column]()
    for name in METHODS:
        if name == "window":  # the first tokens have a page, and the last block may have begun another
            pages = int(columns["worth"].share * cdiv(len(ids), BLOCK)) - 1 - bool(len(ids) % BLOCK)
            window = full.with_method("streaming", window=BLOCK * pages)
        lm = {"full": full, "worth": worth, "window": window}[name]
        report(f"{name}: compiling, and reading {len(ids):,} tokens", None, None)
        context = prefill(lm, ids)
        columns[name] = column = Column(context.stats, [], [], [])
        for number, question in enumerate(asked):
            report(f"{name}: question {number + 1} of {len(asked)}", number, len(asked))
            prompt = frame.question(question.text, follows_answer=False)
            answered = generate(lm, prompt, context=context, max_new_tokens=_ANSWER_TOKENS[model])
            stats, text = answered.stats, answered.text[0]
            column.seconds.append(stats.prefill_seconds + stats.seconds_per_token * len(answered.tokens[0]))
            column.texts.append(text)
            # recall-tiny was trained to answer in one form; of any other answer the value counts.
            right = is_correct(question, text, "late") if question.task in _TASKS else question.answer in text
            column.right.append(right)
    report("drawing the tokens that are kept", None, None)
    out.mkdir(parents=True, exist_ok=True)
    picture = plot_selected_tokens(worth, ids, out / "demo.png", around=asked[0].facts[0].line.strip())
    return DemoResult(model, len(ids), window.method.cache.window, [each.text for each in asked], columns, picture)


def _with_facts(checkpoint: Checkpoint, tokens: int, rng: np.random.Generator) -> tuple[Document, list[Question]]:
    """A document with facts of different kinds, and the questions for them."""
    frame, keys = DocumentTemplate.of(checkpoint), draw_keys(rng)
    known = []
    for kind, values in _VALUES.items():
        value = "".join(str(rng.integers(10)) if char == "#" else char for char in str(rng.choice(values)))
        of = f"the {kind} for {(key := next(keys))}"
        known.append(Question("fact", (Fact(kind, key, value),), f"Question: What is {of}?", f"T{of[1:]} is ", value))
    num_bytes, hidden = 3 * tokens, rng.integers(2**32)
    for _ in range(4):  # toward the number of tokens
        document = hide(np.random.default_rng(hidden), num_bytes, known, "held-out")
        num_bytes = num_bytes * tokens // len(frame.document(checkpoint, document.text, "document"))
    return document, known


def result_table(result: DemoResult) -> Table:
    """Answers and costs, a column for each method."""
    table = Table(title=f"{result.model}: questions about {result.tokens:,} tokens that were read", box=box.SIMPLE)
    table.add_column("", ratio=1)
    for name in result.columns:
        table.add_column(name, justify="right")
    columns = result.columns.values()
    for number, question in enumerate(result.questions):
        marks = ["[green]right[/]" if column.right[number] else "[red]wrong[/]" for column in columns]
        table.add_row(Text(printable(question)), *marks)
    table.add_section()
    table.add_row("KV cache, MB", *(f"{column.stats.kv_cache_bytes / 1e6:.1f}" for column in columns))
    table.add_row("prefill attends to", *(f"{column.stats.attended_share:.0%}" for column in columns))
    table.add_row("seconds to read", *(f"{column.stats.prefill_seconds:.1f}" for column in columns))
    table.add_row("seconds a question", *(f"{np.mean(column.seconds):.1f}" for column in columns))
    return table


def printable(text: str) -> str:
    """The text on one line, with a dot for control characters."""
    return "".join(char if char.isprintable() else "·" for char in text)
