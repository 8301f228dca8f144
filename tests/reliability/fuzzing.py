"""Random damage to a folder of files, and whether its use then ends in a clear error or a sound result."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tca_jax.cli.errors import users_message

#: Cases of each kind; TCA_FUZZ=1000 runs the full number, TCA_FUZZ=500:1000 a part of it.
DEFAULT_CASES = 15
_CASE_SECONDS = 120
_NAMES = ("the tokenizer of ", "chat template")  # of messages about files that were read before
_LONGEST = 15_000  # characters of a message
_NOISE = ("Traceback", "panicked", "Exception ignored", "Error in atexit")
_HUGE_DIGITS = 5_000  # more than Python reads as an integer


class _Raw(str):
    """JSON text that stands for itself."""


ABSURD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.5, 10**9, 2**31, 2**63, -(2**63), 10**30, 1e308, 1e-320),
    *("", "x", "x" * 3_000, "\x00", "\ud800", "../../../etc/hostname", "/", ".", "NaN", "1", "float99", "full+full"),
    *([], {}, [[]], [None], [1, "2"], {"a": {"b": {}}}, [1] * 3_000),
    *(_Raw("NaN"), _Raw("-Infinity"), _Raw("1" * _HUGE_DIGITS), _Raw("1e999")),
    *(_Raw("[" * depth + "]" * depth) for depth in (50, 400, 100_000)),
    *(_Raw('{"a":' * depth + "1" + "}" * depth) for depth in (50, 400, 100_000)),
)


# ---- damage


def damage(folder: Path, rng: random.Random) -> str:
    """Damages a file of the folder, or swaps two; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    json_files = [path for path in files if _is_json(path)]
    if json_files and rng.random() < 0.5:
        file = rng.choice(json_files)
        done, root = _changed(json.loads(file.read_bytes()), rng)
        file.write_text(_dumped(root), encoding="utf-8", errors="surrogatepass")
        return f"{file.relative_to(folder)}: {done}"
    file, kind = rng.choice(files), rng.choice((*_BYTES, "delete", "folder", "link", "swap"))
    content = file.read_bytes()
    if kind == "swap":
        other = rng.choice(files)
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif kind in _BYTES:
        file.write_bytes(_BYTES[kind](content, rng))
    else:
        file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "link":
        file.symlink_to(rng.choice(("nowhere", file.name)))
    return f"{file.relative_to(folder)}: {kind}"


def _flipped(content: bytes, rng: random.Random, end: int | None = None) -> bytes:
    flipped = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 4, 64)) if content else 0):
        flipped[rng.randrange(min(end or len(content), len(content)))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _spliced(content: bytes, rng: random.Random) -> bytes:
    """Bytes of a place overwritten, or there twice."""
    place, length = rng.randrange(len(content) + 1), rng.choice((1, 8, 200))
    filler = rng.choice((bytes(length), rng.randbytes(length), content[place : place + length]))
    return content[:place] + filler + content[place + rng.choice((0, length)) :]


_BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped bits": _flipped,
    "flipped bits near the start": lambda content, rng: _flipped(content, rng, 64),  # headers
    "spliced": _spliced,
    "cut": lambda content, rng: content[: rng.choice((0, 1, 7, len(content) - 1, rng.randrange(len(content) + 1)))],
    "appended": lambda content, rng: content + rng.choice((b"\x00", b"}", b"\n{}", rng.randbytes(300))),
    "random": lambda content, rng: rng.randbytes(len(content)),
    "zeros": lambda content, rng: bytes(len(content)),
}


def _is_json(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes()), dict | list)
    except ValueError:
        return False


def _changed(root: Any, rng: random.Random) -> tuple[str, Any]:
    """A JSON value with something absurd, missing, renamed or added on some level."""
    value, parent, key, where = root, None, None, ""
    while isinstance(value, dict | list) and value and (parent is None or rng.random() < 0.8):
        parent, key = value, rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value, where = parent[key], f"{where}[{key!r}]"
    absurd = rng.choice(ABSURD)
    if parent is None:
        return "an absurd value", absurd
    doing = rng.choice(("value", "value", "value", "value", "delete", "rename", "add"))
    if doing == "delete":
        del parent[key]
    elif doing == "rename" and isinstance(parent, dict):
        parent[f"{key}_"] = parent.pop(key)
    elif doing == "add" and isinstance(parent, dict):
        parent["surprise"] = absurd
    else:
        doing, parent[key] = f"= {str(absurd)[:40]}", absurd
    return f"{where[-80:]} {doing}", root


def _dumped(value: Any) -> str:
    """JSON text, in which raw pieces stand for themselves."""
    raw: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, _Raw):
            raw.append(value)
            return f"@raw{len(raw) - 1}@"
        if isinstance(value, dict):
            return {key: marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(marked(value))
    for number, piece in enumerate(raw):
        text = text.replace(f'"@raw{number}@"', piece)
    return text


# ---- cases


class Hang(BaseException):
    """A case that takes too long; not an Exception, so nothing under test catches it."""


def fuzz(kind: str, intact: Path, folder: Path, use: Callable[[Path], str]) -> collections.Counter[str]:
    """Damages copies of a folder and uses them; returns how often each outcome came.

    `kind` and the number of a case seed the damage. `use` loads a copy and returns the outcome in a word, or raises
    AssertionError. AssertionError lists all cases that end neither soundly nor in a clear error.
    """
    first, _, last = os.environ.get("TCA_FUZZ", str(DEFAULT_CASES)).rpartition(":")
    outcomes, failures = collections.Counter[str](), list[str]()
    for case in (None, *range(int(first or 0), int(last))):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(intact, folder)
        if case is None:
            use(folder)  # the intact copy loads, and libraries are imported
            continue
        done = damage(folder, random.Random(f"{kind} {case}"))
        outcome, problem = _run(lambda: use(folder), folder)
        outcomes[outcome] += 1
        if problem:
            failures.append(f"{kind} {case}: {done}\n    {problem}")
    assert not failures, "\n".join(failures)
    return outcomes


def _run(use: Callable[[], str], folder: Path) -> tuple[str, str | None]:
    """The outcome of a case, and what is wrong with it."""
    with _standard_error() as written:
        try:
            with _time_limit():
                outcome, problem = use(), None
        except AssertionError as error:
            outcome, problem = "wrong", f"wrong: {error}"
        except Hang:
            outcome, problem = "hang", f"no answer within {_CASE_SECONDS} s"
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of Rust are no Exception
            outcome, problem = "error", _unclear(error, folder)
    if problem is None and any(word in written() for word in _NOISE):
        problem = f"on standard error: {written()[:600]}"
    return outcome, problem


def _unclear(error: BaseException, folder: Path) -> str | None:
    """What is wrong with an error for users; None for a line that names a file."""
    shown = f"{type(error).__name__}: {str(error)[:400]}"
    if not isinstance(error, ValueError | OSError) or users_message(error) is None:
        return f"raw {shown}"
    if not any(name in str(error) for name in (str(folder), *_NAMES)):
        return f"names no file: {shown}"
    return f"too long: {shown!r}" if "\n" in str(error) or len(str(error)) > _LONGEST else None


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Ends what takes too long; a call that never returns from C ends the process with all stacks."""

    def give_up(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, _CASE_SECONDS)
    faulthandler.dump_traceback_later(4 * _CASE_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _standard_error() -> Iterator[Callable[[], str]]:
    """What is written to file descriptor 2 meanwhile, also by native code; to be read afterwards."""
    with tempfile.TemporaryFile() as file:
        saved, text = os.dup(2), ""
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: text
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            text = file.read().decode(errors="replace")
