"""What calibration costs: its kernel against full attention, the parts of its searches on a whole model, and a call.

Random weights have no head that is worth anything, so their searches end at once: parts are timed one by one, and what
a typical calibration takes is computed from them.

tca-jax bench calibration                                            # the committed tables, minutes on one GPU
tca-jax bench calibration --lengths 8192 --models llama3.1-8b --repeats 3
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

import jax
import numpy as np
import typer
from jaxtyping import Array
from matplotlib.figure import Figure

import tca_jax
from tca_jax.calibration.probe_losses import ReadText
from tca_jax.calibration.probes import ProbedText, Probes, probed_texts
from tca_jax.calibration.run import calibrate
from tca_jax.calibration.text_losses import TextLosses
from tca_jax.cli.options import BackendOption
from tca_jax.engine.lm import LM
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.common import (
    CHECKED_TOKENS,
    Layer,
    agreement,
    attention_inputs,
    check_sizes,
    check_whole_models,
    find_layers,
    full_attention,
    group_rows,
    print_row,
    tca_config,
    time_alternating,
    token_axis,
    write_results,
)
from tca_jax.lab.benchmarks.models import random_model
from tca_jax.lab.benchmarks.options import (
    RESULTS,
    LengthsOption,
    ModelsOption,
    NameOption,
    OutOption,
    RepeatsOption,
    WindowOption,
)
from tca_jax.lab.plots import figures
from tca_jax.pallas_kernels.column_mass import column_mass

Search = Literal["reading", "keeping"]

#: What is timed, in this order, by its search.
PARTS: Mapping[str, Search] = MappingProxyType(
    {
        "losses, full attention": "reading",
        "losses": "reading",
        "derivatives": "reading",
        "texts read in full, answers": "keeping",
        "texts read, first trial": "keeping",
        "trial": "keeping",
        "derivatives of answers": "keeping",
    }
)
#: How often a typical calibration does each: two rounds of derivatives and losses in either search; 16 heads that read
#: blocks are dropped one at a time; of those that keep everything 8 are, and 8 take the sparsest row that does, which
#: four trials of each find.
TYPICAL: Mapping[str, int] = MappingProxyType(
    {
        "losses, full attention": 1,
        "losses": 1 + 2 + 16,
        "derivatives": 2,
        "texts read in full, answers": 1,
        "texts read, first trial": 1,
        "trial": 2 + 8 + 8 * 4,
        "derivatives of answers": 2,
    }
)

#: Probes that need no tokenizer, by their names on the command line.
PROBES = ("copy", "pairs")
_PAIRS, _QUESTION_TOKENS, _ANSWER_TOKENS = 8, 24, 8


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


@dataclasses.dataclass(frozen=True)
class Texts:
    """What a model of random weights is calibrated on: random tokens.

    Attributes:
        number: Texts.
        tokens: Of each.
        probes: One of `PROBES`.
    """

    number: int
    tokens: int
    probes: str

    def draw(self, vocabulary: int) -> tuple[list[list[int]], Probes]:
        """Token ids of the texts, and the probes as `calibrate` takes them."""
        rng = np.random.default_rng(0)

        def ids(count: int) -> list[int]:
            return rng.integers(0, vocabulary, count).tolist()

        texts = [ids(self.tokens) for _ in range(self.number)]
        if self.probes == "copy":
            return texts, "copy"
        return texts, [[(ids(_QUESTION_TOKENS), ids(_ANSWER_TOKENS)) for _ in range(_PAIRS)] for _ in texts]


def measure_model(
    layer: Layer, texts: Texts, config: tca_jax.TCAConfig, layers: int | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Times calibration of a model of random weights.

    Returns:
        A row for each of `PARTS`, and one for a call of `calibrate`.
    """
    lm = random_model(layer.name, jax.random.key(0), layers, max_positions=2 * max(texts.tokens, 65536))
    lm = dataclasses.replace(lm, checkpoint_fingerprint="random weights")  # hashing them would be counted as well
    jax.block_until_ready(lm.params)
    ids, probes = texts.draw(lm.config.vocab_size)
    where = {"model": lm.name, "layers": lm.config.num_layers, "texts": texts.number, "tokens": texts.tokens}
    inside = TextLosses(lm, ids, config, lambda: None)
    rows = _measure_parts(parts(lm, inside, probed_texts(lm, ids, probes, config), config), where)
    assert inside.shares is not None
    # No head is worth anything: a bound without room for any sees to it that none is added by chance.
    attended = min(1.0, float(inside.shares[..., 0].mean()) * (1 + 1e-6))
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # probes say nothing of random weights
        calibrate(lm, ids, config, probes=probes, attended=attended)
    seconds = time.perf_counter() - start
    return rows, {**where, "probes": texts.probes, "s": seconds, "tokens/s": texts.number * texts.tokens / seconds}


def _measure_parts(calls: Mapping[str, Callable[[], Any]], where: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each part: its second call, and what the first took longer."""
    rows = []
    for name, call in calls.items():
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        first, second = seconds
        rows.append({**where, "search": PARTS[name], "part": name, "s": second, "compile s": max(0.0, first - second)})
        print_row(rows[-1])
    return rows


def parts(
    lm: LM, inside: TextLosses, probed: Sequence[ProbedText], config: tca_jax.TCAConfig
) -> dict[str, Callable[[], Any]]:
    """Calls of `PARTS` over all texts, to be made in this order; each waits for its result."""
    shape = lm.config.num_layers, lm.config.num_kv_heads
    none, row0 = np.zeros(shape, bool), np.zeros(shape, np.int32)
    held: list[ReadText] = []

    def read(more: np.ndarray | None, rows: np.ndarray) -> Iterator[ReadText]:
        for text in probed:
            one = ReadText(lm, text, more, config, lambda: None)
            one.losses(rows)
            yield one

    def read_in_full() -> None:
        for _ in read(None, np.full_like(row0, config.num_candidates)):
            pass

    def read_and_hold() -> None:
        held.clear()
        held.extend(read(none, row0))

    def try_row0() -> None:
        for text in held:
            text.losses(row0)

    def derive() -> None:
        for text in held:
            columns = text.num_columns
            text.slopes(row0, np.full(columns, 1 / columns, np.float32))

    calls: tuple[Callable[[], Any], ...] = (
        inside.full,
        functools.partial(inside.of, none),
        functools.partial(inside.slopes, none),
        read_in_full,
        read_and_hold,
        try_row0,
        derive,
    )
    return dict(zip(PARTS, calls, strict=True))


def typical(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a typical calibration takes, computed from the parts of a model: either search, and both together."""
    where = {column: rows[0][column] for column in ("model", "layers", "texts", "tokens")}
    seconds = {row["part"]: row["s"] for row in rows}
    found = []
    for search in get_args(Search):
        counted = [name for name in PARTS if PARTS[name] == search]
        made_of = " + ".join(f"{TYPICAL[name]} x {name}" for name in counted)
        total = sum(TYPICAL[name] * seconds[name] for name in counted)
        found.append({**where, "search": search, "computed as": made_of, "computed s": total})
    both = sum(row["computed s"] for row in found)
    return [*found, {**where, "search": "both", "computed as": "their sum", "computed s": both}]


def _masses(q: Array, k: Array, n: Array, backend: str, config: tca_jax.TCAConfig) -> tuple[Array, Array]:
    return column_mass(q, k, n, block_size=config.block_size, window=config.window, backend=backend)


@functools.cache
def _check(layer: Layer, backend: str, config: tca_jax.TCAConfig, length: int) -> float:
    """Largest relative error of near and far sums against the XLA oracle."""
    q, k, _, n = attention_inputs(layer, length, seed=1)
    return agreement(backend, *(_masses(q, k, n, name, config) for name in (backend, "xla")))


def plot(kernels: list[dict[str, Any]], measured: list[dict[str, Any]], path: Path) -> None:
    """Rates of both kernels by length, and the seconds of the searches' parts."""
    figure = Figure(figsize=(12, 4.5), dpi=150, layout="constrained")
    rates, bars = figure.subplots(1, 2)
    whole: dict[str, Any] = {"marker": "o", "clip_on": False}  # markers at the frame are drawn whole
    for model in dict.fromkeys(row["model"] for row in kernels):
        line = [row for row in kernels if row["model"] == model]
        tokens = [row["tokens"] for row in line]
        rates.plot(tokens, [r["column mass TFLOP/s"] for r in line], "-", label=f"{model}, column mass", **whole)
        rates.plot(tokens, [r["full TFLOP/s"] for r in line], "--", label=f"{model}, full attention", **whole)
    token_axis(rates, [row["tokens"] for row in kernels], "tokens")
    rates.set_ylabel("TFLOP/s on the causal triangle")
    rates.set_ylim(bottom=0)
    rates.legend(fontsize=8)
    figures.label_lone_points([rates], "{:.3g}".format)
    by_model = group_rows(measured, "model")
    height = 0.8 / len(by_model)
    for shift, ((model,), rows) in enumerate(by_model.items()):
        places = np.arange(len(rows)) + shift * height
        drawn = bars.barh(places, [row["s"] for row in rows], height, label=model)
        bars.bar_label(drawn, fmt="%.2g", padding=3, fontsize=8)
    bars.set_yticks(np.arange(len(PARTS)) + (len(by_model) - 1) * height / 2, list(PARTS), fontsize=8)
    bars.invert_yaxis()
    bars.margins(x=0.12)
    bars.set_xlabel(f"seconds, {measured[0]['texts']} texts of {measured[0]['tokens']:,} tokens")
    bars.legend(fontsize=8)
    figures.write(figure, path)


def main(
    lengths: LengthsOption = None,
    models: ModelsOption = None,
    model_tokens: Annotated[int, typer.Option(help="Tokens of a text for whole models.")] = 32768,
    texts: Annotated[int, typer.Option(help="Texts for whole models.", min=1)] = 4,
    probes: Annotated[str, typer.Option(help="Of whole models: copy, or pairs of token ids.")] = "copy",
    layers: Annotated[
        int | None, typer.Option(help="Layers of whole models.", show_default="the model's own", min=1)
    ] = None,
    backend: BackendOption = "auto",
    window: WindowOption = tca_jax.TCAConfig.window,
    repeats: RepeatsOption = 5,
    out: OutOption = RESULTS,
    name: NameOption = "calibration",
) -> None:
    """Time calibration: its kernel against full attention, and the parts of its searches on whole models.

    Example: [bold]tca-jax bench calibration --lengths 32768 --repeats 3[/]
    """
    lengths = lengths or [8192, 32768, 131072]
    shapes, config = find_layers(models), tca_config(window)
    if probes not in PROBES:
        raise UserError(f"--probes {probes}: must be one of {list(PROBES)}")
    check_whole_models(shapes)
    check_sizes(lengths, config, [backend], out)
    check_sizes([model_tokens], config, [backend], out, "--model-tokens")
    kernels = []
    for layer, length in itertools.product(shapes, lengths):
        kernels.append(measure_kernel(layer, length, backend, config, repeats))
        print_row(kernels[-1])
    measured, computed, calls = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for layer in shapes:
        rows, call = measure_model(layer, Texts(texts, model_tokens, probes), config, layers)
        measured += rows
        computed += typical(rows)
        calls.append(call)
        print_row(call)
    note = (
        "One layer's column mass next to full causal attention on the same inputs (cuDNN on an NVIDIA GPU), medians "
        "over runs in turns. Both do two products over the causal triangle: 2 x 2 d H_q L (L + 1) / 2 FLOP. `error` is "
        "relative to the XLA oracle. Whole models have random weights in their own dtype, texts of random tokens, and "
        "copies of passages (`copy`) or pairs of random tokens (`pairs`) as probes. Each part of the searches is over "
        "all texts: `s` is its second call, `compile s` what the first took longer, programs that an earlier part has "
        "compiled left out. What the texts leave for trials stays on the device. Random weights have no head that is "
        "worth anything, so what a typical calibration takes is computed from the parts, not measured. The last table "
        "is a call of `calibrate` behind them, compiled, whose searches end at once."
    )
    more = {"Parts of the searches": measured, "A typical calibration, computed from its parts": computed}
    write_results(name, "Calibration: column mass, and whole models", kernels, out, note, {**more, "A call": calls})
    plot(kernels, measured, out / f"{name}.png")
