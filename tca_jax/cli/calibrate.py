"""`tca-jax calibrate`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typer import Option

from tca_jax.cli.errors import naming_options
from tca_jax.cli.files import read_text, require_writable
from tca_jax.cli.options import DtypeOption, JsonOption, ModelArgument, WeightsOption
from tca_jax.cli.profiles import print_profile
from tca_jax.errors import require
from tca_jax.files import naming
from tca_jax.methods.config import Criterion, TCAConfig
from tca_jax.progress import progress

_PAPER = TCAConfig.paper()


def calibrate(
    model: ModelArgument,
    text: Annotated[list[Path], Option(help='UTF-8 text file; may be repeated, "-" is stdin.')],
    out: Annotated[Path, Option(help="Folder that the profile is saved to.")],
    tokens: Annotated[int, Option(help="Tokens of a text.", min=1)] = 8192,
    count: Annotated[int, Option(help="Texts that are made of the files; with --paper, of each file.", min=1)] = 8,
    kept: Annotated[
        float | None,
        Option(
            help="Share of the tokens that stays.", show_default="the smallest that holds what full attention knows"
        ),
    ] = None,
    paper: Annotated[
        bool, Option("--paper", help="The paper's rule: a row of budgets for each KV head (Algorithm 1).")
    ] = False,
    tau: Annotated[
        float | None, Option(help="With --paper: threshold of a candidate's score.", show_default=f"{_PAPER.tau}")
    ] = None,
    window: Annotated[
        int | None, Option(help="With --paper: local tokens that every query keeps.", show_default=f"{_PAPER.window}")
    ] = None,
    block_size: Annotated[
        int | None, Option(help="With --paper: tokens in a block.", show_default=f"{_PAPER.block_size}")
    ] = None,
    criterion: Annotated[
        Criterion | None, Option(help="With --paper: score of a candidate.", show_default=_PAPER.criterion)
    ] = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fit which tokens each KV head keeps, from a few long texts.

    Example: [bold]tca-jax calibrate qwen2.5-7b --text book.txt --out my-profile[/]
    """
    given = {"tau": tau, "window": window, "block_size": block_size, "criterion": criterion}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    require(paper or not settings, f"--{next(iter(settings), '').replace('_', '-')} goes with --paper")
    require(kept is None or not paper, "--kept goes with predicted worth: leave out --paper")
    with naming_options(*given):
        config = TCAConfig.paper(**settings) if paper else None
    require_writable(out, "--out")
    texts = [(f"--text {path}", read_text(path, "--text")) for path in text]

    from tca_jax.calibration import run
    from tca_jax.calibration.worth_profile import packed_texts
    from tca_jax.engine.prompts import encode_prompt
    from tca_jax.loading import check_options, open_checkpoint

    with naming_options("dtype", "weights"):
        check_options(dtype, weights)
    checkpoint = open_checkpoint(model)
    sequences: list[Any] = []
    options: dict[str, Any] = {}
    if config is None:  # errors come before the weights are read
        sequences, options = [words for _, words in texts], {"count": count, "tokens": tokens, "kept": kept}
        with naming_options("count", "tokens", "kept"):
            packed_texts(checkpoint, sequences, **options)
    else:
        most = min(tokens, checkpoint.config.max_context)
        for name, words in texts:
            ids = encode_prompt(checkpoint, words, name)
            own = _spread(ids, most, count)
            run.require_length(f"{name}, cut to {most}," if len(ids) > most else name, len(own[0]), checkpoint, config)
            sequences += own
    with progress(log=True) as report:
        lm = checkpoint.load(dtype=dtype, weights=weights, progress=functools.partial(report, f"loading {model}"))
        profile = run.calibrate(lm, sequences, config, **options, progress=report)
    with naming(out):
        profile.save(out)
    print_profile(profile, out, None, as_json)


def _spread(ids: list[int], tokens: int, count: int) -> list[list[int]]:
    """Up to `count` texts of `tokens` ids each, spread evenly over `ids`; each begins with the first id."""
    if len(ids) <= tokens:
        return [ids]
    starts = np.linspace(0, len(ids) - tokens, max(1, min(count, len(ids) // tokens))).astype(int).tolist()
    return [ids[:1] + ids[start + 1 : start + tokens] for start in starts]
