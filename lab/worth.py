"""Maps of predicted worth and of other targets: their correlation on texts that were not fitted, and shares of heads.

`python -m tca_jax.lab.worth MODEL --to FOLDER` fits them. `late_facts` and `reading_loss` of `lab.evaluation` measure
what caches keep and prompts read by them, under a profile of `tca_jax.calibrate`.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import tca_jax
from tca_jax.calibration.predicted_worth import fit_worth, pack_texts
from tca_jax.calibration.probes import probed_texts
from tca_jax.calibration.repetition import CHUNK, TARGETS
from tca_jax.calibration.worth_profile import WorthProfile, measured_tables
from tca_jax.cli.profiles import print_table
from tca_jax.lab.evaluation import sticks
from tca_jax.lab.evaluation.late_documents import calibration_texts
from tca_jax.progress import progress


def main(
    model: sticks.ModelArgument,
    to: Annotated[Path, typer.Option(help="Folder that gets an .npz of each target.")],
    count: Annotated[int, typer.Option(min=2, help="Texts; half of them are fitted.")] = 8,
    tokens: sticks.TokensOption = 8_192,
    texts: sticks.TextsOption = None,
) -> None:
    """Fits maps on texts of the calibration half; prints their correlation, shares of heads, and measured tables."""
    lm = tca_jax.load(model)
    packed = pack_texts(lm, calibration_texts(lm, count, tokens, texts), count, tokens)
    with progress(log=True) as report:
        chunk = min(CHUNK, tokens // 2)
        found = fit_worth(lm, packed, targets=TARGETS, chunk=chunk, progress=report)
    to.mkdir(parents=True, exist_ok=True)
    for name, maps in found.items():
        np.savez(to / f"{name}.npz", **dataclasses.asdict(maps))
        shares = " ".join(f"{share:.2f}" for share in np.sort(maps.shares.ravel())[::-1])
        print(f"{name}: correlation {np.nanmean(maps.correlation):.3f}; shares of heads at 20% in all: {shares}")
    profile = WorthProfile(found["worth"], 1.0, 1.0, (), (), lm.fingerprint, lm.name)
    with progress(log=True) as report:
        tables = measured_tables(lm, profile, probed_texts(lm, packed[count // 2 :]), report)
    for table in tables:
        print_table(table, math.nan)


if __name__ == "__main__":
    typer.run(main)
