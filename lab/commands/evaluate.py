"""`tca-jax eval`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tca_jax.cli.files import read_text, require_writable
from tca_jax.cli.models import opened
from tca_jax.cli.options import (
    AttentionOption,
    DtypeOption,
    KVOption,
    MeshOption,
    ModelArgument,
    ModelOptions,
    SeedOption,
    WeightsOption,
)
from tca_jax.errors import require, require_name
from tca_jax.progress import progress

if TYPE_CHECKING:
    from tca_jax.calibration.profile import Profile
    from tca_jax.calibration.worth_profile import WorthProfile
    from tca_jax.loading import Checkpoint

_CALIBRATION_TOKENS = 8192  # of a text for calibration
_TRIALS = 15  # of each tuned method
#: Defaults without --suite.
DEFAULTS: Mapping[str, Any] = {
    "methods": "full,worth",
    "tasks": "ruler",
    "lengths": "4096",
    "protocols": "prefix,preamble,late",
    "samples": 20,
    "out": Path("out/eval"),
}
_LONG: Mapping[str, Any] = {"tasks": "ruler", "lengths": "8192,16384,32768,65536,131072", "samples": 100}
#: Evaluations that others can repeat: table 1 of the TCA-Attention paper (arXiv 2512.09238), and late questions.
SUITES: Mapping[str, Mapping[str, Any]] = {
    "paper": {
        **_LONG,
        "methods": "full,worth,paper,minference,flexprefill:gamma=0.95,xattention",
        "protocols": "prefix",
        "out": Path("out/paper"),
    },
    "late": {
        **_LONG,
        "methods": "full,worth,paper,snapkv:share=0.25,adakv-expected-attention:share=0.25,streaming",
        "protocols": "late",
        "out": Path("out/late"),
    },
}
_FIXED = ("tasks", "protocols", "kv_share", "tune")  # by --suite


def _option(text: str, default: str | bool = False, **more: Any) -> Any:
    return typer.Option(help=text, show_default=default, **more)


def _default(name: str, text: str, **more: Any) -> Any:
    return _option(text, str(DEFAULTS[name]), **more)


def evaluate(
    model: ModelArgument,
    methods: Annotated[
        str | None, _default("methods", 'Registered names, "worth", "paper", options behind a colon, pairs by "+".')
    ] = None,
    tasks: Annotated[str | None, _default("tasks", "ruler, recall, loss, or single tasks.")] = None,
    lengths: Annotated[str | None, _default("lengths", "Tokens of a prompt with its answer.")] = None,
    protocols: Annotated[str | None, _default("protocols", "Of tasks that ask questions; late-prefix too.")] = None,
    samples: Annotated[int | None, _default("samples", "Samples of each task and length.", min=1)] = None,
    seed: SeedOption = 0,
    out: Annotated[Path | None, _default("out", "Folder of the results; a second run adds to it.")] = None,
    profile: Annotated[str | None, _option("Profile folder; the paper's is FOLDER-paper.", "the shipped one")] = None,
    essays: Annotated[Path | None, _option("Text for haystacks.", "a substitute")] = None,
    squad: Annotated[Path | None, _option("SQuAD 2.0 (JSON), for qa_1.")] = None,
    hotpotqa: Annotated[Path | None, _option("HotpotQA (JSON), for qa_2.")] = None,
    text: Annotated[Path | None, _option("For loss.", "a substitute")] = None,
    kv_share: Annotated[
        float | None, _option("Share of full attention's bytes of a prompt that each method may hold.", "its own")
    ] = None,
    tune: Annotated[
        str | None, _option("Methods whose options are searched on calibration texts, or all.", "none")
    ] = None,
    trials: Annotated[int | None, _option("Trials of each tuned method.", "15", min=1)] = None,
    tune_text: Annotated[
        list[Path] | None, _option("Calibration texts, one sequence each.", "the start of --text")
    ] = None,
    batch: Annotated[int, _option("Most prompts in a call; fewer where memory is short.", True, min=1)] = 8,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    kv: KVOption = None,
    attention: AttentionOption = None,
    mesh: MeshOption = None,
    suite: Annotated[str | None, _option("paper or late: fixed tasks and protocol.")] = None,
) -> None:
    """Compare attention methods on a model: accuracy and bytes held.

    RULER's thirteen tasks, the shipped model's recall tasks, loss of a text; each under three protocols: the prompt
    ends with the answer's first words (prefix) or with the question (preamble), or the question comes to a context
    that was read without it (late).

    A suite has its own methods, lengths and samples, which options may change, and its own tasks and protocol, which
    they may not.

    Lists are written with commas. The folder gets config.json, a JSON file for each task, and table.md. An interrupted
    run continues.

    Example: [bold]tca-jax eval recall-tiny --tasks recall --samples 5 --out out/recall[/]
    """
    from tca_jax.engine.prompts import encode_prompt
    from tca_jax.lab.evaluation import Builder, Results, Sources, make_plan, parse_methods, run_plan
    from tca_jax.lab.evaluation.method_specs import parse_labels
    from tca_jax.lab.evaluation.tuning import make_tuning

    given = {name: value for name, value in locals().items() if name in (*DEFAULTS, *_FIXED) and value is not None}
    settings = {**DEFAULTS, **given}
    if suite is not None:
        require_name(f"--suite {suite}", suite, SUITES)
        for option in _FIXED:
            fixed = f"--{option.replace('_', '-')} is fixed by --suite {suite}"
            require(option not in given, f"{fixed}: leave it out, or leave out --suite")
        settings = {**SUITES[suite], **given}
    sources = Sources(essays, squad, hotpotqa, text)
    folder, specs = settings["out"], parse_methods(settings["methods"])
    untuned = tune is None and (trials is not None or tune_text)
    require(not untuned, "--trials and --tune-text say how to tune: they need --tune")
    tuning = None
    if tune is not None:
        tuning = make_tuning(parse_labels(tune), specs, trials=trials or _TRIALS, kv_share=kv_share, seed=seed)
    tokens = _listed(settings["lengths"])
    for length in tokens:
        require(length.isdecimal(), f"--lengths {length}: must be numbers of tokens with commas between, as 4096,8192")
    require_writable(folder, "--out")
    running = ModelOptions(dtype=dtype, weights=weights, kv=kv, attention=attention, mesh=mesh)
    with opened(model, running, rows=batch) as (checkpoint, load):
        found, paper = _profiles(checkpoint, profile)
        plan = make_plan(
            checkpoint,
            specs,
            _listed(settings["tasks"]),
            list(map(int, tokens)),
            _listed(settings["protocols"]),
            samples=settings["samples"],
            seed=seed,
            sources=sources,
            kv_share=kv_share,
            batch=batch,
            tuning=tuning,
        )
        lm = load()
    for each in filter(None, (found, paper)):
        each.validate_for(lm.config, lm.fingerprint, lm.name)
    texts = [(f"--tune-text {path}", read_text(path, "--tune-text")) for path in tune_text or ()]
    most = min(_CALIBRATION_TOKENS, lm.config.max_context)
    encoded = [
        encode_prompt(lm, content[: 16 * most], option)[:most]
        for option, content in texts or [("--text", sources.user_text)]
    ]
    builder = Builder(lm, found, paper, lambda: encoded)
    with progress(counted="samples") as report:
        run_plan(
            plan,
            builder,
            Results(folder),
            lambda job, done, total: report(f"{job.method}: {job.task}, {job.length:,}, {job.protocol}", done, total),
        )
    print((folder / "table.md").read_text(encoding="utf-8"), end="")
    print(f"Results: {folder}", file=sys.stderr)


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _profiles(checkpoint: Checkpoint, profile: str | None) -> tuple[Profile | WorthProfile | None, Any]:
    """The profile, and that of the paper's rule beside it; those of the model by default."""
    folder = checkpoint.folder / "profile" if profile in (None, "shipped") else Path(str(profile))
    if profile is None and not folder.is_dir():
        return None, None
    beside = folder.with_name(f"{folder.name}-paper")
    found = checkpoint.read_profile(str(folder) if profile != "shipped" else "shipped")
    return found, checkpoint.read_profile(str(beside)) if beside.is_dir() else None
