"""The pages of the measuring sticks are what their records give."""

from __future__ import annotations

from pathlib import Path

import pytest

from tca_jax.lab.evaluation.late_facts import STICK
from tca_jax.lab.evaluation.real_models import draw, first_answer_page, real_models_page
from tca_jax.lab.evaluation.sticks import read_records

RESULTS = Path(__file__).parents[3] / "lab/results"
RECORDS = [RESULTS / "real-models.jsonl.xz"]


@pytest.mark.parametrize(
    ("page", "name"), [(real_models_page, "real-models.md"), (first_answer_page, "first-answer.md")]
)
def test_page_is_that_of_the_records(page, name):
    assert (RESULTS / name).read_text("utf-8") == page(RECORDS)


def test_picture_has_all_methods(figures):
    draw(read_records(RECORDS, STICK), Path("unused.png"))
    (axes,) = figures[0].axes
    assert {"kvzip", "snapkv", "tca, default", "tca, kept25", "tca, paper"} <= {line.get_label() for line in axes.lines}
