"""Tiny configs of every family and RoPE type, and an exact attention with a plain cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tca_jax.models.config import ModelConfig

MAX_POSITIONS = 32  # small, so that dynamic RoPE grows within a test

ROPE_SCALING: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"type": "dynamic", "factor": 2.0},  # the older name of the key
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False, "head_dim": 12},
}


@pytest.fixture
def config_entries() -> Callable[..., dict[str, Any]]:
    """Entries of a tiny config.json as transformers 4.x wrote it: `(family, rope type, **changes)`."""

    def make(family: str = "llama", rope_type: str = "default", **changes: Any) -> dict[str, Any]:
        scaling = ROPE_SCALING[rope_type]
        entries = {
            "model_type": family,
            "vocab_size": 67,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_theta": 50_000.0,
            "rope_scaling": None if scaling is None else dict(scaling),
            "torch_dtype": "float32",
        }
        return entries | FAMILIES[family] | changes

    return make


@pytest.fixture
def cached_attention() -> Callable[..., Callable[..., Any]]:
    """Exact attention over caches `(k, v)` of `[B, S, H_kv, d]`, given `(positions [B, L], valid [B, L])`."""

    def make(positions: jax.Array, valid: jax.Array) -> Callable[..., Any]:
        def attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, state: Any) -> Any:
            rows, size = jnp.arange(len(q))[:, None], state[0].shape[1]
            slots = jnp.where(valid, positions, size)  # padding is dropped
            keys = state[0].at[rows, slots].set(k, mode="drop")
            values = state[1].at[rows, slots].set(v, mode="drop")
            grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
            exact = {"precision": jax.lax.Precision.HIGHEST}
            scores = jnp.einsum("blhgd,bshd->bhgls", grouped, keys, **exact) / q.shape[-1] ** 0.5
            visible = jnp.arange(size) <= positions[:, :, None]
            weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf))
            return jnp.einsum("bhgls,bshd->blhgd", weights, values, **exact).reshape(q.shape), (keys, values)

        return attention

    return make


@pytest.fixture
def four_kv_heads(config_entries: Callable[..., dict[str, Any]]) -> ModelConfig:
    """Every kind of parameter but the QK norm, for meshes; a vocabulary that no number of devices divides."""
    entries = config_entries("llama", attention_bias=True, mlp_bias=True, num_attention_heads=8, num_key_value_heads=4)
    return ModelConfig.from_hf(entries)
