"""The first answer of a fresh process: seconds to load, to compile, to the first token.

`python -m tca_jax.lab.evaluation.first_answer MODEL --out FILE` starts a process for each row, with an empty
compilation cache.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import jax
import typer

import tca_jax
from tca_jax.engine.lm import LM
from tca_jax.lab.benchmarks.common import Compilations, append, markdown
from tca_jax.lab.evaluation import sticks
from tca_jax.lab.evaluation.late_documents import calibration_texts
from tca_jax.lab.evaluation.sticks import Record

STICK = "first_answer"


def measure(
    model: str, profile: Path | None, other: Path | None, tokens: int, second: int, texts: Path | None
) -> Record:
    """In this process: load, an answer to `tokens`, one to `second` tokens, one under the `other` profile."""
    compilations, started = Compilations(), time.monotonic()
    lm = tca_jax.load(model, profile=profile)
    record: Record = {"model": lm.name, "load": time.monotonic() - started, "device": jax.devices()[0].device_kind}
    (ids,) = calibration_texts(lm, 1, max(tokens, second), texts)
    record |= _first(lm, ids[:tokens], compilations, "")
    record |= _first(lm, ids[:second], compilations, "second_length_")
    if other is not None:
        lm = lm.with_profile(tca_jax.Profile.load(other))
        record |= _first(lm, ids[:tokens], compilations, "second_profile_")
    return record | {"programs": compilations.count}


def _first(lm: LM, ids: Sequence[int], compilations: Compilations, prefix: str) -> Record:
    """Seconds to the first token, and of compiling."""
    before, count, start = dict(compilations.by_program), compilations.count, time.monotonic()
    stream = tca_jax.stream(lm, list(ids), max_new_tokens=16)
    next(iter(stream))
    record: Record = {"first_token": time.monotonic() - start}
    for _ in stream:
        pass
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in compilations.by_program.items()}
    names = {"prefill": "read", "decode": "decode"}  # of programs
    parts = {part: sum(s for program, s in spent.items() if name in program) for part, name in names.items()}
    parts["other"] = sum(spent.values()) - sum(parts.values())
    record |= {f"compile_{part}": seconds for part, seconds in parts.items()}
    record["programs"] = compilations.count - count
    return {f"{prefix}{name}": figure for name, figure in record.items()}


def main(
    model: sticks.ModelArgument,
    out: sticks.OutOption,
    profile: sticks.ProfileOption = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths, by commas.")] = "2000,16000,31000",
    texts: sticks.TextsOption = None,
) -> None:
    """Times first answers of full attention and of the profiles, each in a process of its own."""
    profiles = list(sticks.parse_profiles(profile).items())
    following = {name: folder for (name, _), (_, folder) in zip(profiles, profiles[1:] + profiles[:1], strict=True)}
    tokens = [int(length) for length in lengths.split(",")]
    for i, length in enumerate(tokens):
        second = tokens[(i + 1) % len(tokens)] if len(tokens) > 1 else length // 2
        for name, folder in [("full", None), *profiles]:
            other = following[name] if folder and len(profiles) > 1 else None
            with tempfile.TemporaryDirectory() as cache:
                os.environ |= {"JAX_COMPILATION_CACHE_DIR": cache, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    found = process.submit(measure, model, folder, other, length, second, texts)
            if error := found.exception():
                print(f"{name} at {length} failed: {error}", flush=True)
                continue
            common = {"stick": STICK, "tokens": length, "method": name, "share": None, "seed": 0, "second": second}
            record = common | found.result()
            append(out, record)
            print(json.dumps(record), flush=True)
    print(table(sticks.records_by_stick([out])[STICK]))


def table(records: Sequence[Record]) -> str:
    """A row for each model, length and profile; seconds."""
    header = (
        "model, device", "prompt", "method", "load", "first token", "prefill, decode, other compiled", "programs",
        "second length: first token, programs", "second profile: first token, programs",
    )  # fmt: skip
    rows = []
    cells = (
        "{model}, {device}", "{tokens:,}", "{method}", "{load:.1f}", "{first_token:.1f}",
        "{compile_prefill:.1f}; {compile_decode:.1f}; {compile_other:.1f}", "{programs}",
    )  # fmt: skip
    for record in sorted(records, key=lambda r: (r["model"], r["device"], r["tokens"], r["method"])):
        later = [
            f"{record[f'{p}_first_token']:.1f}; {record[f'{p}_programs']}" if f"{p}_first_token" in record else ""
            for p in ("second_length", "second_profile")
        ]
        rows.append([*(cell.format(**record) for cell in cells), *later])
    return markdown(header, rows)


if __name__ == "__main__":
    typer.run(main)
