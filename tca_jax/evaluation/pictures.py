"""Pictures of a results folder: accuracy against bytes, length, depth and time to the first token; loss by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from tca_jax.evaluation.samples import PROTOCOLS
from tca_jax.evaluation.tables import held_share
from tca_jax.files import replacing

Record = Mapping[str, Any]

_DPI = 150
_DEPTHS = 10  # parts of a document
_MARKERS = "osD^vP*Xhp<>"
_WIDTH, _HEIGHT = 4.4, 3.9  # inches, of one protocol


def draw_pictures(records: Sequence[Record], folder: Path) -> list[Path]:
    """Writes a PNG for each picture that the results are enough for.

    Args:
        records: From `Results.read_all`.
        folder: Where they go.

    Returns:
        The files.
    """
    asked = _comparable([record for record in records if record["protocol"] in PROTOCOLS])
    pictures = {
        "bytes.png": _against_cost(asked, held_share, "KV cache held, of full attention's bytes", percent=True),
        "first-token.png": _against_cost(asked, _prefill_seconds, "seconds to the first token, a prompt"),
        "length.png": _against_length(asked),
        "depth.png": _against_depth(asked),
        "loss.png": _loss_by_position([record for record in records if record["task"] == "loss"]),
    }
    paths = []
    for name, figure in pictures.items():
        if figure is not None:
            with replacing(folder / name) as unfinished:
                figure.savefig(unfinished, format="png")
            paths.append(folder / name)
    return paths


def _against_cost(records: Sequence[Record], cost: Any, label: str, *, percent: bool = False) -> Figure | None:
    """Mean score against a cost, a point for each method and length; lengths of a method are joined."""
    protocols = _protocols(records)
    if not protocols:
        return None
    figure, panels = _panels(protocols)
    styles = _styles(records)
    lengths = _lengths(records)
    for protocol, axes in zip(protocols, panels, strict=True):
        for method, style in styles.items():
            of_lengths = [_of(records, method=method, protocol=protocol, length=length) for length in lengths]
            points = [(cost(some), _mean_score(some)) for some in of_lengths if some]
            if points:
                axes.plot(*zip(*points, strict=True), label=method, **style)
        axes.set_xlabel(label)
        if percent:
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_xlim(0, 1.05)
        else:
            axes.set_xlim(0, 1.08 * axes.get_xlim()[1])
    return _finish(figure, panels, f"Accuracy against {'bytes' if percent else 'time'}, {_tokens(lengths)}")


def _against_length(records: Sequence[Record]) -> Figure | None:
    lengths = _lengths(records)
    if len(lengths) < 2:
        return None
    protocols = _protocols(records)
    figure, panels = _panels(protocols)
    for protocol, axes in zip(protocols, panels, strict=True):
        for method, style in _styles(records).items():
            found = {length: _of(records, method=method, protocol=protocol, length=length) for length in lengths}
            points = [(length, _mean_score(some)) for length, some in found.items() if some]
            if points:
                axes.plot(*zip(*points, strict=True), label=method, **style)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{length:,}" for length in lengths])
        axes.set_xlabel("tokens")
    return _finish(figure, panels, "Accuracy against length")


def _against_depth(records: Sequence[Record]) -> Figure | None:
    """Share of references that answers state, by where these stand in the document."""
    placed = [record for record in records if any(sample["depths"] for sample in record["samples"])]
    protocols = _protocols(placed)
    if not protocols:
        return None
    figure, panels = _panels(protocols, "facts found")
    middles = (np.arange(_DEPTHS) + 0.5) / _DEPTHS
    for protocol, axes in zip(protocols, panels, strict=True):
        for method, style in _styles(placed).items():
            samples = [sample for r in _of(placed, method=method, protocol=protocol) for sample in r["samples"]]
            depths = np.array([depth for sample in samples for depth in sample["depths"]])
            hits = np.array([hit for sample in samples for hit in sample["hits"]], float)
            part = np.minimum((depths * _DEPTHS).astype(int), _DEPTHS - 1)
            points = [(middles[i], 100 * hits[part == i].mean()) for i in range(_DEPTHS) if (part == i).any()]
            if points:
                axes.plot(*zip(*points, strict=True), label=method, **style)
        axes.set_xlabel("depth in the document")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlim(0, 1)
    return _finish(figure, panels, f"Facts found against depth, {_tokens(_lengths(placed))}")


def _loss_by_position(records: Sequence[Record]) -> Figure | None:
    """Loss inside a text by position, less full attention's where that was measured."""
    if not records:
        return None
    lengths = _lengths(records)
    figure = Figure(figsize=(_WIDTH * len(lengths) + 1.6, _HEIGHT), dpi=_DPI, layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(1, len(lengths))))
    exact = {length: _curve(_of(records, method="full", length=length)) for length in lengths}
    compared = all(curve is not None for curve in exact.values()) and len(_styles(records)) > 1
    for length, axes in zip(lengths, panels, strict=True):
        for method, style in _styles(records).items():
            curve = _curve(_of(records, method=method, length=length))
            if curve is None or (compared and method == "full"):
                continue
            positions = (np.arange(len(curve)) + 0.5) / len(curve) * length
            axes.plot(positions, curve - exact[length] if compared else curve, label=method, **style)
        axes.set_title(f"{length:,} tokens", fontsize=11)
        axes.set_xlabel("position")
        axes.grid(alpha=0.3)
        if compared:
            axes.axhline(0, color="#404040", linewidth=1)
    panels[0].set_ylabel("nats a token" + (" above full attention" if compared else ""))
    _legend(figure, panels)
    figure.suptitle("Loss by position", fontsize=13, fontweight="bold")
    return figure


def _curve(records: Sequence[Record]) -> np.ndarray | None:
    curves = [sample["by_position"] for record in records for sample in record["samples"]]
    return np.mean(curves, axis=0) if curves else None


def _comparable(records: Sequence[Record]) -> list[Record]:
    """Those of tasks that every method has at every length, so that means are of the same tasks; all where none is."""
    tasks: dict[tuple[str, int, str], set[str]] = {}
    for record in records:
        tasks.setdefault((record["method"], record["length"], record["protocol"]), set()).add(record["task"])
    common = set.intersection(*tasks.values()) if tasks else set()
    return [record for record in records if record["task"] in common or not common]


def _panels(protocols: Sequence[str], label: str = "score, mean of tasks") -> tuple[Figure, list[Axes]]:
    """One panel a protocol, side by side."""
    figure = Figure(figsize=(_WIDTH * len(protocols) + 1.6, _HEIGHT), dpi=_DPI, layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(1, len(protocols), sharey=True)))
    for axes, protocol in zip(panels, protocols, strict=True):
        axes.set_title(protocol, fontsize=11)
        axes.grid(alpha=0.3)
        axes.set_ylim(-3, 103)
        axes.yaxis.set_major_formatter(PercentFormatter(100))
    panels[0].set_ylabel(label)
    return figure, panels


def _finish(figure: Figure, panels: Sequence[Axes], title: str) -> Figure:
    _legend(figure, panels)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries.keys(), loc="outside right center", frameon=False)


def _styles(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """How each method is drawn: the same in every panel, full attention in grey."""
    methods = sorted({record["method"] for record in records}, key=lambda name: (name != "full", name))
    palette = colormaps["tab10" if len(methods) <= 11 else "tab20"]
    styles: dict[str, dict[str, Any]] = {}
    number = 0
    for method in methods:
        marker = _MARKERS[len(styles) % len(_MARKERS)]
        if method == "full":
            # Seen where another method's points cover it.
            seen = {"markersize": 10, "markerfacecolor": "none", "markeredgewidth": 1.5}
            styles[method] = {"color": "#606060", "linestyle": "--", "marker": marker, **seen}
        else:
            styles[method] = {"color": palette(number % palette.N), "marker": marker}
            number += 1
    return styles


def _of(records: Sequence[Record], **wanted: Any) -> list[Record]:
    return [record for record in records if all(record[name] == value for name, value in wanted.items())]


def _mean_score(records: Sequence[Record]) -> float:
    return float(np.mean([record["score"] for record in records]))


def _prefill_seconds(records: Sequence[Record]) -> float:
    return float(np.mean([record["prefill_seconds"] for record in records]))


def _protocols(records: Sequence[Record]) -> list[str]:
    return [name for name in PROTOCOLS if any(record["protocol"] == name for record in records)]


def _lengths(records: Sequence[Record]) -> list[int]:
    return sorted({record["length"] for record in records})


def _tokens(lengths: Sequence[int]) -> str:
    return f"{' to '.join(f'{n:,}' for n in dict.fromkeys((lengths[0], lengths[-1])))} tokens"
