"""Decoding over a TCA cache against the full cache: one layer's attention, the same kernel, and whole models.

tca-jax bench decode                                            # the committed tables, minutes on one GPU
tca-jax bench decode --lengths 131072 --batches 1 --block-shares 0.2 --no-whole
tca-jax bench decode --lengths 131072 --block-shares 0.02:0.25 --no-whole       # a quarter of the heads dense
tca-jax bench decode --lengths 131072 --models llama3.1-8b --kv fp8 --no-whole  # beside a cache in eight bits
tca-jax bench decode --lengths 131072 --models llama3.1-8b --mesh 1x4     # the model on four devices
tca-jax bench decode --lengths 131072 --models llama3.1-8b --backend triton --beside xla --no-whole
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import Mesh
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

import tca_jax
from tca_jax.cli.errors import naming_options
from tca_jax.cli.options import BackendOption, KVOption, MeshOption
from tca_jax.engine.cache import CacheLayout, PagedCache
from tca_jax.engine.lm import KV
from tca_jax.engine.mesh import CACHES, SAME, mesh_entry, num_devices, parse_mesh, place
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.caches import CachePlan, plan, random_cache
from tca_jax.lab.benchmarks.common import (
    CHECKED_TOKENS,
    COPIED_BYTES,
    Layer,
    agreement,
    check_sizes,
    check_whole_models,
    device_copy,
    find_layers,
    free_bytes,
    group_rows,
    plot_line,
    print_row,
    random_normal,
    tca_config,
    time_alternating,
    token_axis,
    write_results,
)
from tca_jax.lab.benchmarks.decode_models import STEPS_OF_MODELS, Timing, measure_model
from tca_jax.lab.benchmarks.layer_mesh import check_layer, describe_layer_mesh, program_over
from tca_jax.lab.benchmarks.models import CONFIGS
from tca_jax.lab.benchmarks.options import (
    RESULTS,
    CopyBytesOption,
    LengthsOption,
    ModelsOption,
    NameOption,
    OutOption,
    RepeatsOption,
    WindowOption,
)
from tca_jax.lab.benchmarks.shares import FULL, BlockSharesOption, Share, check_shares, describe_config
from tca_jax.lab.plots import figures
from tca_jax.loading import check_eight_bits
from tca_jax.models.sharding import DATA, axis_size, check_mesh
from tca_jax.pallas_kernels.kv import num_bytes
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.pallas_kernels.paged_attention import paged_attention

STEPS = 32  # of one program: a CUDA graph, so that the host's time to launch kernels stays out
_PLAIN = jnp.dtype(jnp.bfloat16)
_PAST_L2_BYTES = 2**28  # five times an H200's L2 cache


def copies_past_l2(cache: PagedCache, num_bytes: int) -> tuple[PagedCache, ...]:
    """The cache, of so many bytes on a device, and copies of it for the steps in turn: in a model, other layers push a
    small cache out of L2."""
    count = max(1, min(STEPS, cdiv(_PAST_L2_BYTES, num_bytes)))
    return (cache, *(jax.tree.map(jnp.copy, cache) for _ in range(count - 1)))


def attend(q: Float[Array, "B Hq d"], cache: PagedCache, layout: CacheLayout, backend: str) -> Float[Array, "B Hq d"]:
    """Attention of the token behind the prompt."""
    at = jnp.full(layout.batch, layout.prompt_tokens, jnp.int32)
    out, _ = paged_attention(q[:, None], (cache.pages(0),), at, at, window=layout.window, backend=backend)
    return out[:, 0]


def run_steps(
    backend: str, layout: CacheLayout, q: Array, rotation: Float[Array, "d d"], caches: Sequence[PagedCache]
) -> Array:
    """`STEPS` steps, unrolled; a query is made of the one before and its output, without caches of the former alone.

    The matrix product keeps XLA from fusing the steps of the empty program into one kernel.
    """
    for step in range(STEPS):
        out = attend(q, caches[step % len(caches)], layout, backend) if caches else q
        q = (q + out) @ rotation
    return q


def measure(
    layer: Layer,
    batch: int,
    tokens: int,
    shares: list[Share],
    backend: str,
    config: tca_jax.TCAConfig,
    copied: float,
    repeats: int,
    mesh: Mesh | None = None,
    kv: str | None = None,
    beside: str | None = None,
) -> list[dict[str, Any]]:
    """Rows of the full cache and of one TCA cache a share, in bfloat16 and as `kv` says, timed in turns.

    `copied` is what `device_copy` says. The backend `beside` is timed too, on the same caches.
    """
    backends = [backend, *([] if beside is None else [beside])]
    plans = {share: plan(config, layer, share, batch, tokens, mesh) for share in [FULL, *shares]}
    dtypes = [_PLAIN, *([] if kv is None else [KV[kv]])]
    kinds = list(itertools.product(backends, plans, dtypes))
    checked = min(tokens, CHECKED_TOKENS)
    errors = {(name, *kind): _check(layer, batch, *kind, name, config, checked, mesh) for name, *kind in kinds}
    q, rotation = _queries(layer, batch, mesh)

    def call(name: str, layout: CacheLayout, turns: tuple[PagedCache, ...]) -> Callable[[], Any]:
        run = program_over(mesh, functools.partial(run_steps, name, layout), (CACHES, SAME, CACHES))
        return functools.partial(run, q, rotation, turns)

    calls: dict[Any, Callable[[], Any]] = {"empty": call(backend, plans[FULL].layout, ())}
    for share, dtype in itertools.product(plans, dtypes):
        cache = random_cache(plans[share], layer.head_dim, tokens, dtype)
        turns = copies_past_l2(cache, cache.num_bytes // num_devices(mesh))
        calls |= {(name, share, dtype): call(name, plans[share].layout, turns) for name in backends}
    seconds = time_alternating(calls, repeats)
    net = {kind: (seconds[kind] - seconds["empty"]) / STEPS for kind in kinds}
    read = {kind: _read_bytes(plans[kind[1]], layer, kind[2]) for kind in kinds}
    return [
        {
            "model": layer.name,
            **mesh_entry(mesh),
            "batch": batch,
            "tokens": tokens,
            "share": share.cell,
            **({} if beside is None else {"backend": name}),
            **({} if kv is None else {"KV": dtype.name}),
            "attended": plans[share].attended_tokens / (batch * layer.kv_heads * (tokens + 1)),
            "KV MB": plans[share].num_bytes(layer.head_dim, dtype) / 1e6,
            "step ms": 1e3 * seconds[name, share, dtype] / STEPS,
            "attention ms": 1e3 * net[name, share, dtype],
            "GB/s": read[name, share, dtype] / net[name, share, dtype] / 1e9,
            "of copy": read[name, share, dtype] / net[name, share, dtype] / (num_devices(mesh) * copied),
            "speed-up": net[name, FULL, dtype] / net[name, share, dtype],
            **({} if kv is None else {"over bfloat16": net[name, share, _PLAIN] / net[name, share, dtype]}),
            **({} if beside is None else {f"over {backend}": net[backend, share, dtype] / net[name, share, dtype]}),
            "error": errors[name, share, dtype],
        }
        for name, share, dtype in kinds
    ]


def _read_bytes(cache_plan: CachePlan, layer: Layer, dtype: jnp.dtype) -> int:
    """Bytes of the keys and values that a step attends to."""
    return 2 * num_bytes(cache_plan.attended_tokens, layer.head_dim, dtype)


def _queries(layer: Layer, batch: int, mesh: Mesh | None) -> tuple[Array, Array]:
    """Queries `[B, H_q, d]`, and a rotation `[d, d]`, which keeps their size; bfloat16."""
    orthogonal, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((layer.head_dim, layer.head_dim)))
    q = random_normal(jax.random.key(0), (batch, layer.heads, layer.head_dim), jnp.bfloat16)
    rotation = jnp.asarray(orthogonal, jnp.bfloat16)
    return (q, rotation) if mesh is None else (place(CACHES, q, mesh), place(SAME, rotation, mesh))


@functools.cache
def _check(
    layer: Layer,
    batch: int,
    share: Share,
    dtype: jnp.dtype,
    backend: str,
    config: tca_jax.TCAConfig,
    tokens: int,
    mesh: Mesh | None,
) -> float:
    """Relative error of one step against the XLA oracle."""
    cache_plan = plan(config, layer, share, batch, tokens, mesh)
    cache, (q, _) = random_cache(cache_plan, layer.head_dim, 1, dtype), _queries(layer, batch, mesh)
    programs = [
        program_over(mesh, functools.partial(attend, layout=cache_plan.layout, backend=name), (CACHES, CACHES))
        for name in (backend, "xla")
    ]
    return agreement(backend, *(program(q, cache) for program in programs))


def needed_bytes(
    layer: Layer,
    batch: int,
    tokens: int,
    shares: list[Share],
    config: tca_jax.TCAConfig,
    mesh: Mesh | None = None,
) -> int:
    """A device's memory of the caches that are timed in turns, and of what the largest is drawn from."""
    layouts = [plan(config, layer, share, batch, tokens, mesh).layout for share in [FULL, FULL, *shares]]
    return sum(layout.num_bytes(layer.head_dim, _PLAIN) for layout in layouts)


def plot(rows: list[dict[str, Any]], wholes: list[dict[str, Any]], path: Path) -> None:
    """A layer's milliseconds and speed-up, then whole models': a column a model, a colour a share, a stroke a batch."""
    panels: list[tuple[list[dict[str, Any]], str, str]] = [
        (rows, "attention ms", "ms of attention a step and layer"),
        (rows, "speed-up", "times as fast as over the full cache"),
    ]
    if wholes:
        panels.append((wholes, "ms/step", "ms per step of the whole model"))
    models = list(dict.fromkeys(row["model"] for row in (*rows, *wholes)))
    keys = list(group_rows((*rows, *wholes), "share", "batch"))
    figure = Figure(figsize=(5.5 * len(models), 1 + 4 * len(panels)), dpi=150, layout="constrained")
    grid = figure.subplots(len(panels), len(models), sharex=True, sharey="row", squeeze=False)
    for (table, column, label), line_of_axes in zip(panels, grid, strict=True):
        for axes, model in zip(line_of_axes, models, strict=True):
            for key, line in group_rows((row for row in table if row["model"] == model), "share", "batch").items():
                share, batch = key
                name = "full cache" if share == FULL.cell else f"{Share.parse(share).percent} of ranked blocks"
                plot_line(axes, line, column, f"{name}, batch {batch}", key, keys)
            token_axis(axes, [row["tokens"] for row in (*rows, *wholes)], "")
            if column != "speed-up":
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_locator(NullLocator())
        line_of_axes[0].set_ylabel(label)
    for model, axes in zip(models, grid[0], strict=True):
        axes.set_title(model)
    for axes in grid[-1]:
        axes.set_xlabel("tokens of context")
    lines = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
    figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle("Decoding: one layer's attention" + (", and whole models" if wholes else ""))
    figures.label_lone_points(list(grid.flat), "{:.3g}".format)
    figures.write(figure, path)


def describe(config: tca_jax.TCAConfig, copied: float, repeats_of_models: int | None, mesh: Mesh | None = None) -> str:
    """What the columns mean; `copied` is what `device_copy` says, `repeats_of_models` None where none are timed."""
    text = (
        "`share` 1 is the full cache: the same kernel over a window that holds every token. The others are TCA caches "
        f"{describe_config(config)}; `attended` is what a step reads over all tokens, `KV MB` the layer's cache. A "
        f"program of {STEPS} steps, each depending on the one before, over copies of a cache that together do not fit "
        "L2, is timed in turns with the others; `step ms` is its time over the steps, `attention ms` the same less the "
        "time of the program without attention. `GB/s` are the attended keys and values over `attention ms`, `of copy` "
        f"their share of a device copy's read and written bytes, {copied / 1e9:,.0f} GB/s. "
        "`speed-up` is that of `attention ms` over the full cache of the same `KV`, the dtype of keys and values; "
        "`over bfloat16` that over the same cache in bfloat16, `over` a backend that over its kernels on the "
        "same cache. `error` is relative to the XLA oracle."
    )
    text += describe_layer_mesh(
        mesh, "rows, bytes and `GB/s` are of all together, the device copy they are compared with is all devices'"
    )
    return text + (
        " Whole models have random weights and caches of random keys and values; there, `GB/s` are the weights and the "
        f"attended keys and values over `ms/step`, the mean of {STEPS_OF_MODELS} steps between evictions, its median "
        f"over {repeats_of_models} runs in turns."
        if repeats_of_models
        else ""
    )


def main(
    lengths: LengthsOption = None,
    models: ModelsOption = None,
    batches: Annotated[
        list[int] | None, typer.Option(help="Rows.", show_default="1 and 8 for each device on data", min=1)
    ] = None,
    shares: BlockSharesOption = None,
    whole: Annotated[bool, typer.Option(help="Time whole models too.")] = True,
    layers: Annotated[
        int | None, typer.Option(help="Layers of whole models.", show_default="the model's own", min=1)
    ] = None,
    backend: BackendOption = "auto",
    beside: Annotated[
        str | None, typer.Option(help="Kernels that a layer is timed with too, in turns.", show_default="none")
    ] = None,
    window: WindowOption = tca_jax.TCAConfig.window,
    mesh: MeshOption = None,
    kv: KVOption = None,
    copy_bytes: CopyBytesOption = COPIED_BYTES,
    repeats: RepeatsOption = 7,
    out: OutOption = RESULTS,
    name: NameOption = "decode",
) -> None:
    """Time decoding over TCA caches against the full cache: one layer's attention, and whole models.

    Example: [bold]tca-jax bench decode --lengths 131072 --block-shares 0.2[/]
    """
    lengths = lengths or [2**13, 2**17, 2**20]
    shares = shares or [Share(0.1), Share(0.155), Share(0.4)]
    shapes, config = find_layers(models), tca_config(window)
    devices = None if mesh is None else parse_mesh(mesh, "--mesh")
    batches = batches or [rows * axis_size(devices, DATA) for rows in (1, 8)]
    settings = list(itertools.product(batches, lengths))
    whole_models = [layer for layer in shapes if layer.whole] if whole else []
    check_shares(shares)
    with naming_options("kv"):
        check_eight_bits(None, kv)
    check_whole_models(whole_models, otherwise=" or --no-whole")
    for layer in shapes:
        check_layer(devices, layer, batches)
        if devices is not None and layer in whole_models:
            check_mesh(devices, CONFIGS[layer.name], layer.name)
    if beside == backend:
        raise UserError(f"--beside {beside}: must differ from --backend")
    check_sizes(lengths, config, [backend, *([] if beside is None else [beside])], out)
    copied = device_copy(copy_bytes, repeats)
    print(f"device copy: {copied / 1e9:,.0f} GB/s", flush=True)
    timing = Timing(config, backend, copied, cdiv(repeats, 2), devices)
    rows, wholes, left_out = [], [], []
    for layer, (batch, tokens) in itertools.product(shapes, settings):
        needed = (1 if kv is None else 2) * needed_bytes(layer, batch, tokens, shares, config, devices)
        if needed > free_bytes():
            left_out.append(f"a layer of {layer.name} at batch {batch}, {tokens:,} tokens ({needed / 1e9:,.0f} GB)")
            print(f"left out, for it does not fit into memory: {left_out[-1]}", flush=True)
            continue
        for row in measure(layer, batch, tokens, shares, backend, config, copied, repeats, devices, kv, beside):
            rows.append(row)
            print_row(row)
    if not rows:
        raise UserError(f"nothing fits into the {free_bytes() / 1e9:,.1f} GB of device memory: pass smaller --lengths")
    for layer in whole_models:
        timed, lacking = measure_model(layer.name, layers, settings, shares, timing)
        wholes += timed
        left_out += lacking
    note = describe(config, copied, timing.repeats if wholes else None, devices)
    note += (
        f" Left out, for the caches to be compared do not fit into memory: {'; '.join(left_out)}." if left_out else ""
    )
    more = {"Whole models": wholes} if wholes else {}
    write_results(name, "Decoding over TCA and full caches", rows, out, note, more)
    plotted = {"KV": _PLAIN.name, "backend": backend}
    plot(
        [row for row in rows if all(row.get(key, value) == value for key, value in plotted.items())],
        wholes,
        out / f"{name}.png",
    )
