"""A folder of results: its configuration, and a file for each finished job."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tca_jax.errors import UserError, require
from tca_jax.files import replacing
from tca_jax.models.json_object import read_json_object

FORMAT = 2
CONFIG = "config.json"
TASKS = "results"
TUNING = "tuning"
#: Entries of the configuration that a second run may extend; all others must be equal.
_GROWING = ("methods", "measured", "sources")


class Job(NamedTuple):
    """An entry of a results folder."""

    method: str
    task: str
    length: int
    protocol: str


@dataclasses.dataclass(frozen=True)
class Results:
    """A results folder."""

    folder: Path

    def open(self, config: Mapping[str, Any]) -> None:
        """Creates the folder, or continues one of the same configuration, with the entries of `_GROWING` that are new.

        ValueError if the folder has another configuration, with the difference, or its file is damaged.
        """
        held = self.require_same(config)
        merged = {**config, **{name: {**held.get(name, {}), **config[name]} for name in _GROWING}}
        if merged != held:
            write_json(self.folder / CONFIG, merged)

    def require_same(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of the folder, empty for a new one; raises as `open` does, and writes nothing."""
        path = self.folder / CONFIG
        if not path.exists():
            held = self.folder.is_dir() and _finished(self.folder.iterdir())
            require(not held, f"--out {self.folder} holds files but no {CONFIG}: must be new, or of an evaluation")
            return {}
        held = read_json_object(path)
        pairs = [(name, held.get(name), config.get(name)) for name in {**config, **held} if name not in _GROWING]
        for group in _GROWING:
            old = held.get(group, {})
            pairs += [(f"{group}[{name}]", old.get(name, value), value) for name, value in config[group].items()]
        for name, there, here in pairs:
            made = f"--out {self.folder} was made with {name} = {_shown(there)}, this run has {_shown(here)}"
            require(there == here, f"{made}: use another folder, or the same settings")
        return held

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of the folder."""
        return read_json_object(self.folder / CONFIG)

    def path(self, job: Job) -> Path:
        """The file of a job."""
        name = re.sub(r"[^\w+.=,-]", "_", job.method)
        return self.folder / TASKS / name / f"{job.task}-{job.length}-{job.protocol}.json"

    def has(self, job: Job) -> bool:
        """Whether a job is finished; ValueError if its file is damaged."""
        return self.path(job).exists() and _read_task(self.path(job))["method"] == job.method

    def write(self, job: Job, record: Mapping[str, Any]) -> None:
        """Writes a finished job's file atomically."""
        write_json(self.path(job), {**job._asdict(), **record})

    def read_all(self) -> list[dict[str, Any]]:
        """All finished jobs of this and earlier runs; ValueError if a file is damaged."""
        return [_read_task(path) for path in _finished((self.folder / TASKS).glob("*/*.json"))]

    def read_tuning(self) -> list[dict[str, Any]]:
        """Trials of `--tune` by method, TCA included."""
        records = map(read_json_object, _finished((self.folder / TUNING).glob("*.json")))
        return [record for record in records if "trials" in record]


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a file atomically, and syncs it."""
    with replacing(path) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _finished(paths: Iterable[Path]) -> list[Path]:
    """Sorted, without names that begin with a dot, which a run that was killed leaves."""
    return sorted(path for path in paths if not path.name.startswith("."))


def _read_task(path: Path) -> dict[str, Any]:
    try:
        record = read_json_object(path)
        require("method" in record, f"{path} names no method")
        return record
    except ValueError as error:
        raise UserError(f"{error}; delete it, and its task is run again") from None


def _shown(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, Mapping) else str(value.get("label", value))
