"""One process that generates under many shapes: its programs, the pieces of memory that it maps, and its memory.

tca-jax bench many-shapes                                   # 300 shapes, 1,000 generations; over an hour of a CPU
tca-jax bench many-shapes --shapes 30 --generations 60
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from matplotlib.figure import Figure

import tca_jax
from tca_jax import programs
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import bucket_length
from tca_jax.lab.benchmarks.common import print_row, write_results
from tca_jax.lab.benchmarks.models import random_model
from tca_jax.lab.benchmarks.options import RESULTS, NameOption, OutOption
from tca_jax.lab.benchmarks.serve_soak import resident_bytes
from tca_jax.lab.plots import figures

_LAYERS = 2
_METHODS = ("full", "streaming", "uniform")
_WINDOW = 256
_ROWS = 20  # of the table


def models() -> list[LM]:
    """A small random model under several methods."""
    lm = random_model("tiny", jax.random.key(0), _LAYERS, max_positions=2**17)
    config = tca_jax.TCAConfig(window=_WINDOW)
    options: dict[str, dict[str, Any]] = {
        "full": {},
        "streaming": {"window": _WINDOW},
        "uniform": {"candidate": 2, "config": config},
    }
    return [lm.with_method(name, **options[name]) for name in _METHODS]


def draw_shapes(lms: list[LM], count: int, rng: np.random.Generator) -> list[tuple[LM, int, int, int]]:
    """Different combinations of a method, a bucket of prompt lengths, a batch and a bucket of answers."""
    lengths = sorted({bucket_length(n) for n in range(64, 4096, 16)})
    every = [(lm, length, batch, room) for lm in lms for length in lengths for batch in (1, 2, 3) for room in (8, 16)]
    return [every[i] for i in rng.permutation(len(every))[:count]]


def measure(shapes: int, generations: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a table: what the process has after some generations, each under a random shape."""
    rng = np.random.default_rng(seed)
    drawn, rows, compiled = draw_shapes(models(), shapes, rng), [], 0
    every = max(1, generations // _ROWS)
    start = time.perf_counter()
    for number in range(1, generations + 1):
        lm, length, batch, room = drawn[int(rng.integers(len(drawn)))]
        prompts = [rng.integers(0, lm.config.vocab_size, length).tolist() for _ in range(batch)]
        stats = tca_jax.generate(lm, prompts, max_new_tokens=room, stop_token_ids=()).stats
        compiled += stats.compile_seconds > 0
        if number % every == 0 or number == generations:
            rows.append(
                {
                    "generations": number,
                    "that compiled": compiled,
                    "programs kept": len(programs._kept),
                    "memory maps": Path("/proc/self/maps").read_bytes().count(b"\n"),
                    "MB resident": resident_bytes() / 1e6,
                    "s": time.perf_counter() - start,
                }
            )
            print_row(rows[-1])
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Maps and memory by the number of generations."""
    figure = Figure(figsize=(9, 3.5), dpi=150, layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), ("memory maps", "MB resident"), strict=True):
        axes.plot([row["generations"] for row in rows], [row[column] for row in rows], marker="o", clip_on=False)
        axes.set_xlabel("generations")
        axes.set_ylabel(column)
        axes.set_ylim(0, max(1, *(1.1 * row[column] for row in rows)))
    figure.suptitle("One process, many shapes")
    figures.write(figure, path)


def main(
    shapes: Annotated[int, typer.Option(help="Shapes of calls; each compiles its programs.", min=1)] = 300,
    generations: Annotated[int, typer.Option(help="Calls of generate.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="Other seeds, other calls.", min=0)] = 0,
    out: OutOption = RESULTS,
    name: NameOption = "many-shapes",
) -> None:
    """Generate under many shapes in one process: do its programs and its memory stay bounded?

    Example: [bold]tca-jax bench many-shapes --shapes 30 --generations 60[/]
    """
    rows = measure(shapes, generations, seed)
    note = (
        f"A random model of {_LAYERS} layers; each generation draws one of {shapes} shapes: a method of {_METHODS}, a "
        "bucket of prompt lengths, a batch and a length of answers. `that compiled` counts the generations whose "
        "programs were not there any more, or never before. A process may map 65,530 pieces of memory on Linux."
    )
    write_results(name, "Many shapes in one process", rows, out, note)
    plot(rows, out / f"{name}.png")
