"""Small GGUF files, written by `gguf.GGUFWriter` with the names and the order of rows of llama.cpp's converter."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tca_jax.models.config import ModelConfig, read_config

# Parts of names in a Hugging Face checkpoint, and llama.cpp's for them.
NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "self_attn.q_proj.": "attn_q.",
    "self_attn.k_proj.": "attn_k.",
    "self_attn.v_proj.": "attn_v.",
    "self_attn.o_proj.": "attn_output.",
    "self_attn.q_norm.": "attn_q_norm.",
    "self_attn.k_norm.": "attn_k_norm.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "mlp.gate_proj.": "ffn_gate.",
    "mlp.up_proj.": "ffn_up.",
    "mlp.down_proj.": "ffn_down.",
}
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
#: GPT-2's letter of each byte.
LETTERS = [chr(b if b in _PRINTABLE else 256 + sum(o not in _PRINTABLE for o in range(b))) for b in range(256)]


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """Contents of a file."""

    arch: str
    metadata: Mapping[str, Any]  # int: uint32, float: float32; keys that begin with "." are the architecture's
    tensors: Mapping[str, np.ndarray]
    types: Mapping[str, gguf.GGMLQuantizationType] = dataclasses.field(default_factory=dict)  # of tensors of bytes

    @classmethod
    def of_checkpoint(cls, folder: Path) -> GgufFile:
        """A Hugging Face checkpoint in float32, as convert_hf_to_gguf.py converts it."""
        config, tensors = read_config(folder), {}
        for name, value in load_file(folder / "model.safetensors").items():
            if config.family == "llama":
                for projection, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
                    value = permute(value, heads) if projection in name else value
            for theirs, ours in NAMES.items():
                name = name.replace(theirs, ours)
            tensors[name] = value
        if config.rope.type == "llama3":
            factors = llama3_factors(config.head_dim, config.rope.theta, config.rope.factor)
            tensors["rope_freqs.weight"] = factors
        return cls(config.family, metadata_of(config), tensors)

    def changed(self, metadata: Mapping[str, Any]) -> GgufFile:
        """With other metadata; None removes a key."""
        merged = {key: value for key, value in {**self.metadata, **metadata}.items() if value is not None}
        return dataclasses.replace(self, metadata=merged)

    def with_tensors(self, tensors: Mapping[str, np.ndarray | None]) -> GgufFile:
        """With other tensors; None removes one."""
        merged = {name: value for name, value in {**self.tensors, **tensors}.items() if value is not None}
        return dataclasses.replace(self, tensors=merged)

    def write(self, path: Path, **options: Any) -> Path:
        """Writes the file; `options` are GGUFWriter's, such as `split_max_tensors`."""
        writer = gguf.GGUFWriter(path, self.arch, **options)
        for key, value in self.metadata.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(self.arch + key if key.startswith(".") else key, value)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor, raw_dtype=self.types.get(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def to_bytes(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            return self.write(Path(folder) / "model.gguf").read_bytes()


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp orders them: those of a dimension pair (i, i + d / 2) become neighbours."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    """The converter's metadata of a config, without RoPE scaling."""
    return {
        ".block_count": config.num_layers,
        ".context_length": config.max_positions,
        ".embedding_length": config.hidden_size,
        ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": config.num_heads,
        ".attention.head_count_kv": config.num_kv_heads,
        ".attention.key_length": config.head_dim,
        ".attention.value_length": config.head_dim,
        ".attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        ".rope.dimension_count": config.head_dim,
        ".rope.freq_base": config.rope.theta,
    }


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """Factor that LLaMA 3.1 stretches the wavelength of each dimension pair by."""
    low, high, original = 1.0, 4.0, 8192
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def byte_tokenizer() -> dict[str, Any]:
    """Metadata of a byte-level BPE of 258 tokens: bytes, one merge, and a token that ends an answer."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*LETTERS, "th", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.add_bos_token": False,
    }
