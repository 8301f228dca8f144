"""Keys and values as kernels see them: selected from a prompt, in one buffer, or in pages that tables name."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from tca_jax.errors import UserError
from tca_jax.pallas_kernels.checks import check_shape, check_shapes
from tca_jax.pallas_kernels.eight_bits import Stored

#: Regions of the pool start on multiples of this, so that tiles and TMA loads are aligned.
REGION_ALIGNMENT = 128


class Pool(NamedTuple):
    """Selected tokens of all (row, KV head) regions, flat, each region sorted by position.

    Attributes:
        k: Keys `[P, d]`.
        v: Values `[P, d]`.
        offsets: First pool row of every region, int32 `[B, Hkv]`.
        lengths: Tokens in every region, int32 `[B, Hkv]`.
    """

    k: Float[Array, "P d"]
    v: Float[Array, "P d"]
    offsets: Int[Array, "B Hkv"]
    lengths: Int[Array, "B Hkv"]


def pool_shapes(pool: Pool) -> dict[str, tuple[Any, str]]:
    """The arrays of a pool and their dimensions, as `checks.check_shapes` takes them."""
    return {
        "pool.k": (pool.k, "P d"),
        "pool.v": (pool.v, "P d"),
        "pool.offsets": (pool.offsets, "B Hkv"),
        "pool.lengths": (pool.lengths, "B Hkv"),
    }


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "table", "kept", "start", "end"],
    meta_fields=["kept_columns"],
)
@dataclasses.dataclass(frozen=True)
class Pages:
    """What one layer's queries find of some tokens: tokens kept from anywhere, and a run of consecutive ones.

    Page j holds b tokens of one KV head. The first `kept_columns` entries of a head's table name the pages of its kept
    tokens, which fill them in order. The others name the pages of consecutive blocks, the window: token p lies in entry
    `kept_columns + (p - start) // b`, slot p mod b. Rows may name the same pages.

    Attributes:
        k: Keys `[P, b, d]`, in the dtype of queries or in eight bits.
        v: Values `[P, b, d]`.
        table: Page numbers, int32 `[B, Hkv, T]`.
        kept: Kept tokens of each KV head, int32 `[B, Hkv]`.
        start: Position of the window's first token, int32 `[B]`, a multiple of b.
        end: Position past the window's last token, int32 `[B]`.
        kept_columns: Entries for pages of kept tokens, C; static.
    """

    k: Stored
    v: Stored
    table: Int[Array, "B Hkv T"]
    kept: Int[Array, "B Hkv"]
    start: Int[Array, " B"]
    end: Int[Array, " B"]
    kept_columns: int

    @property
    def page_size(self) -> int:
        """Tokens of a page, b."""
        return self.k.shape[1]


def check_pages(arrays: Mapping[str, tuple[Any, str]], caches: tuple[Pages, ...], *, window: int) -> dict[str, int]:
    """Checks what attends to pages, arrays as `checks.check_shapes` takes them, and the pages against each other.

    Returns:
        The size of every dimension name.

    Raises:
        ValueError: there are no pages, a shape does not fit the others, or `window` is no positive multiple of b.
    """
    if not caches:
        raise UserError("caches is empty: must hold at least one Pages")
    sizes = check_shapes(arrays)
    for i, cache in enumerate(caches):
        own = {name: size for name, size in sizes.items() if name not in ("P", "T", "R")}
        for name, dims in (("k", "P b d"), ("v", "P b d"), ("table", "R Hkv T"), ("kept", "R Hkv")):
            own = check_shape(f"caches[{i}].{name}", getattr(cache, name), dims, own)
        for name in ("start", "end"):
            own = check_shape(f"caches[{i}].{name}", getattr(cache, name), "R", own)
        if own["R"] < 1 or sizes["B"] % own["R"]:
            raise UserError(f"caches[{i}] has {own['R']} rows: must divide the {sizes['B']} rows of queries")
        if not 0 <= cache.kept_columns <= own["T"]:
            raise UserError(f"caches[{i}].kept_columns = {cache.kept_columns}: must lie in [0, {own['T']}]")
        sizes = own
    heads, kv_heads = sizes["Hq"], sizes["Hkv"]
    if kv_heads < 1 or heads % kv_heads:
        raise UserError(f"{heads} query heads and {kv_heads} KV heads: the former must be a multiple of the latter")
    if window < sizes["b"] or window % sizes["b"]:
        raise UserError(f"window = {window}: must be a positive multiple of the page size, {sizes['b']}")
    return sizes
