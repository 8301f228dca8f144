"""Folders of saved arrays and JSON that are replaced whole: numbered steps, written by Orbax, published by one rename.

A save writes to a temporary folder of its own and renames it to `<kind>_<N>`, such as `profile_3`, N above every number
there is; then older steps go. A load reads the highest step. So writers need no lock, and a reader finds what was there
before a save or what the save wrote, whichever moment it comes at.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from tca_jax.errors import UserError, require_type

T = TypeVar("T")
RestoreArrays = Callable[[Iterable[str]], dict[str, np.ndarray]]

_TEMPORARY = re.compile(r"\.tmp-(?P<host>.+)-(?P<pid>[0-9]+)-[0-9a-f]{32}")
_ABANDONED_SECONDS = 24 * 3600  # the age at which a temporary folder of another machine counts as nobody's
_STEP_BYTES = 128 * 1024  # more than the files of a step take beside the bytes of its arrays
_SMALL_BYTES = 2**26  # from here on what Orbax needs beside the arrays' own bytes is a small part of them
_SAVING = threading.Lock()  # Orbax's folders wait for signals that all saves of a process share: two at once fail
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # what a rename onto a name in use ends with


def save_step(kind: str, directory: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Writes a new step, which `load_step` finds from then on, and removes the older ones.

    Of several processes of `jax.distributed` the first one writes; the others return at once.

    Args:
        kind: What is saved, in one word.
        directory: Absolute; created if missing. Files in it that are no steps are left alone.
        arrays: By name.
        metadata: JSON values.

    Raises:
        OSError: the step cannot be written, and `load_step` finds what it found before; the message names `directory`.
    """
    if jax.process_index():
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with temporary_folder(directory) as temporary:
            _require_room(temporary / "room", sum(array.nbytes for array in arrays.values()))
            _write(temporary / "step", arrays, metadata)
            _sync_tree(temporary / "step")
            _publish(temporary / "step", directory, kind)
    except Exception as error:
        raise _save_error(kind, directory, error) from error
    sync_folder(directory)
    _clean_up(directory, kind)


def absolute_folder(directory: Any) -> Path:
    """The directory as an absolute path, the only kind that Orbax takes.

    Raises:
        ValueError: it is empty, which would name the current folder.
        TypeError: it is neither a string nor a path.
    """
    require_type("directory", directory, (str, os.PathLike), "a string or a path")
    if not os.fspath(directory):
        raise UserError("directory = '': must name a folder")
    return Path(directory).expanduser().absolute()


def checksum(metadata: Mapping[str, Any], arrays: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of the metadata and over each array's name, dtype, shape and bytes."""
    digest = hashlib.sha256(_canonical_json(metadata))
    for name, values in sorted(arrays.items()):
        array = np.asarray(values)
        array = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        digest.update(_canonical_json([name, array.dtype.str, array.shape]))
        digest.update(array.reshape(-1).view(np.uint8).data)  # in place: a context has gigabytes
    return digest.hexdigest()


def _canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def load_step(kind: str, directory: Path, parse: Callable[[Path, Any, RestoreArrays], T]) -> T:
    """Reads the newest step. Nothing in the directory is changed.

    Args:
        kind: What was saved.
        directory: Absolute.
        parse: Called as `parse(folder, metadata, restore)`, where `restore(names)` reads arrays by their names;
            ValueError where they are damaged.

    Returns:
        What `parse` made of the step.

    Raises:
        ValueError: there is no step, or the newest is damaged; the message names the folder.
    """
    failure = UserError(f"{directory} holds no {kind}: there is no {kind}_<number> folder in it")
    tried, newest = -1, _newest_step(directory, kind)
    while newest > tried:  # where one cannot be read because a save has just replaced it, there is a newer one
        folder = directory / f"{kind}_{newest}"
        try:
            metadata = _restore_metadata(folder)
            return parse(folder, metadata, functools.partial(_restore_arrays, folder))
        except UserError as error:
            failure, tried = error, newest
        except ValueError as error:  # of the libraries that read it
            failure, tried = UserError(f"{folder}: damaged: {error}"), newest
        except RecursionError:  # in the checksum, or in the words of another error
            failure, tried = UserError(f"{folder}: damaged: its metadata are nested too deeply"), newest
        newest = _newest_step(directory, kind)
    raise failure


def _write(folder: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    import orbax.checkpoint as ocp  # takes a third of a second

    def composite() -> ocp.CompositeCheckpointHandler:
        handlers = {
            "arrays": ocp.StandardCheckpointHandler(**_alone()),
            "metadata": ocp.JsonCheckpointHandler(**_alone()),
        }
        return ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(**_alone()), **handlers)

    with _SAVING, _quiet(), ocp.Checkpointer(composite(), **_alone()) as checkpointer:
        items = {"arrays": ocp.args.StandardSave(dict(arrays)), "metadata": ocp.args.JsonSave(dict(metadata))}
        checkpointer.save(folder, args=ocp.args.Composite(**items))
    for note in folder.rglob("commit_success.txt"):  # nobody reads it, and it tells a path of this machine
        note.unlink()


def _require_room(file: Path, num_bytes: int) -> None:
    """Raises the system's own error where a step does not fit: over a full disk, Orbax prints tracebacks of threads."""
    needed = 2 * num_bytes + _STEP_BYTES if num_bytes < _SMALL_BYTES else num_bytes + _SMALL_BYTES
    with open(file, "wb") as opened:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(opened.fileno(), 0, needed)  # takes the room without writing it
        else:
            opened.write(bytes(min(needed, 2 * _SMALL_BYTES)))
        os.fsync(opened.fileno())
    file.unlink()


def _restore_metadata(folder: Path) -> Any:
    import orbax.checkpoint as ocp

    with _reading(folder / "metadata" / "metadata"):
        handler = ocp.JsonCheckpointHandler(**_alone())
        with ocp.Checkpointer(handler, **_alone()) as checkpointer:
            return checkpointer.restore(folder / "metadata")


def _restore_arrays(folder: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Arrays by name, one after the other: where reading several at once fails, Orbax closes its event loop under
    those that are still on their way, and each writes a traceback to the terminal."""
    import orbax.checkpoint as ocp

    def restore(name: str) -> np.ndarray:
        restored = ocp.RestoreArgs(restore_type=np.ndarray)
        args = ocp.args.PyTreeRestore({name: np.zeros(0)}, restore_args={name: restored}, partial_restore=True)
        return np.asarray(checkpointer.restore(folder / "arrays", args=args)[name])

    with _reading(folder / "arrays"):
        handler = ocp.PyTreeCheckpointHandler(**_alone())
        with ocp.Checkpointer(handler, **_alone()) as checkpointer:
            return {name: restore(name) for name in names}


def _alone() -> dict[str, Any]:
    """Options of Orbax under which no process of `jax.distributed` waits for others: some may have nothing to do."""
    import orbax.checkpoint as ocp

    own = jax.process_index()
    return {"multiprocessing_options": ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})}


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever Orbax raises over something missing or damaged becomes a ValueError of one line that names `path`."""
    try:
        with _quiet():
            yield
    except Exception as error:
        # Orbax's own words help nobody, those of the system ("Permission denied") do.
        reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        raise UserError(f"{path}: missing or damaged, cannot be read{reason}") from error


def _publish(folder: Path, directory: Path, kind: str) -> None:
    """Renames a finished folder to the first free step above all there are."""
    while True:
        step = max(_steps(directory, kind), default=-1) + 1
        try:
            os.rename(folder, directory / f"{kind}_{step}")
            return
        except OSError as error:
            if error.errno not in _TAKEN:  # by another save, since we looked
                raise


def _clean_up(directory: Path, kind: str) -> None:
    """Removes the steps below the newest, and what killed saves have left. Not to manage it is no error."""
    with contextlib.suppress(OSError):
        steps = _steps(directory, kind)
        for step in sorted(steps)[:-1]:
            with contextlib.suppress(OSError), temporary_folder(directory) as temporary:
                # Renamed first, so that it is gone at once.
                os.rename(directory / f"{kind}_{step}", temporary / "step")
        remove_abandoned(directory)


def remove_abandoned(directory: Path) -> None:
    """Removes the temporary folders in a directory that killed processes have left.

    Raises:
        OSError: the directory cannot be listed.
    """
    for entry in os.scandir(directory):
        with contextlib.suppress(OSError):
            if _is_abandoned(entry):
                _remove(Path(entry.path))


def _steps(directory: Path, kind: str) -> list[int]:
    """Numbers in use, by folders and by files."""
    step = re.compile(kind + r"_(0|[1-9][0-9]*)")
    return [int(match[1]) for name in os.listdir(directory) if (match := step.fullmatch(name))]


def _newest_step(directory: Path, kind: str) -> int:
    """Number of the newest folder, -1 where there is none."""
    for _ in range(2):  # a listing may miss the step that goes and the one that comes; two in a row do not
        steps = [step for step in _steps(directory, kind) if (directory / f"{kind}_{step}").is_dir()]
        if steps:
            return max(steps)
    return -1


@contextlib.contextmanager
def temporary_folder(directory: Path) -> Iterator[Path]:
    """A folder in `directory` under a name that no other save uses and that tells whose it is; removed in the end."""
    folder = directory / f".tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Removes a folder; what cannot be removed now, or is still written to by a failed save, a later save removes."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    """Whether it is a temporary folder whose writer is dead for certain, or older than any save lasts."""
    owner = _TEMPORARY.fullmatch(entry.name)
    if owner is None:
        return False
    if owner["host"] == socket.gethostname() and not _is_alive(int(owner["pid"])):
        return True
    return time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS


def _is_alive(pid: int) -> bool:
    if os.name != "posix":  # signal 0 would end the process there
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _sync_tree(folder: Path) -> None:
    """Forces a folder to disk: after a power cut, a step that was renamed into place must not be empty."""
    for root, _, files in os.walk(folder, topdown=False):
        for file in files:
            with open(os.path.join(root, file), "rb+") as opened:
                os.fsync(opened.fileno())
        sync_folder(Path(root))


def sync_folder(folder: Path) -> None:
    """Forces the entries of one folder to disk, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _save_error(kind: str, directory: Path, error: Exception) -> OSError:
    """An error of one line that names the directory, with the system's number where there is one."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, f"cannot save a {kind}: {error.strerror}", str(directory))
    if number := re.search(r"os_error_code='(\d+)'", str(error)):  # of TensorStore, which writes for Orbax
        return OSError(int(number[1]), f"cannot save a {kind}: {os.strerror(int(number[1]))}", str(directory))
    return OSError(f"cannot save a {kind} to {directory}: {' '.join(str(error).split())}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Mutes Orbax's log: it tells its life at INFO and of its threads at ERROR, and all that matters is raised."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
