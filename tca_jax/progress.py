"""Progress of long calls: a bar on a terminal, lines in a log."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Report = Callable[[str, int | None, int | None], None]
_LOG_SECONDS, _COUNT_SECONDS = 10.0, 60.0  # between two lines about the same step, and about all steps


@contextmanager
def progress(*, log: bool = False, counted: str = "") -> Iterator[Report]:
    """Yields `report(step, done, total)`, which writes to standard error; None where nothing is counted.

    Args:
        log: Without a terminal, write a line for each step, and its percentage every ten seconds.
        counted: What `done` counts over all steps, such as "samples": there is one bar, with the time that is left,
            and without a terminal a line every minute.
    """
    console = Console(stderr=True)
    if not console.is_interactive:
        yield _counts(console, counted) if counted else _steps(console) if log else lambda step, done, total: None
        return
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=16)]
    columns += [MofNCompleteColumn(), TextColumn(counted)] if counted else []
    columns += [TimeElapsedColumn(), *([TextColumn("left:"), TimeRemainingColumn()] if counted else [])]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def report(step: str, done: int | None, total: int | None) -> None:
            nonlocal task
            if step != bar.tasks[0].description and not counted:  # a new task, for a clock of its own
                bar.remove_task(task)
                task = bar.add_task(step, total=total)
            bar.update(task, description=step, completed=done or 0, total=total)

        yield report


def _steps(console: Console) -> Report:
    written, last = 0.0, ""

    def report(step: str, done: int | None, total: int | None) -> None:
        nonlocal written, last
        now = time.monotonic()
        if step != last or now - written > _LOG_SECONDS:
            share = f": {done / total:.0%}" if done and total else ""
            console.print(f"{step}{share}", markup=False, highlight=False, soft_wrap=True)
            written, last = now, step

    return report


def _counts(console: Console, counted: str) -> Report:
    start, written, first = time.monotonic(), -math.inf, 0

    def report(step: str, done: int | None, total: int | None) -> None:
        nonlocal written, first
        done, total, now = done or 0, total or 0, time.monotonic()
        first = done if written == -math.inf else first  # those were done before this run
        if now - written > _COUNT_SECONDS or done == total:
            left = ""
            if first < done < total:
                seconds = round((now - start) * (total - done) / (done - first))
                left = f", about {datetime.timedelta(seconds=seconds)} left"
            console.print(f"{done} of {total} {counted}{left}: {step}", markup=False, highlight=False, soft_wrap=True)
            written = now

    return report
