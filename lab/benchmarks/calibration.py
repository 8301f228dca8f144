"""`tca-jax bench calibration`: the time of a call of `calibrate`."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import tca_jax
from tca_jax.cli.files import read_text
from tca_jax.engine.lm import LM
from tca_jax.errors import require
from tca_jax.lab.benchmarks import common
from tca_jax.lab.benchmarks import models as shapes

NOTE = (
    "A call of `calibrate` over `texts` texts of `tokens` tokens: the first, with `compile s` in lowering and XLA, "
    "and the second. `layer passes`: passes of a text through a layer. Searches with random weights end at once; "
    "compute others from `ms per pass`."
)


def calibration_texts(lm: LM, text: Path | None, number: int, tokens: int) -> list[list[int]]:
    """Consecutive pieces of a text file as token ids; random ids without one."""
    if text is None:
        return np.random.default_rng(0).integers(0, lm.config.vocab_size, (number, tokens)).tolist()
    require(lm.tokenizer is not None, f"--text {text}: {lm.name} has no tokenizer")
    ids = lm.tokenizer.encode(read_text(text, "--text"))
    require(len(ids) >= number * tokens, f"--text {text}: has {len(ids):,} tokens, {number} of {tokens:,} need more")
    return [list(ids[i * tokens : (i + 1) * tokens]) for i in range(number)]


def measure(lm: LM, texts: list[list[int]], config: tca_jax.TCAConfig, kept: float | None) -> common.Row:
    """Two calls of `calibrate`."""
    seconds, passes, compilations = list[float](), 0, common.Compilations()

    def progress(done: int, total: int) -> None:
        nonlocal passes
        passes = done

    for _ in range(2):
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # probes are not informative for random weights
            tca_jax.calibrate(lm, texts, config, progress=progress, kept=kept)
        seconds.append(time.perf_counter() - start)
    compilations.close()
    first, second = seconds
    row = {"model": lm.name, "layers": lm.config.num_layers, "texts": len(texts), "tokens": len(texts[0])}
    row |= {"first call s": first, "compile s": sum(compilations.by_program.values()), "second call s": second}
    row |= {"layer passes": passes, "ms per pass": 1e3 * second / passes}
    return row | {"tokens/s": sum(map(len, texts)) / second}


def main(
    lengths: common.LengthsOption = None,
    models: common.ModelsOption = None,
    text: Annotated[Path | None, typer.Option(help="Text file.", show_default="random tokens")] = None,
    texts: Annotated[int, typer.Option(help="Texts.", min=1)] = 4,
    kept: Annotated[float | None, typer.Option(help="Bound on the kept share.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of random weights; all by default.", min=1)] = None,
    window: common.WindowOption = tca_jax.TCAConfig.window,
    out: common.OutOption = common.RESULTS,
    name: common.NameOption = "calibration",
) -> None:
    """Time calibration of whole models.

    --models also takes a folder, a GGUF file, an alias or a Hub id.

    Example: [bold]tca-jax bench calibration --models llama3.1-8b --lengths 32768[/]
    """
    lengths, config, models = lengths or [2**15], common.tca_config(window), models or ["llama3.1-8b"]
    shapes.find_configs([each for each in models if each in shapes.CONFIGS], whole=True, default=())
    common.check_lengths(lengths, config, out)
    results = common.Results(out, name, "Calibration", NOTE)
    for model in models:
        lm = shapes.open_model(model, layers=layers, max_positions=2 * max(lengths))
        for tokens in lengths:
            given = calibration_texts(lm, text, texts, tokens)
            results.add("Calls", measure(lm, given, config, kept))
    results.finish()
