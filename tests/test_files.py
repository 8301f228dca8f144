"""Files that are written whole or not at all."""

import errno
from pathlib import Path

import pytest

from tca_jax.files import naming, replacing


def test_a_file_is_replaced_once_complete(tmp_path):
    file = tmp_path / "new" / "table.json"
    for text in ("first", "second"):
        with replacing(file) as unfinished:
            unfinished.write_text(text)
            assert not file.exists() or file.read_text() == "first"
        assert file.read_text() == text
    with pytest.raises(UnicodeEncodeError), replacing(file) as unfinished:
        unfinished.write_text("\ud800")
    assert file.read_text() == "second"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_names_the_file():
    with pytest.raises(OSError, match="No space left on device") as raised, replacing("/dev/full") as file:
        file.write_text("something")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, "/dev/full")


def test_another_files_error_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as raised, naming(tmp_path / "mine"):
        (tmp_path / "other").read_text()
    assert raised.value.filename == str(tmp_path / "other")
