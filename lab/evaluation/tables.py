"""The table of a results folder, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tca_jax.files import replacing
from tca_jax.lab.evaluation.conclusions import common_tasks, conclusions, held_share
from tca_jax.lab.evaluation.results import Results
from tca_jax.lab.recall.protocols import EVALUATION_PROTOCOLS, LATE_PREFIX

Record = Mapping[str, Any]

TABLE = "table.md"
_SUBSTITUTE = "†"
_OWN_BUDGET = "‡"
_NONE = "-"
_TASKS_IN_A_TABLE = 8
_EXPLAINED = {
    "prefix": "the prompt ends with the answer's first words",
    "preamble": "the prompt ends with the question",
    "late": "the question is asked of a context that was read without it",
    LATE_PREFIX: "the question and the answer's first words are given to a context that was read without them",
}
#: Of text tasks: the value, and what its column is called.
_TEXT_COLUMNS = {
    "loss": (("loss", "loss behind the text (nats/token)"), ("loss_inside", "loss inside it (nats/token)")),
    "agreement": (("top_1", "same next token"), ("kl", "KL (nats)")),
}


def write_table(results: Results, skipped: Sequence[str] = ()) -> None:
    """Writes table.md of all that the folder holds."""
    text = table(results.config, results.read_all(), skipped, results.read_tuning())
    with replacing(results.folder / TABLE) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def table(
    config: Mapping[str, Any],
    records: Sequence[Record],
    skipped: Sequence[str] = (),
    tuned: Sequence[Record] = (),
) -> str:
    """All results: a summary, conclusions, tables by length, protocol and suite, text tasks, what was tuned, notes."""
    records, kv_share = _in_order(config, records), config["kv_share"]
    held = "as each method has them" if kv_share is None else f"at most {kv_share:.0%} of full attention's"
    held += " for the prompt alone" if config.get("bytes_of") == "prompt" else ""
    lines = [
        f"# {config['model']}",
        "",
        f"{config['samples']} samples a task, seed {config['seed']}, {config['dtype']}{_devices(config)}. "
        f"Bytes: {held}.",
        "",
    ]
    names = tuned_names(tuned)
    lengths = sorted({record["length"] for record in records})
    for length in lengths:
        lines += _summary([record for record in records if record["length"] == length], names, length)
    if drawn := conclusions(records, names):
        lines += ["## What the figures say", "", *(f"- {text}" for text in drawn), ""]
    seconds = config.get("seconds", True)
    for length in lengths:
        of_length = [record for record in records if record["length"] == length]
        for protocol in EVALUATION_PROTOCOLS:
            for suite in dict.fromkeys(record["suite"] for record in of_length):
                asked = [r for r in of_length if r["protocol"] == protocol and r["suite"] == suite]
                title = f"{suite}, {length:,} tokens, {protocol}"
                lines += _question_tables(asked, title, _EXPLAINED[protocol], seconds=seconds)
        lines += _text_tables([r for r in of_length if r["suite"] == "text"], length, seconds=seconds)
    return "\n".join([*lines, *_tuning_table(tuned), *notes(records, skipped)]).rstrip() + "\n"


def tuned_names(tuned: Sequence[Record]) -> dict[str, str]:
    """What tables and pictures call methods with tuned options."""
    return {record["tuned"]: f"{record['method']} (tuned)" for record in tuned if record["tuned"] != record["method"]}


def _devices(config: Mapping[str, Any]) -> str:
    """What to say of the devices that shared the model."""
    return f", on a mesh of {config['mesh']} devices (data x model)" if "mesh" in config else ""


def _summary(records: Sequence[Record], names: Mapping[str, str], length: int) -> list[str]:
    """A line for each method: mean scores by suite and protocol, losses over full attention's, costs."""
    means: dict[str, dict[str, float]] = {}
    for protocol in EVALUATION_PROTOCOLS:
        for suite in _ordered(records, "suite"):
            some = common_tasks([r for r in records if r["protocol"] == protocol and r["suite"] == suite])
            if some:
                means[f"{suite}, {protocol}"] = {
                    method: float(np.mean([record["score"] for record in of_method]))
                    for method, of_method in some.items()
                }
    losses = {r["method"]: r["values"] for r in records if r["suite"] == "text" and r["task"] == "loss"}
    full = losses.get("full")
    if len(means) + bool(full) < 2:  # another table has it
        return []
    heads = [*means, *(["loss inside", "loss behind"] if full else []), "KV bytes", "attended"]
    rows = []
    for method in _ordered(records, "method"):
        scores = [f"{of[method]:.1f}" if method in of else _NONE for of in means.values()]
        rises = []
        if full is not None:
            kinds = "loss_inside", "loss"
            own_losses = losses.get(method)
            rises = [_NONE if own_losses is None else f"{own_losses[kind] / full[kind] - 1:+.2%}" for kind in kinds]
        own = [record for record in records if record["method"] == method]
        shares = [f"{held_share(own):.1%}", _mean_share(own, "attended_share")]
        rows.append([f"`{names.get(method, method)}`", *scores, *rises, *shares])
    explained = "Mean scores in percent of the tasks that all have"
    explained += ", and losses over full attention's." if full else "."
    return [f"## All, {length:,} tokens", "", explained, "", *markdown(["method", *heads], rows)]


def _question_tables(records: Sequence[Record], title: str, explained: str, *, seconds: bool) -> list[str]:
    if not records:
        return []
    methods, tasks = _ordered(records, "method"), _ordered(records, "task")
    found = {(r["method"], r["task"]): r for r in records}
    lines = [f"## {title}", "", f"Scores in percent; {explained}.", ""]
    for first in range(0, len(tasks), _TASKS_IN_A_TABLE):
        some = tasks[first : first + _TASKS_IN_A_TABLE]
        heads = [_marked(task, records) for task in some]
        rows = [[method, *(_score(found.get((method, task))) for task in some)] for method in methods]
        lines += markdown(["method", *heads], rows)
    everywhere = common_tasks(records)
    compared = f"mean of {len(everywhere.get(methods[0], ()))}"
    rows = []
    for method in methods:
        own = [r for r in records if r["method"] == method]
        mean = [record["score"] for record in everywhere.get(method, ())]
        name = method + (_OWN_BUDGET if any(r["own_budget"] for r in own) else "")
        rows.append([name, f"{np.mean(mean):.1f}" if mean else _NONE, *_costs(own, seconds=seconds)])
    times = ["prefill (s)", "from the question (s)", "ms per token", "batch"] if seconds else ["batch"]
    return [*lines, *markdown(["method", compared, "KV bytes", "kept", "attended", *times], rows)]


def _costs(records: Sequence[Record], *, seconds: bool) -> list[str]:
    """Shares of bytes, of the prompt's tokens and of pairs; seconds to the first token of a prompt, from the question
    alone, and of a further step; the batch."""
    names = ("prefill_seconds", "question_seconds", "seconds_per_token")
    prefill, question, step = (np.mean([record[name] for record in records]) for name in names)
    batch = max(record["batch"] for record in records)
    shares = [f"{held_share(records):.1%}", _mean_share(records, "kept_share"), _mean_share(records, "attended_share")]
    times = [f"{prefill:.3g}", f"{question:.3g}", f"{1000 * step:.3g}"] if seconds else []
    return [*shares, *times, str(batch)]


def _mean_share(records: Sequence[Record], name: str) -> str:
    """A share, mean of some results; of older ones it may not be known."""
    shares = [record[name] for record in records if name in record]
    return f"{np.mean(shares):.1%}" if len(shares) == len(records) else _NONE


def _text_tables(records: Sequence[Record], length: int, *, seconds: bool) -> list[str]:
    lines = []
    for task, columns in _TEXT_COLUMNS.items():
        of_task = [record for record in records if record["task"] == task]
        if of_task:
            lines += [f"## {_marked(task, of_task)}, {length:,} tokens", ""]
            rows = [
                [
                    record["method"],
                    *(
                        f"{record['values'][name]:.1%}" if name == "top_1" else f"{record['values'][name]:.4f}"
                        for name, _ in columns
                    ),
                    _mean_share([record], "attended_share"),
                    f"{held_share([record]):.1%}",
                    _mean_share([record], "kept_share"),
                    *([f"{record['prefill_seconds']:.3g}"] if seconds else []),
                ]
                for record in of_task
            ]
            heads = ["method", *(text for _, text in columns), "attended", "KV bytes", "kept"]
            heads += ["prefill (s)"] if seconds else []
            lines += markdown(heads, rows)
    return lines


def _tuning_table(tuned: Sequence[Record]) -> list[str]:
    """Of each tuned method its defaults and the best trial; TCA first, with the seconds of its calibration."""
    if not tuned:
        return []
    rows = []
    for record in sorted(tuned, key=lambda record: record["method"] != "tca"):
        trials = record["trials"]
        best = next(trial for trial in trials if trial["spec"] == record["tuned"])
        both = [("as calibrated", best)] if record["method"] == "tca" else [("defaults", trials[0]), ("tuned", best)]
        for kind, trial in both:
            count, seconds = ("", "") if kind == "defaults" else (str(len(trials)), f"{record['seconds']:.0f}")
            losses = [f"{trial[name]:.4f}" for name in ("loss_inside", "loss_following")]
            # Plus zero, which has no sign behind: none lost is -0.0.
            shares = [f"{trial[name] + 0.0:.1%}" for name in ("answers_lost", "held_share", "attended_share")]
            name = f"{trial['spec']} ({kind})"
            rows.append([name, f"{trial['excess']:.2f}", losses[0], shares[0], losses[1], *shares[1:], count, seconds])
    heads = ["method", "excess", "loss inside", "answers lost", "loss behind", "KV bytes", "attended", "trials", "s"]
    devices = " and ".join(sorted({record["device"] for record in tuned}))
    explained = (
        "On the calibration texts and probes of TCA. Excess: the largest of three losses over full attention's, in "
        "units of calibration's tolerances. Prefill methods attend to at most TCA's share. Seconds are those of "
        f"calibration and of all trials, with compilation, on {devices}; bytes are those of a context without answers."
    )
    return ["## Tuning", "", explained, "", *markdown(heads, rows)]


def notes(records: Sequence[Record], skipped: Sequence[str]) -> list[str]:
    """What marks mean, and what is not there."""
    substitutes = sorted({f"{name}: {label}" for r in records for name, label in r["substitutes"].items()})
    lengths: dict[tuple[str, str], set[int]] = {}
    for record in records:
        if record["own_budget"]:
            lengths.setdefault((record["method"], record["budget"]), set()).add(record["length"])
    own = [
        f"{method}, {' and '.join(f'{length:,}' for length in sorted(of_method))} tokens: {budget}"
        for (method, budget), of_method in lengths.items()
    ]
    lines = []
    if substitutes:
        lines += [
            f"{_SUBSTITUTE} Not made from what the task's authors use, so not to be compared with published figures:"
        ]
        lines += ["", *(f"- {text}" for text in substitutes), ""]
    if own:
        lines += [f"{_OWN_BUDGET} Not at the bytes of the others:", "", *(f"- {text}" for text in own), ""]
    if skipped:
        lines += ["Left out:", "", *(f"- {text}" for text in skipped), ""]
    return lines


def _in_order(config: Mapping[str, Any], records: Sequence[Record]) -> list[Record]:
    """Full attention's first, then the methods as they were asked for, each with its tasks as they were run."""
    places = {label: place for place, label in enumerate(config.get("methods", ()))}
    return sorted(
        records, key=lambda r: (r["method"] != "full", places.get(r["method"], len(places)), r.get("finished", ""))
    )


def _ordered(records: Sequence[Record], name: str) -> list[str]:
    """Different values, in the order of the records."""
    return list(dict.fromkeys(record[name] for record in records))


def _marked(task: str, records: Sequence[Record]) -> str:
    return task + (f" {_SUBSTITUTE}" if any(r["substitutes"] for r in records if r["task"] == task) else "")


def _score(record: Record | None) -> str:
    if record is None:
        return _NONE
    groups = "/".join(f"{score:.1f}" for score in record["groups"].values())
    return f"{record['score']:.1f}" + (f" ({groups})" if len(record["groups"]) > 1 else "")


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, and an empty one."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]
