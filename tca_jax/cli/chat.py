"""`tca-jax chat`: reads a document once, then answers questions about it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tca_jax.cli import spare_one_ctrl_c
from tca_jax.cli.errors import users_message
from tca_jax.cli.files import read_text, require_writable
from tca_jax.cli.models import SYSTEM_BEHIND_CONTEXT, opened, read_context
from tca_jax.cli.options import (
    AnswerOptions,
    ContextOption,
    ModelArgument,
    ModelOptions,
    SystemOption,
    with_options,
)
from tca_jax.cli.progress import progress
from tca_jax.errors import UserError
from tca_jax.files import naming

if TYPE_CHECKING:
    from tca_jax.engine.contexts import Context, ContextStats
    from tca_jax.engine.generation import Output
    from tca_jax.engine.lm import LM
    from tca_jax.engine.prompts import DocumentTemplate

_PROMPT = "> "
_SEEDS = 2**32


@with_options
def chat(
    model: ModelArgument,
    file: Annotated[Path | None, typer.Option(help="The document (UTF-8).", show_default="that of --context")] = None,
    system: SystemOption = None,
    context: ContextOption = None,
    save_context: Annotated[Path | None, typer.Option(help="Folder to save the read document to.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Questions and answers stay part of what is read.")] = False,
    running: ModelOptions = ModelOptions(),  # noqa: B008 (frozen)
    answering: AnswerOptions = AnswerOptions(),  # noqa: B008
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each question.")] = False,
) -> None:
    """Read a document once, then answer questions about it.

    Each question is asked of the document alone; with --follow, of all that was said before, too. An empty line or
    Ctrl-D ends it; Ctrl-C ends an answer, and the chat where nothing is being answered. Where standard input is no
    terminal, each of its lines is a question. Each further question is drawn with the next --seed.

    A model with a chat template gets document and question as one message, another one the question as it is typed,
    to go on from.

    With --json: {"question", "text", "tokens", "finish_reason", "first_token_seconds", "seconds", "stats"} a line, or
    {"question", "error"}.

    Example: [bold]tca-jax chat recall-tiny --profile shipped --file book.txt[/]
    """
    if (file is None) == (context is None):
        raise UserError("give the document as --file, or as --context where it was saved before")
    if file == Path("-"):
        raise UserError("--file -: standard input holds the questions; give the document as a file")
    if system is not None and context is not None:
        raise UserError(SYSTEM_BEHIND_CONTEXT)
    if save_context is not None:
        require_writable(save_context, "--save-context")
    options = answering.arguments() | {"backend": running.backend}
    text = None if file is None else read_text(file, "--file")
    start = time.perf_counter()
    saved = None if context is None else read_context(context)
    loading = time.perf_counter() - start
    lm, frame, document = _load(model, running, text, system, answering.max_new_tokens)
    if saved is not None:
        saved.require_made_by(lm)
    read = _read(lm, document, running.backend) if saved is None else saved
    _print_cost(read.stats, None if saved is None else loading)
    if save_context is not None:
        read.save(save_context)
    conversation = Conversation(lm, frame, read, follow, options, as_json)
    for question in _questions(echo=not as_json):
        try:
            conversation.ask(question)
        except ValueError as error:  # too long, say: what was read is worth more than one question
            if (message := users_message(error)) is None:
                raise
            print(f"error: {message}", file=sys.stderr, flush=True)
            if as_json:
                _print_line({"question": question, "error": message})


def _load(
    model: str, running: ModelOptions, text: str | None, system: str | None, max_new_tokens: int
) -> tuple[LM, DocumentTemplate, list[int]]:
    """The model, what stands around documents and questions, and the document's ids, which are known to fit."""
    from tca_jax.engine.prompts import DocumentTemplate, encode_prompt, require_positions

    with opened(model, running) as (checkpoint, load):
        encode_prompt(checkpoint, "text", "--file")  # no tokenizer: say so before weights are read
        frame = DocumentTemplate.of(checkpoint, system)
        document = [] if text is None else frame.document(checkpoint, text, "--file")
        require_positions("--file", len(document), max_new_tokens, checkpoint)
        return load(), frame, document


def _read(lm: LM, document: list[int], backend: str) -> Context:
    """The document."""
    import tca_jax

    with progress() as report:
        report(f"compiling, and reading {len(document):,} tokens", None, None)
        return tca_jax.prefill(lm, document, backend=backend)


def _print_cost(stats: ContextStats, loading: float | None) -> None:
    """What reading the document took, or loading what was read before."""
    how = f"read in {stats.prefill_seconds:.2f} s" if loading is None else f"loaded in {loading:.2f} s"
    compiling = f", compiling took {stats.compile_seconds:.1f} s more" if stats.compile_seconds else ""
    held, full = (f"{count / 1e6:,.2f}" for count in (stats.kv_cache_bytes, stats.full_kv_cache_bytes))
    print(
        f"{' + '.join(f'{n:,}' for n in stats.tokens)} tokens {how}{compiling}; KV cache {held} MB, {full} MB under "
        f"full attention",
        file=sys.stderr,
    )


def _questions(*, echo: bool) -> Iterator[str]:
    """Lines of standard input: from a terminal up to an empty one, otherwise all that are not empty."""
    if sys.stdin.isatty():
        while True:
            try:
                line = input(_PROMPT if echo else "").strip()
            except EOFError:
                print()
                return
            if not line:
                return
            yield line
    for line in map(str.strip, sys.stdin):
        if line:
            if echo:
                print(f"{_PROMPT}{line}", flush=True)
            yield line


def _print_line(record: Mapping[str, Any]) -> None:
    """One object on a line of standard output."""
    with naming("standard output"):
        print(json.dumps(record, allow_nan=False), flush=True)


@dataclasses.dataclass
class Conversation:
    """Questions about a context, each asked of the same one, or with `follow` of one that grows."""

    lm: LM
    frame: DocumentTemplate
    context: Context
    follow: bool
    options: Mapping[str, Any]
    as_json: bool = False
    _asked: int = 0
    _answered: bool = False

    def ask(self, question: str) -> None:
        """Prints the answer as it is made, and on standard error what it took; Ctrl-C at a terminal ends the answer."""
        import tca_jax

        text = self.frame.question(question, follows_answer=self._answered)
        options = {**self.options, "seed": (self.options["seed"] + self._asked) % _SEEDS}
        self._asked += 1
        start = time.perf_counter()
        with spare_one_ctrl_c() if sys.stdin.isatty() else contextlib.nullcontext(lambda: False) as interrupted:
            pieces = tca_jax.stream(self.lm, text, context=self.context, **options)
            out, first = _print_pieces(pieces, start, interrupted, silent=self.as_json)
        total = time.perf_counter() - start
        if not self.as_json:
            print(flush=True)
        if out is None:
            print("[interrupted; Ctrl-C again, or an empty line, ends the chat]", file=sys.stderr)
            return
        if self.as_json:
            _print_line({"question": question, **_record(out, first or total, total)})
        else:
            print(_describe(out, first or total, total), file=sys.stderr)
        if self.follow:
            self._remember(text, out)

    def _remember(self, text: str, out: Output) -> None:
        """Makes question and answer part of the context, without the token that ended the answer."""
        import tca_jax
        from tca_jax.engine.prompts import encode_continuation

        answer = out.tokens[0]
        said = answer[:-1] if answer and answer[-1] in self.lm.eos_token_ids else answer
        ids = encode_continuation(self.lm, text, self.context.token_ids()) + said
        self.context = tca_jax.prefill(self.lm, ids, context=self.context, backend=self.options["backend"])
        self._answered = True


def _print_pieces(
    stream: Generator[str, None, Output], start: float, interrupted: Callable[[], bool], *, silent: bool
) -> tuple[Output | None, float | None]:
    """Prints a stream up to its end, or until it is interrupted; a `silent` one is only timed.

    Returns:
        Its output, None where it was interrupted; and the seconds from `start` to its first piece, None without any.
    """
    first = None
    while not interrupted():
        try:
            piece = next(stream)
        except StopIteration as end:
            return end.value, first
        first = first or time.perf_counter() - start
        if not silent:
            print(piece, end="", flush=True)
    stream.close()
    return None, first


def _record(out: Output, first: float, total: float) -> dict[str, Any]:
    """What `--json` prints of an answer; the help of `chat` describes it."""
    times = {"first_token_seconds": first, "seconds": total}
    answer = {"text": out.text[0], "tokens": out.tokens[0], "finish_reason": out.finish_reasons[0]}
    return answer | times | {"stats": dataclasses.asdict(out.stats)}


def _describe(out: Output, first: float, total: float) -> str:
    compiling = out.stats.compile_seconds
    more = f", of which {compiling:.1f} s were compiling" if compiling else ""
    return f"[first token after {first:.2f} s, {total:.2f} s in all{more}; {out.stats.new_tokens[0]} tokens]"
