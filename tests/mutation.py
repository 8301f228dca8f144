"""Changes the core, a place at a time, and runs the tests nearest to each change: how many changes do they catch?

    python tests/mutation.py --count 30 --jobs 2   # half an hour on two cores; a change that survives is printed

A change turns an operator, a bound or a number into its neighbour (`<` into `<=`, `+` into `-`, 1 into 2).
Of each change the tests of its own folder run first, those that name its module before others, until one fails.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Folders of the core, and the folders of tests that are nearest to each.
CORE = {
    "calibrate": ("calibrate",),
    "models": ("models", "engine"),
    "pallas_kernels": ("pallas_kernels", "methods"),
    "tca_jax/engine": ("engine", "methods"),
    "tca_jax/methods": ("methods", "engine", "lab/rivals"),
}
#: Tests of the whole core.
OF_ALL = ("test_functional.py", "test_refusals.py")
#: What only a GPU or several devices run.
LEFT_OUT = re.compile(r"mosaic|cudnn|mesh|shard|parallel|triton_call")
TUNING = ("stages", "warps")  # arguments that change how a kernel runs, and nothing of what it computes
SOURCES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Add, ast.Sub), (ast.And, ast.Or))
NEIGHBOURS = {**dict(_PAIRS), **{b: a for a, b in _PAIRS}, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}


def changes(tree: ast.AST) -> list[tuple[ast.AST, str, Any]]:
    """Nodes in the bodies of functions, each with a field and the neighbour of its value."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [change for function in functions for change in _changes(ast.Module(function.body, []))]


def _changes(parent: ast.AST) -> Iterator[tuple[ast.AST, str, Any]]:
    for node in ast.iter_child_nodes(parent):
        tunes = isinstance(node, ast.keyword) and node.arg in TUNING
        if tunes or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.FunctionDef):
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in NEIGHBOURS:
            yield node, "ops", [NEIGHBOURS[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in NEIGHBOURS:
            yield node, "op", NEIGHBOURS[type(node.op)]()
        elif isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, 2):
            yield node, "value", node.value + 1
        yield from _changes(node)


def changed(path: Path, number: int) -> tuple[str, str]:
    """The text of a file after one of its changes, and the change."""
    tree = ast.parse((ROOT / path).read_text())
    node, field, value = changes(tree)[number]
    before = ast.unparse(node)
    setattr(node, field, value)
    return ast.unparse(tree), f"{path}:{node.lineno}: {before} -> {ast.unparse(node)}"


def nearest_tests(path: Path) -> list[Path]:
    """Test files: those of the same name first, then those that name the module."""
    folder = next(folder for folder in CORE if path.is_relative_to(folder))
    name = path.parent.name if folder == "pallas_kernels" and path.parent.name != folder else path.stem
    found = [each for near in CORE[folder] for each in sorted((ROOT / "tests" / near).rglob("test_*.py"))]
    found += [ROOT / "tests" / each for each in OF_ALL]

    def distance(test: Path) -> tuple[bool, bool]:
        return name not in str(test), not re.search(rf"\b{name}\b", test.read_text())

    return sorted(found, key=distance)


def installed(folder: Path) -> None:
    """The package as it installs, without installing it."""
    without = shutil.ignore_patterns("__pycache__", "results")
    for name, source in SOURCES.items():
        shutil.copytree(ROOT / source, folder / name.replace(".", "/"), ignore=without, dirs_exist_ok=True)


def catcher(path: Path, text: str, shared: Path, minutes: float) -> str | None:
    """The first test that fails with this text of a file of the core; what is compiled is kept in `shared`."""
    name, source = next((name, source) for name, source in SOURCES.items() if path.is_relative_to(source))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not integration and not slow", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    command += map(str, nearest_tests(path))
    with tempfile.TemporaryDirectory() as folder:
        installed(Path(folder))
        Path(folder, name.replace(".", "/"), path.relative_to(source)).write_text(text)
        paths = {"PYTHONPATH": f"{folder}:{ROOT / 'tests'}", "JAX_COMPILATION_CACHE_DIR": str(shared)}
        given = {"env": {**os.environ, **paths}, "cwd": folder, "timeout": 60 * minutes}
        try:
            result = subprocess.run(command, **given, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            return None
    if result.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", result.stdout, re.MULTILINE)
    return failed[1] if failed else "pytest itself"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=30, help="changes to make")
    parser.add_argument("--seed", type=int, default=0, help="draws them")
    parser.add_argument("--jobs", type=int, default=1, help="changes tested at a time")
    parser.add_argument("--minutes", type=float, default=10, help="most that the tests of one change may take")
    arguments = parser.parse_args()
    files = [path.relative_to(ROOT) for folder in CORE for path in sorted((ROOT / folder).rglob("*.py"))]
    files = [path for path in files if not LEFT_OUT.search(str(path))]
    every = [(path, i) for path in files for i in range(len(changes(ast.parse((ROOT / path).read_text()))))]
    chosen = random.Random(arguments.seed).sample(every, arguments.count)
    with tempfile.TemporaryDirectory() as compiled, ThreadPoolExecutor(arguments.jobs) as pool:

        def is_caught(place: tuple[Path, int]) -> bool:
            text, change = changed(*place)
            test = catcher(place[0], text, Path(compiled), arguments.minutes)
            print(f"{change}\n    {f'caught by {test}' if test else 'SURVIVED'}", flush=True)
            return test is not None

        caught = sum(pool.map(is_caught, chosen))
    print(f"{caught} of {arguments.count} are caught")


if __name__ == "__main__":
    main()
