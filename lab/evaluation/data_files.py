"""Public files that suites are made from: their names, where they come from, and what they must hold.

They are taken from a folder. What it lacks is fetched into it, checked, and named with its address where that fails.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import os
import shutil
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tca_jax.errors import UserError
from tca_jax.files import replacing
from tca_jax.lab.evaluation.longbench.tasks import DATA_SETS
from tca_jax.lab.evaluation.sources import Sources

_HUB = "https://huggingface.co/datasets"
_TIMEOUT = 60.0  # seconds without an answer
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A public file.

    Attributes:
        names: The names under which it may lie in a folder; the first is the one that it is fetched to.
        urls: Where it can be fetched, tried in this order; none where it must be made.
        digests: SHA-256 of the contents that are known; none where no checksum is published, so that any is taken and
            its checksum stands in the results.
        made_by: How it is made where it cannot be fetched.
    """

    names: tuple[str, ...]
    urls: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    made_by: str = ""

    def find(self, folder: Path, report: Callable[[str], None]) -> Path:
        """The file in the folder, fetched where it is not there.

        Args:
            folder: Where it lies.
            report: Told what is fetched.

        Raises:
            ValueError: it is not there and cannot be fetched, or its content is another one.
        """
        for name in self.names:
            if (path := folder / name).is_file():
                self._check(path, path)
                return path
        return self._fetch(folder, report)

    def _fetch(self, folder: Path, report: Callable[[str], None]) -> Path:
        path, failed = folder / self.names[0], []
        for url in self.urls:
            report(f"fetching {url}")
            try:
                with replacing(path) as unfinished:
                    _download(url, unfinished)
                    self._check(unfinished, path)
                return path
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                failed.append(f"{url} ({getattr(error, 'reason', error)})")
        checked = f", SHA-256 {' or '.join(self.digests)}" if self.digests else ""
        how = f"put it there from {', '.join(failed)}{checked}" if failed else self.made_by
        raise UserError(f"--data {folder}: has no {' or '.join(self.names)}: {how}")

    def _check(self, path: Path, shown: Path) -> None:
        if self.digests and (found := file_digest(path)) not in self.digests:
            known = " or ".join(self.digests)
            raise UserError(f"--data {shown.parent}: {shown.name} has SHA-256 {found}, the published file {known}")


ESSAYS = DataFile(
    ("PaulGrahamEssays.json",),
    made_by="made by scripts/data/synthetic/json/download_paulgraham_essay.py of github.com/NVIDIA/RULER, which reads "
    "web pages; or name a text with --essays",
)
SQUAD = DataFile(
    ("squad.json", "dev-v2.0.json"),
    ("https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",),
    ("80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",),
)
#: The second address and checksum are those of the copy that RULER's script falls back on.
HOTPOTQA = DataFile(
    ("hotpotqa.json", "hotpot_dev_distractor_v1.json"),
    (
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
        f"{_HUB}/namlh2004/hotpotqa/resolve/7e54db4656209750ff487f6fdf8e39a66dba136b/hotpot_dev_distractor_v1.json",
    ),
    (
        "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
        "e3da074df24e8369009918aa5cdbdd254dadcde4c63f7569d36afd6f2268caa8",
    ),
)
LONGBENCH = DataFile(
    ("data.zip",),
    (f"{_HUB}/THUDM/LongBench/resolve/main/data.zip",),
    ("cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64",),
)


def kvpress_file(length: int) -> DataFile:
    """The samples of kvpress's leaderboard at a length; it publishes no checksum."""
    name = f"{length}/test-00000-of-00001.parquet"
    return DataFile((name,), (f"{_HUB}/simonjegou/ruler/resolve/main/{name}",))


def find_sources(
    folder: Path,
    needed: Sequence[str],
    given: Sources,
    lengths: Sequence[int],
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Sources:
    """The files of a suite: those that the user named, then those of the folder, then what can be fetched into it.

    Args:
        folder: Of public files.
        needed: "essays", "squad", "hotpotqa", "longbench" and "kvpress".
        given: What the user named; it is taken as it is.
        lengths: At which samples of kvpress are needed.
        report: Told what is fetched.

    Raises:
        ValueError: a file is not there and cannot be fetched, or its content is not the published one.
    """
    found: dict[str, Path] = {}
    for name in needed:
        if getattr(given, name) is not None:
            continue
        if name == "kvpress":
            paths = [kvpress_file(length).find(folder, report) for length in lengths]
            found[name] = paths[0].parent.parent
        elif name == "longbench":
            found[name] = _longbench_folder(folder, report)
        else:
            found[name] = {"essays": ESSAYS, "squad": SQUAD, "hotpotqa": HOTPOTQA}[name].find(folder, report)
    return dataclasses.replace(given, **found)


def _longbench_folder(folder: Path, report: Callable[[str], None]) -> Path:
    """LongBench-E's files, unpacked from the archive where they are not yet."""
    names = [f"{data_set.name}_e.jsonl" for data_set in DATA_SETS]
    unpacked = folder / "longbench"
    for there in (unpacked, folder / "data", folder):
        if all((there / name).is_file() for name in names):
            return there
    archive = LONGBENCH.find(folder, report)
    with zipfile.ZipFile(archive) as opened:
        members = {Path(member).name: member for member in opened.namelist()}
        for name in names:
            if name not in members:
                raise UserError(f"--data {folder}: data.zip holds no {name}")
            with replacing(unpacked / name) as part, opened.open(members[name]) as packed, open(part, "wb") as out:
                shutil.copyfileobj(packed, out, _CHUNK)
    return unpacked


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer, open(path, "wb") as file:
        shutil.copyfileobj(answer, file, _CHUNK)
        file.flush()
        os.fsync(file.fileno())
