"""GGUF checkpoints: header, metadata, config and tensors, dequantized one by one.

The header is parsed here: `gguf.GGUFReader` takes 8 seconds for a vocabulary of 150,000 tokens and loops on damaged
array lengths. Types and their dequantization come from the `gguf` package.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from tca_jax.errors import explaining, require
from tca_jax.models.config import FAMILIES, ModelConfig
from tca_jax.models.json_object import LFS_POINTER, Entries, is_lfs_pointer
from tca_jax.models.rope import RopeConfig, inverse_frequencies

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(?!00000)(\d{5})\.gguf")  # a file of llama.cpp's gguf-split: each has a header
_PIECE = re.compile(r"(.+\.gguf)\.(\d{1,4})")  # a piece of one file, as `split -d` names them
_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # value type -> struct format
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_CHUNK = 2**22  # numbers that one thread dequantizes at a time
_BUFFER = 2**24  # bytes of header that are read at a time

# A tensor of GGUF -> its name in a Hugging Face checkpoint.
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor, from a header; parts are read as those of a slice of `safetensors`."""

    name: str  # in the GGUF file
    source: _Bytes
    shape: tuple[int, ...]  # as in a Hugging Face checkpoint: outputs first
    type: Any  # gguf.GGMLQuantizationType
    offset: int  # bytes, in `source`
    permuted_heads: int  # heads whose rows pair up as (2i, 2i + 1); 0: they pair up as (i, i + d / 2), or it has none

    def read(self, rows: slice = slice(None)) -> Float32[np.ndarray, ...]:
        """Rows of axis 0, dequantized, in the order of the file."""
        from gguf.quants import dequantize

        if len(self.shape) == 1:  # its blocks run along axis 0
            return dataclasses.replace(self, shape=(1, *self.shape)).read()[0][rows]
        start, stop, _ = rows.indices(self.shape[0])
        of_row, width = _stored_bytes(self.shape[1:], self.type), math.prod(self.shape[1:])
        found = np.empty((stop - start, width), np.float32)
        step = max(1, _CHUNK // width)

        def fill(first: int) -> None:
            count = min(step, stop - first)
            stored = self.source.read(self.offset + first * of_row, count * of_row).reshape(count, of_row)
            found[first - start : first - start + count] = dequantize(stored, self.type).reshape(count, width)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(fill, range(start, stop, step)))
        return found.reshape(stop - start, *self.shape[1:])

    def __getitem__(self, index: Any) -> np.ndarray:
        """A part of the tensor, dequantized, as a Hugging Face checkpoint has it."""
        first, *others = index if isinstance(index, tuple) else (index,)
        if not self.permuted_heads and isinstance(first, slice):
            return self.read(first)[(slice(None), *others)]
        value = self.read()
        if self.permuted_heads:
            pairs = value.reshape(self.permuted_heads, -1, 2, *value.shape[1:])  # [heads, d / 2, 2, ...]
            value = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)
        return value[index]


@dataclasses.dataclass(frozen=True, eq=False)
class Gguf:
    """An open GGUF checkpoint; reads tensors as an open safetensors file does."""

    path: Path  # the file, or the first of several
    metadata: Mapping[str, Any]  # values by key; arrays of strings are lists, arrays of numbers are NumPy arrays
    tensors: Mapping[str, GgufTensor]  # by their names in a Hugging Face checkpoint
    rope_factors: GgufTensor | None  # LLaMA 3.1's stretch of each dimension pair

    def __str__(self) -> str:
        return str(self.path)

    def get_slice(self, name: str) -> GgufTensor:
        """A tensor that is read by part."""
        return self.tensors[name]

    def config(self) -> ModelConfig:
        """The model's shape; ValueError with the file's name where a key or tensor is missing or not supported."""
        with explaining(str(self.path), ValueError):
            return ModelConfig.from_hf(self._entries())

    def _entries(self) -> dict[str, Any]:
        """The config.json of the model."""
        keys = _keys(self.metadata)
        require("model.embed_tokens.weight" in self.tensors, "tensor 'token_embd.weight' is missing")
        rows, tokens = self.tensors["model.embed_tokens.weight"].shape[0], self.metadata.get("tokenizer.ggml.tokens")
        count = len(tokens) if isinstance(tokens, list) else 0
        must = f"must have one for each of the file's {count:,} tokens"
        require(count <= rows, f"tensor 'token_embd.weight' has {rows:,} rows: {must}")
        for key in ("expert_count", "attention.sliding_window"):
            if keys.values.get(key):
                keys.refuse(key, "0")
        heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
        head_dim = keys.integer("attention.key_length", hidden // heads)
        if keys.integer("rope.dimension_count", head_dim) != head_dim:
            keys.refuse("rope.dimension_count", f"the head size {head_dim}")
        entries: dict[str, Any] = {
            "model_type": self.metadata["general.architecture"],
            "vocab_size": rows,
            "hidden_size": hidden,
            "intermediate_size": keys.integer("feed_forward_length"),
            "num_hidden_layers": keys.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": keys.integer("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "attention_bias": "model.layers.0.self_attn.o_proj.bias" in self.tensors,
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in self.tensors,
            "dtype": "float32",  # what tensors are dequantized to
        }
        return entries | {"rope_parameters": self._rope(keys, head_dim, entries["max_position_embeddings"])}

    def _rope(self, keys: Entries, head_dim: int, max_positions: int) -> dict[str, Any]:
        """The entries of `rope_parameters`."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10_000.0)}
        names = ("rope.scaling.factor", "rope.scale_linear")  # the second is older
        factor = next((keys.number(name) for name in names if keys.values.get(name)), 1.0)
        kind = keys.get("rope.scaling.type", "none" if factor == 1 else "linear")  # as llama.cpp takes it
        allowed = ("none",) if self.rope_factors else ("none", "linear", "yarn")
        must = f"must be none, linear or yarn, and none beside tensor {_ROPE_FACTORS!r}"
        given = f"{keys.name.format('rope.scaling')} of type {kind!r}"
        require(kind in allowed, f"{given} is not supported: {must}")
        if self.rope_factors:
            return _llama3(rope, head_dim, max_positions, self.rope_factors[:])
        if kind == "none":
            return rope
        rope |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = keys.integer("rope.scaling.original_context_length", max_positions)
            mscale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            rope |= {
                "original_max_position_embeddings": original,
                "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
                "attention_factor": keys.number("rope.scaling.attn_factor", 1.0) * mscale,
            }
        return rope


def _llama3(rope: dict[str, Any], head_dim: int, max_positions: int, stretched: np.ndarray) -> dict[str, Any]:
    """RoPE of LLaMA 3.1, whose options GGUF keeps as a factor for each dimension pair."""
    rope = rope | _LLAMA3 | {"rope_type": "llama3", "factor": float(stretched.max(initial=1.0))}
    config = RopeConfig.from_hf(rope, max_positions=max_positions)
    plain = inverse_frequencies(head_dim, RopeConfig(theta=config.theta))
    found = inverse_frequencies(head_dim, config)
    fits = stretched.shape == found.shape and np.allclose(plain, found * stretched, rtol=1e-3)
    require(fits, f"tensor {_ROPE_FACTORS!r} is not supported: must have the factors of LLaMA 3.1, {_LLAMA3}")
    return rope


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one of a folder without other weights; None for neither."""
    if path.is_dir():
        if (path / "config.json").exists() and any(path.glob("*.safetensors*")):
            return None
        found = {_parts(each)[0] for each in map(_file, path.iterdir()) if each.suffix == ".gguf"}
        names = ", ".join(sorted(each.name for each in found))
        require(len(found) <= 1, f"{path} holds several GGUF checkpoints ({names}): pass the path of one")
        return next(iter(found), None)
    file = _file(path)
    return file if file.suffix == ".gguf" and (path.exists() or _pieces(path)) else None


def open_gguf(path: Path) -> Gguf:
    """Reads the headers of a GGUF checkpoint; errors name the file and the tensor.

    `path` may be any file of several by gguf-split (`-00001-of-00003.gguf`), or any of the numbered pieces of a file
    (`model.gguf.00`, as `split -d` makes them), or their common name.
    """
    with explaining(f"{path}: GGUF files need the package gguf: pip install gguf, or the extra 'gguf'", ImportError):
        from gguf import GGML_QUANT_SIZES
        from gguf.quants import dequantize
    metadata: dict[str, Any] = {}
    stored: dict[str, GgufTensor] = {}
    sources = [_Bytes.open(part) for part in _parts(_file(path))]
    for source in sources:
        with explaining(f"{source.name} cannot be read", ValueError):
            found, tensors = _Header(source).read()
            for tensor in tensors:
                require(tensor.name not in stored, f"there is a second tensor {tensor.name!r}")
                stored[tensor.name] = tensor
        metadata = metadata or found
    with explaining(str(path), ValueError):
        for key, count in (("split.count", len(sources)), ("split.tensors.count", len(stored))):
            fits = metadata.get(key, 0) in (0, count)
            require(fits, f"{key} = {metadata.get(key)}, but there are {count}: pass one of files -00001-of-0000N")
        permuted = _permuted_heads(metadata)
    named = {}
    for tensor in stored.values():
        given = f"{tensor.source.name}: tensor {tensor.name!r} has"
        with explaining(f"{given} the type {tensor.type.name}: convert the file to another", NotImplementedError):
            dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.type][1]), np.uint8), tensor.type)
        heads = next((heads for part, heads in permuted.items() if f".{part}." in tensor.name), 0)
        fits = not heads or tensor.shape[0] % (2 * heads) == 0
        require(fits, f"{given} {tensor.shape[0]} rows for {heads} heads")
        named[_hf_name(tensor.name)] = dataclasses.replace(tensor, permuted_heads=heads)
    return Gguf(path, metadata, named, named.pop(_ROPE_FACTORS, None))


def _keys(metadata: Mapping[str, Any]) -> Entries:
    """Metadata of the architecture; arrays with the same integer for all layers are that integer."""
    arch = metadata.get("general.architecture")
    require(arch in FAMILIES, f"general.architecture = {arch!r} is not supported: must be one of {list(FAMILIES)}")
    found = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    for key, value in found.items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size and (value == value[0]).all():
            found[key] = int(value[0])
    return Entries(found, f"{arch}.{{}}")


def _permuted_heads(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Heads of the projections whose rows llama.cpp's converter permutes: those of LLaMA."""
    keys = _keys(metadata)
    if metadata["general.architecture"] != "llama":
        return {}
    heads = keys.integer("attention.head_count")
    return {"attn_q": heads, "attn_k": keys.integer("attention.head_count_kv", heads)}


def _hf_name(name: str) -> str:
    """A tensor's name in a Hugging Face checkpoint; an unknown one is kept, and refused when it is loaded."""
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d{1,6})\.(\w+)", stem):
        return f"model.layers.{int(match[1])}.{_OF_LAYER.get(match[2], match[2])}.{kind}"
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name


def _file(path: Path) -> Path:
    """The file that a piece is of; other paths as they are."""
    return path.with_name(match[1]) if (match := _PIECE.fullmatch(path.name)) else path


def _parts(path: Path) -> list[Path]:
    """The files of a checkpoint that gguf-split has made, or the only one."""
    if not (match := _SPLIT.fullmatch(path.name)):
        return [path]
    return [path.with_name(f"{match[1]}-{n:05}-of-{match[3]}.gguf") for n in range(1, int(match[3]) + 1)]


def _pieces(path: Path) -> list[Path]:
    """Numbered pieces of a file, in order; none may be missing between two others."""
    matches = {each: _PIECE.fullmatch(each.name) for each in path.parent.glob("*.gguf.*")}
    numbered = {int(match[2]): each for each, match in matches.items() if match and match[1] == path.name}
    missing = sorted(set(range(int(0 not in numbered), max(numbered, default=0))) - numbered.keys())
    require(not missing, f"{path}: pieces {missing} are missing (there are {sorted(numbered)})", FileNotFoundError)
    return [numbered[number] for number in sorted(numbered)]


@dataclasses.dataclass(frozen=True)
class _Bytes:
    """The bytes of a file, or of its pieces one after the other."""

    name: Path
    parts: tuple[tuple[Path, int, int], ...]  # file, its first byte, its end

    @classmethod
    def open(cls, path: Path) -> _Bytes:
        files = [path] if path.exists() else _pieces(path)
        require(files, f"{path} is missing", FileNotFoundError)
        ends = [0, *itertools.accumulate(file.stat().st_size for file in files)]
        return cls(path, tuple(zip(files, ends, ends[1:], strict=False)))

    @property
    def size(self) -> int:
        return self.parts[-1][2]

    def read(self, offset: int, count: int) -> np.ndarray:
        """Bytes, uint8; fewer than asked for at the end."""
        found = [np.empty(0, np.uint8)]
        for file, start, stop in self.parts:
            first, last = max(offset, start), min(offset + count, stop)
            if first < last:
                found.append(np.fromfile(file, np.uint8, last - first, offset=first - start))
        return found[1] if len(found) == 2 else np.concatenate(found)


class _Header:
    """The header of one file, read from its begin on; ValueError where it is damaged."""

    def __init__(self, source: _Bytes) -> None:
        self._source, self._at, self._start, self._buffer = source, 0, 0, b""

    def read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        """Metadata and tensors."""
        require(not is_lfs_pointer(self._source.parts[0][0]), LFS_POINTER)
        require(self._take(4) == _MAGIC, f"it does not begin with {_MAGIC!r}")
        version = self._number("I")
        other = " (big-endian)" if version & 0xFFFF == 0 else ""
        require(version in _VERSIONS, f"GGUF version {version}{other}: must be one of {list(_VERSIONS)}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            require(key not in metadata, f"there is a second key {key!r}")
            metadata[key] = self._value(key)
        infos = [self._info() for _ in range(num_tensors)]
        return metadata, self._tensors(infos, metadata.get("general.alignment", _ALIGNMENT))

    def _tensors(self, infos: list[tuple[str, tuple[int, ...], Any, int]], alignment: Any) -> list[GgufTensor]:
        """Tensors of a file; each begins where the one before it ends, which also shows most damage."""
        is_power = isinstance(alignment, int) and alignment > 0 and not alignment & (alignment - 1)
        require(is_power, f"general.alignment = {alignment!r}, must be a power of two")
        data, held, expected, found = -(-self._at // alignment) * alignment, self._source.size, 0, []
        for name, shape, type_, offset in infos:
            place = f"tensor {name!r} begins at byte {offset} of the data, must begin at {expected}"
            require(offset == expected, place)
            end = data + offset + _stored_bytes(shape, type_)
            require(end <= held, f"truncated: tensor {name!r} ends at byte {end:,}, the file has {held:,}")
            expected = -(-(end - data) // alignment) * alignment
            found.append(GgufTensor(name, self._source, shape, type_, data + offset, 0))
        rest = held - data - expected
        require(rest <= 0, f"{rest:,} bytes follow the last tensor")
        return found

    def _info(self) -> tuple[str, tuple[int, ...], Any, int]:
        """A tensor's name, shape, type and place."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, axes = self._string(), self._number("I")
        require(1 <= axes <= 4, f"tensor {name!r} has {axes} axes, must have 1 to 4")
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        with explaining(f"tensor {name!r}", ValueError):
            type_ = GGMLQuantizationType(self._number("I"))
        fits = all(0 < size < 2**31 for size in shape) and shape[-1] % GGML_QUANT_SIZES[type_][0] == 0
        require(fits, f"tensor {name!r} has shape {list(shape)} in type {type_.name}")
        return name, shape, type_, self._number("Q")

    def _value(self, key: str) -> Any:
        kind, count = self._number("I"), None
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
        require(kind in (*_SCALARS, _STRING), f"key {key!r} has the unknown value type {kind}")
        if kind == _STRING:
            return self._string() if count is None else [self._string() for _ in range(count)]
        if count is not None:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self._take(count * dtype.itemsize), dtype)
        value = self._number(_SCALARS[kind])
        # Of float32 the shortest decimal, as config.json has it: 1e-5, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _number(self, format_: str) -> Any:
        return struct.unpack("<" + format_, self._take(struct.calcsize("<" + format_)))[0]

    def _take(self, count: int) -> bytes:
        place = f"{count:,} bytes are announced at byte {self._at:,} of {self._source.size:,}"
        require(count <= self._source.size - self._at, f"truncated or corrupt: {place}")
        first = self._at - self._start
        if first + count > len(self._buffer):
            self._start, first = self._at, 0
            self._buffer = self._source.read(self._at, max(count, _BUFFER)).tobytes()
        self._at += count
        return self._buffer[first : first + count]


def _stored_bytes(shape: tuple[int, ...], type_: Any) -> int:
    from gguf.quants import quant_shape_to_byte_shape

    return math.prod(quant_shape_to_byte_shape(shape, type_))
