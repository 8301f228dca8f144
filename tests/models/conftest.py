"""Tiny configs of every family and RoPE type."""

from typing import Any

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
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False, "head_dim": 12},
}


@pytest.fixture
def config_entries():
    """Entries of a tiny config.json as transformers 4.x wrote it: `(family, rope type, **changes)`."""

    def make(family="llama", rope_type="default", **changes):
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
def config(config_entries):
    """Every kind of parameter but the QK norm; four KV heads, and a vocabulary that no number of devices divides."""
    entries = config_entries("llama", attention_bias=True, mlp_bias=True, num_attention_heads=8, num_key_value_heads=4)
    return ModelConfig.from_hf(entries)
