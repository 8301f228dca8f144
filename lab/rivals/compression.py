"""What policies share that compress a prompt once, by scores over all of it, and keep every token that follows."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.errors import UserError, check_geometry, check_integer, check_number
from tca_jax.methods.base import CachePolicy, Heads, Method
from tca_jax.methods.full import FullPrefill
from tca_jax.methods.regions import Selection
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import varying_like

_SCORE_BITS = 31  # of a float32 that is not negative


class GrowingCache(CachePolicy):
    """Keeps the blocks that leave the window behind a prompt whole."""

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> int:
        return self.num_leaving_blocks(prompt_tokens, new_tokens) * self.block_size

    def evict(
        self, layer: int, heads: Heads, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]
    ) -> Selection:
        return Selection.of_block(attention, attention.shape[-1])


@dataclasses.dataclass(frozen=True)
class PromptCompression(GrowingCache):
    """Every KV head keeps its highest scores among all tokens left of the prompt's window, whatever their blocks.

    Blocks that leave the window later are kept whole: published methods of this kind compress the prompt and then let
    the cache grow.
    """

    # tokens of a prompt that a head holds, the window counted as `window` tokens (its left edge is on a block
    # boundary, so that up to `block_size` - 1 more are held); shorter prompts are held whole. None where `share` is
    # given.
    capacity: int | None = 2048
    share: float | None = None  # instead: kept share of the tokens left of the window, in (0, 1]; or None
    window: int = 128  # least number of local tokens, w, a multiple of `block_size`
    block_size: int = 128  # tokens in a block, b, a power of two

    def __post_init__(self) -> None:
        check_geometry(self.block_size, self.window)
        if self.share is not None:
            check_number("share", self.share, above=0, at_most=1)
            object.__setattr__(self, "capacity", None)  # a budget that plays no part makes no other policy
            return
        check_integer("capacity", self.capacity, at_least=1)
        if self.capacity is not None and self.capacity <= self.window:
            raise UserError(f"capacity = {self.capacity}: must be more than window = {self.window}, which counts in")

    @abc.abstractmethod
    def scores(
        self,
        heads: Heads,
        q: Float[Array, "B O Hq d"],
        k: Float[Array, "B L Hkv d"],
        v: Float[Array, "B L Hkv d"],
        lengths: Int[Array, " B"],
        backend: Backend,
    ) -> Float32[Array, "B Hkv L"]:
        """Scores of a prompt's tokens, not negative; those right of the ranked blocks do not matter.

        The arguments are those of `CachePolicy.select`.
        """

    def num_kept(self, layer: int, max_blocks: int) -> Int[np.ndarray, " N"]:
        """Tokens that a head of the layer keeps of 0, 1, ..., `max_blocks` ranked blocks, `[max_blocks + 1]`."""
        return self.mean_kept(max_blocks)

    def mean_kept(self, max_blocks: int) -> Int[np.ndarray, " N"]:
        """The same, the mean over all layers."""
        ranked = np.arange(max_blocks + 1) * self.block_size
        if self.share is not None:
            return np.rint(self.share * ranked).astype(np.int32)
        assert self.capacity is not None  # checked above
        return np.minimum(self.capacity - self.window, ranked).astype(np.int32)

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return int(self.num_kept(layer, self.num_ranked_blocks(prompt_tokens)).max())

    def select(
        self, layer: int, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Selection:
        def same(scores: Float32[Array, "B Hkv L"], mean: Int[Array, " B"]) -> Int[Array, "B Hkv"]:
            return jnp.broadcast_to(mean[:, None], scores.shape[:2])

        return self.select_counted(layer, heads, q, k, v, lengths, backend, same)

    def select_counted(
        self,
        layer: int,
        heads: Heads,
        q: Array,
        k: Array,
        v: Array,
        lengths: Array,
        backend: Backend,
        counts: Callable[[Float32[Array, "B Hkv L"], Int[Array, " B"]], Int[Array, "B Hkv"]],
    ) -> Selection:
        """As `select`, but `counts` says how many tokens a head keeps, from scores and this policy's number."""
        with jax.named_scope("token_scores"):
            scores = without_subnormals(self.scores(heads, q, k, v, lengths, backend))
        return self.selection(scores, counts(scores, self.mean_of_heads(layer, lengths, k.shape[1])), lengths)

    def mean_of_heads(self, layer: int, lengths: Int[Array, " B"], prompt_tokens: int) -> Int32[Array, " B"]:
        """Tokens that a head of the layer keeps of each prompt; `prompt_tokens` is the longest, static."""
        by_blocks = jnp.asarray(self.num_kept(layer, self.num_ranked_blocks(prompt_tokens)), jnp.int32)
        return by_blocks[self.num_ranked_blocks(lengths)]

    def selection(
        self, scores: Float32[Array, "B Hkv L"], counts: Int[Array, "B Hkv"], lengths: Int[Array, " B"]
    ) -> Selection:
        """The `counts` highest scores of each head among the ranked tokens."""
        blocks, b = scores.shape[-1] // self.block_size, self.block_size
        with jax.named_scope("top_tokens"):
            kept = top_tokens(scores, self.num_ranked_blocks(lengths) * b, counts)[..., : blocks * b]
        return Selection(scores, kept.reshape(*kept.shape[:2], blocks, b).sum(axis=-1, dtype=jnp.int32))


def over_full(name: str, policy: type[CachePolicy]) -> Callable[..., Method]:
    """The factory of a method: full attention, and `policy` in the cache; the policy's fields are options."""

    def factory(**options: Any) -> Method:
        return Method(name, FullPrefill(), policy(**options))

    fields = inspect.signature(policy).parameters.values()
    of_the_model = {field.name for field in dataclasses.fields(policy) if not field.repr}  # type: ignore[arg-type]
    options = [field.replace(kind=field.KEYWORD_ONLY) for field in fields if field.name not in of_the_model]
    factory.__signature__ = inspect.Signature(options, return_annotation=Method)  # type: ignore[attr-defined]
    return factory


def without_subnormals(scores: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """Scores with 0 for subnormal ones: devices differ in whether these are 0 when they are compared."""
    return jnp.where(scores < jnp.finfo(jnp.float32).tiny, 0, scores)


def top_tokens(
    scores: Float32[Array, "B Hkv L"], ranked_tokens: Int[Array, " B"], counts: Int[Array, "B Hkv"]
) -> Bool[Array, "B Hkv L"]:
    """Marks the `counts` highest scores of each head among a row's first tokens, ties to the lower position. Exact.

    The operation `reserve_tokens` for numbers that differ from row to row: nothing is sorted, the least marked score
    is found bit by bit, since the bits of a float that is not negative order as the float does.

    Args:
        scores: Finite and not negative `[B, Hkv, L]`.
        ranked_tokens: Tokens to choose from, the first of each row `[B]`.
        counts: Tokens to mark in each head of a row `[B, Hkv]`; all ranked ones where they are fewer.
    """
    bits, wanted = ranked_bits(scores, ranked_tokens), counts[..., None]

    def enough(score: Int32[Array, "B Hkv 1"]) -> Bool[Array, "B Hkv 1"]:
        return (bits >= score).sum(axis=-1, keepdims=True, dtype=jnp.int32) >= wanted

    nothing = jnp.zeros((*scores.shape[:2], 1), jnp.int32)
    least = threshold(enough, nothing, scores, ranked_tokens, counts)
    above, tied = bits > least, bits == least
    room = wanted - above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= room))


def ranked_bits(scores: Float32[Array, "B Hkv L"], ranked_tokens: Int[Array, " B"]) -> Int32[Array, "B Hkv L"]:
    """Integers in the order of scores that are not negative; -1 right of a row's first tokens."""
    ranked = jnp.arange(scores.shape[-1]) < ranked_tokens[:, None, None]
    return jnp.where(ranked, jax.lax.bitcast_convert_type(scores, jnp.int32), -1)


def threshold(
    enough: Callable[[Int32[Array, "*s"]], Bool[Array, "*s"]], nothing: Int32[Array, "*s"], *of_data: Array
) -> Int32[Array, "*s"]:
    """The largest integers that are `enough`, found bit by bit; 0 where none is.

    Args:
        enough: Whether so many marked scores are enough, for the least marked one's bits; falls with them.
        nothing: Zeros of the result's shape.
        *of_data: Arrays that `enough` depends on.
    """

    def decide(i: Array, least: Array) -> Array:
        higher = least | (jnp.int32(1) << (_SCORE_BITS - 1 - i))
        return jnp.where(enough(higher), higher, least)

    return jax.lax.fori_loop(0, _SCORE_BITS, decide, varying_like(nothing, *of_data))
