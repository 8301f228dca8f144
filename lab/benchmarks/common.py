"""What the benchmarks share: shapes of real models, timing against a baseline, and result files."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import platform
import random
import shutil
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from matplotlib.figure import Figure

import tca_jax
from tca_jax.cli.errors import naming_options
from tca_jax.cli.files import require_writable
from tca_jax.cli.options import LAUNCH_ORDER
from tca_jax.engine.cache import allocator_limit
from tca_jax.errors import UserError
from tca_jax.files import replacing
from tca_jax.lab.plots import figures
from tca_jax.pallas_kernels.backends import can_run, check_backend
from tca_jax.pallas_kernels.numerics import cdiv

COMPILED_AT_ONCE = 4  # programs, in threads
CHECKED_TOKENS = 8192  # outputs are compared with the oracle at most at this length, where the oracle takes a moment
#: The command line that runs now, without the folder of the results; `command.py` sets it.
COMMAND: contextvars.ContextVar[str] = contextvars.ContextVar("COMMAND", default="(called from Python)")
#: Takes the record of a benchmark that is asked to print it; None where tables are printed.
RECORDS: contextvars.ContextVar[list[dict[str, Any]] | None] = contextvars.ContextVar("RECORDS", default=None)

COPIED_BYTES = 2**31  # of the array whose copy is the measure of memory's speed

_SAMPLE_SECONDS = 0.02
_DRAWN = 2**22  # random numbers that are drawn at once: the compiler takes minutes over a draw of 2^30
_CPU_TOKENS = 4096  # longest context that is worth waiting for without a GPU


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Layer:
    """Attention shape of one layer of a model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    whole: bool = True  # a model of that name is in `models.CONFIGS`


LAYERS = {
    "llama3.1-8b": Layer("llama3.1-8b", 32, 8, 128),
    "qwen2.5-7b": Layer("qwen2.5-7b", 28, 4, 128),
}
# Not among the defaults: a model for several GPUs, LLaMA's layer with half of its heads, each twice as wide, and one
# for machines without a GPU.
_LARGE = Layer("llama3.1-70b", 64, 8, 128)
_WIDE = Layer("llama-d256", 16, 4, 256, whole=False)
_TINY = Layer("tiny", 4, 2, 16)


def find_layers(models: Sequence[str] | None) -> list[Layer]:
    """Layers of the models that were asked for, or of both real ones.

    Raises:
        ValueError: a name is unknown.
    """
    known = {**LAYERS, **{layer.name: layer for layer in (_LARGE, _WIDE, _TINY)}}
    for model in models or ():
        if model not in known:
            raise UserError(f"--models {model}: must be one of {list(known)}")
    return [known[model] for model in models or LAYERS]


def tca_config(window: int, reserve: int | None = None) -> tca_jax.TCAConfig:
    """Hyperparameters of the options --window and --reserve; ValueError, which names the option, where one is wrong."""
    with naming_options("window", "reserve"):
        return tca_jax.TCAConfig(window=window, reserve=reserve)


def check_sizes(
    lengths: Sequence[int],
    config: tca_jax.TCAConfig,
    backends: Sequence[str],
    out: Path,
    option: str = "--lengths",
) -> None:
    """What must hold before anything is timed; `option` is that of the lengths.

    Raises:
        ValueError: a backend cannot run here, a length is no whole number of blocks or not beyond the window, the
            lengths would take hours on a machine without a GPU, or `out` cannot be written to.
    """
    with naming_options("backend"):
        for backend in backends:
            check_backend(backend)
    least, platform = config.window + config.block_size, jax.default_backend()
    for length in lengths:
        if length < least or length % config.block_size:
            slow = platform != "gpu" and least > _CPU_TOKENS
            smaller = f"; without a GPU pass --window {_CPU_TOKENS - config.block_size} or less" if slow else ""
            raise UserError(
                f"{option} {length}: must be a multiple of {config.block_size} and at least {least}, one block more "
                f"than --window {config.window}{smaller}"
            )
    if platform != "gpu" and max(lengths) > _CPU_TOKENS:
        raise UserError(
            f"{max(lengths):,} tokens need a GPU, this process runs on {platform!r}: pass {option} of at most "
            f"{_CPU_TOKENS} and a smaller --window, such as {option} 1024 --window 256 --models tiny"
        )
    require_writable(out, "--out")


def check_whole_models(layers: Sequence[Layer], otherwise: str = "") -> None:
    """Raises ValueError unless all are whole models, and there is a GPU to hold and run the real ones."""
    for layer in layers:
        if not layer.whole:
            raise UserError(f"--models {layer.name}: a layer only; must be one of {[*LAYERS, _LARGE.name, _TINY.name]}")
    real = [layer.name for layer in layers if layer != _TINY]
    if real and jax.default_backend() != "gpu":
        raise UserError(
            f"a whole {real[0]} needs a GPU, this process runs on {jax.default_backend()!r}: pass --models tiny"
            f"{otherwise}"
        )


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def random_normal(key: Array, shape: tuple[int, ...], dtype: Any, std: float | Array = 1.0) -> Array:
    """Normal numbers times `std`, cast to `dtype`; drawn in parts, so that compiling a large shape takes no longer."""
    row = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // row
    drawn = min(rows, max(1, _DRAWN // row))
    parts = cdiv(rows, drawn)
    keys = jax.random.split(key, parts)

    def draw(i: Array, out: Array) -> Array:
        part = (std * jax.random.normal(keys[i], (drawn, row), jnp.float32)).astype(dtype)
        return jax.lax.dynamic_update_slice(out, part, (jnp.minimum(i * drawn, rows - drawn), jnp.int32(0)))

    return jax.lax.fori_loop(0, parts, draw, jnp.zeros((rows, row), dtype)).reshape(shape)


def attention_inputs(layer: Layer, length: int, seed: int, rows: int = 1) -> tuple[Array, Array, Array, Array]:
    """Random bfloat16 q `[B, L, H_q, d]`, k and v `[B, L, H_kv, d]`, and the lengths `[B]`, all of them L."""
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (
        random_normal(key, (rows, length, heads, layer.head_dim), jnp.bfloat16)
        for key, heads in zip(keys, (layer.heads, layer.kv_heads, layer.kv_heads), strict=True)
    )
    return q, k, v, jnp.full(rows, length, jnp.int32)


def time_alternating(calls: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Median seconds of each call, taken in turns after a warm-up, so that clocks and heat are shared.

    The order changes from round to round, for what runs after a long call finds a hot device. A sample queues as many
    calls as take about 20 ms, at most 50, and waits for the last: the host's own time stays out of it unless calls are
    shorter than their launch, some 20 us.
    """
    with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        list(pool.map(lambda call: len(jax.tree.leaves(jax.block_until_ready(call()))), calls.values()))
    queued: dict[Any, int] = {}
    for name, call in calls.items():
        start = time.perf_counter()
        jax.block_until_ready(call())
        queued[name] = max(1, min(50, int(_SAMPLE_SECONDS / (time.perf_counter() - start))))
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


def fitted(call: Callable[[], T], what: str, unfit: list[str]) -> T | None:
    """What `call` returns, or None where memory does not suffice: `what` is printed then and appended to `unfit`.

    Other errors are raised.
    """
    try:
        return call()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"does not fit: {what}: {str(error).splitlines()[0]}", flush=True)
        unfit.append(what)
    gc.collect()  # of what the error held on to
    return None


def device_copy(num_bytes: int, repeats: int) -> float:
    """Bytes read and written a second by the fastest way to write a copy, changed or not, of a large array."""
    num_bytes = num_bytes // 1024 * 1024
    calls: dict[str, Any] = {}
    add_one = jax.jit(lambda x: x + 1)
    for dtype in (jnp.bfloat16, jnp.float32):
        shape = (num_bytes // jnp.dtype(dtype).itemsize // 256, 256)
        source = random_normal(jax.random.key(0), shape, dtype)
        calls[f"x + 1, {jnp.dtype(dtype).name}"] = functools.partial(add_one, source)
    copy = jax.jit(lambda x: jnp.copy(x))  # its result may not share the argument's buffer: a device-to-device copy
    calls["copy"] = functools.partial(copy, source)
    return 2 * num_bytes / min(time_alternating(calls, repeats).values())


def matrix_rate(repeats: int) -> float:
    """FLOP/s of a large bfloat16 matrix product: what no attention or projection will pass."""
    size = 8192 if jax.default_backend() == "gpu" else 512
    a, b = (random_normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / time_alternating({"product": lambda: product(a, b)}, repeats)["product"]


def full_attention(q: Array, k: Array, v: Array) -> Array:
    """The baseline: exact causal attention of whole sequences, by cuDNN where it is, without a mask for padding."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if can_run("cudnn") else "xla")


def free_bytes() -> float:
    """Device memory that is free, or infinity where the device does not say."""
    limit = allocator_limit()
    return math.inf if limit is None else limit - jax.local_devices()[0].memory_stats()["bytes_in_use"]


def memory_limit() -> str:
    """Device memory that JAX takes, which decides what fits."""
    limit = allocator_limit()
    return "unknown" if limit is None else f"{limit / 1e9:,.0f} GB"


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    """||out - expected|| / ||expected|| in float64 on the host, ||out|| where nothing is expected; NaN stays NaN."""
    a, b = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


def agreement(backend: str, out: Any, expected: Any) -> float:
    """Largest relative error of a result's arrays, which must be small.

    Raises:
        RuntimeError: it is not.
    """
    pairs = zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True)
    error = float(np.max([relative_error(*pair) for pair in pairs]))  # NaN where any is
    if not error < 1e-2:
        raise RuntimeError(f"{backend} differs from the oracle by {error:.2e}: nothing to time")
    return error


def environment() -> dict[str, str]:
    """Card, versions and the command, for the result files."""
    device = jax.devices()[0]
    order = os.environ.get(LAUNCH_ORDER)
    return {
        "device": device.device_kind,
        "platform": getattr(device.client, "platform_version", device.platform).splitlines()[0],
        "jax": jax.__version__,
        "python": platform.python_version(),
        "tca_jax": tca_jax.__version__,
        "memory": memory_limit(),
        **({} if order is None else {LAUNCH_ORDER: order}),
        "command": COMMAND.get(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_results(
    name: str,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    out: Path,
    note: str = "",
    more: Mapping[str, Sequence[Mapping[str, Any]]] = MappingProxyType({}),
    *,
    shown: bool = True,
) -> None:
    """Writes `name`.json and `name`.md, and prints the table; `more` holds further tables by their headings.

    A run that may be killed writes what it has so far from time to time, and does not have that `shown`.
    """
    where = environment()
    tables = {heading: [dict(row) for row in table] for heading, table in more.items()}
    record = {"title": title, "note": note, "environment": where, "rows": [dict(row) for row in rows], **tables}
    with replacing(out / f"{name}.json") as file:
        file.write_text(json.dumps(record, indent=2) + "\n")
    parts = [markdown_table(rows), *(f"## {heading}\n\n{markdown_table(table)}" for heading, table in more.items())]
    text = "\n\n".join(parts)
    fitting = [terminal_table(rows), *(f"## {heading}\n\n{terminal_table(table)}" for heading, table in more.items())]
    lines = "\n".join(f"- {key}: {value}" for key, value in where.items())
    with replacing(out / f"{name}.md") as file:
        file.write_text(f"# {title}\n\n{note}\n\n{text}\n\n{lines}\n")
    if not shown:
        return
    records = RECORDS.get()
    if records is None:
        print("\n\n".join([*fitting, f"Results: {out / name}.md"]), flush=True)
    else:
        records.append(record)


def free_name(out: Path, name: str) -> str:
    """What results in a folder are called: `name`, with a number behind it where an earlier run has taken that."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(each for each in names if not (out / f"{each}.json").exists())


def print_row(row: Mapping[str, Any]) -> None:
    """One row, as soon as it is known: its columns with their values, in lines that fit a terminal."""
    text = "  ".join(f"{column} {_cell(value)}".replace(" ", "\N{NO-BREAK SPACE}") for column, value in row.items())
    lines = textwrap.wrap(text, _terminal_width(), subsequent_indent="  ", break_long_words=False)
    print("\n".join(lines).replace("\N{NO-BREAK SPACE}", " "), flush=True)


def group_rows(rows: Iterable[Mapping[str, Any]], *columns: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Rows by their values in some columns, in the order of their first appearance."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def plot_line(
    axes: Any,
    line: Sequence[Mapping[str, Any]],
    column: str,
    label: str,
    key: tuple[Any, Any],
    keys: Iterable[tuple[Any, Any]],
) -> None:
    """A column by tokens; of all `keys`, those with the same first part share a colour, with the second a stroke."""
    colours, strokes = (sorted({each[i] for each in keys}, key=str) for i in (0, 1))
    style = {
        "color": figures.palette(len(colours))[colours.index(key[0])],
        "linestyle": ("-", "--", ":", "-.")[strokes.index(key[1]) % 4],
    }
    tokens, values = [row["tokens"] for row in line], [row[column] for row in line]
    axes.plot(tokens, values, marker="o", clip_on=False, label=label, **style)


def plot_bars(rows: Sequence[Mapping[str, Any]], panels: Mapping[str, str], title: str, path: Path) -> None:
    """Columns of whole models, a panel each under its label: a group of bars a model, length and storage (column `fp8`,
    where there is one), a bar an attention."""
    grouped = [column for column in ("model", "tokens", "fp8") if column in rows[0]]
    groups = list(group_rows(rows, *grouped))
    attentions = list(dict.fromkeys(row["attention"] for row in rows))
    width = 0.8 / len(attentions)
    figure = Figure(figsize=(4.5 * len(panels), 4.5), dpi=150, layout="constrained")
    for axes, (column, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for shift, attention in enumerate(attentions):
            drawn = [row for row in rows if row["attention"] == attention]
            values = {tuple(row[name] for name in grouped): row[column] for row in drawn}
            places = [groups.index(group) + shift * width for group in values]
            axes.bar_label(axes.bar(places, list(values.values()), width, label=attention), fmt=_cell, fontsize=8)
        middles = np.arange(len(groups)) + (len(attentions) - 1) * width / 2
        axes.set_xlim(middles[0] - 0.75, middles[-1] + 0.75)  # a bar alone is not as wide as its panel
        axes.margins(y=0.12)
        axes.set_xticks(middles, [_group_label(*group) for group in groups])
        axes.set_title(label)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(attentions), fontsize=8)
    figure.suptitle(title)
    figures.write(figure, path)


def _group_label(model: str, tokens: int, fp8: str | None = None) -> str:
    """Three lines under a group of bars, or two."""
    return "\n".join([model, f"{tokens:,} tokens", *([] if fp8 is None else [f"{fp8} in fp8"])])


def token_axis(axes: Any, tokens: Sequence[int], label: str) -> None:
    """Context lengths on a logarithmic axis, in K and M."""
    ticks = sorted(set(tokens))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{t // 2**20}M" if t >= 2**20 else f"{t / 1024:g}K" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table; floats with three significant digits or more."""
    if not rows:
        return "(no rows)"
    columns = list(rows[0])
    body = ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body])


def terminal_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same in the width of a terminal: where columns are too many, they become lines, a few rows side by side."""
    whole, width = markdown_table(rows), _terminal_width()
    if not rows or max(map(len, whole.splitlines())) <= width:
        return whole
    columns = [[_cell(row[column]) for column in rows[0]] for row in rows]
    names = max(map(len, rows[0]))
    widths = [max(map(len, column)) for column in columns]
    blocks, taken = [[0]], names + 2 + widths[0]
    for number in range(1, len(columns)):
        if (taken := taken + 2 + widths[number]) > width:
            blocks.append([])
            taken = names + 2 + widths[number]
        blocks[-1].append(number)
    return "\n\n".join(
        "\n".join(
            "  ".join([name.ljust(names), *(columns[number][i].rjust(widths[number]) for number in block)])
            for i, name in enumerate(rows[0])
        )
        for block in blocks
    )


def _terminal_width() -> int:
    return shutil.get_terminal_size().columns


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
