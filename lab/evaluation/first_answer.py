"""The first answer of a fresh process, and calibration: seconds to load, to compile, to the first token.

`python -m tca_jax.lab.evaluation.first_answer answer MODEL --out FILE` starts a process for each row, with an empty
compilation cache. `... calibrate MODEL --to FOLDER --out FILE` calibrates and saves profiles for the other sticks.
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
from typing import Annotated, Any

import jax
import typer

import tca_jax
from tca_jax.engine.lm import LM
from tca_jax.errors import require
from tca_jax.lab.benchmarks.common import Compilations, markdown, peak_memory
from tca_jax.lab.evaluation import sticks
from tca_jax.lab.evaluation.late_documents import calibration_texts
from tca_jax.lab.evaluation.sticks import Record

STICK, CALIBRATION = "first_answer", "calibration"
app = typer.Typer(help=__doc__, pretty_exceptions_enable=False)


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


@app.command("answer")
def answer(
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
            _add(out, common | found.result())
    print(table(sticks.read_records(out, STICK)))


def _add(out: Path, record: Record) -> None:
    sticks.append(out, record)
    print(json.dumps(record), flush=True)


@app.command("calibrate")
def calibrate(
    model: sticks.ModelArgument,
    to: Annotated[Path, typer.Option(help="Folder that gets a profile for each setting.")],
    out: sticks.OutOption,
    settings: Annotated[str, typer.Option(help="default, kept=SHARE, paper or paper:TAU.")] = "default,kept=0.25,paper",
    count: Annotated[int, typer.Option(min=1, help="Texts, of the calibration half.")] = 8,
    tokens: sticks.TokensOption = 8_192,
    window: Annotated[int, typer.Option(min=1, help="Of the paper's rule.")] = 1_024,
    texts: sticks.TextsOption = None,
) -> None:
    """Calibrates with each setting, in one process; the first one compiles for the others."""
    chosen = {setting: _options(setting, window, count, tokens) for setting in settings.split(",")}
    lm = tca_jax.load(model)
    given = calibration_texts(lm, count, tokens, texts)
    for setting, options in chosen.items():
        compilations, start = Compilations(), time.monotonic()
        profile = tca_jax.calibrate(lm, given, **options)
        seconds = time.monotonic() - start
        compilations.close()
        folder = to / setting.replace("=", "-").replace(":", "-")
        profile.save(folder)
        record = {"stick": CALIBRATION, "model": lm.name, "tokens": tokens, "method": setting, "share": None, "seed": 0}
        figures = {
            "seconds": seconds,
            "compile": sum(compilations.by_program.values()),
            "programs": compilations.count,
            "peak_bytes": peak_memory()[0],
            "profile_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        }
        _add(out, record | figures | {"texts": count, "device": jax.devices()[0].device_kind})
    print(calibration_table(sticks.read_records(out, CALIBRATION)))


def _options(setting: str, window: int, count: int, tokens: int) -> dict[str, Any]:
    """Arguments of `calibrate`."""
    paper, _, tau = setting.partition(":")
    if paper == "paper":
        return {"config": tca_jax.TCAConfig.paper(window=window, **({"tau": float(tau)} if tau else {}))}
    name, _, share = setting.partition("=")
    known = setting == "default" or name == "kept"
    require(known, f"--settings {setting!r}: must be default, kept=SHARE, paper or paper:TAU")
    return {"count": count, "tokens": tokens, **({"kept": float(share)} if share else {})}


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


def calibration_table(records: Sequence[Record]) -> str:
    """A row for each model and setting."""
    header = ("model, device", "texts", "setting", "seconds", "of these compiling", "peak memory", "profile")
    cells = (
        "{model}, {device}", "{texts} of {tokens:,} tokens", "{method}", "{seconds:.0f}", "{compile:.0f}",
        "{gigabytes:.1f} GB", "{kilobytes:.0f} kB",
    )  # fmt: skip
    sizes = [{"gigabytes": r["peak_bytes"] / 1e9, "kilobytes": r["profile_bytes"] / 1e3} | r for r in records]
    return markdown(header, [[cell.format(**record) for cell in cells] for record in sizes])


if __name__ == "__main__":
    app()
