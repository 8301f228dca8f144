"""Profile: the candidate that calibration chose for every KV head, saved and loaded through Orbax."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import numbers
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Float32, Float64, Int32

from tca_jax.methods.candidates import budget_counts, budget_sizes
from tca_jax.methods.config import TCAConfig
from tca_jax.models.config import ModelConfig

FORMAT_VERSION = 1

# Steps are folders `profile_0`, `profile_1`, ... The prefix matters: without one, Orbax takes a folder with a
# number for its name as an old step, and deletes it.
_STEP_PREFIX = "profile"
# Fields of the metadata and what they may be; TCAConfig checks the config's own fields.
_METADATA_TYPES: Mapping[str, tuple[type | UnionType, str]] = {
    "format_version": (int, "an integer"),
    "config": (dict, "an object"),
    "fingerprint": (str | None, "a string or null"),
    "model_name": (str, "a string"),
    "sources": (list, "a list"),
    "library_version": (str, "a string"),
}
_SCORE_SLACK = 0.01  # float32 sums over long texts leave [0, 1] by rounding


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """What calibration found: one candidate budget distribution for each KV head of each layer.

    Attributes:
        candidates: Rows of `candidate_distributions(config)`, int32 `[layers, H_kv]`; row M is "dense".
        scores: Calibration score of every candidate, float32 `[layers, H_kv, M + 1]`; NaN where not measured.
        config: The hyperparameters that the profile was made with and is used with.
        fingerprint: Of the model's weights (`models.fingerprint`); None fits any model of this shape.
        model_name: Name of the model, for messages and titles.
        sources: One entry for each calibration sequence: its number of "tokens" and the "sha256" of its ids.
        library_version: Version of tca_jax that made the profile.

    Raises:
        ValueError: a field has a wrong shape, dtype or range; the message names it.
    """

    candidates: np.ndarray
    scores: np.ndarray
    config: TCAConfig
    fingerprint: str | None
    model_name: str
    sources: tuple[Mapping[str, Any], ...] = ()
    library_version: str = dataclasses.field(default_factory=lambda: importlib.metadata.version("tca-jax"))

    def __post_init__(self) -> None:
        rows = self.config.num_candidates + 1
        object.__setattr__(self, "candidates", _checked_candidates(self.candidates, rows))
        object.__setattr__(self, "scores", _checked_scores(self.scores, (*self.candidates.shape, rows)))
        object.__setattr__(self, "sources", _checked_sources(self.sources))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Profile):
            return NotImplemented
        return (
            np.array_equal(self.candidates, other.candidates)
            and np.array_equal(self.scores, other.scores, equal_nan=True)
            and self._metadata() == other._metadata()
        )

    def __hash__(self) -> int:
        return hash((self.candidates.tobytes(), self.config, self.fingerprint, self.model_name))

    @classmethod
    def uniform(cls, config: TCAConfig, num_layers: int, num_kv_heads: int, candidate: int) -> Profile:
        """The same candidate for every head, unmeasured: the baseline of experiments with budgets.

        Args:
            config: Hyperparameters.
            num_layers: Layers of the model.
            num_kv_heads: KV heads of a layer, H_kv.
            candidate: Row in [0, M]; M keeps every token.

        Returns:
            A profile with NaN scores that fits any model of this shape.

        Raises:
            ValueError: `candidate` is out of range, or a size is not positive.
        """
        shape = (num_layers, num_kv_heads)
        return cls(
            candidates=np.full(shape, candidate, np.int32),
            scores=np.full((*shape, config.num_candidates + 1), np.nan, np.float32),
            config=config,
            fingerprint=None,
            model_name=f"uniform candidate {candidate}",
        )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.candidates.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer, H_kv."""
        return self.candidates.shape[1]

    def kept_share(self, num_tokens: int) -> Float64[np.ndarray, "layers Hkv"]:
        """Share of a full cache's tokens that a prompt leaves in the cache of each head.

        Kept are the selected tokens of the n ranked blocks (Eq. 7) and every token right of them, the local
        tokens of the first new one; a prompt with n = 0 keeps everything.

        Args:
            num_tokens: Length of the prompt, L.

        Returns:
            Shares in (0, 1], `[layers, H_kv]`.

        Raises:
            ValueError: `num_tokens` is not a positive integer.
        """
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, numbers.Integral) or num_tokens < 1:
            raise ValueError(f"num_tokens = {num_tokens!r}: must be an integer of at least 1")
        num_ranked = self.config.num_ranked_blocks(int(num_tokens))
        selected = budget_counts(self.config, num_ranked).astype(np.int64) @ budget_sizes(self.config)
        local = num_tokens - num_ranked * self.config.block_size
        return (selected[self.candidates] + local) / np.float64(num_tokens)

    def method(self) -> Any:
        """The attention method that the profile describes."""
        return self.config.method(self.candidates)

    def validate_for(self, model_config: ModelConfig, fingerprint: str | None, name: str) -> None:
        """Checks that the profile belongs to a model.

        Args:
            model_config: The model's shape.
            fingerprint: The model's fingerprint; None skips the comparison of weights.
            name: The model's name, for the message.

        Raises:
            ValueError: the profile has another number of layers or KV heads, or comes from other weights.
        """
        wanted = (model_config.num_layers, model_config.num_kv_heads)
        if self.candidates.shape != wanted:
            raise ValueError(
                f"profile of {self.model_name!r} has {self.num_layers} layers of {self.num_kv_heads} heads, "
                f"but model {name!r} has {wanted[0]} of {wanted[1]}: calibrate this model"
            )
        if None not in (self.fingerprint, fingerprint) and self.fingerprint != fingerprint:
            raise ValueError(
                f"profile of {self.model_name!r} was made with other weights than those of model {name!r} "
                f"(fingerprint {self.fingerprint!r}, the model's is {fingerprint!r}): calibrate this model"
            )

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the profile to a directory, in place of the one that it holds.

        The new profile is written beside the old one and takes its place with a rename: whenever the save is
        interrupted, `load` finds one of the two, whole.

        Args:
            directory: Created if missing. Other files in it are left alone.

        Raises:
            ValueError: `directory` is a file.
        """
        path = _absolute(directory)
        if path.exists() and not path.is_dir():
            raise ValueError(f"cannot save a profile to {path}: it is a file, not a directory")
        with _manager(
            path,
            max_to_keep=1,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,  # what an interrupted save left
        ) as manager:
            latest = manager.latest_step()
            manager.save(
                0 if latest is None else latest + 1,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave({"candidates": self.candidates, "scores": self.scores}),
                    metadata=ocp.args.JsonSave(self._metadata()),
                ),
            )

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Profile:
        """Reads the profile that `save` wrote to a directory, on any kind and number of devices.

        Args:
            directory: As given to `save`. Nothing in it is changed.

        Returns:
            The profile, every number as it was saved.

        Raises:
            FileNotFoundError: `directory` does not exist.
            ValueError: it holds no profile, or one that is damaged, inconsistent or of a newer format; the
                message names the file and the field.
        """
        path = _absolute(directory)
        if not path.exists():
            raise FileNotFoundError(f"profile directory {path} does not exist")
        if not path.is_dir():
            raise ValueError(f"{path} is a file, not a profile directory")
        with _manager(path, read_only=True) as manager:
            step = manager.latest_step()
            if step is None:
                raise ValueError(f"{path} holds no profile: there is no {_STEP_PREFIX}_<number> folder in it")
            folder = path / f"{_STEP_PREFIX}_{step}"
            metadata_file = folder / "metadata" / "metadata"
            metadata = _restore(manager, step, "metadata", ocp.args.JsonRestore(), metadata_file)
            fields = _profile_fields(metadata, metadata_file)
            arrays = _restore(manager, step, "arrays", ocp.args.StandardRestore(), folder / "arrays")
        if not isinstance(arrays, dict) or set(arrays) != {"candidates", "scores"}:
            found = sorted(arrays) if isinstance(arrays, dict) else type(arrays).__name__
            raise ValueError(f"{folder / 'arrays'}: must hold candidates and scores, found {found}")
        try:
            return cls(**arrays, **fields)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    def _metadata(self) -> dict[str, Any]:
        """All but the arrays, as JSON values."""
        return {
            "format_version": FORMAT_VERSION,
            "config": dataclasses.asdict(self.config),
            "fingerprint": self.fingerprint,
            "model_name": self.model_name,
            "sources": [dict(source) for source in self.sources],
            "library_version": self.library_version,
        }


def _checked_candidates(value: Any, rows: int) -> Int32[np.ndarray, "layers Hkv"]:
    """`value` as a read-only int32 array of rows in [0, rows)."""
    array = np.asarray(value)
    if array.ndim != 2 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"Profile.candidates: must be integers [layers, H_kv], got {array.dtype} {list(array.shape)}")
    wrong = np.argwhere((array < 0) | (array >= rows))
    if len(wrong):
        layer, head = wrong[0]
        raise ValueError(
            f"Profile.candidates[{layer}, {head}] = {array[layer, head]}: must lie in [0, {rows - 1}], "
            f"where {rows - 1} is dense"
        )
    return _frozen(array, np.int32)


def _checked_scores(value: Any, shape: tuple[int, ...]) -> Float32[np.ndarray, "layers Hkv rows"]:
    """`value` as a read-only float32 array of that shape with scores in [0, 1] or NaN."""
    array = np.asarray(value)
    if array.shape != shape or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"Profile.scores: must be floats [layers, H_kv, M + 1] = {list(shape)}, "
            f"got {array.dtype} {list(array.shape)}"
        )
    wrong = np.argwhere((array < -_SCORE_SLACK) | (array > 1 + _SCORE_SLACK))
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise ValueError(f"Profile.scores{list(at)} = {array[at]}: must lie in [0, 1]")
    return _frozen(array, np.float32)


def _checked_sources(value: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """`value` with entries {"tokens": int, "sha256": str}, copied."""
    kinds = {"tokens": int, "sha256": str}
    for index, source in enumerate(value):
        if (
            not isinstance(source, Mapping)
            or set(source) != set(kinds)
            or not all(isinstance(source[key], kind) for key, kind in kinds.items())
        ):
            raise ValueError(
                f"Profile.sources[{index}] = {source!r}: must hold an integer 'tokens' and a string 'sha256'"
            )
    return tuple(dict(source) for source in value)


def _frozen(array: np.ndarray, dtype: Any) -> np.ndarray:
    """A read-only copy: a frozen dataclass should not change through its arrays."""
    copy = np.array(array, dtype=dtype)
    copy.setflags(write=False)
    return copy


def _profile_fields(metadata: Any, file: Path) -> dict[str, Any]:
    """Arguments of `Profile` from the metadata in `file`, every field checked for its type."""
    if not isinstance(metadata, dict) or "format_version" not in metadata:
        raise ValueError(f"{file}: has no field 'format_version', so it is not a tca_jax profile")
    version = metadata["format_version"]
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(
            f"{file}: format_version = {version} is newer than {FORMAT_VERSION}, the newest that tca_jax "
            f"{importlib.metadata.version('tca-jax')} reads: upgrade tca_jax"
        )
    _require_fields(metadata, _METADATA_TYPES, str(file))
    for name, (kind, description) in _METADATA_TYPES.items():
        if not isinstance(metadata[name], kind):
            raise ValueError(f"{file}: {name} = {metadata[name]!r}: must be {description}")
    _require_fields(metadata["config"], [f.name for f in dataclasses.fields(TCAConfig)], f"{file}: config")
    try:
        config, sources = TCAConfig(**metadata["config"]), _checked_sources(metadata["sources"])
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    names = ("fingerprint", "model_name", "library_version")
    return {
        "config": config,
        "sources": sources,
        **{name: metadata[name] for name in names},
    }


def _require_fields(found: dict[str, Any], wanted: Collection[str], where: str) -> None:
    """Raises unless `found` has exactly the fields `wanted`."""
    if unknown := sorted(set(found) - set(wanted)):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; known are {sorted(wanted)}")
    if missing := sorted(set(wanted) - set(found)):
        raise ValueError(f"{where}: field {missing[0]!r} is missing")


def _restore(manager: ocp.CheckpointManager, step: int, item: str, args: Any, path: Path) -> Any:
    """One item of a step; whatever Orbax raises over a damaged one becomes a ValueError that names `path`."""
    try:
        return manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
    except Exception as error:
        raise ValueError(f"{path}: missing or damaged, cannot be read ({error})") from error


@contextlib.contextmanager
def _manager(path: Path, **options: Any) -> Iterator[ocp.CheckpointManager]:
    """A checkpoint manager on `path`, with Orbax's log muted below errors.

    It tells its life at INFO and warns of the read-only mode that it is given; what matters arrives as an
    exception.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        managed = ocp.CheckpointManagerOptions(step_prefix=_STEP_PREFIX, **options)
        with ocp.CheckpointManager(path, options=managed) as manager:
            yield manager
    finally:
        logger.setLevel(level)


def _absolute(directory: str | os.PathLike[str]) -> Path:
    """Orbax takes absolute paths only."""
    return Path(directory).expanduser().absolute()
