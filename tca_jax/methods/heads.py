"""The KV heads of a layer that a policy is handed: all of a model's, or those of one device of a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped


@dataclasses.dataclass(frozen=True, eq=False)
class Heads:
    """KV heads of a layer, in the order in which queries, keys and values have them.

    What a policy knows of each of the model's heads, `of` gives for these. Shapes are static and the same on all
    devices of a mesh: `widest` and `places` heed the heads of the others.

    Attributes:
        numbers: Of each head, its number in the model, `[Hkv]`: a NumPy array where it is known before a program runs,
            data where devices of a mesh run the program with heads of their own.
        of_devices: The same of every device, `[devices][Hkv]`, static; one of them has these heads.
    """

    numbers: Int[Array | np.ndarray, " Hkv"]
    of_devices: tuple[tuple[int, ...], ...]

    @classmethod
    def all(cls, num_kv_heads: int) -> Heads:
        """All of a model's heads, in its own order: those of one device."""
        return cls(np.arange(num_kv_heads), (tuple(range(num_kv_heads)),))

    @property
    def of_model(self) -> int:
        """KV heads of the whole model."""
        return sum(map(len, self.of_devices))

    def of(self, values: Shaped[np.ndarray, "H ..."]) -> Shaped[Array | np.ndarray, "Hkv ..."]:
        """Of something for each of the model's KV heads, that of these."""
        return values[self.numbers] if isinstance(self.numbers, np.ndarray) else jnp.asarray(values)[self.numbers]

    def widest(self, values: Sequence[int]) -> tuple[int, ...]:
        """Of a number for each of the model's KV heads, the largest that any device has at each place."""
        return tuple(np.asarray(values)[np.asarray(self.of_devices)].max(axis=0).tolist())

    def places(self, mask: Bool[np.ndarray, " H"]) -> Int[Array | np.ndarray, " n"]:
        """Places among these heads of those for which a mask of the model's heads holds.

        As many as on the device that has most: one that has fewer gets the number of its heads, which is no head's
        place, for the rest.
        """
        own = self.of(mask)
        if isinstance(own, np.ndarray):
            return np.flatnonzero(own)
        most = int(mask[np.asarray(self.of_devices)].sum(axis=1).max())
        return jnp.flatnonzero(own, size=most, fill_value=own.size)
