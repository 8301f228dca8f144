"""`tca-jax plot`: budgets, kept tokens, attention, and results of benchmarks and evaluations, as PNG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from tca_jax.cli.errors import naming_options
from tca_jax.cli.files import read_text, require_writable
from tca_jax.cli.models import opened
from tca_jax.cli.options import (
    LARGEST,
    DtypeOption,
    ModelArgument,
    ModelOptions,
    ProfileOption,
    SavedProfileArgument,
    ShareTokensOption,
)
from tca_jax.cli.profiles import profile_folder
from tca_jax.errors import UserError
from tca_jax.progress import progress

if TYPE_CHECKING:
    from tca_jax.engine.lm import LM


def _checked_png(path: Path) -> Path:
    """Refuses a file that is no PNG before anything is computed."""
    from tca_jax.lab.plots.figures import require_png

    try:
        require_png(path)
    except UserError as error:
        raise UserError(f"--out {error}") from None
    return path


PictureOption = Annotated[Path, typer.Option(help="PNG to write.", callback=_checked_png)]
FileOption = Annotated[Path, typer.Option(help='The text (UTF-8); "-" is stdin.', show_default=False)]
MaxTokensOption = Annotated[int | None, typer.Option(help="Cut the text to this many tokens.", min=1, max=LARGEST)]

ResultsArgument = Annotated[Path, typer.Argument(help="JSON such as lab/results/zoo-curves.json.", show_default=False)]

app = typer.Typer(help="Draw budgets, kept tokens, attention and results.")


@app.command()
def budgets(
    profile: SavedProfileArgument,
    tokens: ShareTokensOption = None,
    out: PictureOption = Path("out/budgets.png"),
) -> None:
    """Draw what each KV head keeps of a prompt, what a prompt's own queries attend to, and what heads are worth.

    Example: [bold]tca-jax plot budgets shipped --tokens 8192[/]
    """
    from tca_jax.calibration.profile import Profile
    from tca_jax.lab.plots import WorthMap, plot_kept_share

    p = Profile.load(profile_folder(profile))
    tokens = tokens or max((source["tokens"] for source in p.sources), default=131072)
    keeping = "Worth of keeping everything (outlined: heads that keep more than candidate 0)"
    worth = [
        WorthMap("Worth of reading blocks (outlined: heads that do)", p.reading_worth, p.readings != "sparse"),
        WorthMap(keeping, p.keeping_worth, p.candidates > 0),
    ]
    shares, prefill = p.kept_share(tokens), p.prefill_kept_share(tokens)
    _print_path(plot_kept_share(shares, tokens, p.model_name, out, prefill_share=prefill, worth=worth))


@app.command()
def selected(
    model: ModelArgument,
    file: FileOption,
    question: Annotated[str | None, typer.Option(help="Put behind the text, on a line of its own.")] = None,
    profile: ProfileOption = None,
    max_tokens: MaxTokensOption = None,
    around: Annotated[str | None, typer.Option(help="Outline the first line with these words, on its page.")] = None,
    start: Annotated[int, typer.Option(help="First token of the page.", min=0, max=LARGEST)] = 0,
    layer: Annotated[int | None, typer.Option(help="Heads of this layer alone.", show_default="all")] = None,
    head: Annotated[int | None, typer.Option(help="This KV head alone.", show_default="all")] = None,
    dtype: DtypeOption = None,
    out: PictureOption = Path("out/selected.png"),
) -> None:
    """Draw which tokens the heads keep of a text: of all of it, and over a page of it.

    What is kept depends on how the prompt ends: --question asks something.

    Example: [bold]tca-jax plot selected recall-tiny --profile shipped --file report.txt[/]
    """
    from tca_jax.lab.plots import kept_tokens, local_start, plot_selected_tokens, token_texts

    require_writable(out.parent, "--out")
    lm, ids = _load(model, profile, dtype, file, max_tokens, question)
    texts = token_texts(lm, ids)
    options: dict[str, Any] = {"start": start, "layer": layer, "head": head}
    options["span"] = None if around is None else _span_of(around, texts)
    options |= {"block_size": lm.method.cache.block_size, "window_start": local_start(lm, len(ids))}
    kept = _reading(kept_tokens, lm, ids)
    _print_path(plot_selected_tokens(kept, texts, f"{lm.name}, {lm.method.name}", out, **options))


@app.command()
def attention(
    model: ModelArgument,
    file: FileOption,
    max_tokens: MaxTokensOption = None,
    dtype: DtypeOption = None,
    out: PictureOption = Path("out/attention.png"),
) -> None:
    """Draw how much attention each position of a text gets, and how few tokens get nearly all of it.

    The attention is full attention's, whatever a profile would keep.

    Example: [bold]tca-jax plot attention recall-tiny --file report.txt[/]
    """
    from tca_jax.lab.plots import attention_received, plot_attention

    require_writable(out.parent, "--out")
    lm, ids = _load(model, None, dtype, file, max_tokens)
    _print_path(plot_attention(_reading(attention_received, lm, ids), lm.name, out))


@app.command()
def latency(
    results: Annotated[list[Path], typer.Argument(help="JSON files of results.", show_default=False)],
    tokens: Annotated[
        int | None, typer.Option(help="Prompt length.", show_default="the longest", min=1, max=LARGEST)
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens decoded behind a benchmark's prompt.", min=1, max=LARGEST)
    ] = 256,
    out: PictureOption = Path("out/latency.png"),
) -> None:
    """Draw where the time goes, from what bench or generate wrote.

    Takes results of [bold]bench attention[/] (one layer), of [bold]bench end-to-end[/] (whole models), of both (whole
    models in parts), and what [bold]generate --json[/] printed.

    Example: [bold]tca-jax plot latency attention.jsonl end-to-end.jsonl[/]
    """
    from tca_jax.lab.benchmarks.common import read_results
    from tca_jax.lab.plots import plot_latency
    from tca_jax.lab.plots.results import latency_bars
    from tca_jax.models.json_object import read_json_object

    records = {str(path): read_results(path) if path.suffix == ".jsonl" else read_json_object(path) for path in results}
    bars = latency_bars(records, tokens=tokens, new_tokens=new_tokens)
    devices = {record["environment"]["device"] for record in records.values() if "environment" in record}
    _print_path(plot_latency(bars, ", ".join(["Where the time goes", *sorted(devices)]), out))


@app.command()
def accuracy(
    results: Annotated[Path, typer.Argument(help="JSON file or folder of results.", show_default=False)],
    out: PictureOption = Path("out/accuracy.png"),
) -> None:
    """Draw right answers against the bytes of the KV cache, a panel a protocol.

    Example: [bold]tca-jax plot accuracy evaluation.json[/]
    """
    from tca_jax.lab.plots import plot_accuracy
    from tca_jax.lab.plots.results import accuracy_panels

    _print_path(plot_accuracy(accuracy_panels(results), "Right answers by the KV cache that is held", out))


@app.command()
def reading(
    results: ResultsArgument,
    out: PictureOption = Path("out/reading.png"),
) -> None:
    """Draw loss inside the text against the attended share: a panel a model, a curve a method.

    Example: [bold]tca-jax plot reading curves.json[/]
    """
    from tca_jax.lab.plots import plot_reading
    from tca_jax.lab.plots.results import model_points

    _print_path(plot_reading(model_points(results), out))


@app.command()
def keeping(
    results: ResultsArgument,
    protocol: Annotated[str, typer.Option(help="late, preamble or prefix.")] = "late",
    out: PictureOption = Path("out/keeping.png"),
) -> None:
    """Draw right answers against the bytes of the KV cache: a panel a model, a curve a method.

    Example: [bold]tca-jax plot keeping curves.json[/]
    """
    from tca_jax.lab.plots import plot_keeping
    from tca_jax.lab.plots.results import model_points

    with naming_options("protocol"):
        _print_path(plot_keeping(model_points(results), out, protocol=protocol))


def _load(
    model: str, profile: str | None, dtype: str | None, file: Path, max_tokens: int | None, question: str | None = None
) -> tuple[LM, list[int]]:
    """The model, and the text's token ids, which are known to fit before its weights are read."""
    from tca_jax.engine.prompts import encode_continuation, encode_prompt, require_positions

    text = read_text(file, "--file")
    with opened(model, ModelOptions(profile=profile, dtype=dtype)) as (checkpoint, load):
        ids = encode_prompt(checkpoint, text, "--file")[:max_tokens]
        if question is not None:
            ids = ids + encode_continuation(checkpoint, f"\n\n{question}", ids, "--question")
        require_positions("--file", len(ids), 0, checkpoint)
        return load(), ids


def _reading(inspect: Callable[[LM, list[int]], np.ndarray], lm: LM, ids: list[int]) -> np.ndarray:
    with progress() as report:
        report(f"compiling, and reading {len(ids):,} tokens", None, None)
        return inspect(lm, ids)


def _span_of(words: str, texts: list[str]) -> tuple[int, int]:
    """The tokens of the text's first line with these words: the first, and the one past the last."""
    text = "".join(texts)
    if (found := text.find(words)) < 0:
        raise UserError(f"--around {words!r}: these words are not in the text")
    start, end = text.rfind("\n", 0, found) + 1, text.find("\n", found)
    places = np.cumsum([0, *map(len, texts)])
    first = np.searchsorted(places, start, side="right") - 1
    return int(first), int(np.searchsorted(places, len(text) if end < 0 else end))


def _print_path(path: Path) -> None:
    print(f"Picture: {path}")
