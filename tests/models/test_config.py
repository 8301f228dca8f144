"""ModelConfig reads both spellings of config.json as transformers does, and refuses what is not supported."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tca_jax.models.config import FAMILIES, ModelConfig, read_config
from tca_jax.models.rope import ROPE_TYPES, RopeConfig


def newer_spelling(entries: dict[str, Any]) -> dict[str, Any]:
    """The same config.json as transformers 5 writes it."""
    newer = dict(entries)
    scaling = newer.pop("rope_scaling") or {"rope_type": "default"}
    newer["rope_parameters"] = dict(scaling) | {"rope_theta": newer.pop("rope_theta")}
    newer["dtype"] = newer.pop("torch_dtype")
    return newer


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_read_the_same(family: str, rope_type: str, config_entries: Any) -> None:
    from transformers import AutoConfig

    older = config_entries(family, rope_type)
    config = ModelConfig.from_hf(older)
    assert config.rope.type == rope_type
    assert config.rope.theta == 50_000.0
    assert ModelConfig.from_hf(newer_spelling(older)) == config
    assert ModelConfig.from_hf(AutoConfig.for_model(**older)) == config
    assert ModelConfig.from_hf(AutoConfig.for_model(**newer_spelling(older))) == config


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_written_entries_read_back_equal(family: str, rope_type: str, config_entries: Any) -> None:
    config = ModelConfig.from_hf(config_entries(family, rope_type))
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_entries_have_the_defaults_of_transformers(family: str, config_entries: Any) -> None:
    from transformers import AutoConfig

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    entries = config_entries(family, hidden_size=256, num_attention_heads=64)
    minimal = {key: entries[key] for key in ("model_type", *sizes)}
    config = ModelConfig.from_hf(minimal)
    reference = AutoConfig.for_model(**minimal)
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == (getattr(reference, "head_dim", None) or 256 // 64)
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.max_positions == reference.max_position_embeddings
    assert config.tie_embeddings == reference.tie_word_embeddings
    assert config.rope == RopeConfig(theta=reference.rope_parameters["rope_theta"])


def test_families_differ_in_biases_and_norms(config_entries: Any) -> None:
    asked = {"attention_bias": True, "mlp_bias": True}
    plain = {family: ModelConfig.from_hf(config_entries(family)) for family in FAMILIES}
    biased = {family: ModelConfig.from_hf(config_entries(family, **asked)) for family in FAMILIES}

    def options(config: ModelConfig) -> tuple[bool, ...]:
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert options(plain["llama"]) == (False, False, False, False)
    assert options(biased["llama"]) == (True, True, True, False)
    assert options(plain["qwen2"]) == options(biased["qwen2"]) == (True, False, False, False)
    assert options(plain["qwen3"]) == (False, False, False, True)
    assert options(biased["qwen3"]) == (True, True, False, True)


def test_scaling_widens_the_context(config_entries: Any) -> None:
    reach = {name: ModelConfig.from_hf(config_entries("llama", name)).max_context for name in ROPE_TYPES}
    assert reach == {"default": 32, "linear": 80, "dynamic": 64, "llama3": 32, "yarn": 128}
    stretched = config_entries("llama", "yarn", max_position_embeddings=128)
    assert ModelConfig.from_hf(stretched).max_context == 128


def test_the_outer_original_length_wins(config_entries: Any) -> None:
    entries = config_entries("llama", "yarn", original_max_position_embeddings=8)
    assert ModelConfig.from_hf(entries).rope.original_max_positions == 8


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": "mistral"}, r"model_type 'mistral' is not supported: .*'llama', 'qwen2', 'qwen3'"),
        ("llama", {"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \('gptq'\)"),
        ("llama", {"hidden_act": "gelu"}, r"config\['hidden_act'\] = 'gelu': must be 'silu'"),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 1},
            r"= None: must be 'full_attention'",
        ),
        (
            "qwen3",
            {"layer_types": ["sliding_attention", "full_attention"]},
            r"must be 'full_attention' for every layer",
        ),
        ("llama", {"vocab_size": None}, r"config\['vocab_size'\] is missing"),
        ("llama", {"hidden_size": "32"}, r"config\['hidden_size'\] = '32': must be an integer >= 1"),
        ("llama", {"vocab_size": 10**12}, r"config\['vocab_size'\] = 1000000000000: must be an integer"),
        ("llama", {"num_key_value_heads": 3}, r"num_heads = 4 must be a multiple of num_kv_heads = 3"),
        ("llama", {"head_dim": 7}, r"head_dim = 7 must be even"),
        ("llama", {"tie_word_embeddings": "yes"}, r"config\['tie_word_embeddings'\] = 'yes'"),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, r"config\['torch_dtype'\] = 'float8_e4m3fn': must be one of"),
        ("llama", {"partial_rotary_factor": 0.25}, r"\['partial_rotary_factor'\] = 0\.25: must be 1"),
        ("llama", {"rms_norm_eps": math.nan}, r"config\['rms_norm_eps'\] = nan: must be a positive number"),
        ("llama", {"rms_norm_eps": 10**400}, r"config\['rms_norm_eps'\] = 1000+: must be a positive number"),
        ("llama", {"rope_scaling": "yarn"}, r"config\['rope_scaling'\] = 'yarn': must be an object"),
        ("llama", {"rope_theta": math.nan}, r"rope_parameters\['rope_theta'\] = nan: must be a positive number"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 1e12}},
            r"stretches the context to 32000000000000",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, r"rope_parameters\['factor'\] is missing"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, r"RoPE .*longrope.* is not supported"),
    ],
)
def test_unsupported_options_are_named(family: str, changes: dict[str, Any], message: str, config_entries: Any) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config_entries(family) | changes)


@pytest.mark.parametrize("changes", [{"use_sliding_window": True}, {"max_window_layers": 1}])
def test_an_unused_sliding_window_is_read(changes: dict[str, Any], config_entries: Any) -> None:
    assert ModelConfig.from_hf(config_entries("qwen2") | changes).family == "qwen2"


def test_read_config_names_the_file(tmp_path: Path, config_entries: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    for text, message in (
        ("{", "is not valid JSON"),
        ("[1]", "holds a list: must be a JSON object"),
        ("[" * 100_000, "is not valid JSON"),
        (json.dumps(config_entries(hidden_act="relu")), r"config\['hidden_act'\] = 'relu'"),
        (json.dumps(config_entries(rms_norm_eps=math.nan)), r"config\['rms_norm_eps'\] = nan"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
            read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)


@pytest.mark.integration
def test_config_objects_need_no_torch(config_entries: Any) -> None:
    script = f"""
import importlib.abc, importlib.util, sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)

class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoTorch())
from transformers import AutoConfig
from tca_jax.models.config import ModelConfig
assert ModelConfig.from_hf(AutoConfig.for_model(**{config_entries("qwen3", "yarn")!r})).rope.type == "yarn"
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
