"""The base of rivals that compress a prompt once, by scores of its tokens, and keep every token that follows.

A rival is a frozen dataclass of its options with a method `score` of one KV head's tokens. All differ from the papers'
code in this: at least `window` last tokens stay, from a block boundary on (`capacity` includes them, `share` is of the
others); a KV head keeps one set, by the mean of the scores over its group, as in NVIDIA/kvpress; the prompt decides
once, where some code evicts at every step.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.errors import check_geometry, check_integer, check_number, require
from tca_jax.lab.rivals.scores import highest, ordered, threshold, total
from tca_jax.methods.base import CachePolicy, Heads, Layer, Method, PrefillPolicy
from tca_jax.methods.full import FullCache, FullPrefill
from tca_jax.methods.regions import Selection

#: Scores of tokens, `[B, Hkv, L]`.
Scores = Float32[Array, "B Hkv L"]


class GrowingCache(CachePolicy):
    """Heads may keep every token of a prompt, and keep every token that follows it."""

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return self.num_ranked_blocks(prompt_tokens) * self.block_size

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> int:
        return self.num_leaving_blocks(prompt_tokens, new_tokens) * self.block_size

    def evict(
        self, layer: Layer, heads: Heads, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]
    ) -> Selection:
        return Selection.of_block(attention, attention.shape[-1])


@dataclasses.dataclass(frozen=True)
class PromptCompression(GrowingCache):
    """Every KV head keeps its highest scores among all tokens left of the prompt's window."""

    # tokens of a prompt that a head holds, the window counted as `window` tokens (its left edge is on a block
    # boundary, so that up to `block_size` - 1 more are held); shorter prompts are held whole. None with `share`.
    capacity: int | None = 2048
    share: float | None = None  # instead: kept share of the tokens left of the window, in (0, 1]; or None
    window: int = 128  # least number of local tokens, w, a multiple of `block_size`
    block_size: int = 128  # tokens in a block, b, a power of two

    def __post_init__(self) -> None:
        check_geometry(self.block_size, self.window)
        if self.share is not None:
            check_number("share", self.share, above=0, at_most=1)
            object.__setattr__(self, "capacity", None)  # without effect: equal policies compare equal
            return
        check_integer("capacity", self.capacity, at_least=1)
        limit = f"must be more than window = {self.window}, which counts in"
        require((self.capacity or 0) > self.window, f"capacity = {self.capacity}: {limit}")

    @property
    def layers_differ(self) -> bool:  # type: ignore[override]
        return type(self).num_kept is not PromptCompression.num_kept

    def score(
        self, q: Float[Array, "B O G d"], k: Float[Array, "B L d"], v: Float[Array, "B L d"], lengths: Int[Array, " B"]
    ) -> Float32[Array, "B L"]:
        """Scores of the tokens of one KV head, not negative; those right of the ranked blocks are ignored."""
        raise NotImplementedError("a rival defines score, of a KV head, or scores, of all")

    def scores(self, heads: Heads, q: Array, k: Array, v: Array, lengths: Array) -> Scores:
        """Scores of the tokens of all KV heads, by the arguments of `select`."""
        return over_heads(lambda q, k, v: self.score(q, k, v, lengths), q, k, v)

    def num_kept(self, layer: Any, max_blocks: int) -> Int[np.ndarray, " N"]:
        """Tokens that a head of the layer keeps of 0, 1, ..., `max_blocks` ranked blocks."""
        return self.mean_kept(max_blocks)

    def mean_kept(self, max_blocks: int) -> Int[np.ndarray, " N"]:
        """The mean of `num_kept` over all layers."""
        ranked = np.arange(max_blocks + 1) * self.block_size
        if self.share is not None:
            return np.rint(self.share * ranked).astype(np.int32)
        return np.minimum((self.capacity or 0) - self.window, ranked).astype(np.int32)

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return int(self.num_kept(layer, self.num_ranked_blocks(prompt_tokens)).max())

    def select(self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array) -> Selection:
        scores = self.token_scores(heads, q, k, v, lengths)
        mean = self.mean_of_heads(layer, lengths, k.shape[1])
        return self.selection(scores, jnp.broadcast_to(mean[:, None], scores.shape[:2]), lengths)

    def token_scores(self, *operands: Any) -> Scores:
        """`scores` without subnormal ones: devices differ in whether these equal 0."""
        with jax.named_scope("token_scores"):
            return without_subnormals(self.scores(*operands))

    def mean_of_heads(self, layer: Layer, lengths: Int[Array, " B"], prompt_tokens: int) -> Int32[Array, " B"]:
        """Tokens that a head of the layer keeps of each prompt, of which the longest has `prompt_tokens`."""
        by_blocks = jnp.asarray(self.num_kept(layer, self.num_ranked_blocks(prompt_tokens)), jnp.int32)
        return by_blocks[self.num_ranked_blocks(lengths)]

    def ranked(self, lengths: Int[Array, " B"], tokens: int) -> Bool[Array, "B 1 L"]:
        """Which of the prompts' tokens are left of their windows."""
        return jnp.arange(tokens) < (self.num_ranked_blocks(lengths) * self.block_size)[:, None, None]

    def selection(self, scores: Scores, counts: Int[Array, "B Hkv"], lengths: Int[Array, " B"]) -> Selection:
        """The `counts` highest scores of each head among the ranked tokens."""
        blocks, b = scores.shape[-1] // self.block_size, self.block_size
        with jax.named_scope("top_tokens"):
            kept = highest(scores, counts, self.ranked(lengths, scores.shape[-1]))[..., : blocks * b]
        return Selection(scores, kept.reshape(*kept.shape[:2], blocks, b).sum(axis=-1, dtype=jnp.int32))


def over_heads(of_head: Callable[..., Any], q: Float[Array, "B O Hq d"], *kv: Float[Array, "B _ Hkv d"]) -> Any:
    """Results `[B, Hkv, ...]` of a function of one KV head after another: its queries `[B, O, G, d]`, its k, and v."""
    heads = tuple(jnp.moveaxis(x, 2, 0) for x in (q.reshape(*q.shape[:2], kv[0].shape[2], -1, q.shape[-1]), *kv))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), jax.lax.map(lambda head: of_head(*head), heads))


def without_subnormals(scores: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """Scores with 0 for subnormal ones: devices differ in whether these equal 0 in comparisons."""
    return jnp.where(scores < jnp.finfo(jnp.float32).tiny, 0, scores)


def divided(
    scores: Scores, ranked: Bool[Array, "B 1 L"], wanted: Int[Array, " B"], heads: Heads, least: Int[Array, " B"]
) -> Int32[Array, "B Hkv"]:
    """Each head's number of the `wanted` highest scores of all, or `least`; of equal ones the lower head's first."""
    keys = ordered(scores, ranked)

    def numbers(marks: Bool[Array, "B Hkv L"]) -> Int32[Array, "B Hkv"]:
        return jnp.maximum(total(marks)[..., 0], least[:, None])

    found = threshold(keys[:, :1, :1], lambda key: (heads.total(numbers(keys >= key)) >= wanted)[:, None, None])
    above = numbers(keys > found)
    tied = numbers(keys >= found) - above
    room = wanted[:, None] - heads.total(above)[:, None] - heads.total_before(tied)
    return above + jnp.clip(room, 0, tied)


def rival(
    name: str,
    policy: Callable[..., CachePolicy | PrefillPolicy],
    prefill: Callable[[CachePolicy], PrefillPolicy] = lambda cache: FullPrefill(),
) -> Callable[..., Method]:
    """The factory of a method whose options are those of a policy: of the cache beside `prefill`, or of prefill."""

    def factory(**options: Any) -> Method:
        made = policy(**options)
        if isinstance(made, CachePolicy):
            return Method(name, prefill(made), made)
        return Method(name, made, FullCache())

    of_the_model = {field.name for field in dataclasses.fields(policy) if not field.repr}  # type: ignore[arg-type]
    options = [x for x in inspect.signature(policy).parameters.values() if x.name not in of_the_model]
    keywords = [x.replace(kind=x.KEYWORD_ONLY) for x in options]
    factory.__signature__ = inspect.Signature(keywords, return_annotation=Method)  # type: ignore[attr-defined]
    return factory
