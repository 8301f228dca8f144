"""`tca-jax calibrate`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tca_jax.cli.errors import naming_options
from tca_jax.cli.files import read_text, require_writable
from tca_jax.cli.options import DtypeOption, JsonOption, ModelArgument, WeightsOption
from tca_jax.cli.profiles import print_profile
from tca_jax.errors import check_integer, explaining, require
from tca_jax.files import naming
from tca_jax.methods.config import Criterion, TCAConfig
from tca_jax.progress import progress

_MOST_TEXTS = 8  # of one file


def calibrate(
    model: ModelArgument,
    text: Annotated[list[Path], typer.Option(help='UTF-8 text file; may be repeated, "-" is stdin.')],
    out: Annotated[Path, typer.Option(help="Folder that the profile is saved to.")],
    max_tokens: Annotated[
        int, typer.Option(help="Length of a text; a longer file gives up to 8, spread evenly over it.", min=1)
    ] = 8192,
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
        float, typer.Option(help="Allowed loss inside the texts, as a share of what the smallest budget costs.")
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
    settings: dict[str, Any] = {"window": window, "block_size": block_size, "tau": tau}
    settings |= {"read_tolerance": read_tolerance, "keep_tolerance": keep_tolerance}
    settings |= {} if criterion is None else {"criterion": criterion}
    with naming_options(*settings):
        config = TCAConfig.paper(**settings) if paper else TCAConfig(**settings)
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
    checkpoint = open_checkpoint(model)
    most = min(max_tokens, checkpoint.config.max_context)
    sequences, names = [], []
    for name, words in texts:
        ids = encode_prompt(checkpoint, words, name)
        own = _spread(ids, most, 1 if isinstance(chosen, list) else _MOST_TEXTS)
        require_length(f"{name}, cut to {most}," if len(ids) > most else name, len(own[0]), checkpoint, config)
        sequences += own
        names += [name] * len(own)
    options = {"probes": chosen, "kept": kept, "attended": attended}
    with progress(log=True) as report, naming_options("kept", "attended"):
        if config.criterion == "worth":  # errors come before the weights are read
            probed = probed_texts(checkpoint, sequences, chosen, config, names)
            if kept is not None:
                require_fit(kept, max(len(each.ids) for each in probed), config)
        loading, step = f"loading {model}", f"calibrating on {len(sequences)} text{'s'[: len(sequences) > 1]}"
        lm = checkpoint.load(dtype=dtype, weights=weights, progress=functools.partial(report, loading))
        profile = run_calibration(lm, sequences, config, **options, progress=functools.partial(report, step))
    with naming(out):
        profile.save(out)
    print_profile(profile, out, None, as_json)


def _spread(ids: list[int], tokens: int, count: int) -> list[list[int]]:
    """Up to `count` texts of `tokens` ids each, spread evenly over `ids`; each begins with the first id."""
    if len(ids) <= tokens:
        return [ids]
    starts = np.linspace(0, len(ids) - tokens, max(1, min(count, len(ids) // tokens))).astype(int).tolist()
    return [ids[:1] + ids[start + 1 : start + tokens] for start in starts]


def _probes(option: str, num_texts: int) -> Any:
    """What `calibrate` takes for `--probes`: a kind, None for both, or the pairs of a file for each text."""
    if option in ("both", "facts", "copy"):
        return None if option == "both" else option
    known = option.endswith(".jsonl")
    require(known, f"--probes {option}: must be both, facts, copy, or a file that ends with .jsonl")
    pairs: list[list[tuple[str, str]]] = [[] for _ in range(num_texts)]
    for number, line in enumerate(read_text(Path(option), "--probes").split("\n"), start=1):
        if line.strip():
            text, pair = _pair(line, f"--probes {option}, line {number}", num_texts)
            pairs[text].append(pair)
    for index, of_text in enumerate(pairs):
        require(of_text, f"--probes {option} has no pair for text {index}: every text needs one")
    return pairs


def _pair(line: str, where: str, num_texts: int) -> tuple[int, tuple[str, str]]:
    """The text that a line is about, and its question and answer."""
    with explaining(f"{where} is not JSON", ValueError):
        given: Any = json.loads(line)
    record: Any = {"text": 0} | given if num_texts == 1 and isinstance(given, dict) else given
    fields = isinstance(record, dict) and set(record) == {"question", "answer", "text"}
    needed = '"question", "answer" and, if there are several texts, "text"'
    require(fields, f"{where}: must be an object with {needed}")
    text, pair = record["text"], (record["question"], record["answer"])
    strings = all(isinstance(each, str) and each for each in pair)
    require(strings, f"{where}: question and answer must be strings that are not empty")
    check_integer(f"{where}: text", text, at_least=0, at_most=num_texts - 1)
    return text, pair
