"""Weights from safetensors folders: dtypes, shards, little host memory, and errors that name the file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_decoders import random_decoder
from safetensors.numpy import load_file, save_file

from tca_jax.models.config import ModelConfig, read_config
from tca_jax.models.decoder import Decoder
from tca_jax.models.names import EMBEDDING, HEAD
from tca_jax.models.params import load_checkpoint, load_decoder, save_decoder

INDEX = "model.safetensors.index.json"
Q, K = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qk")
V_BIAS = "model.layers.1.self_attn.v_proj.bias"


@pytest.fixture
def config(config_entries: Any) -> ModelConfig:
    """Every kind of parameter but the QK norm."""
    return ModelConfig.from_hf(config_entries("llama", attention_bias=True, mlp_bias=True))


def shard(folder: Path) -> dict[str, str]:
    """Split `model.safetensors` into three files with an index, as large checkpoints are; the weight map.

    Neighbours go to different files, and so do the tensors of one parameter.
    """
    tensors = load_file(folder / "model.safetensors")
    weight_map = {}
    for part in range(3):
        file, names = f"model-{part + 1:05}-of-00003.safetensors", sorted(tensors)[part::3]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_equal_weights(a: Decoder, b: Decoder) -> None:
    jax.tree.map(np.testing.assert_array_equal, nnx.state(a), nnx.state(b))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_saved_weights_load_back_bit_for_bit(family: str, config_entries: Any, tmp_path: Path) -> None:
    decoder = random_decoder(ModelConfig.from_hf(config_entries(family)))
    save_decoder(tmp_path, decoder, jnp.float32)
    assert read_config(tmp_path) == decoder.config
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
    loaded = load_decoder(tmp_path, decoder.config, jnp.float32)
    assert_equal_weights(loaded, decoder)
    assert nnx.graphdef(loaded) == nnx.graphdef(decoder)  # one compilation serves both


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16"), ("float16", "bfloat16")],
)
def test_weights_are_cast_to_the_dtype_asked_for(stored: str, wanted: str, config: ModelConfig, tmp_path: Path) -> None:
    decoder = random_decoder(config)
    save_decoder(tmp_path, decoder, stored)
    assert read_config(tmp_path).dtype_name == stored
    loaded = load_decoder(tmp_path, config, wanted)
    assert loaded.dtype == jnp.dtype(wanted)
    for ours, original in zip(jax.tree.leaves(nnx.state(loaded)), jax.tree.leaves(nnx.state(decoder)), strict=True):
        assert ours.dtype == jnp.dtype(wanted)
        np.testing.assert_array_equal(ours, original.astype(stored).astype(wanted))


def test_shards_load_as_one_file_with_progress(config: ModelConfig, tmp_path: Path) -> None:
    decoder = random_decoder(config)
    save_decoder(tmp_path, decoder, jnp.bfloat16)
    weight_map = shard(tmp_path)
    assert weight_map[Q] != weight_map[K]  # one parameter from two files
    calls: list[tuple[int, int]] = []
    loaded = load_decoder(tmp_path, config, jnp.bfloat16, lambda done, total: calls.append((done, total)))
    assert_equal_weights(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16), decoder))
    total = sum(2 * parameter.size for parameter in jax.tree.leaves(nnx.state(decoder)))
    assert len(calls) == len(weight_map)
    assert calls[-1] == (total, total)
    assert calls == sorted(set(calls))


@pytest.mark.integration
@pytest.mark.parametrize("widest", [{"intermediate_size": 4096}, {"head_dim": 1024}])
def test_host_memory_stays_near_one_tensor(widest: dict[str, int], config_entries: Any, tmp_path: Path) -> None:
    """Queries, keys and values, which are one parameter, are never on the host together."""
    shape = {"hidden_size": 256, "num_hidden_layers": 6} | widest
    decoder = Decoder(ModelConfig.from_hf(config_entries("llama", **shape)), rngs=nnx.Rngs(0))
    save_decoder(tmp_path, decoder, jnp.bfloat16)
    load_decoder(tmp_path, decoder.config, jnp.bfloat16)  # what is compiled and imported once is not counted
    sizes = [tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values()]
    whole, largest = sum(sizes), max(sizes)
    tracemalloc.start()
    try:
        load_decoder(tmp_path, decoder.config, jnp.bfloat16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert whole > 15 * largest
    assert largest <= peak < 2.5 * largest  # a second one may still be on its way to the device


@pytest.mark.integration
def test_loading_needs_no_torch(config: ModelConfig, tmp_path: Path) -> None:
    save_decoder(tmp_path, random_decoder(config), jnp.bfloat16)
    script = f"""
import sys
from pathlib import Path
sys.modules["torch"] = None  # importing it is now an error
from tca_jax.models.config import read_config
from tca_jax.models.params import load_decoder
folder = Path({str(tmp_path)!r})
load_decoder(folder, read_config(folder))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_tied_checkpoint_may_hold_a_head(config_entries: Any, tmp_path: Path) -> None:
    decoder = random_decoder(ModelConfig.from_hf(config_entries(tie_word_embeddings=True)))
    save_decoder(tmp_path, decoder, jnp.bfloat16)
    rewrite(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING]}))
    assert load_decoder(tmp_path, decoder.config).head is None
    rewrite(tmp_path, lambda tensors: tensors.update({HEAD: tensors[HEAD] * 2}))
    with pytest.warns(UserWarning, match=r"'lm_head\.weight' differs from the embedding"):
        untied = load_decoder(tmp_path, decoder.config)
    assert not untied.config.tie_embeddings
    np.testing.assert_array_equal(untied.head.kernel[...], 2 * untied.embedding[...].T)


@pytest.mark.parametrize(
    ("name", "warns"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False),
        ("score.weight", True),
        ("model.layers.2.mlp.down_proj.weight", True),
    ],
)
def test_tensors_of_other_parts_are_ignored(name: str, warns: bool, config: ModelConfig, tmp_path: Path) -> None:
    decoder = random_decoder(config)
    save_decoder(tmp_path, decoder, jnp.float32)
    rewrite(tmp_path, lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    with pytest.warns(UserWarning, match=f"ignored: '{name}'") if warns else contextlib.nullcontext():
        assert_equal_weights(load_decoder(tmp_path, config, jnp.float32), decoder)


def test_names_may_lack_their_prefix(config_entries: Any, tmp_path: Path) -> None:
    """As in checkpoints of LlamaModel."""
    decoder = random_decoder(ModelConfig.from_hf(config_entries(tie_word_embeddings=True)))
    save_decoder(tmp_path, decoder, jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    change = {"architectures": ["LlamaModel"], "torch_dtype": "auto"}
    (tmp_path / "config.json").write_text(json.dumps(decoder.config.to_hf() | change))
    assert_equal_weights(load_decoder(tmp_path, read_config(tmp_path), jnp.float32), decoder)


def test_checkpoints_split_joined_projections(config: ModelConfig, tmp_path: Path) -> None:
    decoder = random_decoder(config)
    save_decoder(tmp_path, decoder, jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    gate_up = decoder.layers[1].mlp.gate_up.kernel[...]
    for part, chosen in (("gate", gate_up[:, 0]), ("up", gate_up[:, 1])):
        np.testing.assert_array_equal(tensors[f"model.layers.1.mlp.{part}_proj.weight"], chosen.T)
    qkv = decoder.layers[1].attention.qkv
    for kind, heads in (("weight", jnp.moveaxis(qkv.kernel[...], 0, -1)), ("bias", qkv.bias[...])):
        assert heads.shape[:3] == (2, 2 + 2, 8)  # KV heads; each one's queries, key and value
        for part, chosen in (("q", heads[:, :2]), ("k", heads[:, 2]), ("v", heads[:, 3])):
            stored = tensors[f"model.layers.1.self_attn.{part}_proj.{kind}"]
            np.testing.assert_array_equal(stored, chosen.reshape(-1, *heads.shape[3:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), rf"lacks tensor '{Q}'"),
        (lambda t: t.pop(V_BIAS), rf"lacks tensor '{V_BIAS}'"),
        (
            lambda t: t.update({Q: t[Q][:-1]}),
            rf"model\.safetensors: tensor '{Q}' has shape \[31, 32\] .*\[32, 32\]",
        ),
        (
            lambda t: t.update({K: t[Q]}),  # as wide as queries, in place of keys
            rf"model\.safetensors: tensor '{K}' has shape \[32, 32\] .*\[16, 32\]",
        ),
        (
            lambda t: t.update({Q: t[Q].astype(np.int8)}),
            rf"'{Q}' has .* and dtype I8, .* one of \['F32', 'BF16'",
        ),
        (lambda t: t.update({Q + "_scale": t[Q]}), rf"tensor '{Q}_scale' has no place in the model"),
    ],
)
def test_wrong_tensors_are_named(change: Any, message: str, config: ModelConfig, tmp_path: Path) -> None:
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_decoder(tmp_path, config)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 10**9}, r"lacks tensor 'model\.layers\.999999999\.self_attn\.q_proj\.weight'"),
        ({"vocab_size": 10**9}, r"'model\.embed_tokens\.weight' has shape \[67, 32\] .* \[1000000000, 32\]"),
        ({"intermediate_size": 10**9}, r"1\.mlp\.gate_proj\.weight' has shape \[48, 32\] .* \[1000000000, 32\]"),
        ({"num_heads": 10**9}, r"1\.self_attn\.q_proj\.weight' has shape \[32, 32\] .* \[8000000000, 32\]"),
        ({"num_kv_heads": 4}, r"1\.self_attn\.k_proj\.weight' has shape \[16, 32\] .* \[32, 32\]"),
        ({"head_dim": 10**9}, r"1\.self_attn\.q_proj\.weight' has shape \[32, 32\] .* \[4000000000, 32\]"),
    ],
)
def test_other_sizes_are_refused_before_building(
    sizes: dict[str, int], message: str, config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_decoder(tmp_path, random_decoder(config), jnp.float32)

    def build(*args: Any, **options: Any) -> None:
        raise AssertionError("a decoder was built")

    monkeypatch.setattr("tca_jax.models.params.Decoder", build)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, dataclasses.replace(config, **sizes))
    with pytest.raises(AssertionError, match="a decoder was built"):
        load_checkpoint(tmp_path, config)  # or this test watches the wrong place


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, FileNotFoundError, "is missing"),
        (b"", ValueError, "is corrupt or incomplete"),
        (b"version https://git-lfs.github.com/spec/v1\n", ValueError, "is a Git LFS pointer .*git lfs pull"),
    ],
)
def test_a_damaged_shard_is_named(content: Any, error: Any, message: str, config: ModelConfig, tmp_path: Path) -> None:
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    shard(tmp_path)
    file = tmp_path / "model-00003-of-00003.safetensors"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(error, match=rf"model-00003-of-00003\.safetensors {message}"):
        load_decoder(tmp_path, config)


def test_a_wrong_index_is_named(config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors, .* nor a GGUF file"):
        load_decoder(tmp_path, config)
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    weight_map = shard(tmp_path)
    for text in ("{", "[]", "{}", '{"weight_map": {"model.norm.weight": 3}}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ValueError, match=r"index\.json (is corrupt|is not valid JSON|holds a list)"):
            load_decoder(tmp_path, config)
    weight_map[Q] = weight_map["lm_head.weight"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=rf"model-00001-of-00003\.safetensors lacks tensor '{Q}'"):
        load_decoder(tmp_path, config)
