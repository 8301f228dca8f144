"""Which tiles are fastest on this device: every kernel under a short list of configurations, next to its default.

tca-jax bench tune                                               # minutes on one GPU
tca-jax bench tune --operation paged_attention --models llama3.1-8b
tca-jax bench tune --operation block_mass --models llama3.1-8b --lengths 131072 --lengths 1048576
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from matplotlib.figure import Figure

import tca_jax
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.caches import plan, random_cache
from tca_jax.lab.benchmarks.common import (
    COMPILED_AT_ONCE,
    Layer,
    attention_inputs,
    check_sizes,
    find_layers,
    print_row,
    tca_config,
    time_alternating,
    write_results,
)
from tca_jax.lab.benchmarks.options import (
    RESULTS,
    LengthsOption,
    ModelsOption,
    NameOption,
    OutOption,
    RepeatsOption,
    WindowOption,
)
from tca_jax.lab.benchmarks.shares import Share
from tca_jax.lab.plots import figures
from tca_jax.methods.selection import head_budgets
from tca_jax.pallas_kernels.backends import check_backend
from tca_jax.pallas_kernels.block_mass import triton as block_mass_triton
from tca_jax.pallas_kernels.block_mass.triton import BlockMassConfig
from tca_jax.pallas_kernels.paged_attention import triton as paged_attention_triton
from tca_jax.pallas_kernels.paged_attention.chunks import PagedConfig
from tca_jax.pallas_kernels.prefill_attention import mosaic as prefill_attention_mosaic
from tca_jax.pallas_kernels.prefill_attention import triton as prefill_attention_triton
from tca_jax.pallas_kernels.prefill_attention.mosaic import MosaicPrefillConfig
from tca_jax.pallas_kernels.prefill_attention.triton import PrefillConfig
from tca_jax.pallas_kernels.select_tokens import triton as select_tokens_triton
from tca_jax.pallas_kernels.select_tokens.triton import SelectConfig
from tca_jax.pallas_kernels.token_scores import token_scores
from tca_jax.pallas_kernels.token_scores import triton as token_scores_triton
from tca_jax.pallas_kernels.token_scores.triton import TokenScoresConfig

OPERATIONS = (
    "token_scores",
    "select_tokens",
    "prefill_attention",
    "paged_attention",
    "block_mass",
)
_STRIDES = (8, 16, 32)  # of block mass
_SHARE = Share(0.2)  # of the ranked blocks' tokens that is kept
_STEPS = 16  # of a program of short kernels
_TOLERANCE = 1e-2  # relative; other tiles sum in another order, in bfloat16


@dataclasses.dataclass(frozen=True)
class Operation:
    """A kernel on given inputs.

    Attributes:
        name: The operation.
        backend: The kernel's backend.
        default: Configuration that the kernel takes by itself.
        others: Configurations to try beside it.
        kernel: Called as `kernel(*inputs, config=config)`.
        inputs: Its arrays; the first is of floats.
        steps: Calls in one program, so that kernels of microseconds are not timed by how fast the host launches them.
        variant: What tells it from others of the same name.
    """

    name: str
    backend: str
    default: Any
    others: tuple[Any, ...]
    kernel: Callable[..., Any]
    inputs: tuple[Any, ...]
    steps: int = 1
    variant: str = ""

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{self.name}, {self.variant}" if self.variant else self.name

    def program(self, config: Any) -> Callable[[], Any]:
        """The calls under a configuration, one after the other, as a jitted function without arguments."""

        @jax.jit
        def run(first: Any, *rest: Any) -> Any:
            for _ in range(self.steps):
                out = self.kernel(first, *rest, config=config)
                some = jax.tree.leaves(out)[0].ravel()[0]
                first = first + 0 * some.astype(first.dtype)  # the next call waits for this one
            return out

        return lambda: run(*self.inputs)


def compare(operation: Operation, repeats: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Times the configurations that compile in turns.

    Returns:
        Rows of the timed ones, fastest first, and of those that were left out with the reason.
    """
    default = operation.default
    calls = {default: operation.program(default)}
    kernel = {"operation": operation.label, "backend": operation.backend}
    try:
        expected = jax.block_until_ready(calls[default]())
    except NotImplementedError as error:  # the kernel does not take such a layer
        return [], [{**kernel, "config": describe(default), "reason": _reason(error)}]
    others = {config: operation.program(config) for config in operation.others if config != default}

    def refusal(call: Callable[[], Any]) -> str | None:
        """Why a configuration is not timed, or None."""
        try:
            return None if _agrees(call(), expected) else "differs from the default's result"
        except Exception as error:  # compilers raise whatever they like when a kernel does not fit
            return _reason(error)

    with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        reasons = dict(zip(others, pool.map(refusal, others.values()), strict=True))
    calls |= {config: call for config, call in others.items() if reasons[config] is None}
    left_out = [
        {**kernel, "config": describe(config), "reason": reason}
        for config, reason in reasons.items()
        if reason is not None
    ]
    seconds = time_alternating({describe(config): call for config, call in calls.items()}, repeats)
    rows = [
        {
            **kernel,
            "config": name,
            "default": "yes" if name == describe(default) else "",
            "ms": 1e3 * seconds[name] / operation.steps,
            "of default": seconds[name] / seconds[describe(default)],
        }
        for name in sorted(seconds, key=lambda name: seconds[name])
    ]
    return rows, left_out


def _reason(error: Exception) -> str:
    """An error on one line of a table."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def describe(config: Any) -> str:
    """A configuration without the name of its class, such as `keys=64 warps=4`."""
    parts = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        parts.append(
            f"{field.name}=({describe(value)})" if dataclasses.is_dataclass(value) else f"{field.name}={value}"
        )
    return " ".join(parts)


def _agrees(out: Any, expected: Any) -> bool:
    """Whether all arrays of a result are near the default's; NaN is not."""
    pairs = zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True)
    return all(bool(_near(*pair)) for pair in pairs)


@jax.jit
def _near(out: Any, expected: Any) -> Any:
    a, b = out.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(a - b) <= _TOLERANCE * jnp.linalg.norm(b)


def operations(layer: Layer, length: int, config: tca_jax.TCAConfig) -> Iterator[Operation]:
    """Every kernel on one layer's inputs, but block mass."""
    block: dict[str, Any] = {"block_size": config.block_size}
    blocks: dict[str, Any] = {**block, "window": config.window}
    q, k, v, n = attention_inputs(layer, length, seed=length)
    cache_plan = plan(config, layer, _SHARE, 1, length)
    regions = cache_plan.layout.regions(0)
    candidates, _ = _SHARE.rows(config, layer.kv_heads)
    scored = token_scores(q[:, -1], k, n, **block)
    budgets = head_budgets(scored, jnp.asarray(candidates, jnp.int32), n, config)
    selected = (scored.scores, budgets, k, v, jnp.asarray(regions.offsets, jnp.int32))
    select = functools.partial(select_tokens_triton.select_tokens, **block, pool_tokens=regions.pool_tokens)
    attended = (q, k, v, select(*selected), budgets, n)
    yield Operation(
        "token_scores",
        "triton",
        token_scores_triton.default_config(length, layer.head_dim, k.dtype.itemsize),
        token_score_configs(),
        functools.partial(token_scores_triton.token_scores, **block),
        (q[:, -1], k, n),
        _STEPS,
    )
    yield Operation("select_tokens", "triton", SelectConfig(), select_configs(), select, selected, _STEPS)
    yield Operation(
        "prefill_attention",
        "mosaic",
        MosaicPrefillConfig(),
        tuple(MosaicPrefillConfig(stages) for stages in (3, 4)),
        functools.partial(prefill_attention_mosaic.prefill_attention, **blocks),
        attended,
    )
    yield Operation(
        "prefill_attention",
        "triton",
        prefill_attention_triton.default_config(config.block_size, layer.head_dim, q.dtype),
        prefill_configs(),
        functools.partial(prefill_attention_triton.prefill_attention, **blocks),
        attended,
    )
    cache, group = random_cache(cache_plan, layer.head_dim, seed=2), layer.heads // layer.kv_heads
    decode = paged_attention_triton.default_config(group, layer.head_dim, config.block_size, q.dtype)
    yield Operation(
        "paged_attention",
        "triton",
        decode,
        decode_configs(decode, config.block_size),
        functools.partial(paged_attention_triton.paged_attention, window=config.window),
        (q[:, -1:], (cache.pages(0),), n, n),
        _STEPS,
    )


def block_mass_operations(layer: Layer, length: int, config: tca_jax.TCAConfig) -> Iterator[Operation]:
    """Block mass of one KV head, by how many of its queries are sampled."""
    group = layer.heads // layer.kv_heads
    q, k, _, n = attention_inputs(dataclasses.replace(layer, heads=group, kv_heads=1), length, seed=length)
    for stride in _STRIDES:
        rows = config.block_size // stride * group
        yield Operation(
            "block_mass",
            "triton",
            block_mass_triton.default_config(rows, config.block_size, layer.head_dim, q.dtype),
            block_mass_configs(),
            functools.partial(block_mass_triton.block_mass, block_size=config.block_size, stride=stride),
            (q, k, n),
            variant=f"stride {stride}",
        )


def block_mass_configs() -> tuple[BlockMassConfig, ...]:
    """Query tiles of a program, tokens of a tile of K, warps and stages."""
    return tuple(itertools.starmap(BlockMassConfig, itertools.product((1, 2, 4), (64, 128), (4, 8), (2, 3, 4))))


def token_score_configs() -> tuple[TokenScoresConfig, ...]:
    """Tiles of K, tokens of a program, and depth of the pipeline."""
    sizes = ((32, 1024, 4), (64, 512, 4), (64, 1024, 3), (64, 2048, 4), (128, 1024, 3), (128, 2048, 4))
    return tuple(TokenScoresConfig(keys=keys, chunk=chunk, stages=stages) for keys, chunk, stages in sizes)


def select_configs() -> tuple[SelectConfig, ...]:
    """Rows that are copied at once, and warps."""
    return tuple(SelectConfig(rows=rows, warps=warps) for rows in (16, 32, 64) for warps in (2, 4, 8))


def prefill_configs() -> tuple[PrefillConfig, ...]:
    """Query rows, tokens of a tile, warps and stages."""
    sizes = ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (128, 32, 8, 3))
    return tuple(PrefillConfig(*size) for size in (*sizes, (64, 64, 4, 2), (64, 64, 4, 3)))


def decode_configs(default: PagedConfig, page: int) -> tuple[PagedConfig, ...]:
    """Tiles of at most a page, chunks, and depth of the pipeline around the default."""
    changes: tuple[dict[str, int], ...] = (
        {"keys": default.keys // 2},
        {"keys": default.keys // 2, "stages": default.stages + 1},
        {"keys": default.keys * 2, "warps": default.warps * 2},
        {"programs": default.programs // 2},
        {"programs": default.programs * 2},
        {"stages": default.stages + 1},
        {"warps": default.warps * 2},
        {"warps": default.warps * 2, "stages": default.stages + 1},
    )
    others = (dataclasses.replace(default, **change) for change in changes)
    return tuple(config for config in others if 16 <= config.keys <= page)


def winners(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest configuration of every kernel, model and length beside the default: what this device should use."""
    best, columns = [], ("model", "tokens", "operation", "backend")
    for _, group in itertools.groupby(rows, key=lambda row: tuple(row[column] for column in columns)):
        timed = list(group)
        fastest, default = timed[0], next(row for row in timed if row["default"])
        kernel = {column: fastest[column] for column in columns}
        best.append({**kernel, "best": fastest["config"], "default": default["config"]})
        best[-1]["default over best"] = default["ms"] / fastest["ms"]
    return best


def plot(best: list[dict[str, Any]], path: Path) -> None:
    """How much faster the best configuration is than the default."""
    figure = Figure(figsize=(8, 1 + 0.35 * len(best)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    names = [f"{row['model']}, {row['tokens']:,} tokens, {row['operation']} ({row['backend']})" for row in best]
    axes.axvline(1, color="black", linewidth=1)
    bars = axes.barh(np.arange(len(best)), [row["default over best"] for row in best])
    axes.bar_label(bars, fmt="%.3f", padding=4)
    axes.set_yticks(np.arange(len(best)), names, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("time of the default over that of the best configuration")
    figures.write(figure, path)


def main(
    lengths: LengthsOption = None,
    models: ModelsOption = None,
    operation: Annotated[
        list[str] | None, typer.Option(help="Operation to tune; may be repeated.", show_default="all")
    ] = None,
    window: WindowOption = tca_jax.TCAConfig.window,
    repeats: RepeatsOption = 7,
    out: OutOption = RESULTS,
    name: NameOption = "tune",
) -> None:
    """Try tile configurations of the kernels, and print which this device should use.

    Example: [bold]tca-jax bench tune --operation paged_attention[/]
    """
    layers, config, lengths = find_layers(models), tca_config(window), lengths or [32768]
    unknown = set(operation or ()) - set(OPERATIONS)
    if unknown:
        raise UserError(f"--operation {min(unknown)}: must be one of {list(OPERATIONS)}")
    if jax.default_backend() != "gpu":
        raise UserError(f"tune times GPU kernels, this process runs on {jax.default_backend()!r}")
    check_sizes(lengths, config, ["triton"], out)
    rows, left_out = [], []
    for layer, tokens in itertools.product(layers, lengths):
        where = {"model": layer.name, "tokens": tokens}
        for kernel in wanted_operations(layer, tokens, config, operation or OPERATIONS):
            timed, skipped = compare(kernel, repeats)
            rows += [{**where, **row} for row in timed]
            left_out += [{**where, **row} for row in skipped]
            for row in [*timed, *skipped]:
                print_row(row)
    write_tuning(rows, left_out, out, name)


def wanted_operations(
    layer: Layer, length: int, config: tca_jax.TCAConfig, names: Sequence[str]
) -> Iterator[Operation]:
    """Those of some names that run here; inputs of a whole layer are made only where one of them takes these."""
    if {*names} != {"block_mass"}:
        yield from (each for each in operations(layer, length, config) if each.name in names and _runs_here(each))
    if "block_mass" in names:
        yield from filter(_runs_here, block_mass_operations(layer, length, config))


def _runs_here(kernel: Operation) -> bool:
    """Whether the device can run the kernel's backend; says so where it cannot."""
    try:
        check_backend(kernel.backend)
    except ValueError as error:
        print(f"{kernel.name}: {error}", flush=True)
        return False
    return True


def write_tuning(rows: list[dict[str, Any]], left_out: list[dict[str, Any]], out: Path, name: str) -> None:
    """Writes the tables and the plot, and prints what to use."""
    best = winners(rows)
    note = (
        "Kernels on one layer's inputs, block mass on one KV head's, bfloat16, fastest configuration first; each gave "
        "the default's result. Times are medians over runs in turns; what is within 2% of the default is noise."
    )
    more = {"What this device should use": best, "Left out": left_out}
    write_results(name, "Tile configurations", rows, out, note, more)
    plot(best, out / f"{name}.png")
