"""Reading: losses inside documents whose last third repeats passages and facts of the first half, by attended share.

`python -m tca_jax.lab.evaluation.reading_loss MODEL --out FILE` appends a record for each document and method, and
prints the table of all records in FILE.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import tca_jax
from tca_jax.engine.lm import LM
from tca_jax.lab.evaluation.by_layers import read_losses
from tca_jax.lab.evaluation.late_documents import RepeatingDocument, repeating_document
from tca_jax.lab.evaluation.method_specs import parse_labels
from tca_jax.lab.evaluation.sticks import (
    Record,
    append,
    device_name,
    grouped,
    interval,
    markdown,
    named_methods,
    parse_profiles,
    read_records,
)

STICK = "reading_loss"
METHODS = ("full", "streaming", "minference", "flexprefill", "xattention")
_LOSSES = ("plain", "copy", "fact")


def measure(lm: LM, document: RepeatingDocument) -> Record:
    """Mean losses in nats of plain tokens, far copies and far facts, and the attended share."""
    losses, attended = read_losses(lm, document.ids)
    return dict(zip(_LOSSES, (document.weights @ losses).tolist(), strict=True)) | {"attended": attended}


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
            rows.append(
                [
                    method if share is None else f"{method} at {share:.0%}",
                    str(len(of_method)),
                    f"{np.mean([record['attended'] for record in of_method]):.1%}",
                    f"{plain:+.1%} [{low:+.1%}, {high:+.1%}]",
                    *(f"{np.mean([record[name] for record in of_method]):.2f}" for name in ("copy", "fact")),
                ]
            )
        header = ("method", "documents", "attended pairs", "plain loss [95%]", "far copies, nats", "far facts, nats")
        parts.append(f"{model}, {tokens:,} tokens, {device}.\n\n{markdown(header, rows)}")
    return "\n\n".join(parts)


def main(
    model: Annotated[str, typer.Argument(help="As for tca_jax.load.")],
    out: Annotated[Path, typer.Option(help="File that records are appended to.")],
    methods: Annotated[str, typer.Option(help="Names of methods, by commas; with their defaults.")] = ",".join(METHODS),
    profile: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of a TCA profile; repeatable.")] = None,
    tokens: Annotated[int, typer.Option(min=1)] = 8_192,
    documents: Annotated[int, typer.Option(min=1)] = 8,
    texts: Annotated[Path | None, typer.Option(help="Folder of `lab.evaluation.texts`.")] = None,
    seconds: Annotated[float, typer.Option(help="No document is begun after so many seconds.")] = float("inf"),
) -> None:
    """Measures losses inside documents under methods that read sparsely."""
    start, lm = time.monotonic(), tca_jax.load(model)
    names = parse_labels(methods)
    named = list(named_methods(lm, names, [None], parse_profiles(profile or []), tokens))
    for seed in range(documents):
        if time.monotonic() - start > seconds:
            break
        document = repeating_document(lm, seed, tokens, folder=texts)
        common = {"stick": STICK, "model": lm.name, "tokens": tokens, "seed": seed, "device": device_name()}
        for method, share, under in named:
            append(out, common | {"method": method, "share": share} | measure(under, document))
        print(f"document {seed} after {time.monotonic() - start:.0f} s", flush=True)
    print(table(read_records([out], STICK)))


if __name__ == "__main__":
    typer.run(main)
