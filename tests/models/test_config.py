"""ModelConfig reads both spellings of config.json as transformers does, and refuses what is not supported."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tca_jax.models.config import FAMILIES, ModelConfig, read_config
from tca_jax.models.rope import ROPE_TYPES, RopeConfig, inverse_frequencies


def newer_spelling(entries: dict[str, Any]) -> dict[str, Any]:
    """The same config.json as transformers 5 writes it."""
    newer = dict(entries)
    scaling = newer.pop("rope_scaling") or {"rope_type": "default"}
    newer["rope_parameters"] = dict(scaling) | {"rope_theta": newer.pop("rope_theta")}
    newer["dtype"] = newer.pop("torch_dtype")
    return newer


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_and_a_config_object_read_the_same(family: str, rope_type: str, config_entries: Any) -> None:
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


def test_scaling_that_reaches_past_the_positions_widens_the_context(config_entries: Any) -> None:
    reach = {name: ModelConfig.from_hf(config_entries("llama", name)).max_context for name in ROPE_TYPES}
    assert reach == {"default": 32, "linear": 80, "dynamic": 64, "llama3": 32, "yarn": 128}
    stretched = config_entries("llama", "yarn", max_position_embeddings=128)
    assert ModelConfig.from_hf(stretched).max_context == 128


def test_the_outer_original_length_wins_as_in_transformers(config_entries: Any) -> None:
    entries = config_entries("llama", "yarn", original_max_position_embeddings=8)
    assert ModelConfig.from_hf(entries).rope.original_max_positions == 8


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"model_type": "mistral"},
            r"model_type 'mistral' is not supported: .*'llama', 'qwen2', 'qwen3'",
        ),
        ("llama", {"model_type": None}, r"model_type None is not supported"),
        (
            "llama",
            {"architectures": ["LlamaModel"]},
            r"'LlamaModel'.*'LlamaForCausalLM'",
        ),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \('gptq'\)"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not supported: must be 'silu'"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, r"layer 1 has 'sliding_attention'"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention", "full_attention"]},
            r"layer 0 has 'sliding_attention'",
        ),
        ("llama", {"vocab_size": None}, r"config has no 'vocab_size'"),
        ("llama", {"hidden_size": "32"}, r"config\['hidden_size'\] = '32': must be a positive integer"),
        ("llama", {"num_key_value_heads": 3}, r"num_heads = 4 must be a multiple of num_kv_heads = 3"),
        ("llama", {"head_dim": 7}, r"head_dim = 7: must be even"),
        ("llama", {"tie_word_embeddings": "yes"}, r"config\['tie_word_embeddings'\] = 'yes'"),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, r"dtype_name = 'float8_e4m3fn': must be one of"),
        ("llama", {"rope_scaling": [4.0]}, r"rope_scaling = \[4\.0\]: must be an object"),
        ("llama", {"partial_rotary_factor": 0.25}, r"partial_rotary_factor = 0\.25 is not supported"),
        (
            "llama",
            {"rms_norm_eps": "small"},
            r"config\['rms_norm_eps'\] = 'small': must be a positive number",
        ),
        ("llama", {"rms_norm_eps": math.nan}, r"config\['rms_norm_eps'\] = nan: must be a positive number"),
        ("llama", {"rms_norm_eps": math.inf}, r"config\['rms_norm_eps'\] = inf: must be a positive number"),
        ("llama", {"rms_norm_eps": 10**400}, r"config\['rms_norm_eps'\] = 1000+: must be a positive number"),
        ("llama", {"rms_norm_eps": True}, r"config\['rms_norm_eps'\] = True: must be a positive number"),
        ("llama", {"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        (
            "llama",
            {"architectures": "LlamaForCausalLM"},
            r"architectures = 'LlamaForCausalLM' .*\['LlamaForCausalLM'\]",
        ),
        ("llama", {"architectures": 3}, r"architectures = 3 is not supported: must be \['LlamaForCausalLM'\]"),
        ("llama", {"quantization_config": "gptq"}, r"quantization_config \('gptq'\) is not supported"),
        ("qwen2", {"layer_types": 2}, r"config\['layer_types'\] = 2: must be a list of 2, one for each layer"),
        ("qwen2", {"layer_types": ["full_attention"]}, r"config\['layer_types'\] = .*: must be a list of 2"),
        ("qwen3", {"layer_types": ["full_attention", 7]}, r"layer 1 has 7: only 'full_attention' is supported"),
        ("qwen2", {"max_window_layers": "1"}, r"config\['max_window_layers'\] = '1': must be an integer from 0"),
        ("qwen2", {"use_sliding_window": 1}, r"config\['use_sliding_window'\] = 1: must be true or false"),
        ("llama", {"num_hidden_layers": True}, r"config\['num_hidden_layers'\] = True: must be a positive integer"),
        (
            "llama",
            {"max_position_embeddings": 2**31},
            r"\['max_position_embeddings'\] = 2147483648: .*2147483647",
        ),
        ("llama", {"vocab_size": 10**12}, r"config\['vocab_size'\] = 1000000000000: must be at most 2147483647"),
        ("llama", {"rope_scaling": "yarn"}, r"rope_scaling = 'yarn': must be an object"),
        ("llama", {"rope_parameters": 0}, r"rope_parameters = 0: must be an object"),
        ("llama", {"rope_theta": math.nan}, r"rope_parameters\['rope_theta'\] = nan: must be a positive number"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 1e12}}, r"RoPE factor .* = 1e\+12 \* 32: .*2147483647"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": [2]}},
            r"rope_parameters\['factor'\] = \[2\]: must be a positive number",
        ),
    ],
)
def test_unsupported_options_are_errors_that_name_them(
    family: str, changes: dict[str, Any], message: str, config_entries: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config_entries(family) | changes)


WRONG = (None, True, "x", [], [1], {}, -1, 0, 1.5, math.nan, 10**12, "1")
OTHER_ENTRIES = (
    "architectures",
    "attention_bias",
    "dtype",
    "dual_chunk_attention_config",
    "head_dim",
    "layer_types",
    "max_window_layers",
    "mlp_bias",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "quantization_config",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
)
SCALING_ENTRIES = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "truncate",
    "type",
)


def wrong_configs(entries: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config with each entry, also those of its RoPE, replaced by what it should not be."""
    for key in sorted({*entries, *OTHER_ENTRIES}):
        yield from (entries | {key: wrong} for wrong in WRONG)
    scaling = entries["rope_scaling"] or {}
    for key in SCALING_ENTRIES:
        yield from (entries | {"rope_scaling": scaling | {key: wrong}} for wrong in WRONG)


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_an_entry_holds_is_a_config_or_a_value_error(family: str, rope_type: str, config_entries: Any) -> None:
    refused = 0
    for entries in wrong_configs(config_entries(family, rope_type)):
        try:
            config = ModelConfig.from_hf(entries)
        except ValueError:
            refused += 1
        else:
            assert hash(config) == hash(ModelConfig.from_hf(config.to_hf()))
            assert config.max_context < 2**31
            assert 0 < config.rms_norm_eps < math.inf
            assert np.isfinite(inverse_frequencies(64, config.rope)).all()
    assert refused > 150


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": math.nan}, r"rms_norm_eps = nan: must be a positive number"),
        ({"max_positions": 2**31}, r"ModelConfig\.max_positions = 2147483648: must be at most 2147483647"),
        ({"num_layers": 0}, r"ModelConfig\.num_layers = 0: must be a positive integer"),
    ],
)
def test_a_config_made_by_hand_is_checked_too(changes: dict[str, Any], message: str, config_entries: Any) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ModelConfig.from_hf(config_entries()), **changes)


@pytest.mark.parametrize("changes", [{"use_sliding_window": True}, {"max_window_layers": 1}])
def test_a_sliding_window_that_no_layer_uses_is_read(changes: dict[str, Any], config_entries: Any) -> None:
    assert ModelConfig.from_hf(config_entries("qwen2") | changes).family == "qwen2"


def test_neither_mapping_nor_config_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"hf_config is a int: must be a transformers config or a mapping"):
        ModelConfig.from_hf(7)


def test_read_config_names_the_file(tmp_path: Path, config_entries: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    for text, message in (
        ("{", "is not valid JSON"),
        ("[1]", "holds a list: must be a JSON object"),
        ("[" * 100_000, "is not valid JSON"),
        (json.dumps(config_entries(hidden_act="relu")), "hidden_act = 'relu'"),
        (json.dumps(config_entries(rms_norm_eps=math.nan)), r"config\['rms_norm_eps'\] = nan"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
            read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)


@pytest.mark.integration
def test_config_objects_are_read_where_torch_is_not_installed(config_entries: Any) -> None:
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
