"""Constraints on the next token of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, UInt8

from tca_jax.errors import UserError


@runtime_checkable
class Constraint(Protocol):
    """Says which tokens may come next in one answer.

    It is called once for each token, in the engine's thread: all answers of the batch wait meanwhile, and it must not
    call the engine. It may keep a state, and then is for one answer alone.
    """

    def __call__(self, tokens: list[int], /) -> Bool[np.ndarray, " V"] | None:
        """Allowed tokens.

        Args:
            tokens: New tokens of the answer so far; none before the first.

        Returns:
            A bool array `[V]` over the model's vocabulary, of which at least one is True; None if the answer is
            complete. It ends then, with the finish reason "stop", also before `min_new_tokens`.
        """
        ...


def next_allowed(
    constraint: Constraint, tokens: list[int], vocabulary: int, forbidden: Sequence[int]
) -> UInt8[np.ndarray, " W"] | None:
    """What a constraint allows next.

    Args:
        constraint: The constraint.
        tokens: New tokens of the answer.
        vocabulary: V.
        forbidden: Stop tokens that may not be drawn yet.

    Returns:
        A bit a token, in ceil(V / 8) bytes, the lowest bit first; None if the answer is complete.

    Raises:
        ValueError: the constraint gives no such array, or nothing is allowed.
        Exception: what it raises.
    """
    allowed = constraint(tokens)
    if allowed is None:
        return None
    if not isinstance(allowed, np.ndarray) or allowed.dtype != bool or allowed.shape != (vocabulary,):
        kind, shape = getattr(allowed, "dtype", type(allowed).__name__), getattr(allowed, "shape", ())
        raise UserError(
            f"constraint gives {kind} of shape {tuple(shape)}: must be a NumPy array of bool, of shape ({vocabulary},)"
        )
    if not allowed.any():
        raise UserError(f"constraint allows no token behind {len(tokens)} tokens of the answer")
    if forbidden and not np.delete(allowed, forbidden).any():
        raise UserError(
            f"constraint allows stop tokens alone behind {len(tokens)} tokens of the answer, fewer than min_new_tokens"
        )
    return np.packbits(allowed, bitorder="little")
