"""Block-sparse attention on Pallas Mosaic GPU: warp-specialised, TMA and wgmma (Hopper), over aligned blocks.

The memory warpgroup streams the tiles of the nearest blocks first. Only blocks within the query tile need a mask, so
one unmasked loop does nearly all the work.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from tca_jax.errors import Unsupported, require
from tca_jax.pallas_kernels.block_sparse_attention.lists import BlockLists, Columns
from tca_jax.pallas_kernels.mosaic_call import (
    TILE,
    attend,
    check_supported,
    fetch,
    iotas,
    mosaic_call,
    query_tile,
    start_moving,
)
from tca_jax.pallas_kernels.mosaic_call import aligned as aligned_slice
from tca_jax.pallas_kernels.numerics import varying_like

_LOWEST = -(2.0**96)  # where the largest score begins: finite, so that a row that sees nothing yet gives zeros, not NaN


# Under a jit of its own, all layers of a program share one kernel, as in `prefill_attention.mosaic`.
@functools.partial(jax.jit, static_argnames=("block_size", "tile_size", "aligned"))
@jax.named_scope("block_sparse_attention")
def block_sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    blocks: BlockLists,
    lengths: Array,
    *,
    columns: Columns | None = None,
    block_size: int,
    tile_size: int,
    aligned: bool = False,
) -> Array:
    """See `block_sparse_attention.block_sparse_attention`. Values among the padding must be finite."""
    batch, length, _, head_dim = q.shape
    takes = aligned and columns is None
    require(takes, "block_sparse_attention on mosaic takes aligned blocks, and no columns", Unsupported)
    check_supported("block_sparse_attention", q.dtype, head_dim, block_size)
    padding = -length % tile_size
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    order = jnp.argsort(-blocks.counts.reshape(batch * k.shape[2], -1).sum(axis=-1)).astype(jnp.int32)
    operands = (q, k, v, blocks.distances, blocks.counts, lengths, order)
    work = functools.partial(_find_work, block_size=block_size, tile_size=tile_size)
    compute, move = (functools.partial(program, block_size=block_size) for program in (_compute, _move))
    out = mosaic_call(work, compute, move, operands, name="block_sparse_attention_kernel")
    return varying_like(out[:, :length], q, k, v, blocks, lengths)


@dataclasses.dataclass(frozen=True)
class _Work:
    """One program's query rows of one head, and the K and V tiles that it reads, all traced int32 scalars.

    Step i takes part i % parts of block i // parts of the list; the first `masked_steps` need a mask.
    """

    row: Any
    head: Any
    kv_head: Any
    tile: Any
    first_row: Any
    end: Any
    length: Any
    masked_steps: Any
    steps: Any


def _find_work(refs: Any, *, block_size: int, tile_size: int) -> _Work:
    *_, counts_ref, lengths_ref, order_ref, _ = refs
    row, kv_head, head, number = query_tile(refs, order_ref)
    first_row, length = number * TILE, lengths_ref[row]
    tile = lax.div(first_row, tile_size)
    count = jnp.where(first_row < length, counts_ref[row, head, tile], 0)
    parts = block_size // TILE
    return _Work(
        row=row,
        head=head,
        kv_head=kv_head,
        tile=tile,
        first_row=first_row,
        end=(tile + 1) * tile_size,
        length=length,
        # Aligned blocks lie within the query tile or left of it: at most m / b, the nearest, are within.
        masked_steps=jnp.minimum(count, tile_size // block_size) * parts,
        steps=count * parts,
    )


def _begin(refs: Any, work: _Work, step: Any, block_size: int) -> Any:
    """First token of a step's tile of K and V."""
    distances_ref, parts = refs[3], block_size // TILE
    listed = work.tile if distances_ref.shape[2] > 1 else 0
    distance = distances_ref[work.row, work.head, listed, lax.div(step, jnp.int32(parts))]
    return work.end - distance + lax.rem(step, jnp.int32(parts)) * TILE


def _move(refs: Any, scoped: Any, work: _Work, *, block_size: int) -> None:
    """The memory warpgroup: fetches the tiles of the nearest blocks first."""
    _, k_ref, v_ref, *_ = refs
    start_moving()

    def fetch_step(step: Any, first: Any) -> Any:
        # Where the next tile begins is read before this one waits for its slot.
        following = _begin(refs, work, jnp.minimum(step + 1, work.steps - 1), block_size)
        place = (work.row, aligned_slice(first, TILE), work.kv_head)
        fetch(scoped, step, k_ref.at[place], v_ref.at[place])
        return following

    @pl.when(work.steps > 0)
    def fetch_all() -> None:
        lax.fori_loop(0, work.steps, fetch_step, _begin(refs, work, jnp.int32(0), block_size))


def _compute(refs: Any, scoped: Any, work: _Work, warpgroup: Any, *, block_size: int) -> None:
    def mask(first_row: Any, step: Any, scores: Any) -> Any:
        rows, columns = iotas(scores.shape)
        return jnp.where(columns <= rows + (first_row - _begin(refs, work, step, block_size)), scores, -jnp.inf)

    attend(refs, scoped, work, warpgroup, first=work.first_row, lowest=_LOWEST, mask=mask)
