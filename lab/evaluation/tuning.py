"""`eval --tune`: options of other methods are searched on TCA's calibration texts and probes, at equal cost.

TCA is calibrated on the texts. Every trial of another method is measured by what calibration lowers (docs/method.md,
"What a head is worth"): loss inside the texts, answers of the probes that are lost, and loss of what follows, each in
units of its tolerance; the largest counts. Bytes are those of `--kv-share`; methods that read a prompt sparsely get the
attended share of TCA.
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

from tca_jax.calibration.probes import FOLLOW, ProbedText, probed_texts
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.run import calibrate, require_length
from tca_jax.calibration.worth import (
    LEAST,
    Answers,
    counted_columns,
    following_excess,
    is_sure,
    mean_loss,
    says_something,
    standard_error,
)
from tca_jax.engine.contexts import prefill
from tca_jax.engine.lm import LM
from tca_jax.engine.score import score, score_answers
from tca_jax.errors import UserError
from tca_jax.lab.equal_bytes import CallSizes, held_share
from tca_jax.lab.evaluation.method_specs import Builder, MethodSpec
from tca_jax.lab.evaluation.results import TUNING, Results, write_json
from tca_jax.lab.evaluation.search_spaces import PREFILL_KNOBS, SPACES
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.full import BASELINE
from tca_jax.methods.registry import get
from tca_jax.methods.written import Parts
from tca_jax.models.json_object import read_json_object
from tca_jax.models.sharding import DATA, axis_size

ALL = "all"
_DIGITS = 6  # of shares that are compared
_NEAR = 0.03  # of a limit: costs that come so near to it are not raised further
_TCA = "tca"


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What is tuned.

    Attributes:
        methods: Labels of the methods whose options are searched.
        trials: Of each method, the defaults among them; None: as many as TCA has candidates.
    """

    methods: tuple[str, ...]
    trials: int | None = None


def make_tuning(
    names: Sequence[str], specs: Sequence[MethodSpec], trials: int | None, kv_share: float | None
) -> Tuning:
    """Checks `--tune`; "all" is every method of `specs` that has something to search.

    Raises:
        ValueError: a method is not among `specs` or has no options to search, or there is no `kv_share`.
    """
    if kv_share is None:
        raise UserError("--tune: needs --kv-share, the bytes at which methods are compared")
    able = {spec.label: spec for spec in specs if _space(spec)}
    wanted = list(able) if list(names) == [ALL] else list(names)
    for name in wanted:
        if name not in able:
            known = any(spec.label == name for spec in specs)
            reason = "has no options to search" if known else "is not among --methods"
            raise UserError(f"--tune {name}: {reason}; must be {ALL}, or some of {list(able)}")
    if not wanted:
        raise UserError(f"--tune {ALL}: no method of --methods has options to search; those of {list(SPACES)} have")
    return Tuning(tuple(dict.fromkeys(wanted)), trials)


def tune(
    tuning: Tuning, specs: Sequence[MethodSpec], builder: Builder, results: Results, *, kv_share: float, seed: int
) -> tuple[tuple[MethodSpec, ...], Builder]:
    """Calibrates TCA, searches each method's options, and writes `tuning/` of the results' folder.

    A trial is written when it is measured; a run that was interrupted goes on with the next one.

    Returns:
        The methods, each tuned one behind its defaults, and the builder with TCA's profile.

    Raises:
        ValueError: a text is too short, or the mesh has several devices on "data".
    """
    lm, folder = builder.lm, results.folder / TUNING
    if axis_size(lm.mesh, DATA) > 1:
        raise UserError(f'--tune: must run on one device of "data", the mesh has {axis_size(lm.mesh, DATA)}')
    config = TCAConfig() if builder.profile is None else builder.profile.config
    texts = [list(ids) for ids in builder.texts()]
    for index, ids in enumerate(texts):
        require_length(f"--tune-text {index}", len(ids), lm, config)
    profile, seconds = _calibrated(lm, texts, config, folder)
    measured = builder.measured
    builder = dataclasses.replace(builder, profile=profile)
    builder.remember(measured)
    measure = Measure(lm, texts, config, profile)
    limits = _tca_record(builder, measure, folder, kv_share, seconds)
    found: list[MethodSpec] = []
    for spec in specs:
        found.append(spec)
        if spec.label in tuning.methods:
            trials = tuning.trials or config.num_candidates + 1
            best = _Search(spec, builder, measure, kv_share, limits["attended_share"], folder).run(trials, seed)
            if best.label not in [each.label for each in (*found, *specs)]:
                found.append(best)
    return tuple(found), builder


def tuning_entry(tuning: Tuning, builder: Builder) -> dict[str, Any]:
    """What a folder's tuned options depend on, beside its other settings; the methods may grow."""
    digest = hashlib.sha256(json.dumps([list(map(int, ids)) for ids in builder.texts()]).encode()).hexdigest()
    return {"trials": tuning.trials, "texts": digest}


def _calibrated(lm: LM, texts: list[list[int]], config: TCAConfig, folder: Path) -> tuple[Profile, float]:
    """TCA's profile and the seconds that calibration took, compilation included; an unfinished one begins anew."""
    timed = folder / "calibration.json"
    if timed.exists():
        return Profile.load(folder / "profile"), read_json_object(timed)["seconds"]
    start = time.perf_counter()
    profile = calibrate(lm, texts, config)
    seconds = time.perf_counter() - start
    profile.save(folder / "profile")
    write_json(timed, {"seconds": seconds, "sources": list(profile.sources)})
    return profile, seconds


def _tca_record(builder: Builder, measure: Measure, folder: Path, kv_share: float, seconds: float) -> dict[str, Any]:
    """TCA by the same measure, at the bytes of the others."""
    path = folder / f"{_TCA}.json"
    if not path.exists():
        built = builder.build_within(MethodSpec(_TCA, ((_TCA, {}),)), kv_share, measure.sizes)
        record = {"method": _TCA, "tuned": _TCA, "seconds": seconds, "device": jax.local_devices()[0].device_kind}
        write_json(path, {**record, "trials": [{"spec": _TCA, **measure(built.lm)}]})
    return dict(read_json_object(path)["trials"][0])


class Measure:
    """What a method loses on the texts and probes, as calibration counts it, and what it costs.

    Args:
        lm: The model.
        texts: Token ids of each.
        config: TCA's hyperparameters: tolerances, and which tokens count.
        profile: TCA's. Answers count that full attention knows and row 0 in every head loses.
    """

    def __init__(self, lm: LM, texts: list[list[int]], config: TCAConfig, profile: Profile) -> None:
        self._texts, self._config = texts, config
        self._probed = [text for text in probed_texts(lm, texts, None, config) if text.segments]
        self.sizes = CallSizes(max(map(len, texts)))
        zeros = np.zeros_like(profile.candidates)
        self._full, self._inside, _ = self._losses(lm.with_method(BASELINE))
        _, row0_inside, _ = self._losses(lm.with_method("tca", config=config, candidates=zeros), answers=False)
        row0, _, _ = self._losses(
            lm.with_method("tca", config=config, candidates=zeros, readings=profile.readings), inside=False
        )
        noise = standard_error(np.concatenate(self._inside) - np.concatenate(row0_inside))
        rise = mean_loss(row0_inside) - mean_loss(self._inside)
        self._read_tolerance = max(config.read_tolerance * rise, LEAST) if is_sure(rise, noise) else np.inf
        ends = np.cumsum([sum(len(probe.ids) for probe in text.segments) for text in self._probed])
        probes = list(counted_columns(self._probed, ends)) if self._probed else []
        self._following = np.zeros(self._full.shape, bool)
        for probe, columns in probes:
            self._following[columns] = probe.kind == FOLLOW
        self._answers = Answers(probes, self._full, row0)

    def __call__(self, lm: LM) -> dict[str, float]:
        """Excesses in units of their tolerances, the largest as "excess"; losses in nats per token; shares."""
        losses, inside, attended = self._losses(lm)
        reading = (mean_loss(inside) - mean_loss(self._inside)) / self._read_tolerance
        lost = self._answers.lost(losses) if says_something(len(self._answers.kinds)) else 0.0
        following = following_excess(losses[self._following], self._full[self._following])
        parts = (float(reading), lost / max(self._config.keep_tolerance, LEAST), following)
        return {
            "excess": max(parts),
            "sum": sum(parts),
            "loss_inside": mean_loss(inside),
            "answers_lost": lost,
            "loss_following": mean_loss([losses[self._following]]),
            "attended_share": attended,
            "held_share": held_share(lm.on_one_device, self.sizes),
        }

    def attended(self, lm: LM) -> float:
        """Share of the texts' pairs that their queries attend to, mean."""
        return float(np.mean([np.asarray(prefill(lm, [ids]).attended_share)[0] for ids in self._texts]))

    def _losses(
        self, lm: LM, *, inside: bool = True, answers: bool = True
    ) -> tuple[np.ndarray, list[np.ndarray], float]:
        """Losses of the probes' columns, one text behind the other; those that count inside texts; attended share."""
        first = self._config.window + self._config.block_size
        scores = [score(lm, [ids]) for ids in self._texts] if inside else []
        columns = [_probe_losses(lm, text) for text in self._probed] if answers else []
        return (
            np.concatenate([*columns, np.zeros(0)]).astype(np.float32),
            [-each.logprobs[0][first:] for each in scores],
            float(np.mean([each.attended_share[0] for each in scores] or [0.0])),
        )


def _probe_losses(lm: LM, text: ProbedText) -> np.ndarray:
    """Loss of the token behind each column of a text's probes; 0 of a probe's last."""
    asked = [list(probe.ids) for probe in text.segments]
    logprobs = score_answers(lm, [list(text.ids)], [asked]).logprobs[0]
    return np.concatenate([np.append(-of_probe[1:], 0.0) for of_probe in logprobs])


class _Search:
    """Random search for one method's options, written trial by trial."""

    def __init__(
        self, spec: MethodSpec, builder: Builder, measure: Measure, kv_share: float, attended: float, folder: Path
    ) -> None:
        self._spec, self._builder, self._measure = spec, builder, measure
        self._kv_share, self._attended = kv_share, attended
        self._path = folder / f"{spec.label.replace('/', '_')}.json"

    def run(self, trials: int, seed: int) -> MethodSpec:
        """The best of so many trials, the first of which has the options as they are."""
        done: list[dict[str, Any]] = read_json_object(self._path)["trials"] if self._path.exists() else []
        points = _points(self._spec, trials, seed)
        for changes in points[len(done) :]:
            start = time.perf_counter()
            done.append({**self._trial(changes), "seconds": time.perf_counter() - start})
            self._write(done)
        return _written(self._parts(_best(done, self._kv_share, self._attended)["options"]))

    def _write(self, done: list[dict[str, Any]]) -> None:
        best = _best(done, self._kv_share, self._attended)
        record = {"method": self._spec.label, "tuned": best["spec"], "seconds": sum(t["seconds"] for t in done)}
        device = {"device": jax.local_devices()[0].device_kind}
        write_json(self._path, {**record, **device, "trials": done})

    def _trial(self, changes: list[dict[str, Any]]) -> dict[str, Any]:
        """Measures a point, with the attended share of its prefill at most TCA's."""
        changes = [dict(of_part) for of_part in changes]
        first, _ = self._spec.parts[0]
        if first in PREFILL_KNOBS and PREFILL_KNOBS[first][0] not in self._spec.parts[0][1]:
            name, values = PREFILL_KNOBS[first]

            def attended(value: float) -> float:
                changes[0][name] = value
                return self._measure.attended(self._lm(changes))

            changes[0][name] = highest_within(values, attended, self._attended)
        spec = _written(self._parts(changes))
        return {"spec": spec.label, "options": changes, **self._measure(self._lm(changes))}

    def _lm(self, changes: list[dict[str, Any]]) -> LM:
        return self._builder.build_within(_written(self._parts(changes)), self._kv_share, self._measure.sizes).lm

    def _parts(self, changes: list[dict[str, Any]]) -> Parts:
        pairs = zip(self._spec.parts, changes, strict=True)
        return tuple((name, {**given, **changed}) for (name, given), changed in pairs)


def highest_within(values: Sequence[float], costs: Callable[[float], float], limit: float) -> float:
    """The highest of some values that costs at most so much, or one that costs at most `_NEAR` less; else the lowest.

    Costs rise with the values. Each is a program that is compiled, so few are looked at.
    """
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


def _best(trials: Sequence[Mapping[str, Any]], kv_share: float, attended: float) -> Mapping[str, Any]:
    """The trial of the least excess that costs no more than asked for, or than the first does."""
    first = trials[0]
    limits = {
        "held_share": max(kv_share, first["held_share"]),
        "attended_share": max(attended, first["attended_share"]),
    }
    fitting = [t for t in trials if all(round(t[name] - limit, _DIGITS) <= 0 for name, limit in limits.items())]
    return min(fitting, key=lambda trial: (trial["excess"], trial["sum"]))  # of equal ones the first


def _space(spec: MethodSpec) -> list[tuple[int, str, tuple[Any, ...]]]:
    """Part, option and values of all that is searched; what the user gave stands."""
    return [
        (number, option, values)
        for number, (name, given) in enumerate(spec.parts)
        for option, values in SPACES.get(name, {}).items()
        if option not in given
    ]


def _points(spec: MethodSpec, trials: int, seed: int) -> list[list[dict[str, Any]]]:
    """Options of each part for every trial: none changed, then allowed points of the space, drawn without repeats."""
    space, none = _space(spec), [dict[str, Any]() for _ in spec.parts]
    drawn = list(itertools.product(*(values for _, _, values in space)))
    order = np.random.default_rng([seed, zlib.crc32(spec.label.encode())]).permutation(len(drawn))
    found = [none]
    for index in order.tolist():
        if len(found) == trials:
            break
        point = [dict(part) for part in none]
        for (number, option, _), value in zip(space, drawn[index], strict=True):
            point[number][option] = value
        if _is_allowed(spec, point):
            found.append(point)
    return found


def _is_allowed(spec: MethodSpec, point: list[dict[str, Any]]) -> bool:
    """Whether options of a method go together: say, no more observed queries than the window has."""
    known = {"preferences": [1.0], "gates": [[1.0]]}  # their values play no part in it
    for (name, given), changed in zip(spec.parts, point, strict=True):
        required = {option: known[option] for option in known if (name, option) in _MEASURED}
        if name not in SPACES:
            continue
        try:
            get(name, **{**required, **given, **changed})
        except ValueError:
            return False
    return True


_MEASURED = {("cake", "preferences"), ("duoattention", "gates")}


def _written(parts: Parts) -> MethodSpec:
    """A method as it is written on the command line."""

    def value(of: Any) -> str:
        return of if isinstance(of, str) else json.dumps(of)

    def part(name: str, options: Mapping[str, Any]) -> str:
        listed = ",".join(f"{option}={value(of)}" for option, of in options.items())
        return f"{name}:{listed}" if options else name

    return MethodSpec("+".join(part(*each) for each in parts), parts)
