"""Results: folders, tables, and committed pages."""

import tarfile
from pathlib import Path

import pytest

from tca_jax.lab.evaluation import tables
from tca_jax.lab.evaluation.results import Job, Results, table

CONFIG = {
    "format": 1,
    "model": "m",
    "dtype": "float32",
    "samples": 2,
    "seed": 0,
    "kv_share": None,
    "methods": ["full"],
    "sources": {"words": {"digest": "1", "label": "ours"}},
}
JOB = Job("random:share=0.5,window=8", "vt", 512, "late")
COMMITTED = Path(__file__).parents[3] / "lab/results"


@pytest.fixture
def results(tmp_path):
    results = Results(tmp_path / "out")
    results.open(CONFIG)
    return results


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 1}, "seed = 0, this run has 1"),
        ({"kv_share": 0.25}, r"kv_share = null, this run has 0\.25"),
        ({"sources": {"words": {"digest": "2", "label": "theirs"}}}, 'source words = {"digest": "1"'),
    ],
)
def test_other_configurations_are_refused(results, change, difference):
    with pytest.raises(ValueError, match=rf"--out .*out was made with {difference}"):
        results.open({**CONFIG, **change})
    assert results.config == CONFIG


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"holds files but no config\.json"):
        Results(tmp_path).open(CONFIG)
    (tmp_path / "thesis.tex").rename(tmp_path / ".config.123.json")  # of a run that was killed
    Results(tmp_path).open(CONFIG)


def test_finished_jobs_are_found_again(results):
    assert not results.has(JOB)
    results.write(JOB, {"score": 1.0})
    results.path(JOB).with_name(".vt-512-late.123.json").write_text("{")
    assert results.has(JOB)
    assert results.path(JOB).relative_to(results.folder).as_posix() == (
        "results/random_share=0.5,window=8/vt-512-late.json"
    )
    assert results.read_all() == [{**JOB._asdict(), "score": 1.0}]


# --- committed pages ---


def test_pages_of_sticks_match_records(capsys):
    tables.main([COMMITTED / "real-models.jsonl.xz"])
    pages = "".join((COMMITTED / name).read_text("utf-8") for name in ("real-models.md", "first-answer.md"))
    stick, *printed = capsys.readouterr().out.strip().split("\n\n")
    assert stick == "late_facts"
    assert [part for part in printed if part not in (*tables.TABLES, pages) and part not in pages] == []


def test_every_method_page_matches_its_folder(tmp_path):
    with tarfile.open(COMMITTED / "every-method.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    results = Results(tmp_path / "every-method")
    tuned = [record for record in results.read_tuning() if "trials" in record]
    _, _, figures = table(results.config, results.read_all(), (), tuned).partition("\n\n")
    figures, _, tuning = figures.partition("## Tuning")
    assert figures in (COMMITTED / "every-method.md").read_text("utf-8")
    assert tuning.count("(tuned)") == len(tuned)
