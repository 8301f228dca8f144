"""Arrays and JSON in a folder that Orbax writes and replaces.

A save makes `<kind>_<N>`, such as `profile_3`, by one rename, and then removes those before it; a folder of this name
that holds anything else stays. A load reads the one of the largest number. One process at a time may save into a
folder; any number may load from it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tca_jax.errors import UserError, require, require_type


def save(kind: str, directory: Any, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Writes named arrays and JSON values in place of a directory's newest entry of a kind; OSError leaves that."""
    folder = _absolute(directory)
    if jax.process_index():  # the first process of `jax.distributed` writes
        return
    import orbax.checkpoint as ocp  # takes a third of a second

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < sum(x.nbytes for x in arrays.values()) + 2**20:  # 1 MiB for other files
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with _silent(), _manager(kind, folder, cleanup_tmp_directories=True) as manager:
            earlier = manager.all_steps()
            items = {"arrays": ocp.args.StandardSave(dict(arrays)), "metadata": ocp.args.JsonSave(dict(metadata))}
            manager.save(step := max(earlier, default=-1) + 1, args=ocp.args.Composite(**items))
    except Exception as error:
        number = getattr(error, "errno", None) or errno.EIO
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise OSError(number, f"cannot save a {kind}: {reason}", str(folder)) from error
    with contextlib.suppress(OSError):
        written, *others = ({entry.name for entry in (folder / f"{kind}_{x}").iterdir()} for x in (step, *earlier))
        for number, names in zip(earlier, others, strict=True):
            if names == written:  # nothing of the user's
                shutil.rmtree(folder / f"{kind}_{number}", ignore_errors=True)


def load(kind: str, directory: Any) -> tuple[Path, Any, dict[str, np.ndarray]]:
    """Reads the newest entry of a kind: its folder, for messages, its JSON values, and its arrays by name."""
    folder, step = _absolute(directory), None
    if not folder.exists():
        raise FileNotFoundError(f"{kind} directory {folder} does not exist: name a saved {kind}")
    require(folder.is_dir(), f"{folder} is a file, not a {kind} directory")
    import orbax.checkpoint as ocp

    items = ocp.args.Composite(arrays=ocp.args.PyTreeRestore(), metadata=ocp.args.JsonRestore())
    try:
        with _silent(), _manager(kind, folder, read_only=True) as manager:
            while (newest := manager.latest_step()) != step:  # a save may remove what is being read
                step = newest
                try:
                    found = manager.restore(step, args=items)
                    return folder / f"{kind}_{step}", found.metadata, found.arrays
                except Exception as error:
                    reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
                    failure = UserError(f"{folder / f'{kind}_{step}'}: damaged or incomplete, cannot be read{reason}")
                    failure.__cause__ = error
                    manager.reload()
    except Exception as error:  # of the files that list what the folder holds
        raise UserError(f"{folder}: damaged or incomplete, cannot be read") from error
    raise UserError(f"{folder} holds no {kind}: there is no {kind}_<number> folder in it") if step is None else failure


def _absolute(directory: Any) -> Path:
    """The only kind of path that Orbax takes."""
    require_type("directory", directory, (str, os.PathLike), "a string or a path")
    require(os.fspath(directory), "directory = '': must name a folder")
    return Path(directory).expanduser().absolute()


def _manager(kind: str, folder: Path, **options: Any) -> Any:
    """Orbax's manager of a folder; no process of `jax.distributed` waits for others, which may have nothing to do."""
    import orbax.checkpoint as ocp

    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    options |= {"create": False, "save_root_metadata": False, "enable_async_checkpointing": False}
    chosen = ocp.CheckpointManagerOptions(step_prefix=kind, multiprocessing_options=alone, **options)
    return ocp.CheckpointManager(folder, options=chosen, item_names=("arrays", "metadata"))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silences absl logging during Orbax calls."""
    level = (logger := logging.getLogger("absl")).level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
