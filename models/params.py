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
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tca_jax.errors import UserError, require
from tca_jax.models import sharding
from tca_jax.models.config import ModelConfig, StoredQuantization
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import combine, tensor_checksums
from tca_jax.models.gguf import Gguf, open_gguf
from tca_jax.models.gguf import find_gguf as gguf_path
from tca_jax.models.json_object import LFS_POINTER, is_lfs_pointer, read_json_object
from tca_jax.models.names import CODES, EMBEDDING, HEAD, LAYER, Layout, Parameter, parameters
from tca_jax.models.projections import E4M3, quantize

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"[\w.-]{1,200}\.safetensors")  # in the checkpoint's own folder
_COMPARED = 2**24  # numbers of two tensors that are compared at a time
_STORED_BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # dtypes that are read, and bytes of an element
# A buffer that old LLaMA checkpoints hold; and scales of activations and caches, which are taken anew for each token.
_IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|(input|output|k|v)_scale)")
_Progress = Callable[[int, int], None]  # called with the bytes that are read so far, and in all


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor of the checkpoint, from the header of its file."""

    name: str  # in the file
    file: Path | Gguf
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * (1 if self.dtype == CODES else _STORED_BYTES[self.dtype])


class LoadedCheckpoint(NamedTuple):
    """A decoder from a checkpoint folder."""

    decoder: Decoder
    # Of the stored tensors, where the loaded weights do not give it (stored in float32 and loaded in float16, in eight
    # bits, or with heads in another order); otherwise None: use `fingerprint(decoder)`.
    fingerprint: str | None


def load_checkpoint(
    folder: Path,
    config: ModelConfig,
    dtype: DTypeLike = jnp.bfloat16,
    progress: _Progress | None = None,
    mesh: Mesh | None = None,
    head_orders: sharding.HeadOrders | None = None,
    weights: str | None = None,
) -> LoadedCheckpoint:
    """Builds the decoder from a checkpoint folder.

    Tensors go from the file to the default device one by one, so host memory stays near the size of the largest. On a
    mesh each process reads the parts that its own devices need, and each device gets its own part only.

    Args:
        folder: Holds `model.safetensors`, or `model.safetensors.index.json` and its shards; or a GGUF file
            (`models.gguf.find_gguf`), whose tensors are dequantized.
        config: As `read_config(folder)` gives it.
        dtype: Of the weights and of computations.
        progress: Called as `progress(bytes read, total bytes)` after each tensor, of which a process of several
            may have read only a part.
        mesh: Devices that the weights are split over (`models.sharding`); None for the default device.
        head_orders: An order for each layer's KV heads, as for `reorder_heads`; None for the checkpoint's own.
        weights: What the weights of projections and MLP are stored in: "fp8" (e4m3), with a scale for each output
            channel; each is quantized when it is read. None for what the checkpoint has.

    Raises:
        FileNotFoundError: no safetensors file, or a shard is missing.
        ValueError: a corrupt file, a missing or unexpected tensor, or one of unexpected shape or dtype, with the names
            of file and tensor; or the mesh or the orders do not fit the model.
    """
    if mesh is not None:
        sharding.check_mesh(mesh, config)
        mesh = sharding.whole_mesh(mesh)
    if head_orders is not None:
        sharding.check_orders(head_orders, config)
    folder = Path(folder)
    stored, format_ = _read_headers(folder), read_quantization(folder)
    if config.tie_embeddings and HEAD in stored and not _are_equal(stored[HEAD], stored.get(EMBEDDING)):
        warnings.warn(f"{folder}: {HEAD!r} differs from the embedding: tie_word_embeddings is ignored", stacklevel=2)
        config = dataclasses.replace(config, tie_embeddings=False)
    _require_stored(f"model.layers.{config.num_layers - 1}.mlp.down_proj.weight", stored, folder)  # takes long to build
    only_codes, dtype = format_ is not None and not weights, jnp.dtype(dtype)
    in_eight_bits = only_codes or bool(weights)
    dtypes: Any = {"dtype": dtype, "param_dtype": E4M3 if in_eight_bits else dtype}
    made = nnx.eval_shape(lambda: Decoder(config, **dtypes, rngs=nnx.Rngs(0)))
    by_path = {each.path: each for each in parameters(made)}
    read = sharding.abstract_parameters(config, dtype, dtype) if in_eight_bits else by_path.values()
    # The largest tensors, embedding and head, first: host memory is not yet full then.
    found = sorted(read, key=lambda parameter: parameter.layer is not None)
    wanted = {name: parameter for parameter in found for name in parameter.names}
    _check_tensors(folder, wanted, stored, format_, only_codes=only_codes)
    rounded_twice = dtype == jnp.float16 and any(stored[name].dtype == "F32" for name in wanted)
    fingerprint_is_stale = rounded_twice or head_orders is not None or in_eight_bits
    block = format_.block if format_ else None
    checksums: dict[str, Any] = {}
    loaded = {}
    with sharding.within(mesh):
        for parameter, tensors in _read(stored, wanted, mesh, progress):
            scales = [_scales(stored, name, block) for name in parameter.names]
            stays = parameter.path in by_path  # or it is quantized
            options: Any = {"layout": parameter.layout, "block": block, "spec": parameter.spec, "mesh": mesh}
            options["dtype"] = dtype if stays and not rounded_twice else jnp.dtype(jnp.float32)
            value = join_tensors(tensors, scales, **options)
            del tensors
            if fingerprint_is_stale:
                checksums |= tensor_checksums(parameter, value)
            parts = [(parameter, value)]
            if not stays:
                codes, scale = (by_path[*parameter.path[:-1], part] for part in ("codes", "scale"))
                known = None if block or any(each is None for each in scales) else scales
                options = {"layout": scale.layout, "specs": (codes.spec, scale.spec), "mesh": mesh}
                parts = list(zip((codes, scale), quantize_kernel(value, known, **options), strict=True))
            del value
            for each, part in parts:
                part = sharding.reorder_heads(part.astype(each.variable.dtype), each, head_orders)
                loaded[each.path] = each.variable.replace(jax.block_until_ready(sharding.settled(part, each, mesh)))
    decoder: Decoder = nnx.merge(nnx.graphdef(made), nnx.from_flat_state(loaded))
    return LoadedCheckpoint(decoder, combine(config, checksums) if fingerprint_is_stale else None)


def read_quantization(folder: Path) -> StoredQuantization | None:
    """The eight-bit format of a checkpoint folder, by its config.json; None for 16 bits and GGUF files."""
    path = Path(folder) / "config.json"
    entries = read_json_object(path).get("quantization_config") if path.is_file() else None
    return StoredQuantization.from_hf(entries) if entries else None


def save_decoder(
    folder: Path, decoder: Decoder, dtype: DTypeLike, config_entries: Mapping[str, Any] | None = None
) -> None:
    """Write `model.safetensors` and `config.json` that transformers loads. Takes a host copy of all weights.

    `dtype` is that of the stored weights; `config_entries`, such as `eos_token_id`, are added to config.json.
    """
    write_config(folder, dataclasses.replace(decoder.config, dtype_name=jnp.dtype(dtype).name), config_entries)
    tensors: dict[str, np.ndarray] = {}
    for parameter in parameters(decoder):
        parts = parameter.layout.split(np.asarray(parameter.variable[...].astype(dtype)))
        for tensor, part in zip(parameter.names, parts, strict=True):
            tensors[tensor] = np.ascontiguousarray(part)
    file = Path(folder) / _SINGLE
    save_file(tensors, file, metadata={"format": "pt"})  # transformers asks for the format
    shutil.copymode(file.with_name("config.json"), file)  # safetensors leaves it to its owner alone


def write_config(folder: Path, config: ModelConfig, entries: Mapping[str, Any] | None = None) -> None:
    """Write `config.json`, with `entries` added. Both transformers 4.x and 5.x read it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.to_hf() | dict(entries or {}), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _read(
    stored: Mapping[str, _Stored], wanted: Mapping[str, Parameter], mesh: Mesh | None, progress: _Progress | None
) -> Iterator[tuple[Parameter, list[Array]]]:
    """Yields each parameter and its tensors when the last is read: file by file, one tensor at a time."""
    placed: dict[str, Array] = {}
    done, total = 0, sum(stored[name].bytes for name in wanted)
    for file in sorted({stored[name].file for name in wanted}, key=str):
        with _opened(file) as shard:
            for name, parameter in wanted.items():
                if (tensor := stored[name]).file != file:
                    continue
                # Transfers that queue up would each hold a tensor on the host, and so would the references to
                # finished ones, which JAX drops only when Python collects garbage (the youngest is enough).
                value = read_tensor(_view(shard, tensor), tensor.shape, parameter.stored_spec, mesh)
                placed[name] = jax.block_until_ready(value)
                gc.collect(0)
                done += tensor.bytes
                if progress is not None:
                    progress(done, total)
                if all(name in placed for name in parameter.names):
                    yield parameter, [placed.pop(name) for name in parameter.names]


def _read_headers(folder: Path) -> dict[str, _Stored]:
    """Every tensor of the checkpoint, from the headers of its files; names are those of a causal model."""
    stored: dict[str, _Stored] = {}
    if (path := gguf_path(folder)) is not None:
        gguf = open_gguf(path)
        return {name: _Stored(name, gguf, tensor.shape, "F32") for name, tensor in gguf.tensors.items()}
    for file, names in _files(folder).items():
        with _opened(file) as shard:
            held = set(shard.keys())
            for name in names:
                require(name in held, f"{file} lacks tensor {name!r}, which {_INDEX} places there")
                view = shard.get_slice(name)
                stored[name] = _Stored(name, file, tuple(view.get_shape()), view.get_dtype())
    if EMBEDDING.removeprefix("model.") in stored:  # of a model without head, such as LlamaModel
        return {name if name == HEAD else f"model.{name}": tensor for name, tensor in stored.items()}
    return stored


def _files(folder: Path) -> dict[Path, list[str]]:
    """The checkpoint's files and the names of the tensors to read from each."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        with _opened(single) as shard:
            return {single: list(shard.keys())}
    require(index.is_file(), f"{folder} holds neither {_SINGLE}, {_INDEX} nor a GGUF file", FileNotFoundError)
    places: Any = read_json_object(index).get("weight_map")
    require(isinstance(places, dict), f"{index} is corrupt: weight_map must be an object")
    files: dict[Path, list[str]] = {}
    for name, file in places.items():
        is_shard = isinstance(file, str) and _SHARD.fullmatch(file)
        require(is_shard, f"{index} is corrupt: weight_map[{name!r}] = {file!r}: must be the name of a shard")
        require((folder / file).is_file(), f"{folder / file} is missing: {_INDEX} lists it", FileNotFoundError)
        files.setdefault(folder / file, []).append(name)
    return files


@contextlib.contextmanager
def _opened(file: Path | Gguf) -> Iterator[Any]:
    """A safetensors file, whose errors are raised with its name; or the GGUF checkpoint itself."""
    if not isinstance(file, Path):
        yield file
        return
    try:
        with safe_open(file, framework="numpy") as shard:
            yield shard
    except SafetensorError as error:
        reason = LFS_POINTER if is_lfs_pointer(file) else f"is corrupt or incomplete: {error}"
        raise UserError(f"{file} {reason}") from error


def _check_tensors(
    folder: Path,
    wanted: Mapping[str, Parameter],
    stored: Mapping[str, _Stored],
    format_: StoredQuantization | None,
    *,
    only_codes: bool,  # whether no projection of a checkpoint in eight bits may have others
) -> None:
    """Checks that no tensor is missing, misshapen, of an unsupported dtype, or left over."""
    used = {*wanted, HEAD}
    for name, parameter in wanted.items():
        _require_stored(name, stored, folder)
        found, shape, allowed = stored[name], parameter.shapes[name], list(_STORED_BYTES)
        if format_ is not None and parameter.layer is not None and parameter.path[-1] == "kernel":
            allowed.append(CODES)
        given = f"{found.file}: tensor {name!r} has shape {list(found.shape)} and dtype {found.dtype}"
        fits = found.shape == shape and found.dtype in allowed
        require(fits, f"{given}, the model's config asks for {list(shape)} and one of {allowed}")
        if found.dtype == CODES and format_ is not None:
            scale, shapes = stored.get(scale_name(name, stored)), format_.scale_shapes(shape)
            held = f"tensor {scale.name!r} has {list(scale.shape)} of {scale.dtype}" if scale else "there are none"
            fits = scale is not None and scale.shape in shapes and scale.dtype in _STORED_BYTES
            require(fits, f"{given}, and its scales must have one of the shapes {list(map(list, shapes))}: {held}")
            used.add(scale_name(name, stored))
        elif CODES in allowed:
            remedy = "where others are in eight bits: not supported as it is; weights='fp8' quantizes it, too"
            require(not only_codes, f"{given} {remedy}")
    left = [name for name in stored if name not in used and not _IGNORED.fullmatch(name)]
    layers = max(parameter.layer or 0 for parameter in wanted.values())
    for name in left:
        layer = LAYER.fullmatch(name)
        is_own = int(layer[1]) <= layers if layer else name.startswith(("model.embed_tokens.", "model.norm.", HEAD))
        require(not is_own, f"{stored[name].file}: tensor {name!r} has no place in the model of its config")
    if left:
        warnings.warn(f"{folder}: {len(left)} tensors of other heads or layers are ignored: {left[0]!r}", stacklevel=3)


def _require_stored(name: str, stored: Mapping[str, _Stored], folder: Path) -> None:
    require(name in stored, f"{folder} lacks tensor {name!r}, which the model's config asks for")


def scale_name(name: str, stored: Container[str]) -> str:
    """Name of the scales of a tensor of codes, by which these are multiplied."""
    return f"{name}_scale" if f"{name}_scale" in stored else f"{name}_scale_inv"


def _are_equal(head: _Stored, embedding: _Stored | None) -> bool:
    """Whether two tensors hold the same numbers; compared in parts."""
    if embedding is None or head.shape != embedding.shape:
        return False
    with _opened(head.file) as first, _opened(embedding.file) as second:
        slices = first.get_slice(head.name), second.get_slice(embedding.name)
        step = max(1, _COMPARED // head.shape[1])
        starts = ((i, min(i + step, head.shape[0])) for i in range(0, head.shape[0], step))
        parts = ([x[i:end].astype(np.float32) for x in slices] for i, end in starts)
        return all(np.array_equal(*part) for part in parts)


# From tensors to parameters on devices: read, cast, join, quantize; on a mesh, by part.


def _view(shard: Any, tensor: _Stored) -> Any:
    """A tensor of an open file, read by part. Codes are mapped into memory: safetensors has no NumPy type for them."""
    if tensor.dtype != CODES or not isinstance(tensor.file, Path):
        return shard.get_slice(tensor.name)
    with tensor.file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        start = 8 + size + json.loads(opened.read(size))[tensor.name]["data_offsets"][0]
    return np.memmap(tensor.file, np.uint8, "r", start, tensor.shape).view(E4M3)


def _scales(stored: Mapping[str, _Stored], name: str, block: tuple[int, int] | None) -> np.ndarray | None:
    """Scales of codes, one for each block, or `[out or 1, 1]`; None for numbers."""
    if stored[name].dtype != CODES:
        return None
    scale = stored[scale_name(name, stored)]
    with _opened(scale.file) as shard:
        found = shard.get_tensor(scale.name).astype(np.float32)
    return found if block else found.reshape(-1, 1)


def read_tensor(view: Any, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | None) -> Array:
    """A tensor on its devices; a process reads the parts that its own need, once."""
    if mesh is None:
        return jnp.asarray(view[:])
    parts: dict[str, np.ndarray] = {}

    def read(index: Any) -> np.ndarray:
        key = str(index)  # devices with the same part share one copy
        if key not in parts:
            parts[key] = view[index]
        return parts[key]

    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), read)


@functools.partial(jax.jit, static_argnames=("layout", "dtype", "block", "spec", "mesh"))
def join_tensors(
    tensors: Sequence[Array],
    scales: Sequence[Array | np.ndarray | None],
    *,
    layout: Layout,
    dtype: Any,
    block: tuple[int, int] | None,
    spec: PartitionSpec,
    mesh: Mesh | None,
) -> Array:
    """The parameter of its tensors, cast to `dtype`; codes are multiplied by their scales."""

    def numbers(tensor: Array, scale: Any) -> Array:
        if scale is None:
            return tensor.astype(dtype)
        if block:
            rows, columns = (jnp.arange(size) // of for size, of in zip(tensor.shape, block, strict=True))
            scale = jnp.asarray(scale)[rows[:, None], columns]
        return (tensor.astype(jnp.float32) * scale).astype(dtype)

    return sharding.constrained(layout.join(list(map(numbers, tensors, scales))), mesh, spec)


@functools.partial(jax.jit, static_argnames=("layout", "specs", "mesh"))
def quantize_kernel(
    kernel: Array,
    scales: Sequence[Array | np.ndarray] | None,
    *,
    layout: Layout,
    specs: tuple[PartitionSpec, PartitionSpec],
    mesh: Mesh | None,
) -> list[Array]:
    """Codes `[*out, in]` and scales `[*out]` of a kernel `[in, *out]`: those of its tensors, by default its own."""
    scale = None
    if scales is not None:  # `layout` is that of the scales
        shapes = layout.tensor_shapes
        scale = layout.join([jnp.broadcast_to(x[:, 0], shape) for x, shape in zip(scales, shapes, strict=True)])
    parts = quantize(jnp.moveaxis(kernel, 0, -1), scale)
    return [sharding.constrained(part, mesh, spec) for part, spec in zip(parts, specs, strict=True)]
