"""Tables of the zoo: what evaluate_zoo.py measured of every model, as one JSON file and one page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_ABOUT = (
    "Models of `examples/train_zoo.py` and the shipped one, each calibrated by the same call with the defaults "
    "(`examples/evaluate_zoo.py`), on {devices}. Calibration sees 131,072 tokens of the first half of the held-out "
    "text, losses are of the second, documents of questions of all of it. Windows: 512 at 8,192 tokens, 1,024 at "
    "16,384. A row that is missing was not measured. Seconds are of many processes on one GPU."
)
_LABELS = {"default": "default probes", "pairs": "pairs as probes"}


def write_tables(folder: Path) -> None:
    """Writes zoo.json, zoo-curves.json and zoo.md from the results of every model in a folder."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if "zoo" not in path.stem]
    models = _merged(record for record in records if "lengths" in record)
    estimates = [record for record in records if "rows" in record]
    found = {"models": {record["model"]: record for record in models}, "estimates": estimates}
    curves = _whole_curves([record for record in records if "curves" in record])
    (folder / "zoo.json").write_text(json.dumps(found, indent=1) + "\n")
    if curves:  # what `tca-jax plot reading` and `plot keeping` draw
        (folder / "zoo-curves.json").write_text(json.dumps({"models": curves}, indent=1) + "\n")
    tables = (_reading, _keeping, _answers, _draws)
    parts = [line for table in tables for line in table(models)] + _estimates(estimates)
    parts += [line for record in curves.values() for line in _curve(record)]
    about = _ABOUT.format(devices=_devices(models))
    (folder / "zoo.md").write_text("\n".join(["# The zoo", "", about, "", *parts]) + "\n")


def _devices(records: list[dict[str, Any]]) -> str:
    return " and ".join(sorted({record["device"] for record in records}))


def _merged(records: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record of each model, of what its parts and lengths were measured in."""
    models: dict[str, dict[str, Any]] = {}
    for record in records:
        one = models.setdefault(record["model"], {**record, "lengths": {}})
        for tokens, of_length in record["lengths"].items():
            one["lengths"].setdefault(tokens, {}).update(of_length)
    for one in models.values():
        one["lengths"] = dict(sorted(one["lengths"].items(), key=lambda each: int(each[0])))
    return list(models.values())


def _whole_curves(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One record of each model, with the points of all its files, full attention's first."""
    models: dict[str, dict[str, Any]] = {}
    for record in records:
        one = models.setdefault(record["curves"], {**record, "points": []})
        settings = [{**each, "points": None, "device": None} for each in (one, record)]
        assert settings[0] == settings[1], f"curves of {record['curves']} were measured in two ways: {settings}"
        one["points"] += record["points"]
    for name, one in models.items():
        one["device"] = _devices([record for record in records if record["curves"] == name])
        one["points"].sort(key=lambda point: (point["method"] != "full", point["method"]))
        full = one["points"][0]
        one["points"] = [{**point, "inside_full": full["inside"]} for point in one["points"]]
    return models


def _lengths(models: list[dict[str, Any]], *labels: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Model, tokens and record of every length at which these were measured."""
    for record in models:
        for tokens, of_length in record["lengths"].items():
            if all(label in of_length for label in labels):
                yield record["model"], f"{int(tokens):,}", of_length


def _table(title: str, head: list[str], rows: list[list[str]]) -> list[str]:
    """A table; nothing where nothing was measured."""
    if not rows:
        return []
    return [f"## {title}", "", _line(head), _line(["---"] * len(head)), *map(_line, rows), ""]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _over(value: float, full: float) -> str:
    return f"{value / full - 1:+.2%}"


def _reading(models: list[dict[str, Any]]) -> list[str]:
    head = ["model", "tokens", "full", "row 0", "chosen", "won back", "fetching heads", "attended: row 0", "chosen"]
    rows = []
    for name, tokens, each in _lengths(models, "full", "row0", "default"):
        full, row0, chosen = (each[label]["inside"] for label in ("full", "row0", "default"))
        won = (row0 - chosen) / max(row0 - full, 1e-9)
        heads = f"{len(each['default']['fetching'])} of {each['default']['heads']}"
        shares = [f"{each[label]['attended_share']:.1%}" for label in ("row0", "default")]
        rows.append([name, tokens, f"{full:.4f}", _over(row0, full), _over(chosen, full), f"{won:.0%}", heads, *shares])
    return _table("Loss inside the prompt (nats per token; over full attention's)", head, rows)


def _keeping(models: list[dict[str, Any]]) -> list[str]:
    head = ["model", "tokens", "probes", "denser heads", "KV bytes", "following", "counted answers", "seconds"]
    rows = []
    for name, tokens, each in _lengths(models, "full", "default"):
        for label, words in _LABELS.items():
            if "denser" in (one := each.get(label, {})):
                counted = ", ".join(f"{kind} {count}" for kind, count in (one["counted"] or {}).items())
                following = _over(one["following"], each["full"]["following"])
                heads = f"{len(one['denser'])} of {one['heads']}"
                rows.append(
                    [name, tokens, words, heads, f"{one['kv_share']:.1%}", following, counted, f"{one['seconds']:.0f}"]
                )
    return _table("What the cache keeps, and the 256 tokens that follow", head, rows)


def _answers(models: list[dict[str, Any]]) -> list[str]:
    head = ["model", "tokens", "method", "KV bytes", "prefix", "preamble", "late", "worst task"]
    rows = []
    for name, tokens, each in _lengths(models):
        full = each.get("full", {}).get("right")
        for label, words in {"full": "full attention", **_LABELS}.items():
            if "right" in each.get(label, {}):
                right = each[label]["right"]
                means = [f"{np.mean(list(right[protocol].values())):.1%}" for protocol in right]
                rows.append([name, tokens, words, f"{each[label]['kv_share']:.1%}", *means, _worst(right, full)])
    return _table(
        "Right answers, mean over tasks; the worst task's difference from full attention in points", head, rows
    )


def _worst(right: dict[str, dict[str, float]], full: dict[str, dict[str, float]] | None) -> str:
    """The task that loses most against full attention, in points; nothing where that is not known."""
    if full is None or right is full:
        return ""
    least, where = min((right[p][task] - full[p][task], f"{p} {task}") for p in right for task in right[p])
    return f"{100 * least:+.0f} ({where})"


def _draws(models: list[dict[str, Any]]) -> list[str]:
    rows = []
    for name, tokens, each in _lengths(models, "draws"):
        shares = np.array(each["draws"])
        spread = np.abs(shares / shares.mean() - 1).max()
        rows.append([name, tokens, ", ".join(f"{share:.1%}" for share in shares), f"{spread:.0%}"])
    return _table("Kept share over draws of calibration texts", ["model", "tokens", "draws", "largest deviation"], rows)


def _estimates(records: list[dict[str, Any]]) -> list[str]:
    """What each estimate takes to stay within the tolerance on calibration texts, and what it wins back on others."""
    head = ["estimate", *(f"{each['model']}, {tokens:,}" for each in records for tokens in _tokens(each))]
    rows: dict[str, list[str]] = {}
    for record in records:
        for row in record["rows"]:
            losses, shares = row["losses"], row["attended"]
            won = (losses["row0"] - losses["chosen"]) / max(losses["row0"] - losses["full"], 1e-9)
            cell = f"{len(row['heads'])}; {100 * (shares['chosen'] - shares['row0']):+.1f}; {won:.0%}"
            rows.setdefault(_label(row), []).append(cell)
    title = "How blocks are estimated: heads that fetch; points of attended share beyond row 0; won back on other text"
    return _table(title, head, [[label, *cells] for label, cells in rows.items()])


def _tokens(record: dict[str, Any]) -> list[int]:
    return list(dict.fromkeys(row["tokens"] for row in record["rows"]))


def _label(row: dict[str, Any]) -> str:
    names = ("fetch", "fetch_stride", "antidiagonals")
    return ", ".join(f"{name} {row[name]}" for name in names if name in row)


def _curve(record: dict[str, Any]) -> list[str]:
    """Every point of a model's two pictures."""
    head = ["method", "attended share", "inside, over full attention's", "KV bytes", "late answers"]
    rows = []
    for point in record["points"]:
        read = [""] * 2
        if "inside" in point:
            read = [f"{point['attended_share']:.1%}", _over(point["inside"], point["inside_full"])]
        kept = [f"{point['kv_share']:.1%}", f"{point['late']:.1%}"] if "late" in point else [""] * 2
        rows.append([point["label"], *read, *kept])
    what = f"{record['tokens']:,} tokens, {record['texts']} texts, {record['questions']} questions, {record['device']}"
    return _table(f"{record['curves']}, {what}: what methods cost and lose", head, rows)
