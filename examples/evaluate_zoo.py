"""Calibrates every model of the zoo by the same call, and measures losses and answers.

    python examples/evaluate_zoo.py zoo --jobs 7     # one GPU: zoo/NAME.json of every model, zoo/zoo.json and zoo.md

Calibration sees the first half of the held-out text, losses are of the second half, questions are about documents of
all of it. Nothing is tuned on any model. An interrupted run continues.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several models share a GPU

import jax
import numpy as np
import typer
from recall_data import BOS
from zoo_tasks import MIXTURES, draw_documents

import tca_jax
from tca_jax import TCAConfig
from tca_jax.engine.score import score_answers
from tca_jax.lab.evaluation.recall_tasks import TASKS, sample_of
from tca_jax.lab.recall import PROTOCOLS, Document
from tca_jax.lab.recall.corpus import corpus
from tca_jax.loading import shipped_profile

FOLLOWING = 256  # tokens after a prompt
_BATCH = 80  # questions in a call
_LABELS = {"full": "full attention", "worth": "predicted worth", "paper": "the paper's rule"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of the measurements."""

    lengths: tuple[int, ...] = (8192, 16384)  # tokens of a prompt, and of a calibration text
    calibrated: int = 2**17  # tokens of all calibration texts of a length
    passages: int = 32  # texts with measured losses
    questions: int = 100  # of each task under each protocol

    def config(self, tokens: int) -> TCAConfig:
        return TCAConfig.paper(window=max(256, tokens // 16))

    def texts(self, tokens: int) -> int:
        return max(2, self.calibrated // tokens)


def passages(seed: int, count: int, tokens: int, half: int) -> list[list[int]]:
    """Passages of one half of the held-out text, as token ids."""
    text = np.frombuffer(corpus("held-out"), np.uint8)
    part = text[half * len(text) // 2 : (half + 1) * len(text) // 2]
    starts = np.random.default_rng((seed, half, tokens)).integers(len(part) - tokens, size=count)
    return [[BOS, *part[start : start + tokens - 1].tolist()] for start in starts]


def losses(lm: tca_jax.LM, texts: Sequence[list[int]], window: int) -> dict[str, float]:
    """Loss inside prompts, of the tokens that follow them, and the attended share."""
    first = window + TCAConfig.block_size
    inside, shares, after = [], [], []
    for ids in texts:
        scores = tca_jax.score(lm, [ids[:-FOLLOWING]])
        inside.append(-scores.logprobs[0][first:].mean())
        shares.append(scores.attended_share[0])
        after.append(-score_answers(lm, [ids[:-FOLLOWING]], [[ids[-FOLLOWING:]]]).logprobs[0][0].mean())
    found = {"inside": inside, "following": after, "attended_share": shares}
    return {name: float(np.mean(values)) for name, values in found.items()}


def answers(lm: tca_jax.LM, documents: dict[str, list[Document]]) -> dict[str, Any]:
    """Share of right answers by protocol and task, and the share of full attention's KV bytes."""
    samples = {task: [sample_of(document) for document in each] for task, each in documents.items()}
    found = {
        protocol: {task: TASKS[0].measure(lm, of, protocol, _BATCH, lambda count: None) for task, of in samples.items()}
        for protocol in PROTOCOLS
    }
    right = {protocol: {task: record["score"] / 100 for task, record in of.items()} for protocol, of in found.items()}
    late = list(found["late"].values())
    held, full = (sum(record[name] for record in late) for name in ("kv_cache_bytes", "full_kv_cache_bytes"))
    return {"right": right, "kv_share": held / full}


def evaluate(folder: Path, out: Path, plan: Plan) -> None:
    """Losses and answers of one model, written to `out` one by one."""
    lm, name = tca_jax.load(folder), folder.name
    found = {"model": name, "device": jax.devices()[0].device_kind, "lengths": {}}
    found = json.loads(out.read_text()) if out.exists() else found
    for tokens in plan.lengths:
        record = found["lengths"].setdefault(str(tokens), {})
        config, texts = plan.config(tokens), passages(0, plan.passages, tokens, 1)
        size = min(tokens - 256, lm.config.max_context - 768)  # with room for a question and its answer
        documents = {
            task: draw_documents((11, tokens), plan.questions, size, name, task) for task in sorted(set(MIXTURES[name]))
        }
        calibrated = passages(0, plan.texts(tokens), tokens, 0)
        makers: dict[str, Callable[[], tca_jax.Profile | tca_jax.WorthProfile | None]] = {
            "full": lambda: None,
            "worth": lambda texts=calibrated, n=tokens: tca_jax.calibrate(lm, texts, count=len(texts), tokens=n),
            "paper": lambda texts=calibrated, c=config: tca_jax.calibrate(lm, texts, c),
        }
        for label in [label for label in makers if label not in record]:
            start = time.monotonic()
            with warnings.catch_warnings(action="ignore"):  # facts may not be known
                profile = makers[label]()
            record[label] = {"seconds": time.monotonic() - start}
            under = lm.with_profile(profile)
            record[label] |= losses(under, texts, config.window)
            if profile is not None:
                profile.save(out.parent / f"{name}-{label}-{tokens}")
            record[label] |= answers(under, documents)
            out.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name} {tokens} {label}", flush=True)


def page(models: dict[str, dict[str, Any]]) -> str:
    """Tables of all models."""
    rows: tuple[list[str], ...] = ([], [])
    lengths = ((name, f"{int(n):,}", each) for name in models for n, each in models[name]["lengths"].items())
    for name, tokens, each in lengths:
        for label, one in ((label, each[label]) for label in _LABELS if label in each):
            named, exact = [name, tokens, _LABELS[label]], each["full"]
            over = [_over(one[loss], exact[loss]) for loss in ("inside", "following")]
            rows[0].append(_line([*named, *over, f"{one['attended_share']:.1%}", f"{one['seconds']:.0f}"]))
            right = one["right"]
            means = [f"{np.mean(list(right[protocol].values())):.1%}" for protocol in right]
            least, task = min((right[p][t] - exact["right"][p][t], f"{p} {t}") for p in right for t in right[p])
            worst = "" if label == "full" else f"{100 * least:+.0f} ({task})"
            rows[1].append(_line([*named, f"{one['kv_share']:.1%}", *means, worst]))
    titles = (
        f"Loss inside the prompt, and of the {FOLLOWING} tokens that follow, over full attention's",
        "Right answers, mean over tasks; the worst task's difference from full attention in points",
    )
    heads = (
        "model|tokens|method|inside|following|attended|seconds",
        "model|tokens|method|KV bytes|prefix|preamble|late|worst task",
    )
    lines = []
    for title, names, body in zip(titles, (head.split("|") for head in heads), rows, strict=True):
        lines += ["", f"## {title}", "", _line(names), _line(["---"] * len(names)), *body]
    return "\n".join(lines).strip() + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _over(value: float, full: float) -> str:
    return f"{value / full - 1:+.2%}"


def main(
    zoo: Annotated[Path, typer.Argument(help="Folder of train_recall_model.py --zoo; gets the results.")],
    only: Annotated[list[str] | None, typer.Option(help="Models; all by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Models at the same time.")] = 1,
    tokens: Annotated[list[int] | None, typer.Option(help="Lengths; 8,192 and 16,384 by default.")] = None,
    questions: Annotated[int, typer.Option(help="Of each task under each protocol.")] = Plan.questions,
    smoke: Annotated[bool, typer.Option("--smoke", help="Little of everything: checks that all runs.")] = False,
) -> None:
    """Calibrate and measure every model of the zoo."""
    folders = {name: zoo / name for name in MIXTURES}
    if not folders["recall-tiny"].is_dir():
        folders["recall-tiny"] = shipped_profile("recall-tiny").parent
    names = [name for name in MIXTURES if name in (only or MIXTURES) and folders[name].is_dir()]
    plan = Plan(tuple(tokens or Plan.lengths), questions=questions)
    plan = Plan((2560,), calibrated=2560, passages=1, questions=1) if smoke else plan
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(evaluate, folders[name], zoo / f"{name}.json", plan) for name in names]:
            done.result()
    models = {path.stem: json.loads(path.read_text()) for path in sorted(zoo.glob("*.json")) if path.stem in MIXTURES}
    (zoo / "zoo.json").write_text(json.dumps({"models": models}, indent=1) + "\n")
    (zoo / "zoo.md").write_text(page(models))


if __name__ == "__main__":
    typer.run(main)
