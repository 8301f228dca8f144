"""The first answer of a fresh process, and what calibration takes: seconds to load, to compile, to the first token.

`python -m tca_jax.lab.evaluation.first_answer answer MODEL --out FILE` starts a process for each row, with an empty
compilation cache. `... calibrate MODEL --to FOLDER --out FILE` calibrates and saves profiles for the other sticks.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

import tca_jax
from tca_jax.engine.lm import LM
from tca_jax.lab.benchmarks.soak_report import Compilations
from tca_jax.lab.evaluation.late_documents import calibration_texts
from tca_jax.lab.evaluation.sticks import Record, append, device_name, markdown, read_records

STICK, CALIBRATION = "first_answer", "calibration"
LENGTHS = (2_000, 16_000, 31_000)
WINDOW = 1_024
app = typer.Typer(help=__doc__, pretty_exceptions_enable=False)


def measure(
    model: str, profile: Path | None, other: Path | None, tokens: int, second: int, texts: Path | None
) -> Record:
    """One process: load, the first answer, one of a second length, one of a second profile.

    Args:
        model: As for `tca_jax.load`.
        profile: Of the first two answers; None for full attention.
        other: A second profile; None for none.
        tokens: Length of the first prompt.
        second: Of the second one.
        texts: As for `texts.files`.
    """
    compilations = Compilations()
    started = time.monotonic()
    lm = tca_jax.load(model, profile=profile)
    record: Record = {"model": lm.name, "load": time.monotonic() - started, "device": device_name()}
    (ids,) = calibration_texts(lm, 1, max(tokens, second), texts)
    record |= _first(lm, ids[:tokens], compilations, "")
    record |= _first(lm, ids[:second], compilations, "second_length_")
    if other is not None:
        lm = lm.with_profile(tca_jax.Profile.load(other))
        record |= _first(lm, ids[:tokens], compilations, "second_profile_")
    return record | {"programs": compilations.count}


def _first(lm: LM, ids: Sequence[int], compilations: Compilations, prefix: str) -> Record:
    """Seconds to the first token, and what of them was compiling."""
    before, count, start = dict(compilations.by_program), compilations.count, time.monotonic()
    stream = tca_jax.stream(lm, list(ids), max_new_tokens=16)
    next(iter(stream))
    first = time.monotonic() - start
    for _ in stream:
        pass
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in compilations.by_program.items()}
    prefill = sum(seconds for name, seconds in spent.items() if "prefill" in name)
    decode = sum(seconds for name, seconds in spent.items() if "decode" in name)
    return {
        f"{prefix}first_token": first,
        f"{prefix}compile_prefill": prefill,
        f"{prefix}compile_decode": decode,
        f"{prefix}compile_other": sum(spent.values()) - prefill - decode,
        f"{prefix}programs": compilations.count - count,
    }


@app.command("answer")
def answer(
    model: Annotated[str, typer.Argument(help="As for tca_jax.load.")],
    out: Annotated[Path, typer.Option(help="File that records are appended to.")],
    profile: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER; the next one is the second profile.")] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths, by commas.")] = ",".join(map(str, LENGTHS)),
    texts: Annotated[Path | None, typer.Option(help="Folder of `lab.evaluation.texts`.")] = None,
    methods: Annotated[str, typer.Option(help="full, tca or both, by a comma; tca is each profile.")] = "full,tca",
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once; more than one share the device.")] = 1,
) -> None:
    """Times first answers of full attention and of the profiles, each in a process of its own."""
    from concurrent.futures import ThreadPoolExecutor

    from tca_jax.lab.evaluation.sticks import parse_profiles

    profiles = list(parse_profiles(profile or []).items())
    tokens = [int(length) for length in lengths.split(",")]
    runs: list[tuple[str, Path | None, Path | None, int, int]] = []
    for i, length in enumerate(tokens):
        following = tokens[(i + 1) % len(tokens)] if len(tokens) > 1 else length // 2
        if "full" in methods.split(","):
            runs.append(("full", None, None, length, following))
        for j, (name, folder) in enumerate(profiles if "tca" in methods.split(",") else []):
            other = profiles[(j + 1) % len(profiles)][1] if len(profiles) > 1 else None
            runs.append((name, folder, other, length, following))

    def run(each: tuple[str, Path | None, Path | None, int, int]) -> None:
        name, folder, other, length, following = each
        with tempfile.TemporaryDirectory() as cache:
            arguments = [str(x) if x is not None else "" for x in (model, folder, other, length, following, texts)]
            environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            command = [sys.executable, "-m", "tca_jax.lab.evaluation.first_answer", "one", *arguments]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"{name} at {length} failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
            return
        figures = json.loads(done.stdout.strip().splitlines()[-1])
        common = {
            "stick": STICK,
            "tokens": length,
            "method": name,
            "share": None,
            "seed": 0,
            "jobs": jobs,
        }
        append(out, common | {"second": following} | figures)
        print(json.dumps(common | figures), flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, runs))
    print(table(read_records([out], STICK)))


@app.command("one", hidden=True)
def one(model: str, profile: str, other: str, tokens: int, second: int, texts: str) -> None:
    """One row, as JSON."""
    folders = [Path(folder) if folder else None for folder in (profile, other, texts)]
    print(json.dumps(measure(model, folders[0], folders[1], tokens, second, folders[2])))


@app.command("calibrate")
def calibrate(
    model: Annotated[str, typer.Argument(help="As for tca_jax.load.")],
    to: Annotated[Path, typer.Option(help="Folder that gets a profile for each setting.")],
    out: Annotated[Path, typer.Option(help="File that records are appended to.")],
    settings: Annotated[
        str, typer.Option(help="default, kept=SHARE, paper or paper:TAU; by commas.")
    ] = "default,kept=0.25,paper",
    count: Annotated[int, typer.Option(min=1, help="Texts, of the calibration half.")] = 8,
    tokens: Annotated[int, typer.Option(min=1)] = 8_192,
    window: Annotated[int, typer.Option(min=1)] = WINDOW,
    texts: Annotated[Path | None, typer.Option(help="Folder of `lab.evaluation.texts`.")] = None,
) -> None:
    """Calibrates with each setting, in one process; the first one compiles what the others use."""
    lm = tca_jax.load(model)
    given = calibration_texts(lm, count, tokens, texts)
    for setting in settings.split(","):
        name, _, value = setting.partition("=")
        options: dict[str, Any] = {"config": tca_jax.TCAConfig(window=window)}
        if name == "paper" or name.startswith("paper:"):
            tau = {"tau": _number(setting, name.partition(":")[2])} if ":" in name else {}
            options["config"] = tca_jax.TCAConfig.paper(window=window, **tau)
        elif name == "kept":
            options["kept"] = _number(setting, value)
        elif name != "default":
            raise tca_jax.UserError(f"--settings {setting!r}: must be default, kept=SHARE, paper or paper:TAU")
        compilations, start = Compilations(), time.monotonic()
        profile = tca_jax.calibrate(lm, given, **options)
        seconds = time.monotonic() - start
        compilations.close()
        folder = to / setting.replace("=", "-").replace(":", "-")
        profile.save(folder)
        record = {"stick": CALIBRATION, "model": lm.name, "tokens": tokens, "method": setting, "share": None, "seed": 0}
        figures = {
            "seconds": seconds,
            "compile": sum(compilations.seconds.values()),
            "programs": compilations.count,
            "peak_bytes": _peak_bytes(),
            "profile_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            "texts": count,
            "device": device_name(),
        }
        append(out, record | figures)
        print(json.dumps(record | figures), flush=True)
    print(calibration_table(read_records([out], CALIBRATION)))


def _number(setting: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise tca_jax.UserError(f"--settings {setting!r}: {text!r} is not a number") from None


def _peak_bytes() -> int:
    """Most bytes in use, of the device where it says so, otherwise of the process."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def table(records: Sequence[Record]) -> str:
    """A row for each model, length and profile; seconds."""
    header = (
        "model, device", "prompt", "method", "load", "first token", "prefill, decode, other compiled", "programs",
        "second length: first token, programs", "second profile: first token, programs",
    )  # fmt: skip
    rows = []
    for record in sorted(records, key=lambda r: (r["model"], r["device"], r["tokens"], r["method"])):
        compiled = "; ".join(f"{record[f'compile_{part}']:.1f}" for part in ("prefill", "decode", "other"))
        behind = [
            f"{record[f'{p}_first_token']:.1f}; {record[f'{p}_programs']}" if f"{p}_first_token" in record else ""
            for p in ("second_length", "second_profile")
        ]
        rows.append(
            [
                f"{record['model']}, {record['device']}",
                f"{record['tokens']:,}",
                record["method"],
                f"{record['load']:.1f}",
                f"{record['first_token']:.1f}",
                compiled,
                str(record["programs"]),
                *behind,
            ]
        )
    return markdown(header, rows)


def calibration_table(records: Sequence[Record]) -> str:
    """A row for each model and setting."""
    header = ("model, device", "texts", "setting", "seconds", "of these compiling", "peak memory", "profile")
    rows = [
        [
            f"{record['model']}, {record['device']}",
            f"{record['texts']} of {record['tokens']:,} tokens",
            record["method"],
            f"{record['seconds']:.0f}",
            f"{record['compile']:.0f}",
            f"{record['peak_bytes'] / 1e9:.1f} GB",
            f"{record['profile_bytes'] / 1e3:.0f} kB",
        ]
        for record in records
    ]
    return markdown(header, rows)


if __name__ == "__main__":
    app()
