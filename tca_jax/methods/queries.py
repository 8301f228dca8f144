"""The last queries of right-padded prompts, which selections look at."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def last_queries(q: Float[Array, "B L Hq d"], lengths: Int[Array, " B"], count: int | None) -> Float[Array, "B O Hq d"]:
    """The last `count` prompt queries of each row, in order; all of them for None.

    A row shorter than `count` repeats its first query in front; whoever looks at several must leave those out.
    """
    if count is None:
        return q
    positions = jnp.clip(lengths[:, None] + jnp.arange(-count, 0), 0, q.shape[1] - 1)
    return jnp.take_along_axis(q, positions[:, :, None, None], axis=1)
