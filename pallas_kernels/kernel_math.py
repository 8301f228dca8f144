"""Shared by the kernels of all backends: index arithmetic, the order of prefill's work, tile sizes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

LOG2E = math.log2(math.e)  # turns a logarithm to base e into one to base 2


def quotient_and_remainder(index: Any, size: int) -> tuple[Any, Any]:
    """index // size and index % size of a traced integer that is not negative."""
    return lax.div(index, jnp.int32(size)), lax.rem(index, jnp.int32(size))


def divide_up(value: Any, by: Any) -> Any:
    """ceil(value / by) of traced integers that are not negative."""
    return lax.div(value + (by - 1), jnp.broadcast_to(jnp.asarray(by, value.dtype), value.shape))


def prefix_schedule(
    budgets: Int[Array, "B Hkv nb"], num_blocks: int, window_blocks: int, far: Float[Array, "B Hkv"] | float = 0.0
) -> tuple[Int[Array, "B Hkv N"], Int[Array, " regions"]]:
    """Selected tokens left of each block's window, and the regions in order of these and `far` keys, most first."""
    ends = jnp.pad(jnp.cumsum(budgets, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
    edges = jnp.clip(jnp.arange(num_blocks) - window_blocks, 0, budgets.shape[-1])
    prefixes = ends[..., edges]
    work = prefixes.sum(axis=-1, dtype=jnp.float32) + far
    return prefixes, jnp.argsort(-work.ravel()).astype(jnp.int32)


def lengths_by_head(lengths: Int[Array, " B"] | Int[Array, "B Hkv"], kv_heads: int) -> Int[Array, "B Hkv"]:
    """A length for every KV head of a row, from one that all of them share or as they are."""
    return lengths if lengths.ndim == 2 else jnp.broadcast_to(lengths[:, None], (lengths.shape[0], kv_heads))


def full_precision_tile(head_dim: int) -> tuple[int, int]:
    """Largest side of a tile of float32 scores, and warps, at which registers do not run out.

    Products that are not rounded to TF32 do not run on the matrix units: their operands go through registers.
    """
    return (32 if head_dim <= 128 else 16), 8


def shared_memory() -> int:
    """Bytes of shared memory that a program of the default device may take; an H200's where there is no GPU."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "9.0")
    return {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}.get(capability, 99) * 1024


def multiprocessors() -> int:
    """Streaming multiprocessors of the default device; an H200's where there is no GPU (lowering on a CPU host)."""
    device = jax.local_devices()[0]
    return int(getattr(device, "core_count", 132)) if device.platform == "gpu" else 132
