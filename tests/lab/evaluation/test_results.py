"""A results folder: what may be added to it, what is refused, and files that are whole or not there."""

import pytest

from tca_jax.lab.evaluation.results import Job, Results

CONFIG = {
    "format": 1,
    "model": "m",
    "seed": 0,
    "kv_share": None,
    "methods": {"full": "a"},
    "measured": {},
    "sources": {"words": {"sha256": "1", "label": "ours"}},
}
JOB = Job("random:share=0.5,window=8", "vt", 512, "late")


@pytest.fixture
def results(tmp_path):
    results = Results(tmp_path / "out")
    results.open(CONFIG)
    return results


def test_a_second_run_may_add_methods_and_sources(results):
    results.open({**CONFIG, "methods": {"tca": "b"}, "sources": {"essays": {"sha256": "2", "label": "e.txt"}}})
    assert results.config["methods"] == {"full": "a", "tca": "b"}
    assert set(results.config["sources"]) == {"words", "essays"}


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 1}, "seed = 0, this run has 1"),
        ({"kv_share": 0.25}, r"kv_share = null, this run has 0\.25"),
        ({"methods": {"full": "b"}}, r'methods\[full\] = "a", this run has "b"'),
        ({"sources": {"words": {"sha256": "2", "label": "theirs"}}}, r"sources\[words\] = ours, this run has theirs"),
    ],
)
def test_other_configurations_are_refused(results, change, difference):
    with pytest.raises(ValueError, match=rf"--out .*out was made with {difference}"):
        results.open({**CONFIG, **change})
    assert results.config == CONFIG


@pytest.mark.parametrize("name", ["bytes_of", "weights", "mesh"])
def test_absent_entries_are_differences(tmp_path, name):
    results = Results(tmp_path / "out")
    results.open({**CONFIG, name: "x"})
    with pytest.raises(ValueError, match=rf'was made with {name} = "x", this run has null'):
        results.open(CONFIG)
    assert results.config[name] == "x"


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"holds files but no config\.json"):
        Results(tmp_path).open(CONFIG)


def test_unfinished_files_are_ignored(tmp_path, results):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".config.123.json").write_text("{")
    assert Results(tmp_path / "new").require_same(CONFIG) == {}
    results.write(JOB, {})
    results.path(JOB).with_name(".vt-512-late.123.json").write_text("{")
    assert len(results.read_all()) == 1


def test_finished_jobs_are_found_again(results):
    assert not results.has(JOB)
    results.write(JOB, {"score": 1.0})
    assert results.has(JOB)
    assert results.path(JOB).relative_to(results.folder).as_posix() == (
        "results/random_share=0.5,window=8/vt-512-late.json"
    )
    assert results.read_all() == [{**JOB._asdict(), "score": 1.0}]


def test_a_failed_write_leaves_no_file(results):
    with pytest.raises(ValueError, match="Out of range float"):
        results.write(JOB, {"score": float("nan")})
    assert not list(results.path(JOB).parent.iterdir())


@pytest.mark.parametrize("content", ["", '{"method": "ra', "[]", "{}", "\udcff"])
def test_a_damaged_file_is_named(results, content):
    results.write(JOB, {})
    results.path(JOB).write_text(content, errors="surrogateescape")
    for read in (results.read_all, lambda: results.has(JOB)):
        with pytest.raises(
            ValueError, match=r"vt-512-late\.json (is not valid JSON|holds a list|names no method).*; delete it"
        ):
            read()
