"""An attention method of your own in one file: defined, registered, and compared with others on questions and text.

python examples/your_own_method.py
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import tca_jax
from tca_jax import methods
from tca_jax.lab import recall
from tca_jax.lab.recall.tasks import completion

BYTES = 1152  # of a document; with a question about 1250 tokens, for the model reads bytes
TASKS = ("digits", "words", "keys", "digits")
WINDOW = 512  # of `streaming` and of the method below; the shipped profile has 256
ANSWER_TOKENS = 16  # none of these answers is longer than 13 bytes


@dataclasses.dataclass(frozen=True)
class ObservedCache(methods.CachePolicy):
    """Each KV head keeps the tokens that get more than average attention from the prompt's last queries.

    The budgets are data: a head that attends to few tokens keeps few. Only the most that a head may keep is static.
    """

    threshold: float = 1.0  # attention of a kept token, where 1 is an even share, one over the prompt's length
    most: float = 0.5  # largest kept share of a block
    decay: float = 0.8  # weight of a query against that of the next one
    spread: int = 8  # tokens that share the attention of the first of them: those that follow it are copied next
    num_queries: int = 16  # observed queries, the prompt's last
    window: int = 4096  # least local tokens, a multiple of `block_size`
    block_size: int = 128  # tokens, a power of two

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return self.num_ranked_blocks(prompt_tokens) * int(self.most * self.block_size)

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> int:
        return self.num_leaving_blocks(prompt_tokens, new_tokens) * int(self.most * self.block_size)

    def select(
        self, layer: int, heads: methods.Heads, q: Array, k: Array, v: Array, lengths: Array
    ) -> methods.Selection:
        scores = self._observed_attention(q, k, lengths)
        budgets = self._budgets(scores, lengths)
        ranked = jnp.arange(budgets.shape[-1]) < self.num_ranked_blocks(lengths)[:, None, None]
        return methods.Selection(scores, jnp.where(ranked, budgets, 0))

    def evict(self, layer: int, heads: methods.Heads, attention: Array, blocks: Array) -> methods.Selection:
        scores = attention.mean(axis=2)  # over the query heads of a KV head
        tokens = (blocks + 1) * self.block_size + self.window  # of the sequence when the block leaves the window
        return methods.Selection(scores, self._budgets(scores, tokens))

    def _observed_attention(self, q: Array, k: Array, lengths: Array) -> Array:
        """Weighted mean attention of the last queries, and of their group, to every token, [B, H_kv, L]."""
        batch, observed, heads, head_dim = q.shape
        tokens, kv_heads = k.shape[1:3]
        position = lengths[:, None] - observed + jnp.arange(observed)  # negative in shorter prompts
        queries = q.reshape(batch, observed, kv_heads, heads // kv_heads, head_dim)
        logits = jnp.einsum("bohgd,blhd->bhgol", queries, k, preferred_element_type=jnp.float32) / head_dim**0.5
        seen = jnp.arange(tokens) <= position[..., None]  # causal, so without padding
        attention = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -1e30), axis=-1)
        weights = jnp.where(position >= 0, self.decay ** jnp.arange(observed)[::-1], 0)
        weights /= weights.sum(axis=-1, keepdims=True)
        scores = jnp.einsum("bhgol,bo->bhl", attention, weights) / (heads // kv_heads)
        window, before = (1, 1, self.spread), ((0, 0), (0, 0), (self.spread - 1, 0))
        return jax.lax.reduce_window(scores, -jnp.inf, jax.lax.max, window, (1, 1, 1), before)

    def _budgets(self, scores: Array, lengths: Array) -> Array:
        """Tokens of each block with a score of at least the threshold, int32 [B, H_kv, L // b]."""
        *heads, tokens = scores.shape
        blocks = tokens // self.block_size
        by_block = scores[..., : blocks * self.block_size].reshape(*heads, blocks, self.block_size)
        reached = by_block >= self.threshold / lengths[:, None, None, None]
        return jnp.minimum(reached.sum(axis=-1, dtype=jnp.int32), int(self.most * self.block_size))


def observed(threshold: float = 1.0, window: int = 4096) -> methods.Method:
    """Prompt queries attend to the tokens of the cache."""
    cache = ObservedCache(threshold=threshold, window=window)
    return methods.Method("observed", methods.SparsePrefill(cache), cache)


methods.register("observed", observed)


def compare(lm: tca_jax.LM, document: recall.Document, text: str) -> str:
    """A line of the table: right answers, kept tokens, attended pairs, and log-likelihood of a text."""
    questions = document.questions
    out = tca_jax.generate(lm, [completion(document.text, q) for q in questions], max_new_tokens=ANSWER_TOKENS)
    right = sum(recall.is_correct(q, answer, "prefix") for q, answer in zip(questions, out.text, strict=True))
    logprob = tca_jax.score(lm, text).logprobs[0].mean()
    share, megabytes = out.stats.kept_share, out.stats.kv_cache_bytes / 1e6
    costs = f"{share:>12.1%}{megabytes:>10.2f}{out.stats.attended_share:>12.1%}"
    return f"{lm.method.name:<14}{right:>2} of {len(questions)}{costs}{logprob:>16.3f}"


def main() -> None:
    document = recall.build_document(np.random.default_rng(7), BYTES, TASKS)  # all questions are about its beginning
    text = recall.build_document(np.random.default_rng(1), BYTES, TASKS).text
    tca = tca_jax.load("recall-tiny", profile="shipped")
    full = tca.with_profile(None)  # the same weights
    mine = full.with_method("observed", window=WINDOW)
    others = [full, full.with_method("streaming", window=WINDOW), tca]
    print(f"{'method':<14}{'right':>7}{'kept':>12}{'KV MB':>10}{'attended':>12}{'log p a token':>16}")
    for lm in [*others, mine]:
        print(compare(lm, document, text), flush=True)


if __name__ == "__main__":
    main()
