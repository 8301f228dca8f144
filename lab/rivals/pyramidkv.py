"""PyramidKV (arXiv 2406.02069): SnapKV whose budget falls from layer to layer, by equal steps.

With the mean budget m, the first layer has 2 m - m / beta tokens left of the window and the last m / beta; of a shorter
prompt the first has all and the last 2 m less that; below 2 m every layer has m. Follows `PyramidKVCluster`
(Zefan-Cai/KVCache-Factory at 5fb995d). What differs: the window; budgets are rounded, as in kvpress, not the step.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from tca_jax.errors import is_finite_number, require
from tca_jax.lab.rivals.compression import rival
from tca_jax.lab.rivals.snapkv import SnapKVCache
from tca_jax.methods.base import Frequencies, Wording


@dataclasses.dataclass(frozen=True)
class PyramidKVCache(SnapKVCache):
    observation: int = 64
    beta: float = 20.0  # the mean budget over the last layer's, at least 1; 1 gives all layers the same
    layers: int | None = dataclasses.field(default=None, repr=False)  # the model's; `lm.with_method` puts them in

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = is_finite_number(self.beta) and self.beta >= 1
        require(fits, f"beta = {self.beta!r}: must be a finite number of at least 1")

    def for_model(self, num_layers: int, frequencies: Frequencies | None, wording: Wording | None) -> PyramidKVCache:
        return dataclasses.replace(self, layers=num_layers)

    def num_kept(self, layer: int, max_blocks: int) -> Int[np.ndarray, " N"]:
        layers = self.layers or 0
        require(layers, "layers = None: must be the model's; lm.with_method puts them in")
        mean, ranked = self.mean_kept(max_blocks), np.arange(max_blocks + 1) * self.block_size
        first = np.minimum(2 * mean - mean / self.beta, ranked)
        step = 2 * (first - mean) / max(layers - 1, 1)
        falling = np.rint(first - layer * step).astype(np.int32)
        return np.where((ranked + self.window < 2 * mean) | (layers == 1), mean, falling)


pyramidkv = rival("pyramidkv", PyramidKVCache)
