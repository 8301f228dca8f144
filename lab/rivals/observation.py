"""What the last queries of a prompt attend to, and pooling over neighbours: the ground of SnapKV and CAKE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.errors import UserError, check_integer
from tca_jax.lab.rivals.tiles import concatenate_tiles
from tca_jax.pallas_kernels.numerics import scaled_scores

#: What scores may be pooled by: the mean or the maximum over a token and its neighbours.
POOLINGS = ("avg", "max")


def check_observation(observation: Any, kernel: Any, window: int, *, at_least: int = 1) -> None:
    """Raises ValueError unless the observing queries lie in the window and the kernel has a centre."""
    check_integer("observation", observation, at_least=at_least)
    if observation > window:
        raise UserError(f"observation = {observation}: must be at most window = {window}, whose tokens are kept")
    check_integer("kernel", kernel, at_least=1)
    if kernel % 2 == 0:
        raise UserError(f"kernel = {kernel}: must be odd")


def check_pooling(pooling: Any) -> None:
    """Raises ValueError unless it is one of `POOLINGS`."""
    if pooling not in POOLINGS:
        raise UserError(f"pooling = {pooling!r}: must be one of {list(POOLINGS)}")


def observed_attention(
    q_last: Float[Array, "B O Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    reduce: Callable[[Float32[Array, "B Hkv G O t"]], Any],
) -> Any:
    """Reduces the causal attention of the last prompt queries, every key for itself and every query head for itself.

    Args:
        q_last: Last prompt queries `[B, O, Hq, d]`; `q_last[:, -1]` is the last. Those at negative positions (prompts
            shorter than O) attend to nothing.
        k: Prompt keys `[B, L, Hkv, d]`, right-padded.
        lengths: Prompt lengths `[B]`.
        reduce: Takes the probabilities of some keys `[B, Hkv, G, O, t]`, 0 where a query does not see a key; returns
            arrays `[B, Hkv, G, t]`.

    Returns:
        What `reduce` gives, of all keys: `[B, Hkv, G, L]`; 0 for the last O tokens, which are those that observe.
    """
    batch, observed = q_last.shape[:2]
    queries = q_last.reshape(batch, observed, k.shape[2], -1, q_last.shape[-1])
    places = lengths[:, None] - observed + jnp.arange(observed)  # [B, O]

    def logits(positions: Array, keys: Array) -> tuple[Float32[Array, "B Hkv G O t"], Bool[Array, "B 1 1 O t"]]:
        seen = (positions <= places[..., None])[:, None, None]
        return scaled_scores("bohgd,bkhd->bhgok", queries, keys), seen

    def normaliser(positions: Array, keys: Array) -> Float32[Array, "B Hkv G O 1"]:
        scores, seen = logits(positions, keys)
        return jax.nn.logsumexp(scores, axis=-1, where=seen, keepdims=True)

    def reduced(positions: Array, keys: Array) -> Any:
        scores, seen = logits(positions, keys)
        values = reduce(jnp.where(seen, jnp.exp(scores - norms[..., None]), 0))
        before = positions < (lengths - observed)[:, None, None, None]
        return jax.tree.map(lambda x: jnp.where(before, x, 0), values)

    norms = jax.nn.logsumexp(concatenate_tiles(normaliser, k), axis=-1)  # those of the tiles together
    return concatenate_tiles(reduced, k)


def pool(x: Float32[Array, "*lead L"], kernel: int, pooling: str = "avg") -> Float32[Array, "*lead L"]:
    """Mean or maximum over `kernel` centred neighbours; what lies past either end counts as 0.

    Args:
        x: Not negative.
        kernel: Neighbours, odd.
        pooling: One of `POOLINGS`; "avg" divides by `kernel` everywhere, as torch's default does.
    """
    sizes = (1,) * (x.ndim - 1) + (kernel,)
    steps = (1,) * x.ndim
    if pooling == "max":
        return jax.lax.reduce_window(x, 0.0, jax.lax.max, sizes, steps, "SAME")
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, sizes, steps, "SAME") / kernel
