"""The decoder gives the logits of transformers for every family and RoPE type, prefill and step by step."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tca_jax.models.config import ModelConfig, read_config
from tca_jax.models.decoder import Decoder
from tca_jax.models.params import load_decoder, save_decoder

torch = pytest.importorskip("torch", reason="parity is measured against the torch models of transformers")

from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache  # noqa: E402

TOLERANCE = 2e-4
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
LENGTHS, PADDED, STEPS = (29, 7, 37), 40, 4  # around the 32 positions that dynamic RoPE grows from


def reference_model(entries: dict[str, Any], seed: int = 0) -> Any:
    """A torch model with every parameter drawn large enough that each one shows in the logits."""
    config = AutoConfig.for_model(**entries)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if "embed" in name else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + ("norm" in name))
    return model


def save_reference(folder: Path, model: Any, entries: dict[str, Any]) -> ModelConfig:
    """Save as transformers 5 does, read the config, then go on with config.json as 4.x wrote it."""
    model.save_pretrained(folder)
    newer = read_config(folder)
    (folder / "config.json").write_text(json.dumps(entries))
    older = read_config(folder)
    assert newer == older
    return older


def reference_logits(model: Any, tokens: np.ndarray, length: int) -> np.ndarray:
    """Logits of one row: its prompt of `length` tokens at once, the others step by step: `[tokens, V]`."""
    cache = DynamicCache(config=model.config)  # the fourth argument of all models, by a name that changed in 5.24
    pieces = [tokens[:length], *tokens[length:, None]]
    with torch.no_grad():
        logits = [model(torch.tensor(piece[None]), None, None, cache, use_cache=True).logits[0] for piece in pieces]
    return torch.cat(logits).numpy()


def jitted(decoder: Decoder, cached_attention: Any) -> Any:
    """`(tokens, positions, valid, states) -> (logits, states)`, split and merged as callers do."""
    graphdef, weights = nnx.split(decoder)

    @functools.partial(jax.jit, static_argnums=0)
    def forward(graphdef: Any, weights: Any, tokens: Any, positions: Any, valid: Any, states: Any) -> Any:
        decoder = nnx.merge(graphdef, weights)
        hidden, states = decoder(tokens, positions, cached_attention(positions, valid), states)
        return decoder.logits(hidden), states

    return functools.partial(forward, graphdef, weights)


def our_logits(decoder: Decoder, tokens: np.ndarray, lengths: np.ndarray, cached_attention: Any) -> list[np.ndarray]:
    """The same, of each row of a ragged batch that is right-padded with another token."""
    forward, config = jitted(decoder, cached_attention), decoder.config
    cache = jnp.zeros((len(tokens), PADDED + STEPS, config.num_kv_heads, config.head_dim))
    states = ((cache, cache),) * config.num_layers
    place = jnp.arange(PADDED)[None, :]
    valid = place < lengths[:, None]
    positions = jnp.minimum(place, lengths[:, None] - 1)
    prompt = jnp.where(valid, tokens[:, :PADDED], 5)
    logits, states = forward(prompt, positions, valid, states)
    rows = [[np.asarray(row[:length])] for row, length in zip(logits, lengths, strict=True)]
    for step in range(STEPS):
        positions = jnp.asarray(lengths[:, None] + step)
        token = jnp.asarray(np.take_along_axis(tokens, np.asarray(positions), axis=1))
        logits, states = forward(token, positions, jnp.ones_like(token, bool), states)
        for row, new in zip(rows, np.asarray(logits), strict=True):
            row.append(new)
    return [np.concatenate(row) for row in rows]


def largest_error(folder: Path, model: Any, config: ModelConfig, cached_attention: Any) -> float:
    lengths = np.asarray(LENGTHS, np.int32)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (len(LENGTHS), PADDED + STEPS), np.int32)
    decoder = load_decoder(folder, config, jnp.float32)
    ours = our_logits(decoder, tokens, lengths, cached_attention)
    errors = []
    for row, row_tokens, length in zip(ours, tokens, LENGTHS, strict=True):
        # A fresh copy: the rotary embedding of transformers remembers the longest row that it saw.
        fresh = type(model)(model.config).eval()
        fresh.load_state_dict(model.state_dict())
        expected = reference_logits(fresh, row_tokens[: length + STEPS], length)
        assert np.abs(expected).max() > 1  # the tolerance is absolute
        errors.append(np.abs(row - expected).max())
    return max(errors)


@pytest.mark.parametrize(
    ("family", "rope_type"), [*(("llama", kind) for kind in ROPE_TYPES), ("qwen2", "dynamic"), ("qwen3", "yarn")]
)
def test_logits_equal_transformers(
    family: str, rope_type: str, config_entries: Any, cached_attention: Any, tmp_path: Path
) -> None:
    entries = config_entries(family, rope_type)
    model = reference_model(entries)
    config = save_reference(tmp_path, model, entries)
    error = largest_error(tmp_path, model, config, cached_attention)
    print(f"largest error {error:.1e}")  # shown by pytest -rP
    assert error < TOLERANCE


def prefill_error(decoder: Decoder, model: Any, cached_attention: Any) -> float:
    """Largest difference in the logits of two rows of 23 tokens."""
    config = decoder.config
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (2, 23), np.int32)
    positions = jnp.broadcast_to(jnp.arange(23), tokens.shape)
    cache = jnp.zeros((2, 23, config.num_kv_heads, config.head_dim), decoder.dtype)
    states = ((cache, cache),) * config.num_layers
    forward, valid = jitted(decoder, cached_attention), jnp.ones_like(positions, bool)
    logits, _ = forward(jnp.asarray(tokens), positions, valid, states)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    return float(np.abs(np.asarray(logits) - expected).max())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 6, "num_key_value_heads": None}),
        ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 0.1}),
        ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_options_equal_transformers(
    family: str, options: dict[str, Any], config_entries: Any, cached_attention: Any, tmp_path: Path
) -> None:
    entries = config_entries(family, **options)
    model = reference_model(entries)
    config = save_reference(tmp_path, model, entries)
    assert prefill_error(load_decoder(tmp_path, config, jnp.float32), model, cached_attention) < TOLERANCE


@pytest.mark.parametrize(("family", "rope_type"), [("llama", "llama3"), ("qwen3", "yarn")])
def test_transformers_loads_what_we_save(
    family: str, rope_type: str, config_entries: Any, cached_attention: Any, tmp_path: Path
) -> None:
    config = ModelConfig.from_hf(config_entries(family, rope_type))
    decoder = Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(3))
    save_decoder(tmp_path, decoder, jnp.float32, {"eos_token_id": 11})
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert model.config.eos_token_id == 11
    assert ModelConfig.from_hf(model.config) == config
    assert prefill_error(decoder, model.eval(), cached_attention) < TOLERANCE


def test_bfloat16_checkpoints_equal_transformers(config_entries: Any, cached_attention: Any, tmp_path: Path) -> None:
    entries = config_entries("qwen2", torch_dtype="bfloat16")
    model = reference_model(entries).to(torch.bfloat16)
    config = save_reference(tmp_path, model, entries)
    assert config.dtype_name == "bfloat16"
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    decoder = load_decoder(tmp_path, config, jnp.float32)
    assert prefill_error(decoder, rounded, cached_attention) < TOLERANCE
