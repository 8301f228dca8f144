"""The two searches of calibration: which heads read blocks, and which keep everything (docs/method.md)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int32

from tca_jax.calibration.journal import Journal
from tca_jax.calibration.probe_losses import ReadText
from tca_jax.calibration.probes import FOLLOW, ProbedText
from tca_jax.calibration.rows import NO_ROW, kept_share
from tca_jax.calibration.search import Found, HeadMask, search
from tca_jax.calibration.text_losses import TextLosses
from tca_jax.engine.cache import memory_bytes
from tca_jax.engine.lm import LM
from tca_jax.errors import UserError
from tca_jax.methods.checks import least_share
from tca_jax.methods.config import TCAConfig

#: A model knows a token that it gives at least half of the probability: greedy decoding then gives it.
KNOWN = math.log(2)
_FOLLOWING_TOLERANCE = 0.01  # of full attention's loss
_LEAST = 1e-9  # nats: a tolerance to divide by
_SURE = 2.0  # standard errors by which a difference of losses is told apart from chance
_SHARE_OF_MEMORY = 3  # keys and values of all texts stay on the device while they take at most this part of its memory


@dataclasses.dataclass(frozen=True)
class Losses:
    """Mean losses in nats per token: under full attention, with every head at row 0, and as chosen."""

    full: float
    row0: float
    chosen: float


@dataclasses.dataclass(frozen=True)
class Reading:
    """Result of the first search.

    Attributes:
        found: HeadMask that read blocks, and what heads are worth.
        losses: Inside the texts.
        attended: Attended share of the texts' pairs as chosen.
    """

    found: Found
    losses: Losses
    attended: float


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Result of the second search.

    Attributes:
        found: HeadMask that are denser than row 0, and what heads are worth.
        rows: Cache row of every head.
        answers: Losses of the probes' answers; None where no kind of probe says anything of the model.
        following: Losses of the tokens that follow a selection.
        counted: Answers that count, by kind of probe: known under full attention and lost at row 0.
    """

    found: Found
    rows: Int32[np.ndarray, "layers Hkv"]
    answers: Losses | None
    following: Losses | None
    counted: dict[str, int]


def choose_reading(
    lm: LM,
    texts: Sequence[Sequence[int]],
    config: TCAConfig,
    *,
    attended: float | None,
    journal: Journal,
    step: Callable[[], None],
) -> Reading:
    """Finds the heads that must read blocks, so that loss inside the texts is close to full attention's.

    Args:
        lm: The model.
        texts: Token ids of each.
        config: Hyperparameters.
        attended: Largest attended share; None for no bound.
        journal: Keeps what was measured.
        step: Called once for every layer that has run.

    Raises:
        ValueError: the model computes NaN or infinity, or row 0 in every head attends to more than `attended`.
    """
    objective = _ReadingObjective(lm, texts, config, journal, step)
    none = np.zeros((lm.config.num_layers, lm.config.num_kv_heads), bool)

    def share(more: HeadMask) -> float:
        return float(np.where(more, objective.shares[..., 1], objective.shares[..., 0]).mean())

    if attended is not None and share(none) > attended:
        raise UserError(
            f"attended = {attended}: must be at least {least_share(share(none))}, what row 0 in every head attends to; "
            "a smaller window takes less"
        )
    found = search(objective, none, lambda more: attended is None or share(more) <= attended)
    losses = Losses(objective.full, objective.row0, objective.loss(found.more))
    return Reading(found, losses, share(found.more))


class _ReadingObjective:
    """Loss inside texts, in units of a share of what row 0 in every head costs."""

    def __init__(
        self, lm: LM, texts: Sequence[Sequence[int]], config: TCAConfig, journal: Journal, step: Callable[[], None]
    ) -> None:
        self._losses, self._journal = TextLosses(lm, texts, config, step), journal
        self._none = np.zeros((lm.config.num_layers, lm.config.num_kv_heads), bool)
        self.full, self.row0, noise, shares = journal.get("reading", None, self._ends)
        self.shares: Float64[np.ndarray, "layers Hkv 2"] = np.asarray(shares)
        # A cost that chance could make is none that heads could be told by.
        self._costs = self.row0 - self.full > _SURE * noise
        self.tolerance = max(config.read_tolerance * (self.row0 - self.full), _LEAST)

    def excess(self, more: HeadMask) -> float:
        if not self._costs:
            return 0.0
        return (self.loss(more) - self.full) / self.tolerance

    def loss(self, more: HeadMask) -> float:
        """Mean loss in nats per token where these heads read blocks."""
        return (
            self._journal.get("reading loss", more, lambda: _mean(self._losses.of(more))) if more.any() else self.row0
        )

    def gains(self, more: HeadMask) -> Float64[np.ndarray, "layers Hkv"]:
        return -np.asarray(self._journal.get("reading slopes", more, lambda: self._losses.slopes(more).tolist()))

    def _ends(self) -> tuple[float, float, float, Any]:
        """Loss under full attention and at row 0, the standard error of their difference, and attended shares."""
        full, row0 = self._losses.full(), self._losses.of(self._none)
        assert self._losses.shares is not None
        return _mean(full), _mean(row0), _standard_error(full, row0), self._losses.shares.tolist()


def choose_keeping(
    lm: LM,
    texts: Sequence[ProbedText],
    reads_blocks: HeadMask,
    config: TCAConfig,
    *,
    kinds: Sequence[str],
    kept: float | None,
    journal: Journal,
    step: Callable[[], None],
) -> Keeping:
    """Finds the heads that must keep more than row 0, so that later questions are answered and text goes on.

    Args:
        lm: The model.
        texts: Texts with their probes.
        reads_blocks: HeadMask that read blocks.
        config: Hyperparameters.
        kinds: Of the probes that were asked for.
        kept: Largest mean share of the cache's tokens behind the longest text; None for no bound.
        journal: Keeps what was measured.
        step: Called once for every layer that has run.
    """
    texts = [text for text in texts if text.segments]
    if not texts:  # too short to be asked anything
        rows = np.where(reads_blocks, config.num_candidates, 0).astype(np.int32)
        nothing = Found(reads_blocks, np.zeros(reads_blocks.shape), 0.0, 0)
        return Keeping(nothing, rows, None, None, dict.fromkeys(kinds, 0))
    objective = _KeepingObjective(lm, texts, reads_blocks, config, kinds, journal, step)
    tokens, least = max(len(text.ids) for text in texts), np.where(reads_blocks, NO_ROW, 0).astype(np.int32)

    def fits(rows: Int32[np.ndarray, "layers Hkv"]) -> bool:
        return kept is None or bool(kept_share(config, tokens, rows, least).mean() <= kept)

    start = np.zeros(reads_blocks.shape, bool)
    if not objective.says:  # no probe tells what questions will need: what is read from afar is kept
        for head in zip(*np.nonzero(reads_blocks), strict=True):
            start[head] = True
            start[head] = fits(objective.rows(start))
    found = search(objective, start, lambda more: fits(objective.rows(more)))
    if start.any():  # heads that are more from the beginning have a worth, too
        worth = np.maximum(found.worth, objective.gains(np.zeros_like(start)))
        found = dataclasses.replace(found, worth=worth)
    rows = _sparsest_rows(objective, found, config) if objective.says else objective.rows(found.more)
    return Keeping(found, rows, *objective.losses(rows), objective.counted)


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
    """Share of answers lost and loss of what follows a selection, in units of their tolerances; the larger counts.

    Attributes:
        says: Whether as many answers count as are told apart from none; where not, probes say nothing of the model.
        counted: Answers that count, by kind of probe.
    """

    def __init__(
        self,
        lm: LM,
        texts: Sequence[ProbedText],
        reads_blocks: HeadMask,
        config: TCAConfig,
        kinds: Sequence[str],
        journal: Journal,
        step: Callable[[], None],
    ) -> None:
        self._lm, self._texts, self._reads, self._config = lm, texts, reads_blocks, config
        self._journal, self._step = journal, step
        self._read: list[ReadText] = []
        self._dense = config.num_candidates
        full = [np.asarray(of_text, np.float32) for of_text in journal.get("keeping full", None, self._full)]
        row0 = self._measured(self.rows(np.zeros_like(reads_blocks)))
        self._full_losses, self._row0 = full, row0
        self._following = [_columns(text, of_text.size, FOLLOW) for text, of_text in zip(texts, full, strict=True)]
        self._answers = _Answers(texts, full, row0)
        counted = self._answers.kinds
        self.says = len(counted) > _SURE * math.sqrt(len(counted))  # five
        self.counted = {kind: counted.count(kind) if self.says else 0 for kind in kinds}

    def rows(self, more: HeadMask) -> Int32[np.ndarray, "layers Hkv"]:
        """Dense where a head is more, row 0 elsewhere."""
        return np.where(more, self._dense, 0).astype(np.int32)

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
                total = max(1, sum(int(mask.sum()) for mask in self._following))
                weights = [mask.astype(np.float32) / total for mask in self._following]
            slopes = [text.slopes(self.rows(more), w) for text, w in zip(self._reading(), weights, strict=True)]
            return np.sum(slopes, axis=0).tolist()

        return -np.asarray(self._journal.get("keeping slopes", more, measure))

    def losses(self, rows: Int32[np.ndarray, "layers Hkv"]) -> tuple[Losses | None, Losses | None]:
        """Of answers and of what follows, as the rows leave them."""
        chosen = self._measured(rows)

        def of(masks: list[np.ndarray]) -> Losses | None:
            if not sum(mask.sum() for mask in masks):
                return None
            return Losses(*(_masked_mean(losses, masks) for losses in (self._full_losses, self._row0, chosen)))

        return of([number >= 0 for number in self._answers.numbers]), of(self._following)

    def _ratios(self, losses: list[np.ndarray]) -> tuple[float, float]:
        """Excess of answers and of what follows."""
        answers = self._answers.lost(losses) / max(self._config.keep_tolerance, _LEAST)
        rises = [now - full for now, full in zip(losses, self._full_losses, strict=True)]
        following = np.concatenate([rise[mask] for rise, mask in zip(rises, self._following, strict=True)])
        if following.size < 2:
            return answers, 0.0
        noise = following.std(ddof=1) / np.sqrt(following.size)
        tolerance = max(_FOLLOWING_TOLERANCE * _masked_mean(self._full_losses, self._following), _SURE * noise)
        return answers, float(following.mean() / max(tolerance, _LEAST))

    def _measured(self, rows: Int32[np.ndarray, "layers Hkv"]) -> list[np.ndarray]:
        """Losses of every column of every text."""
        found = self._journal.get(
            "keeping losses", rows, lambda: [text.losses(rows).tolist() for text in self._reading()]
        )
        return [np.asarray(of_text, np.float32) for of_text in found]

    def _full(self) -> list[Any]:
        everything = np.full(self._reads.shape, self._dense, np.int32)
        read = (ReadText(self._lm, text, None, self._config, self._step) for text in self._texts)
        return [text.losses(everything).tolist() for text in read]

    def _reading(self) -> list[ReadText]:
        """The texts, read once."""
        if not self._read:
            limit = memory_bytes()
            for text in self._texts:
                read = ReadText(self._lm, text, self._reads, self._config, self._step)
                if limit is not None and read.nbytes * len(self._texts) > limit / _SHARE_OF_MEMORY:
                    read.to_host()
                self._read.append(read)
        return self._read


class _Answers:
    """Answers of probes that tell what heads are worth: full attention knows them, and row 0 loses them.

    The model knows an answer if the mean loss of its tokens is at most `KNOWN`; its known tokens count. Let p be the
    probability of a token, P its probability under full attention. The share of the answer that is lost is

        1 - prod_t min(1, 2 p_t / P_t),

    so a token is lost where its probability falls below half of full attention's. Answers count of which row 0 loses
    more than half.

    Args:
        texts: Texts with their probes.
        full: Losses of all columns under full attention, of each text.
        row0: The same with every head at row 0.

    Attributes:
        numbers: Of every column of every text, the number of the answer whose token it predicts; -1 for none.
        kinds: Of every answer, its probe's kind.
    """

    def __init__(
        self,
        texts: Sequence[ProbedText],
        full: Sequence[Float32[np.ndarray, " P"]],
        row0: Sequence[Float32[np.ndarray, " P"]],
    ) -> None:
        self._full = full
        self.numbers: list[Int[np.ndarray, " P"]] = []
        self.kinds: list[str] = []
        for text, known, lost in zip(texts, full, row0, strict=True):
            number = np.full(known.size, -1)
            for index, probe in enumerate(text.segments):
                columns = _columns(text, known.size, index)
                if probe.kind == FOLLOW or not columns.any() or known[columns].mean() > KNOWN:
                    continue
                columns &= known <= KNOWN
                if _drop(lost, known)[columns].sum() > KNOWN:
                    number[columns] = len(self.kinds)
                    self.kinds.append(probe.kind)
            self.numbers.append(number)

    def lost(self, losses: Sequence[Float32[np.ndarray, " P"]]) -> float:
        """Mean share of the answers that is lost; 0 without any."""
        drops = np.zeros(len(self.kinds))
        for now, full, number in zip(losses, self._full, self.numbers, strict=True):
            np.add.at(drops, number[number >= 0], _drop(now, full)[number >= 0])
        return float(-np.expm1(-drops).sum() / max(1, drops.size))

    def weights(self, losses: Sequence[Float32[np.ndarray, " P"]]) -> list[Float32[np.ndarray, " P"]]:
        """Weights of the columns whose loss a head may give back: the lost tokens, by the number of answers."""
        return [
            ((number >= 0) & (_drop(now, full) > 0)).astype(np.float32) / max(1, len(self.kinds))
            for now, full, number in zip(losses, self._full, self.numbers, strict=True)
        ]


def _drop(now: Float32[np.ndarray, " P"], full: Float32[np.ndarray, " P"]) -> Float32[np.ndarray, " P"]:
    """Nats by which a token's probability has fallen below half of that under full attention."""
    return np.maximum(now - full - KNOWN, 0)


def _mean(losses: Sequence[np.ndarray]) -> float:
    """The mean over texts of the mean over tokens; texts of which no token counts are left out."""
    return float(np.mean([of_text.mean(dtype=np.float64) for of_text in losses if of_text.size] or [0.0]))


def _standard_error(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Of the mean difference of losses, token by token."""
    differences = np.concatenate([a - b for a, b in zip(one, other, strict=True)])
    return float(differences.std(ddof=1) / np.sqrt(differences.size)) if differences.size > 1 else 0.0


def _columns(text: ProbedText, columns: int, which: int | str) -> Bool[np.ndarray, " P"]:
    """Columns whose next token counts, of the probe of that number, or of the probes of that kind."""
    counted, start = np.zeros(columns, bool), 0
    for number, probe in enumerate(text.segments):
        if which in (number, probe.kind):
            counted[start : start + len(probe.ids) - 1] = probe.answers[1:]
        start += len(probe.ids)
    return counted


def _masked_mean(losses: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> float:
    """The mean of the columns that count, over all texts; 0 where none does."""
    counted = np.concatenate([of_text[mask] for of_text, mask in zip(losses, masks, strict=True)])
    return float(counted.mean(dtype=np.float64)) if counted.size else 0.0
