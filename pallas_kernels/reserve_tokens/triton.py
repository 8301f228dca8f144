"""Reserve tokens through Pallas-Triton: the least score that is marked, found digit by digit, then one pass that marks.

The bits of a float that is not negative order as the float does, so the R-th highest score of a region is found as a
number is in radix selection: a pass counts how many of the scores that share the digits found so far have each next
digit, which decides that digit and how many scores of it are still wanted. Every program counts a chunk of a region
and writes its own counts; those of all chunks are added by whoever needs them, the programs of the next pass. So all
multiprocessors work on few regions, nothing is added atomically, and the result does not hang on an order. When the
last digit is decided, the counts also say how many scores that equal the least lie in the chunks before: ties go to
the lower positions. The scores of a layer stay in the L2 cache from pass to pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.pallas_kernels.triton_call import triton_call

#: Bits of a float32 that is not negative.
_SCORE_BITS = 31


@dataclasses.dataclass(frozen=True)
class ReserveConfig:
    """Tiling of the choice of the reserve."""

    chunk: int  # tokens of a program, a multiple of `tile`
    tile: int = 1024  # tokens that a program takes at once, a power of two
    bits: int = 4  # bits of a digit: a pass decides one, comparing every score with 2^bits digits
    warps: int = 4  # warps of a program


def default_config(length: int) -> ReserveConfig:
    """At most 128 chunks, since every program reads all counts of its region."""
    return ReserveConfig(chunk=max(1024, pl.next_power_of_2(cdiv(length, 128))))


@partial(jax.jit, static_argnames=("reserve", "config", "interpret"))
@jax.named_scope("reserve_tokens")
def reserve_tokens(
    scores: Array, ranked_tokens: Array, *, reserve: int, config: ReserveConfig | None = None, interpret: bool = False
) -> Array:
    """Finds and marks; see `reserve_tokens.reserve_tokens`. Negative scores count as 0."""
    batch, kv_heads, length = scores.shape
    if min(reserve, scores.size) == 0:
        return jnp.zeros_like(scores, dtype=bool)
    config = config or default_config(length)
    regions, chunks = batch * kv_heads, cdiv(length, config.chunk)
    operands = scores.reshape(regions, length), ranked_tokens
    call = partial(triton_call, grid=(chunks, regions), warps=config.warps, stages=1, interpret=interpret)
    counts = ((regions, chunks, 2**config.bits), jnp.int32)
    found: tuple[jax.Array, ...] = ()
    for shift in reversed(range(0, _SCORE_BITS, config.bits)):
        kernel = partial(_count, shift=shift, reserve=min(reserve, length), config=config)
        outputs = [counts, ((regions,), jnp.int32), ((regions,), jnp.int32)]
        found = call(kernel, (*operands, *found), outputs, name="reserve_tokens_count")
    marks = [((regions, length), jnp.bool_)]
    (marked,) = call(partial(_mark, config=config), (*operands, *found), marks, name="reserve_tokens_mark")
    return marked.reshape(scores.shape)


def _count(scores_ref: Any, ranked_ref: Any, *refs: Any, shift: int, reserve: int, config: ReserveConfig) -> None:
    """Counts, by their digit at `shift`, the scores of a chunk that share all digits above it with the least.

    `refs` are the counts and the state (digits found, scores wanted) of the pass before, none in the first pass; then
    the same of this pass, to write.
    """
    *before, counts_ref, least_ref, wanted_ref = refs
    above = shift + config.bits
    chunk, region = pl.program_id(0), pl.program_id(1)
    ranked = _ranked(scores_ref, ranked_ref, region)
    if before:
        least, wanted = _decide(before, region, chunk, above)[:2]
    else:
        least, wanted = jnp.int32(0), jnp.minimum(ranked, reserve)
    digits = jnp.arange(2**config.bits, dtype=jnp.int32)

    def step(i: Array, counts: Array) -> Array:
        _, bits = _load_bits(scores_ref, region, chunk * config.chunk + i * config.tile, ranked, config.tile)
        alike = (bits >> above) == (least >> above) if above < _SCORE_BITS else bits >= 0
        digit = jnp.where(alike, (bits >> shift) & (2**config.bits - 1), -1)
        # Scores along the rows: a thread counts a digit by itself.
        return counts + jnp.sum((digit[:, None] == digits[None]).astype(jnp.int32), axis=0)

    counts_ref[region, chunk, :] = lax.fori_loop(0, config.chunk // config.tile, step, jnp.zeros_like(digits))

    @pl.when(chunk == 0)
    def _() -> None:
        least_ref[region] = least
        wanted_ref[region] = wanted


def _mark(scores_ref: Any, ranked_ref: Any, *refs: Any, config: ReserveConfig) -> None:
    """Marks a chunk's scores above the least, and of those that equal it as many as are wanted, the first.

    `refs` are what the last counting pass wrote, then the marks.
    """
    *found, marks_ref = refs
    chunk, region = pl.program_id(0), pl.program_id(1)
    ranked = _ranked(scores_ref, ranked_ref, region)
    least, wanted, passed = _decide(found, region, chunk, 0)

    def step(i: Array, passed: Array) -> Array:
        index, bits = _load_bits(scores_ref, region, chunk * config.chunk + i * config.tile, ranked, config.tile)
        tied = (bits == least).astype(jnp.int32)
        chosen = (bits > least) | ((tied > 0) & (passed + jnp.cumsum(tied) <= wanted))
        pltriton.store(marks_ref.at[region, index], chosen, mask=index < scores_ref.shape[1])
        return passed + jnp.sum(tied)

    lax.fori_loop(0, config.chunk // config.tile, step, passed)


def _decide(refs: Sequence[Any], region: Array, chunk: Array, shift: int) -> tuple[Array, Array, Array]:
    """Decides the digit at `shift`, from all chunks' counts.

    Returns:
        The least marked score's bits down to that digit; how many of the scores that share them are wanted; how many
        of those lie in the chunks before this one.
    """
    counts_ref, least_ref, wanted_ref = refs
    chunks, digits = counts_ref.shape[1:]
    others, digit = jnp.arange(pl.next_power_of_2(chunks), dtype=jnp.int32), jnp.arange(digits, dtype=jnp.int32)
    known = (others < chunks)[:, None]
    counts = pltriton.load(counts_ref.at[region, others[:, None], digit[None]], mask=known, other=0)
    totals, wanted = jnp.sum(counts, axis=0), wanted_ref[region]
    at_least = jnp.sum(totals) - jnp.cumsum(totals) + totals  # scores of this digit or a higher one
    found = jnp.sum((at_least >= wanted).astype(jnp.int32)) - 1
    wanted -= jnp.sum(jnp.where(digit > found, totals, 0))
    passed = jnp.sum(jnp.where((others < chunk)[:, None] & (digit == found)[None], counts, 0))
    return least_ref[region] | (found << shift), wanted, passed


def _ranked(scores_ref: Any, ranked_ref: Any, region: Array) -> Array:
    """Tokens of a region that may be marked."""
    (regions, tokens), rows = scores_ref.shape, ranked_ref.shape[0]
    return jnp.clip(ranked_ref[lax.div(region, jnp.int32(regions // rows))], 0, tokens)


def _load_bits(scores_ref: Any, region: Array, first: Array, ranked: Array, size: int) -> tuple[Array, Array]:
    """Positions of a tile and the bits of their scores; -1, below all scores, for those that may not be marked."""
    index = first + jnp.arange(size, dtype=jnp.int32)
    valid = index < ranked
    scores = pltriton.load(scores_ref.at[region, index], mask=valid, other=0.0)
    # The sign bit of a negative zero would put it below all others.
    return index, jnp.where(valid, jnp.maximum(lax.bitcast_convert_type(scores, jnp.int32), 0), -1)
