"""What each head of a model keeps of a given prompt, and what it attends to: for pictures and for research."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, OverMesh, heads_of, on_host
from tca_jax.engine.prompts import Prompt, encode_prompt, pad_tokens, token_text
from tca_jax.errors import UserError
from tca_jax.lab.rivals.repetition import read_everything, selections_by_repetition
from tca_jax.methods.base import last_queries, selection_for_prefill
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.column_mass import column_mass
from tca_jax.pallas_kernels.select_tokens import selection_mask

_MASS_BLOCK = 128  # tokens; `column_mass` works in blocks, and the sum of its two parts depends on none of them


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
    ids = _encode(lm, prompt)
    return _by_head(_selected, lm, ids) | (np.arange(len(ids)) >= local_start(lm, len(ids)))


def attention_received(lm: LM, prompt: Prompt | Sequence[int]) -> Float32[np.ndarray, "layers Hkv L"]:
    """The attention mass that every token of a prompt gets from the prompt's queries, under full attention.

    Args:
        lm: A model; its method does not matter.
        prompt: A string, a chat or token ids, L tokens.

    Returns:
        float32 `[layers, H_kv, L]`: sums of attention probabilities over all queries, mean over the query heads of a
        KV head. All of a head add up to L; token j is seen by L - j queries.

    Raises:
        ValueError: the prompt is longer than the model's context, or not allowed.
    """
    return _by_head(_received, lm.with_profile(None), _encode(lm, prompt))


def token_texts(lm: LM, prompt: Prompt | Sequence[int]) -> list[str]:
    """The text of each token of a prompt alone, special tokens by their names.

    Raises:
        ValueError: the model has no tokenizer, or the prompt is not allowed.
    """
    if lm.tokenizer is None:
        raise UserError(f"{lm.name} has no tokenizer: its tokens have no text")
    return [token_text(lm.tokenizer, token) for token in _encode(lm, prompt)]


def local_start(lm: LM, prompt_tokens: int) -> int:
    """First token of a prompt that is in the window of the next one."""
    policy = lm.method.cache
    return policy.num_ranked_blocks(prompt_tokens) * policy.block_size


def _encode(lm: LM, prompt: Prompt | Sequence[int]) -> list[int]:
    """The prompt's token ids, which are known to fit."""
    ids = encode_prompt(lm, prompt)
    if len(ids) > lm.config.max_context:
        raise UserError(f"prompt has {len(ids)} tokens: {lm.name} has {lm.config.max_context} positions")
    return ids


def _by_head(program: Any, lm: LM, ids: Sequence[int]) -> np.ndarray:
    """What a program finds for each head and token, `[layers, H_kv, L]` in the model's own order of heads."""
    found = on_host(program(lm.for_programs(), *map(jnp.asarray, pad_tokens([ids]))))
    return np.stack([lm.in_model_order(layer, of_heads)[:, : len(ids)] for layer, of_heads in enumerate(found)])


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

    return _of_layers(lm, tokens, lengths, attention)


def _received_mass(lm: LM, tokens: Int[Array, "1 L"], lengths: Int[Array, " 1"]) -> Float32[Array, "layers Hkv L"]:
    def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, Array]:
        near, far = column_mass(q, k, lengths, block_size=_MASS_BLOCK, window=_MASS_BLOCK)
        return causal_attention(q, k, v, lengths), (near + far)[0]

    return _of_layers(lm, tokens, lengths, attention)


def _of_layers(lm: LM, tokens: Int[Array, "1 L"], lengths: Int[Array, " 1"], attention: Any) -> Array:
    """What an attention function returns beside its output, `[layers, ...]`."""
    positions = jnp.minimum(jnp.arange(tokens.shape[1]), lengths[:, None] - 1)
    return jnp.stack(lm.decoder(tokens, positions, attention, (None,) * lm.config.num_layers)[1])


_selected, _received = (
    jax.jit(OverMesh(each, (SAME, SAME), SECOND_HEADS)) for each in (_selected_tokens, _received_mass)
)
