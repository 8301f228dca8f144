"""One attention layer's prefill under TCA (selection and attention) against cuDNN full attention, causal, same inputs.

tca-jax bench attention                                     # the committed table, a few minutes on one GPU
tca-jax bench attention --lengths 32768 --models llama3.1-8b --shares 0.2 --repeats 3
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array
from matplotlib.figure import Figure

import tca_jax
from tca_jax.benchmarks.common import (
    CHECKED_TOKENS,
    RESULTS,
    Layer,
    LengthsOption,
    ModelsOption,
    NameOption,
    OutOption,
    RepeatsOption,
    WindowOption,
    agreement,
    attention_inputs,
    check_shares,
    check_sizes,
    find_layers,
    full_attention,
    group_rows,
    plot_line,
    print_row,
    save_figure,
    time_alternating,
    token_axis,
    unequal_candidates,
    write_results,
)
from tca_jax.methods.candidates import region_capacity
from tca_jax.methods.regions import Regions, Selected, Selection
from tca_jax.methods.selection import head_budgets
from tca_jax.pallas_kernels.backends import can_run, whole
from tca_jax.pallas_kernels.prefill_attention import prefill_attention
from tca_jax.pallas_kernels.token_scores import TokenScores, token_scores


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a layer's prefill, in their order, each a jitted function of what the ones before return.

    Attributes:
        scores: (q, k, n) -> token scores.
        budgets: (token scores, n) -> selection.
        select: (selection, k, v) -> the selection in a pool.
        attention: (q, k, v, selected, n) -> output.
    """

    scores: Callable[..., TokenScores]
    budgets: Callable[..., Selection]
    select: Callable[..., Selected]
    attention: Callable[..., Array]

    @classmethod
    def create(cls, candidates: tuple[int, ...], length: int, backend: str, config: tca_jax.TCAConfig) -> Stages:
        """Stages of one layer under given budgets; selection runs on the backend too where it has the kernels."""
        b, kernels = config.block_size, whole(backend)
        rows = jnp.asarray(candidates, jnp.int32)
        ranked = config.num_ranked_blocks(length)
        regions = Regions.plan(1, tuple(region_capacity(config, row, ranked) for row in candidates))
        attend = functools.partial(prefill_attention, block_size=b, window=config.window, backend=kernels)
        return cls(
            scores=jax.jit(lambda q, k, n: token_scores(q[:, -1], k, n, block_size=b, backend=kernels)),
            budgets=jax.jit(lambda scored, n: Selection(scored.scores, head_budgets(scored, rows, n, config))),
            select=jax.jit(lambda selection, k, v: regions.fill(selection, k, v, block_size=b, backend=kernels)),
            attention=jax.jit(lambda q, k, v, selected, n: attend(q, k, v, selected.pool, selected.budgets, n)),
        )

    def pipeline(self, q: Array, k: Array, v: Array, n: Array) -> Array:
        """All stages, one after the other."""
        return self.attention(q, k, v, self.select(self.budgets(self.scores(q, k, n), n), k, v), n)


def computed_pairs(budgets: np.ndarray, length: int, config: tca_jax.TCAConfig) -> float:
    """Query-key pairs that one query head's TCA computes, mean over heads; full attention has length^2 / 2."""
    b, w = config.block_size, config.window
    ends = np.concatenate([np.zeros((*budgets.shape[:2], 1)), np.cumsum(budgets, axis=-1)], axis=-1)
    blocks = np.arange(length // b)
    prefix = ends[..., np.clip(blocks - w // b, 0, None)]
    return float((b * prefix + b * b * np.minimum(blocks, w // b) + b * b / 2).sum(axis=-1).mean())


def measure(
    layer: Layer,
    length: int,
    settings: Sequence[tuple[str, float]],
    config: tca_jax.TCAConfig,
    repeats: int,
) -> list[dict[str, Any]]:
    """A row for each setting, a backend and a kept share; all take turns with full attention on the same inputs."""
    q, k, v, n = attention_inputs(layer, length, seed=length)
    full = jax.jit(full_attention)
    calls: dict[Any, Callable[[], Any]] = {"full": lambda: full(q, k, v)}
    rows: list[dict[str, Any]] = []
    for backend, share in settings:
        candidates = unequal_candidates(config, layer.kv_heads, share)
        error = _check(layer, candidates, backend, config, min(length, CHECKED_TOKENS))
        stages = Stages.create(candidates, length, backend, config)
        scored = stages.scores(q, k, n)
        selection = stages.budgets(scored, n)
        selected = stages.select(selection, k, v)
        stage_calls: dict[str, Callable[[], Any]] = {
            "TCA": functools.partial(jax.jit(stages.pipeline), q, k, v, n),
            "scores": functools.partial(stages.scores, q, k, n),
            "budgets": functools.partial(stages.budgets, scored, n),
            "select": functools.partial(stages.select, selection, k, v),
            "attention": functools.partial(stages.attention, q, k, v, selected, n),
        }
        calls |= {(backend, share, name): call for name, call in stage_calls.items()}
        rows.append(
            {
                "model": layer.name,
                "tokens": length,
                "backend": backend,
                "share": share,
                "kept": float(np.asarray(selected.pool.lengths).mean() + config.window) / length,
                "area": computed_pairs(np.asarray(selected.budgets), length, config) / (length**2 / 2),
                "error": error,
            }
        )
    seconds = time_alternating(calls, repeats)
    flops = 4 * layer.head_dim * layer.heads * length**2 / 2
    for row in rows:
        times = {name: seconds[row["backend"], row["share"], name] for name in stage_calls}
        row |= {"full ms": 1e3 * seconds["full"], "speed-up": seconds["full"] / times["TCA"]}
        row |= {f"{name} ms": 1e3 * time for name, time in times.items()}
        row["TFLOP/s on area"] = flops * row["area"] / times["attention"] / 1e12
        row["full TFLOP/s"] = flops / seconds["full"] / 1e12
        row["error"] = row.pop("error")
    return rows


@functools.cache
def _check(layer: Layer, candidates: tuple[int, ...], backend: str, config: tca_jax.TCAConfig, length: int) -> float:
    """Relative error against the XLA oracle on fresh inputs."""
    out = Stages.create(candidates, length, backend, config).pipeline(*attention_inputs(layer, length, seed=1))
    return agreement(backend, out, _oracle(layer, candidates, config, length))


@functools.cache
def _oracle(layer: Layer, candidates: tuple[int, ...], config: tca_jax.TCAConfig, length: int) -> Array:
    return Stages.create(candidates, length, "xla", config).pipeline(*attention_inputs(layer, length, seed=1))


def _declines(layer: Layer, backend: str, config: tca_jax.TCAConfig) -> str | None:
    """Why the kernel of a backend does not take a layer, or None."""
    length = config.window + config.block_size
    inputs = jax.eval_shape(lambda: attention_inputs(layer, length, seed=0))
    try:
        jax.eval_shape(Stages.create((0,) * layer.kv_heads, length, backend, config).pipeline, *inputs)
    except NotImplementedError as error:
        return str(error)
    return None


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed-up over full attention by prompt length: a panel a model, a colour a share, a stroke a backend."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(5.5 * len(models), 4.5), dpi=150, layout="constrained")
    for axes, model in zip(np.atleast_1d(figure.subplots(1, len(models), sharey=True)), models, strict=True):
        lines = group_rows((row for row in rows if row["model"] == model), "share", "backend")
        for (share, backend), line in lines.items():
            plot_line(axes, line, "speed-up", f"{100 * share:g}% of ranked blocks, {backend}", (share, backend), lines)
        axes.axhline(1, color="black", linewidth=1)
        token_axis(axes, [row["tokens"] for row in rows], "prompt tokens")
        axes.set_title(model)
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("times as fast as full attention")
    figure.suptitle("One attention layer's prefill, selection included")
    save_figure(figure, path)


def main(
    lengths: LengthsOption = None,
    models: ModelsOption = None,
    shares: Annotated[list[float] | None, typer.Option(help="Kept shares of ranked blocks.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Prefill backends.", show_default="all kernels")] = None,
    window: WindowOption = tca_jax.TCAConfig.window,
    repeats: RepeatsOption = 5,
    out: OutOption = RESULTS,
    name: NameOption = "attention",
) -> None:
    """Time one layer's prefill, selection included, against full attention.

    Example: [bold]tca-jax bench attention --lengths 32768 --shares 0.2[/]
    """
    lengths = lengths or [8192, 32768, 131072]
    shares, backends = shares or [0.1, 0.155, 0.4], backend or prefill_kernels()
    layers, config = find_layers(models), tca_jax.TCAConfig(window=window)
    check_shares(shares)
    check_sizes(lengths, config, backends, out)
    settings = {}
    for layer in layers:
        declined = {name: reason for name in backends if (reason := _declines(layer, name, config))}
        if declined and backend:
            raise ValueError("; ".join(f"--backend {name}: {reason}" for name, reason in declined.items()))
        settings[layer] = list(itertools.product([name for name in backends if name not in declined], shares))
    rows = []
    for layer, length in itertools.product(layers, lengths):
        for row in measure(layer, length, settings[layer], config, repeats):
            rows.append(row)
            print_row(row)
    note = (
        f"Times are medians over {repeats} rounds that alternate with the baseline in one process: full causal "
        "attention on the same inputs, by cuDNN on an NVIDIA GPU. `share` is the mean budget of a ranked block, "
        "unequal between heads; `kept` the selected tokens and the window over the prompt; `area` the query-key pairs "
        f"that are computed over those of full attention; the window is {window}. `TCA ms` is the whole pipeline in "
        "one program, the columns behind it its stages, "
        "each a program of its own. `error` is relative to the XLA oracle."
    )
    write_results(name, "Prefill attention of one layer against full attention", rows, out, note)
    plot(rows, out / f"{name}.png")


def prefill_kernels() -> list[str]:
    """Backends whose prefill kernels this device runs, best first; the oracle where there is none."""
    return [name for name in ("mosaic", "triton") if can_run(name)] or ["xla"]
