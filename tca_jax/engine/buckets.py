"""Buckets: the padded lengths of prompts and answers that compiled programs exist for."""

from __future__ import annotations

from tca_jax.errors import UserError
from tca_jax.pallas_kernels.integers import round_up

_SMALLEST = 16


def bucket_length(length: int, smallest: int = _SMALLEST) -> int:
    """Smallest bucket that holds `length` tokens.

    Eight buckets an octave, so from 128 tokens on at most 12.5% of a bucket is padding, and a service that sees every
    length up to a million compiles about a hundred programs.

    Args:
        length: Prompt tokens, at least 1.
        smallest: Least step between buckets, a power of two.

    Returns:
        The padded length, a multiple of `smallest`.
    """
    if length < 1:
        raise UserError(f"length = {length}: must be at least 1")
    step = max(smallest, 1 << max(0, length.bit_length() - 4))
    return round_up(length, step)
