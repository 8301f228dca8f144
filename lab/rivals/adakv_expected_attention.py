"""Ada-KV over expected attention's scores: "expected_attention" on the leaderboard of NVIDIA's kvpress.

Follows `AdaKVPress(ExpectedAttentionPress(epsilon=1e-2))` (NVIDIA/kvpress at 8bb29b9). What differs: keys that are not
chosen are evicted, not masked; the budget is of the tokens left of the window.
"""

from __future__ import annotations

from tca_jax.lab.rivals.adakv import AdaKVCache
from tca_jax.lab.rivals.expected_attention import ExpectedAttentionCache
from tca_jax.methods.base import Method
from tca_jax.methods.full import FullPrefill


def adakv_expected_attention(
    share: float = 0.5,
    safeguard: float = 0.2,
    future: int = 512,
    sinks: int = 4,
    epsilon: float = 0.01,
    window: int = 128,
    block_size: int = 128,
) -> Method:
    """Full attention in prefill, Ada-KV's selection by expected attention's scores in the cache."""
    scored = ExpectedAttentionCache(share, window, block_size, future, sinks, epsilon)
    return Method("adakv-expected-attention", FullPrefill(), AdaKVCache(scored, safeguard, protects=True))
