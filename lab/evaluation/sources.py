"""Sources of samples: the user's files, and substitutes for essays, texts and words."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import random
import re
from pathlib import Path
from typing import Any

from tca_jax.cli.files import read_text
from tca_jax.errors import explaining, require
from tca_jax.lab.recall.corpus import corpus
from tca_jax.lab.recall.facts import ADJECTIVES, NOUNS
from tca_jax.models.json_object import read_json


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of a source."""

    digest: str  # SHA-256 of the content
    label: str  # for tables
    substitute: bool = False  # stands in for the source of the task's authors


@dataclasses.dataclass(frozen=True)
class Words:
    """English words for keys and lists, sorted, without repetition."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]  # may be empty
    origin: str
    substitute: bool

    @functools.cached_property
    def singles(self) -> tuple[str, ...]:
        """All words."""
        return tuple(sorted({*self.adjectives, *self.nouns, *self.verbs}))

    def draw_distinct(self, rng: random.Random, count: int) -> list[str]:
        """Different words, or pairs of words if there are too few; ValueError if there are too few pairs."""
        if count <= len(self.singles):
            return rng.sample(self.singles, count)
        pairs, nouns = len(self.adjectives) * len(self.nouns), len(self.nouns)
        require(count <= pairs, f"a list of {count} different words: {self.origin} makes {pairs}")
        return [f"{self.adjectives[i // nouns]}-{self.nouns[i % nouns]}" for i in rng.sample(range(pairs), count)]


@functools.cache
def load_words() -> Words:
    """The words of `wonderwords`, as in RULER, if it is installed; otherwise our own."""
    try:
        import wonderwords
    except ImportError:
        origin = f"tca_jax's own {len(ADJECTIVES) + len(NOUNS)} words (wonderwords is not installed)"
        return Words(tuple(sorted(ADJECTIVES)), tuple(sorted(NOUNS)), (), origin, substitute=True)
    from importlib.metadata import version

    lists = wonderwords.RandomWord()
    adjectives, nouns, verbs = (
        tuple(sorted(set(lists.filter(include_categories=[kind])))) for kind in ("adjective", "noun", "verb")
    )
    return Words(adjectives, nouns, verbs, f"wonderwords {version('wonderwords')}", substitute=False)


@dataclasses.dataclass(frozen=True)
class Sources:
    """The files of a run; None for files that the user did not name."""

    essays: Path | None = None  # haystacks: plain text, or JSON with a "text", as RULER's download script writes it
    squad: Path | None = None  # SQuAD 2.0, JSON
    hotpotqa: Path | None = None  # HotpotQA (distractor setting), JSON
    text: Path | None = None  # for loss

    @functools.cached_property
    def essay_words(self) -> list[str]:
        """Words of the haystacks' text."""
        return re.sub(r"\s+", " ", _text(self.essays, "--essays")).split(" ")

    @functools.cached_property
    def user_text(self) -> str:
        """Text for loss."""
        return _text(self.text, "--text")

    def origin(self, name: str) -> Origin:
        """Origin of a source: a field's name, or "words"."""
        if name == "words":
            words = load_words()
            return Origin(digest("\n".join(words.singles).encode()), words.origin, words.substitute)
        path: Path | None = getattr(self, name)
        if path is None:
            label = f"the source of Python {platform.python_version()}'s standard library"
            return Origin(digest(corpus("held-out")), label, substitute=True)
        return Origin(digest(path.read_bytes()), path.name)


def digest(data: bytes) -> str:
    """SHA-256 of some content."""
    return hashlib.sha256(data).hexdigest()


def _text(path: Path | None, option: str) -> str:
    """A text, or the substitute."""
    if path is None:
        return corpus("held-out").decode("ascii")
    content = read_json_file(path, option) if path.suffix == ".json" else {"text": read_text(path, option)}
    holds = isinstance(content, dict) and isinstance(content.get("text"), str)
    require(holds, f'{option} {path}: must be an object with a "text", or a plain text file')
    require(content["text"].strip(), f"{option} {path} is empty: it must hold text")
    return content["text"]


def read_json_file(path: Path, option: str) -> Any:
    """Content of a JSON file."""
    with explaining(option, ValueError):
        return read_json(path)
