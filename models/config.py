"""ModelConfig: shape and options of a supported model, and its format of eight bits, from a Hugging Face config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tca_jax.errors import explaining, require, require_type
from tca_jax.models.json_object import MOST, Entries, read_json_object
from tca_jax.models.rope import RopeConfig

# model_type -> the class that a config.json of ours names
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FAMILIES = tuple(_ARCHITECTURES)

# Field -> its entry of config.json; the sizes have no default.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_OTHERS = {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
_DTYPES = ("float32", "bfloat16", "float16")
_EIGHT_BITS = (
    "weights in e4m3 of quant_method 'compressed-tensors' (format 'float-quantized') or 'fp8', with a scale for each "
    "tensor, output channel or block"
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder. Families differ in nothing else. Hashable: a static value under jit."""

    family: str  # one of FAMILIES
    vocab_size: int  # V
    hidden_size: int  # D, width of the residual stream
    intermediate_size: int  # inner width of the MLP
    num_layers: int
    num_heads: int  # query heads, H_q
    num_kv_heads: int  # H_kv; divides num_heads
    head_dim: int  # d, even
    rms_norm_eps: float  # added to the mean square in every RMSNorm
    max_positions: int  # max_position_embeddings of the checkpoint
    tie_embeddings: bool  # the head is the embedding, transposed
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head before RoPE
    rope: RopeConfig
    dtype_name: str  # dtype of the stored weights

    @property
    def max_context(self) -> int:
        """Most tokens of one sequence: the checkpoint's positions, or more by RoPE scaling.

        `max_position_embeddings` means the stretched context in some checkpoints and the original one in
        others (Qwen2.5 with YaRN); the larger reading counts.
        """
        if self.rope.type in ("default", "llama3"):
            return self.max_positions
        return max(self.max_positions, int(self.rope.factor * self.rope.original_max_positions))

    @classmethod
    def from_hf(cls, hf_config: Any) -> ModelConfig:
        """Reads a transformers config object, or a mapping as in config.json; TypeError for anything else.

        Both spellings of RoPE are understood: `rope_theta` with `rope_scaling` (transformers 4.x) and `rope_parameters`
        (5.x). Absent entries have the defaults of transformers. ValueError where an entry is missing, invalid or not
        supported.
        """
        values = hf_config.to_dict() if hasattr(hf_config, "to_dict") else hf_config
        require_type("hf_config", values, Mapping, "a transformers config or a mapping")
        entries = Entries(values)
        family: Any = entries.values.get("model_type")
        is_known = isinstance(family, str) and family in FAMILIES
        require(is_known, f"model_type {family!r} is not supported: must be one of {list(FAMILIES)}")
        _refuse_unsupported(entries, family)
        sizes = {field: entries.integer(key) for field, key in _SIZES.items()}
        num_heads, hidden_size = sizes["num_heads"], sizes["hidden_size"]
        max_positions = entries.integer("max_position_embeddings", 2048 if family == "llama" else 32768)
        # Qwen2 has its QKV biases whatever the config says, Qwen3 and LLaMA only when it asks for them.
        attention_bias = family != "qwen2" and entries.flag("attention_bias")
        # Null means one KV head per query head; absent means that too in LLaMA, but 32 in Qwen.
        of_family = num_heads if family == "llama" or "num_key_value_heads" in entries.values else 32
        config = cls(
            family=family,
            **sizes,
            num_kv_heads=entries.integer("num_key_value_heads", of_family),
            head_dim=entries.integer("head_dim", 128 if family == "qwen3" else hidden_size // num_heads, least=2),
            rms_norm_eps=entries.number("rms_norm_eps", 1e-6),
            max_positions=max_positions,
            tie_embeddings=entries.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=family == "llama" and entries.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            rope=RopeConfig.from_hf(_rope_parameters(entries), max_positions=max_positions),
            dtype_name=_dtype_name(entries),
        )
        kv_heads, head_dim, most = config.num_kv_heads, config.head_dim, config.max_context
        require(num_heads % kv_heads == 0, f"num_heads = {num_heads} must be a multiple of num_kv_heads = {kv_heads}")
        require(head_dim % 2 == 0, f"head_dim = {head_dim} must be even")
        require(most <= MOST, f"RoPE stretches the context to {most} positions: must be at most {MOST}")
        return config

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
            **{key: getattr(self, field) for field, key in (_SIZES | _OTHERS).items()},
            "hidden_act": "silu",
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.to_hf() or None,
            "torch_dtype": self.dtype_name,
        } | biases


@dataclasses.dataclass(frozen=True)
class StoredQuantization:
    """Scales of eight-bit weights, from the `quantization_config` of a checkpoint.

    A projection's `weight` holds e4m3 codes `[out, in]`. Its scales, by which codes are multiplied, are one, one for
    each output channel, or one for each block of outputs and inputs.
    """

    block: tuple[int, int] | None  # outputs and inputs that share a scale; None where all inputs do

    @classmethod
    def from_hf(cls, entries: Any) -> StoredQuantization:
        """Reads a `quantization_config`; ValueError where it is another format."""
        method = entries.get("quant_method") if isinstance(entries, Mapping) else entries
        given, name, is_read, block = method, "weight_block_size", False, None
        if method == "fp8":  # of Qwen3, DeepSeek and vLLM
            given, block = f"fp8, fmt {entries.get('fmt')!r}", entries.get(name)
            is_read = entries.get("fmt", "e4m3") == "e4m3"
        elif method == "compressed-tensors":  # of llm-compressor
            groups = entries.get("config_groups")
            groups = list(groups.values()) if isinstance(groups, Mapping) else []
            weights = groups[0].get("weights") if len(groups) == 1 and isinstance(groups[0], Mapping) else None
            weights = weights if isinstance(weights, Mapping) else {}
            wanted = {"format": "float-quantized", "num_bits": 8, "type": "float", "symmetric": True}
            described = {key: weights.get(key, value) for key, value in wanted.items()}
            described |= {"format": entries.get("format"), "strategy": weights.get("strategy")}
            given, name = f"compressed-tensors, {described}", "block_structure"
            is_read = any(described == wanted | {"strategy": each} for each in ("tensor", "channel", "block"))
            block = weights.get(name, ()) if described["strategy"] == "block" else None
        require(is_read, f"quantization_config ({given!r}) is not supported: must be {_EIGHT_BITS}")
        if block is not None:
            fits = isinstance(block, list | tuple) and len(block) == 2 and all(type(x) is int and x > 0 for x in block)
            require(fits, f"quantization_config: {name} = {block!r}, not two positive integers, is not supported")
        return cls(None if block is None else (block[0], block[1]))

    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes that the scales of codes `[out, in]` may have."""
        if self.block is None:
            return [(shape[0], 1), (shape[0],), (1,), (1, 1), ()]
        return [tuple(-(-size // of_block) for size, of_block in zip(shape, self.block, strict=True))]


def read_config(folder: Path) -> ModelConfig:
    """Reads `config.json` of a checkpoint folder. FileNotFoundError without it; ValueError with its path if refused."""
    path = Path(folder) / "config.json"
    require(path.is_file(), f"{path} does not exist: a checkpoint folder must hold config.json", FileNotFoundError)
    entries = read_json_object(path)
    with explaining(str(path), ValueError):
        return ModelConfig.from_hf(entries)


def _refuse_unsupported(entries: Entries, family: str) -> None:
    """Options that would change the result and that the decoder does not have."""
    if entries.values.get("quantization_config"):
        StoredQuantization.from_hf(entries.values["quantization_config"])
    if entries.values.get("dual_chunk_attention_config"):
        entries.refuse("dual_chunk_attention_config", "removed, to run the model without it")
    if entries.get("hidden_act", "silu") not in ("silu", "swish"):
        entries.refuse("hidden_act", "'silu'")
    if family == "llama":
        return
    # Qwen: layers may be listed by type, or slide from `max_window_layers` on.
    num_layers, first = entries.integer("num_hidden_layers"), entries.integer("max_window_layers", 28, least=0)
    layers, slides = entries.values.get("layer_types"), entries.flag("use_sliding_window")
    window = entries.values.get("sliding_window", 4096)
    if layers is None:
        layers = ["sliding_attention"] if slides and window is not None and first < num_layers else []
    if not isinstance(layers, list | tuple) or any(kind != "full_attention" for kind in layers):
        entries.refuse("layer_types", "'full_attention' for every layer: a sliding window is not supported")


def _rope_parameters(entries: Entries) -> dict[str, Any]:
    """One spelling of RoPE out of two, with the entries that transformers 4.x keeps beside it."""
    values = entries.values
    parameters: Mapping[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        parameters = values.get(key) or parameters
        if not isinstance(values.get(key), Mapping | None):
            entries.refuse(key, "an object")
    beside = {key: values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    over = {key: values[key] for key in ("original_max_position_embeddings",) if values.get(key) is not None}
    return beside | {key: value for key, value in parameters.items() if value is not None} | over


def _dtype_name(entries: Entries) -> str:
    """`dtype` (transformers 5) or `torch_dtype` (4.x), which may be a torch.dtype in a config object."""
    name = entries.values.get("dtype") or entries.values.get("torch_dtype") or "auto"
    name = "float32" if name == "auto" else str(name).removeprefix("torch.")
    return name if name in _DTYPES else entries.refuse("torch_dtype", f"one of {list(_DTYPES)}")
