"""ModelConfig: shape and options of a supported model, read from a Hugging Face config."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tca_jax.errors import UserError, UserTypeError
from tca_jax.models.json_object import read_json_object
from tca_jax.models.rope import RopeConfig

# model_type -> the causal language model class that its config.json names
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
FAMILIES = tuple(_ARCHITECTURES)

_DTYPES = ("float32", "bfloat16", "float16")
_MOST = 2**31 - 1  # token ids, positions and places in an axis are int32


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder. Families differ in nothing else. Hashable: a static value under jit.

    Attributes:
        family: "llama", "qwen2" or "qwen3".
        vocab_size: V.
        hidden_size: D, width of the residual stream.
        intermediate_size: Inner width of the MLP.
        num_layers: Layers.
        num_heads: Query heads, H_q.
        num_kv_heads: KV heads, H_kv; divides `num_heads`.
        head_dim: d, even.
        rms_norm_eps: Added to the mean square in every RMSNorm.
        max_positions: `max_position_embeddings` of the checkpoint.
        tie_embeddings: The head is the embedding, transposed.
        qkv_bias: Biases on the query, key and value projections.
        o_bias: Bias on the output projection of attention.
        mlp_bias: Biases in the MLP.
        qk_norm: RMSNorm over each query and key head before RoPE.
        rope: Rotary position embedding.
        dtype_name: Dtype that the checkpoint is stored in.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype_name: str

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UserError(f"family = {self.family!r} is not supported: must be one of {list(FAMILIES)}")
        for field in dataclasses.fields(self):
            if field.type == "int":
                _check_size(f"ModelConfig.{field.name}", getattr(self, field.name))
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim % 2 or (self.rope.type == "dynamic" and self.head_dim < 4):
            raise UserError(f"head_dim = {self.head_dim}: must be even (at least 4 for dynamic RoPE)")
        if self.dtype_name not in _DTYPES:
            raise UserError(f"dtype_name = {self.dtype_name!r}: must be one of {list(_DTYPES)}")
        if not 0 < self.rms_norm_eps < math.inf:
            raise UserError(f"rms_norm_eps = {self.rms_norm_eps!r}: must be a positive number")
        if self.rope.factor * self.rope.original_max_positions > _MOST:
            stretched = f"{self.rope.factor:g} * {self.rope.original_max_positions}"
            raise UserError(f"RoPE factor * original positions = {stretched}: must be at most {_MOST}")

    @property
    def max_context(self) -> int:
        """Most tokens of one sequence: the checkpoint's positions, or what RoPE scaling stretches them to.

        `max_position_embeddings` means the stretched context in some checkpoints and the original one in
        others (Qwen2.5 with YaRN); the larger reading counts.
        """
        if self.rope.type in ("default", "llama3"):
            return self.max_positions
        return max(self.max_positions, int(self.rope.factor * self.rope.original_max_positions))

    @classmethod
    def from_hf(cls, hf_config: Any) -> ModelConfig:
        """Read a transformers config object, or a mapping as in config.json.

        Both spellings of RoPE are understood: `rope_theta` with `rope_scaling` (transformers 4.x) and
        `rope_parameters` (5.x). Absent entries have the defaults of transformers.

        Raises:
            ValueError: an architecture or option that is not supported, or a missing or invalid entry.
            TypeError: neither a mapping nor a transformers config.
        """
        entries = hf_config if isinstance(hf_config, Mapping) else _to_dict(hf_config)
        family = _family(entries)
        _refuse_unsupported(entries, family)
        num_heads, hidden_size = _integer(entries, "num_attention_heads"), _integer(entries, "hidden_size")
        max_positions = _integer(entries, "max_position_embeddings", 2048 if family == "llama" else 32768)
        # Qwen2 has its QKV biases whatever the config says, Qwen3 and LLaMA only when it asks for them.
        attention_bias = family != "qwen2" and _flag(entries, "attention_bias")
        return cls(
            family=family,
            vocab_size=_integer(entries, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(entries, "intermediate_size"),
            num_layers=_integer(entries, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(entries, family, num_heads),
            head_dim=_integer(entries, "head_dim", 128 if family == "qwen3" else hidden_size // num_heads),
            rms_norm_eps=_eps(entries),
            max_positions=max_positions,
            tie_embeddings=_flag(entries, "tie_word_embeddings"),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=family == "llama" and _flag(entries, "mlp_bias"),
            qk_norm=family == "qwen3",
            rope=RopeConfig.from_hf(_rope_parameters(entries), max_positions=max_positions),
            dtype_name=_dtype_name(entries),
        )

    def to_hf(self) -> dict[str, Any]:
        """Entries of a config.json that transformers 4.x and 5.x, and `from_hf`, read as this model."""
        biases = {
            "llama": {"attention_bias": self.o_bias, "mlp_bias": self.mlp_bias},
            "qwen2": {"use_sliding_window": False},
            "qwen3": {"use_sliding_window": False, "attention_bias": self.o_bias},
        }[self.family]
        return {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.to_hf() or None,
            "torch_dtype": self.dtype_name,
        } | biases


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json` of a checkpoint folder.

    Raises:
        FileNotFoundError: the folder has no config.json.
        ValueError: it is not JSON, or the model is not supported; the message names the file.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a checkpoint folder must hold config.json")
    entries = read_json_object(path)
    try:
        return ModelConfig.from_hf(entries)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _to_dict(hf_config: Any) -> Mapping[str, Any]:
    if not hasattr(hf_config, "to_dict"):
        raise UserTypeError(f"hf_config is a {type(hf_config).__name__}: must be a transformers config or a mapping")
    return hf_config.to_dict()


def _family(entries: Mapping[str, Any]) -> str:
    """The model_type, if it is one of ours and the checkpoint is a causal language model."""
    family = entries.get("model_type")
    if not isinstance(family, str) or family not in _ARCHITECTURES:
        raise UserError(f"model_type {family!r} is not supported: must be one of {list(FAMILIES)}")
    names = entries.get("architectures")
    if names is None or names == []:
        return family
    if not isinstance(names, list | tuple) or _ARCHITECTURES[family] not in names:
        raise UserError(f"architectures = {names!r} is not supported: must be [{_ARCHITECTURES[family]!r}]")
    return family


def _refuse_unsupported(entries: Mapping[str, Any], family: str) -> None:
    """Options that would change the result and that the decoder does not have."""
    if entries.get("quantization_config"):  # few have one
        from tca_jax.models.stored_quantization import StoredQuantization

        StoredQuantization.from_hf(entries["quantization_config"])
    if entries.get("dual_chunk_attention_config"):
        raise UserError("dual_chunk_attention_config is not supported: remove it to run the model without it")
    activation = entries.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UserError(f"hidden_act = {activation!r} is not supported: must be 'silu'")
    if family != "llama":
        _refuse_sliding_window(entries)


def _refuse_sliding_window(entries: Mapping[str, Any]) -> None:
    """Qwen: layers may be listed by type, or slide from `max_window_layers` on."""
    num_layers = _integer(entries, "num_hidden_layers")
    first_sliding = _integer(entries, "max_window_layers", 28, least=0)
    layer_types = entries.get("layer_types")
    if layer_types is None:
        slides = _flag(entries, "use_sliding_window") and entries.get("sliding_window", 4096) is not None
        other = [(first_sliding, "sliding_attention")] if slides and first_sliding < num_layers else []
    elif isinstance(layer_types, list | tuple) and len(layer_types) == num_layers:
        other = [(layer, kind) for layer, kind in enumerate(layer_types) if kind != "full_attention"]
    else:
        raise UserError(f"config['layer_types'] = {layer_types!r}: must be a list of {num_layers}, one for each layer")
    if other:
        layer, kind = other[0]
        raise UserError(f"layer {layer} has {kind!r}: only 'full_attention' is supported, no sliding window")


def _num_kv_heads(entries: Mapping[str, Any], family: str, num_heads: int) -> int:
    """Null means one KV head per query head; absent means that too in LLaMA, but 32 in Qwen."""
    if "num_key_value_heads" not in entries and family != "llama":
        return 32
    return _integer(entries, "num_key_value_heads", num_heads)


def _rope_parameters(entries: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling of RoPE out of two, with what transformers 4.x keeps beside it put in."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(entries.get(key), Mapping | None):
            raise UserError(f"{key} = {entries[key]!r}: must be an object")
    parameters = entries.get("rope_scaling") or entries.get("rope_parameters") or {}
    beside = {key: entries.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    over = {key: entries[key] for key in ("original_max_position_embeddings",) if entries.get(key) is not None}
    return beside | {key: value for key, value in parameters.items() if value is not None} | over


def _dtype_name(entries: Mapping[str, Any]) -> str:
    """`dtype` (transformers 5) or `torch_dtype` (4.x), which may be a torch.dtype in a config object."""
    name = entries.get("dtype") or entries.get("torch_dtype") or "float32"
    return str(name).removeprefix("torch.")


def _integer(entries: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """A size of the config; null counts as absent."""
    value = entries.get(key)
    value = default if value is None else value
    if value is None:
        raise UserError(f"config has no {key!r}")
    return _check_size(f"config[{key!r}]", value, least)


def _check_size(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} = {value!r}: must be {'a positive integer' if least else 'an integer from 0'}")
    if value > _MOST:
        raise UserError(f"{name} = {value}: must be at most {_MOST}")
    return value


def _eps(entries: Mapping[str, Any]) -> float:
    value = entries.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise UserError(f"config['rms_norm_eps'] = {value!r}: must be a positive number")
    return float(value)


def _flag(entries: Mapping[str, Any], key: str) -> bool:
    """A switch of the config, off by default."""
    value = entries.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"config[{key!r}] = {value!r}: must be true or false")
    return bool(value)
