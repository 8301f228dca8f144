"""Weights between Hugging Face safetensors folders and the decoder: a tensor at a time, without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class _Row:
    """Where checkpoints keep a kind of parameter.

    Attributes:
        path: Its path in the decoder, a regular expression.
        names: Its tensors, as templates of the match.
        transposed: The checkpoint holds transposes ([out, in]).
        parts: Where there are several tensors, `(groups, widths)`: the parameter's last axis is
            [groups, sum(widths)], flattened, and each tensor fills its width of every group.
    """

    path: str
    names: tuple[str, ...]
    transposed: bool = False
    parts: Callable[[ModelConfig], tuple[int, tuple[int, ...]]] | None = None


def _by_kv_head(config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """The order of `SelfAttention.qkv`: each KV head's queries, then its key, then its value."""
    d = config.head_dim
    return config.num_kv_heads, (config.num_heads // config.num_kv_heads * d, d, d)


def _gate_and_up(config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """The order of `GatedMLP.gate_up`."""
    return 1, (config.intermediate_size, config.intermediate_size)


_LAYER, _HF_LAYER = r"layers\.(\d+)", r"model.layers.\1"
_QKV_WEIGHTS, _QKV_BIASES = (
    tuple(rf"{_HF_LAYER}.self_attn.{part}_proj.{kind}" for part in "qkv") for kind in ("weight", "bias")
)
_GATE_UP_WEIGHTS, _GATE_UP_BIASES = (
    tuple(rf"{_HF_LAYER}.mlp.{part}_proj.{kind}" for part in ("gate", "up")) for kind in ("weight", "bias")
)
_TABLE = (
    _Row(r"embedding", ("model.embed_tokens.weight",)),
    _Row(r"norm\.scale", ("model.norm.weight",)),
    _Row(r"head\.kernel", ("lm_head.weight",), transposed=True),
    _Row(rf"{_LAYER}\.attention_norm\.scale", (rf"{_HF_LAYER}.input_layernorm.weight",)),
    _Row(rf"{_LAYER}\.mlp_norm\.scale", (rf"{_HF_LAYER}.post_attention_layernorm.weight",)),
    _Row(rf"{_LAYER}\.attention\.qkv\.kernel", _QKV_WEIGHTS, transposed=True, parts=_by_kv_head),
    _Row(rf"{_LAYER}\.attention\.qkv\.bias", _QKV_BIASES, parts=_by_kv_head),
    _Row(rf"{_LAYER}\.attention\.([qk])_norm\.scale", (rf"{_HF_LAYER}.self_attn.\2_norm.weight",)),
    _Row(rf"{_LAYER}\.attention\.o\.kernel", (rf"{_HF_LAYER}.self_attn.o_proj.weight",), transposed=True),
    _Row(rf"{_LAYER}\.attention\.o\.bias", (rf"{_HF_LAYER}.self_attn.o_proj.bias",)),
    _Row(rf"{_LAYER}\.mlp\.gate_up\.kernel", _GATE_UP_WEIGHTS, transposed=True, parts=_gate_and_up),
    _Row(rf"{_LAYER}\.mlp\.gate_up\.bias", _GATE_UP_BIASES, parts=_gate_and_up),
    _Row(rf"{_LAYER}\.mlp\.down\.kernel", (rf"{_HF_LAYER}.mlp.down_proj.weight",), transposed=True),
    _Row(rf"{_LAYER}\.mlp\.down\.bias", (rf"{_HF_LAYER}.mlp.down_proj.bias",)),
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
class Parameter:
    """A parameter of the decoder and the tensors of the checkpoint that it is made of.

    Attributes:
        path: Its path in the decoder.
        variable: Its `nnx.Param`, with or without a value.
        names: Its tensors.
        transposed: The checkpoint holds transposes ([out, in]).
        groups: The parameter's last axis is `[groups, sum(widths)]`, flattened.
        widths: What each tensor fills of every group.
    """

    path: tuple[Any, ...]
    variable: Any
    names: tuple[str, ...]
    transposed: bool
    groups: int
    widths: tuple[int, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, not transposed."""
        shapes = [(*self.variable.shape[:-1], self.groups * width) for width in self.widths]
        return dict(zip(self.names, shapes, strict=True))

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in the checkpoint."""
        shape = self.shapes[name]
        return shape[::-1] if self.transposed else shape

    def join(self, tensors: Sequence[Array]) -> Array:
        """The parameter of its tensors, each as `_place` gives it."""
        return tensors[0] if len(tensors) == 1 else _join(tuple(tensors), groups=self.groups)


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
    made = parameters(abstract)
    wanted = {name: parameter for parameter in made for name in parameter.names}
    stored = _read_headers(folder)
    _check_tensors(folder, wanted, stored)

    sizes = {name: math.prod(stored[name].shape) * _STORED_BYTES[stored[name].dtype] for name in wanted}
    done, placed = 0, {}
    for file in sorted({stored[name].file for name in wanted}):
        with _opened(file) as shard:
            for name in (name for name in wanted if stored[name].file == file):
                array = _place(shard.get_tensor(name), dtype=jnp.dtype(dtype), transposed=wanted[name].transposed)
                # Transfers that queue up would each hold a tensor on the host, and so would the references to
                # finished ones, which JAX drops only when Python collects garbage (the youngest is enough).
                placed[name] = jax.block_until_ready(array)
                gc.collect(0)
                done += sizes[name]
                if progress is not None:
                    progress(done, sum(sizes.values()))
    loaded = {}
    for parameter in made:
        value = parameter.join([placed.pop(name) for name in parameter.names])
        loaded[parameter.path] = parameter.variable.replace(jax.block_until_ready(value))  # its tensors are freed
    decoder: Decoder = nnx.merge(nnx.graphdef(abstract), nnx.from_flat_state(loaded))
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
    tensors: dict[str, np.ndarray] = {}
    for parameter in parameters(decoder):
        parts = split(np.asarray(parameter.variable[...].astype(dtype)), parameter.groups, parameter.widths)
        for tensor, part in zip(parameter.names, parts, strict=True):
            tensors[tensor] = np.ascontiguousarray(part.T if parameter.transposed else part)
    file = Path(folder) / _SINGLE
    save_file(tensors, file, metadata={"format": "pt"})  # transformers asks for the format
    shutil.copymode(file.with_name("config.json"), file)  # safetensors leaves it to its owner alone


def parameters(decoder: Decoder) -> list[Parameter]:
    """Every parameter of the decoder, with its tensors."""
    found = []
    for path, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        row, match = _row(path)
        groups, widths = row.parts(decoder.config) if row.parts else (1, variable.shape[-1:])
        names = tuple(match.expand(name) for name in row.names)
        found.append(Parameter(path, variable, names, row.transposed, groups, widths))
    return found


def split(value: Any, groups: int, widths: Sequence[int]) -> list[Any]:
    """Tensors of a parameter's value, NumPy or JAX, not transposed; see `Parameter`."""
    by_group = value.reshape(*value.shape[:-1], groups, sum(widths))
    ends = itertools.accumulate(widths)
    return [
        by_group[..., end - width : end].reshape(*value.shape[:-1], groups * width)
        for width, end in zip(widths, ends, strict=True)
    ]


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


@functools.partial(jax.jit, static_argnames="groups")
def _join(tensors: tuple[Array, ...], *, groups: int) -> Array:
    """Concatenates the last axes group by group."""
    lead = tensors[0].shape[:-1]
    by_group = [tensor.reshape(*lead, groups, -1) for tensor in tensors]
    return jnp.concatenate(by_group, axis=-1).reshape(*lead, -1)


def _row(path: tuple[Any, ...]) -> tuple[_Row, re.Match[str]]:
    """The table's row of a parameter, and the match that fills in its names."""
    joined = ".".join(str(part) for part in path)
    for row in _TABLE:
        if match := re.fullmatch(row.path, joined):
            return row, match
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


def _check_tensors(folder: Path, wanted: Mapping[str, Parameter], stored: Mapping[str, _Stored]) -> None:
    """Nothing is missing, misshapen or of a dtype that is not read, and nothing would be left out."""
    for name, parameter in wanted.items():
        if name not in stored:
            raise ValueError(f"{folder} lacks tensor {name!r}, which its config.json asks for")
        found, shape = stored[name], parameter.stored_shape(name)
        if found.shape != shape:
            raise ValueError(
                f"{found.file}: tensor {name!r} has shape {list(found.shape)}, config.json asks for {list(shape)}"
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
