"""GGUF checkpoints: parameters equal those of safetensors; every type, several files, damaged and unsupported files."""

import dataclasses
import shutil
import struct
import sys

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.quants import _type_traits, dequantize
from gguf_files import GgufFile, byte_tokenizer, llama3_factors
from random_decoders import assert_equal_weights, random_decoder
from tiny import CONFIG

import tca_jax
from tca_jax.errors import UserError
from tca_jax.loading import open_checkpoint
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.gguf import find_gguf, open_gguf
from tca_jax.models.params import load_checkpoint, save_decoder
from tca_jax.models.rope import RopeConfig

Type = gguf.GGMLQuantizationType
TYPES = [Type.F32, Type.F16, *_type_traits]
SIZED = dataclasses.replace(CONFIG, vocab_size=258, hidden_size=64, rope=RopeConfig(theta=500_000.0))
LLAMA3 = RopeConfig("llama3", theta=500_000.0, factor=32.0, original_max_positions=8192)
CONFIGS = {
    "llama": dataclasses.replace(SIZED, tie_embeddings=True, qkv_bias=True, o_bias=True, mlp_bias=True, rope=LLAMA3),
    "qwen2": dataclasses.replace(SIZED, family="qwen2", num_layers=3, rms_norm_eps=1e-6, qkv_bias=True),
    "qwen3": dataclasses.replace(SIZED, family="qwen3", head_dim=24, qk_norm=True),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Every kind of parameter but the QK norm, in safetensors."""
    folder = tmp_path_factory.mktemp("safetensors")
    save_decoder(folder, random_decoder(CONFIGS["llama"]), jnp.float32)
    return folder


@pytest.fixture(scope="module")
def file(checkpoint):
    """`checkpoint`, with a tokenizer."""
    return GgufFile.of_checkpoint(checkpoint).changed(byte_tokenizer())


def assert_equal_tensors(a, b):
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        np.testing.assert_array_equal(a.tensors[name][:], b.tensors[name][:])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_equal_those_of_safetensors(config, tmp_path):
    save_decoder(tmp_path, random_decoder(config), jnp.float32)
    path = GgufFile.of_checkpoint(tmp_path).write(tmp_path / "model.gguf")
    found = open_gguf(path).config()
    assert found == config
    ours, expected = load_checkpoint(path, found, jnp.float32), load_checkpoint(tmp_path, config, jnp.float32)
    assert_equal_weights(ours.decoder, expected.decoder)
    assert fingerprint(ours.decoder) == fingerprint(expected.decoder)


SCALING = ".rope.scaling."
LINEAR = RopeConfig("linear", 500_000.0, factor=2.5, original_max_positions=4096)
YARN = RopeConfig("yarn", 500_000.0, 4096, 4.0, attention_factor=0.1 * np.log(4) + 1)
OTHER_YARN = {"original_max_positions": 16, "attention_factor": 0.5 * YARN.attention_factor}
OTHER_YARN |= {"beta_fast": 24.0, "beta_slow": 2.0}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, RopeConfig(theta=500_000.0)),
        ({".rope.freq_base": None}, RopeConfig(theta=10_000.0)),
        ({f"{SCALING}type": "none", f"{SCALING}factor": 4.0}, RopeConfig(theta=500_000.0)),
        ({f"{SCALING}type": "linear", f"{SCALING}factor": 2.5}, LINEAR),
        ({f"{SCALING}factor": 2.5}, LINEAR),
        ({".rope.scale_linear": 2.5}, LINEAR),
        ({f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0}, YARN),
        (
            {f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0, f"{SCALING}attn_factor": 0.5}
            | {f"{SCALING}original_context_length": 16}
            | {f"{SCALING}yarn_beta_fast": 24.0, f"{SCALING}yarn_beta_slow": 2.0},
            dataclasses.replace(YARN, **OTHER_YARN),
        ),
    ],
)
def test_rope_scaling_is_read(keys, expected, file, tmp_path):
    path = file.changed(keys).with_tensors({"rope_freqs.weight": None}).write(tmp_path / "model.gguf")
    assert open_gguf(path).config().rope == expected


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales may be infinite
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_types_dequantize_chunk_by_chunk(kind, tmp_path, monkeypatch):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(kind).integers(0, 256, (24, 512 // block * size), np.uint8)
    tensors = {"token_embd.weight": stored, "output_norm.weight": stored[0]}
    file = GgufFile("qwen2", {}, tensors, dict.fromkeys(tensors, kind))
    monkeypatch.setattr("tca_jax.models.gguf._CHUNK", 5 * 512 + 1)  # rows of a chunk: 5, of the last: 4
    opened, name = open_gguf(file.write(tmp_path / "model.gguf")), "model.embed_tokens.weight"
    expected = dequantize(stored, kind)
    np.testing.assert_array_equal(opened.tensors[name][:], expected)
    part = opened.get_slice(name)
    assert part.shape == (24, 512)
    for index in (np.s_[3:17, 100:301], np.s_[:, 7:9], np.s_[20:]):
        np.testing.assert_array_equal(part[index], expected[index])
    np.testing.assert_array_equal(opened.tensors["model.norm.weight"][:], expected[0])
    np.testing.assert_array_equal(opened.get_slice("model.norm.weight")[40:70], expected[0, 40:70])


@pytest.fixture
def parts(file, tmp_path):
    """Files as gguf-split makes them, alone in a folder."""
    folder = tmp_path / "parts"
    folder.mkdir()
    file.write(folder / "model.gguf", split_max_tensors=10)
    return sorted(folder.iterdir())


def pieces(file, folder, first=0, digits=2):
    """One file in three pieces, as `split -d` makes them; tensors span two."""
    content = file.to_bytes()
    folder.mkdir()
    ends = [0, len(content) // 3, len(content) // 2 + 1, len(content)]
    paths = [folder / f"model.gguf.{first + i:0{digits}}" for i in range(3)]
    for path, start, end in zip(paths, ends, ends[1:], strict=False):
        path.write_bytes(content[start:end])
    return paths


@pytest.mark.usefixtures("no_type_checks")
def test_files_in_parts_open_from_any(parts, file, tmp_path):
    whole = open_gguf(file.write(tmp_path / "model.gguf"))
    assert len(parts) > 2
    paths = [find_gguf(parts[0].parent), *parts]
    for numbered in (pieces(file, tmp_path / "from 0"), pieces(file, tmp_path / "from 1", first=1, digits=1)):
        paths += map(find_gguf, (numbered[0].parent, numbered[0].with_name("model.gguf"), *numbered))
    for path in paths:
        opened = open_gguf(path)
        assert_equal_tensors(opened, whole)
        assert opened.config() == whole.config()
    content = parts[1].read_bytes()  # pieces of a part
    for number, part in enumerate((content[:1000], content[1000:])):
        parts[1].with_name(f"{parts[1].name}.{number:02}").write_bytes(part)
    parts[1].unlink()
    assert_equal_tensors(open_gguf(find_gguf(parts[0].parent)), whole)


def test_missing_files_are_named(parts, file, tmp_path):
    moved = shutil.copy(parts[0], tmp_path / "renamed.gguf")
    with pytest.raises(UserError, match=rf"renamed\.gguf: split\.count = {len(parts)}, but there are 1"):
        open_gguf(moved)
    parts[1].unlink()
    with pytest.raises(FileNotFoundError, match=rf"{parts[1].name} is missing"):
        open_gguf(parts[2])
    numbered = pieces(file, tmp_path / "pieces")
    numbered[2].unlink()
    with pytest.raises(
        UserError, match=r"model\.gguf cannot be read: truncated: tensor 'blk\.\d\.\w+\.weight' ends at byte"
    ):
        open_gguf(numbered[0])
    numbered[2].write_bytes(b"")
    numbered[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.gguf: pieces \[1\] are missing \(there are \[0, 2\]\)"):
        open_gguf(numbered[0])


def test_a_folder_means_one_checkpoint(parts, file, tmp_path):
    file.write(parts[0].with_name("other.gguf"))
    with pytest.raises(UserError, match=r"parts holds several GGUF checkpoints \(model-.*, other\.gguf\)"):
        find_gguf(parts[0].parent)
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path / "nowhere.gguf") is None
    path = file.write(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) == path
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None


def patched(content, at, format_, value, offset=0):
    """Writes a number at a place, or `offset` bytes behind a text.

    Behind a key are the type of its value (0) and the value (4); behind a tensor's name its axes (0), sizes (4), type
    and place.
    """
    start = at if isinstance(at, int) else content.index(at.encode()) + len(at) + offset
    return content[:start] + struct.pack("<" + format_, value) + content[start + struct.calcsize("<" + format_) :]


def cut(file, share):
    """Leaves a share of the header, or of header and data where it is above 1."""
    content = file.to_bytes()
    header = len(content) - sum(tensor.nbytes for tensor in file.tensors.values())
    return content[: int(header * share if share <= 1 else header + (share - 1) * (len(content) - header))]


def on_bytes(change, *arguments, **keys):
    return lambda file: change(file.changed(keys).to_bytes(), *arguments)


def keyed(key, value, **tensors):
    return lambda file: file.changed({key: value}).with_tensors(tensors)


def with_tensor(name, value):
    return lambda file: file.with_tensors({name: value})


FACTORS, EMBEDDING, QUERIES = "rope_freqs.weight", "token_embd.weight", "blk.0.attn_q.weight"
BAD = {
    "empty": (lambda file: b"", "truncated or corrupt: 4 bytes"),
    "half the data": (lambda file: cut(file, 1.5), r"truncated: tensor 'blk\.\d\.\w+\.\w+' ends at byte"),
    "long": (on_bytes(lambda content: content + bytes(32)), "32 bytes follow the last tensor"),
    "magic": (on_bytes(lambda content: b"GGML" + content[4:]), "it does not begin with b'GGUF'"),
    "LFS": (lambda file: b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
    "version": (on_bytes(patched, 4, "I", 1), r"GGUF version 1: must be one of \[2, 3\]"),
    "big-endian": (on_bytes(patched, 4, "I", 3 << 24), r"\(big-endian\)"),
    "endless keys": (on_bytes(patched, 16, "Q", 2**60), "truncated or corrupt"),
    "endless array": (on_bytes(patched, "tokenizer.ggml.tokens", "Q", 2**40, 8), "truncated or corrupt"),
    "UTF-8": (
        on_bytes(lambda content: content.replace(b"llama.block", b"\xffllama.bloc")),
        "'utf-8' codec can't decode",
    ),
    "value type": (on_bytes(patched, "llama.block_count", "I", 77, 0), "has the unknown value type 77"),
    "second key": (on_bytes(lambda x: x.replace(b"a.b", b"a.a"), **{"a.a": 1, "a.b": 1}), "a second key 'a.a'"),
    "alignment": (keyed("general.alignment", 24), "general.alignment = 24, must be a power of two"),
    "architecture": (lambda file: dataclasses.replace(file, arch="gemma3"), "architecture = 'gemma3' is not supported"),
    "missing key": (keyed(".block_count", None), "llama.block_count is missing"),
    "NaN": (keyed(".rope.freq_base", float("nan")), "rope.freq_base = nan: must be a positive number"),
    "heads by layer": (keyed(".attention.head_count", [4, 2]), "head_count = .*: must be an integer"),
    "experts": (keyed(".expert_count", 8), "llama.expert_count = 8: must be 0"),
    "partial RoPE": (keyed(".rope.dimension_count", 8), "rope.dimension_count = 8: must be the head size 16"),
    "RoPE type": (keyed(".rope.scaling.type", "longrope", **{FACTORS: None}), "'longrope' is not supported"),
    "two scalings": (keyed(".rope.scaling.factor", 4.0), f"'linear' is not supported: .*beside tensor '{FACTORS}'"),
    "RoPE factors": (with_tensor(FACTORS, 1.01 * llama3_factors(16, 500_000.0, 32.0)), f"'{FACTORS}' is not supported"),
    "no embedding": (with_tensor(EMBEDDING, None), f"tensor '{EMBEDDING}' is missing"),
    "tokens": (with_tensor(EMBEDDING, np.ones((9, 64), np.float32)), f"'{EMBEDDING}' has 9 rows: must have one"),
    "no keys": (with_tensor("blk.1.attn_k.weight", None), "lacks tensor 'model.layers.1.self_attn.k_proj.weight'"),
    "other tensor": (with_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)), "'model.layers.0.attn_sinks.we"),
    "shape": (with_tensor("output_norm.weight", np.ones(32, np.float32)), r"'model.norm.weight' has shape \[32"),
    "query rows": (with_tensor(QUERIES, np.ones((60, 64), np.float32)), f"'{QUERIES}' has 60 rows for 4 heads"),
    "second tensor": (
        on_bytes(lambda content: content.replace(b"blk.1.attn_v.weight", b"blk.0.attn_v.weight")),
        "there is a second tensor 'blk.0.attn_v.weight'",
    ),
    "five axes": (on_bytes(patched, EMBEDDING, "I", 5, 0), f"tensor '{EMBEDDING}' has 5 axes"),
    "whole numbers": (on_bytes(patched, EMBEDDING, "I", Type.I32, 20), f"'{EMBEDDING}' has the type I32: "),
    "unknown type": (on_bytes(patched, EMBEDDING, "I", 99, 20), f"'{EMBEDDING}': 99 is not a valid"),
    "half a block": (on_bytes(patched, QUERIES, "I", Type.Q4_K, 20), r"has shape \[64, 64\] in type Q4_K"),
    "other type": (on_bytes(patched, QUERIES, "I", Type.F16, 20), r"must begin at"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_files_are_refused_unread(change, message, file, tmp_path, monkeypatch):
    monkeypatch.setattr("tca_jax.models.params.read_tensor", lambda *_, **__: pytest.fail("a tensor was read"))
    changed, path = change(file), tmp_path / "bad.gguf"
    path.write_bytes(changed if isinstance(changed, bytes) else changed.to_bytes())
    with pytest.raises(UserError, match=message) as caught:
        load_checkpoint(path, open_gguf(path).config(), jnp.float32)
    assert str(path) in str(caught.value)


def test_the_gguf_package_is_optional(file, tmp_path, monkeypatch):
    path = file.write(tmp_path / "model.gguf")
    for module in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, module, None)  # importing it is now an error
    with pytest.raises(UserError, match=r"model\.gguf: GGUF files need the package gguf: pip install gguf"):
        tca_jax.load(path)


class Checked(Exception):
    """A checkpoint has passed all checks."""


@pytest.mark.usefixtures("no_type_checks")  # they take most of the time
@pytest.mark.filterwarnings("ignore")  # damaged numbers overflow, a damaged pre-tokenizer is replaced
def test_random_damage_is_refused_or_harmless(file, tmp_path, monkeypatch):
    vocabulary = {"tokens": ["a", "b", "ab", "<|im_end|>"], "token_type": [1, 1, 1, 3], "merges": ["a b"]}
    vocabulary["eos_token_id"] = 3
    file = file.changed({f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()})
    path, content, rng = tmp_path / "model.gguf", file.to_bytes(), np.random.default_rng(0)
    path.write_bytes(content)
    intact = open_gguf(path)
    header = next(iter(intact.tensors.values())).offset

    def is_loaded():
        try:
            opened = open_gguf(path)
            with pytest.raises(Checked):
                load_checkpoint(path, open_checkpoint(path).config, jnp.float32)
        except (UserError, FileNotFoundError) as error:
            if str(path) not in str(error):
                raise
            return False
        assert_equal_tensors(opened, intact)
        return True

    def placed(*_, **__):
        raise Checked

    monkeypatch.setattr("tca_jax.models.params.read_tensor", placed)
    loaded = 0
    for _ in range(200):
        at, damage = int(rng.integers(header)), int(rng.integers(1, 256))
        path.write_bytes(patched(content, at, "B", content[at] ^ damage))
        loaded += is_loaded()
    assert 0 < loaded < 100


def test_a_file_loads_and_generates(file, tmp_path):
    path = file.write(tmp_path / "model.gguf")
    lm = tca_jax.load(path)
    output = tca_jax.generate(lm, "the three", max_new_tokens=4, stop_token_ids=())
    assert (lm.name, lm.eos_token_ids) == ("model.gguf", (257,))
    assert lm.tokenizer.encode("the") == [256, ord("e")]
    assert len(output.tokens[0]) == 4
    quantized = tca_jax.load(path, dtype=jnp.bfloat16, weights="fp8")
    assert (quantized.dtype, quantized.weights_dtype) == (jnp.bfloat16, jnp.float8_e4m3fn)
    assert quantized.fingerprint == lm.fingerprint
