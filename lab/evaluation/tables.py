"""Tables of the measuring sticks: `python -m tca_jax.lab.evaluation.tables lab/results/real-models.jsonl.xz`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tca_jax.lab.evaluation import first_answer, late_facts, reading_loss, sticks

TABLES = {
    late_facts.STICK: late_facts.table,
    reading_loss.STICK: reading_loss.table,
    first_answer.STICK: first_answer.table,
}


def main(files: Annotated[list[Path], typer.Argument(help="Files of records.")]) -> None:
    """Prints a table for each stick that the files have records of."""
    by_stick = sticks.records_by_stick(files)
    for stick, table in TABLES.items():
        if stick in by_stick:
            print(f"{stick}\n\n{table(by_stick[stick])}\n")


if __name__ == "__main__":
    typer.run(main)
