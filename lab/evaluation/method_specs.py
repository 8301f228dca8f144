"""Methods by their names on a command line: options, pairs, profiles, and equal bytes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tca_jax.calibration.profile import Profile, options_of
from tca_jax.calibration.worth_profile import WorthProfile
from tca_jax.engine.lm import LM
from tca_jax.errors import UserError, require
from tca_jax.lab.equal_bytes import with_bytes
from tca_jax.lab.rivals import cake, kvzip_heads
from tca_jax.methods.registry import required_options, with_known
from tca_jax.methods.worth import WINDOW
from tca_jax.methods.written import Parts, joined, parse_parts

#: The method of the profile of the paper's rule, which a model may ship with; that of a profile of predicted worth.
PAPER, WORTH = "paper", "worth"
_NAMED: dict[str, tuple[str, ...]] = {PAPER: (), WORTH: ("kept", "selected")}
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
    return tuple(MethodSpec(label, parse_parts(label, "--methods", _NAMED)) for label in labels)


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
    profile: Profile | WorthProfile | None
    paper: Profile | None
    texts: Callable[[], Sequence[Sequence[int]]]  # token ids, for methods that measure texts first
    _found: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def build(self, spec: MethodSpec) -> Built:
        """The model under a method; ValueError if the method lacks a profile, or an option is not allowed."""
        if _is_worth(spec):
            return Built(self.lm.with_profile(self._worth(spec)))
        name, options = self._resolve(spec)
        return Built(self.lm.with_method(name, **options))

    def build_within(self, spec: MethodSpec, kv_share: float, tokens: int) -> Built:
        """The model under a method with the largest caches of at most a share of full attention's bytes, or its own."""
        if _is_worth(spec):
            found, kept = self._worth(spec), kv_share - WINDOW / tokens
            if kept <= 0:
                return Built(self.lm.with_profile(found), f"its window takes {WINDOW / tokens:.0%}", own_budget=True)
            return Built(self.lm.with_profile(found.with_kept(kept)), f"{kv_share:.0%} of the bytes, about")
        name, options = self._resolve(spec)
        try:
            model = with_bytes(self.lm, name, kv_share, tokens, **options)
        except ValueError as error:
            return Built(self.lm.with_method(name, **options), str(error), own_budget=True)
        return Built(model, f"{kv_share:.0%} of the bytes")

    def _worth(self, spec: MethodSpec) -> WorthProfile:
        """The profile of predicted worth, with the options of the method."""
        found = self.profile
        if not isinstance(found, WorthProfile):
            raise UserError(f"--methods {spec.label}: needs --profile DIR, from tca-jax calibrate")
        return found.with_kept(**spec.parts[0][1])

    def _resolve(self, spec: MethodSpec) -> tuple[str, dict[str, Any]]:
        """A registered name, or two, and all options, those of a profile or a measurement too, for `lm.with_method`."""
        parts, label = list[tuple[str, dict[str, Any]]](), f"--methods {spec.label}"
        missing = f"{label}: {self.lm.name} has no profile of the paper's hyperparameters; make one with tca-jax"
        remedy = "calibrate --paper, in a folder named as --profile with -paper behind it"
        for written, options in spec.parts:
            require(written != PAPER or self.paper is not None, f"{missing} {remedy}")
            name, profile = ("tca", self.paper) if written == PAPER else (written, self.profile)
            given = with_known(name, {} if profile is None else options_of(profile), options)
            for option in required_options(name):
                if option not in given:
                    given[option] = self._option(option, spec.label)
            parts.append((name, given))
        return joined(tuple(parts), label)

    def _option(self, option: str, label: str) -> Any:
        """The value of an option without a default: from the profile, or measured once."""
        made = option not in ("candidates", "gates")
        rule = " --paper" if option == "candidates" else ""
        require(made, f"--methods {label}: needs --profile DIR, from tca-jax calibrate{rule}")
        if option not in self._found:
            if option == "preferences":
                temperatures: dict[str, Any] = cake.published_temperatures(self.lm.name)
                self._found[option] = cake.layer_preferences(self.lm, self.texts(), **temperatures)
            else:
                require(option == "head_scores", f"--methods {label}: its option {option!r} has no default: give it")
                self._found[option] = kvzip_heads.repetition_scores(self.lm, self.texts())
        return self._found[option]


def _is_worth(spec: MethodSpec) -> bool:
    named = [name for name, _ in spec.parts]
    require(WORTH not in named or len(named) == 1, f"--methods {spec.label}: {WORTH} is no part of a pair")
    return named == [WORTH]
