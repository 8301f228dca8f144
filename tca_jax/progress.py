"""Progress of long calls: a bar on a terminal, lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, int | None, int | None], None]
_LOG_SECONDS = 10.0  # between two lines about the same step


@contextmanager
def progress(*, log: bool = False) -> Iterator[Report]:
    """Yields `report(step, done, total)`, which writes to standard error; None where nothing is counted.

    Args:
        log: Without a terminal, write a line for each step, and its percentage every ten seconds.
    """
    console = Console(stderr=True)
    if not console.is_interactive:
        yield _lines(console) if log else lambda step, done, total: None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=16), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def report(step: str, done: int | None, total: int | None) -> None:
            nonlocal task
            if step != bar.tasks[0].description:  # a new task, for a clock of its own
                bar.remove_task(task)
                task = bar.add_task(step, total=total)
            bar.update(task, completed=done or 0, total=total)

        yield report


def _lines(console: Console) -> Report:
    written, last = 0.0, ""

    def report(step: str, done: int | None, total: int | None) -> None:
        nonlocal written, last
        now = time.monotonic()
        if step != last or now - written > _LOG_SECONDS:
            share = f": {done / total:.0%}" if done and total else ""
            console.print(f"{step}{share}", markup=False, highlight=False, soft_wrap=True)
            written, last = now, step

    return report
