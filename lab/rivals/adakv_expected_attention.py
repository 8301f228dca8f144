"""Ada-KV over expected attention's scores: what NVIDIA's kvpress ranks as "expected_attention" on its leaderboard.

Follows NVIDIA/kvpress at 8bb29b9, `AdaKVPress(ExpectedAttentionPress(epsilon=1e-2))`. Its safeguard is not that of the
authors' code (`adakv`): a head's highest `safeguard` times the mean budget are chosen before all others. What differs:

- Masks. kvpress keeps all keys and masks those that are not chosen; here only the chosen ones are kept.
- What is counted. There, all tokens of the prompt share the budget; here those left of the window do.
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
    """Full attention for the prompt's queries, Ada-KV's selection by expected attention's scores in the cache.

    Args:
        share: Kept share of the tokens left of the window, the mean over a layer's heads, in (0, 1]; the code's
            1 - `compression_ratio`.
        safeguard: Part of the mean budget that is each head's own, in [0, 1]; the code's `alpha_safeguard`.
        future: Positions behind the prompt over which rotations are averaged; the code's `n_future_positions`.
        sinks: First tokens, kept before all others; the code's `n_sink`.
        epsilon: Added to the expected attention before it is multiplied by |v|.
        window: Least number of local tokens, a multiple of `block_size`.
        block_size: Tokens in a block, a power of two.

    Raises:
        ValueError: an option is not allowed.
    """
    scored = ExpectedAttentionCache(None, share, window, block_size, future, sinks, epsilon)
    return Method("adakv-expected-attention", FullPrefill(), AdaKVCache(scored, safeguard, protects=True))
