"""Token scores through Pallas-Triton: one pass over K writes logits, a second over the logits alone normalises.

A softmax is known only when every key was seen, so the scores cannot leave the first pass. Its float32 logits take
2 G / d of the bytes of a bfloat16 K and stay in the L2 cache for the second pass.
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
from jaxtyping import Array

from tca_jax.errors import Unsupported, require
from tca_jax.pallas_kernels.kernel_math import LOG2E, divide_up, streamed_tile
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, round_up
from tca_jax.pallas_kernels.triton_call import check_supported, dot, triton_call


@dataclasses.dataclass(frozen=True)
class TokenScoresConfig:
    """Tiling of token scores."""

    keys: int  # tokens of a tile of K, a power of two from 16
    chunk: int  # tokens of a program of the first pass, a multiple of `keys`
    warps: int = 4  # warps of a program of the first pass
    stages: int = 4  # depth of the first pass's software pipeline: `stages - 1` tiles are in flight in a program
    scores: int = 1024  # tokens of a program of the second pass, a power of two


def default_config(length: int, head_dim: int, itemsize: int) -> TokenScoresConfig:
    """Tiles of 16 KiB; at most 512 chunks, since every program of the second pass reads the results of all."""
    keys = streamed_tile(head_dim, itemsize)
    return TokenScoresConfig(keys=keys, chunk=max(1024, keys, pl.next_power_of_2(cdiv(length, 512))))


@partial(jax.jit, static_argnames=("block_size", "config", "interpret"))
@jax.named_scope("token_scores")
def token_scores(
    q_last: Array,
    k: Array,
    lengths: Array,
    *,
    block_size: int,
    config: TokenScoresConfig | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Scores, block mass and block HHI; see `token_scores.token_scores`.

    Keys past a row's length are never read."""
    batch, length, kv_heads, head_dim = k.shape
    check_supported("token_scores", head_dim, q_last, k)
    is_power = not block_size & (block_size - 1)
    require(is_power, f"token_scores on Triton: block_size = {block_size}: must be a power of two", Unsupported)
    config = config or default_config(length, head_dim, k.dtype.itemsize)
    rows, regions = batch * q_last.shape[1], batch * kv_heads
    group, chunks = rows // regions, cdiv(length, config.chunk)
    blocks, tile = cdiv(length, block_size), max(config.scores, block_size)
    logits, peaks, weights = triton_call(
        partial(_score_chunk, length, group, config),
        (q_last.reshape(rows, head_dim), k.reshape(batch * length * kv_heads, head_dim), lengths),
        # Padded, so that the second pass can read whole tiles.
        [((rows, round_up(length, tile)), jnp.float32), ((rows, chunks), jnp.float32), ((rows, chunks), jnp.float32)],
        grid=(kv_heads, chunks, batch),  # heads run side by side: their keys of a token lie together
        name="token_scores_logits",
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    scores, mass, hhi = triton_call(
        partial(_normalise, length, kv_heads, group, block_size, tile // block_size),
        (logits, peaks, weights, lengths),
        [((regions, length), jnp.float32), ((regions, blocks), jnp.float32), ((regions, blocks), jnp.float32)],
        grid=(cdiv(length, tile), regions),
        name="token_scores_normalise",
        warps=4,
        stages=1,
        interpret=interpret,
    )
    whole = length // block_size
    shape = (batch, kv_heads, blocks)
    return (
        scores.reshape(batch, kv_heads, length),
        mass.reshape(shape)[..., :whole],
        hhi.reshape(shape)[..., :whole],
    )


def _score_chunk(
    tokens: int,
    group: int,
    config: TokenScoresConfig,
    q_ref: Any,
    k_ref: Any,
    lengths_ref: Any,
    logits_ref: Any,
    peaks_ref: Any,
    weights_ref: Any,
) -> None:
    """Logits, to base 2, of one head group for one chunk of keys; their largest, and the sum of their powers."""
    head, chunk, row = (pl.program_id(axis) for axis in range(3))
    kv_heads = pl.num_programs(0)
    length = jnp.minimum(lengths_ref[row], tokens)
    members = jnp.arange(max(16, pl.next_power_of_2(group)), dtype=jnp.int32)  # a matrix unit takes 16 rows
    columns = jnp.arange(q_ref.shape[1], dtype=jnp.int32)
    seen = members < group
    rows = (row * kv_heads + head) * group + members
    q = pltriton.load(q_ref.at[rows[:, None], columns[None]], mask=seen[:, None], other=0.0)
    scale = LOG2E / math.sqrt(q.shape[1])
    first = chunk * config.chunk

    def step(tile: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        peak, weight = state
        index = first + tile * config.keys + jnp.arange(config.keys, dtype=jnp.int32)
        valid = index < length
        keys = (row * tokens + index) * kv_heads + head
        k = pltriton.load(k_ref.at[keys[:, None], columns[None]], mask=valid[:, None], other=0.0)
        logits = jnp.where(valid[None], dot(q, k, transposed=True) * scale, MASKED)
        pltriton.store(logits_ref.at[rows[:, None], index[None]], logits, mask=seen[:, None] & valid[None])
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
        powers = jnp.sum(jnp.exp2(logits - new_peak[:, None]), axis=1)
        return new_peak, weight * jnp.exp2(peak - new_peak) + powers

    trips = divide_up(jnp.clip(length - first, 0, config.chunk), config.keys)
    empty = (jnp.full(members.shape, MASKED, jnp.float32), jnp.zeros(members.shape, jnp.float32))
    peak, weight = lax.fori_loop(0, trips, step, empty)
    pltriton.store(peaks_ref.at[rows, chunk], peak, mask=seen)
    pltriton.store(weights_ref.at[rows, chunk], weight, mask=seen)


def _normalise(
    tokens: int,
    kv_heads: int,
    group: int,
    block_size: int,
    blocks: int,
    logits_ref: Any,
    peaks_ref: Any,
    weights_ref: Any,
    lengths_ref: Any,
    scores_ref: Any,
    mass_ref: Any,
    hhi_ref: Any,
) -> None:
    """Scores of one KV head for some blocks, from its group's logits, and the blocks' statistics."""
    region = pl.program_id(1)
    block = pl.program_id(0) * blocks + jnp.arange(blocks, dtype=jnp.int32)
    index = block[:, None] * block_size + jnp.arange(block_size, dtype=jnp.int32)[None]
    length = jnp.minimum(lengths_ref[lax.div(region, jnp.int32(kv_heads))], tokens)
    valid = index < length
    chunks = jnp.arange(pl.next_power_of_2(peaks_ref.shape[1]), dtype=jnp.int32)
    known = chunks < peaks_ref.shape[1]

    scores = jnp.zeros(index.shape, jnp.float32)
    for member in range(group):
        row = region * group + member
        peaks = pltriton.load(peaks_ref.at[row, chunks], mask=known, other=MASKED)
        weights = pltriton.load(weights_ref.at[row, chunks], mask=known, other=0.0)
        peak = jnp.max(peaks)
        # A row of length 0 has no weight; its scores are 0.
        weight = jnp.maximum(jnp.sum(weights * jnp.exp2(peaks - peak)), jnp.finfo(jnp.float32).tiny)
        logits = logits_ref[row, index]  # unwritten past the length
        scores += jnp.where(valid, jnp.exp2(logits - peak), 0) / (weight * group)
    pltriton.store(scores_ref.at[region, index], scores, mask=index < tokens)

    mass = jnp.sum(scores, axis=1)
    # Normalised before squaring: the squares of small scores would underflow.
    shares = scores / jnp.where(mass > 0, mass, 1)[:, None]
    hhi = jnp.where(mass > 0, jnp.sum(shares * shares, axis=1), 1 / block_size)
    exists = block < mass_ref.shape[1]
    pltriton.store(mass_ref.at[region, block], mass, mask=exists)
    pltriton.store(hhi_ref.at[region, block], hhi, mask=exists)
