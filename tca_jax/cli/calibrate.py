"""`tca-jax calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tca_jax.cli.files import read_text, require_writable
from tca_jax.cli.options import DtypeOption, JsonOption, ModelArgument
from tca_jax.cli.profiles import print_profile
from tca_jax.cli.progress import progress
from tca_jax.files import naming
from tca_jax.methods.config import TCAConfig


def calibrate(
    model: ModelArgument,
    text: Annotated[list[Path], typer.Option(help='UTF-8 text file, one sequence each; repeat it, "-" is stdin.')],
    out: Annotated[Path, typer.Option(help="Folder that the profile is saved to.")],
    max_tokens: Annotated[int | None, typer.Option(help="Cut every text to this many tokens.", min=1)] = None,
    window: Annotated[int, typer.Option(help="Local tokens that every query keeps.")] = TCAConfig.window,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = TCAConfig.block_size,
    tau: Annotated[float, typer.Option(help="Threshold that the sparsest candidate must reach.")] = TCAConfig.tau,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's own density and criterion.")] = False,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give every KV head a token budget, from one forward pass over a few long texts.

    Example: [bold]tca-jax calibrate qwen2.5-7b --text book.txt --out my-profile[/]
    """
    options: dict[str, Any] = {"window": window, "block_size": block_size, "tau": tau}
    config = TCAConfig.paper(**options) if paper else TCAConfig(**options)
    require_writable(out, "--out")
    texts = [(f"--text {path}", read_text(path, "--text")) for path in text]

    from tca_jax.calibration.run import calibrate as run_calibration
    from tca_jax.calibration.run import require_length
    from tca_jax.engine.prompts import encode_prompt
    from tca_jax.loading import check_dtype, open_checkpoint

    check_dtype(dtype)
    with progress() as report:
        report(f"loading {model}", None, None)
        checkpoint = open_checkpoint(model)
        sequences = [encode_prompt(checkpoint, text, name)[:max_tokens] for name, text in texts]
        for (name, _), ids in zip(texts, sequences, strict=True):
            require_length(name, len(ids), checkpoint, config)
        lm = checkpoint.load(dtype=dtype, progress=lambda done, total: report(f"loading {model}", done, total))
        step = f"calibrating on {len(sequences)} text{'s'[: len(sequences) > 1]}"
        profile = run_calibration(lm, sequences, config, progress=lambda done, total: report(step, done, total))
    with naming(out):
        profile.save(out)
    print_profile(profile, out, None, None, as_json)
