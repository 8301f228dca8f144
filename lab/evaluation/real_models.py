"""Pages and picture of the measuring sticks, from their records.

`python -m tca_jax.lab.evaluation.real_models lab/results/real-models.jsonl.xz` writes `lab/results/real-models.md`,
`lab/results/first-answer.md` and `docs/images/real-models.png`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from tca_jax.lab.evaluation import first_answer, late_facts, reading_loss
from tca_jax.lab.evaluation.sticks import Record, grouped, read_records
from tca_jax.lab.plots import curves, figures

_DRAWN = ("qwen-1.5b.gguf", 8_192)
_COMMAND = "python -m tca_jax.lab.evaluation"


def real_models_page(records: Sequence[Path]) -> str:
    """Sticks 1 and 2."""
    return f"""# Real models

`{_COMMAND}.real_models` writes this page from [real-models.jsonl.xz](real-models.jsonl.xz), a record for each
document and method. The models are the GGUF files that `python -m tca_jax.lab.models fetch` gets. Profiles have a
window of 1,024 and were calibrated with the default probes on 4 texts of 8,192 tokens (SmolLM2: 7,680) of the
calibration half of the texts; documents are of the test half. Other methods have their own defaults; `at 10%` is the
share of full attention's bytes that was asked for.

## Late facts

`{_COMMAND}.late_facts MODEL --out FILE --profile NAME=FOLDER`

A document of source code or of a manual hides 12 facts of six kinds and is read without the questions. These go
through the chat template and end with the answer's first words (late-prefix). A fact is right if every token of its
value is the likeliest; 4 passages are asked for word for word. Facts and copies are relative to full attention.
`bytes` are those of the document's cache, `kept` is the share of its tokens. What a method keeps is a mask: its
window does not move while a question is asked.

{late_facts.table(read_records(records, late_facts.STICK))}

## Reading

`{_COMMAND}.reading_loss MODEL --out FILE --profile NAME=FOLDER`

The last third of a document repeats 8 passages of 64 tokens and 8 facts of its first half. Plain loss is relative to
full attention's.

{reading_loss.table(read_records(records, reading_loss.STICK))}
"""


def first_answer_page(records: Sequence[Path]) -> str:
    """Sticks 4 and 5."""
    return f"""# First answers and calibration

`{_COMMAND}.real_models` writes this page from [real-models.jsonl.xz](real-models.jsonl.xz). All figures are seconds
unless a column says otherwise.

## First answers

`{_COMMAND}.first_answer answer MODEL --out FILE --profile NAME=FOLDER`

Each row is a process of its own with an empty compilation cache. On GPUs three processes ran at once, beside other
work; for TCA at 31,000 tokens and `kept25` at 16,000 (1.5B) and for TCA on SmolLM2, fifteen, which doubles the seconds:
`default` at 16,000 tokens took 104 beside them. `default` and `kept25` are TCA profiles. The decode program compiles in
a thread beside the prefill program, so its seconds are not all part of the first token's.

{first_answer.table(read_records(records, first_answer.STICK))}

## Calibration

`{_COMMAND}.first_answer calibrate MODEL --to FOLDER --out FILE`

The settings of a model run in one process, in the order of the rows; the first one compiles for all. Two other
processes shared the GPU.

{first_answer.calibration_table(read_records(records, first_answer.CALIBRATION))}
"""


def draw(records: Sequence[Record], path: Path, drawn: tuple[str, int] = _DRAWN) -> Path:
    """Facts kept against bytes, a line for each method and a star for each profile; of a model and a length."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for (model, _, tokens), methods in grouped(records).items():
        for (method, _), of_method in methods.items():
            if (model, tokens) == drawn and method != "full":
                share = float(np.mean([record["kv_share"] for record in of_method]))
                lines.setdefault(method, []).append((share, late_facts.facts(of_method)[0]))
    figure = Figure(figsize=(8, 4.5), dpi=figures.DPI, layout="constrained")
    axes = figure.subplots()
    for color, (method, points) in zip(figures.palette(len(lines)), sorted(lines.items()), strict=True):
        star = method.startswith("tca")
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, marker="*" if star else "o", markersize=13 if star else 4, color=color, label=method)
    axes.set(xlabel="bytes of the KV cache over full attention's", ylabel="facts that full attention answers")
    axes.set_title(f"{drawn[0]}, {drawn[1]:,} tokens: questions after the document was read", fontsize=11)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set(xlim=(0, 0.95), ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    curves.label_ends(axes)
    return figures.write(figure, path)


def main(
    records: Annotated[list[Path], typer.Argument(help="Files of records.")],
    root: Annotated[Path, typer.Option(help="The checkout.")] = Path(),
) -> None:
    """Writes the pages and the picture."""
    for name, text in (("real-models.md", real_models_page(records)), ("first-answer.md", first_answer_page(records))):
        (root / "lab/results" / name).write_text(text, "utf-8")
    draw(read_records(records, late_facts.STICK), root / "docs/images/real-models.png")


if __name__ == "__main__":
    typer.run(main)
