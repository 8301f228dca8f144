"""Weights from safetensors folders: dtypes, shards, and errors that name the file."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_decoders import assert_equal_weights, random_decoder
from safetensors.numpy import load_file, save_file

from tca_jax.models.config import ModelConfig, read_config
from tca_jax.models.names import EMBEDDING, HEAD
from tca_jax.models.params import load_checkpoint, save_decoder

INDEX = "model.safetensors.index.json"
Q, K = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qk")
V_BIAS = "model.layers.1.self_attn.v_proj.bias"


def shard(folder):
    """Splits `model.safetensors` into three files with an index; neighbours, and parts of parameters, go apart."""
    tensors = load_file(folder / "model.safetensors")
    weight_map = {}
    for part in range(3):
        file, names = f"model-{part + 1:05}-of-00003.safetensors", sorted(tensors)[part::3]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "stored", "wanted", "sharded"),
    [
        ("llama", "float32", "float32", True),
        ("qwen2", "bfloat16", "float32", False),
        ("qwen3", "float32", "float16", False),
        ("llama", "float16", "bfloat16", False),
    ],
)
def test_saved_weights_load_back(family, stored, wanted, sharded, config_entries, tmp_path):
    biased = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    decoder, calls = random_decoder(ModelConfig.from_hf(config_entries(family, **biased))), []
    save_decoder(tmp_path, decoder, stored)
    assert read_config(tmp_path) == dataclasses.replace(decoder.config, dtype_name=stored)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
    if sharded:
        weight_map = shard(tmp_path)
        assert weight_map[Q] != weight_map[K]  # one parameter from two files
    loaded = load_checkpoint(tmp_path, decoder.config, getattr(jnp, wanted), lambda *call: calls.append(call)).decoder
    expected = jax.tree.map(lambda x: x.astype(stored).astype(wanted), nnx.state(decoder))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), expected)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(loaded))} == {loaded.dtype} == {jnp.dtype(wanted)}
    # One compilation serves both.
    assert (nnx.graphdef(loaded) == nnx.graphdef(decoder)) == (wanted == "float32")
    total = sum(jnp.dtype(stored).itemsize * x.size for x in jax.tree.leaves(nnx.state(decoder)))
    assert calls[-1] == (total, total)
    assert calls == sorted(set(calls))


def test_a_tied_checkpoint_may_hold_a_head(config_entries, tmp_path):
    decoder = random_decoder(ModelConfig.from_hf(config_entries(tie_word_embeddings=True)))
    save_decoder(tmp_path, decoder, jnp.bfloat16)
    rewrite(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING]}))
    assert load_checkpoint(tmp_path, decoder.config).decoder.head is None
    rewrite(tmp_path, lambda tensors: tensors.update({HEAD: tensors[HEAD] * 2}))
    with pytest.warns(UserWarning, match=r"'lm_head\.weight' differs from the embedding"):
        untied = load_checkpoint(tmp_path, decoder.config).decoder
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
def test_tensors_of_other_parts_are_ignored(name, warns, config, tmp_path):
    decoder = random_decoder(config)
    save_decoder(tmp_path, decoder, jnp.float32)
    rewrite(tmp_path, lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    with pytest.warns(UserWarning, match=f"ignored: '{name}'") if warns else contextlib.nullcontext():
        assert_equal_weights(load_checkpoint(tmp_path, config, jnp.float32).decoder, decoder)


def test_names_may_lack_their_prefix(config_entries, tmp_path):
    """As in checkpoints of LlamaModel."""
    decoder = random_decoder(ModelConfig.from_hf(config_entries(tie_word_embeddings=True)))
    save_decoder(tmp_path, decoder, jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    change = {"architectures": ["LlamaModel"], "torch_dtype": "auto"}
    (tmp_path / "config.json").write_text(json.dumps(decoder.config.to_hf() | change))
    assert_equal_weights(load_checkpoint(tmp_path, read_config(tmp_path), jnp.float32).decoder, decoder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), rf"lacks tensor '{Q}'"),
        (lambda t: t.pop(V_BIAS), rf"lacks tensor '{V_BIAS}'"),
        (lambda t: t.update({Q: t[Q][:-1]}), rf"model\.safetensors: tensor '{Q}' has shape \[31, 32\] .*\[32, 32\]"),
        # As wide as queries, in place of keys.
        (lambda t: t.update({K: t[Q]}), rf"model\.safetensors: tensor '{K}' has shape \[32, 32\] .*\[16, 32\]"),
        (lambda t: t.update({Q: t[Q].astype(np.int8)}), rf"'{Q}' has .* and dtype I8, .* one of \['F32', 'BF16'"),
        (lambda t: t.update({Q + "_scale": t[Q]}), rf"tensor '{Q}_scale' has no place in the model"),
    ],
)
def test_wrong_tensors_are_named(change, message, config, tmp_path):
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, config)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 10**9}, r"lacks tensor 'model\.layers\.999999999\.mlp\.down_proj\.weight'"),
        ({"num_heads": 10**9}, r"0\.self_attn\.o_proj\.weight' has shape \[32, 32\] .* \[32, 4000000000\]"),
        ({"num_kv_heads": 1}, r"0\.self_attn\.k_proj\.bias' has shape \[16\] .* \[4\]"),
    ],
)
def test_other_sizes_are_refused(sizes, message, config, tmp_path):
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, dataclasses.replace(config, **sizes))


THIRD = "model-00003-of-00003.safetensors"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (THIRD, None, "is missing"),
        (THIRD, b"", "is corrupt or incomplete"),
        (INDEX, None, f"holds neither .*{INDEX} nor a GGUF file"),
        (INDEX, json.dumps({"weight_map": {Q: THIRD}}).encode(), rf"{THIRD} lacks tensor '{Q}'"),
    ],
)
def test_damaged_files_are_named(file, content, message, config, tmp_path):
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    assert shard(tmp_path)[Q] != THIRD
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_checkpoint(tmp_path, config)
