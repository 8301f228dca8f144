"""A random model with attention sharp enough for scores to differ, for tests of calibration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tca_jax.engine.lm import LM
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder

VOCABULARY = 64
CONTEXT = 512


def make_lm(dtype=jnp.float32, tokenizer=None, layers: int = 2) -> LM:
    """A random model with attention sharp enough for scores to differ."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": CONTEXT,
        }
    )
    decoder = Decoder(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(decoder)
    larger = {(32, 2, 4, 8): 14, (32, 32): 8, (32, VOCABULARY): 8}  # projections to and from attention, and the head
    params = jax.tree.map(lambda w: w * larger.get(w.shape, 1), params)
    return LM.from_decoder(nnx.merge(graphdef, params), name="tiny", tokenizer=tokenizer)


def random_ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length)
