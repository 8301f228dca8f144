"""The tokens that each head of a model keeps of a prompt: for pictures and for research."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, OverMesh, heads_of, on_host
from tca_jax.engine.prompts import Prompt, encode_prompt, pad_tokens
from tca_jax.errors import require
from tca_jax.lab.rivals.repetition import read_everything, selections_by_repetition
from tca_jax.methods.base import last_queries, selection_for_prefill
from tca_jax.pallas_kernels.select_tokens import selection_mask


def kept_tokens(lm: LM, prompt: Prompt | Sequence[int]) -> Bool[np.ndarray, "layers Hkv L"]:
    """The tokens of a prompt that each KV head holds when decoding starts: its selected ones and the local window.

    Args:
        lm: A model under any method.
        prompt: A string, a chat or token ids, L tokens.

    Returns:
        bool `[layers, H_kv, L]`.

    Raises:
        ValueError: the prompt is longer than the model's context, or not allowed.
    """
    ids, policy = encode_prompt(lm, prompt), lm.method.cache
    most = lm.config.max_context
    require(len(ids) <= most, f"prompt has {len(ids)} tokens: {lm.name} has {most} positions")
    found = on_host(_selected(lm.for_programs(), *map(jnp.asarray, pad_tokens([ids]))))
    selected = np.stack([lm.in_model_order(layer, of_heads)[:, : len(ids)] for layer, of_heads in enumerate(found)])
    return selected | (np.arange(len(ids)) >= policy.num_ranked_blocks(len(ids)) * policy.block_size)


def _selected_tokens(lm: LM, tokens: Int[Array, "1 L"], lengths: Int[Array, " 1"]) -> Bool[Array, "layers Hkv L"]:
    layout, policy = lm.cache_layout(1, tokens.shape[1]), lm.method.cache
    if layout.has_ranked_blocks and policy.reader is not None:
        _, held = read_everything(lm, tokens, lengths)
        selections = selections_by_repetition(lm, held, tokens, lengths)
        return jnp.stack([selection_mask(*each[:2], block_size=policy.block_size)[0] for each in selections])

    def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, Array]:
        attend = lm.method.prefill.attend
        heads = heads_of(lm.head_shards, layer, k.shape[2])
        if not layout.has_ranked_blocks:
            return attend(layer, heads, q, k, v, lengths, None, "auto").out, jnp.zeros((k.shape[2], k.shape[1]), bool)
        selection = policy.select(layer, heads, last_queries(q, lengths, policy.num_queries), k, v, lengths, "auto")
        selected = layout.regions(layer).fill(selection, k, v, block_size=policy.block_size)
        readable = selection_for_prefill(lm.method, layer, heads, selection, selected, k, v, "auto")
        out = attend(layer, heads, q, k, v, lengths, readable, "auto").out
        return out, selection_mask(selection.scores, selected.budgets, block_size=policy.block_size)[0]

    positions = jnp.minimum(jnp.arange(tokens.shape[1]), lengths[:, None] - 1)
    return jnp.stack(lm.decoder(tokens, positions, attention, (None,) * lm.config.num_layers)[1])


_selected = jax.jit(OverMesh(_selected_tokens, (SAME, SAME), SECOND_HEADS))
