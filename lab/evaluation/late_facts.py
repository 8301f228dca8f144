"""Late answers: facts and passages of a document that was read without the questions, and the text that follows it.

`python -m tca_jax.lab.evaluation.late_facts MODEL --out FILE` appends a record for each document and method, and prints
the table of FILE. Questions end with the answer's first words ("late-prefix"); a fact is right if every token of its
value is the likeliest one. A method keeps tokens by a mask (`by_layers`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

import tca_jax
from tca_jax.engine.lm import LM
from tca_jax.lab.by_layers import Answers, ask, read_by, read_full
from tca_jax.lab.equal_bytes import held_share
from tca_jax.lab.evaluation import sticks
from tca_jax.lab.evaluation.late_documents import LateDocument, late_document
from tca_jax.lab.evaluation.method_specs import parse_labels
from tca_jax.lab.evaluation.sticks import Named, Record
from tca_jax.methods.base import ScoredCache

STICK = "late_facts"
METHODS = "full,streaming,snapkv,kvzip,adakv-expected-attention,keydiff"  # duoattention: with a profile
_HEADER = ["method", "documents", "bytes", "kept", "attended pairs", "facts [95%]", "copies [95%]", "following loss"]


def measure(lm: LM, methods: Sequence[Named], document: LateDocument) -> list[Record]:
    """A record of each method, relative to full attention, which is measured first."""
    full = read_full(lm, document.ids)
    reference = ask(lm, read_by(lm.with_method("full"), full), document.rows)
    records = []
    for method in methods:
        read = read_by(method.lm, full)
        found = compared(ask(method.lm, read, document.rows), reference, document)
        scored = isinstance(method.lm.method.cache, ScoredCache)  # its pages have room for prompts that keep more
        share = read.kv_share if scored else held_share(method.lm, len(document.ids))
        records.append(method.record(kv_share=share, kept=read.kept_share, attended=read.attended_share, **found))
    return records


def compared(found: Answers, reference: Answers, document: LateDocument) -> Record:
    """Facts (0 unknown under full attention, 1 lost, 2 right), right tokens of copies, loss of the following text."""
    counted = document.counted > 0
    rows = {kind: [i for i, each in enumerate(document.kinds) if each == kind] for kind in ("fact", "copy", "next")}

    def right(answers: Answers, kind: str) -> list[np.ndarray]:
        return [answers.right[i][counted[i]] for i in rows[kind]]

    def loss(answers: Answers) -> float:
        following = [answers.losses[i][counted[i]].mean() for i in rows["next"]]
        return float(np.mean(following)) if following else math.nan

    facts = zip(right(reference, "fact"), right(found, "fact"), strict=True)
    return {
        "facts": [int(known.all()) + int(known.all() and each.all()) for known, each in facts],
        "copied": int(sum(each.sum() for each in right(found, "copy"))),
        "copied_by_full": int(sum(each.sum() for each in right(reference, "copy"))),
        "next": loss(found),
        "next_by_full": loss(reference),
    }


def facts(records: Sequence[Record]) -> tuple[float, float, float]:
    """Share of the facts known under full attention that are right, with its interval."""
    right = [sum(value == 2 for value in record["facts"]) for record in records]
    return sticks.interval(right, [sum(value > 0 for value in record["facts"]) for record in records])


def table(records: Sequence[Record]) -> str:
    """Markdown tables, one for each model, device and length."""

    def ratio(of_method: Sequence[Record], name: str) -> tuple[float, float, float]:
        return sticks.interval(*([record[each] for record in of_method] for each in (name, f"{name}_by_full")))

    def percent(figure: tuple[float, float, float]) -> str:
        middle, low, high = figure
        return f"{middle:.1%} [{low:.0%}, {high:.0%}]" if np.isfinite(middle) else "none known"

    def cells(of_method: list[Record], methods: sticks.Methods) -> list[str]:
        shares = (np.mean([record[name] for record in of_method]) for name in ("kv_share", "kept", "attended"))
        right = [percent(facts(of_method)), percent(ratio(of_method, "copied"))]
        more = ratio(of_method, "next")[0] - 1
        following = f"{more:+.1%}" if np.isfinite(more) else "-"
        return [str(len(of_method)), *(f"{share:.1%}" for share in shares), *right, following]

    def note(methods: sticks.Methods) -> str:
        known = {record["seed"]: record["facts"] for of_method in methods.values() for record in of_method}
        asked = [value for of_document in known.values() for value in of_document]
        return f": full attention answers {sum(value > 0 for value in asked)} of {len(asked)} facts"

    return sticks.titled_tables(records, _HEADER, cells, note)


def main(
    model: sticks.ModelArgument,
    out: sticks.OutOption,
    methods: sticks.MethodsOption = METHODS,
    shares: Annotated[str, typer.Option(help="Shares of full attention's bytes, by commas.")] = "0.1,0.2,0.3,0.5",
    profile: sticks.ProfileOption = None,
    tokens: sticks.TokensOption = 8_192,
    documents: Annotated[int, typer.Option(min=1, help="Documents of 12 facts and 4 passages each.")] = 20,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first document.")] = 0,
    texts: sticks.TextsOption = None,
) -> None:
    """Measures late answers of methods, by masks."""
    lm = tca_jax.load(model)
    wanted = [float(share) for share in shares.split(",")]
    named = list(sticks.named_methods(lm, parse_labels(methods), wanted, sticks.parse_profiles(profile), tokens))

    def records(seed: int) -> list[Record]:
        return measure(lm, named, late_document(lm, seed, tokens, folder=texts))

    sticks.run(STICK, lm, out, tokens, range(first, first + documents), records, table)


if __name__ == "__main__":
    typer.run(main)
