"""What tables of whole models say of meshes: memory of their devices, and speed over the first mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure

from tca_jax.engine.lm import LM
from tca_jax.lab.benchmarks.common import group_rows
from tca_jax.lab.benchmarks.meshes import held_by_device, over_even_share
from tca_jax.lab.plots import figures

#: Columns of times, and those of how many times as fast they are as on the first mesh.
SPEED_UPS = {"TTFT s": "TTFT over first mesh", "ms/token": "ms/token over first mesh"}
#: Columns that rows of one line of the plot share, where they are.
_COMPARED = ("model", "fp8", "tokens", "attention")
_PANELS = {
    "TTFT over first mesh": "times as fast to the first token",
    "ms/token over first mesh": "times as fast per further token",
    "held GB": "GB that a device holds",
}


def held_columns(lm: LM, batch: int, tokens: int, new_tokens: int) -> dict[str, float]:
    """What every device of a model's mesh holds, in GB, and that over its even share."""
    assert lm.mesh is not None
    sizes = lm.config, lm.method.cache, lm.mesh, batch, tokens, new_tokens
    held = held_by_device(*sizes, weights=lm.weights_dtype, kv=lm.cache_dtype)
    share = over_even_share(*sizes, weights=lm.weights_dtype, kv=lm.cache_dtype)
    return {"held GB": held.all / 1e9, "over even share": share}


class Peaks:
    """The most that devices have held at once, while something ran that held more than all before it.

    Devices count from their process's start on, so what needs less is not seen: run what needs most at last, and small
    meshes first, whose devices the larger ones extend.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
        self._before = self._read()

    def grown(self) -> float | str:
        """GB of the fullest device among those that hold more than ever before since the last call; "" for none."""
        now = self._read()
        grown = [peak for peak, before in zip(now, self._before, strict=True) if peak > before]
        self._before = now
        return max(grown) / 1e9 if grown else ""

    def _read(self) -> list[int]:
        return [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in self._devices]


def with_speed_ups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of several meshes with how many times as fast each is as the same on the first mesh."""
    first: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    found = []
    for row in rows:
        one = first.setdefault(tuple(row.get(column) for column in _COMPARED), row)
        speed_ups = {name: one[column] / row[column] for column, name in SPEED_UPS.items() if column in row}
        found.append({**row, **speed_ups})
    return found


def plot_meshes(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Speed over the first mesh and memory of a device by mesh: a line a model, length and attention."""
    meshes = list(dict.fromkeys(row["mesh"] for row in rows))
    devices = [int(np.prod([int(size) for size in mesh.split("x")])) for mesh in meshes]
    compared = [column for column in _COMPARED if column in rows[0]]
    attentions = list(dict.fromkeys(row["attention"] for row in rows))
    places, colors = list(group_rows(rows, *compared[:-1])), figures.palette(len(attentions))
    panels = {column: label for column, label in _PANELS.items() if column in rows[0]}
    figure = Figure(figsize=(4.5 * len(panels), 4.5), dpi=150, layout="constrained")
    for axes, (column, label) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for (*place, attention), line in group_rows(rows, *compared).items():
            model, *stored, tokens = place
            axes.plot(
                [meshes.index(row["mesh"]) for row in line],
                [row[column] for row in line],
                marker="o",
                color=colors[attentions.index(attention)],
                clip_on=False,
                linestyle=("-", "--", ":", "-.")[places.index(tuple(place)) % 4],
                label=", ".join([model, *(f"{kind} in fp8" for kind in stored), f"{tokens:,} tokens", attention]),
            )
        if column in SPEED_UPS.values():
            ideal = [count / devices[0] for count in devices]
            axes.plot(range(len(meshes)), ideal, color="black", linewidth=1, label="as many times as devices")
        axes.set_xticks(range(len(meshes)), meshes)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("devices on data x devices on model")
        axes.set_title(label)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(title)
    figures.write(figure, path)


def describe_meshes(meshes: Sequence[Mesh], batch: int) -> str:
    """What a note says of the columns above and of the mesh; "" for one device."""
    if not meshes:
        return ""
    text = (
        f" `mesh` are the devices that share the model, those on data x those on model, with {batch} prompt"
        f"{'s' if batch > 1 else ''} on each mesh. Both rates are of one device, both floors of all together; `KV GB` "
        "is of all, `peak GB` of one. `held GB` are the weights and caches that lie on each device, `over even share` "
        "the same over an even share of them; `measured peak GB` is the most that the fullest device has held at once "
        "by its own account, where no run before has made it hold more."
    )
    if len(meshes) > 1:
        text += " `over first mesh` is how many times as fast the same attention is as on the first mesh of the table."
    return text
