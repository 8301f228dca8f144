"""`tca-jax chat`: reads a document once, then answers questions about it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tca_jax.cli import spare_one_ctrl_c
from tca_jax.cli.errors import users_message
from tca_jax.cli.files import read_text, require_writable
from tca_jax.cli.options import DtypeOption, ModelArgument, ProfileOption
from tca_jax.cli.progress import progress
from tca_jax.errors import UserError

if TYPE_CHECKING:
    from tca_jax.engine.contexts import Context
    from tca_jax.engine.generation import Output
    from tca_jax.engine.lm import LM
    from tca_jax.engine.prompts import DocumentTemplate

_PROMPT = "> "
_LARGEST = 2**31 - 1


def chat(
    model: ModelArgument,
    file: Annotated[Path | None, typer.Option(help="The document (UTF-8).", show_default="that of --context")] = None,
    profile: ProfileOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1, max=_LARGEST)] = 256,
    follow: Annotated[bool, typer.Option("--follow", help="Questions and answers stay part of what is read.")] = False,
    save_context: Annotated[Path | None, typer.Option(help="Folder to save the read document to.")] = None,
    context: Annotated[Path | None, typer.Option(help="Folder of a saved one, instead of --file.")] = None,
    backend: Annotated[str, typer.Option(help="auto, xla, triton or mosaic.")] = "auto",
    dtype: DtypeOption = None,
) -> None:
    """Read a document once, then answer questions about it.

    Each question is asked of the document alone; with --follow, of all that was said before, too. An empty line or
    Ctrl-D ends it; Ctrl-C ends an answer, and the chat where nothing is being answered. Where standard input is no
    terminal, each of its lines is a question.

    A model with a chat template gets document and question as one message, another one the question as it is typed,
    to go on from.

    Example: [bold]tca-jax chat recall-tiny --profile shipped --file book.txt[/]
    """
    if (file is None) == (context is None):
        raise UserError("give the document as --file, or as --context where it was saved before")
    if file == Path("-"):
        raise UserError("--file -: standard input holds the questions; give the document as a file")
    if save_context is not None:
        require_writable(save_context, "--save-context")
    text = None if file is None else read_text(file, "--file")
    lm, frame, document = _load(model, profile, dtype, text, max_new_tokens)
    read = _read(lm, document, context, backend)
    if save_context is not None:
        read.save(save_context)
    conversation = Conversation(lm, frame, read, follow, max_new_tokens, backend)
    for question in _questions():
        try:
            conversation.ask(question)
        except ValueError as error:  # too long, say: what was read is worth more than one question
            if (message := users_message(error)) is None:
                raise
            print(f"error: {message}", file=sys.stderr, flush=True)


def _load(
    model: str, profile: str | None, dtype: str | None, text: str | None, max_new_tokens: int
) -> tuple[LM, DocumentTemplate, list[int]]:
    """The model, what stands around documents and questions, and the document's ids, which are known to fit."""
    from tca_jax.engine.prompts import DocumentTemplate, encode_prompt, require_positions
    from tca_jax.loading import check_dtype, open_checkpoint

    check_dtype(dtype)
    with progress() as report:
        report(f"loading {model}", None, None)
        checkpoint = open_checkpoint(model)
        encode_prompt(checkpoint, "text", "--file")  # no tokenizer: say so before weights are read
        frame = DocumentTemplate.of(checkpoint)
        document = [] if text is None else frame.document(checkpoint, text, "--file")
        require_positions("--file", len(document), max_new_tokens, checkpoint)
        lm = checkpoint.load(profile, dtype=dtype, progress=lambda done, total: report(f"loading {model}", done, total))
    return lm, frame, document


def _read(lm: LM, document: list[int], saved: Path | None, backend: str) -> Context:
    """The document, read now or before."""
    import tca_jax

    start = time.perf_counter()
    with progress() as report:
        if saved is not None:
            report(f"loading {saved}", None, None)
            context = tca_jax.Context.load(saved)
            context.require_made_by(lm)
        else:
            report(f"compiling, and reading {len(document):,} tokens", None, None)
            context = tca_jax.prefill(lm, document, backend=backend)
    stats, seconds = context.stats, time.perf_counter() - start
    how = f"loaded in {seconds:.2f} s" if saved is not None else f"read in {stats.prefill_seconds:.2f} s"
    compiling = f", compiling took {stats.compile_seconds:.1f} s more" if stats.compile_seconds else ""
    held, full = (f"{count / 1e6:,.2f}" for count in (stats.kv_cache_bytes, stats.full_kv_cache_bytes))
    print(
        f"{' + '.join(f'{n:,}' for n in stats.tokens)} tokens {how}{compiling}; KV cache {held} MB, {full} MB under "
        f"full attention",
        file=sys.stderr,
    )
    return context


def _questions() -> Iterator[str]:
    """Lines of standard input: from a terminal up to an empty one, otherwise all that are not empty, each echoed."""
    if sys.stdin.isatty():
        while True:
            try:
                line = input(_PROMPT).strip()
            except EOFError:
                print()
                return
            if not line:
                return
            yield line
    for line in map(str.strip, sys.stdin):
        if line:
            print(f"{_PROMPT}{line}", flush=True)
            yield line


@dataclasses.dataclass
class Conversation:
    """Questions about a context, each asked of the same one, or with `follow` of one that grows."""

    lm: LM
    frame: DocumentTemplate
    context: Context
    follow: bool
    max_new_tokens: int
    backend: str
    _answered: bool = False

    def ask(self, question: str) -> None:
        """Prints the answer as it is made, and on standard error what it took; Ctrl-C at a terminal ends the answer."""
        import tca_jax

        text = self.frame.question(question, follows_answer=self._answered)
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "backend": self.backend}
        start = time.perf_counter()
        with spare_one_ctrl_c() if sys.stdin.isatty() else contextlib.nullcontext(lambda: False) as interrupted:
            pieces = tca_jax.stream(self.lm, text, context=self.context, **options)
            out, first = _print_pieces(pieces, start, interrupted)
        print(flush=True)
        if out is None:
            print("[interrupted; Ctrl-C again, or an empty line, ends the chat]", file=sys.stderr)
            return
        total = time.perf_counter() - start
        print(_describe(out, first or total, total), file=sys.stderr)
        if self.follow:
            self._remember(text, out)

    def _remember(self, text: str, out: Output) -> None:
        """Makes question and answer part of the context, without the token that ended the answer."""
        import tca_jax
        from tca_jax.engine.prompts import encode_verbatim

        answer = out.tokens[0]
        said = answer[:-1] if answer and answer[-1] in self.lm.eos_token_ids else answer
        ids = encode_verbatim(self.lm, text) + said
        self.context = tca_jax.prefill(self.lm, ids, context=self.context, backend=self.backend)
        self._answered = True


def _print_pieces(
    stream: Generator[str, None, Output], start: float, interrupted: Callable[[], bool]
) -> tuple[Output | None, float | None]:
    """Prints a stream up to its end, or until it is interrupted.

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
        print(piece, end="", flush=True)
    stream.close()
    return None, first


def _describe(out: Output, first: float, total: float) -> str:
    compiling = out.stats.compile_seconds
    more = f", of which {compiling:.1f} s were compiling" if compiling else ""
    return f"[first token after {first:.2f} s, {total:.2f} s in all{more}; {out.stats.new_tokens[0]} tokens]"
