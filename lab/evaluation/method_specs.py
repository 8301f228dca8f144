"""Methods by their names on a command line: options, pairs, profiles, and equal bytes."""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tca_jax.calibration.profile import Profile, budgets_of, head_gates
from tca_jax.engine.lm import LM
from tca_jax.errors import UserError, least_share, require
from tca_jax.lab.equal_bytes import held_share, with_bytes
from tca_jax.lab.rivals import cake, kvzip_heads
from tca_jax.methods.registry import required_options, with_known
from tca_jax.methods.written import Parts, joined, parse_parts

#: The profile's method with the hyperparameters of the paper, which a model may ship with.
PAPER = "paper"
_OPTION = re.compile(r"[A-Za-z_]\w*=")


class MethodSpec(NamedTuple):
    """A method with options, or a pair."""

    label: str  # as it was written, for tables
    parts: Parts  # name and options of the method, or of a pair's prefill and cache


def parse_methods(text: str) -> tuple[MethodSpec, ...]:
    """Methods of a list such as "full,tca,streaming:window=512,sinks=8,full+random:share=0.25"."""
    labels = parse_labels(text)
    require(labels, "--methods is empty: at least one is needed")
    for label in labels:
        require(labels.count(label) == 1, f"--methods names {label!r} twice")
    return tuple(MethodSpec(label, parse_parts(label, "--methods", (PAPER,))) for label in labels)


def parse_labels(text: str) -> list[str]:
    """Labels of a list of methods, unchecked."""
    labels: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if labels and _OPTION.match(piece):  # of the preceding method
            labels[-1] += f",{piece}"
        elif piece:
            labels.append(piece)
    return labels


class Built(NamedTuple):
    """A model under a method."""

    lm: LM
    budget: str = ""  # change of the method's budget; empty for none
    own_budget: bool = False  # the method cannot hold the requested bytes; `budget` has the reason


@dataclasses.dataclass(frozen=True)
class Builder:
    """Makes methods for a model."""

    lm: LM
    profile: Profile | None
    paper: Profile | None  # of the paper's hyperparameters
    texts: Callable[[], Sequence[Sequence[int]]]  # token ids, for methods that measure texts first
    _found: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def build(self, spec: MethodSpec) -> Built:
        """The model under a method; ValueError if the method lacks a profile, or an option is not allowed."""
        name, options = self._resolve(spec)
        return Built(self.lm.with_method(name, **options))

    def build_within(self, spec: MethodSpec, kv_share: float, tokens: int) -> Built:
        """The model under a method with the largest caches of at most a share of full attention's bytes, or its own."""
        name, options = self._resolve(spec)
        profile = self.paper if spec.parts[-1][0] == PAPER else self.profile
        own = options.get(name.split("+")[-1], {}) if "+" in name else options
        try:
            if profile is not None and own.get("candidates") is profile.candidates:
                model = self._within_profile(name, options, own, profile, kv_share, tokens)
            else:
                model = with_bytes(self.lm, name, kv_share, tokens, **options)
        except ValueError as error:
            return Built(self.lm.with_method(name, **options), str(error), own_budget=True)
        return Built(model, f"{kv_share:.0%} of the bytes")

    def _within_profile(
        self, name: str, options: Any, own: dict[str, Any], profile: Profile, kv_share: float, tokens: int
    ) -> LM:
        """The profile's candidates with more dense heads, or fewer heads above candidate 0, by worth."""
        known = np.isfinite(profile.keeping_worth).all()
        require(known, "its profile does not know what heads are worth, which orders its heads")
        steps = _ladder(profile)

        def with_steps(lm: LM, count: int) -> LM:
            rows = np.zeros_like(profile.candidates)
            for head, row in steps[:count]:
                rows.flat[head] = row
            changed = {**own, "candidates": rows}
            return lm.with_method(name, **({**options, name.split("+")[-1]: changed} if "+" in name else changed))

        def held(count: int) -> float:
            return held_share(with_steps(self.lm.on_one_device, count), tokens)

        fitting = bisect.bisect_right(range(len(steps) + 1), kv_share, key=held)
        least = f"must be at least {least_share(held(0))}, which window, reserve and candidate 0 take of"
        require(fitting, f"kv_share = {kv_share}: {least} full attention's bytes at {tokens} tokens")
        return with_steps(self.lm, fitting - 1)

    def _resolve(self, spec: MethodSpec) -> tuple[str, dict[str, Any]]:
        """A registered name, or two, and all options as `lm.with_method` takes them."""
        parts = tuple(self._completed(name, options, spec.label) for name, options in spec.parts)
        return joined(parts, f"--methods {spec.label}")

    def _completed(self, name: str, options: Mapping[str, Any], label: str) -> tuple[str, dict[str, Any]]:
        """A registered name and its options, with those of a profile or of a measurement."""
        profile = self.profile
        if name == PAPER:
            if self.paper is None:
                raise UserError(
                    f"--methods {label}: {self.lm.name} has no profile of the paper's hyperparameters; make one with "
                    "tca-jax calibrate --paper, in a folder named as --profile with -paper behind it"
                )
            profile, name = self.paper, self.paper.config.method_name
        given = with_known(name, {} if profile is None else budgets_of(profile), options)
        for option in required_options(name):
            if option not in given:
                given[option] = self._option(option, label)
        return name, given

    def _option(self, option: str, label: str) -> Any:
        """The value of an option without a default: from the profile, or measured once."""
        if option == "gates" and self.profile is not None:
            return head_gates(self.profile)
        made = option not in ("candidates", "gates")
        require(made, f"--methods {label}: needs --profile DIR, from tca-jax calibrate")
        if option not in self._found:
            if option == "preferences":
                temperatures: dict[str, Any] = cake.published_temperatures(self.lm.name)
                self._found[option] = cake.layer_preferences(self.lm, self.texts(), **temperatures)
            else:
                require(option == "head_scores", f"--methods {label}: its option {option!r} has no default: give it")
                self._found[option] = kvzip_heads.repetition_scores(self.lm, self.texts())
        return self._found[option]


def _ladder(profile: Profile) -> list[tuple[int, int]]:
    """Steps (head, candidate) to dense everywhere: first the profile's denser heads, then all others, by worth."""
    own, dense = profile.candidates.ravel(), profile.config.num_candidates
    by_worth = np.argsort(-profile.keeping_worth, axis=None, kind="stable").tolist()
    first = [(head, int(own[head])) for head in by_worth if own[head]]
    return first + [(head, dense) for head in by_worth if own[head] < dense]
