"""The table of a results folder, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tca_jax.files import replacing
from tca_jax.lab.evaluation.results import Results
from tca_jax.lab.recall.protocols import EVALUATION_PROTOCOLS, LATE_PREFIX

Record = Mapping[str, Any]

TABLE = "table.md"
_SUBSTITUTE, _OWN_BUDGET, _NONE = "†", "‡", "-"
_PROTOCOLS = {
    "prefix": "the prompt ends with the answer's first words",
    "preamble": "the prompt ends with the question",
    "late": "the context is prefilled without the question",
    LATE_PREFIX: "the context is prefilled without the question and the answer's first words",
}


def write_table(results: Results, skipped: Sequence[str] = ()) -> None:
    """Writes table.md of a folder."""
    text = table(results.config, results.read_all(), skipped, results.read_tuning())
    with replacing(results.folder / TABLE) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def table(
    config: Mapping[str, Any], records: Sequence[Record], skipped: Sequence[str] = (), tuned: Sequence[Record] = ()
) -> str:
    """A summary, tables by length, protocol and suite, text tasks, tuning, and notes."""
    records, kv_share = _in_order(config, records), config["kv_share"]
    held = "as each method has them" if kv_share is None else f"at most {kv_share:.0%} of full attention's"
    held += " for the prompt alone" if config.get("bytes_of") == "prompt" else ""
    mesh = f", on a mesh of {config['mesh']} devices (data x model)" if "mesh" in config else ""
    settings = f"{config['samples']} samples a task, seed {config['seed']}, {config['dtype']}{mesh}. Bytes: {held}."
    lines = [f"# {config['model']}", "", settings, ""]
    names = {record["tuned"]: f"{record['method']} (tuned)" for record in tuned if record["tuned"] != record["method"]}
    seconds = config.get("seconds", True)
    for length in sorted({record["length"] for record in records}):
        of_length = [record for record in records if record["length"] == length]
        lines += _summary(of_length, names, length)
        for protocol in EVALUATION_PROTOCOLS:
            for suite in _values(of_length, "suite"):
                asked = [r for r in of_length if r["protocol"] == protocol and r["suite"] == suite]
                lines += _question_table(asked, f"{suite}, {length:,} tokens, {protocol}", seconds=seconds)
        lines += _text_table([r for r in of_length if r["suite"] == "text"], length, seconds=seconds)
    return "\n".join([*lines, *_tuning_table(tuned), *_notes(records, skipped)]).rstrip() + "\n"


def _summary(records: Sequence[Record], names: Mapping[str, str], length: int) -> list[str]:
    """A line for each method: mean scores by suite and protocol, losses over full attention's, costs."""
    means: dict[str, dict[str, float]] = {}
    for protocol in EVALUATION_PROTOCOLS:
        for suite in _values(records, "suite"):
            if found := _mean_scores([r for r in records if r["protocol"] == protocol and r["suite"] == suite]):
                means[f"{suite}, {protocol}"] = found
    losses = {r["method"]: r["values"] for r in records if r["suite"] == "text"}
    full = losses.get("full")
    if len(means) + bool(full) < 2:  # another table has it
        return []
    rows = []
    for method in _values(records, "method"):
        row = [f"{of[method]:.1f}" if method in of else _NONE for of in means.values()]
        for kind in ("loss_inside", "loss") if full else ():
            row.append(f"{losses[method][kind] / losses['full'][kind] - 1:+.2%}" if method in losses else _NONE)
        own = [record for record in records if record["method"] == method]
        rows.append([f"`{names.get(method, method)}`", *row, _held_share(own), _mean_share(own, "attended_share")])
    heads = ["method", *means, *(["loss inside", "loss behind"] if full else []), "KV bytes", "attended"]
    explained = "Mean scores in percent of the tasks that all have"
    explained += ", and losses over full attention's." if full else "."
    return [f"## All, {length:,} tokens", "", explained, "", *_markdown(heads, rows)]


def _mean_scores(records: Sequence[Record]) -> dict[str, float]:
    """Mean score of each method over the tasks that all methods have; empty without such tasks."""
    methods: dict[str, dict[str, float]] = {}
    for record in records:
        methods.setdefault(record["method"], {})[record["task"]] = record["score"]
    common = set.intersection(*map(set, methods.values())) if methods else set()
    return {method: float(np.mean([tasks[task] for task in common])) for method, tasks in methods.items() if common}


def _question_table(records: Sequence[Record], title: str, *, seconds: bool) -> list[str]:
    """Scores by task, and costs: shares of bytes, tokens and pairs, seconds to the first token and of a step."""
    if not records:
        return []
    tasks, means = _values(records, "task"), _mean_scores(records)
    rows = []
    for method in _values(records, "method"):
        own = {record["task"]: record for record in records if record["method"] == method}
        mean = f"{means[method]:.1f}" if means else _NONE
        costs = [_held_share(list(own.values()))]
        costs += [_mean_share(list(own.values()), name) for name in ("kept_share", "attended_share")]
        for name, scale in (("prefill_seconds", 1), ("question_seconds", 1), ("seconds_per_token", 1000)):
            costs += [f"{scale * np.mean([record[name] for record in own.values()]):.3g}"] if seconds else []
        batch = str(max(record["batch"] for record in own.values()))
        label = method + (_OWN_BUDGET if any(record["own_budget"] for record in own.values()) else "")
        rows.append([label, *(_score(own.get(task)) for task in tasks), mean, *costs, batch])
    times = ["prefill (s)", "from the question (s)", "ms per token"] if seconds else []
    common = {task for task in tasks if all((m, task) in {(r["method"], r["task"]) for r in records} for m in means)}
    heads = ["method", *(_marked(task, records) for task in tasks), f"mean of {len(common)}"]
    heads += ["KV bytes", "kept", "attended", *times, "batch"]
    explained = _PROTOCOLS[records[0]["protocol"]]
    return [f"## {title}", "", f"Scores in percent; {explained}.", "", *_markdown(heads, rows)]


def _text_table(records: Sequence[Record], length: int, *, seconds: bool) -> list[str]:
    """Losses of a text, and costs."""
    rows = [
        [
            record["method"],
            *(f"{record['values'][name]:.4f}" for name in ("loss", "loss_inside")),
            _mean_share([record], "attended_share"),
            _held_share([record]),
            _mean_share([record], "kept_share"),
            *([f"{record['prefill_seconds']:.3g}"] if seconds else []),
        ]
        for record in records
    ]
    heads = ["method", "loss behind the text (nats/token)", "loss inside it (nats/token)"]
    heads += ["attended", "KV bytes", "kept", *(["prefill (s)"] if seconds else [])]
    return [f"## {_marked('loss', records)}, {length:,} tokens", "", *_markdown(heads, rows)] if rows else []


def _tuning_table(tuned: Sequence[Record]) -> list[str]:
    """Defaults and best trial of each tuned method; TCA first, with the seconds of its calibration."""
    if not tuned:
        return []
    rows = []
    for record in sorted(tuned, key=lambda record: record["method"] != "tca"):
        trials = record["trials"]
        best = next(trial for trial in trials if trial["spec"] == record["tuned"])
        both = [("as calibrated", best)] if record["method"] == "tca" else [("defaults", trials[0]), ("tuned", best)]
        for kind, trial in both:
            count, seconds = ("", "") if kind == "defaults" else (str(len(trials)), f"{record['seconds']:.0f}")
            inside, behind = (f"{trial[name]:.4f}" for name in ("loss_inside", "loss_following"))
            # Plus zero has no sign: without lost answers the share is -0.0.
            lost, *shares = (f"{trial[name] + 0.0:.1%}" for name in ("answers_lost", "held_share", "attended_share"))
            label = f"{trial['spec']} ({kind})"
            rows.append([label, f"{trial['excess']:.2f}", inside, lost, behind, *shares, count, seconds])
    heads = ["method", "excess", "loss inside", "answers lost", "loss behind", "KV bytes", "attended", "trials", "s"]
    devices = " and ".join(sorted({record["device"] for record in tuned}))
    explained = (
        "On the calibration texts and probes of TCA. Excess: the largest of three losses over full attention's, in "
        "units of calibration's tolerances. Prefill methods attend to at most TCA's share. Seconds are those of "
        f"calibration and of all trials, with compilation, on {devices}; bytes are those of a context without answers."
    )
    return ["## Tuning", "", explained, "", *_markdown(heads, rows)]


def _notes(records: Sequence[Record], skipped: Sequence[str]) -> list[str]:
    """Explanations of marks, and the tasks that are left out."""
    substitutes = sorted({f"{name}: {label}" for r in records for name, label in r["substitutes"].items()})
    lengths: dict[tuple[str, str], set[int]] = {}
    for record in records:
        if record["own_budget"]:
            lengths.setdefault((record["method"], record["budget"]), set()).add(record["length"])
    own = [
        f"{method}, {' and '.join(f'{length:,}' for length in sorted(of_method))} tokens: {budget}"
        for (method, budget), of_method in lengths.items()
    ]
    origin = f"{_SUBSTITUTE} Not made from what the task's authors use, so not to be compared with published figures:"
    noted = ((origin, substitutes), (f"{_OWN_BUDGET} Not at the bytes of the others:", own), ("Left out:", skipped))
    return [line for title, items in noted if items for line in (title, "", *(f"- {item}" for item in items), "")]


def _in_order(config: Mapping[str, Any], records: Sequence[Record]) -> list[Record]:
    """Full attention's first, then the methods as they were named, each with its tasks as they were run."""
    places = {label: place for place, label in enumerate(config.get("methods", ()))}
    return sorted(
        records, key=lambda r: (r["method"] != "full", places.get(r["method"], len(places)), r.get("finished", ""))
    )


def _values(records: Sequence[Record], name: str) -> list[str]:
    """Different values, in the order of the records."""
    return list(dict.fromkeys(record[name] for record in records))


def _held_share(records: Sequence[Record]) -> str:
    """Mean share of full attention's cache bytes."""
    return f"{np.mean([record['kv_cache_bytes'] / record['full_kv_cache_bytes'] for record in records]):.1%}"


def _mean_share(records: Sequence[Record], name: str) -> str:
    """A mean share; unknown for older results."""
    shares = [record[name] for record in records if name in record]
    return f"{np.mean(shares):.1%}" if len(shares) == len(records) else _NONE


def _marked(task: str, records: Sequence[Record]) -> str:
    return task + (f" {_SUBSTITUTE}" if any(r["substitutes"] for r in records if r["task"] == task) else "")


def _score(record: Record | None) -> str:
    if record is None:
        return _NONE
    groups = "/".join(f"{score:.1f}" for score in record["groups"].values())
    return f"{record['score']:.1f}" + (f" ({groups})" if len(record["groups"]) > 1 else "")


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, and an empty one."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]
