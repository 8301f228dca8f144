"""FlexPrefill (arXiv 2502.20766): every head lists the blocks that cover a share of the attention of a sample.

The attention of the prompt's last `block_size` queries sets how many vertical and slash lines cover `gamma` of it, and
which. A head is "query-aware" where the attention of mean queries over mean keys of blocks is close to theirs (square
root of the Jensen-Shannon divergence below `tau`): it takes a minimum of lines, and the block pairs that cover `gamma`
of the attention of mean queries. Follows ByteDance-Seed/FlexPrefill at a24b27b: lines are counted in tokens, plus one
block; the first column and the diagonal are always among them; the pair that passes `gamma` is left out.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.errors import check_integer, check_not_negative, check_number
from tca_jax.lab.rivals.compression import rival
from tca_jax.lab.rivals.scores import covering, diagonal_sums, highest, last_attention
from tca_jax.methods.base import Heads, Layer, last_queries
from tca_jax.methods.block_sparse import BlockSparsePrefill, Listed, block_sums, lists_of_mask
from tca_jax.pallas_kernels.numerics import cdiv, scaled_scores


@dataclasses.dataclass(frozen=True)
class FlexPrefill(BlockSparsePrefill):
    # share of its attention that every head covers, in (0, 1]: the knob of the budget. The paper has 0.9 and, for
    # LLaMA-3.1-8B, 0.95.
    gamma: float = 0.9
    tau: float = 0.1  # largest divergence of a query-aware head, at least 0; 0 makes no head one
    min_budget: int = 1024  # least tokens of vertical and of slash blocks each; shorter prompts are attended to exactly
    block_size: int = 128  # tokens in a block, queries in a tile and in the sample; 16 or a multiple for Triton

    layers_differ = False

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, above=0, at_most=1)
        check_not_negative("tau", self.tau)
        check_integer("min_budget", self.min_budget, at_least=0)
        check_integer("block_size", self.block_size, at_least=1)

    @property
    def dense_tokens(self) -> int:  # type: ignore[override]
        """Prompts that the least budget covers, or of two blocks, get exact causal attention."""
        return max(2, self.min_blocks) * self.block_size

    @property
    def min_blocks(self) -> int:
        """Least blocks of each kind of line."""
        return max(1, cdiv(self.min_budget, self.block_size))

    def estimate(self, layer: Layer, heads: Heads, head: Array, q: Array, k: Array, lengths: Array) -> Listed:
        size, batch, tiles = self.block_size, q.shape[0], cdiv(q.shape[1], self.block_size)
        queries = last_queries(q, lengths, size)
        attention = last_attention(queries, k, lengths)
        vertical, slash = attention.mean(axis=2), diagonal_sums(attention, lengths) / size
        columns, diagonals = _pool(vertical, size), _pool_diagonals(slash, lengths, size)
        among = jnp.arange(tiles) * size < lengths[:, None, None]

        keys = _block_means(k[:, :, None], lengths, size)[:, :, 0]
        # A head is query-aware if its mean query's attention on the mean keys is close to that of the queries.
        scores = scaled_scores("bgd,bnd->bgn", queries.astype(jnp.float32).mean(axis=1), keys)
        aware = _distance(jax.nn.softmax(scores, axis=-1, where=among), columns) < self.tau
        lines = []
        for tokens, sums in ((vertical, columns), (slash, diagonals)):
            needed = covering(tokens, jnp.full(tokens.shape[:-1], self.gamma), jnp.ones_like(tokens, bool))
            number = needed.sum(axis=-1, dtype=jnp.int32) // size + 1
            number = jnp.where(aware, self.min_blocks, jnp.maximum(number, self.min_blocks))
            forced = sums.at[..., 0].set(jnp.inf)  # the first column, and the diagonal itself
            lines.append(highest(forced, number, among))
        back = jnp.arange(tiles)[:, None] - jnp.arange(tiles)
        mask = lines[0][..., None, :] | (lines[1][..., jnp.maximum(back, 0)] & (back >= 0))
        pairs = self._covering_pairs(q, keys, lengths) & aware[..., None, None]
        return lists_of_mask(mask | pairs.reshape(batch, -1, tiles, tiles), size, k.shape[1])

    def _covering_pairs(
        self, q: Float[Array, "B L G d"], keys: Float32[Array, "B N d"], lengths: Int[Array, " B"]
    ) -> Bool[Array, "B G N N"]:
        """Pairs of a tile and a block that cover gamma of the attention of mean queries over mean keys."""
        scores = scaled_scores("bigd,bjd->bgij", _block_means(q, lengths, self.block_size), keys)
        tiles, blocks = scores.shape[-1], -(-lengths // self.block_size)
        real = jnp.arange(tiles) < blocks[:, None]
        seen = (jnp.tri(tiles, dtype=bool) & real[:, :, None] & real[:, None, :])[:, None]
        shares = jax.nn.softmax(scores, axis=-1, where=seen)
        flat, among = (x.reshape(*x.shape[:2], tiles**2) for x in (shares, seen))
        mass = jnp.broadcast_to((self.gamma * blocks)[:, None].astype(jnp.float32), flat.shape[:2])
        return covering(flat, mass, among, reach=False).reshape(scores.shape)


flexprefill = rival("flexprefill", FlexPrefill)


def _pool(values: Float32[Array, "B G L"], size: int) -> Float32[Array, "B G N"]:
    """Sums over blocks."""
    blocks = cdiv(values.shape[-1], size)
    values = jnp.pad(values, ((0, 0), (0, 0), (0, blocks * size - values.shape[-1])))
    return values.reshape(*values.shape[:2], blocks, size).sum(axis=-1)


def _pool_diagonals(slash: Float32[Array, "B G L"], lengths: Int[Array, " B"], size: int) -> Float32[Array, "B G N"]:
    """Sums over the diagonals that meet the last query's row r blocks left of its own block, r from 0."""
    blocks, inside = cdiv(slash.shape[-1], size), (lengths - 1) % size
    # Diagonal o of the query at place p of its block meets block ceil((o - p) / b) left of it.
    padded = jnp.pad(slash, ((0, 0), (0, 0), (size - 1, blocks * size - slash.shape[-1] + size)))
    cut = jax.vmap(lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, blocks * size, axis=-1))
    return _pool(cut(padded, inside), size)


def _block_means(x: Float[Array, "B L H d"], lengths: Int[Array, " B"], size: int) -> Float32[Array, "B N H d"]:
    """Means over the tokens of each block that the prompt has."""
    sums = block_sums(x, lengths, size)
    counts = jnp.clip(lengths[:, None] - jnp.arange(sums.shape[1]) * size, 1, size)
    return sums / counts[..., None, None]


def _distance(p: Float32[Array, "B G N"], q: Float32[Array, "B G N"]) -> Float32[Array, "B G"]:
    """Square root of the Jensen-Shannon divergence, in nats."""
    middle = (p + q) / 2
    first, second = ((x * jnp.log(jnp.where(x > 0, x / middle, 1))).sum(axis=-1) for x in (p, q))
    return jnp.sqrt(jnp.maximum((first + second) / 2, 0))
