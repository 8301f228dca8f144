"""One attention layer's prefill under TCA (selection and attention) against cuDNN full attention, causal, same inputs.

python benchmarks/attention.py                                     # the committed table, a few minutes on one GPU
python benchmarks/attention.py --lengths 32768 --models llama3.1-8b --shares 0.2 --repeats 3
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from common import LAYERS, RESULTS, Layer, candidates_that_keep, relative_error, time_alternating, write_results
from matplotlib.figure import Figure

import tca_jax
from tca_jax.cache import CacheLayout
from tca_jax.functional import head_budgets
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.prefill_attention import prefill_attention
from tca_jax.pallas_kernels.select_tokens import select_tokens
from tca_jax.pallas_kernels.token_scores import token_scores

CHECKED_TOKENS = 8192  # outputs are compared with the oracle at this length, where the oracle takes a moment


def stages(layout: CacheLayout, backend: str) -> dict[str, Any]:
    """The jitted stages of a layer's prefill, in their order, each a function of what the ones before return."""
    config, b = layout.config, layout.config.block_size
    offsets = jnp.asarray(layout.offsets, jnp.int32)
    candidates = jnp.asarray(layout.candidates, jnp.int32)
    selection = "xla" if backend == "xla" else "auto"
    return {
        "token_scores": jax.jit(lambda q, k, n: token_scores(q[:, -1], k, n, block_size=b, backend=selection)),
        "budgets": jax.jit(lambda scored, n: head_budgets(scored, candidates, n, config)),
        "select_tokens": jax.jit(
            lambda scored, budgets, k, v: select_tokens(
                scored.scores,
                budgets,
                k,
                v,
                offsets,
                block_size=b,
                pool_tokens=layout.pool_tokens,
                backend=selection,
            )
        ),
        "prefill_attention": jax.jit(
            lambda q, k, v, k_pool, v_pool, budgets, n: prefill_attention(
                q,
                k,
                v,
                k_pool,
                v_pool,
                offsets,
                budgets,
                n,
                block_size=b,
                window=config.window,
                backend=backend,
            )
        ),
    }


def pipeline(steps: dict[str, Any], q: jax.Array, k: jax.Array, v: jax.Array, n: jax.Array) -> jax.Array:
    """All stages, one after the other."""
    scored = steps["token_scores"](q, k, n)
    budgets = steps["budgets"](scored, n)
    k_pool, v_pool, _ = steps["select_tokens"](scored, budgets, k, v)
    return steps["prefill_attention"](q, k, v, k_pool, v_pool, budgets, n)


def computed_pairs(budgets: np.ndarray, length: int, config: tca_jax.TCAConfig) -> float:
    """Query-key pairs that one query head's TCA computes, mean over heads; full attention has length^2 / 2."""
    b, w = config.block_size, config.window
    ends = np.concatenate([np.zeros((*budgets.shape[:2], 1)), np.cumsum(budgets, axis=-1)], axis=-1)
    blocks = np.arange(length // b)
    prefix = ends[..., np.clip(blocks - w // b, 0, None)]
    return float((b * prefix + b * b * np.minimum(blocks, w // b) + b * b / 2).sum(axis=-1).mean())


def measure(layer: Layer, length: int, share: float, backend: str, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    config = tca_jax.TCAConfig()
    candidates = candidates_that_keep(config, layer.kv_heads, share)
    error = _check(layer, candidates, backend)
    q, k, v, n = _inputs(layer, length, seed=length)
    layout = CacheLayout.plan(config, candidates, 1, length, 1)
    steps = stages(layout, backend)
    scored = steps["token_scores"](q, k, n)
    budgets = steps["budgets"](scored, n)
    k_pool, v_pool, kept = steps["select_tokens"](scored, budgets, k, v)
    whole = jax.jit(functools.partial(pipeline, steps))
    full = jax.jit(lambda q, k, v, n: causal_attention(q, k, v, n))
    seconds = time_alternating(
        {
            "full": lambda: full(q, k, v, n),
            "tca": lambda: whole(q, k, v, n),
            "token_scores": lambda: steps["token_scores"](q, k, n),
            "budgets": lambda: steps["budgets"](scored, n),
            "select_tokens": lambda: steps["select_tokens"](scored, budgets, k, v),
            "attention": lambda: steps["prefill_attention"](q, k, v, k_pool, v_pool, budgets, n),
        },
        repeats,
    )
    pairs = computed_pairs(np.asarray(budgets), length, config)
    flops = 4 * layer.head_dim * layer.heads
    return {
        "model": layer.name,
        "tokens": length,
        "backend": backend,
        "selected": float(np.asarray(kept).mean() / length),
        "area": pairs / (length**2 / 2),
        "full ms": 1e3 * seconds["full"],
        "TCA ms": 1e3 * seconds["tca"],
        "speed-up": seconds["full"] / seconds["tca"],
        "scores ms": 1e3 * seconds["token_scores"],
        "budgets ms": 1e3 * seconds["budgets"],
        "select ms": 1e3 * seconds["select_tokens"],
        "attention ms": 1e3 * seconds["attention"],
        "TFLOP/s on area": flops * pairs / seconds["attention"] / 1e12,
        "full TFLOP/s": flops * length**2 / 2 / seconds["full"] / 1e12,
        "error": error,
    }


def _inputs(layer: Layer, length: int, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    heads = (layer.heads, layer.kv_heads, layer.kv_heads)
    shapes = [(1, length, h, layer.head_dim) for h in heads]
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    return q, k, v, jnp.array([length], jnp.int32)


@functools.cache
def _check(layer: Layer, candidates: tuple[int, ...], backend: str) -> float:
    """Relative error against the XLA oracle on fresh inputs."""
    inputs = _inputs(layer, CHECKED_TOKENS, seed=1)
    layout = CacheLayout.plan(tca_jax.TCAConfig(), candidates, 1, CHECKED_TOKENS, 1)
    out, expected = (pipeline(stages(layout, name), *inputs) for name in (backend, "xla"))
    error = relative_error(out, expected)
    if not error < 1e-2:
        raise RuntimeError(f"{backend} differs from the oracle by {error:.2e}: nothing to time")
    return error


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed-up over cuDNN by prompt length."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for key in dict.fromkeys((row["model"], row["backend"], row["share"]) for row in rows):
        line = [row for row in rows if (row["model"], row["backend"], row["share"]) == key]
        style = "-" if key[0] == "llama3.1-8b" else "--"
        label = f"{key[0]}, {key[1]}, {key[2]:.0%} of ranked blocks"
        axes.plot([r["tokens"] for r in line], [r["speed-up"] for r in line], style, marker="o", label=label)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = sorted({row["tokens"] for row in rows})
    axes.set_xticks(ticks, [f"{t // 1024}K" for t in ticks])
    axes.set_ylabel("times as fast as cuDNN full attention")
    axes.set_xlabel("prompt tokens")
    axes.set_title("One attention layer's prefill, selection included")
    axes.legend(fontsize=8)
    figure.savefig(path)


def main(
    lengths: Annotated[list[int] | None, typer.Option(help="Prompt lengths.")] = None,
    models: Annotated[list[str] | None, typer.Option(help=f"Of {list(LAYERS)}.")] = None,
    shares: Annotated[list[float] | None, typer.Option(help="Kept shares of ranked blocks.")] = None,
    backends: Annotated[list[str] | None, typer.Option(help="Prefill backends.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each call.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Time every combination and write attention.json, attention.md and attention.png."""
    rows = []
    for model in models or list(LAYERS):
        for backend in backends or ["mosaic"]:
            for length in lengths or [8192, 16384, 32768, 65536, 131072]:
                for share in shares or [0.1, 0.2, 0.4]:
                    row = measure(LAYERS[model], length, share, backend, repeats)
                    rows.append({"share": share, **row})
                    print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    note = (
        "Times are medians over runs that alternate with the baseline in one process. `share` is the mean budget of a "
        "ranked block, `selected` the selected tokens over the prompt, `area` the query-key pairs that are computed "
        "(selected and window) over those of full attention. `error` is relative to the XLA oracle."
    )
    write_results("attention", "Prefill attention of one layer against cuDNN", rows, out, note)
    plot(rows, out / "attention.png")


if __name__ == "__main__":
    typer.run(main)
