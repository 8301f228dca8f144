"""RoPE equals transformers in every type and option; what is not supported is an error that names it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.models.rope import RopeConfig, apply_rope, inverse_frequencies, rope_cos_sin

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
PARAMETERS: dict[str, dict[str, Any]] = {
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


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="parity is measured against the torch models of transformers")


def reference_rotary(parameters: dict[str, Any], theta: float) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(parameters) | {"rope_theta": theta},
    )
    return LlamaRotaryEmbedding(config)


def read(parameters: dict[str, Any], theta: float = 10_000.0) -> RopeConfig:
    return RopeConfig.from_hf(parameters | {"rope_theta": theta}, max_positions=MAX_POSITIONS)


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", PARAMETERS)
def test_angles_equal_transformers(name: str, theta: float, torch: Any) -> None:
    reference = reference_rotary(PARAMETERS[name], theta)
    positions = np.array([[0, 1, 2, 63, 1000, 8191], [5, 5, 5, 5, 5, 5]], np.int32)
    cos, sin = rope_cos_sin(jnp.asarray(positions), HEAD_DIM, read(PARAMETERS[name], theta))
    expected = reference(torch.zeros(1), torch.tensor(positions))
    for ours, theirs in zip((cos, sin), expected, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs[..., : HEAD_DIM // 2], atol=2e-5)
        np.testing.assert_array_equal(theirs[..., : HEAD_DIM // 2], theirs[..., HEAD_DIM // 2 :])


@pytest.mark.parametrize("length", [8193, 10_000, 32_768])
def test_dynamic_frequencies_grow_with_each_row(length: int, torch: Any) -> None:
    positions = np.array([[0, 17, 900, length - 1], [0, 17, 900, 901]], np.int32)
    cos, sin = rope_cos_sin(jnp.asarray(positions), HEAD_DIM, read(PARAMETERS["dynamic"]))
    for row in range(2):
        reference = reference_rotary(PARAMETERS["dynamic"], 10_000.0)
        expected = reference(torch.zeros(1), torch.tensor(positions[row : row + 1]))
        for ours, theirs in zip((cos[row], sin[row]), expected, strict=True):
            np.testing.assert_allclose(ours[:3], theirs[0, :3, : HEAD_DIM // 2], atol=5e-4)
    assert not np.allclose(cos[0, 2], cos[1, 2], atol=1e-2)


def test_dynamic_ignores_padding() -> None:
    rope = read(PARAMETERS["dynamic"])
    short, _ = rope_cos_sin(jnp.asarray([[8190, 9000, 9001]]), HEAD_DIM, rope)
    padded, _ = rope_cos_sin(jnp.asarray([[8190, 9000, 9001, 9001, 9001]]), HEAD_DIM, rope)
    np.testing.assert_array_equal(short[0], padded[0, :3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_equals_transformers(dtype: str, torch: Any) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 2, 5, 3, 8)).astype(np.float32)
    cos, sin = rope_cos_sin(jnp.arange(10).reshape(2, 5), 8, read({}))
    full = [torch.tensor(np.concatenate([half, half], axis=-1)) for half in (cos, sin)]
    expected = apply_rotary_pos_emb(torch.tensor(q), torch.tensor(k), *full, unsqueeze_dim=2)
    for x, theirs in zip((q, k), expected, strict=True):
        ours = apply_rope(jnp.asarray(x, dtype), cos, sin)
        assert ours.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, atol=1e-6 if dtype == "float32" else 3e-2)


def test_frequencies_stay_within_the_stretch() -> None:
    plain = inverse_frequencies(HEAD_DIM, read({}))
    for name in ("llama3", "yarn", "linear"):
        rope = read(PARAMETERS[name])
        scaled = inverse_frequencies(HEAD_DIM, rope)
        assert np.all(np.diff(scaled) < 0)
        assert np.all(scaled <= plain)
        assert np.all(scaled >= plain / rope.factor * (1 - 1e-6))


@pytest.mark.parametrize("name", PARAMETERS)
def test_hugging_face_entries_survive_a_round_trip(name: str) -> None:
    rope = read(PARAMETERS[name])
    assert RopeConfig.from_hf(rope.to_hf() | {"rope_theta": rope.theta}, max_positions=MAX_POSITIONS) == rope


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, r"rope_parameters\['low_freq_factor'\] is missing"),
        ({"rope_type": "linear", "factor": "4"}, r"rope_parameters\['factor'\] = '4': must be a positive number"),
        (LLAMA3 | {"low_freq_factor": 4.0}, r"\['low_freq_factor'\] = 4\.0: must be below high_freq_factor = 4"),
        (YARN | {"rope_theta": 1}, r"\['rope_theta'\] = 1: must be a number of float32, above 1 for YaRN"),
        (YARN | {"rope_theta": 1e308}, r"\['rope_theta'\] = 1e\+308: must be a number of float32"),
        (YARN | {"truncate": "no"}, r"rope_parameters\['truncate'\] = 'no': must be true or false"),
        ({"full_attention": {"rope_type": "default"}}, r"RoPE .*full_attention.* is not supported"),
    ],
)
def test_unsupported_rope_is_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(parameters, max_positions=MAX_POSITIONS)
