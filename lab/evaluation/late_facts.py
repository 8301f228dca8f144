"""Late answers: facts and passages of a document that was read without the questions, and the text that follows it.

`python -m tca_jax.lab.evaluation.late_facts MODEL --out FILE` appends a record for each document and method, and prints
the table of FILE. Questions end with the answer's first words ("late-prefix"); a fact is right if every token of it is
the likeliest one; of a passage the tokens count that get more than half of the probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

import tca_jax
from tca_jax.engine.contexts import Context
from tca_jax.engine.lm import LM
from tca_jax.engine.score import score_answers
from tca_jax.lab.evaluation import sticks
from tca_jax.lab.evaluation.late_documents import LateDocument, late_document
from tca_jax.lab.evaluation.sticks import Named, Record
from tca_jax.methods.full import BASELINE

STICK = "late_facts"
METHODS = "full,streaming,snapkv,kvzip,adakv-expected-attention,keydiff"  # duoattention: with a profile
_HEADER = ["method", "documents", "bytes", "kept", "attended pairs", "facts [95%]", "copies [95%]", "following loss"]


def measure(lm: LM, methods: Sequence[Named], document: LateDocument) -> list[Record]:
    """A record of each method, relative to full attention, which is measured first."""
    full = lm.with_method(BASELINE)
    reference, records = answers(full, tca_jax.prefill(full, document.ids), document), []
    for method in methods:
        context = tca_jax.prefill(method.lm, document.ids)
        found, stats = compared(answers(method.lm, context, document), reference), context.stats
        share = stats.kv_cache_bytes / stats.full_kv_cache_bytes
        costs = {"kv_share": share, "kept": stats.kept_share, "attended": stats.attended_share}
        records.append(method.record(**costs, **found))
    return records


def answers(lm: LM, context: Context, document: LateDocument) -> Record:
    """Right facts, likely tokens of passages, and loss of the following text, each teacher-forced after a document."""
    kinds, questions, right = zip(*document.asked, strict=True)
    found = score_answers(lm, questions, [[answer] for answer in right], context=context)
    facts = [flag for kind, (flag,) in zip(kinds, found.greedy, strict=True) if kind == "fact"]
    copied = [p for kind, (p,) in zip(kinds, found.logprobs, strict=True) if kind == "copy"]
    copies = sum(int((p > -np.log(2)).sum()) for p in copied)
    return {"facts": facts, "copied": copies, "next": float(-found.logprobs[kinds.index("next")][0].mean())}


def compared(found: Record, reference: Record) -> Record:
    """Answers beside full attention's; its facts are 0 (unknown under full attention), 1 (lost) or 2 (right)."""
    pairs = zip(reference["facts"], found["facts"], strict=True)
    by_full = {"copied_by_full": reference["copied"], "next_by_full": reference["next"]}
    return {**found, "facts": [int(known) + int(known and right) for known, right in pairs], **by_full}


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
        return [str(len(of_method)), *(f"{share:.1%}" for share in shares), *right, f"{more:+.1%}"]

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
    texts: sticks.TextsOption = None,
) -> None:
    """Measures late answers of methods."""
    lm = tca_jax.load(model)
    wanted = [float(share) for share in shares.split(",")]
    named = list(sticks.named_methods(lm, methods, wanted, sticks.parse_profiles(profile), tokens))

    def records(seed: int) -> list[Record]:
        return measure(lm, named, late_document(lm, seed, tokens, folder=texts))

    sticks.run(STICK, lm, out, tokens, range(documents), records, table)


if __name__ == "__main__":
    typer.run(main)
