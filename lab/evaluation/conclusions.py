"""What the figures of an evaluation say of TCA, sentence by sentence computed from the records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tca_jax.lab.recall.protocols import PROTOCOLS

Record = Mapping[str, Any]

TCA = "tca"
_BASELINE = "full"
_COST_SLACK = 0.01  # of full attention's: costs that differ by less are equal
_SURE = 2.0  # standard errors by which scores or losses are told apart


def held_share(records: Iterable[Record]) -> float:
    """Bytes of the caches over those of full attention, mean of some results."""
    return float(np.mean([record["kv_cache_bytes"] / record["full_kv_cache_bytes"] for record in records]))


def conclusions(records: Sequence[Record]) -> list[str]:
    """Which methods are better than TCA, as good and worse, at its cost or less and at any cost; empty without TCA.

    Of scores, tasks count that all methods have. Methods are told apart by two standard errors of the differences of
    their samples, pair by pair.

    Args:
        records: Those of a results folder, in the order of its table.
    """
    found = []
    for length in sorted({record["length"] for record in records}):
        of_length = [record for record in records if record["length"] == length]
        for protocol in PROTOCOLS:
            asked = [record for record in of_length if record["protocol"] == protocol]
            for suite in dict.fromkeys(record["suite"] for record in asked):
                some = _common([record for record in asked if record["suite"] == suite])
                found += _compared(some, f"{suite}, {length:,} tokens, {protocol}", _scores, "score", "%")
        losses = {
            record["method"]: [record] for record in of_length if record["suite"] == "text" and record["task"] == "loss"
        }
        for name, title in (("loss_inside", "loss inside the text"), ("loss", "loss behind the text")):
            found += _compared(losses, f"{title}, {length:,} tokens", _negated(name), "loss", " nats")
    return found


def _common(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of each method, of the tasks that all have, in one order of tasks."""
    methods: dict[str, dict[str, Record]] = {}
    for record in records:
        methods.setdefault(record["method"], {})[record["task"]] = record
    common = sorted(set.intersection(*map(set, methods.values()))) if methods else []
    return {method: [tasks[task] for task in common] for method, tasks in methods.items()} if common else {}


def _scores(record: Record) -> list[float]:
    return [100 * float(sample["score"]) for sample in record["samples"]]


def _negated(name: str) -> Any:
    return lambda record: [-float(sample[name]) for sample in record["samples"]]


def _compared(methods: Mapping[str, Sequence[Record]], title: str, of: Any, what: str, unit: str) -> list[str]:
    """A sentence on TCA's rank, and one for each method that is better."""
    rivals = [method for method in methods if method not in (TCA, _BASELINE)]
    if TCA not in methods or not rivals:
        return []

    def values(method: str) -> np.ndarray:
        return np.concatenate([of(record) for record in methods[method]])

    own, own_costs = values(TCA), _costs(methods[TCA])
    groups: dict[str, list[str]] = {"better": [], "as good": [], "worse": []}
    better = []
    for method in rivals:
        rises, costs = values(method) - own, _costs(methods[method])
        noise = float(rises.std(ddof=1)) / math.sqrt(rises.size) if rises.size > 1 else math.inf
        mean = float(rises.mean())
        kind = "as good" if abs(mean) <= _SURE * noise or mean == 0 else "better" if mean > 0 else "worse"
        cheap = all(cost <= own_cost + _COST_SLACK for cost, own_cost in zip(costs, own_costs, strict=True))
        groups[kind].append(f"`{method}`" + ("" if cheap else " (costs more)"))
        if kind == "better":
            cost = "at TCA's cost or less" if cheap else "at a higher cost"
            better.append(
                f"{title}: TCA is not the best {cost}: `{method}` is better by {abs(mean):.3g}{unit} "
                f"({_shown(costs)}; TCA {_shown(own_costs)})."
            )
    parts = [f"{kind}: {', '.join(names)}" for kind, names in groups.items() if names]
    shown = abs(float(own.mean()))
    return [f"{title}: `tca` has a {what} of {shown:.4g}{unit} ({_shown(own_costs)}). {'; '.join(parts)}.", *better]


def _costs(records: Sequence[Record]) -> tuple[float, float]:
    """Shares of bytes and of attended pairs; 1 where the second is not known."""
    return held_share(records), float(np.mean([record.get("attended_share", 1.0) for record in records]))


def _shown(costs: tuple[float, float]) -> str:
    return f"{costs[0]:.1%} of the bytes, {costs[1]:.1%} of the pairs"
