"""Keys and values in eight bits: e4m3 codes, and for each vector a power of two that they are multiplied by.

A page fills token by token, so the scale is a token's and not a page's: no token that comes later can be too large for
it. A power of two, because e4m3 numbers are as fine at any scale: to decode and to encode again changes nothing.

Two codes make a word of 16 bits, entries j and j + d / 2. A GPU loads words as it does float16 numbers, transposed
where a product needs them so, which it cannot with bytes; a kernel takes both halves of d apart in registers.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float16, Float32, Int, Int8, UInt16

#: Dtype of the codes.
CODES = jnp.dtype(jnp.float8_e4m3fn)
#: No vector has a smaller exponent.
LEAST_EXPONENT = -100
#: Exponent of what `unpack` leaves out.
UNPACKED = 8
_FRACTION, _POWER = np.float32(0.875), 9  # the largest code is 448 = 0.875 * 2 ** 9


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(jax.tree_util.register_dataclass, data_fields=["words", "exponents"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class EightBits:
    """Vectors, each codes * 2 ** exponent.

    Attributes:
        words: uint16 `[..., d / 2]`: the code of entry j in the low byte of word j, that of j + d / 2 in the high one.
        exponents: int8 `[...]`.
    """

    words: UInt16[Array, "*s half"]
    exponents: Int8[Array, "*s"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the vectors."""
        *rows, half = self.words.shape
        return *rows, 2 * half

    @property
    def dtype(self) -> Any:
        """Dtype of the codes."""
        return CODES

    def reshape(self, *shape: int) -> EightBits:
        """The vectors in another shape, of which the last axis stays."""
        return EightBits(self.words.reshape(*shape[:-1], self.words.shape[-1]), self.exponents.reshape(shape[:-1]))


#: Vectors as a cache stores them.
Stored = Array | EightBits


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> Stored:
    """Vectors of zeros; of dtype e4m3, in eight bits."""
    if jnp.dtype(dtype) != CODES:
        return jnp.zeros(shape, dtype)
    return EightBits(jnp.zeros((*shape[:-1], shape[-1] // 2), jnp.uint16), jnp.zeros(shape[:-1], jnp.int8))


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
    """Bytes of so many stored vectors."""
    size = jnp.dtype(dtype).itemsize
    return tokens * (head_dim * size + (jnp.dtype(dtype) == CODES))
