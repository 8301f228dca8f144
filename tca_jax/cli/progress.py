"""What is being done, shown on a terminal while it lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, int | None, int | None], None]


@contextmanager
def progress() -> Iterator[Report]:
    """Yields `report(step, done, total)`; `done` and `total` are None where nothing is counted.

    It goes to standard error, so that a program can read the result; in a log it is silent.
    """
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task("starting", total=None)

        def report(step: str, done: int | None, total: int | None) -> None:
            nonlocal task
            if step != bar.tasks[0].description:  # a new task, for a clock of its own
                bar.remove_task(task)
                task = bar.add_task(step, total=total)
            bar.update(task, completed=done or 0, total=total)

        yield report
