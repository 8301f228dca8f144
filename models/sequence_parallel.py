"""Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): devices that share a model share a prompt too.

Behind a sum over the devices, each of them would add and norm all tokens. Of a long prompt, each sums, adds and norms
its part of the tokens alone, and what it has is joined with the others' for the next product: a sum over devices is a
scattered sum and such a join, so no more is sent.

A prompt runs in chunks of tokens, in which sums of one chunk travel beside products of the next. So that each chunk
has work for all devices, the part of a device is a part of every chunk.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class TokenParts:
    """Which tokens each device of a mesh axis has.

    Attributes:
        axis: Name of the mesh axis.
        devices: Along it; n for short.
        tokens: Of all rows; T for short.
        sizes: Of chunks, one after the other and again from the first; the last one ends with the tokens.
    """

    axis: str
    devices: int
    tokens: int
    sizes: tuple[int, ...]

    @property
    def even(self) -> bool:
        """Whether all devices have as many tokens of each chunk."""
        return not any(size % self.devices for size in (self.tokens, *self.sizes))

    def of(self, device: Int[Array, "*some"]) -> Int[Array, "*some part"]:
        """The tokens of some devices, in the order in which these have them."""
        at = jnp.arange(self.tokens // self.devices, dtype=jnp.int32) * self.devices
        start, size = self._chunks(at)
        return start + device[..., None] * (size // self.devices) + (at - start) // self.devices

    def join(self, part: Float[Array, "part D"]) -> Float[Array, "chunk D"]:
        """The tokens of one chunk, of which each device has a part."""
        return jax.lax.all_gather(part, self.axis, tiled=True)

    def take(self, part: Float[Array, "part D"], tokens: Int[Array, "*some"]) -> Float[Array, "*some D"]:
        """Some of all tokens, on every device."""
        start, size = self._chunks(tokens)
        of_device = size // self.devices
        device, place = (tokens - start) // of_device, start // self.devices + (tokens - start) % of_device
        mine = (device == jax.lax.axis_index(self.axis))[..., None]
        return jax.lax.psum(jnp.where(mine, part[place], 0), self.axis)

    def _chunks(self, tokens: Int[Array, "*some"]) -> tuple[Int[Array, "*some"], Int[Array, "*some"]]:
        """Start and size of each token's chunk."""
        ends = tuple(itertools.accumulate(self.sizes))
        first = tokens // ends[-1] * ends[-1]
        number = jnp.searchsorted(jnp.array(ends), tokens - first, side="right")
        start = first + jnp.array((0, *ends))[number]
        return start, jnp.minimum(jnp.array(self.sizes)[number], self.tokens - start)
