"""`eval --tune`: a random search for options of methods, by losses on calibration texts."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tca_jax.engine.lm import LM
from tca_jax.engine.score import score, score_answers
from tca_jax.errors import UserError, require
from tca_jax.lab.equal_bytes import held_share
from tca_jax.lab.evaluation.method_specs import Builder, MethodSpec, parse_methods
from tca_jax.lab.evaluation.results import write_json
from tca_jax.methods.full import BASELINE
from tca_jax.models.json_object import read_json_object
from tca_jax.models.sharding import DATA, axis_size

Space = Mapping[str, tuple[Any, ...]]

_OBSERVED: Space = {"observation": (16, 32, 64, 128, 256), "kernel": (1, 5, 7, 15, 31, 63, 127)}
_WINDOWS: Space = {"window": (128, 256, 512)}
_POOLED: Space = {**_OBSERVED, "pooling": ("avg", "max"), **_WINDOWS}
_SAFEGUARDS: Space = {"safeguard": (0.0, 0.1, 0.2, 0.4, 0.7)}
_EXPECTED: Space = {"future": (64, 256, 512, 2048), "sinks": (0, 4, 64), "epsilon": (0.0, 0.01, 0.02, 0.1), **_WINDOWS}
#: Values of each method's options around its authors' defaults, without budgets of caches.
SPACES: Mapping[str, Space] = {
    "adakv": {**_POOLED, **_SAFEGUARDS},
    "adakv-expected-attention": {**_EXPECTED, **_SAFEGUARDS},
    "cake": {**_OBSERVED, "gamma": (1.0, 5.0, 50.0, 200.0, 500.0), **_WINDOWS},
    "duoattention": {"sinks": (4, 64, 128, 256), "window": (128, 256, 512, 1024), "dense_prefill": (False, True)},
    "expected-attention": _EXPECTED,
    "flexprefill": {"gamma": (0.5, 0.8, 0.9, 0.95), "tau": (0.0, 0.1, 0.2, 0.4), "min_budget": (128, 512, 1024, 2048)},
    "h2o": {"average": (False, True), "window": (128, 256, 512, 1024)},
    "keydiff": {"window": (128, 256, 512, 1024)},
    "minference": {"scale": (0.03, 0.125, 0.5, 1.0), "blocks": (25, 50, 100, 200), "block_size": (32, 64, 128)},
    "pyramidkv": {**_POOLED, "beta": (1.0, 5.0, 10.0, 20.0, 40.0)},
    "quest": {"block_size": (16, 32, 64), "window": (16, 32, 64, 128)},
    "random": {"window": (128, 256, 512, 1024, 4096)},
    "snapkv": _POOLED,
    "streaming": {"sinks": (0, 4, 16, 64, 128)},
    "tova": {"window": (128, 256, 512, 1024)},
    "xattention": {"threshold": (0.5, 0.8, 0.9, 0.95), "stride": (4, 8, 16, 32), "block_size": (64, 128)},
}

ALL = "all"
_END, _PASSAGE, _GIVEN = 128, 64, 16  # tokens of a text's end, of a repeated passage, and of its unmeasured beginning
_PASSAGES = 8  # of a text
_DRAWS = 50  # points that are drawn for a trial before a space counts as used up
_DIGITS = 6  # of compared shares


class Tuning(NamedTuple):
    """Settings of `--tune`."""

    methods: tuple[str, ...]  # labels
    trials: int  # of each method, the given options included
    kv_share: float
    seed: int


def make_tuning(
    names: Sequence[str], specs: Sequence[MethodSpec], *, trials: int, kv_share: float | None, seed: int
) -> Tuning:
    """Checks `--tune`; "all" is every method of `specs` with a space of options."""
    if kv_share is None:
        raise UserError("--tune: needs --kv-share, the bytes at which methods are compared")
    able = [spec.label for spec in specs if _space(spec)]
    wanted = able if list(names) == [ALL] else names
    for name in wanted or names:
        require(name in able, f"--tune {name}: must be {ALL}, or methods of --methods with options to search: {able}")
    return Tuning(tuple(dict.fromkeys(wanted)), trials, kv_share, seed)


def tune(tuning: Tuning, specs: Sequence[MethodSpec], builder: Builder, folder: Path) -> tuple[MethodSpec, ...]:
    """The methods, each tuned one after its given options; a file in the folder has the trials of each."""
    devices, shortest = axis_size(builder.lm.mesh, DATA), min(map(len, builder.texts()))
    require(devices == 1, f'--tune: must run on one device of "data", the mesh has {devices}')
    require(shortest >= 2 * _END, f"--tune-text: a text has {shortest} tokens: must have at least {2 * _END}")
    full, found = _measure(builder.lm.with_method(BASELINE), builder.texts()), list[MethodSpec]()
    for spec in specs:
        found.append(spec)
        path = folder / f"{spec.label.replace('/', '_')}.json"
        if spec.label in tuning.methods and not path.exists():
            start = time.perf_counter()
            trials = _trials(tuning, spec, builder, full)
            record = {"method": spec.label, "tuned": best_trial(trials, tuning.kv_share)["spec"]}
            record |= {"seconds": time.perf_counter() - start, "device": jax.local_devices()[0].device_kind}
            write_json(path, {**record, "trials": trials})
        if spec.label in tuning.methods:
            (tuned,) = parse_methods(read_json_object(path)["tuned"])
            found += [tuned] if tuned.label not in [each.label for each in (*found, *specs)] else []
    return tuple(found)


def _trials(tuning: Tuning, spec: MethodSpec, builder: Builder, full: Mapping[str, float]) -> list[dict[str, Any]]:
    """Figures of a method under its given options, and then under drawn ones."""
    tokens, trials = max(map(len, builder.texts())), list[dict[str, Any]]()
    for point in points(spec, _DRAWS * tuning.trials, tuning.seed):
        try:
            lm = builder.build_within(point, tuning.kv_share, tokens).lm
        except ValueError:  # options that exclude each other
            continue
        figures = _measure(lm, builder.texts())
        excess = sum(figures[name] - full[name] for name in ("loss_inside", "loss_following"))
        trials.append({"spec": point.label, "excess": excess, **figures, "held_share": held_share(lm, tokens)})
        if len(trials) == tuning.trials:
            break
    return trials


def _measure(lm: LM, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Mean losses inside texts, and of their ends and of repeated passages over the rest's cache; attended share."""
    inside, following, attended = [], [], []
    for ids in map(list, texts):
        document, scores = ids[:-_END], score(lm, [ids])
        starts = np.linspace(0, len(document) - _PASSAGE, _PASSAGES).astype(int).tolist()
        passages = [document[start : start + _PASSAGE] for start in starts]
        end, *repeated = score_answers(lm, [document], [[ids[-_END:], *passages]]).logprobs[0]
        inside.append(-scores.logprobs[0].mean())
        following.append(-(end.mean() + np.mean([of_passage[_GIVEN:].mean() for of_passage in repeated])) / 2)
        attended.append(scores.attended_share[0])
    named = {"loss_inside": inside, "loss_following": following, "attended_share": attended}
    return {name: float(np.mean(values)) for name, values in named.items()}


def best_trial(trials: Sequence[Mapping[str, Any]], kv_share: float) -> Mapping[str, Any]:
    """The trial of least excess, of those with at most the first one's attended share, and `kv_share` or its bytes."""
    limits = {"held_share": max(kv_share, trials[0]["held_share"]), "attended_share": trials[0]["attended_share"]}
    fitting = [x for x in trials if all(round(x[name] - most, _DIGITS) <= 0 for name, most in limits.items())]
    return min(fitting, key=lambda trial: trial["excess"])  # of equal ones the first


def _space(spec: MethodSpec) -> list[tuple[int, str, tuple[Any, ...]]]:
    """Part, option and values of each searched option; options of the user are fixed."""
    return [
        (number, option, values)
        for number, (name, given) in enumerate(spec.parts)
        for option, values in SPACES.get(name, {}).items()
        if option not in given
    ]


def points(spec: MethodSpec, draws: int, seed: int) -> list[MethodSpec]:
    """The method itself, and then under drawn options, without repeats."""
    rng, found = random.Random(f"{seed}/{spec.label}"), {spec.label: spec}
    for _ in range(draws):
        parts = [(name, dict(given)) for name, given in spec.parts]
        for number, option, values in _space(spec):
            parts[number][1][option] = rng.choice(values)
        label = "+".join(_written(*part) for part in parts)
        found.setdefault(label, MethodSpec(label, tuple(parts)))
    return list(found.values())


def _written(name: str, options: Mapping[str, Any]) -> str:
    """A method as on the command line."""
    listed = (f"{option}={of if isinstance(of, str) else json.dumps(of)}" for option, of in options.items())
    return f"{name}:{','.join(listed)}" if options else name
