"""`tca-jax plot`: budgets, kept tokens, and results of benchmarks and evaluations, as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tca_jax.cli.errors import naming_options
from tca_jax.cli.files import read_text, require_writable
from tca_jax.cli.models import opened
from tca_jax.cli.options import (
    LARGEST,
    ModelArgument,
    ModelOptions,
    ProfileOption,
    SavedProfileArgument,
    ShareTokensOption,
)
from tca_jax.cli.profiles import profile_folder
from tca_jax.progress import progress


def _checked_png(path: Path) -> Path:
    """Refuses a file that is no PNG before anything is computed."""
    from tca_jax.lab.plots.figures import require_png

    require_png(path, "--out ")
    return path


PictureOption = Annotated[Path, typer.Option(help="PNG to write.", callback=_checked_png)]

app = typer.Typer(help="Draw budgets, kept tokens and results.", result_callback=lambda path: print("Picture:", path))


@app.command()
def budgets(
    profile: SavedProfileArgument, tokens: ShareTokensOption = None, out: PictureOption = Path("out/budgets.png")
) -> Path:
    """Draw the share of a prompt that each KV head keeps; of predicted worth, an estimate.

    Example: [bold]tca-jax plot budgets shipped --tokens 8192[/]
    """
    from tca_jax.calibration.profile import Profile
    from tca_jax.lab.plots import plot_kept_share

    p = Profile.load(profile_folder(profile))
    tokens = tokens or max((source["tokens"] for source in p.sources), default=131072)
    return plot_kept_share(p.kept_share(tokens), tokens, p.model_name, out)


@app.command()
def selected(
    model: ModelArgument,
    file: Annotated[Path, typer.Option(help='The text (UTF-8); "-" is stdin.', show_default=False)],
    question: Annotated[str | None, typer.Option(help="Put behind the text, on a line of its own.")] = None,
    profile: ProfileOption = None,
    around: Annotated[str | None, typer.Option(help="Outline the first line with these words, on its page.")] = None,
    start: Annotated[int, typer.Option(help="First token of the page.", min=0, max=LARGEST)] = 0,
    out: PictureOption = Path("out/selected.png"),
) -> Path:
    """Draw which tokens the heads keep of a text: of all of it, and over a page of it.

    What is kept depends on how the prompt ends: --question asks something.

    Example: [bold]tca-jax plot selected recall-tiny --profile shipped --file report.txt[/]
    """
    from tca_jax.engine.prompts import encode_continuation, encode_prompt, require_positions
    from tca_jax.lab.plots import plot_selected_tokens

    require_writable(out.parent, "--out")
    text = read_text(file, "--file")
    with opened(model, ModelOptions(profile=profile)) as (checkpoint, load):
        ids = encode_prompt(checkpoint, text, "--file")
        if question is not None:
            ids = ids + encode_continuation(checkpoint, f"\n\n{question}", ids, "--question")
        require_positions("--file", len(ids), 0, checkpoint)  # before the weights are read
        lm = load()
    with progress() as report, naming_options("around", "start"):
        report(f"compiling, and reading {len(ids):,} tokens", None, None)
        return plot_selected_tokens(lm, ids, out, start=start, around=around)


@app.command()
def latency(
    results: Annotated[list[Path], typer.Argument(help="JSON files of results.", show_default=False)],
    new_tokens: Annotated[
        int, typer.Option(help="Tokens decoded behind a benchmark's prompt.", min=1, max=LARGEST)
    ] = 256,
    out: PictureOption = Path("out/latency.png"),
) -> Path:
    """Draw where the time goes, from results of bench or generate.

    Takes results of [bold]bench end-to-end[/], which are drawn in parts beside those of [bold]bench attention[/], and
    what [bold]generate --json[/] printed.

    Example: [bold]tca-jax plot latency attention.jsonl end-to-end.jsonl[/]
    """
    from tca_jax.lab.benchmarks.common import read_results
    from tca_jax.lab.plots import plot_latency
    from tca_jax.lab.plots.results import latency_bars
    from tca_jax.models.json_object import read_json_object

    records = {str(path): read_results(path) if path.suffix == ".jsonl" else read_json_object(path) for path in results}
    bars = latency_bars(records, new_tokens=new_tokens)
    devices = {record["environment"]["device"] for record in records.values() if "environment" in record}
    return plot_latency(bars, ", ".join(["Where the time goes", *sorted(devices)]), out)


@app.command()
def accuracy(
    results: Annotated[Path, typer.Argument(help="JSON file of results.", show_default=False)],
    protocol: Annotated[
        str | None, typer.Option(help="late, preamble or prefix.", show_default="all, a panel each")
    ] = None,
    out: PictureOption = Path("out/accuracy.png"),
) -> Path:
    """Draw right answers against the bytes of the KV cache: a panel a protocol, a curve a method.

    Example: [bold]tca-jax plot accuracy evaluation.json --protocol late[/]
    """
    from tca_jax.lab.plots import plot_accuracy
    from tca_jax.lab.plots.results import accuracy_panels

    return plot_accuracy(accuracy_panels(results, protocol), out)
