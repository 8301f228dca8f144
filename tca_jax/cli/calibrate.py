"""`tca-jax calibrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tca_jax.cli.errors import naming_options
from tca_jax.cli.files import read_text, require_writable
from tca_jax.cli.options import DtypeOption, JsonOption, ModelArgument, WeightsOption
from tca_jax.cli.profiles import print_profile
from tca_jax.cli.progress import progress
from tca_jax.errors import UserError
from tca_jax.files import naming
from tca_jax.methods.config import Criterion, TCAConfig


def calibrate(
    model: ModelArgument,
    text: Annotated[list[Path], typer.Option(help='UTF-8 text file, one sequence each; repeat it, "-" is stdin.')],
    out: Annotated[Path, typer.Option(help="Folder that the profile is saved to.")],
    max_tokens: Annotated[int | None, typer.Option(help="Cut every text to this many tokens.", min=1)] = None,
    window: Annotated[int, typer.Option(help="Local tokens that every query keeps.")] = TCAConfig.window,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = TCAConfig.block_size,
    probes: Annotated[
        str,
        typer.Option(
            metavar="both|facts|copy|FILE.jsonl",
            help="What finds the heads whose cache must keep everything: facts hidden in the texts and asked for, "
            "passages of the texts repeated, both, or a file of "
            '{"question": ..., "answer": ..., "text": 0} lines, where text counts the texts from 0.',
        ),
    ] = "both",
    kept: Annotated[
        float | None,
        typer.Option(
            help="Largest share of the cache, such as 0.3; the heads of highest worth come first.", show_default="none"
        ),
    ] = None,
    attended: Annotated[
        float | None,
        typer.Option(
            help="Largest attended share of a prompt's pairs; the heads of highest worth come first.",
            show_default="none",
        ),
    ] = None,
    read_tolerance: Annotated[
        float, typer.Option(help="Allowed loss inside the texts, as a share of what row 0 in every head costs.")
    ] = TCAConfig.read_tolerance,
    keep_tolerance: Annotated[
        float, typer.Option(help="Share of the probes' known answers that the cache may lose.")
    ] = TCAConfig.keep_tolerance,
    criterion: Annotated[
        Criterion | None,
        typer.Option(
            help="worth: measured losses. The others: scores of Algorithm 1, compared with --tau, one row a head.",
            show_default=f"{TCAConfig.criterion}; column_mean with --paper",
        ),
    ] = None,
    tau: Annotated[float, typer.Option(help="Threshold of the scores of Algorithm 1.")] = TCAConfig.tau,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's own density and criterion; no reserve.")] = False,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find each KV head's reading and token budgets, from a few long texts and from probes about them.

    Example: [bold]tca-jax calibrate qwen2.5-7b --text book.txt --out my-profile[/]
    """
    options: dict[str, Any] = {"window": window, "block_size": block_size, "tau": tau}
    options |= {"read_tolerance": read_tolerance, "keep_tolerance": keep_tolerance}
    options |= {} if criterion is None else {"criterion": criterion}
    with naming_options(*options):
        config = TCAConfig.paper(**options) if paper else TCAConfig(**options)
    require_writable(out, "--out")
    texts = [(f"--text {path}", read_text(path, "--text")) for path in text]
    chosen = _probes(probes, len(texts))

    from tca_jax.calibration.probes import probed_texts
    from tca_jax.calibration.run import calibrate as run_calibration
    from tca_jax.calibration.run import require_bounds, require_fit, require_length
    from tca_jax.engine.prompts import encode_prompt
    from tca_jax.loading import check_dtype, check_eight_bits, open_checkpoint

    with naming_options("dtype", "weights", "probes", "kept", "attended"):
        check_dtype(dtype)
        check_eight_bits(weights, None)
        require_bounds(config, probes=chosen, kept=kept, attended=attended)
    with progress() as report, naming_options("kept", "attended"):
        report(f"loading {model}", None, None)
        checkpoint = open_checkpoint(model)
        sequences = []
        for name, words in texts:
            ids = encode_prompt(checkpoint, words, name)
            cut = "" if max_tokens is None or max_tokens >= len(ids) else f", cut by --max-tokens {max_tokens},"
            sequences.append(ids[:max_tokens])
            require_length(f"{name}{cut}", len(sequences[-1]), checkpoint, config)
        if config.criterion == "worth":  # what is wrong is said before the weights are read
            names = [name for name, _ in texts]
            probed = probed_texts(checkpoint, sequences, chosen, config, names)
            if kept is not None:
                require_fit(kept, max(len(each.ids) for each in probed), config)
        lm = checkpoint.load(
            dtype=dtype, weights=weights, progress=lambda done, total: report(f"loading {model}", done, total)
        )
        step = f"calibrating on {len(sequences)} text{'s'[: len(sequences) > 1]}"
        profile = run_calibration(
            lm,
            sequences,
            config,
            probes=chosen,
            kept=kept,
            attended=attended,
            progress=lambda done, total: report(step, done, total),
        )
    with naming(out):
        profile.save(out)
    print_profile(profile, out, None, as_json)


def _probes(option: str, num_texts: int) -> Any:
    """What `calibrate` takes for `--probes`: a kind, None for both, or the pairs of a file for each text."""
    if option in ("facts", "copy"):
        return option
    if option == "both":
        return None
    if not option.endswith(".jsonl"):
        raise UserError(f"--probes {option}: must be both, facts, copy, or a file that ends with .jsonl")
    pairs: list[list[tuple[str, str]]] = [[] for _ in range(num_texts)]
    for number, line in enumerate(read_text(Path(option), "--probes").split("\n"), start=1):
        if line.strip():
            text, pair = _pair(line, f"--probes {option}, line {number}", num_texts)
            pairs[text].append(pair)
    for index, of_text in enumerate(pairs):
        if not of_text:
            raise UserError(f"--probes {option} holds no pair for text {index}: every text needs one")
    return pairs


def _pair(line: str, where: str, num_texts: int) -> tuple[int, tuple[str, str]]:
    """The text that a line belongs to, and its question and answer."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is no JSON: {error}") from None
    if not isinstance(record, dict) or not {"question", "answer"} <= set(record) <= {"question", "answer", "text"}:
        raise UserError(f'{where}: must be an object with "question", "answer" and, if there are several texts, "text"')
    for name in ("question", "answer"):
        if not isinstance(record[name], str) or not record[name]:
            raise UserError(f"{where}: {name} = {record[name]!r}: must be a string that is not empty")
    text = record.get("text", 0 if num_texts == 1 else None)
    if isinstance(text, bool) or not isinstance(text, int) or not 0 <= text < num_texts:
        raise UserError(f"{where}: text = {text!r}: must be an integer in [0, {num_texts - 1}], which text it is about")
    return text, (record["question"], record["answer"])
