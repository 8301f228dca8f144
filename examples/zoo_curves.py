"""Curves of the zoo: TCA at several tolerances, and other methods at several budgets."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from zoo_measures import (
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

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.engine.prompts import bucket_length
from tca_jax.lab.equal_bytes import CallSizes
from tca_jax.lab.evaluation.method_specs import Builder, MethodSpec, parse_methods

TOLERANCES = ((0.5, 0.5), (0.1, 0.02), (0.1, 0.002), (0.03, 0.005), (0.03, 0.0005))
#: Methods whose prefill attends to less than everything, at several budgets.
READERS = (
    *(f"streaming:window={window}" for window in (256, 512, 1024, 2048, 4096)),
    *(f"minference:scale={scale}" for scale in (0.03, 0.1, 0.3)),
    *(f"flexprefill:gamma={gamma},min_budget=256" for gamma in (0.6, 0.8, 0.9, 0.95)),
    *(f"xattention:threshold={threshold}" for threshold in (0.6, 0.8, 0.9, 0.95)),
)
_WIDE = "observation=128,kernel=127"
#: Methods that keep part of the cache. With byte-level tokens those that observe the last queries need more of them,
#: and wider pooling, than their authors' defaults, which suit words.
KEEPERS = (
    "streaming",
    f"snapkv:{_WIDE},pooling=max",
    f"cake:{_WIDE}",
    "duoattention",
    "expected-attention",
    f"pyramidkv:{_WIDE},pooling=max",
    f"adakv:{_WIDE},pooling=max",
    "adakv-expected-attention",
    "h2o",
    "tova",
    "keydiff",
    "kvzip",
    "kvzip-heads",
)
#: Methods whose steps attend to part of a whole cache, at several budgets.
STEPPERS = tuple(f"quest:budget={budget}" for budget in (256, 512, 1024, 2048))
#: Shares of full attention's bytes for each of them.
BYTES = (0.2, 0.35, 0.6)


class Curve(NamedTuple):
    """Points of one method, which a process measures.

    Attributes:
        name: Of its file.
        readers: Methods whose loss inside prompts is measured.
        keepers: Methods whose answers are measured within each of `BYTES`.
        steppers: Methods whose answers are measured.
        tolerances: TCA's, by which it is calibrated with pairs as probes.
        own: Whether TCA with the default probes is measured.
        baselines: Whether full attention and row 0 in every head are.
    """

    name: str
    readers: tuple[str, ...] = ()
    keepers: tuple[str, ...] = ()
    steppers: tuple[str, ...] = ()
    tolerances: tuple[tuple[float, float], ...] = ()
    own: bool = False
    baselines: bool = False


def all_curves() -> Iterator[Curve]:
    """All of them, those that take longest first."""
    yield Curve("default", keepers=("duoattention",), own=True)  # DuoAttention ranks heads by this profile
    for read, keep in TOLERANCES:
        yield Curve(f"pairs-{read:g}-{keep:g}", tolerances=((read, keep),))
    for number, spec in enumerate(KEEPERS):
        if spec != "duoattention":
            yield Curve(f"keeps-{number}-{spec.partition(':')[0]}", keepers=(spec,))
    for name in dict.fromkeys(spec.partition(":")[0] for spec in READERS):
        yield Curve(f"reads-{name}", readers=tuple(spec for spec in READERS if spec.startswith(name)))
    yield Curve("steps", steppers=STEPPERS)
    yield Curve("baselines", baselines=True)


def curves(folder: Path, out: Path, plan: Plan, dtype: str | None, curve: Curve) -> None:
    """Loss inside prompts by the attended share, and answers by the bytes of the cache, of a method."""
    lm, name = tca_jax.load(folder, dtype=dtype), folder.name
    tokens, *_ = plan.lengths
    window = window_of(tokens)
    texts, documents = passages(0, plan.passages, tokens, 1), documents_by_task(lm, name, plan, tokens)
    found: dict[str, Any] = {"curves": name, "tokens": tokens, "device": jax.devices()[0].device_kind}
    found |= {"dtype": lm.dtype.name, "jax": jax.__version__, "tca_jax": version("tca-jax")}
    found |= {"texts": len(texts), "questions": plan.questions * len(documents), "points": []}
    if out.exists():
        found = json.loads(out.read_text())

    def note(method: str, make: Callable[[], tca_jax.LM], *, reads: bool, keeps: bool, label: str) -> None:
        if label in [point["label"] for point in found["points"]]:
            return
        under, point = make(), {"method": method, "label": label}
        if reads:
            point |= losses(under, texts, window)
        if keeps:
            measured = answers(under, documents)
            point["kv_share"] = measured["kv_share"]
            point |= {protocol: float(np.mean(list(of.values()))) for protocol, of in measured["right"].items()}
        found["points"].append(point)
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, point, flush=True)

    config = plan.config(tokens)

    def with_pairs(read: float, keep: float) -> tca_jax.LM:
        own_texts, pairs = documents_with_pairs(lm, name, plan.texts(tokens), document_size(lm, tokens), 0)
        tolerances = dataclasses.replace(config, read_tolerance=read, keep_tolerance=keep)
        return lm.with_profile(tca_jax.calibrate(lm, own_texts, tolerances, probes=pairs))

    if curve.baselines:
        row0 = Profile.uniform(config, lm.config.num_layers, lm.config.num_kv_heads, 0)
        note("full", lambda: lm.with_profile(None), reads=True, keeps=True, label="full attention")
        note("row 0", lambda: lm.with_profile(row0), reads=True, keeps=True, label="TCA, row 0 in every head")
    for read, keep in curve.tolerances:
        label = f"TCA, pairs, tolerances {read:g} and {keep:g}"
        note("TCA, pairs", functools.partial(with_pairs, read, keep), reads=True, keeps=True, label=label)
    profile = None
    if curve.own:
        if not (own := out.with_suffix("")).exists():
            calibrated_profile(lm, plan, config, tokens, 0).save(own)
        profile = Profile.load(own)
        label = "TCA, default probes"
        note(label, lambda: lm.with_profile(profile), reads=True, keeps=True, label=label)
    builder = Builder(lm, profile, None, lambda: passages(0, 1, tokens, 0))

    def under_spec(spec: MethodSpec) -> tca_jax.LM:
        return builder.build(spec).lm

    for spec in _specs(curve.readers):
        note(spec.parts[0][0], functools.partial(under_spec, spec), reads=True, keeps=False, label=spec.label)
    sizes = CallSizes(bucket_length(tokens), bucket_length(256), bucket_length(128))
    for spec, share in itertools.product(_specs(curve.keepers), BYTES):
        built = builder.build_within(spec, share, sizes)
        if not built.own_budget:
            make, label = functools.partial(getattr, built, "lm"), f"{spec.label} within {share:.0%}"
            note(spec.parts[0][0], make, reads=False, keeps=True, label=label)
    for spec in _specs(curve.steppers):
        note(spec.parts[0][0], functools.partial(under_spec, spec), reads=False, keeps=True, label=spec.label)


def _specs(methods: tuple[str, ...]) -> tuple[MethodSpec, ...]:
    return parse_methods(",".join(methods)) if methods else ()
