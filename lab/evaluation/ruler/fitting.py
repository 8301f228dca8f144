"""Haystacks of the right size: as large as prompt and answer fit a length, as RULER finds it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing, Sample

_AMPLE = 0.5  # of a length: where one sample takes no more, all fit

#: make(rng, size, index): sample number `index` with a haystack of `size` pieces (sentences, words, documents).
Maker = Callable[[random.Random, int, int], Sample]


def draw_fitted(drawing: Drawing, name: str, make: Maker, *, new_tokens: int, least: int) -> list[Sample]:
    """Samples whose prompts under "prefix", with `new_tokens` of an answer, fit the length.

    Args:
        drawing: What they are drawn for.
        name: The task's name, for messages and for its random numbers.
        make: Makes one.
        new_tokens: Tokens of an answer.
        least: Smallest haystack.

    Raises:
        DoesNotFit: one does not fit with the smallest haystack.
    """

    def draw(size: int, index: int, purpose: str) -> Sample:
        return make(seeded(drawing, name, purpose, index), size, index)

    def tokens(sample: Sample) -> int:
        return len(sample.prompts["prefix"].encode(drawing.lm)) + new_tokens

    if drawing.only_check:
        if tokens(draw(least, 0, "sample")) > _AMPLE * drawing.length:
            needed = _least_length(drawing, name, make, tokens, least)
            if needed > drawing.length:
                raise DoesNotFit.too_short(name, drawing.length, needed, drawing.lm.name)
        return []
    # Every size is tried with a draw of its own, which does not depend on how many were tried before.
    size = largest(lambda size: tokens(draw(size, 0, f"size {size}")) <= drawing.length, least)
    samples = []
    for index in range(drawing.count):
        smaller = size or least
        while (needed := tokens(sample := draw(smaller, index, "sample"))) > drawing.length:
            if smaller == least:
                raise DoesNotFit.too_short(name, drawing.length, needed, drawing.lm.name)
            smaller = max(least, smaller - max(1, smaller // 100))
        samples.append(sample)
    return samples


def _least_length(drawing: Drawing, name: str, make: Maker, tokens: Callable[[Sample], int], size: int) -> int:
    """The length of a drawing where all its samples with a haystack of that size fit, or else the next one where they
    do: at another length, others are drawn."""
    length = drawing.length
    while True:
        there = dataclasses.replace(drawing, length=length)
        needed = max(tokens(make(seeded(there, name, "sample", index), size, index)) for index in range(drawing.count))
        if needed <= length:
            return length
        length = needed


def largest(fits: Callable[[int], bool], least: int) -> int | None:
    """The largest size that fits, of those from `least` on; None where that one does not."""
    if not fits(least):
        return None
    low, high = least, 2 * least
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def seeded(drawing: Drawing, *purpose: object) -> random.Random:
    """Random numbers that depend on the seed, the length and what they are for, in every process the same."""
    return random.Random("/".join(map(str, (drawing.seed, drawing.length, *purpose))))
