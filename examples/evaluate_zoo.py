"""Calibrates every model of the zoo by the same calls, and measures losses and answers.

    python examples/evaluate_zoo.py zoo --jobs 7     # one GPU: zoo/NAME.json of every model, zoo/zoo.json and zoo.md

Nothing is tuned on any model. An interrupted run continues from the files of the models.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Sequence
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
from tca_jax.files import replacing
from tca_jax.lab.benchmarks.common import markdown
from tca_jax.lab.evaluation.recall_tasks import TASKS, sample_of
from tca_jax.lab.recall import PROTOCOLS, Document
from tca_jax.lab.recall.corpus import corpus
from tca_jax.loading import shipped_profile

FOLLOWING = 256  # tokens after a prompt
_BATCH = 80  # questions in a call
_LABELS = {"full": "full attention", "worth": "predicted worth", "paper": "the paper's rule"}
_TABLES = {
    "Losses": "selected|inside|following|attended|calibration",
    "Right answers, mean over tasks; the worst task's difference from full attention in points": (
        "kept|KV bytes|prefix|preamble|late|worst task"
    ),
}
_PAGE = """# The zoo

`python examples/evaluate_zoo.py zoo` writes this page and `zoo.json` on {device}. The models are small ones of
`examples/train_recall_model.py` ([recipe](../../docs/development.md#the-zoo)); nothing is tuned on them.

- Predicted worth: `tca_jax.calibrate(lm, texts, tokens=N)` on {texts} texts of N tokens. Calibration chooses `kept`,
  the share of tokens that stay in the cache, and `selected`, the share that prompts read singly.
- The paper's rule: `TCAConfig.paper(window=W)` on the same texts, W = N / 16.
- Calibration reads the first half of the held-out text. Losses are of {passages} passages of the second half.
  {questions} questions of each task under each protocol are about documents of the complete text.
- "inside" is the loss of a prompt's tokens from W + 128 on, "following" that of the {following} tokens after the
  prompt: nats under full attention, then the increase over it. "attended" is the share of causal pairs that prefill
  computes.
- "calibration" is in seconds, with compilation, beside other models on the same GPU.
"""


def passages(count: int, tokens: int, half: int) -> list[list[int]]:
    """Passages of one half of the held-out text, as token ids."""
    text = np.frombuffer(corpus("held-out"), np.uint8)
    part = text[half * len(text) // 2 : (half + 1) * len(text) // 2]
    starts = np.random.default_rng((0, half, tokens)).integers(len(part) - tokens, size=count)
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
    samples = [sample_of(document) for each in documents.values() for document in each]
    batch = math.ceil(len(samples) / math.ceil(len(samples) / _BATCH))
    right = {}
    for protocol in PROTOCOLS:
        found = TASKS[0].measure(lm, samples, protocol, batch, lambda count: None)
        scores = np.reshape([each["score"] for each in found["samples"]], (len(documents), -1)).mean(axis=1)
        right[protocol] = dict(zip(documents, scores.tolist(), strict=True))
    return {"right": right, "kv_share": found["kv_cache_bytes"] / found["full_kv_cache_bytes"]}  # of late questions


def evaluate(folder: Path, out: Path, lengths: Sequence[int], sizes: dict[str, int]) -> None:
    """Losses and answers of one model, written to `out` method by method."""
    lm, name = tca_jax.load(folder), folder.name
    found = {"model": name, "device": jax.devices()[0].device_kind, **sizes, "lengths": {}}
    found = json.loads(out.read_text()) if out.exists() else found
    if found | sizes != found:
        raise SystemExit(f"{out} was not measured with {sizes}: take the same options, or remove it")
    for tokens in lengths:
        record = found["lengths"].setdefault(str(tokens), {})
        config, texts = TCAConfig.paper(window=max(256, tokens // 16)), passages(sizes["passages"], tokens, 1)
        size = min(tokens - 256, lm.config.max_context - 768)  # with room for a question and its answer
        documents = {
            task: draw_documents((11, tokens), sizes["questions"], size, name, task)
            for task in sorted(set(MIXTURES[name]))
        }
        for label in [label for label in _LABELS if label not in record]:
            start, read = time.monotonic(), passages(sizes["texts"], tokens, 0)
            with warnings.catch_warnings(record=True, action="always") as caught:  # such as: no fact is known
                if label == "worth":
                    profile = tca_jax.calibrate(lm, read, count=len(read), tokens=tokens)
                else:
                    profile = tca_jax.calibrate(lm, read, config) if label == "paper" else None
            row = {"seconds": time.monotonic() - start}
            if profile is not None:
                profile.save(out.parent / f"{name}-{label}-{tokens}")
                row |= {share: getattr(profile, share) for share in ("kept", "selected") if hasattr(profile, share)}
                row["warnings"] = [str(each.message) for each in caught if each.category is UserWarning]
            under = lm.with_profile(profile)
            record[label] = row | losses(under, texts, config.window) | answers(under, documents)
            with replacing(out) as file:
                file.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name} {tokens} {label}", flush=True)


def page(models: dict[str, dict[str, Any]]) -> str:
    """The page of all models."""
    rows: tuple[list[list[str]], ...] = ([], [])
    lengths = ((name, f"{int(n):,}", each) for name in models for n, each in models[name]["lengths"].items())
    for name, tokens, each in lengths:
        for label, one in ((label, each[label]) for label in _LABELS if label in each):
            named, exact, is_full = [name, tokens, _LABELS[label]], each["full"], label == "full"
            selected, kept = (f"{one[share]:.0%}" if share in one else "" for share in ("selected", "kept"))
            found = [(one[loss], one[loss] / exact[loss] - 1) for loss in ("inside", "following")]
            nats = [f"{loss:.4f}" if is_full else f"{increase:+.2%}" for loss, increase in found]
            seconds = "" if is_full else f"{one['seconds']:.0f}"
            rows[0].append([*named, selected, *nats, f"{one['attended_share']:.1%}", seconds])
            right = one["right"]
            means = [f"{np.mean(list(right[protocol].values())):.1%}" for protocol in right]
            least, task = min((right[p][t] - exact["right"][p][t], f"{p} {t}") for p in right for t in right[p])
            worst = "" if is_full else f"{100 * least:+.0f} ({task})"
            rows[1].append([*named, kept, f"{one['kv_share']:.1%}", *means, worst])
    lines = _PAGE.format(following=FOLLOWING, **next(iter(models.values()))).splitlines()
    for (title, columns), body in zip(_TABLES.items(), rows, strict=True):
        names = f"model|tokens|method|{columns}".split("|")
        lines += ["", f"## {title}", "", markdown(names, body)] if body else []
    return "\n".join(lines) + "\n"


def main(
    zoo: Annotated[Path, typer.Argument(help="Folder of train_recall_model.py --zoo; gets the results.")],
    only: Annotated[list[str] | None, typer.Option(help="A model; may be repeated. All by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Models at the same time.")] = 1,
    tokens: Annotated[list[int] | None, typer.Option(help="A length; may be repeated. 8192, 16384 by default.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Of each task under each protocol.")] = 100,
    passages: Annotated[int, typer.Option(min=1, help="Texts whose losses are measured.")] = 32,
    smoke: Annotated[bool, typer.Option("--smoke", help="Little of everything: checks that all runs.")] = False,
) -> None:
    """Calibrate and measure every model of the zoo."""
    if unknown := sorted({*(only or ())} - {*MIXTURES}):
        raise SystemExit(f"--only {', '.join(unknown)}: must be one of {', '.join(MIXTURES)}")
    folders = {name: zoo / name for name in MIXTURES}
    if not folders["recall-tiny"].is_dir():
        folders["recall-tiny"] = shipped_profile("recall-tiny").parent
    names = [name for name in MIXTURES if name in (only or MIXTURES) and folders[name].is_dir()]
    lengths, counts = ([2560], (2, 1, 1)) if smoke else (tokens or [8192, 16384], (8, passages, questions))
    sizes = dict(zip(("texts", "passages", "questions"), counts, strict=True))
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(evaluate, folders[name], zoo / f"{name}.json", lengths, sizes) for name in names]:
            done.result()
    models = {path.stem: json.loads(path.read_text()) for path in sorted(zoo.glob("*.json")) if path.stem in MIXTURES}
    (zoo / "zoo.json").write_text(json.dumps({"models": models}, indent=1) + "\n")
    (zoo / "zoo.md").write_text(page(models))


if __name__ == "__main__":
    typer.run(main)
