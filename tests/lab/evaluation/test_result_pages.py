"""Committed result pages match their records."""

import tarfile
from pathlib import Path

import pytest

from tca_jax.lab.evaluation.late_facts import STICK
from tca_jax.lab.evaluation.real_models import draw, first_answer_page, real_models_page
from tca_jax.lab.evaluation.results import Results
from tca_jax.lab.evaluation.sticks import read_records
from tca_jax.lab.evaluation.tables import table

RESULTS = Path(__file__).parents[3] / "lab/results"
RECORDS = [RESULTS / "real-models.jsonl.xz"]


@pytest.mark.parametrize(
    ("page", "name"), [(real_models_page, "real-models.md"), (first_answer_page, "first-answer.md")]
)
def test_pages_of_sticks_match_records(page, name):
    assert (RESULTS / name).read_text("utf-8") == page(RECORDS)


def test_picture_has_all_methods(figures):
    draw(read_records(RECORDS, STICK), Path("unused.png"))
    (axes,) = figures[0].axes
    assert {"kvzip", "snapkv", "tca, default", "tca, kept25", "tca, paper"} <= {line.get_label() for line in axes.lines}


def test_every_method_page_matches_its_folder(tmp_path):
    with tarfile.open(RESULTS / "every-method.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    results = Results(tmp_path / "every-method")
    _, _, figures = table(results.config, results.read_all(), (), results.read_tuning()).partition("\n\n")
    page = (RESULTS / "every-method.md").read_text("utf-8")
    assert page.endswith(f"\n\n{figures}")
    summary = [line for line in figures.splitlines() if line.startswith("| `")]
    shown = (Path(__file__).parents[3] / "docs/every-method.md").read_text("utf-8").splitlines()
    assert [line for line in shown if line.startswith("| `") and line not in summary] == []
