"""How far a long run is and how long it will still take: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_SECONDS = 10.0

#: Called with what is done, what there is to do, and what is being done.
Count = Callable[[int, int, str], None]


@contextmanager
def counted(what: str, line_seconds: float = _LINE_SECONDS) -> Iterator[Count]:
    """Yields `report(done, total, now)`, which tells on standard error how many of `total` are done and what is next.

    Args:
        what: What is counted, in the plural, such as "samples".
        line_seconds: Least seconds between two lines of a log; the first and the last report always have one.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn(what),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    started, first, told = time.monotonic(), 0, -math.inf
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task("starting", total=None)

        def report(done: int, total: int, now: str) -> None:
            nonlocal first, told
            bar.update(task, description=now, completed=done, total=total)
            at = time.monotonic()
            if told == -math.inf:
                first = done  # those were done before this run
            if not console.is_interactive and (at - told > line_seconds or done == total):
                told = at
                seconds = (at - started) * (total - done) / max(done - first, 1)
                left = f", about {_duration(seconds)} left" if first < done < total else ""
                print(f"{done} of {total} {what}{left}: {now}", file=sys.stderr, flush=True)

        yield report


def _duration(seconds: float) -> str:
    """Seconds as a person says them: "42 s", "17 min", "9.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
