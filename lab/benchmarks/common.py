"""Shared by the benchmarks: options, timing in turns, hardware floors, result files."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import json
import math
import os
import platform
import random
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array

import tca_jax
from tca_jax.cli.errors import naming_options
from tca_jax.cli.files import require_writable
from tca_jax.cli.options import LAUNCH_ORDER
from tca_jax.engine.cache import allocator_limit
from tca_jax.errors import require
from tca_jax.pallas_kernels.backends import check_backend
from tca_jax.pallas_kernels.numerics import cdiv

RESULTS = Path("out") / "bench"
CHECKED_TOKENS = 8192  # longest input on which kernels are compared with the XLA oracle

_COMPILED_AT_ONCE = 4  # programs, in threads
_SAMPLE_SECONDS = {"cpu": 0.02, "gpu": 0.2}  # at its power limit a GPU changes its clock every tenth of a second
_DRAWN = 2**22  # random numbers per draw: XLA compiles a draw of 2^30 for minutes
_CPU_TOKENS = 4096  # longest context that a CPU computes in reasonable time

LengthsOption = Annotated[list[int] | None, typer.Option(help="Prompt or context tokens; may be repeated.")]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option(help="llama3.1-8b, qwen2.5-7b, llama3.1-70b, llama3.2-1b or tiny (random weights); may be repeated."),
]
WindowOption = Annotated[int, typer.Option(help="Window of TCA, tokens.")]
RepeatsOption = Annotated[int, typer.Option(help="Timed rounds.", min=1)]
OutOption = Annotated[Path, typer.Option(help="Folder of the results.")]
NameOption = Annotated[str, typer.Option(help="Name of the result files.")]

Row = dict[str, Any]
T = TypeVar("T")


def tca_config(window: int, reserve: int | None = None) -> tca_jax.TCAConfig:
    """Hyperparameters from the options --window and --reserve."""
    with naming_options("window", "reserve"):
        return tca_jax.TCAConfig(window=window, reserve=reserve)


def check_lengths(lengths: Sequence[int], config: tca_jax.TCAConfig, out: Path, option: str = "--lengths") -> None:
    """Refuses lengths that have no ranked block or that a CPU cannot run, and an `out` that cannot be written."""
    block, least = config.block_size, config.window + config.block_size
    for length in lengths:
        holds, runs = length % block == 0 and length >= least, jax.default_backend() != "cpu" or length <= _CPU_TOKENS
        bound = f"must be a multiple of {block} and at least {least}, one block more than --window"
        require(holds, f"{option} {length}: {bound}")
        smaller = f"a CPU takes at most {_CPU_TOKENS} tokens; pass --models tiny {option} 1024 --window 256"
        require(runs, f"{option} {length}: {smaller}")
    require_writable(out, "--out")


def check_backends(backends: Sequence[str]) -> None:
    """Refuses kernels that do not run here."""
    with naming_options("backend"):
        for backend in backends:
            check_backend(backend)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def random_normal(key: Array, shape: tuple[int, ...], dtype: Any, std: float | Array = 1.0) -> Array:
    """Normal numbers times `std`, drawn in parts so that large shapes compile as fast as small ones."""
    row = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // row
    drawn = min(rows, max(1, _DRAWN // row))
    parts = cdiv(rows, drawn)
    keys = jax.random.split(key, parts)

    def draw(i: Array, out: Array) -> Array:
        part = (std * jax.random.normal(keys[i], (drawn, row), jnp.float32)).astype(dtype)
        return jax.lax.dynamic_update_slice(out, part, (jnp.minimum(i * drawn, rows - drawn), jnp.int32(0)))

    return jax.lax.fori_loop(0, parts, draw, jnp.zeros((rows, row), dtype)).reshape(shape)


def time_in_turns(calls: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Median seconds of each call over rounds in random order; a sample queues up to 50, on a GPU for 0.2 s."""
    sample = _SAMPLE_SECONDS[jax.default_backend()]
    with ThreadPoolExecutor(_COMPILED_AT_ONCE) as pool:
        list(pool.map(lambda call: len(jax.tree.leaves(jax.block_until_ready(call()))), calls.values()))
    queued: dict[Any, int] = {}
    for name, call in calls.items():
        start = time.perf_counter()
        jax.block_until_ready(call())
        queued[name] = max(1, min(50, int(sample / (time.perf_counter() - start))))
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    shuffle = random.Random(0)
    for _ in range(repeats):
        for name, call in shuffle.sample(list(calls.items()), len(calls)):
            start = time.perf_counter()
            for _ in range(queued[name]):
                result = call()
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / queued[name])
    return {name: statistics.median(values) for name, values in seconds.items()}


def copy_rate(repeats: int) -> float:
    """Bytes per second, read and written, of the fastest copy of a large array: the rate of the byte floors."""
    num_bytes = 2**31 if jax.default_backend() == "gpu" else 2**24
    source = random_normal(jax.random.key(0), (num_bytes // 1024, 256), jnp.float32)
    calls = {copy: functools.partial(jax.jit(copy), source) for copy in (jnp.copy, lambda x: x + 1)}
    return 2 * source.nbytes / min(time_in_turns(calls, repeats).values())


def product_rate(repeats: int) -> float:
    """FLOP/s of a large bfloat16 matrix product: the rate of the arithmetic floors."""
    size = 8192 if jax.default_backend() == "gpu" else 512
    a, b = (random_normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / time_in_turns({"product": lambda: product(a, b)}, repeats)["product"]


def fitted(call: Callable[[], T], label: str) -> T | None:
    """The result of `call`; None, with one printed line, where the device runs out of memory."""
    try:
        return call()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"does not fit: {label}: {str(error).splitlines()[0]}", flush=True)
    gc.collect()  # arrays that the error referred to
    return None


def peak_bytes() -> int:
    """Most bytes that any device has held since the process began; 0 where devices do not report it."""
    return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.devices())


class Compilations:
    """Counts the programs that XLA compiles in this process, and their seconds by name."""

    _LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
    _COMPILED = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        self.by_program = collections.defaultdict[str, float](float)  # seconds of lowering and XLA
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **of_event: Any) -> None:
        if event in (self._LOWERED, self._COMPILED):
            with self._lock:
                self.by_program[of_event.get("fun_name", "")] += duration_secs
                self.count += event == self._COMPILED


def agreement(backend: str, run: Callable[[str], Array], limit: float = 1e-2) -> float:
    """Relative error of `run(backend)` against the oracle; RuntimeError above `limit`: wrong results are not timed."""
    a, b = (np.asarray(run(each), np.float64) for each in (backend, "xla"))
    error = float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))
    if not error < limit:  # NaN too
        raise RuntimeError(f"{backend} differs from the oracle by {error:.2e}")
    return error


def environment() -> dict[str, str]:
    """Device, versions and command of a result file."""
    device, limit = jax.devices()[0], allocator_limit()
    found = {"device": f"{jax.device_count()} x {device.device_kind}"}
    found["platform"] = getattr(device.client, "platform_version", device.platform).splitlines()[0]
    found |= {"jax": jax.__version__, "python": platform.python_version(), "tca_jax": tca_jax.__version__}
    found["memory"] = "unknown" if limit is None else f"{limit / 1e9:,.0f} GB"
    found |= {name: os.environ[name] for name in (LAUNCH_ORDER,) if name in os.environ}
    return found | {"command": shlex.join(["tca-jax", *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d")}


class Results:
    """Result files `NAME.jsonl` (title, note, environment; then rows) and `NAME.md`; NAME-2 where these exist."""

    def __init__(self, out: Path, name: str, title: str, note: str) -> None:
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        self.path = next(path for each in names if not (path := out / f"{each}.jsonl").exists())
        self.title, self.note, self.environment = title, note, environment()
        self.tables: dict[str, list[Row]] = {}
        append(self.path, {"title": title, "note": note, "environment": self.environment})

    def add(self, table: str, row: Row) -> None:
        """Writes and prints a row."""
        self.tables.setdefault(table, []).append(row)
        append(self.path, {"table": table, **row})
        print("  ".join(f"{column} {_cell(value)}" for column, value in row.items()), flush=True)

    def finish(self, *remarks: str) -> None:
        """Writes the Markdown page and prints its tables; exit status 1 without any row."""
        sections = []
        for heading, rows in self.tables.items():
            columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
            cells = ([_cell(row.get(column, "")) for column in columns] for row in rows)
            sections.append(f"## {heading}\n\n{markdown(columns, cells)}")
        tables = "\n\n".join(sections)
        where = "\n".join(f"- {key}: {value}" for key, value in self.environment.items())
        note = " ".join([self.note, *remarks])
        self.path.with_suffix(".md").write_text(f"# {self.title}\n\n{note}\n\n{tables}\n\n{where}\n")
        print(f"\n{tables}\n\nResults: {self.path}, {self.path.with_suffix('.md').name}", flush=True)
        if not self.tables:
            raise typer.Exit(1)


def append(path: Path, record: Row) -> None:
    """Adds a record to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_results(path: Path) -> Row:
    """The first line of a file of `Results`, with all rows under "rows"."""
    first, *rows = map(json.loads, path.read_text().splitlines())
    return {**first, "rows": rows}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> str:
    """A Markdown table; `align` is of all columns but the first."""
    lines = [header, ["---", *[align] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percentiles(name: str, seconds: Sequence[float]) -> Row:
    """Percentiles 50, 95 and 99 in milliseconds, as columns."""
    return {f"{name} p{each} ms": float(1e3 * np.percentile(seconds or [0.0], each)) for each in (50, 95, 99)}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
