"""`tca-jax chat`: reads a document once, then answers questions about it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Option

from tca_jax.cli import spare_one_ctrl_c
from tca_jax.cli.files import read_text, require_writable
from tca_jax.cli.generate import cut_note, print_stream
from tca_jax.cli.models import SYSTEM_BEHIND_CONTEXT, opened, read_context
from tca_jax.cli.options import ContextOption, ModelArgument, ModelOptions, SystemOption, with_options
from tca_jax.engine.generation_config import GenerationConfig
from tca_jax.errors import UserError, require
from tca_jax.progress import progress


@with_options
def chat(
    model: ModelArgument,
    file: Annotated[Path | None, Option(help="The document (UTF-8).", show_default="that of --context")] = None,
    system: SystemOption = None,
    context: ContextOption = None,
    save_context: Annotated[Path | None, Option(help="Folder to save the prefilled document to.")] = None,
    follow: Annotated[bool, Option("--follow", help="Append each question and answer to the document.")] = False,
    running: ModelOptions = ModelOptions(),  # noqa: B008 (frozen)
    config: GenerationConfig = GenerationConfig(),  # noqa: B008
) -> None:
    """Read a document once, then answer questions about it.

    Without --follow, questions do not see each other. An empty line or Ctrl-D ends the chat; Ctrl-C ends an answer. In
    a pipe, each line is a question. With a --temperature, each question draws with the next --seed. A chat template
    puts document and question into one message. Without one, the model continues the question.

    Example: [bold]tca-jax chat recall-tiny --profile shipped --file book.txt[/]
    """
    one = (file is None) != (context is None)
    require(one, "give the document as --file, or as --context where it was saved before")
    require(file != Path("-"), "--file -: standard input holds the questions; give the document as a file")
    require(system is None or context is None, SYSTEM_BEHIND_CONTEXT)
    if save_context is not None:
        require_writable(save_context, "--save-context")
    text = None if file is None else read_text(file, "--file")
    import tca_jax
    from tca_jax.engine.contexts import DocumentTemplate
    from tca_jax.engine.prompts import encode_continuation, require_positions

    read = None if context is None else read_context(context)
    with opened(model, running) as (checkpoint, load):
        frame = DocumentTemplate.of(checkpoint, system)
        document = [] if text is None else frame.document(checkpoint, text, "--file")
        require_positions("--file", len(document), config.max_new_tokens, checkpoint)
        lm = load()
    if read is None:
        with progress() as report:
            report(f"compiling, and reading {len(document):,} tokens", None, None)
            read = tca_jax.prefill(lm, document, backend=running.backend)
    read.require_made_by(lm)
    held, full = (f"{count / 1e6:,.2f}" for count in (read.stats.kv_cache_bytes, read.stats.full_kv_cache_bytes))
    took = "loaded" if context else f"read in {read.stats.prefill_seconds:.2f} s"
    print(f"{sum(read.stats.tokens):,} tokens {took}; KV cache {held} MB, {full} MB in full attention", file=sys.stderr)
    if save_context is not None:
        read.save(save_context)
    terminal, answered = sys.stdin.isatty(), False
    for number, question in enumerate(_questions(terminal)):
        asked = frame.question(question, follows_answer=answered)
        own = dataclasses.replace(config, seed=(config.seed + number) % 2**32)
        with spare_one_ctrl_c() if terminal else contextlib.nullcontext(lambda: False) as interrupted:
            try:
                stream = tca_jax.stream(lm, asked, own, context=read, backend=running.backend)
                out = print_stream(stream, "compiling, and reading the question", interrupted)
            except UserError as error:  # a question that is too long does not end the chat
                print(f"error: {error}", file=sys.stderr, flush=True)
                continue
        if out is None:
            print("[interrupted; Ctrl-C again, or an empty line, ends the chat]", file=sys.stderr)
            continue
        tokens = out.tokens[0]
        seconds = out.stats.prefill_seconds + out.stats.seconds_per_token * (len(tokens) - 1)
        print(f"[{len(tokens)} tokens in {seconds:.2f} s]{cut_note(out)}", file=sys.stderr)
        if follow:
            ids = encode_continuation(lm, asked, read.token_ids())
            ids += [token for token in tokens if token not in lm.eos_token_ids]
            read, answered = tca_jax.prefill(lm, ids, context=read, backend=running.backend), True


def _questions(terminal: bool) -> Iterator[str]:
    """Lines of standard input; from a terminal up to an empty one."""
    with contextlib.suppress(EOFError):
        while terminal and (line := input("> ").strip()):
            yield line
    for line in filter(None, map(str.strip, () if terminal else sys.stdin)):
        print(f"> {line}", flush=True)
        yield line
