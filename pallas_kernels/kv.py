"""Keys and values as kernels see them: selected from a prompt, in one buffer, or in pages that tables name.

Pages hold them in the dtype of queries, or in eight bits: e4m3 codes, and for each vector a power of two that they are
multiplied by. A page fills token by token, so the scale is a token's and not a page's: no token that comes later can be
too large for it. A power of two, because e4m3 numbers are as fine at any scale: to decode and to encode again changes
nothing.

Two codes make a word of 16 bits, entries j and j + d / 2. A GPU loads words as it does float16 numbers, transposed
where a product needs them so, which it cannot with bytes; a kernel takes both halves of d apart in registers.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float16, Float32, Int, Int8, UInt16

from tca_jax.errors import require
from tca_jax.pallas_kernels.checks import check_heads, check_shape, check_shapes, is_multiple

REGION_ALIGNMENT = 128  # regions of the pool start on multiples of it, so that tiles and TMA loads are aligned
CODES = jnp.dtype(jnp.float8_e4m3fn)
LEAST_EXPONENT = -100  # of any vector
UNPACKED = 8  # exponent of what `unpack` leaves out
_FRACTION, _POWER = np.float32(0.875), 9  # the largest code is 448 = 0.875 * 2 ** 9


class Pool(NamedTuple):
    """Selected tokens of all (row, KV head) regions, flat, each region sorted by position."""

    k: Float[Array, "P d"]  # keys `[P, d]`
    v: Float[Array, "P d"]  # values `[P, d]`
    offsets: Int[Array, "B Hkv"]  # first pool row of every region, int32 `[B, Hkv]`
    lengths: Int[Array, "B Hkv"]  # tokens in every region, int32 `[B, Hkv]`


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EightBits:
    """Vectors, each codes * 2 ** exponent."""

    words: UInt16[Array, "*s half"]  # uint16 `[..., d / 2]`: codes of entries j (low byte) and j + d / 2 (high byte)
    exponents: Int8[Array, "*s"]  # int8 `[...]`

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the vectors."""
        *rows, half = self.words.shape
        return *rows, 2 * half

    @property
    def dtype(self) -> Any:
        """Dtype of the codes."""
        return CODES


Stored = Array | EightBits  # vectors as a cache stores them


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Paged keys and values of a layer: kept tokens from any position, and a window of consecutive ones.

    Page j holds b tokens of one KV head. The first `kept_columns` entries of a head's table name the pages of its kept
    tokens, which fill them in order. The others name the pages of consecutive blocks, the window: token p lies in entry
    `kept_columns + (p - start) // b`, slot p mod b. Rows may name the same pages.
    """

    k: Stored  # keys `[P, b, d]`, in the dtype of queries or in eight bits
    v: Stored  # values `[P, b, d]`
    table: Int[Array, "B Hkv T"]  # page numbers, int32 `[B, Hkv, T]`
    kept: Int[Array, "B Hkv"]  # kept tokens of each KV head, int32 `[B, Hkv]`
    start: Int[Array, " B"]  # position of the window's first token, int32 `[B]`, a multiple of b
    end: Int[Array, " B"]  # position past the window's last token, int32 `[B]`
    kept_columns: int = dataclasses.field(metadata={"static": True})  # entries for pages of kept tokens, C
    # Added to the logits of kept tokens, in their order, at least -1e30, float32 `[B, Hkv, C b]`; None for zeros.
    bias: Float32[Array, "B Hkv n"] | None = None
    # Which B rows of `table`, `kept` and `bias` are this cache's: part n begins at row n B. Other parts may be those of
    # other layers; int32 scalar. Nothing is copied.
    part: Int[Array, ""] | None = None

    @property
    def page_size(self) -> int:
        """Tokens of a page, b."""
        return self.k.shape[1]

    def sliced(self) -> Pages:
        """The same cache without other rows."""
        if self.part is None:
            return self
        first, parts = self.part * len(self.start), (self.table, self.kept, self.bias)
        table, kept, bias = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, len(self.start)), parts)
        return dataclasses.replace(self, table=table, kept=kept, bias=bias, part=None)


def check_pages(arrays: Mapping[str, tuple[Any, str]], caches: tuple[Pages, ...], *, window: int) -> dict[str, int]:
    """Checks arrays, as `checks.check_shapes` does, and pages against them; returns the size of every dimension."""
    sizes = check_shapes(arrays)
    for i, cache in enumerate(caches):
        own = {name: size for name, size in sizes.items() if name not in ("P", "T", "R", "A")}
        rows = "R" if cache.part is None else "A"
        dims = {"k": "P b d", "v": "P b d", "table": f"{rows} Hkv T", "kept": f"{rows} Hkv", "start": "R", "end": "R"}
        for name, axes in dims.items():
            own = check_shape(f"caches[{i}].{name}", getattr(cache, name), axes, own)
        must = f"must divide the {sizes['B']} rows of queries"
        require(is_multiple(sizes["B"], own["R"]), f"caches[{i}] has {own['R']} rows: {must}")
        sizes = own
    check_heads(sizes)
    must = f"must be a positive multiple of the page size, {sizes['b']}"
    require(is_multiple(window, sizes["b"]), f"window = {window}: {must}")
    return sizes


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> Stored:
    """Memory for vectors, on a GPU not written; of dtype e4m3, in eight bits."""
    if jnp.dtype(dtype) != CODES:
        return jax.lax.empty(shape, dtype)
    return EightBits(jax.lax.empty((*shape[:-1], shape[-1] // 2), jnp.uint16), jax.lax.empty(shape[:-1], jnp.int8))


def encode(x: Float[Array, "*s d"], stored: Stored) -> Stored:
    """Vectors as `stored` has its own: in eight bits, or as they are."""
    if not isinstance(stored, EightBits):
        return x.astype(stored.dtype)
    wide = x.astype(jnp.float32)
    fraction, power = jnp.frexp(jnp.max(jnp.abs(wide), axis=-1))
    # The least power with which no code is too large.
    exponents = jnp.clip(power - _POWER + (fraction > _FRACTION), LEAST_EXPONENT, -LEAST_EXPONENT).astype(jnp.int8)
    largest = jnp.finfo(CODES).max.astype(jnp.float32)  # out of range, e4m3 is NaN
    codes = jnp.clip(wide * power_of_two(-exponents)[..., None], -largest, largest).astype(CODES)
    low, high = jnp.split(jax.lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint16), 2, axis=-1)
    return EightBits(low | (high << 8), exponents)


def decode(stored: Stored, dtype: DTypeLike) -> Float[Array, "*s d"]:
    """The vectors that are stored; bfloat16 and float32 hold them exactly."""
    if not isinstance(stored, EightBits):
        return stored.astype(dtype)
    halves = [x.astype(jnp.float32) for x in unpack(stored.words)]
    scale = power_of_two(stored.exponents.astype(jnp.int32) + UNPACKED)[..., None]
    return jnp.concatenate([x * scale for x in halves], axis=-1).astype(dtype)


def unpack(words: UInt16[Array, "*s half"]) -> tuple[Float16[Array, "*s half"], Float16[Array, "*s half"]]:
    """Both halves of codes as float16 numbers, times 2 ** -8: the same bits under an exponent of more bits."""
    bits = [(x & 0x8000) | ((x & 0x7F00) >> 1) for x in (words << 8, words)]
    low, high = (jax.lax.bitcast_convert_type(x, jnp.float16) for x in bits)
    return low, high


def power_of_two(exponents: Int[Array, "*s"]) -> Float32[Array, "*s"]:
    """2 ** exponent, exactly; exponents from -126 to 127."""
    bits = (exponents.astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def num_bytes(tokens: int, head_dim: int, dtype: DTypeLike) -> int:
    """Bytes of stored vectors."""
    size = jnp.dtype(dtype).itemsize
    return tokens * (head_dim * size + (jnp.dtype(dtype) == CODES))
