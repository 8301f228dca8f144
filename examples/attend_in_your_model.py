"""TCA in your own attention layer: calibrate its heads, attend, and measure the error.

python examples/attend_in_your_model.py
"""

import jax
import jax.numpy as jnp

import tca_jax
from tca_jax.calibration import choose_candidates

BATCH, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2, 2048, 8, 2, 64


def main() -> None:
    """One layer whose queries look for every 29th token, in the first KV head more than in the second."""
    config = tca_jax.TCAConfig(window=512)
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (BATCH, TOKENS, HEADS, HEAD_DIM))
    k = jax.random.normal(keys[1], (BATCH, TOKENS, KV_HEADS, HEAD_DIM))
    v = jax.random.normal(keys[2], (BATCH, TOKENS, KV_HEADS, HEAD_DIM))
    sought = jax.random.normal(keys[3], (KV_HEADS, HEAD_DIM)) * jnp.array([[1.1], [0.9]])
    q = q + sought.repeat(HEADS // KV_HEADS, axis=0)
    k = k + sought * (jnp.arange(TOKENS) % 29 == 0)[:, None, None]
    lengths = jnp.array([TOKENS, TOKENS - 300])  # rows are right-padded

    # Offline: the sparsest candidate of each KV head that keeps enough attention mass.
    scores = tca_jax.calibration_scores(q, k, lengths, config).mean(axis=0)  # [H_kv, M + 1]
    candidates = choose_candidates(scores, config.tau)
    masses = [f"{mass:.1%}" for mass in scores[:, 0]]
    print("candidate of each KV head:", candidates.tolist(), "retained mass at the sparsest:", masses)

    # Online, inside your own jitted function.
    layer = jax.jit(lambda q, k, v: tca_jax.attend(q, k, v, candidates, lengths, config))
    out = layer(q, k, v)
    dense = jnp.full_like(candidates, config.num_candidates)
    full = tca_jax.attend(q, k, v, dense, lengths, config)

    gamma = tca_jax.diagnostics.dropped_mass(q, k, candidates, lengths, config)
    bounds = tca_jax.diagnostics.error_bounds(gamma, v, lengths)
    kept = tca_jax.select(q[jnp.arange(BATCH), lengths - 1], k, candidates, lengths, config)
    print(f"global tokens kept: {kept.mean():.1%} of the prompt, beside the window of {config.window}")
    print(f"largest error {jnp.abs(out - full).max():.4f}, Theorem 1 allows {bounds.max_norm.max():.4f}")


if __name__ == "__main__":
    main()
