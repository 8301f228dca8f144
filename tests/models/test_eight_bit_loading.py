"""Weights quantized while they are read, and checkpoints that are published in eight bits."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of
from random_decoders import assert_equal_weights, random_decoder
from safetensors.numpy import load_file, save_file

import tca_jax
from tca_jax.models.config import StoredQuantization, read_config
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.names import parameters
from tca_jax.models.params import load_checkpoint, save_decoder
from tca_jax.models.projections import quantize

CODES = jnp.dtype(jnp.float8_e4m3fn)
Q = "model.layers.1.self_attn.q_proj.weight"
BLOCK = (16, 24)  # neither divides all widths
LLM_COMPRESSOR = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}
FORMATS = {
    "channel": LLM_COMPRESSOR,
    "tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "block": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
}


def make(config):
    """A model without zeros, whose output channels differ in size."""

    def draw(rng, shape):
        sizes = 0.2 * 2.0 ** rng.uniform(-3, 1, shape[1:])
        return rng.standard_normal(shape) * (sizes if len(shape) > 1 else 1)

    return random_decoder(config, draw)


def publish(folder, config, kind, changes=()):
    """Makes a checkpoint in eight bits, with other tensors or (None) without; returns them as float32 numbers."""
    save_decoder(folder, make(config), jnp.float32)
    tensors, numbers = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        numbers[name], tensors[name] = value, value
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = {"channel": (1, value.shape[1]), "tensor": value.shape, "block": BLOCK}[kind]
        grid = -(-value.shape[0] // rows), -(-value.shape[1] // columns)
        scale = np.zeros(grid, np.float32)
        spread = np.zeros(value.shape, np.float32)
        for i, j in np.ndindex(*grid):
            part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            spread[part] = scale[i, j] = np.abs(value[part]).max() / 448
        codes = np.clip(value / spread, -448, 448).astype(CODES)
        tensors[name], numbers[name] = codes, codes.astype(np.float32) * spread
        suffix = "_scale_inv" if kind == "block" else "_scale"
        tensors[name + suffix] = np.asarray(scale[0, 0]) if kind == "tensor" else scale
    tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)  # of a cache: not ours
    tensors = {name: tensor for name, tensor in (tensors | dict(changes)).items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": FORMATS[kind]}))
    return numbers


def kernels(decoder):
    """Every kernel `[in, *out]` by its path; those of eight bits as the numbers that they stand for."""
    values = {parameter.path: np.asarray(parameter.variable[...], np.float32) for parameter in parameters(decoder)}
    found = {path[:-1]: value for path, value in values.items() if path[-1] == "kernel" and "layers" in path}
    for path in [path[:-1] for path in values if path[-1] == "codes"]:
        found[path] = np.moveaxis(values[(*path, "codes")] * values[(*path, "scale")][..., None], -1, 0)
    return found


def rounded(kernel):
    """A kernel in e4m3, with a scale for each output channel."""
    codes, scale = quantize(jnp.moveaxis(jnp.asarray(kernel), 0, -1))
    return np.moveaxis(np.asarray(codes, np.float32) * np.asarray(scale)[..., None], -1, 0)


def test_kernels_are_quantized_by_output_channel(config, tmp_path):
    save_decoder(tmp_path, make(config), jnp.bfloat16)
    wide = load_checkpoint(tmp_path, config, jnp.float32).decoder
    loaded = load_checkpoint(tmp_path, config, jnp.bfloat16, weights="fp8")
    assert loaded.fingerprint == fingerprint(wide)  # profiles of the model in 16 bits are its own
    found = kernels(loaded.decoder)
    for path, kernel in kernels(wide).items():
        np.testing.assert_allclose(found[path], rounded(kernel), rtol=1e-6)
    for parameter in parameters(loaded.decoder):
        if parameter.path[-1] not in ("codes", "scale") or "norm" in str(parameter.path):
            assert parameter.variable[...].dtype == jnp.bfloat16, parameter.path


@pytest.mark.parametrize("kind", FORMATS)
def test_published_codes_are_dequantized(kind, config, tmp_path):
    numbers = publish(tmp_path, config, kind)
    assert read_config(tmp_path) == config
    save_decoder(tmp_path / "dense", make(config), jnp.float32)
    save_file(numbers, tmp_path / "dense" / "model.safetensors")
    reference = load_checkpoint(tmp_path / "dense", config, jnp.float32).decoder
    loaded = load_checkpoint(tmp_path, config)
    assert loaded.fingerprint == fingerprint(reference)
    found = kernels(loaded.decoder)
    for path, kernel in kernels(reference).items():
        if kind == "block":  # quantized anew, by output channel
            kernel = rounded(kernel)
        np.testing.assert_allclose(found[path], kernel, rtol=1e-6)


@pytest.mark.integration
@pytest.mark.parametrize("kind", FORMATS)
def test_shards_are_parts_of_the_whole(kind, config, tmp_path):
    publish(tmp_path, config, kind)
    mesh = mesh_of((1, 4))
    orders = ((0, 1, 2, 3), (2, 0, 3, 1))
    alone = load_checkpoint(tmp_path, config, jnp.float32, weights="fp8", head_orders=orders)
    shared = load_checkpoint(tmp_path, config, jnp.float32, weights="fp8", head_orders=orders, mesh=mesh)
    assert shared.fingerprint == alone.fingerprint == load_checkpoint(tmp_path, config, weights="fp8").fingerprint
    assert_equal_weights(shared.decoder, alone.decoder)
    assert {part.data.shape for part in shared.decoder.layers[0].mlp.down.codes[...].addressable_shards} == {
        (config.hidden_size, config.intermediate_size // 4)
    }


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"quant_method": "awq"}, r"quantization_config \('awq'\) is not supported: must be weights in e4m3"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fp8, fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size = \[128\], not two positive"),
        (LLM_COMPRESSOR | {"format": "int-quantized"}, r"compressed-tensors, .*'format': 'int-quantized'"),
        (
            LLM_COMPRESSOR | {"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "channel"}}}},
            "'num_bits': 4",
        ),
        (LLM_COMPRESSOR | {"config_groups": {"a": 5}}, "'strategy': None"),
    ],
)
def test_other_formats_are_named(entries, message):
    with pytest.raises(tca_jax.UserError, match=message):
        StoredQuantization.from_hf(entries)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{Q}_scale": None}, rf"{Q}' has .* dtype F8_E4M3, and its scales .*: there are none"),
        ({f"{Q}_scale": np.ones(3, np.float32)}, rf"{Q}_scale' has \[3\] of F32"),
        ({Q: np.ones((32, 32), np.float32)}, rf"{Q}' has .* dtype F32 where others are in eight bits.*weights='fp8'"),
        ({"lm_head.weight": np.zeros((67, 32), CODES)}, r"lm_head\.weight' has shape .* and dtype F8_E4M3, .* one of"),
        ({"model.embed_tokens.weight_scale": np.ones(1, np.float32)}, "has no place in the model"),
    ],
)
def test_damage_is_named(changes, message, config, tmp_path):
    publish(tmp_path, config, "channel", changes)
    with pytest.raises(tca_jax.UserError, match=message):
        load_checkpoint(tmp_path, config)
