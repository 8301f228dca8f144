"""A folder of results: its configuration, a file for each finished job, and the table, in Markdown."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tca_jax.errors import require
from tca_jax.files import replacing
from tca_jax.lab.benchmarks.common import markdown
from tca_jax.lab.recall.tasks import EVALUATION_PROTOCOLS, LATE_PREFIX
from tca_jax.models.json_object import read_json_object

Record = Mapping[str, Any]

_SUBSTITUTE, _OWN_BUDGET, _NONE = "†", "‡", "-"
_PROTOCOLS = {
    "prefix": "the prompt ends with the answer's first words",
    "preamble": "the prompt ends with the question",
    "late": "the context is prefilled without the question",
    LATE_PREFIX: "the context is prefilled without the question and the answer's first words",
}
_TUNING = (
    "On calibration texts, in nats per token. Excess: losses over full attention's, inside the texts and behind them, "
    "where ends and repeated passages follow the cache. A tuned method attends to at most its given options' share. "
    "Seconds are those of all trials, with compilation, on {}; bytes are those of a context without answers."
)
_ORIGIN = f"{_SUBSTITUTE} Not made from what the task's authors use, so not to be compared with published figures:"

FORMAT = 3
CONFIG = "config.json"
TASKS = "results"
TUNING = "tuning"
#: Entries of the configuration that a second run may extend; all others must be equal.
_GROWING = ("methods", "sources")


class Job(NamedTuple):
    """An entry of a results folder."""

    method: str
    task: str
    length: int
    protocol: str


@dataclasses.dataclass(frozen=True)
class Results:
    """A results folder."""

    folder: Path

    def open(self, config: Mapping[str, Any]) -> None:
        """Creates the folder, or continues one of the same configuration; methods and sources may be added."""
        path = self.folder / CONFIG
        if not path.exists():
            occupied = self.folder.is_dir() and _finished(self.folder.iterdir())
            require(not occupied, f"--out {self.folder} holds files but no {CONFIG}: must be new, or of an evaluation")
            write_json(path, config)
            return
        held = self.config
        pairs = [(name, held.get(name), config.get(name)) for name in {**config, **held} if name not in _GROWING]
        sources = {**config["sources"], **held["sources"]}
        pairs += [(f"source {name}", sources[name], here) for name, here in config["sources"].items()]
        for name, there, here in pairs:
            made = f"--out {self.folder} was made with {name} = {json.dumps(there)}, this run has {json.dumps(here)}"
            require(there == here, f"{made}: use another folder, or the same settings")
        merged = {**config, "methods": list(dict.fromkeys([*held["methods"], *config["methods"]])), "sources": sources}
        if merged != held:
            write_json(path, merged)

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of the folder."""
        return read_json_object(self.folder / CONFIG)

    def path(self, job: Job) -> Path:
        """The file of a job."""
        name = re.sub(r"[^\w+.=,-]", "_", job.method)
        return self.folder / TASKS / name / f"{job.task}-{job.length}-{job.protocol}.json"

    def has(self, job: Job) -> bool:
        """Whether a job is finished."""
        return self.path(job).exists()

    def write(self, job: Job, record: Mapping[str, Any]) -> None:
        """Writes a finished job's file atomically."""
        write_json(self.path(job), {**job._asdict(), **record})

    def read_all(self) -> list[dict[str, Any]]:
        """All finished jobs of this and earlier runs."""
        return [read_json_object(path) for path in _finished((self.folder / TASKS).glob("*/*.json"))]

    def read_tuning(self) -> list[dict[str, Any]]:
        """Trials of `--tune` by method."""
        return [read_json_object(path) for path in _finished((self.folder / TUNING).glob("*.json"))]

    def write_table(self, skipped: Sequence[str] = ()) -> None:
        """Writes table.md."""
        text = table(self.config, self.read_all(), skipped, self.read_tuning())
        with replacing(self.folder / "table.md") as unfinished:
            unfinished.write_text(text, encoding="utf-8")


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a file atomically, and syncs it."""
    with replacing(path) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _finished(paths: Iterable[Path]) -> list[Path]:
    """Sorted, without names that begin with a dot, which a run that was killed leaves."""
    return sorted(path for path in paths if not path.name.startswith("."))


def table(
    config: Mapping[str, Any], records: Sequence[Record], skipped: Sequence[str] = (), tuned: Sequence[Record] = ()
) -> str:
    """A summary, tables by length, protocol and suite, text tasks, tuning, and notes."""
    records, kv_share = _in_order(config, records), config["kv_share"]
    most = f"at most {kv_share or 1:.0%} of full attention's for the prompt alone"
    held = "as each method has them" if kv_share is None else most
    mesh = f", on a mesh of {config['mesh']} devices (data x model)" if "mesh" in config else ""
    settings = f"{config['samples']} samples a task, seed {config['seed']}, {config['dtype']}{mesh}. Bytes: {held}."
    lines = [f"# {config['model']}", "", settings, ""]
    names = {record["tuned"]: f"{record['method']} (tuned)" for record in tuned if record["tuned"] != record["method"]}
    for length, of_length in sorted(_by(records, "length").items()):
        lines += _summary(of_length, names, length)
        for suite, protocol, asked in _asked(of_length):
            lines += _question_table(asked, f"{suite}, {length:,} tokens, {protocol}")
        lines += _text_table(_by(of_length, "suite").get("text", []), length)
    return "\n".join([*lines, *_tuning_table(tuned), *_notes(records, skipped)]).rstrip() + "\n"


def _summary(records: Sequence[Record], names: Mapping[str, str], length: int) -> list[str]:
    """A line for each method: mean scores by suite and protocol, losses over full attention's, costs."""
    means = {f"{suite}, {protocol}": _mean_scores(asked) for suite, protocol, asked in _asked(records)}
    means = {title: found for title, found in means.items() if found}
    losses = {record["method"]: record["values"] for record in _by(records, "suite").get("text", [])}
    full = losses.get("full")
    if len(means) + bool(full) < 2:  # another table has it
        return []
    rows = []
    for method, own in _by(records, "method").items():
        row = [f"{of[method]:.1f}" if method in of else _NONE for of in means.values()]
        for kind in ("loss_inside", "loss") if full else ():
            row.append(f"{losses[method][kind] / losses['full'][kind] - 1:+.2%}" if method in losses else _NONE)
        rows.append([f"`{names.get(method, method)}`", *row, _held_share(own), _mean_share(own, "attended_share")])
    heads = ["method", *means, *(["loss inside", "loss behind"] if full else []), "KV bytes", "attended"]
    losses_over = ", and losses over full attention's" if full else ""
    explained = f"Mean scores in percent of the tasks that all have{losses_over}."
    return _section(f"All, {length:,} tokens", explained, heads, rows)


def _mean_scores(records: Sequence[Record]) -> dict[str, float]:
    """Mean score of each method over the tasks that all methods have; empty without such tasks."""
    common = _common_tasks(records)
    scores = {(record["method"], record["task"]): record["score"] for record in records}
    return {m: float(np.mean([scores[m, task] for task in common])) for m in _by(records, "method") if common}


def _common_tasks(records: Sequence[Record]) -> set[str]:
    return set.intersection(*({record["task"] for record in own} for own in _by(records, "method").values()))


def _question_table(records: Sequence[Record], title: str) -> list[str]:
    """Scores by task, and costs: shares of bytes, tokens and pairs."""
    tasks, means, rows = _by(records, "task"), _mean_scores(records), []
    for method, own in _by(records, "method").items():
        of_task = {record["task"]: record for record in own}
        costs = [_held_share(own), *(_mean_share(own, name) for name in ("kept_share", "attended_share"))]
        label = method + (_OWN_BUDGET if any(record["own_budget"] for record in own) else "")
        scores = [f"{of_task[task]['score']:.1f}" if task in of_task else _NONE for task in tasks]
        mean = f"{means[method]:.1f}" if means else _NONE
        rows.append([label, *scores, mean, *costs, str(max(record["batch"] for record in own))])
    heads = ["method", *(_marked(task, records) for task in tasks), f"mean of {len(_common_tasks(records))}"]
    heads += ["KV bytes", "kept", "attended", "batch"]
    return _section(title, f"Scores in percent; {_PROTOCOLS[records[0]['protocol']]}.", heads, rows)


def _text_table(records: Sequence[Record], length: int) -> list[str]:
    """Losses of a text, and costs."""
    rows, losses = [], ["loss behind the text (nats/token)", "loss inside it (nats/token)"]
    heads = ["method", *losses, "attended", "KV bytes", "kept"]
    for record in records:
        values = (f"{record['values'][name]:.4f}" for name in ("loss", "loss_inside"))
        attended, kept = (f"{record[name]:.1%}" for name in ("attended_share", "kept_share"))
        rows.append([record["method"], *values, attended, _held_share([record]), kept])
    return _section(f"{_marked('loss', records)}, {length:,} tokens", "", heads, rows)


def _tuning_table(tuned: Sequence[Record]) -> list[str]:
    """Given options and best trial of each tuned method."""
    rows = []
    for record in tuned:
        trials = record["trials"]
        best = next(trial for trial in trials if trial["spec"] == record["tuned"])
        for kind, trial in (("defaults", trials[0]), ("tuned", best)):
            spent = ["", ""] if kind == "defaults" else [str(len(trials)), f"{record['seconds']:.0f}"]
            losses = (f"{trial[name]:.4f}" for name in ("excess", "loss_inside", "loss_following"))
            shares = (f"{trial[name]:.1%}" for name in ("held_share", "attended_share"))
            rows.append([f"{trial['spec']} ({kind})", *losses, *shares, *spent])
    heads = ["method", "excess", "loss inside", "loss behind", "KV bytes", "attended", "trials", "s"]
    devices = " and ".join(sorted({record["device"] for record in tuned}))
    return _section("Tuning", _TUNING.format(devices), heads, rows)


def _notes(records: Sequence[Record], skipped: Sequence[str]) -> list[str]:
    """Explanations of marks, and the tasks that are left out."""
    substitutes = sorted({f"{name}: {label}" for r in records for name, label in r["substitutes"].items()})
    own = []
    for method, of_method in _by([record for record in records if record["own_budget"]], "method").items():
        for budget, of_budget in _by(of_method, "budget").items():
            lengths = " and ".join(f"{length:,}" for length in sorted(_by(of_budget, "length")))
            own.append(f"{method}, {lengths} tokens: {budget}")
    noted = ((_ORIGIN, substitutes), (f"{_OWN_BUDGET} Not at the bytes of the others:", own), ("Left out:", skipped))
    return [line for title, items in noted if items for line in (title, "", *(f"- {item}" for item in items), "")]


def _in_order(config: Mapping[str, Any], records: Sequence[Record]) -> list[Record]:
    """Full attention's first, then the methods as they were named, each with its tasks as they were run."""
    places = {label: place for place, label in enumerate(config.get("methods", ()))}
    last = len(places)
    return sorted(records, key=lambda r: (r["method"] != "full", places.get(r["method"], last), r.get("finished", "")))


def _by(records: Sequence[Record], name: str) -> dict[Any, list[Record]]:
    """Records by a value, in their order."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(record[name], []).append(record)
    return found


def _asked(records: Sequence[Record]) -> Iterator[tuple[str, str, list[Record]]]:
    """Suite, protocol and records of the tasks with questions."""
    for protocol in EVALUATION_PROTOCOLS:
        for suite, of_suite in _by(records, "suite").items():
            if asked := _by(of_suite, "protocol").get(protocol):
                yield suite, protocol, asked


def _held_share(records: Sequence[Record]) -> str:
    """Mean share of full attention's cache bytes."""
    return f"{np.mean([record['kv_cache_bytes'] / record['full_kv_cache_bytes'] for record in records]):.1%}"


def _mean_share(records: Sequence[Record], name: str) -> str:
    return f"{np.mean([record[name] for record in records]):.1%}"


def _marked(task: str, records: Sequence[Record]) -> str:
    return task + (f" {_SUBSTITUTE}" if any(r["substitutes"] for r in records if r["task"] == task) else "")


def _section(title: str, explained: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a titled table; none without rows."""
    text = [explained, ""] if explained else []
    return [f"## {title}", "", *text, markdown(heads, rows, "---:"), ""] if rows else []
