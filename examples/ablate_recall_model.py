"""Ablations of TCA on recall-tiny: one hyperparameter, text or preset at a time, calibrated anew and asked the same.

python examples/ablate_recall_model.py recall-tiny --out out/ablations.json   # one GPU; --jobs 12: side by side
python examples/ablate_recall_model.py recall-tiny --smoke                    # any machine: runs every step
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from evaluate_recall_model import (
    SMOKE,
    Plan,
    ask_tasks,
    calibrate,
    calibration_documents,
    draw_tasks,
    ranked_share,
    right_shares,
    run_jobs,
)

import tca_jax
from tca_jax import TCAConfig
from tca_jax.calibration.profile import Profile
from tca_jax.files import replacing
from tca_jax.recall import PROTOCOLS

PLAN = Plan(questions=20, texts=16)

#: Values of the fields of `TCAConfig`, one varied at a time; None stands for the plan's own.
VALUES: dict[str, tuple[Any, ...]] = {
    "tau": (0.7, 0.8, None, 0.9, 0.95),
    "tau_probe": (0.0, None, 0.8),
    "alpha": (0.0, None, 0.5, 1.0),
    "window": (256, None, 1024, 2048),
    "block_size": (32, 64, None),
    "reserve": (0, None, 256),
    "density": (None, "paper", "random"),
    "index": (None, "entropy"),
    "criterion": (None, "column_mean"),
}
#: Presets are whole configurations, with the window of the others; "paper()" at several thresholds.
PRESETS = ("default", "paper(), tau 0.8", "paper()", "paper(), tau 0.95")
#: What the default configuration is calibrated on.
TEXTS = ("the documents, pairs", "the documents, copies", "plain source, copies", "random bytes, copies")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One line of the table.

    Attributes:
        group: What is varied.
        name: The line's name.
        config: Hyperparameters.
        text: What it is calibrated on, one of `TEXTS`.
    """

    group: str
    name: str
    config: TCAConfig
    text: str = TEXTS[0]


def variants(plan: Plan) -> list[Variant]:
    """All lines of the table, in its order."""
    base = plan.config
    found = [Variant(field, *_with(base, field, value)) for field, values in VALUES.items() for value in values]
    found += [Variant("preset", name, _preset(name, plan)) for name in PRESETS]
    return found + [Variant("calibration text", text, base, text) for text in TEXTS]


def _with(base: TCAConfig, field: str, value: Any) -> tuple[str, TCAConfig]:
    """Name and configuration of a line with one value changed."""
    if value is not None:
        return str(value), dataclasses.replace(base, **{field: value})
    own = base.reserve_tokens if field == "reserve" else getattr(base, field)
    return f"{own} (shipped)", base


def _preset(name: str, plan: Plan) -> TCAConfig:
    if name == "default":
        return TCAConfig(window=plan.window)
    tau = float(name.partition("tau ")[2] or TCAConfig.paper().tau)
    return TCAConfig.paper(window=plan.window, tau=tau)


def measure(folder: Path, plan: Plan, variant: Variant) -> dict[str, Any]:
    """Right answers, bytes and prefill share of one line, on a profile of its own."""
    profile = _profile(folder, plan, variant)
    lm = tca_jax.load(folder, profile=profile)
    documents = draw_tasks(plan)
    answers = {protocol: ask_tasks(lm, documents, protocol) for protocol in PROTOCOLS}
    right = {protocol: right_shares(of_tasks) for protocol, of_tasks in answers.items()}
    shares = [asked.kv_cache_share for of_tasks in answers.values() for asked in of_tasks.values()]
    result = {
        "group": variant.group,
        "name": variant.name,
        "text": variant.text,
        "prefill_share": ranked_share(profile, plan.tokens),
        "kv_cache_share": float(np.mean(shares)),
        "dense_heads": int((profile.candidates == profile.config.num_candidates).sum()),
        "right": right,
    }
    means = {protocol: f"{np.mean(list(of_task.values())):.1%}" for protocol, of_task in right.items()}
    print(f"{variant.group:>16} {variant.name:>24} {result['kv_cache_share']:.1%} {means}", flush=True)
    return result


def _profile(folder: Path, plan: Plan, variant: Variant) -> Profile:
    if variant.text == TEXTS[0]:
        return calibrate(folder, plan, variant.config)
    lm, rng = tca_jax.load(folder), np.random.default_rng(plan.seed)
    documents = calibration_documents(plan, 0)
    texts: list[Any] = {
        "the documents, copies": [document.text for document in documents],
        "plain source, copies": [_plain(document, plan) for document in documents],
        "random bytes, copies": [bytes(rng.integers(32, 127, plan.tokens, np.uint8)).decode() for _ in documents],
    }[variant.text]
    return tca_jax.calibrate(lm, texts, variant.config, probes="copy")


def _plain(document: Any, plan: Plan) -> str:
    """The document without its facts: the source that they were put into."""
    text = document.text
    for question in document.questions:
        for fact in question.facts:
            text = text.replace(fact.line, "")
    return text[: plan.tokens]


def table(results: list[dict[str, Any]]) -> str:
    """All lines in Markdown, a table for each thing that is varied."""
    lines: list[str] = []
    heads = [*(f"{protocol}: {what}" for protocol in PROTOCOLS for what in ("mean", "worst task"))]
    for group in dict.fromkeys(result["group"] for result in results):
        lines += [f"### {group.capitalize()}", "", f"| {group} | {' | '.join(heads)} | KV bytes | prefill |"]
        lines.append("|".join(["", "---", *["---:"] * (len(heads) + 2), ""]))
        for result in (each for each in results if each["group"] == group):
            shares = [list(result["right"][protocol].values()) for protocol in PROTOCOLS]
            cells = [f"{value:.1%}" for share in shares for value in (float(np.mean(share)), min(share))]
            cells += [f"{result['kv_cache_share']:.1%}", f"{result['prefill_share']:.1%}"]
            lines.append(f"| {result['name']} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(help="The trained model.")],
    out: Annotated[Path, typer.Option(help="File of the results; the table lies beside it.")] = Path(
        "out/ablations.json"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that they share.")] = 1,
    smoke: Annotated[bool, typer.Option("--smoke", help="One question each on short text, a few lines.")] = False,
) -> None:
    """Calibrate recall-tiny with one thing changed at a time and ask it the questions of its card."""
    plan = SMOKE if smoke else PLAN
    lines = variants(plan)
    if smoke:
        lines = [next(line for line in lines if line.group == group) for group in ("tau", "preset")] + lines[-1:]
    # The same configuration stands in several tables: it is measured once.
    distinct = list(dict.fromkeys((line.config, line.text) for line in lines))
    first = [next(line for line in lines if (line.config, line.text) == key) for key in distinct]
    measured = dict(zip(distinct, run_jobs([(measure, folder, plan, line) for line in first], jobs, gpus), strict=True))
    results = [
        {**measured[line.config, line.text], "group": line.group, "name": line.name, "text": line.text}
        for line in lines
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as unfinished:
        unfinished.write_text(json.dumps({"plan": dataclasses.asdict(plan), "results": results}, indent=1) + "\n")
    with replacing(out.with_suffix(".md")) as unfinished:
        unfinished.write_text(table(results))


if __name__ == "__main__":
    app()
