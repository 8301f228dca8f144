"""Prefill attention: every query over its window, and left of it selected tokens, listed blocks and means of others."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.errors import require
from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_blocks, check_shapes, check_whole_blocks
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.numerics import cdiv


class FarBlocks(NamedTuple):
    """Blocks and means that a query block attends to left of its window (docs/worth.md). N = ceil(L / b)."""

    # First tokens of key blocks, which end left of the window; the first `counts` count. Backend "mosaic" takes those
    # that begin on multiples of 128.
    blocks: Int[Array, "B Hkv N C"]
    counts: Int[Array, "B Hkv N"]
    selected: Bool[Array, "B Hkv L"]  # the pool's tokens: a listed block leaves them out
    mean_k: Float[Array, "B N Hkv d"]  # of the tokens of each key block that are not selected
    mean_v: Float[Array, "B N Hkv d"]
    mean_bias: Float32[Array, "B Hkv N N"]  # added to the logit of a mean, by query block; -inf: not attended to
    mean_counts: Int[Array, "B Hkv N"]  # means from the first on that a query block goes over; the others cost nothing

    def work(self, block_size: int) -> Float32[Array, "B Hkv"]:
        """Keys that a head's query blocks go over, in all."""
        return (self.counts * block_size + self.mean_counts).sum(axis=-1, dtype=jnp.float32)


_POOL = "P d", "P d", "B Hkv", "B Hkv"
_FAR = "B Hkv N C", "B Hkv N", "B Hkv L", "B N Hkv d", "B N Hkv d", "B Hkv N N", "B Hkv N"


def prefill_attention(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    pool: Pool,
    budgets: Int[Array, "B Hkv nb"],
    lengths: Int[Array, " B"] | Int[Array, "B Hkv"],
    *,
    block_size: int,
    window: int,
    far: FarBlocks | None = None,
    backend: Backend = "auto",
) -> Float[Array, "B L Hq d"]:
    """Attention of a prompt over local and selected tokens (Eq. 3), and over `far`.

    Query i attends to its local tokens [max(0, (i // b) b - w), i] and to the selected tokens left of them, a
    prefix of its head's region, for a region is sorted by position. The cost is that of the pairs kept. With
    a window of at least L this is exact causal attention.

    Args:
        q: Queries [B, L, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        k: Keys [B, L, Hkv, d]; what lies past a row's length does not matter.
        v: Values [B, L, Hkv, d].
        pool: Selected tokens, as `select_tokens` lays them out.
        budgets: Selected tokens of every block [B, Hkv, L // b]; 0 for blocks that are not ranked.
        lengths: Prompt lengths [B], or one for each KV head [B, Hkv]; may be traced. A head of length 0 costs nothing
            and gives zeros.
        block_size: Tokens in a block, b.
        window: Least number of local tokens, w; a multiple of b, or 0.
        far: Blocks and means left of the window; None for none. All numbers are data: nothing is done where one is 0.
        backend: See `backends.Backend`.

    Returns:
        [B, L, Hq, d] in the type of `q`; rows past a length are zero.
    """
    check_blocks(block_size)
    fits = window >= 0 and window % block_size == 0
    require(fits, f"window = {window}: must be 0 or a multiple of block_size = {block_size}")
    sizes = check_shapes(
        {
            "q": (q, "B L Hq d"),
            "k": (k, "B L Hkv d"),
            "v": (v, "B L Hkv d"),
            **_shapes("pool", pool, _POOL),
            "budgets": (budgets, "B Hkv nb"),
            "lengths": (lengths, "B" if lengths.ndim == 1 else "B Hkv"),
            **({} if far is None else _shapes("far", far, _FAR)),
        }
    )
    check_whole_blocks("budgets", sizes, block_size)
    whole = cdiv(sizes["L"], block_size)
    require(sizes.get("N", whole) == whole, f"far has {sizes.get('N')} blocks: must be ceil(L / block_size) = {whole}")
    implementation = dispatch("prefill_attention", backend)
    return implementation(q, k, v, pool, budgets, lengths, block_size=block_size, window=window, far=far)


def _shapes(name: str, group: Pool | FarBlocks, dims: tuple[str, ...]) -> dict[str, tuple[Array, str]]:
    """The arrays of a group and their dimensions, as `check_shapes` takes them."""
    return {f"{name}.{field}": (array, of) for field, array, of in zip(group._fields, group, dims, strict=True)}
