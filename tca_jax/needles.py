"""Needle documents: Python's standard library source with access codes hidden in it, and questions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sysconfig
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SPLITS = ("train", "held-out")

CODE_DIGITS = 6

# Modules that training never sees, about a megabyte in every Python since 3.11.
HELD_OUT_MODULES: tuple[str, ...] = (
    "argparse.py",
    "difflib.py",
    "doctest.py",
    "imaplib.py",
    "inspect.py",
    "ipaddress.py",
    "mailbox.py",
    "optparse.py",
    "pickletools.py",
    "statistics.py",
    "subprocess.py",
    "tarfile.py",
    "typing.py",
)

# Tests and tables are hardly prose or code; the rest is not the standard library's own.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "_bundled", "dist-packages", "encodings", "idlelib", "lib2to3"}
    | {"pydoc_data", "site-packages", "test", "tests"}
)

# One length for all adjectives and one for all nouns: every question is then equally long, so that a document
# and any of its questions have together exactly the wanted number of bytes.
_FIVE_LETTERS = """
agile amber azure basic blunt brave brief brisk broad civic clean close crisp daily dense early
eager equal fancy fixed fleet fresh giant glass grand great green happy heavy humid ivory jolly
large light lilac lunar major merry minor misty noble ocean olive pearl plain polar proud quick
quiet rapid rough round royal sharp shiny silky small solar solid stone sunny sweet tidal urban
vivid white young
"""
_SIX_LETTERS = """
acacia anchor animal anthem basket beacon beaver branch bridge bronze burrow button cactus candle
canvas canyon castle cavern cheese cherry cinema clover cobalt condor copper coyote cradle dagger
desert dragon engine fabric falcon ferret fiddle forest fossil galaxy garden garnet geyser ginger
glider guitar hammer harbor helmet hornet indigo island jacket jaguar jigsaw jungle kettle kitten
ladder lagoon laurel lizard locket magnet mantle marble market meadow meteor mirror monkey mosaic
museum needle nickel nugget orchid osprey oyster palace parrot pebble pencil pepper pickle pigeon
pillow planet poplar potato quarry quartz rabbit radish raisin ribbon rocket saddle salmon school
shovel signal silver spider spring spruce square stable summer sunset symbol temple ticket timber
tomato tunnel turnip turtle tuxedo valley velvet violin walnut walrus window winter zephyr
"""
_ADJECTIVES = tuple(_FIVE_LETTERS.split())
_NOUNS = tuple(_SIX_LETTERS.split())

MAX_NEEDLES = min(len(_ADJECTIVES), len(_NOUNS))


@dataclasses.dataclass(frozen=True)
class Needle:
    """One hidden fact.

    Attributes:
        key: What the code belongs to, such as "amber falcon".
        code: Six random digits.
        position: Byte offset of the needle's line in the document's text.
    """

    key: str
    code: str
    position: int

    @property
    def line(self) -> str:
        """The comment line that stands in the document, with its line break."""
        return f"# The access code for {self.key} is {self.code}.\n"


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about a document.

    Attributes:
        prompt: What follows the document's text; a model continues it.
        answer: The six digits that a correct continuation gives, followed by a full stop.
        needle: The needle that holds the answer.
    """

    prompt: str
    answer: str
    needle: Needle


@dataclasses.dataclass(frozen=True)
class Document:
    """Real text with needles in it, all ASCII: one byte a character.

    Attributes:
        text: The text with every needle's line inserted.
        needles: The needles, in the order in which they stand in the text.
        questions: One question per needle, in random order.
    """

    text: str
    needles: tuple[Needle, ...]
    questions: tuple[Question, ...]

    def prompt(self, question: Question) -> str:
        """The document followed by one of its questions: what a model is given."""
        return self.text + question.prompt


def _question_prompt(key: str) -> str:
    return f"\n# What is the access code for {key}?\n# The access code for {key} is "


_KEY_BYTES = len(_ADJECTIVES[0]) + 1 + len(_NOUNS[0])
QUESTION_BYTES = len(_question_prompt("x" * _KEY_BYTES))
NEEDLE_BYTES = len(Needle("x" * _KEY_BYTES, "0" * CODE_DIGITS, 0).line)


def source_files(split: str) -> tuple[Path, ...]:
    """The standard library files of a split, sorted: "train" or "held-out" (`HELD_OUT_MODULES`).

    Raises:
        ValueError: `split` is neither of the two.
        FileNotFoundError: this Python has no standard library source on disk (zipped or stripped).
    """
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}: must be one of {list(SPLITS)}")
    root = Path(sysconfig.get_path("stdlib"))
    if split == "held-out":
        files = [root / name for name in HELD_OUT_MODULES if (root / name).is_file()]
    else:
        files = sorted(_training_files(root))
    if not files:
        raise FileNotFoundError(
            f"no standard library source for the {split!r} split in {root}: needle documents are made from "
            "the .py files of the running Python; use an installation that has them"
        )
    return tuple(files)


def _training_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            held_out = path.relative_to(root).as_posix() in HELD_OUT_MODULES
            if not held_out and not path.name.startswith("_sysconfigdata"):  # build settings of one machine
                yield path


@functools.lru_cache(maxsize=2)
def corpus(split: str) -> bytes:
    """All text of a split, one file after another; characters outside ASCII are left out.

    Raises:
        As `source_files`.
    """
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in source_files(split))
    return b"\n".join(text.encode("ascii", errors="ignore") for text in texts)


@functools.lru_cache(maxsize=2)
def _line_starts(split: str) -> np.ndarray:
    """Byte offsets at which a line of the corpus begins."""
    line_breaks = np.flatnonzero(np.frombuffer(corpus(split), np.uint8) == ord("\n"))
    return np.concatenate([[0], line_breaks[:-1] + 1])


def build_document(rng: np.random.Generator, num_bytes: int, num_needles: int, split: str = "held-out") -> Document:
    """Draws a passage of real text and hides needles at line boundaries that are spread over it at random.

    Args:
        rng: Source of all randomness; the same state gives the same document on the same Python.
        num_bytes: Bytes of the document together with any one of its questions.
        num_needles: Needles to hide; each has a noun and an adjective of its own.
        split: Text that the shipped model was trained on ("train") or not ("held-out").

    Returns:
        The document; `len(document.prompt(question)) == num_bytes` for each of its questions.

    Raises:
        ValueError: `num_needles`, `num_bytes` or `split` is out of range.
        FileNotFoundError: this Python has no standard library source.
    """
    if not 1 <= num_needles <= MAX_NEEDLES:
        raise ValueError(f"num_needles = {num_needles}: must lie in [1, {MAX_NEEDLES}]")
    text = corpus(split)
    body_bytes = num_bytes - QUESTION_BYTES - num_needles * NEEDLE_BYTES
    if not 0 <= body_bytes <= len(text):
        fixed = num_bytes - body_bytes
        raise ValueError(
            f"num_bytes = {num_bytes}: with num_needles = {num_needles} it must lie in "
            f"[{fixed}, {fixed + len(text)}]: needles and a question take {fixed}, the {split!r} text has "
            f"{len(text)}"
        )
    starts = _line_starts(split)
    start = int(starts[rng.integers(bisect_left(starts, len(text) - body_bytes + 1))])
    # Uniform bytes, each moved to the next line boundary: spread evenly, however long the lines are.
    offsets = rng.integers(body_bytes + 1, size=num_needles).tolist()
    cuts = [0, *sorted(_next_line(starts, start, body_bytes, offset) for offset in offsets), body_bytes]
    parts = [text[start + a : start + b].decode("ascii") for a, b in itertools.pairwise(cuts)]
    needles = tuple(
        Needle(key, code, cut + order * NEEDLE_BYTES)
        for order, (key, code, cut) in enumerate(
            zip(_keys(rng, num_needles), _codes(rng, num_needles), cuts[1:-1], strict=True)
        )
    )
    lines = [*(needle.line for needle in needles), ""]
    asked = [needles[i] for i in rng.permutation(num_needles)]
    return Document(
        text="".join(itertools.chain.from_iterable(zip(parts, lines, strict=True))),
        needles=needles,
        questions=tuple(Question(_question_prompt(needle.key), needle.code, needle) for needle in asked),
    )


def is_correct(question: Question, generated_text: str) -> bool:
    """Whether a model's continuation begins with exactly the answer: its six digits, then a full stop."""
    return generated_text.startswith(f"{question.answer}.")


def _next_line(starts: np.ndarray, start: int, body_bytes: int, offset: int) -> int:
    """First line boundary of the passage at or after `offset`; the last one where none follows."""
    index = bisect_left(starts, start + offset)
    if index == len(starts) or starts[index] > start + body_bytes:
        index -= 1
    return int(starts[index]) - start


def _keys(rng: np.random.Generator, count: int) -> list[str]:
    adjectives = rng.permutation(len(_ADJECTIVES))[:count].tolist()
    nouns = rng.permutation(len(_NOUNS))[:count].tolist()
    return [f"{_ADJECTIVES[a]} {_NOUNS[n]}" for a, n in zip(adjectives, nouns, strict=True)]


def _codes(rng: np.random.Generator, count: int) -> list[str]:
    return [f"{code:0{CODE_DIGITS}d}" for code in rng.integers(10**CODE_DIGITS, size=count).tolist()]
