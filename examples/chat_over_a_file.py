"""Chat over a long file: it is read once, every answer comes in the time of a short prompt, and a turn can be undone.

python examples/chat_over_a_file.py book.txt --model qwen2.5-7b-instruct --profile profiles/qwen2.5-7b-instruct
python examples/chat_over_a_file.py    # the shipped model, and a text with facts hidden in it
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

import tca_jax
from tca_jax.engine.prompts import DocumentTemplate
from tca_jax.lab import recall

HELP = "Ask about the text. /undo forgets the last question, /cost says what is held, an empty line ends."


class Chat:
    """A conversation about a document. Each turn's context is kept: a context is never consumed, so going back is free.

    Args:
        lm: The model, under any attention method.
        text: The document.
        kept: Folder of the read document: read from there if it is there, else written. None reads it anew.
    """

    def __init__(self, lm: tca_jax.LM, text: str, kept: Path | None) -> None:
        self.lm, self.frame = lm, DocumentTemplate.of(lm)
        if kept is not None and kept.is_dir():
            context = tca_jax.Context.load(kept)
            context.require_made_by(lm)
        else:
            context = tca_jax.prefill(lm, self.frame.document(lm, text, "the file"))
            if kept is not None:
                context.save(kept)
        self.contexts = [context]

    def ask(self, question: str, max_new_tokens: int) -> Iterator[str]:
        """The answer, piece by piece; then question and answer are part of what the next question follows."""
        asked = self.frame.question(question, follows_answer=len(self.contexts) > 1)
        now = self.contexts[-1]
        out = yield from tca_jax.stream(self.lm, asked, context=now, max_new_tokens=max_new_tokens)
        said = [token for token in out.tokens[0] if token not in self.lm.eos_token_ids]
        now = tca_jax.prefill(self.lm, asked, context=now)
        self.contexts.append(tca_jax.prefill(self.lm, said, context=now) if said else now)

    def undo(self) -> bool:
        """Forgets the last question and its answer; False where there is none."""
        if len(self.contexts) == 1:
            return False
        self.contexts.pop()
        return True

    def cost(self) -> str:
        """What is held, next to what full attention would hold."""
        stats = self.contexts[-1].stats
        held, full = stats.kv_cache_bytes / 1e6, stats.full_kv_cache_bytes / 1e6
        return f"{stats.tokens[0]:,} tokens read, KV cache {held:.2f} MB; {full:.2f} MB under full attention"


def example_text() -> tuple[str, list[str]]:
    """A text that the shipped model can be asked about, and questions about it."""
    document = recall.build_document(np.random.default_rng(7), 3000, ("digits", "words"))
    return document.text, [question.text for question in document.questions]


def read_file(path: Path) -> str:
    """Text of a UTF-8 file; ends the program with one line where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise SystemExit(f"{path}: {error}") from None
    if not text.strip():
        raise SystemExit(f"{path} holds no text")
    return text


def questions_from(given: Iterable[str], *, follow_terminal: bool) -> Iterator[str]:
    """Questions of the command line, each shown; then, on a terminal, what is typed."""
    for question in given:
        print(f"> {question}")
        yield question
    while follow_terminal:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def converse(chat: Chat, questions: Iterable[str], max_new_tokens: int) -> None:
    for question in questions:
        if question == "/undo":
            print("forgotten" if chat.undo() else "there is no question to forget")
            continue
        if question == "/cost":
            print(chat.cost())
            continue
        start = time.perf_counter()
        try:
            for piece in chat.ask(question, max_new_tokens):
                print(piece, end="", flush=True)
        except ValueError as error:  # too long, say: what was read is worth more than one question
            print(f"error: {error}", end="")
        print(f"\n  [{time.perf_counter() - start:.1f} s]")


def main(options: argparse.Namespace) -> None:
    text, asked = example_text() if options.file is None else (read_file(options.file), [])
    profile = options.profile
    if options.model == "recall-tiny" and profile is None:
        profile = "shipped"
    try:
        lm = tca_jax.load(options.model, profile=profile)
        chat = Chat(lm, text, options.keep)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    print(f"{lm.name} under {lm.method.name}: {chat.cost()}")
    terminal = sys.stdin.isatty() and not options.ask
    if terminal:
        print(HELP)
    converse(chat, questions_from(options.ask or asked, follow_terminal=terminal), options.max_new_tokens)
    print(chat.cost())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="UTF-8 text (default: one made for the shipped model)")
    parser.add_argument("--model", default="recall-tiny", help="alias, Hub id or folder (default: %(default)s)")
    parser.add_argument("--profile", help="profile folder; none is full attention, but for the shipped model")
    parser.add_argument("--keep", type=Path, help="folder that the read file is kept in, to be there the next time")
    parser.add_argument("--ask", action="append", help="a question; may be repeated; then nothing is asked for")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    main(parser.parse_args())
