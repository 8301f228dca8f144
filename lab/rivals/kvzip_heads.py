"""KVzip's form by heads (arXiv 2505.23416, section 3): some KV heads keep the whole prompt, the others its window.

Which ones is known before any prompt, as in DuoAttention: a head's score is the most attention that any of its tokens
gets while texts are repeated (`repetition_scores`), and the share of heads with the highest scores
keeps every token. Follows the authors' code (snu-mllab/KVzip at 5d84729: `load_head_score`, `level` "head", 0.6 of the
heads). As there, prompts are read in full and tokens behind the prompt stay in every head. What differs:

- The system prompt. The code keeps it in all heads; here the first `sinks` tokens take its part.
- The window. The code drops everything else of the prompt; here its last tokens, at least `window`, stay.
- Counts. The number of heads is rounded; the code drops all at the threshold, one at least.
- Published scores are PyTorch files, of LLaMA-3.1-8B and Qwen2.5 of 7B and 14B; pass them as arrays `[layers, H_kv]`,
  the largest where there are several for a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, OverMesh, on_host
from tca_jax.engine.prompts import Prompt, encode_prompts, pad_tokens
from tca_jax.errors import UserError, check_number
from tca_jax.lab.rivals.compression import GrowingCache
from tca_jax.lab.rivals.duoattention import DuoAttentionCache, highest_heads
from tca_jax.lab.rivals.head_tables import numbers_by_head
from tca_jax.lab.rivals.repetition import attention_to_prompts, read_everything
from tca_jax.methods.base import Method
from tca_jax.methods.full import FullPrefill
from tca_jax.methods.streaming import StreamingCache


@dataclasses.dataclass(frozen=True)
class KVzipHeadsCache(GrowingCache, DuoAttentionCache):
    """Everything in some heads, sinks and a window of the prompt in the others; all that follows it in every head."""

    option: ClassVar[str] = "head_scores"


def kvzip_heads(
    head_scores: Sequence[Sequence[float]] | np.ndarray,
    share: float = 0.6,
    sinks: int = 4,
    window: int = 128,
    block_size: int = 128,
) -> Method:
    """Full attention for the prompt's queries, KVzip's heads in the cache.

    Args:
        head_scores: Of every KV head, `[layers, H_kv]`, finite, from `repetition_scores`.
        share: Share of heads that keep everything, those of the highest scores, in (0, 1], rounded to whole heads; the
            code's `ratio`. Ties go to the lower layer and head.
        sinks: Tokens that the other heads keep from the start of the sequence.
        window: Least number of local tokens, a multiple of `block_size`.
        block_size: Tokens in a block, a power of two.

    Raises:
        ValueError: an option is not allowed.
    """
    check_number("share", share, above=0, at_most=1)
    table = numbers_by_head("head_scores", head_scores, "[layers, H_kv]", np.isfinite, "must be finite")
    cache = KVzipHeadsCache(highest_heads(table, share), StreamingCache(sinks, window, block_size))
    return Method("kvzip-heads", FullPrefill(), cache)


def repetition_scores(
    lm: LM, texts: Prompt | Sequence[Prompt], *, chunk: int = 2000, sinks: int = 4
) -> Float32[np.ndarray, "layers Hkv"]:
    """KVzip's scores of KV heads, measured on texts of the user's, for the method kvzip-heads.

    Each text is read with full attention and repeated to the model, as `kvzip` repeats a prompt. The authors take one
    text of natural language, and for code one more of code.

    Args:
        lm: The model; its method plays no part.
        texts: One or several texts or sequences of token ids, of more than `sinks` tokens.
        chunk: Tokens that are repeated at a time, at least 8.
        sinks: Tokens at the start of each text that do not count.

    Returns:
        The most attention that a token of any text gets in each head while its chunk is repeated, in [0, 1].

    Raises:
        ValueError: a number is not allowed, a text is too short or longer than the model's context, or the model
            computes NaN or infinity.
        TypeError: `texts` holds something else than text and token ids.
    """
    model = lm.with_method("kvzip", chunk=chunk, sinks=sinks)
    sequences = encode_prompts(lm, texts, "texts")
    for i, ids in enumerate(sequences):
        if not sinks < len(ids) <= lm.config.max_context:
            raise UserError(
                f"texts[{i}] has {len(ids)} tokens: must have more than sinks = {sinks} and at most the "
                f"{lm.config.max_context} positions of model {lm.name!r}"
            )
    found = []
    for ids in sequences:
        of_heads = on_host(_most_repeated(model.for_programs(), *map(jnp.asarray, pad_tokens([ids]))))
        found.append(np.stack([lm.in_model_order(layer, values) for layer, values in enumerate(of_heads)]))
    scores = np.max(found, axis=0)
    if not np.isfinite(scores).all():
        layer = int(np.argmin(np.isfinite(scores).all(axis=1)))
        raise UserError(f"model {lm.name!r} computes NaN or infinity in the attention of layer {layer}")
    return scores


def _most_repeated_program(
    lm: LM, tokens: Int32[Array, "1 L"], lengths: Int32[Array, " 1"]
) -> Float32[Array, "layers Hkv"]:
    policy: Any = lm.method.cache  # a KVzipCache
    repetition = policy.repetition
    _, held = read_everything(lm, tokens, lengths)
    scores = attention_to_prompts(lm, repetition, held, tokens, lengths, lengths, tokens.shape[1])
    return scores[:, 0, :, repetition.sinks :].max(axis=-1)


_most_repeated = jax.jit(OverMesh(_most_repeated_program, (SAME, SAME), SECOND_HEADS))
