"""KVzip's form by heads (arXiv 2505.23416, section 3): some KV heads keep the prompt, the others its window.

A head's score is the most attention that any of its tokens gets while texts are repeated (`repetition_scores`); a share
of heads with the highest scores keeps every token. Follows snu-mllab/KVzip at 5d84729 (`level` "head", 0.6 of the
heads). What differs: the first `sinks` tokens take the part of the system prompt; at least `window` last tokens of the
prompt stay; the number of heads is rounded. Published scores are PyTorch files: pass arrays `[layers, H_kv]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import Prompt, pad_tokens
from tca_jax.engine.read import Calls
from tca_jax.lab.rivals.compression import GrowingCache
from tca_jax.lab.rivals.duoattention import DuoAttentionCache, highest_heads
from tca_jax.lab.rivals.repetition import repeat
from tca_jax.lab.rivals.tables import check_finite, encode_texts, numbers_by_head
from tca_jax.methods.base import Method
from tca_jax.methods.full import FullPrefill
from tca_jax.methods.streaming import StreamingCache
from tca_jax.models.sharding import DATA, axis_size


@dataclasses.dataclass(frozen=True)
class KVzipHeadsCache(DuoAttentionCache):
    option: ClassVar[str] = "head_scores"
    growth, evict = GrowingCache.growth, GrowingCache.evict


def kvzip_heads(
    head_scores: Sequence[Sequence[float]] | np.ndarray,  # of every KV head, `[layers, H_kv]`, from `repetition_scores`
    share: float = 0.6,  # of heads that keep everything, those of the highest scores, rounded; the code's `ratio`
    sinks: int = 4,  # tokens that the other heads keep from the start of the sequence
    window: int = 128,  # least number of local tokens, a multiple of `block_size`
    block_size: int = 128,  # tokens in a block, a power of two
) -> Method:
    """Full attention in prefill, KVzip's heads in the cache."""
    table = numbers_by_head("head_scores", head_scores)
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
    """
    model, found = lm.with_method("kvzip", chunk=chunk, sinks=sinks), []
    policy: Any = model.method.cache
    for ids in encode_texts(lm, texts, sinks=sinks):
        tokens, lengths = map(jnp.asarray, pad_tokens([ids] * axis_size(lm.mesh, DATA)))
        _, of_layers = repeat(model, policy.repetition, tokens, lengths, Calls())
        of_heads = on_host([of_layer[0, :, sinks:].max(axis=-1) for of_layer in of_layers])
        found.append(np.stack([lm.in_model_order(layer, values) for layer, values in enumerate(of_heads)]))
    scores = np.max(found, axis=0)
    check_finite(lm, scores)
    return scores
