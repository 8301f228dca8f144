"""The `tca-jax` command line. Every command is a thin layer over the public API."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from jax.errors import JaxRuntimeError
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

from tca_jax.benchmarks.command import app as bench_app
from tca_jax.methods.config import TCAConfig

if TYPE_CHECKING:
    from tca_jax.calibration.profile import Profile
    from tca_jax.engine.lm import LM

_HEADS_IN_A_ROW = 8  # as many fit into 80 columns
_UsageError: Any = typer.BadParameter.__base__  # typer does not export it by its name


class _Program(TyperGroup):
    """The commands, with one way out: known errors are one line on standard error and exit code 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
            sys.stdout.flush()  # a reader that has gone is noticed here, not in the interpreter's shutdown
        except (KeyboardInterrupt, typer.Abort):
            code = 130
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered has no reader
            code = 1
        except _UsageError as error:
            code = _fail(error.format_message())
        except (ValueError, OSError, OverflowError) as error:
            if os.environ.get("TCA_JAX_TRACEBACK"):
                raise
            code = _fail(_message(error))
        except JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            code = _fail(f"out of memory: {str(error).splitlines()[0]}")
        sys.exit(code)


def _message(error: Exception) -> str:
    """What went wrong, without Python's decoration; an error of the system with its file."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _fail(message: str) -> int:
    console = Console(stderr=True)
    console.print("[bold red]error:[/] ", end="")
    console.print(" ".join(message.split()), markup=False, highlight=False, soft_wrap=True)
    return 2


app = typer.Typer(
    name="tca-jax",
    cls=_Program,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
profile_app = typer.Typer(help="Look at calibrated profiles.")
app.add_typer(profile_app, name="profile")
app.add_typer(bench_app, name="bench")

ModelArgument = Annotated[str, typer.Argument(help="Alias, Hugging Face Hub id or local folder.", show_default=False)]
ProfileOption = Annotated[
    str | None,
    typer.Option(help='Profile folder, or "shipped" for a shipped model.', show_default="full attention"),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16.", show_default="float32 on a CPU, else bfloat16"),
]
SeedOption = Annotated[int, typer.Option(help="Other seeds, other draws.", min=0, max=2**32 - 1)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def main() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding lacks
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    # transformers would advise to install PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    app()


def _print_version(wanted: bool) -> bool:
    if wanted:
        import tca_jax

        print(f"tca-jax {tca_jax.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def overview(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Training-free context-adaptive attention: long prompts, faster and smaller than full attention.

    Example: [bold]tca-jax demo[/]

    With TCA_JAX_TRACEBACK=1 in the environment, errors show where they were raised.
    """


@contextmanager
def _progress() -> Iterator[Callable[[str, int | None, int | None], None]]:
    """Shows on a terminal what is being done; yields `report(step, done, total)`, None where nothing is counted.

    It goes to standard error, so that a program can read the result; in a log it is silent.
    """
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as progress:
        task = progress.add_task("starting", total=None)

        def report(step: str, done: int | None, total: int | None) -> None:
            nonlocal task
            if step != progress.tasks[0].description:  # a new task, for a clock of its own
                progress.remove_task(task)
                task = progress.add_task(step, total=total)
            progress.update(task, completed=done or 0, total=total)

        yield report


def _load(model: str, profile: str | None, dtype: str | None) -> LM:
    import tca_jax

    with _progress() as report:
        step = f"loading {model}"
        report(step, None, None)
        return tca_jax.load(model, profile=profile, dtype=dtype, progress=lambda done, total: report(step, done, total))


def _read_text(path: Path, option: str) -> str:
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path} is not UTF-8 text: {error}") from None


def _require_writable(folder: Path, option: str) -> None:
    """Fails before a long run rather than after it, and leaves nothing behind."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{option} {folder} cannot be written: {existing}: {error.strerror}") from None


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=2, allow_nan=False))


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(help="Length of the document with its question.")] = 8192,
    questions: Annotated[int, typer.Option(help="Questions asked about the document.")] = 4,
    seed: SeedOption = 0,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("out"),
    as_json: JsonOption = False,
) -> None:
    """Answer questions over a long document with full attention and with TCA, side by side.

    Uses the model and the profile that ship with the package.

    Example: [bold]tca-jax demo --tokens 4096 --seed 7[/]
    """
    from tca_jax.demo import demo_table, run_demo

    _require_writable(out, "--out")
    with _progress() as report:
        result = run_demo(tokens, questions, seed, out, report)
    if as_json:
        _print_json(result.to_json())
        return
    console = Console()
    console.print(demo_table(result))
    console.print(result.summary(), highlight=False)
    console.print(f"Picture: {result.picture}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help='File with the prompt (UTF-8); "-" reads stdin.')] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user message through the chat template.")] = False,
    profile: ProfileOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k best tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set of this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens this close to the best.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages repetition.")] = None,
    seed: SeedOption = 0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the answer; may be repeated.")] = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt; the answer is printed as it is made.

    Example: [bold]tca-jax generate recall-tiny --profile shipped --prompt-file doc.txt[/]
    """
    import tca_jax

    if (prompt is None) == (prompt_file is None):
        raise ValueError("give the prompt either as --prompt or as --prompt-file")
    text = prompt if prompt is not None else _read_text(Path(prompt_file or ""), "--prompt-file")
    request: Any = [{"role": "user", "content": text}] if chat else text
    numbers: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    numbers["repetition_penalty"] = repetition_penalty
    tca_jax.Sampling.create(**numbers)  # a wrong number is worth saying before gigabytes are read
    lm = _load(model, profile, dtype)
    options = {**numbers, "max_new_tokens": max_new_tokens, "seed": seed, "stop": tuple(stop or ())}
    with _progress() as report:
        report("compiling, and reading the prompt", None, None)
        if as_json:
            out = tca_jax.generate(lm, request, **options)
        else:
            pieces = tca_jax.stream(lm, request, **options)
            first = next(pieces, "")
    if not as_json:
        print(first, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        return
    answer = {"text": out.text[0], "tokens": out.tokens[0], "finish_reason": out.finish_reasons[0]}
    _print_json({"model": model, "profile": profile, **answer, "stats": dataclasses.asdict(out.stats)})


@app.command()
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
    from tca_jax.calibration.run import calibrate as run_calibration
    from tca_jax.engine.prompts import encode_prompt

    options: dict[str, Any] = {"window": window, "block_size": block_size, "tau": tau}
    config = TCAConfig.paper(**options) if paper else TCAConfig(**options)
    _require_writable(out, "--out")
    texts = [_read_text(path, "--text") for path in text]
    lm = _load(model, None, dtype)
    sequences = [encode_prompt(lm, t, f"--text {p}")[:max_tokens] for t, p in zip(texts, text, strict=True)]
    with _progress() as report:
        step = f"calibrating on {len(sequences)} text{'s'[: len(sequences) > 1]}"
        profile = run_calibration(lm, sequences, config, progress=lambda done, total: report(step, done, total))
    profile.save(out)
    _print_profile(profile, out, None, None, as_json)


@profile_app.command()
def show(
    directory: Annotated[Path, typer.Argument(help="Folder that a profile was saved to.", show_default=False)],
    tokens: Annotated[
        int | None,
        typer.Option(help="Prompt length of the shares.", show_default="that of calibration", min=1, max=2**31 - 1),
    ] = None,
    png: Annotated[Path, typer.Option(help="Heat map to write.")] = Path("kept_share.png"),
    as_json: JsonOption = False,
) -> None:
    """Print what each layer and KV head keeps, and draw it as a heat map.

    Example: [bold]tca-jax profile show my-profile --tokens 32768 --png kept.png[/]
    """
    from tca_jax.calibration.profile import Profile

    _print_profile(Profile.load(directory), directory, tokens, png, as_json)


def _print_profile(profile: Profile, directory: Path, tokens: int | None, png: Path | None, as_json: bool) -> None:
    """Table or JSON of a profile; shares are for the longest calibration text where `tokens` is None."""
    tokens = tokens or max((source["tokens"] for source in profile.sources), default=131072)
    shares = profile.kept_share(tokens)
    if png is not None:
        from tca_jax.plots import plot_kept_share

        plot_kept_share(profile, tokens, png)
    if as_json:
        record = {
            "directory": str(directory),
            "model": profile.model_name,
            "library_version": profile.library_version,
            "config": dataclasses.asdict(profile.config),
            "tokens": tokens,
            "candidates": profile.candidates.tolist(),
            "kept_share": shares.tolist(),
            "mean_kept_share": float(shares.mean()),
            "sources": [dict(source) for source in profile.sources],
            "png": None if png is None else str(png),
        }
        _print_json(record)
        return
    console = Console()
    print(f"{profile.model_name}: kept share / candidate of each KV head at {tokens:,} tokens")
    for first in range(0, profile.num_kv_heads, _HEADS_IN_A_ROW):
        console.print(_profile_table(profile, shares, first))
    lengths = ", ".join(f"{source['tokens']:,}" for source in profile.sources)
    print(f"Mean kept share: {shares.mean():.1%}")
    print(f"Calibrated on texts of {lengths} tokens" if lengths else "Not calibrated on any text")
    print(f"Settings: {', '.join(f'{k}={v}' for k, v in dataclasses.asdict(profile.config).items())}")
    print(f"Profile: {directory}")
    if png is not None:
        print(f"Heat map: {png}")


def _profile_table(profile: Profile, shares: Any, first: int) -> Table:
    """Layers down, up to 8 KV heads across, and the mean over all heads of a layer."""
    dense = profile.config.num_candidates
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("layer", justify="right")
    last = min(first + _HEADS_IN_A_ROW, profile.num_kv_heads)
    for head in range(first, last):
        table.add_column(f"head {head}", justify="right")
    table.add_column("mean", justify="right", style="bold")
    for layer, row in enumerate(shares):
        candidates = profile.candidates[layer]
        cells = [
            "dense" if candidates[head] == dense else f"{row[head]:.0%}/{candidates[head] + 1}"
            for head in range(first, last)
        ]
        table.add_row(str(layer), *cells, f"{row.mean():.0%}")
    return table


if __name__ == "__main__":
    main()
