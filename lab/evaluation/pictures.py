"""Pictures of a results folder: scores by method, by length, depth and time to the first token; loss by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from tca_jax.lab.evaluation.tables import tuned_names
from tca_jax.lab.plots import figures
from tca_jax.lab.plots.curves import BASELINE, Curves, draw_curves
from tca_jax.lab.recall.protocols import EVALUATION_PROTOCOLS

Record = Mapping[str, Any]

_DEPTHS = 10  # parts of a document
_MARKERS = dict(zip(EVALUATION_PROTOCOLS, "o^sD", strict=True))


def draw_pictures(records: Sequence[Record], folder: Path, tuned: Sequence[Record] = ()) -> list[Path]:
    """Writes a PNG for each picture that the results are enough for.

    Args:
        records: From `Results.read_all`.
        folder: Where they go.
        tuned: From `Results.read_tuning`.

    Returns:
        The files.
    """
    names = tuned_names(tuned)
    records = [{**record, "method": names.get(record["method"], record["method"])} for record in records]
    asked = _comparable([record for record in records if record["protocol"] in EVALUATION_PROTOCOLS])
    pictures = {
        "methods.png": _by_method(asked),
        "first-token.png": _against_time(asked),
        "length.png": _against_length(asked),
        "depth.png": _against_depth(asked),
        "loss.png": _loss_by_position([record for record in records if record["task"] == "loss"]),
    }
    return [figures.write(figure, folder / name) for name, figure in pictures.items() if figure is not None]


def _by_method(records: Sequence[Record]) -> Figure | None:
    """Mean scores under each protocol: a panel a length, and in it a line a method, with its share of full attention's
    bytes; the method that has the highest mean score of all is above."""
    if not records:
        return None
    lengths = _lengths(records)
    protocols = [name for name in EVALUATION_PROTOCOLS if _of(records, protocol=name)]
    methods = sorted(dict.fromkeys(record["method"] for record in records), key=lambda name: _scores(records, name))
    held = [{**record, "held": record["kv_cache_bytes"] / record["full_kv_cache_bytes"]} for record in records]
    labels = [f"{name}  {_mean(_of(held, method=name), 'held'):4.0%}" for name in methods]
    size = 2.6 + 3.8 * len(lengths), 1.4 + 0.22 * len(methods)
    figure = Figure(figsize=size, dpi=figures.DPI, layout="constrained")
    (panels,) = figure.subplots(1, len(lengths), sharex=True, sharey=True, squeeze=False)
    for axes, length in zip(panels, lengths, strict=True):
        for protocol, color in zip(protocols, figures.palette(len(protocols)), strict=True):
            under = _of(records, length=length, protocol=protocol)
            found = {row: _of(under, method=name) for row, name in enumerate(methods)}
            scores = {row: _mean(some, "score") for row, some in found.items() if some}
            drawn = axes.plot(
                list(scores.values()), list(scores), _MARKERS[protocol], color=color, alpha=0.8, label=protocol
            )
            drawn[0].set_clip_on(False)  # markers at an end are drawn whole
        axes.set_title(f"{length:,} tokens", fontsize=10)
        axes.grid(alpha=0.25)
        axes.set_xlabel("score, mean of tasks")
    panels[0].set_xlim(0, 100)
    panels[0].set_ylim(-0.7, len(methods) - 0.3)
    panels[0].set_yticks(range(len(methods)), labels, fontsize=8)
    panels[0].xaxis.set_major_formatter(PercentFormatter(100))
    figure.suptitle("Scores, with the share of full attention's KV cache bytes", parse_math=False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(protocols), fontsize=9)
    return figure


def _scores(records: Sequence[Record], method: str) -> float:
    return _mean(_of(records, method=method), "score")


def _against_time(records: Sequence[Record]) -> Figure | None:
    """Mean score against seconds from a question to the first token of its answer, a point a length.

    All prompts of a batch wait for the whole of it. Under "late" and "late-prefix" the document was read before.
    """
    if not records:
        return None
    lengths = _lengths(records)
    waited = [{**record, "waited": record["batch"] * record["question_seconds"]} for record in records]

    def points(of_method: Sequence[Record]) -> list[tuple[float, float]]:
        of_lengths = [_of(of_method, length=length) for length in lengths]
        return [(_mean(some, "waited"), _mean(some, "score")) for some in of_lengths if some]

    batches = " or ".join(str(size) for size in sorted({record["batch"] for record in records}))
    title = f"Accuracy against time, {_tokens(lengths)}, batches of {batches}"
    label = "seconds from the question to the first token"
    figure, panels = _draw_scores(waited, points, title, label, same_x=False)
    for axes in panels:
        axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
    return _labelled(figure, panels)


def _against_length(records: Sequence[Record]) -> Figure | None:
    lengths = _lengths(records)
    if len(lengths) < 2:
        return None

    def points(of_method: Sequence[Record]) -> list[tuple[float, float]]:
        found = {length: _of(of_method, length=length) for length in lengths}
        return [(length, _mean(some, "score")) for length, some in found.items() if some]

    figure, panels = _draw_scores(records, points, "Accuracy against length", "tokens")
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:,.0f}")
    return _labelled(figure, panels)


def _against_depth(records: Sequence[Record]) -> Figure | None:
    """Share of references that answers state, by where these stand in the document."""
    placed = [record for record in records if any(sample["depths"] for sample in record["samples"])]
    if not placed:
        return None

    def points(of_method: Sequence[Record]) -> list[tuple[float, float]]:
        samples = [sample for record in of_method for sample in record["samples"]]
        depths = np.array([depth for sample in samples for depth in sample["depths"]])
        hits = np.array([hit for sample in samples for hit in sample["hits"]], float)
        part = np.minimum((depths * _DEPTHS).astype(int), _DEPTHS - 1)
        return [((i + 0.5) / _DEPTHS, 100 * hits[part == i].mean()) for i in range(_DEPTHS) if (part == i).any()]

    title = f"Facts found against depth, {_tokens(_lengths(placed))}"
    figure, panels = _draw_scores(placed, points, title, "depth in the document", "facts found")
    panels[0].set_xlim(0, 1)
    for axes in panels:
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    return _labelled(figure, panels)


def _draw_scores(
    records: Sequence[Record],
    points: Callable[[Sequence[Record]], list[tuple[float, float]]],
    title: str,
    xlabel: str,
    ylabel: str = "score, mean of tasks",
    *,
    same_x: bool = True,
) -> tuple[Figure, list[Axes]]:
    """A panel a protocol, in which `points` of its records are a method's line; scores are in percent."""
    protocols = [name for name in EVALUATION_PROTOCOLS if _of(records, protocol=name)]
    curves = {name: _curves(_of(records, protocol=name), points) for name in protocols}
    figure, panels = draw_curves(curves, title, xlabel, ylabel, same_x=same_x)
    panels[0].set_ylim(-3, 103)
    for axes in panels:
        axes.yaxis.set_major_formatter(PercentFormatter(100))
    return figure, panels


def _labelled(figure: Figure, panels: Sequence[Axes]) -> Figure:
    """The figure of scores with the value of each point that stands alone."""
    figures.label_lone_points(panels, "{:.3g}%".format)
    return figure


def _curves(
    records: Sequence[Record], points: Callable[[Sequence[Record]], Sequence[tuple[float, float]]]
) -> dict[str, Sequence[tuple[float, float]]]:
    """The points of each method that has any."""
    methods = dict.fromkeys(record["method"] for record in records)
    return {name: found for name in methods if (found := points(_of(records, method=name)))}


def _loss_by_position(records: Sequence[Record]) -> Figure | None:
    """Loss inside a text by position, less full attention's where that was measured."""
    if not records:
        return None
    lengths = _lengths(records)
    exact = {length: _of(records, method=BASELINE, length=length) for length in lengths}
    compared = all(exact.values()) and any(record["method"] != BASELINE for record in records)
    panels: dict[str, Curves] = {}
    for length in lengths:
        less = _losses(exact[length]) if compared else 0.0

        def points(of_method: Sequence[Record], length: int = length, less: Any = less) -> list[tuple[float, float]]:
            losses = _losses(of_method) - less
            middles = (np.arange(len(losses)) + 0.5) / len(losses) * length
            return list(zip(middles.tolist(), losses.tolist(), strict=True))

        drawn = [record for record in _of(records, length=length) if not compared or record["method"] != BASELINE]
        panels[f"{length:,} tokens"] = _curves(drawn, points)
    ylabel = "nats per token" + (" above full attention" if compared else "")
    figure, drawn_panels = draw_curves(panels, "Loss by position", "position", ylabel, same_x=False)
    for axes in drawn_panels if compared else ():
        axes.axhline(0, color="#404040", linewidth=1, zorder=1)
    return figure


def _losses(records: Sequence[Record]) -> np.ndarray:
    """Mean losses by position."""
    return np.mean([sample["by_position"] for record in records for sample in record["samples"]], axis=0)


def _comparable(records: Sequence[Record]) -> list[Record]:
    """Those of tasks that every method has at every length, so that means are of the same tasks; all where none is."""
    tasks: dict[tuple[str, int, str], set[str]] = {}
    for record in records:
        tasks.setdefault((record["method"], record["length"], record["protocol"]), set()).add(record["task"])
    common = set.intersection(*tasks.values()) if tasks else set()
    return [record for record in records if record["task"] in common or not common]


def _of(records: Sequence[Record], **wanted: Any) -> list[Record]:
    return [record for record in records if all(record[name] == value for name, value in wanted.items())]


def _mean(records: Sequence[Record], name: str) -> float:
    return float(np.mean([record[name] for record in records]))


def _lengths(records: Sequence[Record]) -> list[int]:
    return sorted({record["length"] for record in records})


def _tokens(lengths: Sequence[int]) -> str:
    return f"{' to '.join(f'{n:,}' for n in dict.fromkeys((lengths[0], lengths[-1])))} tokens"
