"""Sources of samples: the user's files, and substitutes for essays, texts and words."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tca_jax.errors import explaining, require
from tca_jax.lab.recall.corpus import corpus
from tca_jax.lab.recall.facts import ADJECTIVES, NOUNS
from tca_jax.models.json_object import read_json

_FOLDERS = ("longbench", "kvpress")
#: Names of the files that `Sources.complete` finds in a folder.
FILES = {
    "essays": ("PaulGrahamEssays.json",),
    "squad": ("squad.json", "dev-v2.0.json"),
    "hotpotqa": ("hotpotqa.json", "hotpot_dev_distractor_v1.json"),
    "longbench": ("longbench", "data"),
    "kvpress": (".",),
}


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

    def draw_pair(self, rng: random.Random) -> str:
        """A key such as "amber-falcon"."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"

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
    longbench: Path | None = None  # folder of LongBench's *_e.jsonl
    text: Path | None = None  # for loss
    kvpress: Path | None = None  # folder of kvpress's samples of RULER, LENGTH/*.parquet

    def complete(self, folder: Path, needed: Sequence[str]) -> Sources:
        """Adds the files of `FILES` from a folder; ValueError if a needed one is missing."""
        found = {}
        for name in (name for name in needed if getattr(self, name) is None):
            paths = [folder / file for file in FILES[name] if (folder / file).exists()]
            names = " or ".join(FILES[name])
            require(paths, f"--data {folder}: has no {names}: docs/evaluation.md names its origin")
            found[name] = paths[0]
        return dataclasses.replace(self, **found)

    def require_files(self) -> None:
        """Raises OSError or UserError unless the named files and folders exist."""
        for name, path in vars(self).items():
            if isinstance(path, Path) and name in _FOLDERS:
                require(path.is_dir(), f"--{name} {path}: must be a folder")
            elif isinstance(path, Path):
                path.open("rb").close()

    def missing(self, name: str) -> str | None:
        """The reason why a task cannot use a source; None if it can."""
        lacks = name in ("squad", "hotpotqa", *_FOLDERS) and getattr(self, name) is None
        return f"needs --{name} {'DIR' if name in _FOLDERS else 'FILE'}" if lacks else None

    @functools.cached_property
    def essay_words(self) -> list[str]:
        """Words of the haystacks' text."""
        return re.sub(r"\s+", " ", _text(self.essays, "--essays")).split(" ")

    @functools.cached_property
    def user_text(self) -> str:
        """Text for loss."""
        return _text(self.text, "--text")

    @property
    def words(self) -> Words:
        """Words for keys and lists."""
        return load_words()

    def origin(self, name: str) -> Origin:
        """Origin of a source: a field's name, "words", or "longbench/qasper" for a file of the folder."""
        if name == "words":
            words = self.words
            return Origin(_digest("\n".join(words.singles).encode()), words.origin, words.substitute)
        kind, _, file = name.partition("/")
        path: Path | None = getattr(self, kind)
        if path is None:
            label = f"the source of Python {platform.python_version()}'s standard library"
            return Origin(_digest(corpus("held-out")), label, substitute=True)
        if kind == "kvpress":
            files = sorted(path.glob("*/*.parquet"))
            return Origin(_digest(b"".join(file.read_bytes() for file in files)), "simonjegou/ruler")
        path = path / f"{file}_e.jsonl" if file else path
        return Origin(_digest(path.read_bytes()), path.name)


def parquet_file(folder: Path | None, length: int) -> Path:
    """The file of kvpress's samples at a length."""
    found = [] if folder is None else sorted((folder / str(length)).glob("*.parquet"))
    one = len(found) == 1
    require(one, f"{folder}/{length}: must hold one .parquet file with kvpress's samples, found {len(found)}")
    return found[0]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _text(path: Path | None, option: str) -> str:
    """A text, or the substitute."""
    if path is None:
        return corpus("held-out").decode("ascii")
    content = read_json_file(path, option) if path.suffix == ".json" else {"text": decode(path, option)}
    holds = isinstance(content, dict) and isinstance(content.get("text"), str)
    require(holds, f'{option} {path}: must be an object with a "text", or a plain text file')
    require(content["text"].strip(), f"{option} {path} is empty: it must hold text")
    return content["text"]


def read_json_file(path: Path, option: str) -> Any:
    """Content of a JSON file."""
    with explaining(option, ValueError):
        return read_json(path)


def decode(path: Path, option: str) -> str:
    """Text of a UTF-8 file."""
    with explaining(f"{option} {path} is not UTF-8 text", UnicodeDecodeError):
        return path.read_bytes().decode("utf-8")
