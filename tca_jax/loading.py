"""`tca_jax.load`: from a name to a model on the device, with its tokenizer and its profile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tca_jax.engine.lm import LM
from tca_jax.engine.programs import enable_compilation_cache
from tca_jax.models.config import read_config
from tca_jax.models.params import load_decoder
from tca_jax.models.registry import ALIASES

if TYPE_CHECKING:
    from tca_jax.calibration.profile import Profile

SHIPPED = ("recall-tiny",)
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load(
    name_or_path: str | os.PathLike[str],
    profile: str | os.PathLike[str] | Profile | None = None,
    *,
    dtype: Any = None,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LM:
    """Loads a LLaMA 3.x, Qwen2, Qwen2.5 or Qwen3 checkpoint straight into device arrays.

    Args:
        name_or_path: A local folder with config.json and *.safetensors, an alias (`models.registry.ALIASES`, or
            "recall-tiny", which ships with the package), or a Hugging Face Hub id; looked up in this order.
        profile: Head budgets: a folder that `Profile.save` wrote, a `Profile`, "shipped" for the one beside a shipped
            model, or None for exact full attention.
        dtype: Of weights and activations; None is bfloat16 on an accelerator and float32 on the CPU.
        revision: Branch, tag or commit on the Hub.
        progress: Called as `progress(bytes_read, bytes)` after each tensor.

    Returns:
        The model; `lm.with_profile(other)` shares its weights.

    Raises:
        ValueError: unknown alias (with the list), unsupported architecture or option, a profile of another model.
        FileNotFoundError: a file of the checkpoint is missing (with its name).
    """
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if not _is_supported(dtype):
        raise ValueError(f"dtype = {dtype}: must be float32, bfloat16 or float16")
    enable_compilation_cache()
    folder = checkpoint_folder(name_or_path, revision)
    config = read_config(folder)
    tokenizer = _load_tokenizer(folder)
    profile = _resolve_profile(folder, profile)
    if profile is not None:
        profile.validate_for(config, None, _display_name(name_or_path))  # shape first: cheap, before gigabytes are read
    decoder = load_decoder(folder, config, dtype, progress)
    eos = _eos_token_ids(folder, tokenizer)
    pad = getattr(tokenizer, "pad_token_id", None)
    lm = LM.from_decoder(
        decoder,
        name=_display_name(name_or_path),
        tokenizer=tokenizer,
        eos_token_ids=eos,
        pad_token_id=pad if pad is not None else (eos[0] if eos else 0),
    )
    return lm.with_profile(profile)


def checkpoint_folder(name_or_path: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The local folder of a checkpoint, downloaded from the Hub where it is not on this machine.

    Raises:
        ValueError: neither an alias, nor a folder, nor a Hub id; lists the aliases.
        FileNotFoundError: the folder has no config.json, or the Hub has no such repository.
    """
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if path.is_dir():  # first: a folder of the user's own is never hidden by a name of ours
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} holds no config.json: not a Hugging Face checkpoint folder")
        return path
    if name.lower() in SHIPPED:
        return Path(str(resources.files("tca_jax"))) / "checkpoints" / name.lower()
    hub_id = ALIASES.get(name.lower(), name)
    if hub_id.count("/") != 1 or name.startswith((".", "/", "~")):
        known = ", ".join([*SHIPPED, *ALIASES])
        raise ValueError(f"name_or_path = {name!r}: no such folder, Hub id (owner/name) or alias. Aliases: {known}")
    return _download(hub_id, revision)


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_FILES))
    except HFValidationError as error:
        raise ValueError(f"name_or_path = {hub_id!r} is not a valid Hub id: {error}") from None
    except RepositoryNotFoundError:
        raise FileNotFoundError(
            f"{hub_id} is not on the Hugging Face Hub, or needs a login: gated models such as LLaMA need "
            "`hf auth login` and the licence accepted on their page"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(
            f"{hub_id} could not be downloaded and is not in the local Hub cache ({type(error).__name__}: {error})"
        ) from error


def _is_supported(dtype: Any) -> bool:
    try:
        return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)
    except TypeError:  # no dtype at all
        return False


def _display_name(name_or_path: str | os.PathLike[str]) -> str:
    """What messages and profiles call the model: no path of this machine, only the folder's own name."""
    path = Path(name_or_path).expanduser()
    return path.resolve().name if path.is_dir() else str(name_or_path)


def _load_tokenizer(folder: Path) -> Any:
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever the tokenizer libraries raise, the user needs to know which folder
        raise ValueError(f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}") from error


def _eos_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Stop tokens from generation_config.json, else config.json, else the tokenizer."""
    for file in ("generation_config.json", "config.json"):
        if (folder / file).is_file():
            eos = json.loads((folder / file).read_text(encoding="utf-8")).get("eos_token_id")
            if eos is not None:
                return tuple(eos) if isinstance(eos, list) else (eos,)
    eos = getattr(tokenizer, "eos_token_id", None)
    return () if eos is None else (eos,)


def _resolve_profile(folder: Path, profile: Any) -> Profile | None:
    from tca_jax.calibration.profile import Profile

    if profile is None or isinstance(profile, Profile):
        return profile
    if profile != "shipped":
        return Profile.load(profile)
    if not (folder / "profile").is_dir():
        raise FileNotFoundError(f"profile = 'shipped': {folder} holds no profile folder; calibrate the model")
    return Profile.load(folder / "profile")
