"""ModelConfig and RopeConfig read config.json as transformers does; what is not supported is named."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.models.config import FAMILIES, ModelConfig, read_config
from tca_jax.models.rope import ROPE_TYPES, RopeConfig, rope_cos_sin


def newer_spelling(entries):
    """The same config.json as transformers 5 writes it."""
    newer = dict(entries)
    scaling = newer.pop("rope_scaling") or {"rope_type": "default"}
    newer["rope_parameters"] = dict(scaling) | {"rope_theta": newer.pop("rope_theta")}
    newer["dtype"] = newer.pop("torch_dtype")
    return newer


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_spellings_read_the_same(family, rope_type, config_entries):
    from transformers import AutoConfig

    older = config_entries(family, rope_type)
    config = ModelConfig.from_hf(older)
    assert (config.rope.type, config.rope.theta) == (rope_type, 50_000.0)
    written = json.loads(json.dumps(config.to_hf()))
    objects = (AutoConfig.for_model(**entries) for entries in (older, newer_spelling(older)))
    for entries in (newer_spelling(older), written, *objects):
        assert ModelConfig.from_hf(entries) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_entries_have_the_defaults_of_transformers(family, config_entries):
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


def test_scaling_widens_the_context(config_entries):
    reach = {name: ModelConfig.from_hf(config_entries("llama", name)).max_context for name in ROPE_TYPES}
    assert reach == {"default": 32, "linear": 80, "dynamic": 64, "llama3": 32, "yarn": 128}
    stretched = config_entries("llama", "yarn", max_position_embeddings=128)
    assert ModelConfig.from_hf(stretched).max_context == 128
    outer = config_entries("llama", "yarn", original_max_position_embeddings=8)
    assert ModelConfig.from_hf(outer).rope.original_max_positions == 8


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, r"= None: must be 'full_attention'"),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, r"'full_attention' for every layer"),
        *(
            ("llama", changes, message)
            for changes, message in [
                ({"model_type": "mistral"}, r"model_type 'mistral' is not supported: .*'llama', 'qwen2', 'qwen3'"),
                ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \('gptq'\)"),
                ({"dual_chunk_attention_config": {"chunk_size": 8}}, r"must be removed"),
                ({"hidden_act": "gelu"}, r"config\['hidden_act'\] = 'gelu': must be 'silu'"),
                ({"vocab_size": None}, r"config\['vocab_size'\] is missing"),
                ({"num_key_value_heads": 3}, r"num_heads = 4 must be a multiple of num_kv_heads = 3"),
                ({"head_dim": 7}, r"head_dim = 7 must be even"),
                ({"tie_word_embeddings": "yes"}, r"config\['tie_word_embeddings'\] = 'yes'"),
                ({"torch_dtype": "float8_e4m3fn"}, r"config\['torch_dtype'\] = 'float8_e4m3fn': must be one of"),
                ({"partial_rotary_factor": 0.25}, r"\['partial_rotary_factor'\] = 0\.25: must be 1"),
                ({"rope_scaling": "yarn"}, r"config\['rope_scaling'\] = 'yarn': must be an object"),
                ({"rope_theta": math.nan}, r"rope_parameters\['rope_theta'\] = nan: must be a positive number"),
                ({"rope_scaling": {"type": "linear", "factor": 1e12}}, r"stretches the context to 32000000000000"),
            ]
        ),
    ],
)
def test_unsupported_options_are_named(family, changes, message, config_entries):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config_entries(family) | changes)


@pytest.mark.parametrize("changes", [{"use_sliding_window": True}, {"max_window_layers": 1}])
def test_an_unused_sliding_window_is_read(changes, config_entries):
    assert ModelConfig.from_hf(config_entries("qwen2") | changes).family == "qwen2"


def test_read_config_names_the_file(tmp_path, config_entries):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    for content, message in (
        (b"{", "is not valid JSON"),
        (b'{"model_type": "\xff"}', "is not valid JSON"),
        (json.dumps(config_entries(hidden_act="relu")).encode(), r"config\['hidden_act'\] = 'relu'"),
    ):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
            read_config(tmp_path)


# --- RoPE -----------------------------------------------------------------------------------------

HEAD_DIM = 64
MAX_POSITIONS = 8192
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
PARAMETERS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3 with a narrow band": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 3.0, "factor": 32.0},
    "yarn": YARN,
    "yarn with an attention factor": YARN | {"attention_factor": 0.7},
    "yarn with mscale": YARN | {"mscale": 0.9, "mscale_all_dim": 0.4},
    "yarn with only mscale": YARN | {"mscale": 0.9},
    "yarn without truncation": YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn whose ramp has no width": YARN | {"beta_fast": 1.0, "truncate": False},
    "yarn without a factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 2048},
    "yarn without an original length": {"rope_type": "yarn", "factor": 2.0},
}


def read(parameters, theta=10_000.0):
    return RopeConfig.from_hf(parameters | {"rope_theta": theta}, max_positions=MAX_POSITIONS)


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", PARAMETERS)
def test_angles_equal_transformers(name, theta):
    torch = pytest.importorskip("torch", reason="parity is measured against the torch models of transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": MAX_POSITIONS}
    reference = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=PARAMETERS[name] | {"rope_theta": theta}))
    positions = np.array([[0, 1, 2, 63, 1000, 8191], [5, 5, 5, 5, 5, 5]], np.int32)
    cos, sin = rope_cos_sin(jnp.asarray(positions), HEAD_DIM, read(PARAMETERS[name], theta))
    expected = reference(torch.zeros(1), torch.tensor(positions))
    for ours, theirs in zip((cos, sin), expected, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs[..., : HEAD_DIM // 2], atol=2e-5)
        np.testing.assert_array_equal(theirs[..., : HEAD_DIM // 2], theirs[..., HEAD_DIM // 2 :])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, r"rope_parameters\['low_freq_factor'\] is missing"),
        (LLAMA3 | {"low_freq_factor": 4.0}, r"\['low_freq_factor'\] = 4\.0: must be below high_freq_factor = 4"),
        (YARN | {"rope_theta": 1}, r"\['rope_theta'\] = 1: must be a number of float32, above 1 for YaRN"),
        ({"rope_type": "linear", "factor": 1e308}, r"RoPE .* is not supported: numbers must fit into float32"),
        (YARN | {"truncate": "no"}, r"rope_parameters\['truncate'\] = 'no': must be true or false"),
        ({"rope_type": "longrope"}, r"RoPE .*longrope.* is not supported"),
    ],
)
def test_unsupported_rope_is_named(parameters, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(parameters, max_positions=MAX_POSITIONS)
