"""The two searches of calibration: which heads read blocks, and which keep everything (docs/method.md)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int32

from tca_jax.calibration.probe_losses import ReadText
from tca_jax.calibration.probes import FOLLOW, ProbedText, Segment
from tca_jax.calibration.search import Found, HeadMask, search
from tca_jax.calibration.text_losses import TextLosses
from tca_jax.engine.cache import memory_bytes
from tca_jax.engine.lm import LM
from tca_jax.errors import least_share, require
from tca_jax.methods.candidates import kept_share
from tca_jax.methods.config import TCAConfig

#: A model knows a token that it gives at least half of the probability: greedy decoding then gives it.
KNOWN = math.log(2)
_FOLLOWING_TOLERANCE = 0.01  # of full attention's loss
LEAST = 1e-9  # nats: a tolerance to divide by
_SURE = 2.0  # standard errors by which a difference of losses is told apart from chance
_SHARE_OF_MEMORY = 3  # keys and values of all texts stay on the device while they take at most this part of its memory


@dataclasses.dataclass(frozen=True)
class Losses:
    """Mean losses in nats per token: under full attention, with every head at row 0, and as chosen."""

    full: float
    row0: float
    chosen: float

    def __str__(self) -> str:
        return f"{self.full:.4f} under full attention, {self.row0:.4f} with candidate 0, {self.chosen:.4f} as chosen"


@dataclasses.dataclass(frozen=True)
class Reading:
    """Result of the first search."""

    found: Found  # heads that read blocks, and what heads are worth
    losses: Losses  # inside the texts


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Result of the second search."""

    found: Found  # heads that are denser than row 0, and what heads are worth
    rows: Int32[np.ndarray, "layers Hkv"]  # cache row of every head
    answers: Losses | None  # losses of the probes' answers; None where no probe is informative
    following: Losses | None  # losses of the tokens that follow a selection
    counted: dict[str, int]  # answers that count, by kind of probe: known under full attention and lost at row 0
    lost: int = 0  # answers that full attention knows and the smallest budget loses
    known: int = 0  # answers that full attention knows


def choose_reading(
    lm: LM,
    texts: Sequence[Sequence[int]],  # token ids of each
    config: TCAConfig,  # hyperparameters
    *,
    attended: float | None,  # largest attended share; None for no bound
    step: Callable[[], None],  # called once for every layer that has run
) -> Reading:
    """Finds the heads that must read blocks, so that loss inside the texts is close to full attention's.

    Raises:
        ValueError: the model computes NaN or infinity, or row 0 in every head attends to more than `attended`.
    """
    objective = _ReadingObjective(lm, texts, config, step)
    if attended is not None:
        least = objective.attended(objective.none)
        must = f"must be at least {least_share(least)}, the attended share of candidate 0 in every head"
        require(least <= attended, f"attended = {attended}: {must}; a smaller window takes less")
    found = search(objective, objective.none, lambda more: attended is None or objective.attended(more) <= attended)
    return Reading(found, Losses(objective.full, objective.row0, objective.loss(found.more)))


class _Measurements(dict[tuple[str, bytes], Any]):
    """Measured values by name and by heads or rows; the search needs some of them twice."""

    def get_or(self, name: str, of: np.ndarray, measure: Callable[[], Any]) -> Any:
        key = name, of.tobytes()
        if key not in self:
            self[key] = measure()
        return self[key]


class _ReadingObjective:
    """Excess loss inside texts, in units of a share of the smallest budget's excess."""

    def __init__(self, lm: LM, texts: Sequence[Sequence[int]], config: TCAConfig, step: Callable[[], None]) -> None:
        self._losses, self._measured = TextLosses(lm, texts, config, step), _Measurements()
        self.none = np.zeros((lm.config.num_layers, lm.config.num_kv_heads), bool)
        self.full, self.row0, noise, shares = self._ends()
        self._shares: Float64[np.ndarray, "layers Hkv 2"] = np.asarray(shares)
        # A cost that chance could make is none that heads could be told by.
        self._costs = is_sure(self.row0 - self.full, noise)
        self._tolerance = max(config.read_tolerance * (self.row0 - self.full), LEAST)

    def attended(self, more: HeadMask) -> float:
        """Attended share of the texts' pairs where these heads read blocks."""
        return float(np.where(more, self._shares[..., 1], self._shares[..., 0]).mean())

    def excess(self, more: HeadMask) -> float:
        return (self.loss(more) - self.full) / self._tolerance if self._costs else 0.0

    def loss(self, more: HeadMask) -> float:
        """Mean loss in nats per token where these heads read blocks."""
        if not more.any():
            return self.row0
        return self._measured.get_or("loss", more, lambda: mean_loss(self._losses.of(more)))

    def gains(self, more: HeadMask) -> Float64[np.ndarray, "layers Hkv"]:
        return -self._measured.get_or("slopes", more, lambda: self._losses.slopes(more))

    def _ends(self) -> tuple[float, float, float, Any]:
        """Loss under full attention and at row 0, the standard error of their difference, and attended shares."""
        full, row0 = self._losses.full(), self._losses.of(self.none)
        assert self._losses.shares is not None
        noise = standard_error(np.concatenate(full) - np.concatenate(row0))
        return mean_loss(full), mean_loss(row0), noise, self._losses.shares


def choose_keeping(
    lm: LM,
    texts: Sequence[ProbedText],  # texts with their probes
    reads_blocks: HeadMask,  # heads that read blocks
    config: TCAConfig,
    *,
    kinds: Sequence[str],  # of the probes that were asked for
    kept: float | None,  # largest mean share of the cache's tokens behind the longest text; None for no bound
    step: Callable[[], None],
) -> Keeping:
    """Finds the heads that must keep more than the smallest budget for later questions and for text that follows."""
    none, texts = np.zeros_like(reads_blocks), [text for text in texts if text.segments]
    if not texts:  # too short to be asked anything
        rows = np.where(reads_blocks, config.num_candidates, 0).astype(np.int32)
        nothing = Found(reads_blocks, np.zeros(reads_blocks.shape), 0.0)
        return Keeping(nothing, rows, None, None, dict.fromkeys(kinds, 0))
    objective = _KeepingObjective(lm, texts, reads_blocks, config, kinds, step)
    tokens = max(len(text.ids) for text in texts)

    def fits(more: HeadMask) -> bool:
        rows = objective.rows(more)
        prefill_rows = np.where(reads_blocks, rows, 0)
        return kept is None or bool(kept_share(config, tokens, rows, prefill_rows).mean() <= kept)

    if objective.informative:
        found = search(objective, none, fits)
        rows = _sparsest_rows(objective, found, config)
    else:  # no probe tells what questions will need: what is read from afar is kept
        found = search(objective, reads_blocks, fits)
        rows = objective.rows(found.more)
    return Keeping(found, rows, *objective.losses(rows), objective.counted, *objective.lost_and_known)


def _sparsest_rows(objective: _KeepingObjective, found: Found, config: TCAConfig) -> Int32[np.ndarray, "layers Hkv"]:
    """Every dense head takes the sparsest row with which the loss stays within its tolerance, the least worth first."""
    rows = objective.rows(found.more)
    bound = max(1.0, found.excess)
    heads = sorted(zip(*np.nonzero(found.more), strict=True), key=lambda head: found.worth[head])
    for head in heads:
        least, most = 0, config.num_candidates  # what is kept grows with the row: the sparsest one is found by halves
        while least < most:
            rows[head] = (least + most) // 2
            least, most = (least, rows[head]) if objective.excess_of(rows) <= bound else (rows[head] + 1, most)
        rows[head] = most
    return rows


class _KeepingObjective:
    """Share of lost answers and loss of the following tokens, in units of their tolerances; the larger counts.

    Losses are of all texts' columns, one text behind the other.

    Attributes:
        informative: Whether enough answers count to differ from none; where not, the probes are not informative.
        counted: Answers that count, by kind of probe.
    """

    def __init__(
        self,
        lm: LM,
        texts: Sequence[ProbedText],
        reads_blocks: HeadMask,
        config: TCAConfig,
        kinds: Sequence[str],
        step: Callable[[], None],
    ) -> None:
        self._lm, self._texts, self._reads, self._config = lm, texts, reads_blocks, config
        self._measurements, self._step = _Measurements(), step
        full = self._full()
        self._ends = np.cumsum([len(of_text) for of_text in full])
        self._full_losses = np.concatenate(full).astype(np.float32)
        self._row0 = self._measured(self.rows(np.zeros_like(reads_blocks)))
        probes = list(counted_columns(texts, self._ends))
        self._following = np.zeros(self._row0.shape, bool)
        for probe, columns in probes:
            self._following[columns] = probe.kind == FOLLOW
        self._answers = Answers(probes, self._full_losses, self._row0)
        counted = self._answers.kinds
        self.informative = is_informative(len(counted))
        self.counted = {kind: counted.count(kind) if self.informative else 0 for kind in kinds}
        self.lost_and_known = len(counted), self._answers.known

    def rows(self, more: HeadMask) -> Int32[np.ndarray, "layers Hkv"]:
        """Dense where a head is more, row 0 elsewhere."""
        return np.where(more, self._config.num_candidates, 0).astype(np.int32)

    def excess(self, more: HeadMask) -> float:
        return self.excess_of(self.rows(more))

    def excess_of(self, rows: Int32[np.ndarray, "layers Hkv"]) -> float:
        """Of a choice of rows."""
        return max(self._ratios(self._measured(rows)))

    def gains(self, more: HeadMask) -> Float64[np.ndarray, "layers Hkv"]:
        def measure() -> Any:
            losses = self._measured(self.rows(more))
            answers, following = self._ratios(losses)
            if answers >= following:
                weights = self._answers.weights(losses)
            else:
                weights = self._following.astype(np.float32) / max(1, int(self._following.sum()))
            of_texts = zip(self._read_texts, np.split(weights, self._ends[:-1]), strict=True)
            return np.sum([text.slopes(self.rows(more), weights) for text, weights in of_texts], axis=0)

        return -self._measurements.get_or("slopes", more, measure)

    def losses(self, rows: Int32[np.ndarray, "layers Hkv"]) -> tuple[Losses | None, Losses | None]:
        """Of answers and of what follows, as the rows leave them."""
        ends = self._full_losses, self._row0, self._measured(rows)

        def of(mask: Bool[np.ndarray, " P"]) -> Losses | None:
            return Losses(*(float(each[mask].mean(dtype=np.float64)) for each in ends)) if mask.any() else None

        return of(self._answers.number >= 0), of(self._following)

    def _ratios(self, losses: Float32[np.ndarray, " P"]) -> tuple[float, float]:
        """Excess of answers and of what follows."""
        answers = self._answers.lost(losses) / max(self._config.keep_tolerance, LEAST)
        return answers, following_excess(losses[self._following], self._full_losses[self._following])

    def _measured(self, rows: Int32[np.ndarray, "layers Hkv"]) -> Float32[np.ndarray, " P"]:
        def measure() -> Float32[np.ndarray, " P"]:
            return np.concatenate([text.losses(rows) for text in self._read_texts]).astype(np.float32)

        return self._measurements.get_or("losses", rows, measure)

    def _full(self) -> list[Any]:
        everything = self.rows(np.ones_like(self._reads))
        read = (ReadText(self._lm, text, None, self._config, self._step) for text in self._texts)
        return [text.losses(everything) for text in read]

    @functools.cached_property
    def _read_texts(self) -> list[ReadText]:
        """The texts, read once."""
        found, limit = [], memory_bytes()
        for text in self._texts:
            found.append(ReadText(self._lm, text, self._reads, self._config, self._step))
            if limit is not None and found[-1].nbytes * len(self._texts) > limit / _SHARE_OF_MEMORY:
                found[-1].to_host()
        return found


class Answers:
    """Informative answers of probes: full attention knows them, and the smallest budget loses them.

    The model knows an answer if the mean loss of its tokens is at most `KNOWN`; its known tokens count. Let p be the
    probability of a token, P its probability under full attention. The share of the answer that is lost is

        1 - prod_t min(1, 2 p_t / P_t),

    so a token is lost where its probability falls below half of full attention's. Answers count of which row 0 loses
    more than half.

    Attributes:
        number: Of every column, the number of the answer whose token it predicts; -1 for none.
        kinds: Of every answer, its probe's kind.
        known: Answers that full attention knows, whether or not they count.
    """

    def __init__(
        self,
        probes: Sequence[tuple[Segment, Int[np.ndarray, " _"]]],  # with the columns that count
        full: Float32[np.ndarray, " P"],  # losses of all columns under full attention
        row0: Float32[np.ndarray, " P"],  # with every head at row 0
    ) -> None:
        self._full, self.number = full, np.full(full.size, -1)
        self.kinds: list[str] = []
        self.known = 0
        for probe, columns in probes:
            if probe.kind == FOLLOW or not columns.size or full[columns].mean() > KNOWN:
                continue
            self.known += 1
            columns = columns[full[columns] <= KNOWN]
            if self._drop(row0)[columns].sum() > KNOWN:
                self.number[columns] = len(self.kinds)
                self.kinds.append(probe.kind)

    def lost(self, losses: Float32[np.ndarray, " P"]) -> float:
        """Mean share of the answers that is lost; 0 without any."""
        drops, counts = np.zeros(len(self.kinds)), self.number >= 0
        np.add.at(drops, self.number[counts], self._drop(losses)[counts])
        return float(-np.expm1(-drops).sum() / max(1, drops.size))

    def weights(self, losses: Float32[np.ndarray, " P"]) -> Float32[np.ndarray, " P"]:
        """Weights of the columns whose loss a head may give back: the lost tokens, by the number of answers."""
        return ((self.number >= 0) & (self._drop(losses) > 0)).astype(np.float32) / max(1, len(self.kinds))

    def _drop(self, losses: Float32[np.ndarray, " P"]) -> Float32[np.ndarray, " P"]:
        """Nats by which a token's probability has fallen below half of that under full attention."""
        return np.maximum(losses - self._full - KNOWN, 0)


def counted_columns(
    texts: Sequence[ProbedText], ends: Int[np.ndarray, " texts"]
) -> Iterator[tuple[Segment, Int[np.ndarray, " _"]]]:
    """Every probe, and the columns whose next token counts; `ends` of the texts' columns."""
    for text, start in zip(texts, np.append(0, ends[:-1]), strict=True):
        for probe in text.segments:
            yield probe, start + np.flatnonzero(probe.answers[1:])
            start += len(probe.ids)


def is_informative(counted: int) -> bool:
    """Whether this number of answers differs significantly from none: at least five."""
    return counted > _SURE * math.sqrt(counted)


def following_excess(losses: Float32[np.ndarray, " F"], full: Float32[np.ndarray, " F"]) -> float:
    """Rise of the following tokens' loss over full attention's, in units of its tolerance."""
    rises = losses - full
    if rises.size < 2:
        return 0.0
    tolerance = max(_FOLLOWING_TOLERANCE * full.mean(dtype=np.float64), _SURE * standard_error(rises), LEAST)
    return float(rises.mean() / tolerance)


def is_sure(difference: float, noise: float) -> bool:
    """Whether a difference of losses is told apart from chance; `noise` is its standard error."""
    return difference > _SURE * noise


def mean_loss(losses: Sequence[np.ndarray]) -> float:
    """The mean over texts of the mean over tokens; texts of which no token counts are left out."""
    return float(np.mean([of_text.mean(dtype=np.float64) for of_text in losses if of_text.size] or [0.0]))


def standard_error(differences: Float32[np.ndarray, " n"]) -> float:
    """Of the mean of differences of losses."""
    return float(differences.std(ddof=1) / np.sqrt(differences.size)) if differences.size > 1 else 0.0
