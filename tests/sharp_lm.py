"""A random model with attention sharp enough for scores to differ, for tests of calibration."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import tca_jax
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


def broken_lm(lm: LM, layer: int | None = None) -> LM:
    """A copy that computes NaN: in the norm before a layer's attention, or before the logits."""
    graphdef, params = nnx.split(lm.decoder)
    decoder = nnx.merge(graphdef, jax.tree.map(jnp.copy, params))
    norm = decoder.norm if layer is None else decoder.layers[layer].attention_norm
    norm.scale[...] = norm.scale[...] * np.nan
    return LM.from_decoder(decoder, name="broken")


def random_ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length)


def make_sure_lm(layers: int = 2) -> LM:
    """The same model with a sharper head: it is sure of what it says, as long as it sees what it has read."""
    lm = make_lm(layers=layers)
    head = lambda w: 4 * w if w.shape == (32, VOCABULARY) else w  # noqa: E731
    return dataclasses.replace(lm, params=jax.tree.map(head, lm.params))


def text_of(lm: LM, length: int = 400, seed: int = 1) -> list[int]:
    """A text that the model has said, so that it loses by whatever it does not see."""
    start = random_ids(8, seed).tolist()
    out = tca_jax.generate(lm, start, max_new_tokens=length - 8, temperature=1.0, seed=seed, stop_token_ids=())
    return start + out.tokens[0]


def pairs_of(lm: LM, text: list[int], count: int = 24) -> list[tuple[list[int], list[int]]]:
    """Questions behind a text, and what the model answers to them."""
    questions = [random_ids(5, 100 + i).tolist() for i in range(count)]
    asked = [[*text, *question] for question in questions]
    out = tca_jax.generate(lm, asked, max_new_tokens=4, stop_token_ids=())
    return list(zip(questions, out.tokens, strict=True))
