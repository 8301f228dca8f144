"""Where samples come from: files that the user names, and what stands in for one that is not named."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import re
from pathlib import Path
from typing import Any

from tca_jax.errors import UserError
from tca_jax.lab.evaluation.words import Words, load_words
from tca_jax.lab.recall.corpus import corpus
from tca_jax.models.json_object import read_json


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where something comes from.

    Attributes:
        digest: Of its content.
        label: What tables say of it.
        substitute: Whether it stands in for what the task's authors use.
    """

    digest: str
    label: str
    substitute: bool = False


@dataclasses.dataclass(frozen=True)
class Sources:
    """The files of a run; None where the user named none.

    Attributes:
        essays: Text for haystacks: plain, or JSON with a "text", as RULER's download script writes it.
        squad: SQuAD 2.0 as JSON.
        hotpotqa: HotpotQA (distractor setting) as JSON.
        longbench: Folder with LongBench's `*_e.jsonl`.
        text: Text for loss and agreement.
        kvpress: Folder with kvpress's samples of RULER, `LENGTH/*.parquet`.
    """

    essays: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None
    longbench: Path | None = None
    text: Path | None = None
    kvpress: Path | None = None

    def missing(self, name: str) -> str | None:
        """What is to be said where a task needs a source that nobody named and nothing stands in for."""
        if name in ("squad", "hotpotqa", "longbench") and getattr(self, name) is None:
            return f"needs --{name} {'DIR' if name == 'longbench' else 'FILE'}"
        return None

    @functools.cached_property
    def essay_text(self) -> str:
        """Text that needles are hidden in.

        Raises:
            ValueError: the file is not what `essays` takes.
        """
        return corpus("held-out").decode("ascii") if self.essays is None else _read_text(self.essays, "--essays")

    @functools.cached_property
    def essay_words(self) -> list[str]:
        """Its words; line breaks and spaces count alike."""
        return re.sub(r"\s+", " ", self.essay_text).split(" ")

    @functools.cached_property
    def user_text(self) -> str:
        """Text for loss and agreement."""
        return corpus("held-out").decode("ascii") if self.text is None else _read_text(self.text, "--text")

    @functools.cached_property
    def words(self) -> Words:
        """Words for keys and lists."""
        return load_words()

    @functools.cache  # noqa: B019 (one object a run)
    def json_of(self, name: str) -> Any:
        """The content of a JSON file: "squad" or "hotpotqa".

        Raises:
            ValueError: it is not named, or no JSON.
        """
        path: Path | None = getattr(self, name)
        if path is None:
            raise UserError(f"--{name}: no file is named")
        return _read_json(path, f"--{name}")

    def origin(self, name: str) -> Origin:
        """Where a source comes from: "essays", "text", "words", "squad" or "hotpotqa"; of "longbench", a task's file
        as "longbench/qasper", and of "kvpress" those of a length as "kvpress/4096"."""
        if name == "words":
            words = self.words
            return Origin(_digest("\n".join(words.singles).encode()), words.origin, words.substitute)
        kind, _, file = name.partition("/")
        path: Path | None = getattr(self, kind)
        if path is None:
            text = corpus("held-out")
            label = f"the source of Python {platform.python_version()}'s standard library"
            return Origin(_digest(text), label, substitute=True)
        if kind == "kvpress":
            return Origin(_digest(parquet_file(path, int(file)).read_bytes()), f"simonjegou/ruler, {file}")
        path = path / f"{file}_e.jsonl" if file else path
        return Origin(_digest(path.read_bytes()), path.name)


def parquet_file(folder: Path | None, length: int) -> Path:
    """The file of kvpress's samples at a length; ValueError where there is not one."""
    found = [] if folder is None else sorted((folder / str(length)).glob("*.parquet"))
    if len(found) != 1:
        raise UserError(f"{folder}/{length}: must hold one .parquet file with kvpress's samples, found {len(found)}")
    return found[0]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_text(path: Path, option: str) -> str:
    if path.suffix == ".json":
        content = _read_json(path, option)
        if not isinstance(content, dict) or not isinstance(content.get("text"), str):
            raise UserError(f'{option} {path}: must be an object with a "text", or a plain text file')
        text = content["text"]
    else:
        text = decode(path, option)
    if not text.strip():
        raise UserError(f"{option} {path} is empty: it must hold text")
    return text


def _read_json(path: Path, option: str) -> Any:
    try:
        return read_json(path)
    except ValueError as error:
        raise UserError(f"{option} {error}") from None


def decode(path: Path, option: str) -> str:
    """Text of a UTF-8 file; ValueError, which names the option, where it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{option} {path} is not UTF-8 text: {error}") from None
