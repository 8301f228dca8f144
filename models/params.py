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
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float32
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tca_jax.errors import UserError, require
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import combine, tensor_checksums
from tca_jax.models.json_object import LFS_POINTER, is_lfs_pointer, read_json_object
from tca_jax.models.names import (
    CODES,
    EMBEDDING,
    HEAD,
    LAYER,
    Layout,
    Parameter,
    parameters,
    scale_name,
)
from tca_jax.models.projections import E4M3, quantize
from tca_jax.models.sharding import (
    HeadOrders,
    abstract_parameters,
    check_mesh,
    check_orders,
    constrained,
    reorder_heads,
    settled,
    whole_mesh,
    within,
)

if TYPE_CHECKING:
    from tca_jax.models.gguf import Gguf
    from tca_jax.models.stored_quantization import StoredQuantization

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"[\w.-]{1,200}\.safetensors")  # in the checkpoint's own folder
_COMPARED = 2**24  # numbers of two tensors that are compared at a time
_STORED_BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # dtypes that are read, and bytes of an element
# A buffer that old LLaMA checkpoints hold; and scales of activations and caches, which are taken anew for each token.
_IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|(input|output|k|v)_scale)")


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


class Quantized(NamedTuple):
    """The parameters that a kernel becomes in eight bits."""

    codes: Parameter
    scale: Parameter


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
    progress: Callable[[int, int], None] | None = None,
    mesh: Mesh | None = None,
    head_orders: HeadOrders | None = None,
    weights: str | None = None,
) -> LoadedCheckpoint:
    """Build the decoder from a checkpoint folder.

    Tensors go from the file to the default device one by one, so host memory stays near the size of the largest. On a
    mesh each process reads the parts that its own devices need, and each device gets its own part only.

    Args:
        folder: Holds `model.safetensors`, or `model.safetensors.index.json` and its shards; or a GGUF file
            (`models.gguf.find_gguf`), whose tensors are dequantized.
        config: The model's shape, as `read_config(folder)` gives it.
        dtype: Dtype of the weights and of computations.
        progress: Called as `progress(bytes read, total bytes)` after each tensor, of which a process of several
            may have read only a part.
        mesh: Devices that the weights are split over (`models.sharding`); None for the default device.
        head_orders: An order for each layer's KV heads, as for `permute_heads`; None for the checkpoint's own.
        weights: What the weights of projections and MLP are stored in: "fp8" (e4m3), with a scale for each output
            channel; each is quantized when it is read. None for what the checkpoint has.

    Raises:
        FileNotFoundError: no safetensors file, or a shard is missing.
        ValueError: a corrupt file, a missing or unexpected tensor, or one of unexpected shape or dtype; the
            message names the file and the tensor. Or the mesh or the orders do not fit the model.
    """
    if mesh is not None:
        check_mesh(mesh, config)
        mesh = whole_mesh(mesh)
    if head_orders is not None:
        check_orders(head_orders, config)
    folder = Path(folder)
    stored, format_ = _read_headers(folder), read_quantization(folder)
    if config.tie_embeddings and HEAD in stored and not _are_equal(stored[HEAD], stored.get(EMBEDDING)):
        warnings.warn(f"{folder}: {HEAD!r} differs from the embedding: tie_word_embeddings is ignored", stacklevel=2)
        config = dataclasses.replace(config, tie_embeddings=False)
    _require_stored(f"model.layers.{config.num_layers - 1}.mlp.down_proj.weight", stored, folder)  # takes long to build
    if format_ and not weights:
        _check_all_in_eight_bits(stored)
        weights = "fp8"
    param_dtype = E4M3 if weights else dtype
    made = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    found = abstract_parameters(config, jnp.dtype(dtype), jnp.dtype(dtype)) if weights else parameters(made)
    quantized = _quantized(parameters(made)) if weights else {}
    # The largest tensors, embedding and head, first: host memory is not yet full then.
    found = sorted(found, key=lambda parameter: parameter.layer is not None)
    wanted = {name: parameter for parameter in found for name in parameter.names}
    _check_tensors(folder, wanted, stored, format_)
    rounded_twice = jnp.dtype(dtype) == jnp.float16 and any(stored[name].dtype == "F32" for name in wanted)
    fingerprint_is_stale = rounded_twice or head_orders is not None or bool(weights)
    placed_dtype = jnp.dtype(jnp.float32 if rounded_twice else dtype)
    source = _Source(stored, format_, mesh)
    checksums: dict[str, Array] = {}
    loaded = {}
    with within(mesh):
        for parameter, value in _read(source, wanted, placed_dtype, progress, in_float32=quantized):
            if fingerprint_is_stale:
                checksums |= tensor_checksums(parameter, value)
            if head_orders is not None:
                value = reorder_heads(value, parameter, head_orders, mesh)
            if to := quantized.get(parameter.path):
                scale = source.known_scale(parameter, to, head_orders)
                specs = to.codes.spec, to.scale.spec
                parts = list(zip(to, quantize_kernel(value, scale, specs=specs, mesh=mesh), strict=True))
            else:
                parts = [(parameter, value.astype(dtype))]
            del value
            for each, part in parts:
                loaded[each.path] = each.variable.replace(jax.block_until_ready(settled(part, each, mesh)))
    decoder: Decoder = nnx.merge(nnx.graphdef(made), nnx.from_flat_state(loaded))
    shapes = {name: shape for parameter in found for name, shape in parameter.shapes.items()}
    return LoadedCheckpoint(decoder, combine(config, shapes, checksums) if fingerprint_is_stale else None)


def gguf_path(path: Path) -> Path | None:
    """The file that `models.gguf.find_gguf` finds; its module is imported only for names with ".gguf"."""
    names = [each.name for each in path.iterdir()] if path.is_dir() else [path.name]
    if not any(".gguf" in name for name in names):
        return None
    from tca_jax.models.gguf import find_gguf

    return find_gguf(path)


def read_quantization(folder: Path) -> StoredQuantization | None:
    """The eight-bit format of a checkpoint folder, by its config.json; None for 16 bits and GGUF files."""
    path = Path(folder) / "config.json"
    entries = read_json_object(path).get("quantization_config") if path.is_file() else None
    if not entries:
        return None
    from tca_jax.models.stored_quantization import StoredQuantization

    return StoredQuantization.from_hf(entries)


def save_decoder(
    folder: Path,
    decoder: Decoder,
    dtype: DTypeLike,
    config_entries: Mapping[str, Any] | None = None,
) -> None:
    """Write `model.safetensors` and `config.json` that transformers loads. Takes a host copy of all weights.

    `dtype` is that of the stored weights; `config_entries`, such as `eos_token_id`, are added to config.json.
    """
    name = jnp.dtype(dtype).name
    write_config(folder, dataclasses.replace(decoder.config, dtype_name=name), config_entries)
    tensors: dict[str, np.ndarray] = {}
    for parameter in parameters(decoder):
        parts = parameter.layout.split(np.asarray(parameter.variable[...].astype(dtype)))
        for tensor, part in zip(parameter.names, parts, strict=True):
            tensors[tensor] = np.ascontiguousarray(part.T if parameter.transposed else part)
    file = Path(folder) / _SINGLE
    save_file(tensors, file, metadata={"format": "pt"})  # transformers asks for the format
    shutil.copymode(file.with_name("config.json"), file)  # safetensors leaves it to its owner alone


def write_config(folder: Path, config: ModelConfig, entries: Mapping[str, Any] | None = None) -> None:
    """Write `config.json`, with `entries` added. Both transformers 4.x and 5.x read it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.to_hf() | dict(entries or {}), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class _Source:
    """A checkpoint's tensors, those of eight bits as the numbers that they stand for."""

    stored: Mapping[str, _Stored]
    format: StoredQuantization | None  # of eight bits
    mesh: Mesh | None  # devices that the weights are split over

    def place(self, shard: Any, name: str, parameter: Parameter, dtype: Any) -> Array:
        """A tensor of an open file on its devices, not transposed."""
        options: Any = {"spec": parameter.tensor_spec, "mesh": self.mesh}
        if self.stored[name].dtype != CODES:
            tensor = read_tensor(shard, self.stored[name].name, parameter, self.mesh)
            return place_tensor(tensor, dtype=dtype, transposed=parameter.transposed, **options)
        assert self.format is not None
        scale, shape = self._scale(name), self.stored[name].shape
        file = self.stored[name].file
        assert isinstance(file, Path)  # GGUF has no codes
        codes = read_tensor(self.format.mapped_codes(file, self.stored[name].name), name, parameter, self.mesh)
        return place_codes(codes, scale, block=self.format.block_of(scale, shape), **options)

    def known_scale(self, parameter: Parameter, to: Quantized, head_orders: HeadOrders | None) -> Array | None:
        """The scales of a kernel's output channels as they are stored; None unless they are those of its codes."""
        names = parameter.names
        if self.format is None or self.format.block is not None or any(self.stored[n].dtype != CODES for n in names):
            return None
        scales = [np.broadcast_to(self._scale(name)[:, 0], self.stored[name].shape[:1]) for name in names]
        value = to.scale.layout.join([jnp.asarray(scale) for scale in scales])
        value = settled(value, to.scale, self.mesh)
        return value if head_orders is None else reorder_heads(value, to.scale, head_orders, self.mesh)

    def _scale(self, name: str) -> np.ndarray:
        assert self.format is not None
        scales = scale_name(name, self.stored)
        assert scales is not None
        with _opened(self.stored[scales].file) as shard:
            return self.format.scale_matrix(shard.get_tensor(self.stored[scales].name))


def _quantized(made: list[Parameter]) -> dict[tuple[Any, ...], Quantized]:
    """Parameters of each kernel in eight bits, by the kernel's path."""
    by_path = {parameter.path: parameter for parameter in made}
    of_codes = [path for path in by_path if path[-1] == "codes"]
    return {(*path[:-1], "kernel"): Quantized(by_path[path], by_path[(*path[:-1], "scale")]) for path in of_codes}


def _read(
    source: _Source,
    wanted: Mapping[str, Parameter],
    dtype: Any,
    progress: Callable[[int, int], None] | None,
    *,
    in_float32: Container[tuple[Any, ...]],
) -> Iterator[tuple[Parameter, Array]]:
    """Yields each parameter and its value when its last tensor is read: file by file, one tensor at a time.

    Values are in `dtype`, but those of paths `in_float32`.
    """
    stored = source.stored
    report = _progress({name: stored[name].bytes for name in wanted}, progress)
    placed: dict[str, Array] = {}
    for file in sorted({stored[name].file for name in wanted}, key=str):
        with _opened(file) as shard:
            for name in (name for name in wanted if stored[name].file == file):
                parameter = wanted[name]
                wide = jnp.dtype(jnp.float32) if parameter.path in in_float32 else dtype
                # Transfers that queue up would each hold a tensor on the host, and so would the references to
                # finished ones, which JAX drops only when Python collects garbage (the youngest is enough).
                placed[name] = jax.block_until_ready(source.place(shard, name, parameter, wide))
                gc.collect(0)
                report(name)
                if all(name in placed for name in parameter.names):
                    parts = tuple(placed.pop(name) for name in parameter.names)
                    options: Any = {"layout": parameter.layout, "spec": parameter.spec, "mesh": source.mesh}
                    yield parameter, join_tensors(parts, **options) if parts[1:] else parts[0]


def _progress(sizes: Mapping[str, int], callback: Callable[[int, int], None] | None) -> Callable[[str], None]:
    """A function that takes the name of each tensor read and passes the bytes so far to the callback."""
    done, total = 0, sum(sizes.values())

    def report(name: str) -> None:
        nonlocal done
        done += sizes[name]
        if callback is not None:
            callback(done, total)

    return report


def _read_headers(folder: Path) -> dict[str, _Stored]:
    """Every tensor of the checkpoint, from the headers of its files; names are those of a causal model."""
    stored: dict[str, _Stored] = {}
    if (path := gguf_path(folder)) is not None:
        from tca_jax.models.gguf import open_gguf

        gguf = open_gguf(path)
        return {name: _Stored(name, gguf, gguf.tensors[name].shape, "F32") for name in gguf.names()}
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
    held = f"{folder} holds neither {_SINGLE}, {_INDEX} nor a GGUF file"
    require(index.is_file(), held, FileNotFoundError)
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
) -> None:
    """Checks that no tensor is missing, misshapen, of an unsupported dtype, or left over."""
    scales = set()
    for name, parameter in wanted.items():
        is_projection = parameter.layer is not None and parameter.path[-1] == "kernel"
        _check_tensor(folder, name, parameter.stored_shape(name), stored, is_projection and format_ is not None)
        if stored[name].dtype == CODES and format_ is not None:
            scales.add(_checked_scale(name, stored, format_))
    left = [name for name in stored if name not in (*wanted, *scales, HEAD) and not _IGNORED.fullmatch(name)]
    layers = max(parameter.layer or 0 for parameter in wanted.values())
    for name in left:
        layer = LAYER.fullmatch(name)
        is_own = int(layer[1]) <= layers if layer else name.startswith(("model.embed_tokens.", "model.norm.", HEAD))
        require(not is_own, f"{stored[name].file}: tensor {name!r} has no place in the model of its config")
    if left:
        warnings.warn(f"{folder}: {len(left)} tensors of other heads or layers are ignored: {left[0]!r}", stacklevel=3)


def _require_stored(name: str, stored: Mapping[str, _Stored], folder: Path) -> None:
    require(name in stored, f"{folder} lacks tensor {name!r}, which the model's config asks for")


def _check_tensor(
    folder: Path, name: str, shape: tuple[int, ...], stored: Mapping[str, _Stored], in_eight_bits: bool
) -> None:
    """Checks a tensor's shape and dtype; in a checkpoint in eight bits projections may have these, or others."""
    _require_stored(name, stored, folder)
    found, allowed = stored[name], [*_STORED_BYTES, *([CODES] if in_eight_bits else [])]
    given = f"{found.file}: tensor {name!r} has shape {list(found.shape)} and dtype {found.dtype}"
    fits = found.shape == shape and found.dtype in allowed
    require(fits, f"{given}, the model's config asks for {list(shape)} and one of {allowed}")


def _check_all_in_eight_bits(stored: Mapping[str, _Stored]) -> None:
    """Raises ValueError if only some projections are in eight bits."""
    remedy = "where others are in eight bits: not supported as it is; weights='fp8' quantizes it, too"
    for name, found in stored.items():
        fits = found.dtype == CODES or not name.endswith("_proj.weight")
        require(fits, f"{found.file}: tensor {name!r} has dtype {found.dtype} {remedy}")


def _checked_scale(name: str, stored: Mapping[str, _Stored], format_: StoredQuantization) -> str:
    """Name of the scales of a tensor of codes, if they are there and fit."""
    scales, shapes = scale_name(name, stored) or "", format_.scale_shapes(stored[name].shape)
    found = stored.get(scales)
    fits = found is not None and found.shape in shapes and found.dtype in _STORED_BYTES
    held = "there are none" if found is None else f"tensor {scales!r} has {list(found.shape)} of {found.dtype}"
    must = f"its scales must have one of the shapes {list(map(list, shapes))}: {held}"
    require(fits, f"{stored[name].file}: tensor {name!r} has dtype {CODES}, and {must}")
    return scales


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


# From tensors to parameters on devices: read, cast, transpose, join, quantize; on a mesh, by part.


def read_tensor(file: Any, name: str, parameter: Parameter, mesh: Mesh | None) -> Array | np.ndarray:
    """A tensor of `parameter` as an open safetensors file holds it, or codes that are mapped.

    Without a mesh it is read whole and stays on the host. Otherwise the parts that this process's devices need are read
    and put onto them.
    """
    codes = isinstance(file, np.ndarray)
    if mesh is None:
        return file if codes else file.get_tensor(name)
    view, parts = (file if codes else file.get_slice(name)), {}

    def read(index: Any) -> np.ndarray:
        key = str(index)  # devices with the same part share one copy
        if key not in parts:
            parts[key] = view[index]
        return parts[key]

    shape = view.shape if codes else tuple(view.get_shape())
    return jax.make_array_from_callback(shape, NamedSharding(mesh, parameter.stored_spec), read)


@functools.partial(jax.jit, static_argnames=("dtype", "transposed", "spec", "mesh"))
def place_tensor(
    tensor: Array | np.ndarray, *, dtype: Any, transposed: bool, spec: PartitionSpec, mesh: Mesh | None
) -> Array:
    """A tensor on its devices, cast there, and not transposed."""
    tensor = jnp.asarray(tensor, dtype)
    return constrained(tensor.T if transposed else tensor, mesh, spec)


@functools.partial(jax.jit, static_argnames=("block", "spec", "mesh"))
def place_codes(
    codes: Array | np.ndarray,
    scale: Float32[Array | np.ndarray, "so si"],
    *,
    block: tuple[int, int],
    spec: PartitionSpec,
    mesh: Mesh | None,
) -> Array:
    """Codes `[out, in]` times their scales, one for each block, on their devices: float32, not transposed."""
    outputs, inputs = (jnp.arange(size) // of_block for size, of_block in zip(codes.shape, block, strict=True))
    return constrained((jnp.asarray(codes, jnp.float32) * jnp.asarray(scale)[outputs[:, None], inputs]).T, mesh, spec)


@functools.partial(jax.jit, static_argnames=("specs", "mesh"))
def quantize_kernel(
    kernel: Array, scale: Array | None, *, specs: tuple[PartitionSpec, PartitionSpec], mesh: Mesh | None
) -> list[Array]:
    """Codes `[*out, in]` and scales `[*out]` of a kernel `[in, *out]`; by default its own scales."""
    parts = quantize(jnp.moveaxis(kernel, 0, -1), scale)
    return [constrained(part, mesh, spec) for part, spec in zip(parts, specs, strict=True)]


@functools.partial(jax.jit, static_argnames=("layout", "spec", "mesh"))
def join_tensors(tensors: tuple[Array, ...], *, layout: Layout, spec: PartitionSpec, mesh: Mesh | None) -> Array:
    """The parameter of its tensors."""
    return constrained(layout.join(tensors), mesh, spec)
