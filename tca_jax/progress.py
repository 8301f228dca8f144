"""Progress of long calls: a bar on a terminal, lines in a log."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console

Report = Callable[[str, int | None, int | None], None]
_LOG_SECONDS, _COUNT_SECONDS = 10.0, 60.0  # between two lines about the same step, and about all steps


@contextmanager
def progress(
    *,
    log: bool = False,  # without a terminal, write a line for each step, and its percentage every ten seconds
    counted: str = "",  # all steps together, such as "samples": one bar with the time left, or a line every minute
) -> Iterator[Report]:
    """Yields `report(step, done, total)`, which writes to standard error; None where nothing is counted."""
    console = Console(stderr=True)
    if not console.is_interactive:
        yield _lines(console, counted) if log or counted else lambda step, done, total: None
        return
    columns: list[bars.ProgressColumn] = [bars.SpinnerColumn(), bars.TextColumn("{task.description}")]
    columns += [bars.BarColumn(bar_width=16), bars.TimeElapsedColumn()]
    if counted:
        columns[3:3] = [bars.MofNCompleteColumn(), bars.TextColumn(counted)]
        columns += [bars.TextColumn("left:"), bars.TimeRemainingColumn()]
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def report(step: str, done: int | None, total: int | None) -> None:
            nonlocal task
            if step != bar.tasks[0].description and not counted:  # a new task, for a clock of its own
                bar.remove_task(task)
                task = bar.add_task(step, total=total)
            bar.update(task, description=step, completed=done or 0, total=total)

        yield report


def _lines(console: Console, counted: str) -> Report:
    start, written, last, first = time.monotonic(), -math.inf, "", 0

    def report(step: str, done: int | None, total: int | None) -> None:
        nonlocal written, last, first
        done, total, now = done or 0, total or 0, time.monotonic()
        first = done if written == -math.inf else first  # those were done before this run
        due = now - written > (_COUNT_SECONDS if counted else _LOG_SECONDS)
        if not due and (done < total if counted else step == last):
            return
        left = datetime.timedelta(seconds=round((now - start) * (total - done) / max(done - first, 1)))
        text = step + (f": {done / total:.0%}" if done and total else "")
        if counted:
            text = f"{done} of {total} {counted}{f', about {left} left' if first < done < total else ''}: {step}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        written, last = now, step

    return report
