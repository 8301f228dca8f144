"""Profiles on disk: saves that are killed, that fail and that run at once, and bytes that are not what was written."""

import errno
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from profiles import make_profile

from tca_jax import persistence
from tca_jax.calibration.profile import Profile
from tca_jax.methods.config import TCAConfig

ENVIRONMENT = {"PATH": "", "JAX_PLATFORMS": "cpu"}
DEAD_PID = 2**22 + 1  # above what Linux hands out
OLD, NEW = make_profile(), Profile.uniform(TCAConfig(), 3, 2, 1)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def run(code: str, *arguments: object) -> str:
    """What a process prints; its errors become this one's."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- one save at a time ---------------------------------------------------------------------------


def test_an_interrupted_save_leaves_the_old_profile_and_the_next_save_works(tmp_path, monkeypatch):
    OLD.save(tmp_path)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", interrupt)
        with pytest.raises(KeyboardInterrupt):
            NEW.save(tmp_path)
    assert Profile.load(tmp_path) == OLD
    NEW.save(tmp_path)
    assert Profile.load(tmp_path) == NEW
    assert names(tmp_path) == ["profile_1"]


def test_what_is_saved_names_no_path_of_the_machine(tmp_path):
    OLD.save(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if tmp_path.name.encode() in path.read_bytes()]


# Saves over copies of the profile in argv[1]. At the 1st, 2nd, ... change that a save makes to the file system the
# process is killed, or the change fails, until a save comes to its end without. Python's audit events tell of changes.
_TROUBLED_SAVES = """
import os, shutil, signal, sys
import orbax.checkpoint  # once, not in every child
from tca_jax.calibration.profile import Profile
from tca_jax.methods.config import TCAConfig

base, trouble = sys.argv[1:]

def changes(event, args):
    if event == "open":
        return isinstance(args[1], str) and args[1][0] in "wax" or args[2] & (os.O_WRONLY | os.O_RDWR) > 0
    return event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate")

for last in range(1, 500):
    target = f"{base}_{last}"
    shutil.copytree(base, target)
    child = os.fork()
    if child == 0:
        new = Profile.uniform(TCAConfig(), 3, 2, 1)
        seen = 0
        def hook(event, args):
            global seen
            if changes(event, args) and any(target in str(a) for a in args):
                seen += 1
                if seen == last and trouble == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if seen == last:
                    raise OSError(28, "No space left on device")
        sys.addaudithook(hook)
        try:
            new.save(target)
        except OSError as error:
            os._exit(1 if target in str(error) else 2)
        os._exit(0 if seen < last else 3)
    status = os.waitpid(child, 0)[1]
    print(-1 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
    if status == 0:
        break
"""


@pytest.mark.integration
def test_a_save_killed_at_any_moment_leaves_the_old_profile_or_the_new_one(tmp_path):
    OLD.save(tmp_path / "p")
    statuses = run(_TROUBLED_SAVES, tmp_path / "p", "kill").split()
    assert set(statuses[:-1]) == {"-1"}
    assert statuses[-1] == "0"
    loaded = [Profile.load(tmp_path / f"p_{n}") for n in range(1, len(statuses) + 1)]
    switch = loaded.index(NEW)  # old up to the rename, new from there on
    assert 5 <= switch < len(statuses) - 1
    assert all(profile == OLD for profile in loaded[:switch])
    assert all(profile == NEW for profile in loaded[switch:])
    for n in (2, switch, switch + 1, switch + 2):  # over what killed saves left behind
        make_profile(1).save(tmp_path / f"p_{n}")
        assert Profile.load(tmp_path / f"p_{n}") == make_profile(1)
        assert len(names(tmp_path / f"p_{n}")) == 1


@pytest.mark.integration
def test_a_save_that_raises_is_never_what_loads_and_names_the_directory(tmp_path):
    OLD.save(tmp_path / "p")
    statuses = run(_TROUBLED_SAVES, tmp_path / "p", "fail").split()
    assert statuses[-1] == "0"
    assert set(statuses[:-1]) <= {"1", "3"}  # raised with the directory's name, or came through
    assert statuses.count("1") > 5
    for n, status in enumerate(statuses, start=1):
        assert Profile.load(tmp_path / f"p_{n}") == (OLD if status == "1" else NEW), n


# A limit on the size of files fails in the midst of a write, as a full disk does.
_SAVE_WITHOUT_ROOM = """
import resource, sys
from tca_jax import persistence
from tca_jax.calibration.profile import Profile
from tca_jax.methods.config import TCAConfig
import orbax.checkpoint
if sys.argv[2] == "fills up later":
    persistence._require_room = lambda file, num_bytes: None
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
try:
    Profile.uniform(TCAConfig(), 3, 2, 1).save(sys.argv[1])
except OSError as error:
    print(error.errno, error)
"""


@pytest.mark.parametrize("disk", ["full", "fills up later"])
def test_no_room_on_the_disk_is_one_line_that_names_the_directory(tmp_path, disk):
    OLD.save(tmp_path / "p")
    message = run(_SAVE_WITHOUT_ROOM, tmp_path / "p", disk)
    expected = f"[Errno {errno.EFBIG}] cannot save a profile: {os.strerror(errno.EFBIG)}: '{tmp_path / 'p'}'"
    assert message == f"{errno.EFBIG} {expected}\n"
    assert Profile.load(tmp_path / "p") == OLD
    # TensorStore's threads may write on for a moment behind the error; what they leave goes with the next save.
    assert {name for name in names(tmp_path / "p") if not name.startswith(".tmp-")} == {"profile_0"}
    NEW.save(tmp_path / "p")
    assert names(tmp_path / "p") == ["profile_1"]


def test_a_directory_that_cannot_be_made_is_an_error_with_its_name_and_number(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"cannot save a profile: .*file/p") as error:
        OLD.save(tmp_path / "file" / "p")
    assert error.value.errno == errno.ENOTDIR


# --- several at a time ----------------------------------------------------------------------------

SAVES = 12
_SAVER = f"""
import sys
from tca_jax.calibration.profile import Profile
from tca_jax.methods.config import TCAConfig
for seed in range({SAVES}):
    Profile.uniform(TCAConfig(seed=seed), 3, 2, int(sys.argv[2])).save(sys.argv[1])
"""


@pytest.mark.integration
def test_a_reader_beside_two_savers_always_gets_one_of_their_profiles(tmp_path):
    OLD.save(tmp_path)
    savers = [
        subprocess.Popen(
            [sys.executable, "-c", _SAVER, str(tmp_path), str(row)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        for row in range(2)
    ]
    seen = []
    while any(saver.poll() is None for saver in savers):
        seen.append(Profile.load(tmp_path))
    assert [(saver.communicate()[0], saver.returncode) for saver in savers] == [("", 0)] * 2
    expected = [[Profile.uniform(TCAConfig(seed=seed), 3, 2, row) for seed in range(SAVES)] for row in range(2)]
    different = [profile for i, profile in enumerate(seen) if i == 0 or profile != seen[i - 1]]
    assert len(different) > 2
    assert all(profile == OLD or profile in expected[0] or profile in expected[1] for profile in different)
    last = Profile.load(tmp_path)
    assert last == expected[0][-1] or last == expected[1][-1]
    NEW.save(tmp_path)
    assert len(names(tmp_path)) == 1


def test_a_number_that_another_save_takes_first_is_left_to_it(tmp_path, monkeypatch):
    OLD.save(tmp_path)
    steps = persistence._steps
    stale = iter([[], []])
    monkeypatch.setattr(persistence, "_steps", lambda directory, kind: next(stale, None) or steps(directory, kind))
    NEW.save(tmp_path)
    assert Profile.load(tmp_path) == NEW
    assert names(tmp_path) == ["profile_1"]


def test_a_profile_that_is_replaced_while_it_is_read_is_read_anew(tmp_path, monkeypatch):
    OLD.save(tmp_path)
    restore, calls = persistence._restore_arrays, []

    def replaced_after_the_metadata_was_read(*args):
        calls.append(args)
        if len(calls) == 1:
            NEW.save(tmp_path)
        return restore(*args)

    monkeypatch.setattr(persistence, "_restore_arrays", replaced_after_the_metadata_was_read)
    assert Profile.load(tmp_path) == NEW


def test_a_damaged_profile_is_an_error_though_an_older_one_is_there(tmp_path):
    OLD.save(tmp_path)
    shutil.copytree(tmp_path / "profile_0", tmp_path / "profile_1")
    (tmp_path / "profile_1" / "metadata" / "metadata").write_text("{")
    with pytest.raises(ValueError, match="profile_1/metadata/metadata: missing or damaged"):
        Profile.load(tmp_path)


def test_what_dead_writers_left_goes_with_the_next_save_and_what_living_ones_write_stays(tmp_path):
    def leave(host: str, pid: int, name: str, age: float) -> None:
        folder = tmp_path / f".tmp-{host}-{pid}-{name * 32}"
        (folder / "step").mkdir(parents=True)
        os.utime(folder, (time.time() - age,) * 2)

    leave(socket.gethostname(), DEAD_PID, "a", age=0)
    leave(socket.gethostname(), os.getpid(), "b", age=0)
    leave("elsewhere-1", DEAD_PID, "c", age=3600)
    leave("elsewhere-1", DEAD_PID, "d", age=2 * 86400)
    (tmp_path / ".tmp-mine").mkdir()
    OLD.save(tmp_path)
    left = [
        ".tmp-mine",
        f".tmp-{socket.gethostname()}-{os.getpid()}-{'b' * 32}",
        f".tmp-elsewhere-1-{DEAD_PID}-{'c' * 32}",
    ]
    assert names(tmp_path) == sorted([*left, "profile_0"])


# --- other bytes than were written ----------------------------------------------------------------


def damages(rng: random.Random, content: bytes) -> list[bytes]:
    """The content with bits flipped, bytes overwritten, its end cut off or bytes behind it."""

    def overwritten(count: int) -> bytes:
        changed = bytearray(content)
        for _ in range(count):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)

    flipped = []
    for _ in range(8):
        changed = bytearray(content)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        flipped.append(bytes(changed))
    cut = [content[: rng.randrange(len(content))] for _ in range(2)]
    return [*flipped, *(overwritten(n) for n in (1, 2, 20)), *cut, b"", content + b"\x00}"]


@pytest.mark.integration
def test_whatever_bytes_change_the_same_profile_loads_or_an_error_names_the_folder(tmp_path):
    OLD.save(tmp_path)
    rng, errors = random.Random(0), []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for file in files:
        content = file.read_bytes()
        for damaged in damages(rng, content):
            file.write_bytes(damaged)
            try:
                assert Profile.load(tmp_path) == OLD
            except ValueError as error:
                errors.append(str(error))
        file.write_bytes(content)
    assert len(errors) > 40
    for message in errors:
        assert str(tmp_path / "profile_0") in message
        assert "\n" not in message
        assert "loop" not in message
    assert Profile.load(tmp_path) == OLD


@pytest.mark.parametrize("what", ["truncated", "missing"])
def test_damaged_arrays_are_an_error_that_names_the_folder(tmp_path, what):
    OLD.save(tmp_path)
    for file in (tmp_path / "profile_0" / "arrays").rglob("*"):
        if file.is_file():
            _ = file.unlink() if what == "missing" else file.write_bytes(file.read_bytes()[:5])
    with pytest.raises(ValueError, match=r"profile_0/arrays: missing or damaged, cannot be read$"):
        Profile.load(tmp_path)


def test_every_digit_of_the_metadata_is_under_the_checksum(tmp_path):
    OLD.save(tmp_path)
    (file,) = tmp_path.glob("profile_*/metadata/metadata")
    text = file.read_text()
    digits = [i for i, char in enumerate(text) if char.isdigit()]
    for i in random.Random(0).sample(digits, 40):
        changed = text[:i] + str((int(text[i]) + 1) % 10) + text[i + 1 :]
        if json.loads(text) != json.loads(changed):
            file.write_text(changed)
            with pytest.raises(ValueError, match="profile_0"):
                Profile.load(tmp_path)
