"""Profiles of predicted worth: fitted maps, measured tables, and the chosen shares (docs/worth.md)."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Float64

from tca_jax.calibration.predicted_worth import SHARES, Progress, WorthMaps, fit_worth, pack_texts
from tca_jax.calibration.probes import FOLLOW, ProbedText, probed_texts
from tca_jax.calibration.repetition import CHUNK, chat_frame, repetition_request, repetition_rows
from tca_jax.engine.contexts import prefill
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import Encoder, Prompt, encode_prompt, encode_verbatim, is_single
from tca_jax.engine.score import score, score_answers
from tca_jax.errors import check_integer, is_finite_number, require
from tca_jax.methods.base import Method, num_ranked_blocks
from tca_jax.methods.worth import BLOCK, WINDOW, ReadSettings, WorthSettings, by_worth
from tca_jax.models.config import ModelConfig
from tca_jax.pallas_kernels.checks import check_shapes
from tca_jax.persistence import save

FORMAT_VERSION = 5
BLOCK_SCORE = 0.1  # least score of a block that a tile reads
_KEPT, _SELECTED = (0.1, 0.15, 0.2, 0.25, 0.33, 0.5), (0.05, 0.1, 0.2)
COUNT, TOKENS, _LEAST_TOKENS = 8, 8_192, 4 * BLOCK  # texts, and tokens of each
LEAST_KNOWN = 0.97  # of the facts known under full attention, and ...
MOST_FOLLOWING = 0.01  # ... the loss of the following text above full attention's, that the default share holds
FEWEST = math.ceil((2 * LEAST_KNOWN - 1) / (1 - LEAST_KNOWN))  # known facts that can show that share by `holds`: 32
MOST_NATS = 0.1  # above full attention's loss of copies and facts inside a prompt, of the default selected share
_ROOM = 1.5  # pages of a row over those that its share needs on the calibration's texts
_SHOWN = 12  # characters of a fingerprint in a message
_OF_MAPS = tuple(field.name for field in dataclasses.fields(WorthMaps))
_TABLES = ("kept_table", "reading_table", "sources")
_METADATA = ("kept", "selected", "fingerprint", "model_name", "library_version", *_TABLES)


@dataclasses.dataclass(frozen=True, eq=False)
class WorthProfile:
    """Maps of hidden states to predicted worth, and which shares of the tokens stay and are selected.

    Attributes:
        maps: Maps of all KV heads and the thresholds of shares.
        kept: Share of all heads' tokens that stay, of texts like the calibration's.
        selected: Share that prompts attend to singly; blocks of high score and means come besides.
        kept_table: For each measured kept share: "kept", "known" (facts known under full attention), "facts" and
            "copies" (share of them that stay right), "following" (loss of following text over full attention's - 1).
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
            require_share(name, getattr(self, name))
        dims = {"maps": "layers Hkv D1", "thresholds": "shares"}
        of_maps = {name: (x, dims.get(name, "layers Hkv")) for name, x in vars(self.maps).items()}
        check_shapes({"SHARES": (SHARES, "shares")} | of_maps)
        for name in dims:  # a head without a finite map has another one, which keeps the window
            require(np.isfinite(getattr(self.maps, name)).all(), f"{name} holds NaN or infinity: must be finite")

    def __repr__(self) -> str:
        layers, heads = self.maps.maps.shape[:2]
        return f"WorthProfile({self.model_name!r}, {layers} layers of {heads} KV heads, {self.kept:.0%} kept)"

    def with_kept(self, kept: float | None = None, selected: float | None = None) -> WorthProfile:
        """The profile with other shares, in (0, 1]; nothing is calibrated again."""
        given: dict[str, Any] = {"kept": kept, "selected": selected}
        return dataclasses.replace(self, **{name: share for name, share in given.items() if share is not None})

    def kept_share(self, num_tokens: int) -> Float64[np.ndarray, "layers Hkv"]:
        """Share, about, that each head keeps of `num_tokens` tokens like the calibration's, the window included."""
        check_integer("num_tokens", num_tokens, at_least=1)
        ranked = num_ranked_blocks(int(num_tokens), BLOCK, WINDOW) * BLOCK
        return (_shares_at(self.maps.shares, self.kept) * ranked + num_tokens - ranked) / num_tokens

    def validate_for(self, model_config: ModelConfig, fingerprint: str | None, name: str) -> None:
        """Raises ValueError as `Profile.validate_for` does."""
        c, shape = model_config, self.maps.maps.shape
        has = f"has {shape[0]} layers of {shape[1]} heads and width {shape[2] - 1}, but model {name!r} has"
        of_model = f"{c.num_layers} of {c.num_kv_heads} and {c.hidden_size}: calibrate this model"
        fits = shape == (c.num_layers, c.num_kv_heads, c.hidden_size + 1)
        require(fits, f"profile of {self.model_name!r} {has} {of_model}")
        require_weights(self, fingerprint, name)

    def method(self) -> Method:
        """The attention method."""
        return by_worth(min(1.0, _ROOM * self.kept))

    def settings(self) -> WorthSettings:
        """Arrays of the method."""
        layers = self.maps.maps.shape[0]
        theta = jnp.full(layers, self.maps.threshold(self.selected), jnp.float32)
        reading = ReadSettings(theta, jnp.full(layers, BLOCK_SCORE, jnp.float32), jnp.ones(layers, bool))
        shares = _shares_at(self.maps.shares, self.kept).mean(axis=1)
        left = shares / np.cumsum(shares[::-1])[::-1]
        maps, left = (jnp.asarray(x, jnp.float32) for x in (self.maps.maps, left))
        return WorthSettings(maps, jnp.full(layers, self.maps.threshold(self.kept), jnp.float32), reading, left)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the profile to a directory as `Profile.save` does; `tca_jax.Profile.load` reads it."""
        arrays = {name: np.asarray(getattr(self.maps, name)) for name in _OF_MAPS}
        arrays["maps"] = np.asarray(jnp.asarray(self.maps.maps, jnp.bfloat16)).view(np.uint16)
        fields = {name: getattr(self, name) for name in _METADATA}
        save("profile", directory, arrays, {"format_version": FORMAT_VERSION, "rule": "worth"} | fields)

    @classmethod
    def of_saved(cls, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> WorthProfile:
        """The profile of the files of `save`."""
        fields = {name: metadata[name] for name in _METADATA}
        of_maps = {name: arrays[name] for name in _OF_MAPS}
        of_maps["maps"] = np.asarray(of_maps["maps"].view(jnp.bfloat16), np.float32)
        tables = {name: tuple(map(dict, fields[name])) for name in _TABLES}
        return cls(maps=WorthMaps(**of_maps), **fields | tables)


def sources_of(texts: Sequence[Sequence[int]]) -> tuple[dict[str, Any], ...]:
    """Number of tokens and SHA-256 of each text's ids."""
    hashes = (hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest() for ids in texts)
    return tuple({"tokens": len(ids), "sha256": of_ids} for ids, of_ids in zip(texts, hashes, strict=True))


def require_weights(profile: Any, fingerprint: str | None, name: str) -> None:
    """Raises ValueError if a profile was made with other weights than those of a model; None fits any."""
    is_its = None in (profile.fingerprint, fingerprint) or profile.fingerprint == fingerprint
    both = f"fingerprint {str(profile.fingerprint)[:_SHOWN]}, the model's is {str(fingerprint)[:_SHOWN]}"
    made = f"profile of {profile.model_name!r} was made with other weights than those of model {name!r}"
    require(is_its, f"{made} ({both}): calibrate this model")


def require_share(name: str, value: float | None) -> None:
    """Raises ValueError unless a share is None or in (0, 1]."""
    known = value is None or (is_finite_number(value) and 0 < value <= 1)
    require(known, f"{name} = {value!r}: must be in (0, 1]")


def _shares_at(shares: Float32[np.ndarray, "layers Hkv"], kept: float) -> Float64[np.ndarray, "layers Hkv"]:
    """Shares of heads, about, at another share of all tokens than the measured one: odds change by one factor."""
    odds = np.clip(shares, 1e-3, 1 - 1e-3) / (1 - np.clip(shares, 1e-3, 1 - 1e-3))
    low, high = 1e-9, 1e9
    for _ in range(60):
        factor = np.sqrt(low * high)
        low, high = (low, factor) if (odds * factor / (1 + odds * factor)).mean() > kept else (factor, high)
    return odds * low / (1 + odds * low)


def calibrate_worth(
    lm: LM, texts: Prompt | Sequence[Prompt], count: int, tokens: int, kept: float | None, progress: Progress
) -> WorthProfile:
    """Fits predicted worth on half of the texts and measures it on the others; `tca_jax.calibrate` documents it."""
    packed, chunk = packed_texts(lm, texts, count, tokens, kept)
    maps = fit_worth(lm, packed, chunk=chunk, progress=progress)["worth"]
    profile = WorthProfile(maps, 1.0, 1.0, (), (), lm.fingerprint, lm.name, sources_of(packed))
    kept_table, reading_table = measured_tables(lm, profile, probed_texts(lm, packed[count // 2 :]), progress)
    if kept is None and (doubt := doubt_of(kept_table, lm.name)):
        warnings.warn(doubt, stacklevel=3)
    profile = dataclasses.replace(profile, kept_table=kept_table, reading_table=reading_table)
    return profile.with_kept(float(kept or chosen_kept(kept_table)), chosen_selected(reading_table))


def packed_texts(
    lm: Encoder, texts: Prompt | Sequence[Prompt], count: int, tokens: int, kept: float | None
) -> tuple[list[list[int]], int]:
    """Token ids of `count` texts, and the tokens of a repeated chunk; checks the arguments of `calibrate`."""
    check_integer("count", count, at_least=2)
    check_integer("tokens", tokens, at_least=_LEAST_TOKENS)
    require_share("kept", kept)
    most = lm.config.max_context
    chunk = min(CHUNK, tokens // 2, most // 4)
    tokens = min(tokens, most - repetition_rows([0], repetition_request(lm), chunk).tokens.shape[1])
    needed = f"predicted worth needs texts of {_LEAST_TOKENS} tokens, and room for a repetition"
    require(tokens >= _LEAST_TOKENS, f"{lm.name} has {most} positions: {needed}")
    batch = [texts] if is_single(texts, "texts") else list(texts)
    require(batch, "texts is empty: at least one is needed")
    empty = [i for i, each in enumerate(batch) if isinstance(each, Sized) and not len(each)]
    require(not empty, f"texts{empty[:1]} is empty: at least one token is needed")
    named: Iterable[tuple[Any, str]] = ((each, f"texts[{i}]") for i, each in enumerate(batch))
    ids = (encode_verbatim(lm, *x) if isinstance(x[0], str | bytes) else encode_prompt(lm, *x) for x in named)
    if len(batch) >= count:
        return pack_texts(lm, ids, count, tokens), chunk
    # Fewer texts than are needed: their pieces, evenly spread.
    all_ids, size = [token for each in ids for token in each], max(1, tokens - len(chat_frame(lm)[0]))
    pieces = [all_ids[start : start + size] for start in range(0, len(all_ids), size)]
    packed = pack_texts(lm, pieces, max(count, len(all_ids) // size), tokens)
    return [packed[i] for i in np.linspace(0, len(packed) - 1, count).round().astype(int).tolist()], chunk


def chosen_kept(table: Sequence[Mapping[str, float]]) -> float:
    """The smallest kept share that holds answers and the following text as all larger ones do, or the largest."""
    return _least("kept", table, holds)


def chosen_selected(table: Sequence[Mapping[str, float]]) -> float:
    """The smallest selected share under which copies and facts inside a text stay near full attention's loss."""
    sparse = [row for row in table if row["attended"] < 0.999]  # a text that is read in full shows nothing
    return _least("selected", sparse or table[-1:], lambda row: np.nanmax([0.0, row["copy"], row["fact"]]) <= MOST_NATS)


def _least(name: str, table: Sequence[Mapping[str, float]], fits: Callable[[Mapping[str, float]], bool]) -> float:
    """The smallest share from which on all rows fit, so that few answers decide less; or the largest share."""
    fitting = list(itertools.takewhile(fits, reversed(table)))
    return (fitting or table)[-1][name]


def holds(row: Mapping[str, float]) -> bool:
    """Whether a kept share holds the facts that full attention knows, and the following text.

    Of further facts, (right + 1) / (known + 2) are expected to stay right: Laplace's rule of succession. Copies and
    following text show too little: by them two models that knew no fact took 10%, and lost 40 and 76 points later.
    """
    answers, known = float(np.nan_to_num(row["facts"])), row.get("known")  # NaN of none; None in an older profile
    answers = answers if known is None else (answers * known + 1) / (known + 2)
    return answers >= LEAST_KNOWN and row["following"] <= MOST_FOLLOWING


def doubt_of(table: Sequence[Mapping[str, float]], name: str) -> str | None:
    """A warning about a share that the measurements do not explain."""
    if holds(table[-1]):
        return None
    bounds = f"{LEAST_KNOWN:.0%} of the facts within {MOST_FOLLOWING:.0%} of the following text's loss"
    few = f"{table[-1]['known']} known to {name!r}, and fewer than {FEWEST} never show it; give more texts, or kept"
    return f"not even the largest share holds {bounds}, of {few}: kept = {table[-1]['kept']}"


def measured_tables(
    lm: LM, profile: WorthProfile, probed: Sequence[ProbedText], progress: Progress
) -> tuple[tuple[dict[str, float], ...], tuple[dict[str, float], ...]]:
    """Answers after texts at kept shares, and losses inside texts at selected ones."""
    steps = len(probed) * (len(_KEPT) + len(_SELECTED) + 2)
    done = iter(range(1, steps + 1))

    def counted(found: Any) -> Any:
        progress("measuring answers and losses", next(done), steps)
        return found

    def answers(of: WorthProfile | None) -> dict[str, np.ndarray]:
        under = lm.with_profile(of)
        found = [counted(_answers(under, each)) for each in probed]
        return {kind: np.concatenate([each[kind] for each in found]) for kind in found[0]}

    def losses(of: WorthProfile | None) -> list[float]:
        under = lm.with_profile(of)
        return [_mean(column) for column in np.transpose([counted(_losses(under, each)) for each in probed])]

    full, kept_table, reading_table = answers(None), list[dict[str, float]](), list[dict[str, float]]()
    known = int((full["facts"] > 0).sum())
    for share in _KEPT:
        found = answers(profile.with_kept(share, 1.0))
        facts, copies = (_mean(found[kind][full[kind] > 0]) for kind in ("facts", "copy"))
        following = float(found[FOLLOW].mean()) / float(full[FOLLOW].mean()) - 1
        kept_table.append({"kept": share, "known": known, "facts": facts, "copies": copies, "following": following})
    _, plain_full, copy_full, fact_full = losses(None)
    for share in _SELECTED:
        attended, plain, copy, fact = losses(profile.with_kept(1.0, share))
        row = {"selected": share, "attended": attended, "plain": plain / plain_full - 1}
        reading_table.append(row | {"copy": copy - copy_full, "fact": fact - fact_full})
    return tuple(kept_table), tuple(reading_table)


def _mean(figures: np.ndarray) -> float:
    """Mean of those that were measured, which are not NaN; NaN of none."""
    measured = figures[~np.isnan(figures)]
    return float(measured.mean()) if measured.size else math.nan


def _answers(lm: LM, text: ProbedText) -> dict[str, list[Any]]:
    """Whether facts and copies are right, and the loss of the text that follows, after a text."""
    asked = [segment for segment in text.segments if any(segment.answers)]
    counted = (np.flatnonzero(segment.answers) for segment in asked)
    spans = [(max(1, int(places[0])), int(places[-1]) + 1) for places in counted]  # nothing predicts the first token
    prompts = [list(segment.ids[:first]) for segment, (first, _) in zip(asked, spans, strict=True)]
    given = [[list(segment.ids[first:end])] for segment, (first, end) in zip(asked, spans, strict=True)]
    found = score_answers(lm, prompts, given, context=prefill(lm, list(text.ids)))
    results: dict[str, list[Any]] = {"facts": [], "copy": [], FOLLOW: []}
    for segment, logprobs, greedy in zip(asked, found.logprobs, found.greedy, strict=True):
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
