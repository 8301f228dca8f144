"""The table of a suite: its own scores, what they cost, and the published ones beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tca_jax.files import replacing
from tca_jax.lab.evaluation.plan import Plan
from tca_jax.lab.evaluation.published import Figures, model_key, published
from tca_jax.lab.evaluation.results import Results
from tca_jax.lab.evaluation.suites import SETTINGS, Part, Suite
from tca_jax.lab.evaluation.tables import TABLE, held_share, markdown, notes
from tca_jax.models.json_object import read_json_object

Record = Mapping[str, Any]

_NONE = "-"
_HERE = "here"
#: LongBench's groups of data sets.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "single-document QA": ("qasper", "multifieldqa_en"),
    "multi-document QA": ("hotpotqa", "2wikimqa"),
    "summaries": ("gov_report", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
_BY_LENGTH = ("0-4k", "4-8k", "8k+")
_ABSENT = {
    "paper": "The tables of the TCA-Attention paper (arXiv 2512.09238) are not beside these: no copy of them could be "
    "read.",
    "leaderboard": "The entries of kvpress's leaderboard are not beside these, but for KVzip's: no copy of them could "
    "be read.",
    "late": "No published figures are known for these lengths under this protocol.",
}


def write_suite_table(suite: Suite, plans: Mapping[Part, Plan], folder: Path) -> None:
    """Writes table.md of all that a suite's folder holds."""
    settings = read_json_object(folder / SETTINGS)
    records = {part: Results(folder / part.name).read_all() for part in plans}
    text = suite_table(suite, settings, plans, records)
    with replacing(folder / TABLE) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def suite_table(
    suite: Suite, settings: Mapping[str, Any], plans: Mapping[Part, Plan], records: Mapping[Part, Sequence[Record]]
) -> str:
    """A suite's table.

    Args:
        suite: The suite.
        settings: Its folder's settings.
        plans: Of its parts.
        records: Of its parts, as far as they are finished.
    """
    model = str(settings["model"])
    sources: list[str] = []
    lines = [f"# {suite.title}: {model}", "", *_settings_lines(suite, settings)]
    if suite.name == "leaderboard":
        lines += _leaderboard(model, plans, records, sources)
    else:
        for part, plan in plans.items():
            table = _longbench_table if part.tasks == "longbench" else _ruler_table
            lines += table(model, part, plan, records[part], sources)
    lines += _source_lines(model, plans, sources)
    everything = [record for of_part in records.values() for record in of_part]
    skipped = list(dict.fromkeys(reason for plan in plans.values() for reason in plan.skipped))
    lines += [_ABSENT[suite.name], "", *notes(everything, skipped)]
    return "\n".join(lines).rstrip() + "\n"


def _settings_lines(suite: Suite, settings: Mapping[str, Any]) -> list[str]:
    samples, lengths = settings["samples"], settings["lengths"]
    others = []
    if samples != suite.samples:
        others.append(f"{samples} samples of each task instead of {suite.samples}")
    if list(lengths) != list(suite.lengths):
        others.append(f"lengths {_listed(lengths)} instead of {_listed(suite.lengths)}")
    lines = [
        f"{samples} samples of each task of RULER, seed {settings['seed']}. Scores in percent; the tables of parts "
        "have all tasks."
    ]
    if others:
        lines += ["", f"**Not the suite's settings**: {'; '.join(others)}. Not to be compared with published figures."]
    return [*lines, ""]


def _ruler_table(model: str, part: Part, plan: Plan, records: Sequence[Record], sources: list[str]) -> list[str]:
    """Means over the tasks, a column a length."""
    lengths = sorted({length for _, of_task in plan.tasks for length in of_task})
    heads = ["method", "from", *(f"{length:,}" for length in lengths), "mean", "KV bytes", "kept", "attended"]
    rows = []
    for method, figures in _beside(part, model, _methods(plan, records)):
        if figures is None:
            own = [record for record in records if record["method"] == method]
            scores = [_mean_of_tasks([r for r in own if r["length"] == n], _at(plan, n)) for n in lengths]
            rows.append([method, _HERE, *map(_score, [*scores, _mean(scores)]), *_costs(own)])
        elif any(str(length) in figures.scores for length in lengths):
            scores = [figures.scores.get(str(length)) for length in lengths]
            rows.append([method, _cited(figures, sources), *map(_score, [*scores, _mean(scores)]), *[_NONE] * 3])
    asked = [f"{n:,} tokens have {len(_at(plan, n))}" for n in lengths if len(_at(plan, n)) != 13]
    fewer = [f"Means are of 13 tasks; {', '.join(asked)}.", ""] if asked else []
    return [f"## RULER, {part.protocol}", "", *fewer, *markdown(heads, rows)]


def _longbench_table(model: str, part: Part, plan: Plan, records: Sequence[Record], sources: list[str]) -> list[str]:
    """Means over groups of data sets, over all data sets, and by length of the text."""
    heads = ["method", "from", *GROUPS, "mean", *_BY_LENGTH, "KV bytes", "kept", "attended"]
    rows = []
    for method, figures in _beside(part, model, _methods(plan, records)):
        if figures is None:
            own = [record for record in records if record["method"] == method]
            scores = [_mean_of_tasks(own, tasks) for tasks in [*GROUPS.values(), sum(GROUPS.values(), ())]]
            by_length = [_mean([r["groups"][g] for r in own if g in r["groups"]]) if own else None for g in _BY_LENGTH]
            rows.append([method, _HERE, *map(_score, [*scores, *by_length]), *_costs(own)])
        else:
            scores = [figures.scores.get(name) for name in [*GROUPS, "mean", *_BY_LENGTH]]
            rows.append([method, _cited(figures, sources), *map(_score, scores), *[_NONE] * 3])
    samples = "All samples" if plan.samples == part.samples else f"The first {plan.samples} samples"
    return [f"## LongBench-E, {part.protocol}", "", f"{samples} of each data set.", "", *markdown(heads, rows)]


def _leaderboard(
    model: str, plans: Mapping[Part, Plan], records: Mapping[Part, Sequence[Record]], sources: list[str]
) -> list[str]:
    """kvpress's columns, a row a method and compression ratio; then all tasks."""
    rows: list[tuple[tuple[Any, ...], list[str]]] = []
    of_tasks: list[tuple[tuple[Any, ...], list[str]]] = []
    tasks = list(dict.fromkeys(task.name for plan in plans.values() for task, _ in plan.tasks))
    methods = list(dict.fromkeys(label for part, plan in plans.items() for label in _methods(plan, records[part])))
    for part, plan in plans.items():
        ratio = 1 - (1.0 if part.kv_share is None else part.kv_share)
        for length in sorted({length for _, of_task in plan.tasks for length in of_task}):
            for label in _methods(plan, records[part]):
                own = [r for r in records[part] if r["method"] == label and r["length"] == length]
                kept = float(np.mean([r["kept_share"] for r in own])) if own else None
                other = any(r["own_budget"] for r in own)
                shown = f"{1 - kept:.3g} ‡" if other and kept is not None else f"{ratio:.3g}"
                score = _mean_of_tasks(own, _at(plan, length))
                place = (methods.index(label), length, ratio)
                columns = ["ruler", str(length), model, label, shown, _score(score, 2)]
                rows.append((place, [*columns, _share(kept), _HERE]))
                found = {r["task"]: r["score"] for r in own}
                of_tasks.append((place, [label, shown, *(_score(found.get(task)) for task in tasks)]))
    for figures in published("leaderboard", model):
        dropped = figures.compression_ratio or 0.0
        first = methods.index(figures.method) if figures.method in methods else len(methods)
        columns = ["ruler", "4096", figures.model, figures.method, f"{dropped:.3g}", _score(figures.scores["mean"], 2)]
        rows.append(((first, 4096, dropped, 1), [*columns, _NONE, _cited(figures, sources)]))
    heads = ["dataset", "data_dir", "model", "method", "compression_ratio", "score", "kept", "from"]
    lines = ["## Leaderboard", "", *_left_aligned(heads, [row for _, row in sorted(rows, key=lambda each: each[0])])]
    ordered = [row for _, row in sorted(of_tasks, key=lambda each: each[0])]
    return [*lines, "## Tasks", "", *markdown(["method", "compression_ratio", *tasks], ordered)]


def _methods(plan: Plan, records: Sequence[Record]) -> list[str]:
    """The methods of a run, then those that only earlier runs had."""
    return list(dict.fromkeys([*(spec.label for spec in plan.methods), *(record["method"] for record in records)]))


def _beside(part: Part, model: str, methods: Sequence[str]) -> Iterable[tuple[str, Figures | None]]:
    """Methods, each with the published figures of the same method behind its own; then those of other methods."""
    figures, shown = published(part.figures, model), set()
    for label in methods:
        yield label, None
        name = label.partition(":")[0]
        if name not in shown:
            shown.add(name)
            yield from ((name, each) for each in figures if each.method == name)
    yield from ((each.method, each) for each in figures if each.method not in shown)


def _cited(figures: Figures, sources: list[str]) -> str:
    """The number of a source, which is listed once."""
    text = f"{figures.source}: {figures.settings}"
    if text not in sources:
        sources.append(text)
    return f"[{sources.index(text) + 1}]"


def _source_lines(model: str, plans: Mapping[Part, Plan], sources: Sequence[str]) -> list[str]:
    if not sources:
        return []
    models = {figures.model for part in plans for figures in published(part.figures, model)}
    other = models - {model_key(model)}
    lines = ["Published figures:", "", *(f"{i}. {text}" for i, text in enumerate(sources, start=1)), ""]
    if other:
        lines += [f"They are of {' and '.join(sorted(other))}, not of {model}.", ""]
    return lines


def _at(plan: Plan, length: int) -> list[str]:
    """Tasks that a plan asks at a length."""
    return [task.name for task, lengths in plan.tasks if length in lengths]


def _mean_of_tasks(records: Sequence[Record], tasks: Sequence[str]) -> float | None:
    """Mean score of tasks; None unless all are finished."""
    found = {record["task"]: record["score"] for record in records}
    return _mean([found.get(task) for task in tasks])


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return float(np.mean(known)) if known and len(known) == len(scores) else None


def _costs(records: Sequence[Record]) -> list[str]:
    if not records:
        return [_NONE] * 3
    shares = (float(np.mean([record[name] for record in records])) for name in ("kept_share", "attended_share"))
    return [_share(held_share(records)), *map(_share, shares)]


def _score(score: float | None, digits: int = 1) -> str:
    return _NONE if score is None else f"{score:.{digits}f}"


def _share(share: float | None) -> str:
    return _NONE if share is None else f"{share:.1%}"


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)


def _left_aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose columns are words."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]
