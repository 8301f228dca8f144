"""Calibrates every model of the zoo by the same call, with the defaults, and measures what that costs and loses.

    python examples/evaluate_zoo.py zoo --jobs 7                       # one GPU: zoo/<name>.json of every model
    python examples/evaluate_zoo.py zoo --part draws --jobs 7          # what is kept, by draws of texts
    python examples/evaluate_zoo.py zoo --part estimates --jobs 7      # how the blocks of a tile are estimated
    python examples/evaluate_zoo.py zoo --part curves --jobs 14        # TCA at several tolerances, and other methods
    python examples/evaluate_zoo.py zoo --part table                   # lab/results/zoo.{json,md} from these

Calibration sees the first half of the held-out text; losses are measured on the second, questions are about documents
of all of it. Nothing is tuned on any model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several models share a GPU

import jax
import numpy as np
import typer
from zoo_curves import all_curves, curves
from zoo_measures import (
    SMOKE,
    Plan,
    answers,
    calibrated_profile,
    document_size,
    documents_by_task,
    documents_with_pairs,
    losses,
    passages,
    window_of,
)
from zoo_tables import write_tables
from zoo_tasks import MIXTURES

import tca_jax
from tca_jax import TCAConfig
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.text_losses import TextLosses
from tca_jax.calibration.worth import choose_reading
from tca_jax.lab.rivals.xattention import antidiagonal_mass
from tca_jax.loading import shipped_profile
from tca_jax.methods import fetching


def evaluate(folder: Path, out: Path, plan: Plan, dtype: str | None = None) -> None:
    """Losses and answers of one model, written to `out` as they come; what it holds is not measured again."""
    lm, found = _begun(folder, dtype)
    if out.exists():
        found = json.loads(out.read_text())

    def save() -> None:
        out.write_text(json.dumps(found, indent=1) + "\n")

    for tokens in plan.lengths:
        record = found["lengths"].setdefault(str(tokens), {"window": window_of(tokens)})
        _evaluate_at(lm, folder.name, out.parent, plan, tokens, record, save)


def draws(folder: Path, out: Path, plan: Plan, dtype: str | None = None) -> None:
    """What the cache keeps, by draws of calibration texts of the first length; those in `out` are not made again."""
    lm, found = _begun(folder, dtype)
    tokens, *_ = plan.lengths
    if out.exists():
        found = json.loads(out.read_text())
    kept = found["lengths"].get(str(tokens), {}).get("draws", [])
    for seed in range(len(kept), plan.draws):
        profile = calibrated_profile(lm, plan, plan.config(tokens), tokens, seed)
        kept.append(float(profile.kept_share(tokens).mean()))
        found["lengths"][str(tokens)] = {"draws": kept}
        out.write_text(json.dumps(found, indent=1) + "\n")


def _begun(folder: Path, dtype: str | None) -> tuple[tca_jax.LM, dict[str, Any]]:
    """A model, and the record of what is measured of it."""
    lm = tca_jax.load(folder, dtype=dtype)
    return lm, {"model": folder.name, "device": jax.devices()[0].device_kind, "lengths": {}}


def _evaluate_at(
    lm: tca_jax.LM,
    name: str,
    folder: Path,
    plan: Plan,
    tokens: int,
    record: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Losses and answers at one length, into `record`."""
    config, texts = plan.config(tokens), passages(0, plan.passages, tokens, 1)
    documents = documents_by_task(lm, name, plan, tokens) if plan.questions else {}

    def note(label: str, make: Callable[[], Profile | None], *, asks: bool = True) -> None:
        if label in record:
            return
        profile, seconds = _timed(make)
        under, start = lm.with_profile(profile), time.monotonic()
        measured = record[label] = {"seconds": seconds, **losses(under, texts, config.window)}
        if profile is not None:
            measured |= _described(profile, tokens)
            profile.save(folder / f"{name}-{label}-{tokens}")
        if documents and asks:
            measured |= answers(under, documents)
        save()
        print(f"{name} {tokens} {label}: {time.monotonic() - start:.0f} s {json.dumps(measured)[:400]}", flush=True)

    none = Profile.uniform(config, lm.config.num_layers, lm.config.num_kv_heads, 0)
    own_texts, pairs = documents_with_pairs(lm, name, plan.texts(tokens), document_size(lm, tokens), 0)
    note("full", lambda: None)
    note("row0", lambda: none, asks=False)
    note("pairs", lambda: tca_jax.calibrate(lm, own_texts, config, probes=pairs))
    note("default", lambda: calibrated_profile(lm, plan, config, tokens, 0))


def _timed(make: Callable[[], Profile | None]) -> tuple[Profile | None, float]:
    start = time.monotonic()
    return make(), time.monotonic() - start


def _described(profile: Profile, tokens: int) -> dict[str, Any]:
    """What a profile chose, and by what."""
    heads = profile.readings.size
    return {
        "heads": heads,
        "fetching": np.argwhere(profile.readings != "sparse").tolist(),
        "denser": [[*map(int, head), int(profile.candidates[tuple(head)])] for head in np.argwhere(profile.candidates)],
        "kept_share": float(profile.kept_share(tokens).mean()),
        "losses": {each: dict(of_each) for each, of_each in profile.losses.items()},
        "counted": None if profile.probes is None else profile.probes["counted"],
    }


# --- how blocks are estimated ---

#: How many blocks a tile fetches, and which of its queries estimate them: every so many, or sums over antidiagonals.
ESTIMATES: tuple[dict[str, int], ...] = (
    *({"fetch": fetch} for fetch in (4, 8, 16, 32)),
    *({"fetch_stride": stride} for stride in (4, 8, 32)),
    *({"antidiagonals": stride} for stride in (8, 16)),
)


def estimates(folder: Path, out: Path, plan: Plan, dtype: str | None = None) -> None:
    """What calibration finds to read blocks, what that costs, and the loss inside held-out text, by `ESTIMATES`."""
    lm, rows = tca_jax.load(folder, dtype=dtype), list[dict[str, Any]]()
    for tokens, options in itertools.product(plan.lengths, ESTIMATES):
        rows.append({"tokens": tokens, **options, **_estimated(lm, plan, tokens, **options)})
        out.write_text(json.dumps({"model": folder.name, "rows": rows}, indent=1) + "\n")
        print(folder.name, rows[-1], flush=True)


def _estimated(
    lm: tca_jax.LM, plan: Plan, tokens: int, antidiagonals: int | None = None, **options: int
) -> dict[str, Any]:
    """The first search on calibration texts, and the losses inside others."""
    config = TCAConfig(window=window_of(tokens), **options)
    with _antidiagonals(antidiagonals) if antidiagonals else contextlib.nullcontext():
        found = choose_reading(lm, passages(0, plan.texts(tokens), tokens, 0), config, attended=None, step=lambda: None)
        other = TextLosses(lm, passages(0, plan.passages, tokens, 1), config, lambda: None)
        of_heads = {"row0": np.zeros_like(found.found.more), "chosen": found.found.more}
        losses = {name: _mean(other.of(heads)) for name, heads in of_heads.items()}
        shares = {name: _share(other, heads) for name, heads in of_heads.items()}
        return {
            "heads": np.argwhere(found.found.more).tolist(),
            "calibrated": dataclasses.asdict(found.losses),
            "losses": {"full": _mean(other.full()), **losses},
            "attended": shares,
        }


def _mean(losses: Sequence[np.ndarray]) -> float:
    return float(np.mean([of_text.mean() for of_text in losses]))


def _share(losses: TextLosses, heads: np.ndarray) -> float:
    """Attended share where these heads read blocks."""
    assert losses.shares is not None
    return float(np.where(heads, losses.shares[..., 1], losses.shares[..., 0]).mean())


@contextlib.contextmanager
def _antidiagonals(stride: int) -> Iterator[None]:
    """Blocks are estimated by sums over antidiagonals, as XAttention does."""
    own = fetching.block_mass

    def estimate(q: Any, k: Any, lengths: Any, *, block_size: int, **_: Any) -> Any:
        group = q.shape[2] // k.shape[2]
        by_head = [
            antidiagonal_mass(
                q[:, :, head * group : (head + 1) * group], k[:, :, head], lengths, stride=stride, block_size=block_size
            ).sum(axis=1)
            for head in range(k.shape[2])
        ]
        return jax.numpy.stack(by_head, axis=1)

    fetching.block_mass = estimate
    jax.clear_caches()
    try:
        yield
    finally:
        fetching.block_mass = own
        jax.clear_caches()


# --- command ---

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    zoo: Annotated[Path, typer.Argument(help="Folder that train_zoo.py wrote.")],
    part: Annotated[str, typer.Option(help="answers, draws, curves, estimates or table.")] = "answers",
    only: Annotated[list[str] | None, typer.Option(help="Models; all by default.")] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Models, or curves of them, at the same time, shared out over the GPUs.")
    ] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that they are shared out over.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; the zoo's by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="What models compute in.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Lengths; 8,192 and 16,384 by default.")] = None,
    calibrated: Annotated[int, typer.Option(help="Tokens of all calibration texts of a length.")] = Plan.calibrated,
    texts: Annotated[int, typer.Option(help="Texts whose losses are measured.")] = Plan.passages,
    questions: Annotated[int, typer.Option(help="Of each task under each protocol.")] = Plan.questions,
    keep_tolerance: Annotated[float, typer.Option(help="Calibration's.")] = Plan.keep_tolerance,
    smoke: Annotated[bool, typer.Option("--smoke", help="Little of everything: checks that all runs.")] = False,
) -> None:
    """Measure calibration on every model of the zoo."""
    folders = {
        "recall-tiny": shipped_profile("recall-tiny").parent,
        **{path.name: path for path in sorted(zoo.iterdir())},
    }
    folders = {name: path for name, path in folders.items() if name in (only or MIXTURES) and path.is_dir()}
    out = out or zoo
    out.mkdir(parents=True, exist_ok=True)
    if part == "table":
        write_tables(out)
        return
    functions = {"answers": evaluate, "draws": draws, "estimates": estimates}
    plan = (
        SMOKE
        if smoke
        else Plan(tuple(tokens or Plan.lengths), calibrated, texts, questions, keep_tolerance=keep_tolerance)
    )
    suffix = "-".join(["", *([] if part == "answers" else [part]), *map(str, tokens or [])])
    paths = {path: out / f"{name}{suffix}.json" for name, path in folders.items()}
    if part == "curves":
        tasks = [
            functools.partial(curves, path, file.with_stem(f"{file.stem}-{curve.name}"), plan, dtype, curve)
            for curve, (path, file) in itertools.product(all_curves(), paths.items())
        ]
    else:
        tasks = [functools.partial(functions[part], path, file, plan, dtype) for path, file in paths.items()]
    if jobs == 1:
        for task in tasks:
            task()
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        started = []
        for number, task in enumerate(tasks):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(number % gpus)  # inherited by the process that starts next
            started.append(pool.submit(task))
            time.sleep(0.5)
        for one in started:
            one.result()


if __name__ == "__main__":
    app()
