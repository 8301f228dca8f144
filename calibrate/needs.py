"""Which heads a probe needs: those that give back what it loses when every head keeps little of the text before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int32

from tca_jax.calibration.probes import ProbedText
from tca_jax.calibration.readings import Reading
from tca_jax.calibration.rows import choose_cache_rows
from tca_jax.engine.lm import LM
from tca_jax.engine.memory import memory_bytes
from tca_jax.methods.config import TCAConfig

_MOST_NEED = 5.0  # nats: one token that the model is certain of must not outweigh all others
_LOST = 0.1  # nats that a query must lose to count; an answer that is known loses next to nothing
_MOST_ROUNDS = 8
# Heads found in a round give back at least half of what the best one does. Those that share its work would be found
# beside it, and those that can only work once it does are found in a later round.
_FOUND = 0.5
# Where less of the first need is left it is that of few queries, and only the best head is found.
_FEW = 0.001
_SHARE_OF_MEMORY = 4  # texts are kept while they take at most this part of the device's memory
# Of what is lost, so much must come back by one head, or none is to blame: past the heads that fetch, all together give
# back a little each, and no row of any is worth its tokens.
_LEAST_SHARE = 0.15
_NEGLIGIBLE = 2e-4  # of the first need: a token or two of one probe, which chance puts before one head or another
_FEWEST = 0.03  # of the probes that lost at first: what so few go on losing is their own, and no head's work
# Fewer than this part of them are too few to choose a row between by, which another draw of texts would move: a head
# that they find is made dense.
_SURE = 0.1


@dataclasses.dataclass(frozen=True)
class ReadProbe:
    """A text with its probe as full attention reads it.

    Attributes:
        text: The text.
        losses: Of the probe's next tokens, in nats.
        masses: What each row would drop of each query's attention, by layer.
    """

    text: ProbedText
    losses: Float32[np.ndarray, " P"]
    masses: Sequence[Float32[np.ndarray, "Hkv P M1"]]


@dataclasses.dataclass(frozen=True)
class Found:
    """What rounds of reading the probes found.

    Attributes:
        blame: Of every row in [0, 1]: at least 1/2 where a head needs more than it keeps; 0 for dense rows.
        need: Rise of the losses over the sparsest rows, in nats.
        enough: Whether that is at least what was asked for; no head is to blame where it is not.
        rounds: Readings that found a need.
    """

    blame: Float64[np.ndarray, "layers Hkv M1"]
    need: float
    enough: bool
    rounds: int


@dataclasses.dataclass(frozen=True)
class _Lost:
    """What one probe loses in a round: of each query, in nats, and how much of it each head would give back."""

    probe: ReadProbe
    needs: Float32[np.ndarray, " P"]
    shares: Float64[np.ndarray, "layers Hkv"]

    @property
    def total(self) -> float:
        """Of all queries."""
        return float(self.needs.sum(dtype=np.float64))


def find_needed(
    lm: LM,
    probes: Sequence[ReadProbe],
    prefill_rows: Int32[np.ndarray, "layers Hkv"],
    config: TCAConfig,
    *,
    least: float,
    step: Callable[[], None],
) -> Found:
    """Reads the probes over the sparsest rows, makes the heads dense that would give most back, and reads again.

    A query loses what its next token's loss rises over full attention's. A head's share of a probe's loss is the
    derivative of the losses by letting that head see the whole text, over the loss, in [0, 1]; the mean over all probes
    that lose says which heads are found in a round. One round would not do: a head whose work shows only once another
    one sees, or that matters to few tokens, comes to light when the loudest have been found.

    Args:
        lm: The model.
        probes: At least one.
        prefill_rows: What heads keep at least, from the second round on.
        config: The method's hyperparameters.
        least: Nats for each token that counts which all must lose together, or no head is to blame.
        step: Called once for each layer of each text that is read.

    Raises:
        ValueError: the model computes NaN or infinity in the logits of a probe.
    """
    shape = *prefill_rows.shape, config.num_candidates + 1
    readings = _Readings(lm, probes, config, step)
    blame, need, first, rounds = np.zeros(shape), 0.0, np.zeros(len(probes)), 0
    wanted = least * max(1, sum(int(probe.text.counted.sum()) for probe in probes))
    rows, losing = np.zeros(shape[:2], np.int32), list(range(len(probes)))
    while rounds < _MOST_ROUNDS:
        lost = {}
        for number in losing:
            reading, probe = readings.get(number), probes[number]
            needs = _needs(lm, probe, reading.losses(rows))
            need += 0.0 if rounds else float(needs.sum(dtype=np.float64))
            needs = np.where(needs >= _LOST, needs, 0).astype(np.float32)
            if (total := needs.sum(dtype=np.float64)) > 0:
                shares = np.clip(reading.relief((needs > 0).astype(np.float32)) / total, 0, 1)
                lost[number] = _Lost(probe, needs, shares)
        if need < wanted:
            return Found(blame, need, False, min(1, len(lost)))
        if not lost:
            break
        for number, one in lost.items():
            first[number] = first[number] or one.total
        rounds += 1
        lost_first = int(np.count_nonzero(first))
        left = sum(one.total / first[number] for number, one in lost.items()) / lost_first
        losers = len(lost) / lost_first
        if left < _NEGLIGIBLE or losers < _FEWEST:
            break
        found = _blame(list(lost.values()), left, rows, between=losers >= _SURE)
        if found is None:
            break
        blame = np.maximum(blame, found)
        denser = choose_cache_rows(1 - blame, prefill_rows, max(config.tau_probe, 1 - _FOUND))
        if (denser == rows).all():
            break
        rows, losing = denser, sorted(lost)
    return Found(blame, need, True, rounds)


def _blame(
    lost: Sequence[_Lost], left: float, rows: Int32[np.ndarray, "layers Hkv"], *, between: bool
) -> Float64[np.ndarray, "layers Hkv M1"] | None:
    """Blame of every row in a round: 1/2 for being found, and up to 1/2 by how much was `left` to find.

    None where no head would give anything back. `between`: whether a row that still drops something can be enough.
    """
    share = np.mean([one.shares for one in lost], axis=0)
    if not np.isfinite(share).all() or share.max() < _LEAST_SHARE:
        return None
    of_best = share / share.max()
    head = left * of_best / 2 + np.where(of_best >= (_FOUND if left >= _FEW else 1), 0.5, 0)
    dropped = _dropped(lost)
    now = np.take_along_axis(dropped, rows[..., None], axis=-1)
    of_now = np.clip(dropped / np.where(now > 0, now, 1), 0, 1)
    # A row that drops less than half of what the head drops now is enough; the rows that were read over are not.
    tried = np.arange(dropped.shape[-1]) <= rows[..., None]
    return head[..., None] * np.where(tried | (of_now > (_FOUND if between else 0)), 1, of_now)


def _dropped(lost: Sequence[_Lost]) -> Float64[np.ndarray, "layers Hkv M1"]:
    """Mass that every row drops of the losing queries' attention, weighted by need and by the head's share of it."""
    total: Any = 0.0
    for one in lost:
        queries = [np.einsum("hpm,p->hm", mass, one.needs, dtype=np.float64) for mass in one.probe.masses]
        total = total + np.stack(queries) * one.shares[..., None]
    return total


def _needs(lm: LM, probe: ReadProbe, sparse: Float32[np.ndarray, " P"]) -> Float32[np.ndarray, " P"]:
    """How much worse each of a probe's queries foretells a token that counts without the far context, in nats."""
    counted = probe.text.counted
    rise = (sparse - probe.losses)[: len(counted)]
    if not np.isfinite(rise).all():
        raise ValueError(f"model {lm.name!r} computes NaN or infinity in the logits of a probe")
    return np.pad(np.clip(rise, 0, _MOST_NEED) * counted, (0, len(sparse) - len(counted)))


class _Readings:
    """The texts as they were read, kept on the device while all of them take little of it."""

    def __init__(self, lm: LM, probes: Sequence[ReadProbe], config: TCAConfig, step: Callable[[], None]) -> None:
        self._lm, self._probes, self._config, self._step = lm, probes, config, step
        self._kept: dict[int, Reading] = {}

    def get(self, number: int) -> Reading:
        """The text of that number, read anew unless it was kept."""
        if number in self._kept:
            return self._kept[number]
        probe = self._probes[number]
        ids, start, most = probe.text.ids, probe.text.probe_start, len(probe.losses)
        reading = Reading(self._lm, ids, start, most, self._config, self._step)
        limit = memory_bytes()
        if limit is not None and reading.nbytes * len(self._probes) <= limit / _SHARE_OF_MEMORY:
            self._kept[number] = reading
        return reading
