"""Changes lines of the core, one at a time, and runs the tests nearest to each: how many changes do they catch?

    python tests/mutation.py --count 30 --jobs 2   # half an hour on two cores; a change that survives is printed

A change turns an operator, a bound or a number of one line into its neighbour (`<` into `<=`, `+` into `-`, 1 into 2).
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
#: Lines that say how a kernel is run, and nothing of what it computes.
TUNING = re.compile(r"\b(stages|warps)=")
SOURCES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
OPERATORS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}


def changes(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers and new texts of lines of a file, one for each operator and small number that computes something."""
    text = path.read_text()
    lines = text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.FunctionDef):
                    continue
                line = lines[getattr(node, "lineno", 1) - 1]
                if "raise " in line or 'f"' in line or getattr(node, "end_lineno", 0) != getattr(node, "lineno", -1):
                    continue
                yield from ((node.lineno, new) for new in _changed(node, line))


def _changed(node: ast.AST, line: str) -> Iterator[str]:
    if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp):
        operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
        left = node.left if isinstance(node, ast.Compare | ast.BinOp) else node.values[0]
        if type(operator) in OPERATORS and not _is_text(left):
            old, new = OPERATORS[type(operator)]
            place = line.find(f" {old} ", left.end_col_offset)
            if place >= 0:
                yield f"{line[:place]} {new} {line[place + len(old) + 2 :]}"
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, 2):
        yield f"{line[: node.col_offset]}{node.value + 1}{line[node.end_col_offset :]}"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


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


def catcher(path: Path, number: int, new: str, shared: Path, minutes: float) -> str | None:
    """The first test that fails with a line of the core changed; what is compiled is kept in `shared`."""
    name, source = next((name, source) for name, source in SOURCES.items() if path.is_relative_to(source))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not integration and not slow", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    command += map(str, nearest_tests(path))
    with tempfile.TemporaryDirectory() as folder:
        installed(Path(folder))
        target = Path(folder, name.replace(".", "/"), path.relative_to(source))
        lines = target.read_text().split("\n")
        target.write_text("\n".join([*lines[: number - 1], new, *lines[number:]]))
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
    parser.add_argument("--count", type=int, default=30, help="lines to change")
    parser.add_argument("--seed", type=int, default=0, help="draws them")
    parser.add_argument("--jobs", type=int, default=1, help="changes tested at a time")
    parser.add_argument("--minutes", type=float, default=10, help="most that the tests of one change may take")
    arguments = parser.parse_args()
    files = [path.relative_to(ROOT) for folder in CORE for path in sorted((ROOT / folder).rglob("*.py"))]
    files = [path for path in files if not LEFT_OUT.search(str(path))]
    every = [(path, number, new) for path in files for number, new in changes(ROOT / path) if not TUNING.search(new)]
    chosen = random.Random(arguments.seed).sample(every, arguments.count)
    with tempfile.TemporaryDirectory() as compiled, ThreadPoolExecutor(arguments.jobs) as pool:

        def is_caught(change: tuple[Path, int, str]) -> bool:
            path, number, new = change
            test = catcher(*change, Path(compiled), arguments.minutes)
            print(f"{path}:{number}: {new.strip()}\n    {f'caught by {test}' if test else 'SURVIVED'}", flush=True)
            return test is not None

        caught = sum(pool.map(is_caught, chosen))
    print(f"{caught} of {arguments.count} are caught")


if __name__ == "__main__":
    main()
