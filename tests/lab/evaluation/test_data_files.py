"""Public files of suites: found by any of their names, checked, fetched where they are not there, named where not."""

import hashlib
import json
import zipfile

import pytest

from tca_jax.lab.evaluation import data_files
from tca_jax.lab.evaluation.data_files import DataFile, find_sources, kvpress_file
from tca_jax.lab.evaluation.longbench.tasks import DATA_SETS
from tca_jax.lab.evaluation.sources import Sources, parquet_file

CONTENT = b'{"data": []}'
DIGEST = hashlib.sha256(CONTENT).hexdigest()
NOWHERE = "http://127.0.0.1:9/squad.json"


@pytest.fixture
def there(tmp_path):
    """Where a file can be fetched."""
    path = tmp_path / "web" / "squad.json"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path.as_uri()


def test_a_file_is_fetched_once_from_the_first_address_that_answers(tmp_path, there):
    told = []
    file = DataFile(("squad.json", "dev-v2.0.json"), (NOWHERE, there), (DIGEST,))
    path = file.find(tmp_path / "data", told.append)
    assert (path, path.read_bytes()) == (tmp_path / "data" / "squad.json", CONTENT)
    assert told == [f"fetching {NOWHERE}", f"fetching {there}"]
    assert file.find(tmp_path / "data", told.append) == path
    path.rename(path.with_name("dev-v2.0.json"))
    assert file.find(tmp_path / "data", told.append).name == "dev-v2.0.json"
    assert len(told) == 2


def test_what_is_not_the_published_file_is_refused_and_not_kept(tmp_path, there):
    file = DataFile(("squad.json",), (there,), ("0" * 64,))
    message = rf"--data .*data: squad\.json has SHA-256 {DIGEST}, the published file {'0' * 64}"
    with pytest.raises(ValueError, match=message):
        file.find(tmp_path / "data", print)
    assert list((tmp_path / "data").iterdir()) == []
    (tmp_path / "data" / "squad.json").write_bytes(CONTENT)
    with pytest.raises(ValueError, match=message):
        file.find(tmp_path / "data", print)


def test_without_a_network_the_message_says_what_to_put_where(tmp_path):
    file = DataFile(("squad.json", "dev-v2.0.json"), (NOWHERE,), (DIGEST,))
    with pytest.raises(ValueError, match="has no") as raised:
        file.find(tmp_path, print)
    message = str(raised.value)
    assert message.startswith(f"--data {tmp_path}: has no squad.json or dev-v2.0.json: put it there from {NOWHERE} (")
    assert message.endswith(f", SHA-256 {DIGEST}")
    with pytest.raises(
        ValueError, match=r"has no PaulGrahamEssays\.json: made by scripts/.* or name a text with --ess"
    ):
        data_files.ESSAYS.find(tmp_path, print)


def test_a_file_without_a_published_checksum_is_taken_as_it_is(tmp_path):
    path = tmp_path / "4096" / "test-00000-of-00001.parquet"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    found = find_sources(tmp_path, ["kvpress"], Sources(), [4096])
    assert parquet_file(found.kvpress, 4096) == path
    assert found.origin("kvpress/4096").digest == DIGEST
    with pytest.raises(ValueError, match=r"8192: must hold one \.parquet file with kvpress's samples, found 0"):
        parquet_file(found.kvpress, 8192)
    assert kvpress_file(8192).urls[0].endswith("simonjegou/ruler/resolve/main/8192/test-00000-of-00001.parquet")


@pytest.mark.parametrize("of_archive", [True, False])
def test_longbench_is_unpacked_from_its_archive_or_taken_unpacked(tmp_path, monkeypatch, of_archive):
    line, data = json.dumps({"a": 1}), tmp_path / "data"
    names = [f"{data_set.name}_e.jsonl" for data_set in DATA_SETS]
    data.mkdir()
    if of_archive:
        with zipfile.ZipFile(data / "data.zip", "w") as archive:
            for name in [*names, "narrativeqa.jsonl", "../outside_e.jsonl"]:
                archive.writestr(f"data/{name}", line)
        digest = data_files.file_digest(data / "data.zip")
        monkeypatch.setattr(data_files, "LONGBENCH", DataFile(("data.zip",), (), (digest,)))
    else:
        for name in names:
            (data / name).write_text(line)
    folder = find_sources(data, ["longbench"], Sources(), []).longbench
    assert folder == (data / "longbench" if of_archive else data)
    assert sorted(path.name for path in folder.glob("*.jsonl")) == sorted(names)
    assert all((folder / name).read_text() == line for name in names)


def test_what_the_user_names_is_taken_as_it_is(tmp_path):
    given = Sources(squad=tmp_path / "mine.json", essays=tmp_path / "mine.txt")
    assert find_sources(tmp_path, ["essays", "squad"], given, []) == given


def test_checksums_are_written_whole():
    known = [data_files.SQUAD, data_files.HOTPOTQA, data_files.LONGBENCH]
    for digest in [digest for file in known for digest in file.digests]:
        assert len(bytes.fromhex(digest)) == 32
