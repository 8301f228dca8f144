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
from tca_jax.lab.rivals.snapkv import SnapKVCache
from tca_jax.methods.base import Frequencies, Method, Wording
from tca_jax.methods.full import FullPrefill


@dataclasses.dataclass(frozen=True)
class PyramidKVCache(SnapKVCache):
    """The window and the tokens that the last queries attend to most, fewer from layer to layer.

    `capacity` and `share` are means over the layers.
    """

    beta: float = 20.0
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


def pyramidkv(
    capacity: int = 2048,
    share: float | None = None,
    beta: float = 20.0,
    observation: int = 64,
    kernel: int = 5,
    pooling: str = "avg",
    window: int = 128,
    block_size: int = 128,
) -> Method:
    """Full attention for the prompt's queries, PyramidKV's selection in the cache.

    Args:
        capacity: Tokens of a prompt that a KV head holds, the mean over layers, the window counted as `window`; the
            code's `max_capacity_prompt`.
        share: Instead: kept share of the tokens left of the window, the mean over layers, in (0, 1].
        beta: The mean budget over the last layer's, at least 1.
        observation: Last prompt queries that vote, at most `window`; the code's `window_size`.
        kernel: Neighbours that scores are pooled over, odd.
        pooling: "avg" or "max".
        window: Least number of local tokens, a multiple of `block_size`.
        block_size: Tokens in a block, a power of two.

    Raises:
        ValueError: an option is not allowed.
    """
    cache = PyramidKVCache(capacity, share, window, block_size, observation, kernel, pooling, beta)
    return Method("pyramidkv", FullPrefill(), cache)
