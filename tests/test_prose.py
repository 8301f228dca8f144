"""Names of classes, and first lines of docstrings, without words that others replace (one word per thing)."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("lab", "models", "calibrate", "pallas_kernels", "examples", "tca_jax")
WORDS = r"whole|at hand|lies?|behind|what|of such|so many|anew|nobody|somebody|tells|says|asks|alike|row 0"
IN_PROSE = re.compile(rf"\b({WORDS})\b", re.IGNORECASE)
IN_NAMES = re.compile("Held|Told|Said|Found|Launched|Asked|Whole|Behind|What|Anew|Nobody|Somebody|Alike")
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")


def faults(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if IN_PROSE.search(QUOTED.sub("", first)):
                yield first
        if isinstance(node, ast.ClassDef) and IN_NAMES.search(node.name):
            yield node.name


@pytest.mark.parametrize("folder", FOLDERS)
def test_words_are_those_of_the_glossary(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert {str(path.relative_to(ROOT)): found for path in paths if (found := list(faults(path)))} == {}
