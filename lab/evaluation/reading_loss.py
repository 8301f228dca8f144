"""Reading: losses inside documents whose last third repeats passages and facts of the first half, by attended share.

`python -m tca_jax.lab.evaluation.reading_loss MODEL --out FILE` appends a record for each document and method, and
prints the table of all records in FILE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
import typer

import tca_jax
from tca_jax.engine.lm import LM
from tca_jax.lab.evaluation import sticks
from tca_jax.lab.evaluation.late_documents import RepeatingDocument, repeating_document
from tca_jax.lab.evaluation.sticks import Record

STICK = "reading_loss"
METHODS = "full,streaming,minference,flexprefill,xattention"
_HEADER = ["method", "documents", "attended pairs", "plain loss [95%]", "far copies, nats", "far facts, nats"]


def measure(lm: LM, document: RepeatingDocument) -> Record:
    """Mean losses in nats of plain tokens, far copies and far facts, and the attended share."""
    scores = tca_jax.score(lm, document.ids)
    plain, copy, fact = (document.weights @ -scores.logprobs[0]).tolist()
    return {"plain": plain, "copy": copy, "fact": fact, "attended": float(scores.attended_share[0])}


def table(records: Sequence[Record]) -> str:
    """Markdown tables, one for each model, device and length, of documents that full attention has read, too."""

    def cells(found: list[Record], methods: sticks.Methods) -> list[str]:
        full = {record["seed"]: record["plain"] for record in methods.get(("full", None), ())}
        of_method = [record for record in found if record["seed"] in full]
        if not of_method:
            return []
        base = [full[record["seed"]] for record in of_method]
        plain, low, high = (x - 1 for x in sticks.interval([record["plain"] for record in of_method], base))
        attended, *far = (np.mean([record[name] for record in of_method]) for name in ("attended", "copy", "fact"))
        ratio = f"{plain:+.1%} [{low:+.1%}, {high:+.1%}]"
        return [str(len(of_method)), f"{attended:.1%}", ratio, *(f"{nats:.2f}" for nats in far)]

    return sticks.titled_tables(records, _HEADER, cells)


def main(
    model: sticks.ModelArgument,
    out: sticks.OutOption,
    methods: sticks.MethodsOption = METHODS,
    profile: sticks.ProfileOption = None,
    tokens: sticks.TokensOption = 8_192,
    documents: Annotated[int, typer.Option(min=1)] = 8,
    texts: sticks.TextsOption = None,
) -> None:
    """Measures losses inside documents under methods that read sparsely."""
    lm = tca_jax.load(model)
    named = list(sticks.named_methods(lm, methods, [None], sticks.parse_profiles(profile), tokens))

    def records(seed: int) -> Iterator[Record]:
        document = repeating_document(lm, seed, tokens, folder=texts)
        for method in named:
            yield method.record(**measure(method.lm, document))

    sticks.run(STICK, lm, out, tokens, range(documents), records, table)


if __name__ == "__main__":
    typer.run(main)
