"""Observation scores through Pallas-Triton: two passes over K, for the norm of every query and the maxima of every key.

The rows of a group are its queries times its heads. In both passes a program holds a tile of rows and streams a chunk
of keys past it, on the matrix units; what a program finds of its rows (first pass) or of its keys (second) is merged
across programs afterwards. The maxima are merged where they are spread, in a third kernel, for a token's score comes
from keys of the tile before its own. All but the last `o` keys are seen by every row: only the last tiles have a mask.

Between the passes, scores stay as the matrix units give them, before 1 / sqrt(d): the second pass then adds a row's
norm and takes a maximum, two instructions for each of the products, and scale and exponential are left to the third.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.kernel_math import (
    LOG2E,
    divide_up,
    full_precision_tile,
    multiprocessors,
    quotient_and_remainder,
    shared_memory,
)
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, round_up
from tca_jax.pallas_kernels.triton_call import check_supported, dot, scaled_exp2, triton_call


@dataclasses.dataclass(frozen=True)
class PassConfig:
    """Tiling of one pass over K."""

    rows: int  # rows (queries times heads of a group) that a program holds, a power of two from 16
    keys: int  # tokens of a tile of K, a power of two from 16
    chunk: int  # tokens of a program, a multiple of `keys`
    warps: int  # warps of a program
    stages: int  # depth of the software pipeline: `stages - 1` tiles of K are in flight in a program


@dataclasses.dataclass(frozen=True)
class ObservationScoresConfig:
    """Tiling of observation scores."""

    norms: PassConfig  # the pass for the norms of rows
    maxima: PassConfig  # the pass for the maxima of keys
    scores: int = 512  # tokens of a program of the kernel that spreads, a power of two


def default_config(length: int, rows: int, regions: int, head_dim: int, dtype: Any) -> ObservationScoresConfig:
    """Three tiles of 64 keys where they fit beside the rows; chunks that give each multiprocessor some eight programs.

    The first pass sums as well as it maximises, and wants more warps and longer chunks; measured on an H200. `rows` are
    queries times heads of a group, `regions` the KV heads of all rows.
    """
    own = max(16, pl.next_power_of_2(rows))
    if dtype == jnp.float32:
        keys, warps = full_precision_tile(head_dim)
        held, stages = min(own, keys), 1
        norm_warps = warps
    else:
        held, warps, norm_warps, stages, token = min(own, 128), 4, 8, 3, head_dim * jnp.dtype(dtype).itemsize
        keys = next(size for size in (64, 32) if (held + 3 * size) * token <= shared_memory())
    programs = cdiv(length * cdiv(rows, held) * regions, 8 * multiprocessors())
    chunk = max(512, pl.next_power_of_2(programs))
    return ObservationScoresConfig(
        PassConfig(held, keys, 2 * chunk, norm_warps, stages), PassConfig(held, keys, chunk, warps, stages)
    )


@partial(jax.jit, static_argnames=("spread", "decay", "config", "interpret"))
@jax.named_scope("observation_scores")
def observation_scores(
    q_last: Array,
    k: Array,
    lengths: Array,
    *,
    spread: int,
    decay: float = 0.98,
    config: ObservationScoresConfig | None = None,
    interpret: bool = False,
) -> Array:
    """Scores; see `observation_scores.observation_scores`. Keys past a row's length are never read."""
    batch, length, kv_heads, head_dim = k.shape
    check_supported("observation_scores", head_dim, q_last, k)
    if length == 0:
        return jnp.zeros((batch, kv_heads, 0), jnp.float32)
    rows, regions = q_last.shape[1] * (q_last.shape[2] // kv_heads), batch * kv_heads
    config = config or default_config(length, rows, regions, head_dim, k.dtype)
    norms = _row_norms(q_last, k, lengths, config=config.norms, multiple=config.maxima.rows, interpret=interpret)
    tiles, keys = cdiv(rows, config.maxima.rows), round_up(length, config.maxima.keys)
    (maxima,) = triton_call(
        partial(_maximise_keys, tiles=tiles, config=config.maxima),
        (q_last, k, norms, lengths),
        [((regions, tiles, keys), jnp.float32)],
        grid=(kv_heads * tiles, cdiv(length, config.maxima.chunk), batch),
        name="observation_scores_maxima",
        warps=config.maxima.warps,
        stages=config.maxima.stages,
        interpret=interpret,
    )
    (scores,) = triton_call(
        partial(_spread, head_dim=head_dim, spread=min(spread, length), decay=decay, size=config.scores),
        (maxima, lengths),
        [((regions, length), jnp.float32)],
        grid=(cdiv(length, config.scores), regions),
        name="observation_scores_spread",
        warps=4,
        stages=1,
        interpret=interpret,
    )
    return scores.reshape(batch, kv_heads, length)


def _row_norms(
    q_last: Float[Array, "B o Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    config: PassConfig,
    multiple: int,
    interpret: bool,
) -> Float32[Array, "regions rows"]:
    """The negated log-sum-exp of every row, in units of products of q and k; `MASKED` for a row that does not count.

    Rows are padded to a multiple of the tile and of `multiple`.
    """
    (batch, observed, heads, head_dim), (length, kv_heads) = q_last.shape, k.shape[1:3]
    group = heads // kv_heads
    padded = round_up(observed * group, max(config.rows, multiple))
    tiles, chunks = padded // config.rows, cdiv(length, config.chunk)
    partial_sums = ((batch * kv_heads, padded, chunks), jnp.float32)
    peaks, weights = triton_call(
        partial(_sum_rows, tiles=tiles, config=config, interpret=interpret),
        (q_last, k, lengths),
        [partial_sums, partial_sums],
        grid=(kv_heads * tiles, chunks, batch),
        name="observation_scores_norms",
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    scale = LOG2E / math.sqrt(head_dim)
    peak = peaks.max(axis=-1)
    weight = (weights * jnp.exp2(scale * (peaks - peak[..., None]))).sum(axis=-1)
    query = jnp.arange(padded) // group
    counts = (query < observed) & (jnp.minimum(lengths, length)[:, None] - observed + query >= 0)
    return jnp.where(jnp.repeat(counts, kv_heads, axis=0), -(peak + jnp.log2(weight) / scale), MASKED)


def _program(tiles: int, k_ref: Any, lengths_ref: Any) -> tuple[Array, Array, Array, Array, Array]:
    """Work of a program of a pass: tile of rows, KV head, chunk, sequence, and the sequence's length."""
    # The tiles of a group run side by side, for they share K; then the heads, whose keys of a token lie together.
    head, tile = quotient_and_remainder(pl.program_id(0), tiles)
    chunk, row = pl.program_id(1), pl.program_id(2)
    return tile, head, chunk, row, jnp.minimum(lengths_ref[row], k_ref.shape[1])


def _load_rows(q_ref: Any, kv_heads: int, tile: Array, head: Array, row: Array, length: Array, size: int) -> Any:
    """Queries of a tile of rows [size, d] and their positions [size]; zeros and -1 for rows that do not count."""
    observed, heads, head_dim = q_ref.shape[1:]
    group = heads // kv_heads
    number = tile * size + jnp.arange(size, dtype=jnp.int32)
    query = lax.div(number, jnp.full_like(number, group))
    positions = length - observed + query
    counts = (query < observed) & (positions >= 0)
    member = head * group + number - query * group
    columns = jnp.arange(head_dim, dtype=jnp.int32)
    where = q_ref.at[row, jnp.where(counts, query, 0)[:, None], member[:, None], columns[None]]
    return pltriton.load(where, mask=counts[:, None], other=0.0), jnp.where(counts, positions, -1)


def _bounds(length: Array, observed: int, chunk: Array, config: PassConfig) -> tuple[Array, Array, Array]:
    """Of a chunk: its first tile of keys, the first that needs a mask, and where its tiles end."""
    count = config.chunk // config.keys
    begin = chunk * count
    seen_by_all, _ = quotient_and_remainder(jnp.maximum(length - observed + 1, 0), config.keys)
    clear = jnp.clip(seen_by_all, begin, begin + count)
    return begin, clear, jnp.clip(divide_up(length, config.keys), clear, begin + count)


def _load_keys(k_ref: Any, row: Array, head: Array, i: Array, length: Array, size: int, masked: bool) -> Any:
    """A tile of keys [size, d] and their positions [size]."""
    index, columns = i * size + jnp.arange(size, dtype=jnp.int32), jnp.arange(k_ref.shape[3], dtype=jnp.int32)
    where = k_ref.at[row, index[:, None], head, columns[None]]
    if not masked:
        return pltriton.load(where), index
    return pltriton.load(where, mask=(index < length)[:, None], other=0.0), index


def _sum_rows(
    q_ref: Any,
    k_ref: Any,
    lengths_ref: Any,
    peaks_ref: Any,
    weights_ref: Any,
    *,
    tiles: int,
    config: PassConfig,
    interpret: bool,
) -> None:
    """The largest product of each row of a tile with a chunk of keys, and the sum of the powers."""
    tile, head, chunk, row, length = _program(tiles, k_ref, lengths_ref)
    kv_heads, head_dim = k_ref.shape[2:]
    q, positions = _load_rows(q_ref, kv_heads, tile, head, row, length, config.rows)
    scale = LOG2E / math.sqrt(head_dim)

    def step(i: Array, state: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
        peak, weight = state
        k, index = _load_keys(k_ref, row, head, i, length, config.keys, masked)
        scores = dot(q, k, transposed=True)
        seen = index[None] <= positions[:, None]
        if masked:
            scores = jnp.where(seen, scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        bias = jnp.broadcast_to((-scale * new_peak)[:, None], scores.shape)
        powers = scaled_exp2(scores, scale, bias, interpret=interpret)
        if masked:  # a row that has seen no key yet has no peak, and powers that mean nothing
            powers = jnp.where(seen, powers, 0)
        return new_peak, weight * jnp.exp2(scale * (peak - new_peak)) + jnp.sum(powers, axis=1)

    begin, clear, end = _bounds(length, q_ref.shape[1], chunk, config)
    state = jnp.full((config.rows,), MASKED, jnp.float32), jnp.zeros((config.rows,), jnp.float32)
    state = lax.fori_loop(begin, clear, partial(step, masked=False), state)
    peak, weight = lax.fori_loop(clear, end, partial(step, masked=True), state)
    rows = pl.ds(tile * config.rows, config.rows)
    peaks_ref[row * kv_heads + head, rows, chunk] = peak
    weights_ref[row * kv_heads + head, rows, chunk] = weight


def _maximise_keys(
    q_ref: Any,
    k_ref: Any,
    norms_ref: Any,
    lengths_ref: Any,
    maxima_ref: Any,
    *,
    tiles: int,
    config: PassConfig,
) -> None:
    """The largest logarithm of a probability of each key of a chunk, over a tile of rows, in units of q and k."""
    tile, head, chunk, row, length = _program(tiles, k_ref, lengths_ref)
    kv_heads = k_ref.shape[2]
    region = row * kv_heads + head
    q, positions = _load_rows(q_ref, kv_heads, tile, head, row, length, config.rows)
    norms = norms_ref[region, pl.ds(tile * config.rows, config.rows)]

    def step(i: Array, _: None, masked: bool) -> None:
        k, index = _load_keys(k_ref, row, head, i, length, config.keys, masked)
        # Keys along the rows of the product: a key's maximum stays within a warp.
        logs = dot(k, q, transposed=True) + norms[None]
        if masked:
            logs = jnp.where(index[:, None] <= positions[None], logs, MASKED)
        maxima_ref[region, tile, pl.ds(i * config.keys, config.keys)] = jnp.max(logs, axis=1)

    begin, clear, end = _bounds(length, q_ref.shape[1], chunk, config)
    lax.fori_loop(begin, clear, partial(step, masked=False), None)
    lax.fori_loop(clear, end, partial(step, masked=True), None)


def _spread(
    maxima_ref: Any, lengths_ref: Any, scores_ref: Any, *, head_dim: int, spread: int, decay: float, size: int
) -> None:
    """Scores of some tokens of a region, from the maxima of theirs and the tokens before, of all tiles of rows."""
    region = pl.program_id(1)
    (regions, tokens), tiles = scores_ref.shape, maxima_ref.shape[1]
    index = pl.program_id(0) * size + jnp.arange(size, dtype=jnp.int32)
    kv_heads = regions // lengths_ref.shape[0]
    length = jnp.minimum(lengths_ref[lax.div(region, jnp.int32(kv_heads))], tokens)
    tile, scale = jnp.arange(pl.next_power_of_2(tiles), dtype=jnp.int32), LOG2E / math.sqrt(head_dim)

    def step(a: Array, best: Array) -> Array:
        written = (index >= a) & (index < length)
        source = maxima_ref.at[region, tile[:, None], jnp.maximum(index - a, 0)[None]]
        found = pltriton.load(source, mask=(tile < tiles)[:, None] & written[None], other=MASKED)
        return jnp.maximum(best, jnp.max(found, axis=0) * scale + a.astype(jnp.float32) * math.log2(decay))

    best = lax.fori_loop(0, spread, step, jnp.full((size,), MASKED, jnp.float32))
    pltriton.store(scores_ref.at[region, index], jnp.exp2(best), mask=index < tokens)
