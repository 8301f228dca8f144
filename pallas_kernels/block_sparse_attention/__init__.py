"""Block-sparse attention: the queries of a tile over listed key blocks, and listed columns, of their own head."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from tca_jax.errors import require
from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.block_sparse_attention.lists import BlockLists, Columns
from tca_jax.pallas_kernels.checks import check_blocks, check_shapes
from tca_jax.pallas_kernels.numerics import cdiv


def block_sparse_attention(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    blocks: BlockLists,
    lengths: Int[Array, " B"],
    *,
    columns: Columns | None = None,
    block_size: int,
    tile_size: int,
    aligned: bool = False,
    backend: Backend = "auto",
) -> Float[Array, "B L Hq d"]:
    """Causal attention of prompts over the keys listed for each query tile and query head.

    Tile t holds the queries [t m, (t + 1) m), m the tile size. Query i of tile t of head h attends to token j iff
    j <= i, j lies in the row's prompt, and one of these holds, a token for which both do counting once:

    - a listed block has it: for some e < `blocks.counts[b, h, t]`, with D = `blocks.distances[b, h, t, e]`, the block
      [(t + 1) m - D, (t + 1) m - D + block_size) has j (t is 0 in the index of lists that all tiles share);
    - it is a column: j = `columns.tokens[b, h, c]` for some c < `columns.counts[b, h]`.

    The cost is that of the tiles' counts, whatever the capacities.

    Args:
        q: Queries [B, L, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        k: Keys [B, L, Hkv, d]; what lies past a row's length does not matter.
        v: Values [B, L, Hkv, d].
        blocks: Listed blocks. Those that count are in ascending order of distance, all at least 1, so the nearest block
            is first; they do not overlap; and they reach right of the prompt's beginning: the last may begin left of
            it. They may begin at any token.
        lengths: Prompt lengths [B]; may be traced.
        columns: Listed columns, ascending without repetition where they count; None for none. They go with lists of
            blocks that all tiles share.
        block_size: Tokens in a key block, b.
        tile_size: Queries in a tile, m: b or a multiple of it.
        aligned: Whether all blocks that count begin on multiples of b in the prompt, which some kernels need.
        backend: See `backends.Backend`.

    Returns:
        [B, L, Hq, d] in the type of `q`; rows past a length are zero, and so is a query that nothing is listed for.
    """
    check_blocks(block_size, tile_size=tile_size)
    arrays = {
        "q": (q, "B L Hq d"),
        "k": (k, "B L Hkv d"),
        "v": (v, "B L Hkv d"),
        "blocks.distances": (blocks.distances, "B Hq T C"),
        "blocks.counts": (blocks.counts, "B Hq N"),
        "lengths": (lengths, "B"),
    }
    if columns is not None:
        arrays |= {"columns.tokens": (columns.tokens, "B Hq V"), "columns.counts": (columns.counts, "B Hq")}
    dims = check_shapes(arrays)
    tiles = cdiv(dims["L"], tile_size)
    allowed = f"{tiles} tiles, or 1 for lists that all share" if columns is None else "1 tile beside columns"
    require(dims["N"] == tiles, f"blocks.counts has {dims['N']} tiles: must be ceil(L / tile_size) = {tiles}")
    fits = dims["T"] == 1 or (dims["T"] == tiles and columns is None)
    require(fits, f"blocks.distances has {dims['T']} tiles: must be {allowed}")
    has_room = dims["C"] and dims.get("V") != 0
    require(has_room, "blocks.distances and columns.tokens must have room for one block and one column at least")
    implementation = dispatch("block_sparse_attention", backend)
    sizes = {"block_size": block_size, "tile_size": tile_size, "aligned": aligned}
    return implementation(q, k, v, blocks, lengths, columns=columns, **sizes)


__all__ = ["BlockLists", "Columns", "block_sparse_attention"]
