"""Runs cases of random damage and says of each whether it ended as it must: a clear error, or the intact thing."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reliability.damage import damage, restore

from tca_jax.cli.errors import users_message

#: Cases of each kind; TCA_FUZZ=1000 runs the full number, TCA_FUZZ=500:1000 a part of it.
DEFAULT_CASES = 15
_CASE_SECONDS = 30
_NAMES = ("the tokenizer of ", "chat template")  # of what is used later, when no file is at hand
_LONGEST = 15_000  # characters of a message: values are shown whole, and some of the absurd ones are long
_NOISE = ("Traceback", "panicked", "Exception ignored", "Error in atexit")


class Hang(BaseException):
    """A case took too long; nothing that is under test may catch it."""


def cases(default: int = DEFAULT_CASES) -> range:
    first, _, last = os.environ.get("TCA_FUZZ", str(default)).rpartition(":")
    return range(int(first or 0), int(last))


def fuzz(
    kind: str,
    intact: Path,
    folder: Path,
    use: Callable[[Path], str],
    spoil: Callable[[Path, random.Random], str] = damage,
    default: int = DEFAULT_CASES,
) -> collections.Counter[str]:
    """Damages copies of an intact folder and uses them.

    Args:
        kind: Seeds the damage, with the number of the case.
        intact: What is copied.
        folder: Where the copies are made, one after the other.
        use: Loads what the folder holds and says in a word what came of it; AssertionError where that is wrong.
        spoil: Does the damage.
        default: Cases that are run unless the environment says how many.

    Returns:
        How often each outcome came.

    Raises:
        AssertionError: lists all cases that did not end as they must.
    """
    outcomes: collections.Counter[str] = collections.Counter()
    failures = []
    restore(intact, folder)
    use(folder)  # what is whole loads; and libraries are imported, which is nobody's hang
    for case in cases(default):
        restore(intact, folder)
        done = spoil(folder, random.Random(f"{kind} {case}"))
        outcome, problem = run_case(lambda: use(folder), folder)
        outcomes[outcome] += 1
        if problem:
            failures.append(f"{kind} {case}: {done}\n    {problem}")
            print(failures[-1], flush=True)
    print(f"{kind}: {dict(outcomes)}")
    assert not failures, f"{len(failures)} of {len(cases(default))}\n" + "\n".join(failures)
    return outcomes


def run_case(use: Callable[[], str], folder: Path) -> tuple[str, str | None]:
    """The outcome of one case, and what is wrong with it."""
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
            outcome, problem = "error", unclear(error, folder)
    noise = written()
    if problem is None and any(word in noise for word in _NOISE):
        problem = f"on standard error: {noise[:600]}"
    return outcome, problem


def unclear(error: BaseException, folder: Path) -> str | None:
    """What is wrong with an error that a user sees; None for one that is as it must be."""
    shown = f"{type(error).__name__}: {str(error)[:400]}"
    if not isinstance(error, ValueError | OSError) or users_message(error) is None:
        return f"raw {shown}"
    if not any(name in str(error) for name in (str(folder), *_NAMES)):
        return f"names no file: {shown}"
    if "\n" in str(error):
        return f"more than a line: {shown!r}"
    return f"{len(str(error))} characters: {shown}" if len(str(error)) > _LONGEST else None


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Ends what takes too long; what does not come back from C at all ends the process, with all stacks."""

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
    """What is written to file descriptor 2 meanwhile, by native code too."""
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)

        def written() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield lambda: text
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            text = written()
