"""Prompts are repeated to the model in chunks, and the attention that their tokens get then scores them: KVzip."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.pallas_kernels.numerics import MASKED, cdiv, scaled_scores, varying_like

#: Last tokens of the chunk before, which tell the model where a chunk begins.
CARRIED = 8
#: Score of the first tokens, which stay: no attention passes 1.
AHEAD = 2.0


@runtime_checkable
class Wording(Protocol):
    """How a model is asked for something."""

    def ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a text of the user's."""

    def before_answer(self) -> tuple[int, ...]:
        """Token ids between what the user says and the answer."""


@dataclasses.dataclass(frozen=True)
class Repetition:
    """How a prompt is repeated: behind it comes, for each chunk, a request to repeat it and then the chunk itself.

    Attributes:
        chunk: Tokens of a chunk, at least `CARRIED`.
        sinks: First tokens of a prompt, which are in no chunk.
        opening: Token ids of the request for the first chunk.
        continuing: Of that for any other, which the last `CARRIED` tokens of the chunk before complete.
        answer: Token ids between a request and the chunk.
    """

    chunk: int
    sinks: int
    opening: tuple[int, ...] = ()
    continuing: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()

    def worded(self, opening: str, continuing: str, wording: Wording | None) -> Repetition:
        """The same in words of a model; without words for None."""
        if wording is None:
            return Repetition(self.chunk, self.sinks)
        ids = wording.ids(opening), wording.ids(continuing), wording.before_answer()
        return Repetition(self.chunk, self.sinks, *ids)

    def chunk_tokens(self, prompt_tokens: int) -> int:
        """Tokens of a chunk of prompts of at most so many tokens."""
        return max(1, min(self.chunk, prompt_tokens - self.sinks))

    def num_chunks(self, prompt_tokens: int) -> int:
        """Chunks of a prompt of so many tokens."""
        return cdiv(max(0, prompt_tokens - self.sinks), self.chunk)

    def fed_tokens(self, prompt_tokens: int) -> int:
        """Most tokens of a request and a chunk of prompts of at most so many tokens."""
        request = max(len(self.opening), len(self.continuing) + CARRIED) + len(self.answer)
        return request + self.chunk_tokens(prompt_tokens)

    def fed(
        self,
        number: Int[Array, ""],
        tokens: Int[Array, "B L"],
        lengths: Int[Array, " B"],
        wanted: Int[Array, " B"],
        places: Int[Array, "B S"],
    ) -> tuple[Int32[Array, "B S"], Int32[Array, " B"]]:
        """A request and its chunk.

        Args:
            number: Of the chunk, traced.
            tokens: Prompts, right-padded.
            lengths: Their lengths.
            wanted: Tokens of each prompt whose scores are wanted, the first ones.
            places: Which tokens to give, counted from the request's first.

        Returns:
            Those tokens, arbitrary past the last, and how many there are in each row: none where no score is wanted.
        """
        first = number == 0
        start = self.sinks + number * self.chunk
        asked = jnp.where(first, len(self.opening), len(self.continuing))
        carried = jnp.where(first, 0, CARRIED)
        request = asked + carried + len(self.answer)
        words = jnp.asarray((*self.opening, *self.continuing, *self.answer, 0), jnp.int32)
        word = places + jnp.where(first, 0, len(self.opening))
        word = jnp.where(places < asked, word, places - asked - carried + len(self.opening) + len(self.continuing))
        is_word = (places < asked) | ((places >= asked + carried) & (places < request))
        place = jnp.where(places < asked + carried, start - carried + places - asked, start + places - request)
        of_prompt = jnp.take_along_axis(tokens, jnp.clip(place, 0, tokens.shape[1] - 1), axis=1)
        ids = jnp.where(is_word, words.at[word].get(mode="clip"), of_prompt)
        count = request + jnp.clip(lengths - start, 0, self.chunk_tokens(tokens.shape[1]))
        return ids, jnp.where(wanted > start, count, 0).astype(jnp.int32)


def repeated_attention(
    q: Float[Array, "B S Hq d"],
    k: Float[Array, "B S Hkv d"],
    sinks: Float[Array, "B s Hkv d"],
    chunk: Float[Array, "B c Hkv d"],
    fed: Bool[Array, "B S"],
    there: Bool[Array, "B c"],
    *,
    queries: int,
) -> Float32[Array, "B Hkv c"]:
    """The most attention that each token of a chunk gets from what repeats it: KVzip, Algorithm 1, in float32.

    The softmax of a query is over the prompt's first tokens, the chunk and what was fed up to the query; the maximum
    is over all that was fed, the request included, and over the query heads of a KV head.

    Args:
        q: Queries of what is fed after RoPE; `k` its keys.
        sinks: Keys of the prompt's first tokens.
        chunk: Keys of the chunk's tokens in the prompt.
        fed: Which columns of `q` and `k` hold a token.
        there: Which columns of `chunk` do.
        queries: Columns of `q` that are looked at in turn; S is a multiple.
    """
    batch, columns, kv_heads, head_dim = k.shape
    keys = jnp.concatenate([sinks, chunk, k], axis=1)
    seen = jnp.concatenate([jnp.ones(sinks.shape[:2], bool), there, fed], axis=1)
    before = keys.shape[1] - columns
    of_chunk = slice(sinks.shape[1], before)
    grouped = q.reshape(batch, columns, kv_heads, -1, head_dim)

    def raised(number: Array, most: Float32[Array, "B Hkv c"]) -> Float32[Array, "B Hkv c"]:
        place = number * queries + jnp.arange(queries)
        part, is_fed = (jax.lax.dynamic_slice_in_dim(x, number * queries, queries, axis=1) for x in (grouped, fed))
        causal = jnp.arange(keys.shape[1]) - before <= place[:, None]
        mask = (seen[:, None] & causal)[:, None, None]  # [B, 1, 1, queries, keys]
        scores = jnp.where(mask, scaled_scores("bqhgd,bkhd->bhgqk", part, keys), MASKED)
        found = jax.nn.softmax(scores, axis=-1)[..., of_chunk]
        counts = (is_fed[:, :, None] & there[:, None])[:, None, None]
        return jnp.maximum(most, jnp.where(counts, found, 0).max(axis=(2, 3)))

    nothing = jnp.zeros((batch, kv_heads, chunk.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, columns // queries, raised, varying_like(nothing, q, keys))
