"""`eval --tune`: a search for options of other methods on TCA's calibration texts and probes, at equal cost.

A trial measures three losses in units of calibration's tolerances; the largest counts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tca_jax.calibration import worth
from tca_jax.calibration.probes import FOLLOW, probed_texts
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.run import calibrate, require_length
from tca_jax.engine.contexts import prefill
from tca_jax.engine.lm import LM
from tca_jax.engine.score import score, score_answers
from tca_jax.errors import require
from tca_jax.lab.equal_bytes import CallSizes, held_share
from tca_jax.lab.evaluation.method_specs import Builder, MethodSpec, parse_methods
from tca_jax.lab.evaluation.results import TUNING, Results, write_json
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.full import BASELINE
from tca_jax.methods.registry import get
from tca_jax.models.json_object import read_json_object
from tca_jax.models.sharding import DATA, axis_size

Space = Mapping[str, tuple[Any, ...]]

_OBSERVED: Space = {"observation": (16, 32, 64, 128, 256), "kernel": (1, 5, 7, 15, 31, 63, 127)}
_WINDOWS: Space = {"window": (128, 256, 512)}
_POOLED: Space = {**_OBSERVED, "pooling": ("avg", "max"), **_WINDOWS}
_SAFEGUARDS: Space = {"safeguard": (0.0, 0.1, 0.2, 0.4, 0.7)}
_EXPECTED: Space = {"future": (64, 256, 512, 2048), "sinks": (0, 4, 64), "epsilon": (0.0, 0.01, 0.02, 0.1), **_WINDOWS}
#: Values of each method's options around its authors' defaults, without those that set the cost.
SPACES: Mapping[str, Space] = {
    "adakv": {**_POOLED, **_SAFEGUARDS},
    "adakv-expected-attention": {**_EXPECTED, **_SAFEGUARDS},
    "cake": {**_OBSERVED, "gamma": (1.0, 5.0, 50.0, 200.0, 500.0), **_WINDOWS},
    "duoattention": {"sinks": (4, 64, 128, 256), "window": (128, 256, 512, 1024), "dense_prefill": (False, True)},
    "expected-attention": _EXPECTED,
    "flexprefill": {
        "tau": (0.0, 0.05, 0.1, 0.2, 0.4),
        "min_budget": (128, 256, 512, 1024, 2048),
        "block_size": (64, 128),
    },
    "h2o": {"average": (False, True), "window": (128, 256, 512, 1024)},
    "keydiff": {"window": (128, 256, 512, 1024)},
    "minference": {"blocks": (25, 50, 100, 200), "block_size": (32, 64, 128)},
    "pyramidkv": {**_POOLED, "beta": (1.0, 5.0, 10.0, 20.0, 40.0)},
    "quest": {"block_size": (16, 32, 64), "window": (16, 32, 64, 128)},
    "random": {"window": (128, 256, 512, 1024, 4096)},
    "snapkv": _POOLED,
    "streaming": {"sinks": (0, 4, 16, 64, 128)},
    "tova": {"window": (128, 256, 512, 1024)},
    "xattention": {"stride": (4, 8, 16, 32), "block_size": (64, 128), "chunk": (None, 0)},
}
#: The option that sets the attended share of a prefill method, and its values by rising cost.
PREFILL_KNOBS: Mapping[str, tuple[str, Sequence[float]]] = {
    "flexprefill": ("gamma", tuple(i / 64 for i in range(1, 65))),
    "minference": ("scale", tuple(round(2 ** (i / 8), 4) for i in range(-64, 1))),
    "xattention": ("threshold", tuple(i / 64 for i in range(1, 65))),
}

ALL = "all"
_DIGITS = 6  # of compared shares
_NEAR = 0.03  # of a limit: costs that are this close are not raised further
_TCA = "tca"
#: Placeholders for options without a default, where only the other options are checked.
_MEASURED: Mapping[str, dict[str, Any]] = {"cake": {"preferences": [1.0]}, "duoattention": {"gates": [[1.0]]}}


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Settings of `--tune`."""

    methods: tuple[str, ...]  # labels
    trials: int | None = None  # of each method, the defaults included; None: as many as TCA has candidates


def make_tuning(
    names: Sequence[str], specs: Sequence[MethodSpec], trials: int | None, kv_share: float | None
) -> Tuning:
    """Checks `--tune`; "all" is every method of `specs` with a space of options."""
    require(kv_share is not None, "--tune: needs --kv-share, the bytes at which methods are compared")
    able = [spec.label for spec in specs if _space(spec)]
    wanted = able if list(names) == [ALL] else names
    for name in wanted:
        known = any(spec.label == name for spec in specs)
        reason = "has no options to search" if known else "is not among --methods"
        require(name in able, f"--tune {name}: {reason}; must be {ALL}, or some of {able}")
    require(wanted, f"--tune {ALL}: no method of --methods has options to search; those of {list(SPACES)} have")
    return Tuning(tuple(dict.fromkeys(wanted)), trials)


def tuning_entry(tuning: Tuning, builder: Builder) -> dict[str, Any]:
    """Settings that tuned options depend on."""
    digest = hashlib.sha256(json.dumps([list(map(int, ids)) for ids in builder.texts()]).encode()).hexdigest()
    return {"trials": tuning.trials, "texts": digest}


def tune(
    tuning: Tuning, specs: Sequence[MethodSpec], builder: Builder, results: Results, *, kv_share: float, seed: int
) -> tuple[tuple[MethodSpec, ...], Builder]:
    """The methods, each tuned one after its defaults, and the builder with TCA's profile; `tuning/` has the trials."""
    lm, folder = builder.lm, results.folder / TUNING
    devices = axis_size(lm.mesh, DATA)
    require(devices == 1, f'--tune: must run on one device of "data", the mesh has {devices}')
    config = TCAConfig() if builder.profile is None else builder.profile.config
    texts = [list(ids) for ids in builder.texts()]
    for index, ids in enumerate(texts):
        require_length(f"--tune-text {index}", len(ids), lm, config)
    profile, seconds = _calibrated(lm, texts, config, folder)
    measured = builder.measured
    builder = dataclasses.replace(builder, profile=profile)
    builder.remember(measured)
    measure = Measure(lm, texts, config, profile)
    path = folder / f"{_TCA}.json"
    if not path.exists():
        built = builder.build_within(parse_methods(_TCA)[0], kv_share, measure.sizes)
        _write(path, _TCA, _TCA, [{"spec": _TCA, **measure(built.lm)}], seconds)
    attended = read_json_object(path)["trials"][0]["attended_share"]
    found: list[MethodSpec] = []
    for spec in specs:
        found.append(spec)
        if spec.label in tuning.methods:
            tried = points(spec, tuning.trials or config.num_candidates + 1, seed)
            best = _search(tried, builder, measure, kv_share, attended, folder)
            if best.label not in [each.label for each in (*found, *specs)]:
                found.append(best)
    return tuple(found), builder


def _calibrated(lm: LM, texts: list[list[int]], config: TCAConfig, folder: Path) -> tuple[Profile, float]:
    """TCA's profile, and the seconds of calibration with compilation."""
    timed = folder / "calibration.json"
    if timed.exists():
        return Profile.load(folder / "profile"), read_json_object(timed)["seconds"]
    start = time.perf_counter()
    profile = calibrate(lm, texts, config)
    seconds = time.perf_counter() - start
    profile.save(folder / "profile")
    write_json(timed, {"seconds": seconds, "sources": list(profile.sources)})
    return profile, seconds


def _write(path: Path, method: str, tuned: str, trials: Sequence[Mapping[str, Any]], seconds: float) -> None:
    record = {"method": method, "tuned": tuned, "seconds": seconds, "device": jax.local_devices()[0].device_kind}
    write_json(path, {**record, "trials": trials})


class Measure:
    """Losses of a method on calibration's texts and probes, and its costs."""

    def __init__(self, lm: LM, texts: list[list[int]], config: TCAConfig, profile: Profile) -> None:
        self._texts, self._config = texts, config
        self._probed = [text for text in probed_texts(lm, texts, None, config) if text.segments]
        self.sizes = CallSizes(max(map(len, texts)))
        row0 = {"config": config, "candidates": np.zeros_like(profile.candidates)}
        self._inside, _ = self._read(lm.with_method(BASELINE))
        row0_inside, _ = self._read(lm.with_method(_TCA, **row0))
        full = self._asked(lm.with_method(BASELINE))
        of_row0 = self._asked(lm.with_method(_TCA, **row0, readings=profile.readings))
        noise = worth.standard_error(np.concatenate(self._inside) - np.concatenate(row0_inside))
        rise = worth.mean_loss(row0_inside) - worth.mean_loss(self._inside)
        self._read_tolerance = max(config.read_tolerance * rise, worth.LEAST) if worth.is_sure(rise, noise) else np.inf
        ends = np.cumsum([sum(len(probe.ids) for probe in text.segments) for text in self._probed])
        probes = list(worth.counted_columns(self._probed, ends)) if self._probed else []
        self._following = np.zeros(full.shape, bool)
        for probe, columns in probes:
            self._following[columns] = probe.kind == FOLLOW
        self._full_following = full[self._following]
        self._answers = worth.Answers(probes, full, of_row0)

    def __call__(self, lm: LM) -> dict[str, float]:
        """Excesses in units of their tolerances, the largest as "excess"; losses in nats per token; shares."""
        losses, (inside, attended) = self._asked(lm), self._read(lm)
        reading = (worth.mean_loss(inside) - worth.mean_loss(self._inside)) / self._read_tolerance
        lost = self._answers.lost(losses) if worth.is_informative(len(self._answers.kinds)) else 0.0
        following = losses[self._following]
        excess = worth.following_excess(following, self._full_following)
        parts = (float(reading), lost / max(self._config.keep_tolerance, worth.LEAST), excess)
        return {
            "excess": max(parts),
            "sum": sum(parts),
            "loss_inside": worth.mean_loss(inside),
            "answers_lost": lost,
            "loss_following": worth.mean_loss([following]),
            "attended_share": attended,
            "held_share": held_share(lm.on_one_device, self.sizes),
        }

    def attended(self, lm: LM) -> float:
        """Mean attended share of the texts."""
        return float(np.mean([np.asarray(prefill(lm, [ids]).attended_share)[0] for ids in self._texts]))

    def _read(self, lm: LM) -> tuple[list[np.ndarray], float]:
        """Losses inside the texts, and the mean attended share."""
        first, scores = self._config.window + self._config.block_size, [score(lm, [ids]) for ids in self._texts]
        share = float(np.mean([each.attended_share[0] for each in scores]))
        return [-each.logprobs[0][first:] for each in scores], share

    def _asked(self, lm: LM) -> np.ndarray:
        """Loss of the token after each column of the probes, 0 at a probe's last."""
        columns = [np.zeros(0)]
        for text in self._probed:
            asked = [list(probe.ids) for probe in text.segments]
            logprobs = score_answers(lm, [list(text.ids)], [asked]).logprobs[0]
            columns += [np.append(-of_probe[1:], 0.0) for of_probe in logprobs]
        return np.concatenate(columns).astype(np.float32)


def _search(
    tried: Sequence[MethodSpec], builder: Builder, measure: Measure, kv_share: float, most: float, folder: Path
) -> MethodSpec:
    """The best of some points; each is written. Prefill methods attend to at most the share `most`."""
    spec = tried[0]
    path = folder / f"{spec.label.replace('/', '_')}.json"
    done: list[dict[str, Any]] = read_json_object(path)["trials"] if path.exists() else []
    first, given = spec.parts[0]
    knob, values = PREFILL_KNOBS.get(first, ("", ()))

    def build(point: MethodSpec) -> LM:
        return builder.build_within(point, kv_share, measure.sizes).lm

    def attended(point: MethodSpec) -> Callable[[float], float]:
        return lambda value: measure.attended(build(with_option(point, 0, knob, value)))

    for point in tried[len(done) :]:
        start = time.perf_counter()
        if knob and knob not in given:
            point = with_option(point, 0, knob, highest_within(values, attended(point), most))
        figures = {"spec": point.label, **measure(build(point))}
        done.append({**figures, "seconds": time.perf_counter() - start})
        tuned = best_trial(done, kv_share, most)["spec"]
        _write(path, spec.label, tuned, done, sum(trial["seconds"] for trial in done))
    return parse_methods(best_trial(done, kv_share, most)["spec"])[0]


def highest_within(values: Sequence[float], costs: Callable[[float], float], limit: float) -> float:
    """The highest of rising values within a limit of cost, or one within `_NEAR` below it; else the lowest."""
    low, high = 0, len(values)
    while high - low > 1:
        place = (low + high) // 2
        cost = costs(values[place])
        if round(cost - limit, _DIGITS) > 0:
            high = place
        elif round(limit * (1 - _NEAR) - cost, _DIGITS) <= 0:
            return values[place]
        else:
            low = place
    return values[low]


def best_trial(trials: Sequence[Mapping[str, Any]], kv_share: float, attended: float) -> Mapping[str, Any]:
    """The trial of least excess within the limits, or within the first trial's costs."""
    limits = {"held_share": kv_share, "attended_share": attended}
    fitting = [
        trial
        for trial in trials
        if all(round(trial[name] - max(limit, trials[0][name]), _DIGITS) <= 0 for name, limit in limits.items())
    ]
    return min(fitting, key=lambda trial: (trial["excess"], trial["sum"]))  # of equal ones the first


def _space(spec: MethodSpec) -> list[tuple[int, str, tuple[Any, ...]]]:
    """Part, option and values of each searched option; options of the user are fixed."""
    return [
        (number, option, values)
        for number, (name, given) in enumerate(spec.parts)
        for option, values in SPACES.get(name, {}).items()
        if option not in given
    ]


def points(spec: MethodSpec, trials: int, seed: int) -> list[MethodSpec]:
    """The method itself, and then under allowed options, drawn without repeats."""
    space, found = _space(spec), [spec]
    drawn = list(itertools.product(*(values for _, _, values in space)))
    order = np.random.default_rng([seed, zlib.crc32(spec.label.encode())]).permutation(len(drawn))
    for index in order.tolist():
        point = spec
        for (number, option, _), value in zip(space, drawn[index], strict=True):
            point = with_option(point, number, option, value)
        if len(found) < trials and _is_allowed(point):
            found.append(point)
    return found


def _is_allowed(spec: MethodSpec) -> bool:
    try:
        for name, options in spec.parts:
            if name in SPACES:
                get(name, **{**_MEASURED.get(name, {}), **options})
    except ValueError:
        return False
    return True


def with_option(spec: MethodSpec, part: int, option: str, value: Any) -> MethodSpec:
    """A method with an option of one of its parts, as written on the command line."""
    parts = list(spec.parts)
    parts[part] = (parts[part][0], {**parts[part][1], option: value})

    def written(name: str, options: Mapping[str, Any]) -> str:
        listed = (f"{option}={of if isinstance(of, str) else json.dumps(of)}" for option, of in options.items())
        return f"{name}:{','.join(listed)}" if options else name

    return MethodSpec("+".join(written(*each) for each in parts), tuple(parts))
