"""Which heads become more: a search by what they are worth, the loss that their missing costs.

Both searches of calibration have this form (docs/method.md, "What a head is worth"): derivatives by a gate of each head
say which heads to add, the measured loss says when to stop, and heads that turn out not to be needed go back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64

#: Heads that are more, `[layers, H_kv]`.
HeadMask = Bool[np.ndarray, "layers Hkv"]
# Derivatives are of first order: heads within a factor of two of the largest are told apart by measuring alone.
_ALIKE = 0.5


@runtime_checkable
class Objective(Protocol):
    """What a search lowers."""

    def excess(self, more: HeadMask) -> float:
        """Loss over full attention's in units of the tolerance, so that at most 1 is reached; measured."""

    def gains(self, more: HeadMask) -> Float64[np.ndarray, "layers Hkv"]:
        """Nats that each head would give back, to first order: minus the derivative of the loss by its gate."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of a search."""

    more: HeadMask  # heads that are more
    # Nats that each head gives back to first order, the most that any round has measured.
    worth: Float64[np.ndarray, "layers Hkv"]
    excess: float  # of `more`, in units of the tolerance


def search(objective: Objective, start: HeadMask, allowed: Callable[[HeadMask], bool] = lambda more: True) -> Found:
    """Heads that together bring the loss within its tolerance, as few as the search finds.

    1. The heads whose derivative is at least half of the largest are added and the loss is measured, again and again.
    2. Where derivatives find nothing, every single head is tried, and heads are added by what they gave, most first.
    3. Every head that was added goes back, the least worth first, and stays back where the loss stays within.

    At most three losses a head are measured.
    """
    state = _State(objective, start, allowed)
    while state.excess > 1 and state.add_alike():
        pass
    if state.excess > 1:
        state.add_singles()
    state.drop()
    return Found(state.more, state.worth, state.excess)


class _State:
    """Where a search is."""

    def __init__(self, objective: Objective, start: HeadMask, allowed: Callable[[HeadMask], bool]) -> None:
        self._objective, self._allowed = objective, allowed
        self.more, self.worth = np.zeros_like(start), np.zeros(start.shape)
        if start.any():
            self._derive()
            heads = _descending(np.where(start, self._gains, -np.inf))
            self.more = self._with(heads[: int(start.sum())])
        self._start = self.more
        self._measured: dict[bytes, float] = {}
        self.excess = self._measure(self.more)
        self._derive()

    def add_alike(self) -> bool:
        """Adds the heads of the largest derivatives; whether that lowered the loss."""
        gains = np.where(self.more, -np.inf, self._gains)
        best = gains.max(initial=-np.inf)
        if best <= 0:
            return False
        added = self._with([head for head in _descending(gains) if gains[head] >= _ALIKE * best])
        if (added == self.more).all():
            return False
        excess = self._measure(added)
        if not excess < self.excess:
            return False
        self.more, self.excess = added, excess
        if excess > 1:
            self._derive()
        return True

    def add_singles(self) -> None:
        """Tries every other head alone, and adds heads by what they gave back until the tolerance is reached."""
        gave = np.full(self.more.shape, -np.inf)
        for head in map(tuple, np.argwhere(~self.more).tolist()):
            if (tried := self._with([head]))[head]:
                gave[head] = self.excess - self._measure(tried)
        for head in _descending(gave):
            if self.excess <= 1 or gave[head] <= 0:
                break
            tried = self._with([head])
            if tried[head] and (excess := self._measure(tried)) < self.excess:
                self.more, self.excess = tried, excess

    def drop(self) -> None:
        """Takes heads back, the least worth first, where the loss stays within its tolerance, or as high as it is."""
        added = self.more & ~self._start
        for head in _descending(np.where(added, -self.worth, -np.inf)):
            if not added[head]:
                break
            tried = self.more.copy()
            tried[head] = False
            if (excess := self._measure(tried)) <= max(1, self.excess):
                self.more, self.excess = tried, excess

    def _with(self, heads: list[tuple[int, ...]]) -> HeadMask:
        """These heads beside those that are more, as far as they are allowed."""
        more = self.more.copy()
        for head in heads:
            more[head] = True
            more[head] = self._allowed(more)
        return more

    def _derive(self) -> None:
        self._gains = self._objective.gains(self.more)
        self.worth = np.maximum(self.worth, np.where(self.more, 0, self._gains))

    def _measure(self, more: HeadMask) -> float:
        key = more.tobytes()
        if key not in self._measured:
            self._measured[key] = self._objective.excess(more)
        return self._measured[key]


def _descending(values: Float64[np.ndarray, "layers Hkv"]) -> list[tuple[int, ...]]:
    """Heads by their values, the largest first, ties to the lower layer and head."""
    order = np.argsort(-values, axis=None, kind="stable")
    return list(map(tuple, np.transpose(np.unravel_index(order, values.shape)).tolist()))
