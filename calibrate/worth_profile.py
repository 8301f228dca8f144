"""Profiles of predicted worth: fitted maps, what they were measured to hold, and the shares chosen (docs/worth.md)."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Float64

from tca_jax.calibration.predicted_worth import WorthMaps, fit_worth, pack_texts
from tca_jax.calibration.probes import FOLLOW, ProbedText, Segment, probed_texts
from tca_jax.calibration.repetition import CHUNK
from tca_jax.engine.contexts import prefill
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.prompts import Prompt
from tca_jax.engine.score import score, score_answers
from tca_jax.errors import check_integer, explaining, is_finite_number, require
from tca_jax.methods.base import Method
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.worth import BLOCK, WINDOW, ReadSettings, WorthSettings, by_worth
from tca_jax.models.config import ModelConfig
from tca_jax.persistence import save

FORMAT_VERSION = 5
MASS = 0.1  # least mass of a block that a tile reads
_KEPT, _SELECTED = (0.1, 0.15, 0.2, 0.25, 0.33, 0.5), (0.05, 0.1, 0.2)
_LEAST_KNOWN = 0.97  # of the facts known under full attention, and ...
_MOST_FOLLOWING = 0.01  # ... the loss of the following text above full attention's, that the default share holds
_MOST_NATS = 0.1  # above full attention's loss of copies and facts inside a prompt, of the default selected share
_ROOM = 1.5  # pages of a row over those that its share needs on the calibration's texts
_SHOWN = 12  # characters of a fingerprint in a message
_OF_MAPS = tuple(field.name for field in dataclasses.fields(WorthMaps))
_TABLES = ("kept_table", "reading_table", "sources")
_METADATA = ("kept", "selected", "fingerprint", "model_name", "library_version", *_TABLES)
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class WorthProfile:
    """Maps of hidden states to predicted worth, and which shares of the tokens stay and are selected.

    Attributes:
        maps: Maps of all KV heads and the thresholds of shares.
        kept: Share of all heads' tokens that stay, of texts like the calibration's.
        selected: Share that prompts attend to singly; blocks of mass and means come besides.
        kept_table: For each kept share that was measured: "kept", "facts" and "copies" (share of the answers known
            under full attention that stay right), "following" (loss of the following text over full attention's - 1).
        reading_table: For each selected share: "selected", "attended", "plain" (loss inside texts over full
            attention's - 1), "copy" and "fact" (nats above it).
        fingerprint: Of the model's weights; None fits any model of this shape.
        model_name: Name of the model.
        sources: For each text its number of "tokens" and the "sha256" of its ids.
        library_version: Version of tca_jax that made the profile.
    """

    maps: WorthMaps
    kept: float
    selected: float
    kept_table: tuple[Mapping[str, float], ...]
    reading_table: tuple[Mapping[str, float], ...]
    fingerprint: str | None
    model_name: str
    sources: tuple[Mapping[str, Any], ...] = ()
    library_version: str = dataclasses.field(default_factory=lambda: importlib.metadata.version("tca-jax"))

    def __post_init__(self) -> None:
        for name in ("kept", "selected"):
            value = getattr(self, name)
            known = is_finite_number(value) and 0 < value <= 1
            require(known, f"{name} = {value!r}: must be in (0, 1]")

    def __repr__(self) -> str:
        layers, heads = self.maps.maps.shape[:2]
        return f"WorthProfile({self.model_name!r}, {layers} layers of {heads} KV heads, {self.kept:.0%} kept)"

    def with_kept(self, kept: float | None = None, selected: float | None = None) -> WorthProfile:
        """The profile with other shares; nothing is calibrated anew.

        Raises:
            ValueError: a share is not in (0, 1].
        """
        return dataclasses.replace(
            self, kept=self.kept if kept is None else kept, selected=self.selected if selected is None else selected
        )

    def validate_for(self, model_config: ModelConfig, fingerprint: str | None, name: str) -> None:
        """Checks that the profile belongs to a model; arguments and errors are those of `Profile.validate_for`."""
        c, shape = model_config, self.maps.maps.shape
        own, its = f"profile of {self.model_name!r}", f"model {name!r}"
        has = f"has {shape[0]} layers of {shape[1]} heads and width {shape[2] - 1}"
        wanted = (c.num_layers, c.num_kv_heads, c.hidden_size + 1)
        of_model = f"but {its} has {wanted[0]} of {wanted[1]} and {c.hidden_size}: calibrate this model"
        require(shape == wanted, f"{own} {has}, {of_model}")
        is_its = None in (self.fingerprint, fingerprint) or self.fingerprint == fingerprint
        both = f"fingerprint {str(self.fingerprint)[:_SHOWN]}, the model's is {str(fingerprint)[:_SHOWN]}"
        require(is_its, f"{own} was made with other weights than those of {its} ({both}): calibrate this model")

    def method(self) -> Method:
        """The attention method."""
        return by_worth(min(1.0, _ROOM * self.kept))

    def settings(self) -> WorthSettings:
        """Arrays of the method."""
        layers = self.maps.maps.shape[0]
        found = (self.maps.threshold(self.selected), MASS, True)
        reading = ReadSettings(*(jnp.full(layers, x, bool if x is True else jnp.float32) for x in found))
        shares = _shares_at(self.maps.shares, self.kept).mean(axis=1)
        left = shares / np.cumsum(shares[::-1])[::-1]
        return WorthSettings(
            jnp.asarray(self.maps.maps, jnp.float32),
            jnp.full(layers, self.maps.threshold(self.kept), jnp.float32),
            reading,
            jnp.asarray(left, jnp.float32),
        )

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the profile to a directory, in place of the one that it holds; `tca_jax.Profile.load` reads it.

        Raises:
            OSError: it cannot be written to; the message names it, and what it held still loads.
        """
        arrays = {name: np.asarray(getattr(self.maps, name)) for name in _OF_MAPS}
        arrays["maps"] = np.asarray(jnp.asarray(self.maps.maps, jnp.bfloat16)).view(np.uint16)
        fields = {name: getattr(self, name) for name in _METADATA}
        save("profile", directory, arrays, {"format_version": FORMAT_VERSION, "rule": "worth"} | fields)

    @classmethod
    def of_saved(cls, folder: Any, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> WorthProfile:
        """The profile of what `save` wrote."""
        with explaining(f"{folder}: damaged", ValueError, TypeError, LookupError, AttributeError):
            fields = {name: metadata[name] for name in _METADATA}
            of_maps = {name: arrays[name] for name in _OF_MAPS}
            of_maps["maps"] = np.asarray(of_maps["maps"].view(jnp.bfloat16), np.float32)
            tables = {name: tuple(map(dict, fields[name])) for name in _TABLES}
            return cls(maps=WorthMaps(**of_maps), **fields | tables)


def _shares_at(shares: Float32[np.ndarray, "layers Hkv"], kept: float) -> Float64[np.ndarray, "layers Hkv"]:
    """About what heads keep at another share in all than they were measured at: their odds change by one factor."""
    odds = np.clip(shares, 1e-3, 1 - 1e-3) / (1 - np.clip(shares, 1e-3, 1 - 1e-3))
    low, high = 1e-9, 1e9
    for _ in range(60):
        factor = np.sqrt(low * high)
        low, high = (low, factor) if (odds * factor / (1 + odds * factor)).mean() > kept else (factor, high)
    return odds * low / (1 + odds * low)


def calibrate_worth(
    lm: LM,
    texts: Prompt | Sequence[Prompt],
    *,
    count: int = 8,
    tokens: int = 8_192,
    kept: float | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> WorthProfile:
    """Fits predicted worth on half of the texts and measures it on the others (docs/worth.md).

    Args:
        lm: The model, on one device.
        texts: Texts or sequences of token ids; shorter ones are packed, longer ones cut.
        count: Texts of `tokens` tokens that are made of them.
        tokens: Tokens of each.
        kept: Share that stays; None for the smallest that holds 97% of the facts and 1% of the following text's loss.
        progress: Called with the stage, what is done of it and all of it.

    Raises:
        ValueError: the texts have too few tokens (says how many are missing), or `kept` is out of range.
    """
    require_lm(lm)
    check_integer("count", count, at_least=2)
    check_integer("tokens", tokens, at_least=4 * BLOCK)
    require(kept is None or (is_finite_number(kept) and 0 < kept <= 1), f"kept = {kept!r}: must be in (0, 1]")
    given = [texts] if isinstance(texts, str | bytes) or (len(texts) and isinstance(texts[0], int)) else texts
    packed = pack_texts(lm, given, count, tokens)
    maps = fit_worth(lm, packed, chunk=min(CHUNK, tokens // 2), progress=progress)["worth"]
    sources = tuple(
        {"tokens": len(ids), "sha256": hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()} for ids in packed
    )
    fields: dict[str, Any] = {"fingerprint": lm.fingerprint, "model_name": lm.name, "sources": sources}
    profile = WorthProfile(maps, 1.0, 1.0, (), (), **fields)
    probed = probed_texts(lm, packed[count // 2 :], None, TCAConfig(window=WINDOW, block_size=BLOCK))
    kept_table, reading_table = _measure(lm, profile, probed, progress)
    chosen = kept or next((row["kept"] for row in kept_table if _holds(row)), kept_table[-1]["kept"])
    near = [row for row in reading_table if max(row["copy"], row["fact"]) <= _MOST_NATS]
    selected = (near or reading_table[-1:])[0]["selected"]
    return dataclasses.replace(
        profile, kept=float(chosen), selected=selected, kept_table=kept_table, reading_table=reading_table
    )


def _holds(row: Mapping[str, float]) -> bool:
    return row["facts"] >= _LEAST_KNOWN and row["following"] <= _MOST_FOLLOWING


def _measure(
    lm: LM, profile: WorthProfile, probed: Sequence[ProbedText], progress: Progress
) -> tuple[tuple[dict[str, float], ...], tuple[dict[str, float], ...]]:
    """Answers behind texts at kept shares, and losses inside texts at selected ones."""
    steps = len(probed) * (len(_KEPT) + len(_SELECTED) + 2)
    done = iter(range(1, steps + 1))

    def tell(found: Any) -> Any:
        progress("measure", next(done), steps)
        return found

    def answers(of: WorthProfile | None) -> list[dict[str, list[Any]]]:
        under = lm.with_profile(of)
        return [tell(_answers(under, each)) for each in probed]

    reference = answers(None)
    known = {kind: [flag for each in reference for flag in each[kind]] for kind in ("facts", "copy")}
    base = float(np.mean([loss for each in reference for loss in each[FOLLOW]]))
    kept_table = []
    for share in _KEPT:
        found = answers(profile.with_kept(share, 1.0))
        row = {"kept": share}
        for kind, name in (("facts", "facts"), ("copy", "copies")):
            right = [flag for each in found for flag in each[kind]]
            both = [a for a, b in zip(right, known[kind], strict=True) if b]
            row[name] = float(np.mean(both)) if both else float("nan")
        following = float(np.mean([loss for each in found for loss in each[FOLLOW]]))
        kept_table.append(row | {"following": following / base - 1})
    full = [tell(_losses(lm.with_profile(None), each)) for each in probed]
    reading_table = []
    for share in _SELECTED:
        under = lm.with_profile(profile.with_kept(1.0, share))
        found = [tell(_losses(under, each)) for each in probed]
        attended, plain, copy, fact = (np.nanmean(np.array(found), axis=0)).tolist()
        _, plain_full, copy_full, fact_full = (np.nanmean(np.array(full), axis=0)).tolist()
        row = {"selected": share, "attended": attended, "plain": plain / plain_full - 1}
        reading_table.append(row | {"copy": copy - copy_full, "fact": fact - fact_full})
    return tuple(kept_table), tuple(reading_table)


def _counted(segment: Segment) -> tuple[int, int]:
    """The first token of a probe that counts, at least the second one, and the one behind the last."""
    places = np.flatnonzero(segment.answers)
    return max(1, int(places[0])), int(places[-1]) + 1


def _answers(lm: LM, text: ProbedText) -> dict[str, list[Any]]:
    """Whether facts and copies are right, and the loss of the text that follows, behind a text."""
    asked = [segment for segment in text.segments if any(segment.answers)]
    spans = [_counted(segment) for segment in asked]
    prompts = [list(segment.ids[:first]) for segment, (first, _) in zip(asked, spans, strict=True)]
    given = [[list(segment.ids[first:end])] for segment, (first, end) in zip(asked, spans, strict=True)]
    found = score_answers(lm, prompts, given, context=prefill(lm, list(text.ids)))
    results: dict[str, list[Any]] = {"facts": [], "copy": [], FOLLOW: []}
    for segment, logprobs, greedy in zip(asked, found.logprobs, found.greedy, strict=True):
        if segment.kind in results:
            results[segment.kind].append(float(-logprobs[0].mean()) if segment.kind == FOLLOW else greedy[0])
    return results


def _losses(lm: LM, text: ProbedText) -> tuple[float, float, float, float]:
    """Attended share, and losses of a text, and of copies and facts in it that follow."""
    ids, spans = list(text.ids), {"copy": list[np.ndarray](), "facts": list[np.ndarray]()}
    for segment in text.segments:
        if segment.kind in spans and len(ids) + len(segment.ids) <= lm.config.max_context:
            spans[segment.kind].append(len(ids) + np.flatnonzero(segment.answers))
            ids += segment.ids
    found = score(lm, ids)
    losses = -found.logprobs[0]
    of_kinds = (losses[np.concatenate(each) - 1].mean() if each else np.nan for each in spans.values())
    copy, fact = map(float, of_kinds)
    return found.attended_share[0], float(losses[: len(text.ids) - 1].mean()), copy, fact
