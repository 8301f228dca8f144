"""Late answers: facts and passages of a document that was read without the questions, and the text that follows it.

`python -m tca_jax.lab.evaluation.late_facts MODEL --out FILE` appends a record for each document and method, and prints
the table of all records in FILE. Questions go through the chat template and end with the answer's first words
("late-prefix"); a fact is right if every token of its value is the likeliest one, which greedy decoding would give.
A method keeps tokens by a mask (`by_layers`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer

import tca_jax
from tca_jax.engine.lm import LM
from tca_jax.lab.evaluation.by_layers import Answers, FullRead, ask, read_by, read_full, repetition_scores
from tca_jax.lab.evaluation.late_documents import LateDocument, late_document
from tca_jax.lab.evaluation.method_specs import parse_labels
from tca_jax.lab.evaluation.sticks import (
    MethodsOption,
    ModelArgument,
    Named,
    OutOption,
    ProfileOption,
    Record,
    SecondsOption,
    TextsOption,
    TokensOption,
    grouped,
    interval,
    kv_share,
    label,
    markdown,
    mean,
    named_methods,
    parse_profiles,
    run,
)

STICK = "late_facts"
METHODS = "full,streaming,snapkv,kvzip,adakv-expected-attention,keydiff"  # duoattention: with a profile
_HEADER = ["method", "documents", "bytes", "kept", "attended pairs", "facts [95%]", "copies [95%]", "following loss"]


def measure(lm: LM, methods: Sequence[Named], document: LateDocument) -> list[Record]:
    """A record of each method, relative to full attention, which is measured first."""
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
    rows = {kind: [i for i, each in enumerate(document.kinds) if each == kind] for kind in ("fact", "copy", "next")}

    def right(answers: Answers, kind: str) -> list[np.ndarray]:
        return [answers.right[i][counted[i]] for i in rows[kind]]

    def loss(answers: Answers) -> float:
        (following,) = rows["next"]
        return float(answers.losses[following][counted[following]].mean())

    facts = zip(right(reference, "fact"), right(found, "fact"), strict=True)
    return {
        "kept": read.kept_share,
        "attended": read.attended_share,
        "facts": [int(k.all()) + int(k.all() and r.all()) for k, r in facts],  # 0 unknown, 1 lost, 2 right
        "copied": int(sum(each.sum() for each in right(found, "copy"))),
        "copied_by_full": int(sum(each.sum() for each in right(reference, "copy"))),
        "next": loss(found),
        "next_by_full": loss(reference),
    }


def facts(records: Sequence[Record]) -> tuple[float, float, float]:
    """Share of the facts known under full attention that are right, with its interval."""
    right = [sum(value == 2 for value in record["facts"]) for record in records]
    return interval(right, [sum(value > 0 for value in record["facts"]) for record in records])


def copies(records: Sequence[Record]) -> tuple[float, float, float]:
    """Right tokens of passages over full attention's, with the interval."""
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
                label(method, share),
                str(len(of_method)),
                *(f"{mean(of_method, name):.1%}" for name in ("kv_share", "kept", "attended")),
                *(_percent(figure(of_method)) for figure in (facts, copies)),
                f"{following(of_method):+.1%}",
            ]
            for (method, share), of_method in methods.items()
        ]
        answered = f"full attention answers {sum(value > 0 for value in asked)} of {len(asked)} facts"
        parts.append(f"{model}, {tokens:,} tokens, {device}: {answered}.\n\n{markdown(_HEADER, rows)}")
    return "\n\n".join(parts)


def _percent(figure: tuple[float, float, float]) -> str:
    middle, low, high = figure
    return f"{middle:.1%} [{low:.0%}, {high:.0%}]" if np.isfinite(middle) else "none known"


def main(
    model: ModelArgument,
    out: OutOption,
    methods: MethodsOption = METHODS,
    shares: Annotated[str, typer.Option(help="Shares of full attention's bytes, by commas.")] = "0.1,0.2,0.3,0.5",
    profile: ProfileOption = None,
    tokens: TokensOption = 8_192,
    documents: Annotated[int, typer.Option(min=1, help="Documents of 12 facts and 4 passages each.")] = 20,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first document.")] = 0,
    texts: TextsOption = None,
    seconds: SecondsOption = float("inf"),
) -> None:
    """Measures late answers of methods, by masks."""
    until, lm = time.monotonic() + seconds, tca_jax.load(model)
    wanted = [float(share) for share in shares.split(",")]
    named = list(named_methods(lm, parse_labels(methods), wanted, parse_profiles(profile), tokens))
    of_bytes = {each[:2]: kv_share(each.lm, tokens) for each in named}

    def records(seed: int) -> list[Record]:
        found = measure(lm, named, late_document(lm, seed, tokens, folder=texts))
        return [record | {"kv_share": of_bytes[record["method"], record["share"]]} for record in found]

    run(STICK, lm, out, tokens, range(first, first + documents), records, table, until=until)


if __name__ == "__main__":
    typer.run(main)
