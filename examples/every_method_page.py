"""Writes the pages about every method from the folder of results that the command of docs/every-method.md makes.

    python examples/every_method_page.py out/every-method

Of docs/every-method.md it replaces the table and the conclusions; of lab/results/every-method.md all behind what stands
above the settings. The picture is drawn and the folder is packed again.
"""

from __future__ import annotations

import re
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tca_jax.lab.evaluation.pictures import draw_pictures
from tca_jax.lab.evaluation.results import CONFIG, TASKS, TUNING, Results
from tca_jax.lab.evaluation.tables import table

ROOT = Path(__file__).parents[1]
PAGE, FIGURES = ROOT / "docs" / "every-method.md", ROOT / "lab" / "results" / "every-method.md"
PICTURE, FOLDER = ROOT / "docs" / "images" / "methods.png", ROOT / "lab" / "results" / "every-method.tar.xz"

_SUMMARY = re.compile(r"(?<=\n\n)\| method \|.*?(?=\n\n)", re.DOTALL)
_CONCLUSIONS = re.compile(r"(?<=\n\n)- recall, .*?(?=\n\n)", re.DOTALL)


class Pages(NamedTuple):
    """Texts of the two pages."""

    page: str
    figures: str


def pages(results: Results, page: str, figures: str) -> Pages:
    """The pages with what the results say.

    Args:
        results: The folder.
        page: docs/every-method.md as it is.
        figures: lab/results/every-method.md as it is.
    """
    text = table(results.config, results.read_all(), (), results.read_tuning())
    for part in (_SUMMARY, _CONCLUSIONS):
        (there,), (here,) = part.findall(page), part.findall(text)[:1]
        page = page.replace(there, here)
    title, settings, _ = text.split("\n\n", 2)
    above, found, _ = figures.partition(f"\n\n{settings.split(',')[0]}")
    assert found, f"{FIGURES} does not have the settings of the results: {settings}"
    return Pages(page, above + text.removeprefix(title))


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(folder: Annotated[Path, typer.Argument(help="Folder of `tca-jax eval`.")]) -> None:
    """Write the pages, the picture and the packed folder."""
    results = Results(folder)
    written = pages(results, PAGE.read_text(encoding="utf-8"), FIGURES.read_text(encoding="utf-8"))
    PAGE.write_text(written.page, encoding="utf-8")
    FIGURES.write_text(written.figures, encoding="utf-8")
    with tempfile.TemporaryDirectory() as drawn:
        draw_pictures(results.read_all(), Path(drawn), results.read_tuning())
        PICTURE.write_bytes((Path(drawn) / PICTURE.name).read_bytes())
    with tarfile.open(FOLDER, "w:xz") as packed:
        for path in (
            folder / CONFIG,
            *sorted((folder / TUNING).rglob("*")),
            *sorted((folder / TASKS).glob("*/*")),
        ):
            if path.is_file():
                packed.add(path, Path("every-method") / path.relative_to(folder))
    print(f"wrote {PAGE}, {FIGURES}, {PICTURE} and {FOLDER}")


if __name__ == "__main__":
    app()
