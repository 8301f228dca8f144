"""The pages about every method say what the packed folder of results holds."""

import importlib
import tarfile
from pathlib import Path

import pytest

from tca_jax.lab.evaluation.results import Results

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("every_method_page")


@pytest.fixture(scope="module")
def results(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    with tarfile.open(script.FOLDER) as packed:
        packed.extractall(folder, filter="data")
    return Results(folder / "every-method")


def test_the_pages_are_those_of_the_results(script, results):
    page, figures = script.PAGE.read_text(), script.FIGURES.read_text()
    assert script.pages(results, page, figures) == (page, figures)


def test_figures_that_the_results_do_not_have_are_replaced(script, results):
    page, figures = script.PAGE.read_text(), script.FIGURES.read_text()
    stale = page.replace("| `full` | 100.0 |", "| `full` | 12.3 |").replace("`tca` has a score of", "`tca` had")
    assert "12.3" in stale
    assert "`tca` had" in stale
    assert script.pages(results, stale, figures[:-900]) == (page, figures)
