"""Which tokens each head of a model keeps of a given prompt: for pictures and for research."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from tca_jax.engine.buckets import bucket_length
from tca_jax.engine.cache import prefill_layer
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import Prompt, encode_prompt
from tca_jax.functional import select


def kept_tokens(lm: LM, prompt: Prompt | Sequence[int]) -> Bool[np.ndarray, "layers Hkv L"]:
    """The tokens of a prompt that each KV head holds when decoding starts: its selected ones and the local window.

    Args:
        lm: A model with a profile (without one every token is kept).
        prompt: A string, a chat or token ids, L tokens.

    Returns:
        bool `[layers, H_kv, L]`.
    """
    ids = encode_prompt(lm, prompt)
    tokens = np.zeros((1, bucket_length(len(ids))), np.int32)
    tokens[0, : len(ids)] = ids
    if lm.tca is None:
        return np.ones((lm.config.num_layers, lm.config.num_kv_heads, len(ids)), bool)
    selected = np.asarray(_selected(lm, jnp.asarray(tokens), jnp.asarray([len(ids)], jnp.int32)))
    edge = lm.tca.num_ranked_blocks(len(ids)) * lm.tca.block_size
    return selected[:, :, : len(ids)] | (np.arange(len(ids)) >= edge)


@jax.jit
def _selected(lm: LM, tokens: Int[Array, "1 L"], lengths: Int[Array, " 1"]) -> Bool[Array, "layers Hkv L"]:
    layouts = lm.cache_layouts(1, tokens.shape[1], 1)

    def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, Array]:
        layout = layouts[layer]
        out, _ = prefill_layer(q, k, v, lengths, layout)
        candidates = jnp.asarray(layout.candidates, jnp.int32)
        return out, select(q[:, lengths[0] - 1], k, candidates, lengths, layout.config)[0]

    positions = jnp.minimum(jnp.arange(tokens.shape[1]), lengths[:, None] - 1)
    _, masks = lm.decoder(tokens, positions, attention, (None,) * len(layouts))
    return jnp.stack(masks)
