"""Weights between Hugging Face safetensors folders and the decoder: a tensor at a time, without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder

# Path in the decoder -> name in the checkpoint, and whether the checkpoint holds the transpose ([out, in]).
_NAMES: tuple[tuple[str, str, bool], ...] = (
    (r"embedding", r"model.embed_tokens.weight", False),
    (r"norm\.scale", r"model.norm.weight", False),
    (r"head\.kernel", r"lm_head.weight", True),
    (r"layers\.(\d+)\.attention_norm\.scale", r"model.layers.\1.input_layernorm.weight", False),
    (r"layers\.(\d+)\.mlp_norm\.scale", r"model.layers.\1.post_attention_layernorm.weight", False),
    (r"layers\.(\d+)\.attention\.([qk])_norm\.scale", r"model.layers.\1.self_attn.\2_norm.weight", False),
    (r"layers\.(\d+)\.attention\.([qkvo])\.kernel", r"model.layers.\1.self_attn.\2_proj.weight", True),
    (r"layers\.(\d+)\.attention\.([qkvo])\.bias", r"model.layers.\1.self_attn.\2_proj.bias", False),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)\.kernel", r"model.layers.\1.mlp.\2_proj.weight", True),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)\.bias", r"model.layers.\1.mlp.\2_proj.bias", False),
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_STORED_BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # dtypes that are read, and bytes of an element
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")  # a buffer that old LLaMA checkpoints hold


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor of the checkpoint, from the header of its file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """A parameter of the decoder."""

    path: tuple[Any, ...]
    variable: Any  # its `nnx.Param`, without a value
    transposed: bool

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.variable.shape[::-1] if self.transposed else self.variable.shape


def load_decoder(
    folder: Path,
    config: ModelConfig,
    dtype: DTypeLike = jnp.bfloat16,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Build the decoder from a checkpoint folder.

    Tensors go from the file to the default device one by one, so host memory stays near the largest of them.

    Args:
        folder: Holds `model.safetensors`, or `model.safetensors.index.json` and its shards.
        config: The model's shape, as `read_config(folder)` gives it.
        dtype: Dtype that weights are kept and computed in.
        progress: Called as `progress(bytes read, bytes in all)` after each tensor.

    Raises:
        FileNotFoundError: no safetensors file, or a shard is missing.
        ValueError: a corrupt file, a missing or unexpected tensor, or one of unexpected shape or dtype; the
            message names the file and the tensor.
    """
    folder = Path(folder)
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    wanted = {}
    for path, variable in nnx.to_flat_state(state):
        name, transposed = _checkpoint_name(path)
        wanted[name] = _Wanted(path, variable, transposed)
    stored = _read_headers(folder)
    _check_tensors(folder, wanted, stored)

    sizes = {name: math.prod(stored[name].shape) * _STORED_BYTES[stored[name].dtype] for name in wanted}
    done, loaded = 0, {}
    for file in sorted({stored[name].file for name in wanted}):
        with _opened(file) as shard:
            for name in (name for name in wanted if stored[name].file == file):
                target = wanted[name]
                array = _place(shard.get_tensor(name), dtype=jnp.dtype(dtype), transposed=target.transposed)
                # Transfers that queue up would each hold a tensor on the host, and so would the references to
                # finished ones, which JAX drops only when Python collects garbage (the youngest is enough).
                loaded[target.path] = target.variable.replace(jax.block_until_ready(array))
                gc.collect(0)
                done += sizes[name]
                if progress is not None:
                    progress(done, sum(sizes.values()))
    decoder: Decoder = nnx.merge(graphdef, nnx.from_flat_state(loaded))
    if config.tie_embeddings and _HEAD in stored:
        _check_tied_head(stored[_HEAD].file, decoder)
    return decoder


def save_decoder(
    folder: Path,
    decoder: Decoder,
    dtype: DTypeLike,
    config_entries: Mapping[str, Any] | None = None,
) -> None:
    """Write `model.safetensors` and `config.json` that transformers loads. Takes a host copy of all weights.

    Args:
        folder: Made if it does not exist.
        decoder: The model.
        dtype: Dtype of the stored weights: float32, bfloat16 or float16.
        config_entries: Entries added to config.json, such as `eos_token_id`.
    """
    name = jnp.dtype(dtype).name
    write_config(folder, dataclasses.replace(decoder.config, dtype_name=name), config_entries)
    tensors = {}
    for path, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        (name, transposed), value = _checkpoint_name(path), np.asarray(variable[...].astype(dtype))
        tensors[name] = np.ascontiguousarray(value.T if transposed else value)
    file = Path(folder) / _SINGLE
    save_file(tensors, file, metadata={"format": "pt"})  # transformers asks for the format
    shutil.copymode(file.with_name("config.json"), file)  # safetensors leaves it to its owner alone


def write_config(folder: Path, config: ModelConfig, entries: Mapping[str, Any] | None = None) -> None:
    """Write `config.json`, with `entries` added. Both transformers 4.x and 5.x read it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.to_hf() | dict(entries or {}), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


@functools.partial(jax.jit, static_argnames=("dtype", "transposed"))
def _place(tensor: Any, *, dtype: Any, transposed: bool) -> Array:
    """Onto the device; casting and transposing happen there."""
    tensor = tensor.astype(dtype)
    return tensor.T if transposed else tensor


def _checkpoint_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """Name of a parameter in the checkpoint, and whether it is stored transposed."""
    joined = ".".join(str(part) for part in path)
    for pattern, name, transposed in _NAMES:
        if match := re.fullmatch(pattern, joined):
            return match.expand(name), transposed
    raise AssertionError(f"parameter {joined} has no name in checkpoints")  # the table lacks a row


def _read_headers(folder: Path) -> dict[str, _Stored]:
    """Every tensor of the checkpoint, from the headers of its files."""
    stored: dict[str, _Stored] = {}
    for file, names in _files(folder).items():
        with _opened(file) as shard:
            lacking = set(names) - set(shard.keys())
            if lacking:
                raise ValueError(f"{file} lacks tensor {min(lacking)!r}, which {_INDEX} places there")
            for name in names:
                view = shard.get_slice(name)
                stored[name] = _Stored(file, tuple(view.get_shape()), view.get_dtype())
    return stored


def _files(folder: Path) -> dict[Path, list[str]]:
    """The checkpoint's files and the names of the tensors to read from each."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        with _opened(single) as shard:
            return {single: list(shard.keys())}
    if not index.is_file():
        raise FileNotFoundError(f"{folder} holds neither {_SINGLE} nor {_INDEX}: weights must be safetensors")
    files: dict[Path, list[str]] = {}
    try:
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            files.setdefault(folder / file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is corrupt: must be JSON with a 'weight_map' ({error!r})") from error
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{missing[0]} is missing: {_INDEX} lists it ({len(missing)} are missing)")
    return files


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file; what is wrong with it is raised with its name."""
    try:
        with safe_open(file, framework="numpy") as shard:
            yield shard
    except SafetensorError as error:
        raise ValueError(f"{file} is corrupt or incomplete: {error}") from error


def _check_tensors(folder: Path, wanted: Mapping[str, _Wanted], stored: Mapping[str, _Stored]) -> None:
    """Nothing is missing, misshapen or of a dtype that is not read, and nothing would be left out."""
    for name, target in wanted.items():
        if name not in stored:
            raise ValueError(f"{folder} lacks tensor {name!r}, which its config.json asks for")
        found = stored[name]
        if found.shape != target.stored_shape:
            raise ValueError(
                f"{found.file}: tensor {name!r} has shape {list(found.shape)}, "
                f"config.json asks for {list(target.stored_shape)}"
            )
        if found.dtype not in _STORED_BYTES:
            raise ValueError(
                f"{found.file}: tensor {name!r} has dtype {found.dtype}: must be one of {list(_STORED_BYTES)}"
            )
    for name, found in stored.items():
        # A head beside a tied embedding is compared with it once that is loaded.
        if name not in wanted and name != _HEAD and not _IGNORED.fullmatch(name):
            raise ValueError(f"{found.file}: tensor {name!r} has no place in the model of its config.json")


def _check_tied_head(file: Path, decoder: Decoder) -> None:
    """A checkpoint may repeat the embedding as its head, but not hold another one."""
    embedding = decoder.embedding[...]
    with _opened(file) as shard:
        head = shard.get_tensor(_HEAD)
    same = head.shape == embedding.shape
    if not same or not jnp.array_equal(_place(head, dtype=embedding.dtype, transposed=False), embedding):
        raise ValueError(
            f"{file}: {_HEAD!r} differs from the embedding, but config.json has tie_word_embeddings = true"
        )
