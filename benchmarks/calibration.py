"""What calibration costs: the column-mass kernel against full attention, and a whole model on one long sequence.

tca-jax bench calibration                                            # the committed tables, minutes on one GPU
tca-jax bench calibration --lengths 32768 --models llama3.1-8b --probes copy
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jaxtyping import Array
from matplotlib.figure import Figure

import tca_jax
from tca_jax.benchmarks.common import (
    CHECKED_TOKENS,
    Layer,
    agreement,
    attention_inputs,
    check_sizes,
    check_whole_models,
    find_layers,
    full_attention,
    print_row,
    save_figure,
    time_alternating,
    token_axis,
    write_results,
)
from tca_jax.benchmarks.models import random_model, with_varied_outputs
from tca_jax.benchmarks.options import (
    RESULTS,
    BackendOption,
    LengthsOption,
    ModelsOption,
    NameOption,
    OutOption,
    RepeatsOption,
    WindowOption,
)
from tca_jax.calibration.probes import Probes
from tca_jax.calibration.run import calibrate
from tca_jax.engine.lm import LM
from tca_jax.pallas_kernels.column_mass import column_mass

#: What `calibrate` takes, by the names on the command line; pairs would need a tokenizer's text.
PROBES: Mapping[str, Probes] = MappingProxyType({"none": None, "copy": "copy", "text": "text"})


def measure_kernel(layer: Layer, length: int, backend: str, config: tca_jax.TCAConfig, repeats: int) -> dict[str, Any]:
    """Column mass of one layer next to full causal attention on the same inputs."""
    error = _check(layer, backend, config, min(length, CHECKED_TOKENS))
    q, k, v, n = attention_inputs(layer, length, seed=length)
    full = jax.jit(full_attention)
    seconds = time_alternating(
        {"full": lambda: full(q, k, v), "mass": lambda: _masses(q, k, n, backend, config)}, repeats
    )
    flops = 2 * 2 * layer.head_dim * layer.heads * length * (length + 1) / 2  # two products either way
    return {
        "model": layer.name,
        "tokens": length,
        "backend": backend,
        "column mass ms": 1e3 * seconds["mass"],
        "full attention ms": 1e3 * seconds["full"],
        "of full": seconds["mass"] / seconds["full"],
        "column mass TFLOP/s": flops / seconds["mass"] / 1e12,
        "full TFLOP/s": flops / seconds["full"] / 1e12,
        "error": error,
    }


def measure_model(
    layer: Layer, length: int, config: tca_jax.TCAConfig, layers: int | None, probes: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """Seconds to calibrate a model of random weights on one sequence of random tokens: first call and later ones.

    A row for each kind of probes.
    """
    lm = random_model(layer.name, jax.random.key(0), layers, max_positions=2 * max(length, 65536))
    lm = with_varied_outputs(lm)
    jax.block_until_ready(lm.params)
    return [_measure_model(lm, length, config, kind, repeats) for kind in probes]


def _measure_model(lm: LM, length: int, config: tca_jax.TCAConfig, kind: str, repeats: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    seconds = []
    for _ in range(1 + repeats):
        tokens = draw.integers(0, lm.config.vocab_size, length)
        start = time.perf_counter()
        profile = calibrate(lm, tokens, config, probes=PROBES[kind])
        seconds.append(time.perf_counter() - start)
    if profile.probes is not None and profile.probes["fallback"]:
        raise RuntimeError("the probes do not matter to the random model: what takes their place was timed instead")
    return {
        "model": lm.name,
        "layers": lm.config.num_layers,
        "tokens": length,
        "probes": kind,
        "rounds": profile.probes["rounds"] if profile.probes is not None else 0,
        "cold s": seconds[0],
        "warm s": statistics.median(seconds[1:]),
        "warm tokens/s": length / statistics.median(seconds[1:]),
    }


def _masses(q: Array, k: Array, n: Array, backend: str, config: tca_jax.TCAConfig) -> tuple[Array, Array]:
    return column_mass(q, k, n, block_size=config.block_size, window=config.window, backend=backend)


@functools.cache
def _check(layer: Layer, backend: str, config: tca_jax.TCAConfig, length: int) -> float:
    """Largest relative error of near and far sums against the XLA oracle."""
    q, k, _, n = attention_inputs(layer, length, seed=1)
    return agreement(backend, *(_masses(q, k, n, name, config) for name in (backend, "xla")))


def plot(kernels: list[dict[str, Any]], wholes: list[dict[str, Any]], path: Path) -> None:
    """Rates of both kernels by length, and the seconds of whole models."""
    figure = Figure(figsize=(11, 4.5), dpi=150, layout="constrained")
    rates, bars = figure.subplots(1, 2)
    for model in dict.fromkeys(row["model"] for row in kernels):
        line = [row for row in kernels if row["model"] == model]
        tokens = [row["tokens"] for row in line]
        rates.plot(tokens, [r["column mass TFLOP/s"] for r in line], "-", marker="o", label=f"{model}, column mass")
        rates.plot(tokens, [r["full TFLOP/s"] for r in line], "--", marker="o", label=f"{model}, full attention")
    token_axis(rates, [row["tokens"] for row in kernels], "tokens")
    rates.set_ylabel("TFLOP/s on the causal triangle")
    rates.set_ylim(bottom=0)
    rates.legend(fontsize=8)
    places = np.arange(len(wholes))
    for shift, kind in ((-0.2, "cold s"), (0.2, "warm s")):
        drawn = bars.bar(places + shift, [row[kind] for row in wholes], width=0.4, label=kind.removesuffix(" s"))
        bars.bar_label(drawn, fmt="%.2g")
    bars.set_xticks(places, [f"{row['model']}\n{row['tokens']:,} tokens\nprobes: {row['probes']}" for row in wholes])
    bars.set_ylabel("seconds to calibrate on one sequence")
    bars.legend(fontsize=8)
    save_figure(figure, path)


def main(
    lengths: LengthsOption = None,
    models: ModelsOption = None,
    model_tokens: Annotated[int, typer.Option(help="Tokens of the sequence for whole models.")] = 32768,
    probes: Annotated[
        list[str] | None, typer.Option(help="Of whole models: none, copy, text.", show_default="none and copy")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of whole models.", show_default="the model's own", min=1)
    ] = None,
    backend: BackendOption = "auto",
    window: WindowOption = tca_jax.TCAConfig.window,
    repeats: RepeatsOption = 5,
    out: OutOption = RESULTS,
    name: NameOption = "calibration",
) -> None:
    """Time calibration: its kernel against full attention, and whole models on one sequence.

    Example: [bold]tca-jax bench calibration --lengths 32768 --repeats 3[/]
    """
    lengths = lengths or [8192, 32768, 131072]
    shapes, config = find_layers(models), tca_jax.TCAConfig(window=window)
    probes = probes or ["none", "copy"]
    for kind in probes:
        if kind not in PROBES:
            raise ValueError(f"--probes {kind}: must be one of {list(PROBES)}")
    check_whole_models(shapes)
    check_sizes([*lengths, model_tokens], config, [backend], out)
    kernels = []
    for layer, length in itertools.product(shapes, lengths):
        kernels.append(measure_kernel(layer, length, backend, config, repeats))
        print_row(kernels[-1])
    wholes = []
    for layer in shapes:
        for row in measure_model(layer, model_tokens, config, layers, probes, repeats):
            wholes.append(row)
            print_row(row)
    note = (
        "One layer's column mass next to full causal attention on the same inputs (cuDNN on an NVIDIA GPU), medians "
        "over runs in turns. Both do two products over the causal triangle: 2 x 2 d H_q L (L + 1) / 2 FLOP. `error` is "
        "relative to the XLA oracle. Whole models have random weights in their own dtype and one sequence of random "
        "tokens, with copies of passages behind it (`copy`) or its last quarter (`text`) as probes, or without any; "
        "`rounds` is how often these were read, and the logits are large, so that they count. `cold` holds "
        "compilation, without a persistent cache unless the environment names one."
    )
    more = {"Whole models": wholes}
    write_results(name, "Calibration: column mass, and whole models", kernels, out, note, more)
    plot(kernels, wholes, out / f"{name}.png")
