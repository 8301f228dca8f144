"""Late answers: facts and passages of a document that was read without the questions, and the text that follows it.

`python -m tca_jax.lab.evaluation.late_facts MODEL --out FILE` appends a record for each document and method, and prints
the table of all records in FILE. Questions go through the chat template and end with the answer's first words
("late-prefix"); a fact is right if every token of its value is the likeliest one, which greedy decoding would give.
What methods keep is a mask (`by_layers`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import tca_jax
from tca_jax.engine.lm import LM
from tca_jax.lab.evaluation.by_layers import Answers, FullRead, ask, read_by, read_full, repetition_scores
from tca_jax.lab.evaluation.late_documents import LateDocument, late_document
from tca_jax.lab.evaluation.method_specs import parse_labels
from tca_jax.lab.evaluation.sticks import (
    Named,
    Record,
    append,
    device_name,
    grouped,
    interval,
    kv_share,
    markdown,
    named_methods,
    parse_profiles,
    read_records,
)

STICK = "late_facts"
METHODS = (
    "full",
    "streaming",
    "snapkv",
    "kvzip",
    "adakv-expected-attention",
    "keydiff",
)  # duoattention: with a profile
SHARES = (0.1, 0.2, 0.3, 0.5)


def measure(lm: LM, methods: Sequence[Named], document: LateDocument) -> list[Record]:
    """A record of each method; full attention is measured first, since the others are relative to it."""
    full = read_full(lm, document.ids)
    scores: dict[Any, Any] = {None: None}  # by repetition
    reference = ask(lm, read_by(lm.with_method("full"), full), document.rows)
    records = []
    for method, share, under in methods:
        repetition = getattr(under.method.cache, "repetition", None)
        if repetition not in scores:
            scores[repetition] = repetition_scores(under, full)
        found = _one(under, full, scores[repetition], document, reference)
        records.append({"method": method, "share": share} | found)
    return records


def _one(lm: LM, full: FullRead, scores: Any, document: LateDocument, reference: Answers) -> Record:
    read = read_by(lm, full, scores)
    found, counted = ask(lm, read, document.rows), document.counted > 0
    figures: Record = {"kept": read.kept_share, "attended": read.attended_share}
    known = [bool(reference.right[i][counted[i]].all()) for i in _rows(document, "fact")]
    right = [bool(found.right[i][counted[i]].all()) for i in _rows(document, "fact")]
    figures["facts"] = [int(k) + int(k and r) for k, r in zip(known, right, strict=True)]  # 0 unknown, 1 lost, 2 right
    copies = _rows(document, "copy")
    figures["copied"] = int(sum(found.right[i][counted[i]].sum() for i in copies))
    figures["copied_by_full"] = int(sum(reference.right[i][counted[i]].sum() for i in copies))
    (following,) = _rows(document, "next")
    figures["next"] = float(found.losses[following][counted[following]].mean())
    figures["next_by_full"] = float(reference.losses[following][counted[following]].mean())
    return figures


def _rows(document: LateDocument, kind: str) -> list[int]:
    return [i for i, each in enumerate(document.kinds) if each == kind]


def facts(records: Sequence[Record]) -> tuple[float, float, float]:
    """Share of the facts known under full attention that are right, with its interval."""
    right = [sum(value == 2 for value in record["facts"]) for record in records]
    return interval(right, [sum(value > 0 for value in record["facts"]) for record in records])


def copies(records: Sequence[Record]) -> tuple[float, float, float]:
    """Right tokens of passages over full attention's."""
    return interval([record["copied"] for record in records], [record["copied_by_full"] for record in records])


def following(records: Sequence[Record]) -> float:
    """Loss of the following text over full attention's, minus 1."""
    return interval([record["next"] for record in records], [record["next_by_full"] for record in records])[0] - 1


def table(records: Sequence[Record]) -> str:
    """Markdown tables, one for each model, device and length."""
    parts = []
    for (model, device, tokens), methods in grouped(records).items():
        known = {record["seed"]: record["facts"] for of_method in methods.values() for record in of_method}
        asked = [value for of_document in known.values() for value in of_document]
        rows = [
            [
                method if share is None else f"{method} at {share:.0%}",
                str(len(of_method)),
                f"{np.mean([record['kv_share'] for record in of_method]):.1%}",
                f"{np.mean([record['kept'] for record in of_method]):.1%}",
                f"{np.mean([record['attended'] for record in of_method]):.1%}",
                _percent(facts(of_method)),
                _percent(copies(of_method)),
                f"{following(of_method):+.1%}",
            ]
            for (method, share), of_method in methods.items()
        ]
        header = (
            "method",
            "documents",
            "bytes",
            "kept",
            "attended pairs",
            "facts [95%]",
            "copies [95%]",
            "following loss",
        )
        parts.append(
            f"{model}, {tokens:,} tokens, {device}: full attention answers {sum(value > 0 for value in asked)} of "
            f"{len(asked)} facts.\n\n{markdown(header, rows)}"
        )
    return "\n\n".join(parts)


def _percent(figure: tuple[float, float, float]) -> str:
    middle, low, high = figure
    return f"{middle:.1%} [{low:.0%}, {high:.0%}]" if np.isfinite(middle) else "none known"


def main(
    model: Annotated[str, typer.Argument(help="As for tca_jax.load.")],
    out: Annotated[Path, typer.Option(help="File that records are appended to.")],
    methods: Annotated[str, typer.Option(help="Names of methods, by commas.")] = ",".join(METHODS),
    shares: Annotated[str, typer.Option(help="Shares of full attention's bytes, by commas.")] = ",".join(
        map(str, SHARES)
    ),
    profile: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of a TCA profile; repeatable.")] = None,
    tokens: Annotated[int, typer.Option(min=1)] = 8_192,
    documents: Annotated[int, typer.Option(min=1, help="Documents of 12 facts and 4 passages each.")] = 20,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first document.")] = 0,
    texts: Annotated[Path | None, typer.Option(help="Folder of `lab.evaluation.texts`.")] = None,
    seconds: Annotated[float, typer.Option(help="No document is begun after so many seconds.")] = float("inf"),
) -> None:
    """Measures late answers of methods, by masks."""
    start, lm = time.monotonic(), tca_jax.load(model)
    names = parse_labels(methods)
    named = list(named_methods(lm, names, [float(s) for s in shares.split(",")], parse_profiles(profile or []), tokens))
    of_bytes = {each[:2]: kv_share(each.lm, tokens) for each in named}
    for seed in range(first, first + documents):
        if time.monotonic() - start > seconds:
            break
        document = late_document(lm, seed, tokens, folder=texts)
        common = {"stick": STICK, "model": lm.name, "tokens": tokens, "seed": seed, "device": device_name()}
        for record in measure(lm, named, document):
            append(out, common | record | {"kv_share": of_bytes[record["method"], record["share"]]})
        print(f"document {seed} after {time.monotonic() - start:.0f} s", flush=True)
    print(table(read_records([out], STICK)))


if __name__ == "__main__":
    typer.run(main)
