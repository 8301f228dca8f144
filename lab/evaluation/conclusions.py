"""What the figures of an evaluation say of TCA, sentence by sentence computed from the records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from tca_jax.lab.recall.protocols import PROTOCOLS

Record = Mapping[str, Any]

TCA = "tca"
_BASELINE = "full"
_COST_SLACK = 0.01  # of full attention's: costs that differ by less are equal
_SURE = 2.0  # standard errors by which scores or losses are told apart
_BYTES, _PAIRS = "bytes", "pairs"
_KINDS = ("better", "as good", "worse")


def held_share(records: Iterable[Record]) -> float:
    """Bytes of the caches over those of full attention, mean of some results."""
    return float(np.mean([record["kv_cache_bytes"] / record["full_kv_cache_bytes"] for record in records]))


def conclusions(records: Sequence[Record], names: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Which methods are better than TCA, as good and worse, at its cost or less and at any cost; empty without TCA.

    Answers and the loss behind a text cost bytes, of which all that are within one budget have the same; the loss
    inside a text costs pairs. Of scores, tasks count that all methods have. Methods are told apart by two standard
    errors of the differences of their samples, pair by pair.

    Args:
        records: Those of a results folder, in the order of its table.
        names: What methods are called, where that is not their label.
    """
    found = []
    for length in sorted({record["length"] for record in records}):
        of_length = [record for record in records if record["length"] == length]
        for protocol in PROTOCOLS:
            asked = [record for record in of_length if record["protocol"] == protocol]
            for suite in dict.fromkeys(record["suite"] for record in asked):
                some = common_tasks([record for record in asked if record["suite"] == suite])
                title = f"{suite}, {length:,} tokens, {protocol}"
                found += _compared(some, names, title, _scores, ("a score of", "%"), _BYTES)
        losses = {
            record["method"]: [record] for record in of_length if record["suite"] == "text" and record["task"] == "loss"
        }
        unit = "a loss of", " nats"
        title = f"the text, {length:,} tokens"
        found += _compared(losses, names, f"loss inside {title}", _negated("loss_inside"), unit, _PAIRS)
        found += _compared(losses, names, f"loss behind {title}", _negated("loss"), unit, _BYTES)
    return found


def common_tasks(records: Sequence[Record]) -> dict[str, list[Record]]:
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


def _compared(
    methods: Mapping[str, Sequence[Record]],
    names: Mapping[str, str],
    title: str,
    of: Any,
    words: tuple[str, str],
    cost: str,
) -> list[str]:
    """What TCA has, and the methods that cost no more and those that cost more, by whether they are better."""
    rivals = [method for method in methods if method not in (TCA, _BASELINE)]
    if TCA not in methods or not rivals:
        return []

    def values(method: str) -> np.ndarray:
        return np.concatenate([of(record) for record in methods[method]])

    what, unit = words
    own, own_costs = values(TCA), _costs(methods[TCA])
    most = own_costs[cost] + _COST_SLACK
    groups: dict[tuple[bool, str], list[str]] = {}
    for method in rivals:
        rises = values(method) - own
        noise = float(rises.std(ddof=1)) / math.sqrt(rises.size) if rises.size > 1 else math.inf
        mean, of_method = float(rises.mean()), _costs(methods[method])[cost]
        equal = cost == _BYTES and _in_budget([*methods[TCA], *methods[method]])
        cheap = equal or of_method <= most
        kind = "as good" if abs(mean) <= _SURE * noise or mean == 0 else "better" if mean > 0 else "worse"
        details = [f"by {abs(mean):.3g}{unit}"] if kind == "better" else []
        details += [] if cheap else [f"{of_method:.0%}"]
        name = f"`{names.get(method, method)}`" + (f" ({', '.join(details)})" if details else "")
        groups.setdefault((cheap, kind), []).append(name)
    shown = ", ".join(f"{share:.1%} of the {name}" for name, share in own_costs.items())
    sentences = [f"{title}: `{TCA}` has {what} {abs(float(own.mean())):.4g}{unit}, with {shown}."]
    if (True, "better") in groups:
        sentences.append(f"TCA is not the best at its {cost}.")
    for cheap, costing in ((True, f"As many {cost} or fewer"), (False, f"More {cost}")):
        parts = [f"{kind}: {', '.join(groups[cheap, kind])}" for kind in _KINDS if (cheap, kind) in groups]
        sentences += [f"{costing}; {'; '.join(parts)}."] if parts else []
    return [" ".join(sentences)]


def _in_budget(records: Sequence[Record]) -> bool:
    """Whether all hold the bytes that were asked for: as many as they can of these."""
    return all(record.get("budget") and not record["own_budget"] for record in records)


def _costs(records: Sequence[Record]) -> dict[str, float]:
    """Shares of bytes and of attended pairs; 1 where the second is not known."""
    pairs = float(np.mean([record.get("attended_share", 1.0) for record in records]))
    return {_BYTES: held_share(records), _PAIRS: pairs}
