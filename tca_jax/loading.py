"""`tca_jax.load`: from a name to a model on the device, with its tokenizer and its profile."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tca_jax.engine.lm import KV, LM, check_attention
from tca_jax.engine.placement import BALANCED_TOKENS, balanced_orders
from tca_jax.errors import UserError, explaining, is_finite_number, require, require_type
from tca_jax.models.aliases import ALIASES
from tca_jax.models.config import ModelConfig, read_config
from tca_jax.models.json_object import LFS_POINTER, is_lfs_pointer, read_json_object
from tca_jax.models.names import MODEL
from tca_jax.models.params import gguf_path, load_checkpoint, read_quantization
from tca_jax.models.projections import WEIGHTS
from tca_jax.models.sharding import axis_size, check_mesh

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # tokenizers need no PyTorch

if TYPE_CHECKING:
    from tca_jax.calibration.profile import Profile
    from tca_jax.calibration.worth_profile import WorthProfile

SHIPPED = ("recall-tiny",)
_E4M3_CAPABILITY = (8, 9)  # Ada and later convert and multiply e4m3 numbers
_LONGEST_NAME = 1024  # characters: no folder and no repository has more
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint before its weights are read: enough to encode prompts and to refuse models that cannot run."""

    folder: Path  # or its GGUF file
    name: str  # in messages and profiles
    config: ModelConfig
    tokenizer: Any  # of transformers, or None where the folder has none
    eos_token_ids: tuple[int, ...]  # these end an answer

    @property
    def pad_token_id(self) -> int:
        """Fills answers after their end."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad if pad is not None else next(iter(self.eos_token_ids), 0)

    def read_profile(self, profile: Any, kept: float | None = None) -> Profile | WorthProfile | None:
        """The profile for `load`, checked for the model's shape; arguments and errors are those of `tca_jax.load`."""
        if profile is None:
            return None
        from tca_jax.calibration.profile import Profile
        from tca_jax.calibration.worth_profile import WorthProfile

        kinds = Profile, WorthProfile
        require_type("profile", profile, (str, os.PathLike, *kinds), "a Profile, a folder, 'shipped' or None")
        if profile == "shipped":
            profile = self.folder / "profile"
            none = f"profile = 'shipped': {self.folder} holds no profile folder; calibrate the model"
            require(profile.is_dir(), none, FileNotFoundError)
        found = profile if isinstance(profile, kinds) else Profile.load(profile)
        found.validate_for(self.config, None, self.name)
        if kept is None:
            return found
        if not isinstance(found, WorthProfile):
            raise UserError(f"kept = {kept}: goes with a profile of predicted worth, not with one of the paper's rule")
        return found.with_kept(kept)

    def load(
        self,
        profile: Profile | WorthProfile | None = None,  # from `read_profile`
        *,
        dtype: Any = None,
        weights: str | None = None,
        kv: str | None = None,
        attention: str | None = None,
        mesh: Mesh | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> LM:
        """Reads the weights; other arguments, result and errors are those of `tca_jax.load`."""
        dtype = check_options(dtype, weights, kv, attention)
        check_attention(attention, self.config, dtype)
        if weights is None and read_quantization(self.folder) is not None:
            _require_e4m3(f"{self.name} has weights in fp8, which")
        if mesh is not None:
            check_mesh(mesh, self.config, self.name)
        _enable_compilation_cache()
        orders = None
        if mesh is not None and profile is not None:  # read where the profile wants them, no KV head has to be moved
            kept = profile.kept_share(min(self.config.max_context, BALANCED_TOKENS))
            orders = balanced_orders(kept, axis_size(mesh, MODEL))
        loaded = load_checkpoint(self.folder, self.config, dtype, progress, mesh, orders, weights)
        about: dict[str, Any] = {"name": self.name, "checkpoint_fingerprint": loaded.fingerprint}
        about |= {name: getattr(self, name) for name in ("tokenizer", "eos_token_ids", "pad_token_id")}
        about |= {"head_orders": orders, "kv": kv, "attention": attention}
        return LM.from_decoder(loaded.decoder, mesh=mesh, **about).with_profile(profile)


def load(
    name_or_path: str | os.PathLike[str],
    profile: str | os.PathLike[str] | Profile | WorthProfile | None = None,
    *,
    kept: float | None = None,
    dtype: Any = None,
    weights: str | None = None,
    kv: str | None = None,
    attention: str | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LM:
    """Loads a LLaMA 3.x, Qwen2, Qwen2.5 or Qwen3 checkpoint straight into device arrays.

    Args:
        name_or_path: A local folder with config.json and *.safetensors; a GGUF file, one of several (gguf-split's, or
            numbered pieces `model.gguf.00`), or a folder that holds one; an alias (`tca_jax.models.ALIASES`, or
            "recall-tiny", which ships with the package); or a Hugging Face Hub id. Looked up in this order.
        profile: A folder that a profile was saved to, a `WorthProfile` or `Profile`, "shipped" for the one beside a
            shipped model, or None for exact full attention.
        kept: Share of the tokens that stays under a profile of predicted worth, in (0, 1]; None for the profile's own.
        dtype: Of weights and activations; None is bfloat16 on an accelerator and float32 on the CPU.
        weights: "fp8" stores the weights of projections and MLP in e4m3 with a scale for each output channel,
            quantized while they are read; None keeps the checkpoint's format. Products of many tokens are then of e4m3
            numbers, which needs compute capability 8.9 on a GPU.
        kv: What the KV cache holds: "fp8" (e4m3) with a scale for each token, or None for `dtype`.
        attention: What prompts attend in: "fp8" (queries and keys in int8, probabilities and values in e4m3) on Hopper
            GPUs, for heads of 64 or 128 entries and blocks that are multiples of 128; or None for `dtype`.
        mesh: Devices that share the model, as `jax.make_mesh((1, 4), ("data", "model"))` gives them: its weights over
            "model", the rows of a batch over "data", in any order of the axes; None for the default device. No host
            and no device ever holds more than its own part and one tensor.
        revision: Branch, tag or commit on the Hub.
        progress: Called as `progress(bytes_read, bytes)` after each tensor.

    Returns:
        The model; `lm.with_profile(other)` shares its weights.

    Raises:
        ValueError: unknown alias (with the list), unsupported architecture or option, a profile of another model,
            `kept` out of range or with another profile than one of predicted worth, a mesh whose devices cannot share
            the model (with the numbers that can), a GPU that has no e4m3.
        FileNotFoundError: a file of the checkpoint is missing (with its name).
    """
    check_options(dtype, weights, kv, attention, profile, kept)  # before anything is downloaded
    checkpoint = open_checkpoint(name_or_path, revision)
    found = checkpoint.read_profile(profile, kept)  # before gigabytes are read
    stored: dict[str, Any] = {"dtype": dtype, "weights": weights, "kv": kv, "attention": attention}
    return checkpoint.load(found, **stored, mesh=mesh, progress=progress)


def open_checkpoint(name_or_path: Any, revision: str | None = None) -> Checkpoint:
    """All of a checkpoint but its weights: the first half of `load`, whose `name_or_path` and `revision` it takes."""
    folder = checkpoint_folder(name_or_path, revision)
    if (file := gguf_path(folder)) is not None:
        return _open_gguf(file)
    config = read_config(folder)
    if (folder / "adapter_config.json").exists():
        warnings.warn(f"{folder} holds an adapter, which is ignored: merge it into the weights", stacklevel=2)
    tokenizer = _load_tokenizer(folder, config.family)
    path = Path(name_or_path).expanduser()
    name = path.resolve().name if path.exists() else str(name_or_path)  # no path of this machine
    return Checkpoint(folder, name, config, tokenizer, _eos_token_ids(folder, tokenizer, config.vocab_size))


def _open_gguf(file: Path) -> Checkpoint:
    from tca_jax.models.gguf import open_gguf
    from tca_jax.models.gguf_tokenizer import build_tokenizer, stop_token_ids  # imports tokenizers

    gguf = open_gguf(file)
    config, remedy = gguf.config(), "convert the model again, or load it from a Hugging Face checkpoint"
    with explaining(f"{file}: its tokenizer cannot be built; {remedy}"):
        return Checkpoint(file, file.name, config, build_tokenizer(gguf.metadata), stop_token_ids(gguf.metadata))


def check_options(
    dtype: Any = None,
    weights: str | None = None,
    kv: str | None = None,
    attention: str | None = None,
    profile: Any = None,
    kept: float | None = None,
) -> Any:
    """The dtype of weights and activations; None is bfloat16 on an accelerator and float32 on the CPU."""
    for argument, value, known in (("weights", weights, WEIGHTS), ("kv", kv, KV)):
        require(value in (None, *known), f"{argument} = {value!r}: must be one of {list(known)}, or None")
        if value == "fp8":
            _require_e4m3(f"{argument} = {value!r}")
    check_attention(attention)
    require(kept is None or (is_finite_number(kept) and 0 < kept <= 1), f"kept = {kept!r}: must be in (0, 1]")
    require(kept is None or profile is not None, f"kept = {kept}: goes with a profile of predicted worth; pass profile")
    if dtype is None:
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    with explaining(f"dtype = {dtype}: must be float32, bfloat16 or float16", TypeError):
        is_known = jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)
    require(is_known, f"dtype = {dtype}: must be float32, bfloat16 or float16")
    return dtype


def _require_e4m3(given: str) -> None:
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    enough = not capability or tuple(map(int, str(capability).split("."))) >= _E4M3_CAPABILITY
    require(enough, f"{given} needs compute capability 8.9, this GPU has {capability}")


def _enable_compilation_cache() -> None:
    """Turns JAX's persistent compilation cache on, unless the user's environment or `jax.config` chose one or none."""
    options: Any = jax.config  # its attributes are unknown to type checkers
    if options.jax_compilation_cache_dir is None and options.jax_enable_compilation_cache:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "tca_jax" / "jax"))


def checkpoint_folder(name_or_path: Any, revision: str | None = None) -> Path:
    """The local folder or GGUF file of a checkpoint, downloaded from the Hub where it is not on this machine."""
    require_type("name_or_path", name_or_path, (str, os.PathLike), "a string or a path")
    name = os.fspath(name_or_path)
    longest = f"must have at most {_LONGEST_NAME:,}"
    require(len(name) <= _LONGEST_NAME, f"name_or_path has {len(name):,} characters: {longest}")
    path = Path(name).expanduser()
    local = gguf_path(path) or (path if path.is_dir() else None)  # never hidden by a name of ours
    if local is None:
        require(path.suffix != ".gguf", f"name_or_path = {name!r} does not exist", FileNotFoundError)
        is_file = path.exists() or path.suffix == ".safetensors"
        require(not is_file, f"name_or_path = {name!r} is a file: pass its folder, with config.json and *.safetensors")
        local = _shipped_folder(name) if name.lower() in SHIPPED else None
    if local is not None:
        here = f"{name!r} is on this machine"
        require(revision is None, f"revision = {revision!r} goes with a model of the Hub: {here}")
        # Files of the Hub's cache are links, whose targets may be gone; such a file would count as left out on purpose.
        for file in (file for pattern in _HUB_FILES if local.is_dir() for file in local.glob(pattern)):
            require(file.exists(), f"{file} is a link, and the file it leads to is missing", FileNotFoundError)
        neither = f"{local} holds neither config.json nor a GGUF file: not a checkpoint folder"
        require(not local.is_dir() or (local / "config.json").is_file(), neither, FileNotFoundError)
        return local
    hub_id = ALIASES.get(name.lower(), name)
    if hub_id.count("/") != 1 or name.startswith((".", "/", "~")):
        known = [*SHIPPED, *ALIASES]
        near = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        meant = f"Nearest aliases: {', '.join(near)}. All" if near else "Aliases"
        none = f"name_or_path = {name!r}: no such folder, Hub id (owner/name) or alias"
        raise UserError(f"{none}. {meant}: {', '.join(known)}")
    return _download(hub_id, revision)


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        with explaining(f"name_or_path = {hub_id!r} is not a valid Hub id", HFValidationError):
            return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_FILES))
    except OSError as error:
        reason = f"could not be downloaded and is not in the local Hub cache ({type(error).__name__}: {error})"
        if isinstance(error, RepositoryNotFoundError):
            login = "gated models such as LLaMA need `hf auth login` and the licence accepted on their page"
            reason = f"is not on the Hugging Face Hub, or needs a login: {login}"
        raise FileNotFoundError(f"{hub_id} {reason}") from error


def _load_tokenizer(folder: Path, family: str) -> Any:
    files = [folder / file for file in _TOKENIZER_FILES if (folder / file).is_file()]
    if not files:
        return None
    pointer = next(filter(is_lfs_pointer, files), None)
    require(pointer is None, f"{pointer} {LFS_POINTER}")
    from transformers import AutoConfig, AutoTokenizer

    named = {"tokenizer_class": read_json_object(folder / "config.json").get("tokenizer_class")}
    with explaining(f"the tokenizer in {folder} cannot be loaded"):
        # Not the model's own config, which transformers may refuse: heads need not divide the hidden size here.
        tokenizer = AutoTokenizer.from_pretrained(folder, config=AutoConfig.for_model(family, **named))
        tokenizer.decode(tokenizer("a")["input_ids"])  # some damage shows in use only
    # Prompts are checked against the model's own positions; a warning about the tokenizer's would say less, or wrongly.
    getattr(tokenizer, "deprecation_warnings", {})["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _eos_token_ids(folder: Path, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Stop tokens from generation_config.json, else config.json, else the tokenizer."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        if not path.exists():
            continue
        if (eos := read_json_object(path).get("eos_token_id")) is not None:
            ids = eos if isinstance(eos, list) else [eos]
            known = all(type(token) is int and 0 <= token < vocab_size for token in ids)  # a bool is no token
            must = f"must be a token id in [0, {vocab_size}), or a list of them"
            require(known, f"{path}: eos_token_id = {eos!r}: {must}")
            return tuple(ids)
    eos = getattr(tokenizer, "eos_token_id", None)
    return () if eos is None else (eos,)


def shipped_profile(name: str = SHIPPED[0]) -> Path:
    """Folder of the profile that ships with a model of the package."""
    return _shipped_folder(name) / "profile"


def _shipped_folder(name: str) -> Path:
    return Path(str(resources.files("tca_jax"))) / "checkpoints" / name.lower()
