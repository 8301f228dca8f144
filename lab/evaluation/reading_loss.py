"""Reading: losses inside documents whose last third repeats passages and facts of the first half, by attended share.

`python -m tca_jax.lab.evaluation.reading_loss MODEL --out FILE` appends a record for each document and method, and
prints the table of all records in FILE.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

import tca_jax
from tca_jax.engine.lm import LM
from tca_jax.lab.evaluation.by_layers import read_losses
from tca_jax.lab.evaluation.late_documents import RepeatingDocument, repeating_document
from tca_jax.lab.evaluation.method_specs import parse_labels
from tca_jax.lab.evaluation.sticks import (
    MethodsOption,
    ModelArgument,
    OutOption,
    ProfileOption,
    Record,
    SecondsOption,
    TextsOption,
    TokensOption,
    grouped,
    interval,
    label,
    markdown,
    mean,
    named_methods,
    parse_profiles,
    run,
)

STICK = "reading_loss"
METHODS = "full,streaming,minference,flexprefill,xattention"
_HEADER = ["method", "documents", "attended pairs", "plain loss [95%]", "far copies, nats", "far facts, nats"]


def measure(lm: LM, document: RepeatingDocument) -> Record:
    """Mean losses in nats of plain tokens, far copies and far facts, and the attended share."""
    losses, attended = read_losses(lm, document.ids)
    plain, copy, fact = (document.weights @ losses).tolist()
    return {"plain": plain, "copy": copy, "fact": fact, "attended": attended}


def table(records: Sequence[Record]) -> str:
    """Markdown tables, one for each model, device and length, of documents that full attention has read, too."""
    parts = []
    for (model, device, tokens), methods in grouped(records).items():
        full = {record["seed"]: record["plain"] for record in methods.get(("full", None), ())}
        rows = []
        for (method, share), found in methods.items():
            of_method = [record for record in found if record["seed"] in full]
            if not of_method:
                continue
            base = [full[record["seed"]] for record in of_method]
            plain, low, high = (x - 1 for x in interval([record["plain"] for record in of_method], base))
            ratio = f"{plain:+.1%} [{low:+.1%}, {high:+.1%}]"
            far = [f"{mean(of_method, name):.2f}" for name in ("copy", "fact")]
            rows.append([label(method, share), str(len(of_method)), f"{mean(of_method, 'attended'):.1%}", ratio, *far])
        parts.append(f"{model}, {tokens:,} tokens, {device}.\n\n{markdown(_HEADER, rows)}")
    return "\n\n".join(parts)


def main(
    model: ModelArgument,
    out: OutOption,
    methods: MethodsOption = METHODS,
    profile: ProfileOption = None,
    tokens: TokensOption = 8_192,
    documents: Annotated[int, typer.Option(min=1)] = 8,
    texts: TextsOption = None,
    seconds: SecondsOption = float("inf"),
) -> None:
    """Measures losses inside documents under methods that read sparsely."""
    until, lm = time.monotonic() + seconds, tca_jax.load(model)
    named = list(named_methods(lm, parse_labels(methods), [None], parse_profiles(profile), tokens))

    def records(seed: int) -> Iterator[Record]:
        document = repeating_document(lm, seed, tokens, folder=texts)
        for method, share, under in named:
            yield {"method": method, "share": share} | measure(under, document)

    run(STICK, lm, out, tokens, range(documents), records, table, until=until)


if __name__ == "__main__":
    typer.run(main)
