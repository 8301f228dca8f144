"""PyramidKV (arXiv 2406.02069): SnapKV whose budget falls from layer to layer, by equal steps.

With the mean budget m over the layers, the first layer has 2 m - m / beta tokens and the last m / beta, left of the
window; where a prompt has not as many, the first layer has all of it and the last 2 m less that. Of prompts shorter
than 2 m, every layer has m. Follows the authors' code (Zefan-Cai/KVCache-Factory at 5fb995d, `PyramidKVCluster`), whose
defaults these are but for the window. What differs:

- Rounding. The code rounds the step down, so that layers together hold up to L / 2 tokens each more than m; here each
  layer's budget is rounded, as in NVIDIA/kvpress at 08a43bf, and m is the mean.
- Query heads and the window: as in `snapkv`. There, the last 64 tokens observe and stay.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from tca_jax.errors import UserError, is_finite_number
from tca_jax.lab.rivals.compression import over_full
from tca_jax.lab.rivals.snapkv import SnapKVCache
from tca_jax.methods.base import Frequencies, Wording


@dataclasses.dataclass(frozen=True)
class PyramidKVCache(SnapKVCache):
    """The window and the tokens that the last queries attend to most, fewer from layer to layer.

    `capacity` and `share` are means over the layers.
    """

    observation: int = 64
    beta: float = 20.0  # the mean budget over the last layer's, at least 1; 1 gives all layers the same
    # the model's layers; None until a model gives them (`lm.with_method` does)
    layers: int | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_finite_number(self.beta) or self.beta < 1:
            raise UserError(f"beta = {self.beta!r}: must be a finite number of at least 1")

    def for_model(self, num_layers: int, frequencies: Frequencies | None, wording: Wording | None) -> PyramidKVCache:
        return dataclasses.replace(self, layers=num_layers)

    def num_kept(self, layer: int, max_blocks: int) -> Int[np.ndarray, " N"]:
        if self.layers is None:
            raise UserError("layers = None: must be the model's; lm.with_method puts them in")
        mean, ranked = self.mean_kept(max_blocks), np.arange(max_blocks + 1) * self.block_size
        first = np.minimum(2 * mean - mean / self.beta, ranked)
        step = 2 * (first - mean) / max(self.layers - 1, 1)
        falling = np.rint(first - layer * step).astype(np.int32)
        return np.where((ranked + self.window < 2 * mean) | (self.layers == 1), mean, falling)


pyramidkv = over_full("pyramidkv", PyramidKVCache)
