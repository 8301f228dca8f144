"""Profile: the row of budgets that the paper's calibration chose for every KV head, through Orbax."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64

from tca_jax.calibration.worth_profile import FORMAT_VERSION as WORTH_VERSION
from tca_jax.calibration.worth_profile import WorthProfile, require_weights
from tca_jax.errors import check_integer, explaining, require
from tca_jax.methods.base import Method
from tca_jax.methods.candidates import kept_share
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.registry import get
from tca_jax.models.config import ModelConfig
from tca_jax.persistence import load, save

FORMAT_VERSION, _OLD_VERSIONS = 6, (3, 4)
_READ_VERSIONS = (*_OLD_VERSIONS, WORTH_VERSION, FORMAT_VERSION)
_ARRAYS = ("candidates", "scores")
_METADATA = ("config", "fingerprint", "model_name", "library_version", "sources")
_OF_CONFIG = frozenset(field.name for field in dataclasses.fields(TCAConfig))
_SCORE_SLACK = 0.01  # float32 sums over long texts leave [0, 1] by rounding


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """Budgets of the paper's rule (Algorithm 1) for each KV head of each layer.

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
        rows, shape = self.config.num_candidates + 1, np.shape(self.candidates)
        candidates = _checked("candidates", self.candidates, np.int32, shape, rows - 1)
        scores = _checked("scores", self.scores, np.float32, (*shape, rows), 1, slack=_SCORE_SLACK)
        object.__setattr__(self, "candidates", candidates)
        object.__setattr__(self, "scores", scores)
        object.__setattr__(self, "sources", tuple(map(dict, self.sources)))

    def __repr__(self) -> str:
        tokens = max((source["tokens"] for source in self.sources), default=131072)
        shape = "{} layers of {} KV heads".format(*self.candidates.shape)
        return f"Profile({self.model_name!r}, {shape}, {self.kept_share(tokens).mean():.1%} kept of {tokens:,} tokens)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values()[:-1])

    def _values(self) -> tuple[Any, ...]:
        """All fields, to compare; the last, dicts, cannot be hashed."""
        arrays = self.candidates.shape, self.candidates.tobytes(), self.scores.tobytes()
        return *arrays, *(getattr(self, name) for name in _METADATA)

    @classmethod
    def uniform(cls, config: TCAConfig, num_layers: int, num_kv_heads: int, candidate: int) -> Profile:
        """The same row for every head, in [0, M], with NaN scores; fits any model of this shape.

        Raises:
            ValueError: `candidate` is out of range, or a size is not positive.
        """
        shape = (num_layers, num_kv_heads)
        scores = np.full((*shape, config.num_candidates + 1), np.nan, np.float32)
        return cls(np.full(shape, candidate, np.int32), scores, config, None, f"uniform candidate {candidate}")

    def kept_share(self, num_tokens: int) -> Float64[np.ndarray, "layers Hkv"]:
        """Share of a full cache's tokens that a prompt of this length leaves in the cache of each head, at most.

        Kept are the selected tokens of the n ranked blocks (Eq. 7), the reserve (a bound: budgets may hold some of its
        tokens anyway), and every token right of those blocks; a prompt with n = 0 keeps everything.

        Raises:
            ValueError: `num_tokens` is not a positive integer.
        """
        check_integer("num_tokens", num_tokens, at_least=1)
        return kept_share(self.config, int(num_tokens), self.candidates)

    def validate_for(self, model_config: ModelConfig, fingerprint: str | None, name: str) -> None:
        """Raises ValueError if the profile has another shape than a model, or comes from other weights.

        A `fingerprint` of None skips the comparison of weights; `name` is the model's, for the message.
        """
        wanted, shape = (model_config.num_layers, model_config.num_kv_heads), self.candidates.shape
        has = f"has {shape[0]} layers of {shape[1]} heads, but model {name!r} has {wanted[0]} of {wanted[1]}"
        require(shape == wanted, f"profile of {self.model_name!r} {has}: calibrate this model")
        require_weights(self, fingerprint, name)

    def method(self) -> Method:
        """The attention method that runs under these budgets, a `tca_jax.methods` object."""
        return get("tca", candidates=self.candidates, config=self.config)

    def settings(self) -> None:
        """Arrays of the method: none."""

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the profile to a directory, in place of the one that it holds; other files in it are left alone.

        The new profile takes the place of the old one with a rename: `load` finds one of them, whenever the save is
        interrupted.

        Raises:
            OSError: it cannot be written to; the message names it, and what it held still loads.
        """
        own = {"format_version": FORMAT_VERSION, "config": dataclasses.asdict(self.config), "sources": [*self.sources]}
        metadata = {name: getattr(self, name) for name in _METADATA} | own
        save("profile", directory, {name: getattr(self, name) for name in _ARRAYS}, metadata)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Profile | WorthProfile:
        """Reads the profile that `save` wrote to a directory, of either kind.

        Raises:
            FileNotFoundError: `directory` does not exist.
            ValueError: it holds no profile, or one that is damaged, inconsistent, of another format or of the search
                of an older version; the message names the folder.
        """
        folder, metadata, arrays = load("profile", directory)
        version = metadata.get("format_version") if isinstance(metadata, dict) else None
        reads = f"tca_jax {importlib.metadata.version('tca-jax')} reads {list(_READ_VERSIONS)}"
        given = f"{folder}: format_version = {version!r}"
        require(version in _READ_VERSIONS, f"{given}: {reads}; upgrade tca_jax, or calibrate again")
        damaged = f"{folder}: damaged", ValueError, TypeError, LookupError, AttributeError
        with explaining(*damaged):
            if version == WORTH_VERSION:
                return WorthProfile.of_saved(metadata, arrays)
            is_of_paper = version not in _OLD_VERSIONS or _is_of_paper(metadata["config"], arrays)
        require(is_of_paper, f"{folder} was made by the search of an older version: calibrate again (a minute)")
        with explaining(*damaged):
            fields = {name: metadata[name] for name in _METADATA} | {name: arrays[name] for name in _ARRAYS}
            config = fields["config"].items()
            fields["config"] = TCAConfig(**{k: v for k, v in config if version == FORMAT_VERSION or k in _OF_CONFIG})
            fields["sources"] = tuple(fields["sources"])
            return cls(**fields)


def _is_of_paper(config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether Algorithm 1 made a profile of format 3 or 4: one row a head, all heads read "sparse" (code 0)."""
    equal = np.array_equal(arrays["candidates"], arrays["prefill_candidates"])
    return config["criterion"] != "worth" and not arrays["readings"].any() and equal


def options_of(profile: Profile | WorthProfile) -> dict[str, Any]:
    """Calibration's results by the names of the methods' options that take them."""
    if isinstance(profile, WorthProfile):
        return {"gates": profile.maps.head_weights / profile.maps.head_weights.max()}
    return {"config": profile.config, "candidates": profile.candidates}


def _checked(name: str, value: Any, dtype: Any, shape: tuple[int, ...], most: int, slack: float = 0) -> np.ndarray:
    """`value` as a read-only array of this type, of a shape and of entries in [0, most] or NaN."""
    array, kind = np.asarray(value), np.dtype(dtype).kind
    wanted = "floats" if kind == "f" else "integers"
    of = "[layers, H_kv]" if name == "candidates" else list(shape)
    fits = array.dtype.kind.replace("u", "i") == kind and array.shape == shape and array.ndim >= 2 and array.size
    require(fits, f"Profile.{name}: must be {wanted} {of}, got {array.dtype} {list(array.shape)}")
    wrong = (array < -slack) | (array > most + slack)
    at = tuple(map(int, np.unravel_index(np.argmax(wrong), shape)))
    require(not wrong.any(), f"Profile.{name}{list(at)} = {array[at]}: must lie in [0, {most}]")
    array = array.astype(dtype)
    array.setflags(write=False)  # a frozen dataclass should not change through its arrays
    return array
