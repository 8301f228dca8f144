"""What importing loads, and that every public name is where users look for it."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tca_jax

HEAVY = ["jax", "flax", "numpy", "orbax", "matplotlib", "transformers"]


def loaded(statement: str) -> set[str]:
    """The heavy libraries that a new interpreter has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    return set(subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120).split())


def test_importing_the_package_loads_no_library():
    assert loaded("import tca_jax; dir(tca_jax)") == set()


def test_importing_the_console_script_loads_no_library():
    assert loaded("from tca_jax.cli import main") == set()


def test_generating_needs_neither_plots_nor_profiles_nor_tokenizers():
    assert loaded("import tca_jax.engine.generation") == {"jax", "flax", "numpy"}


def test_whoever_reads_generate_reads_few_modules_and_no_method_but_full_attention():
    program = (
        "import sys, tca_jax.engine.generation; print(*(name for name in sys.modules if name.startswith('tca_jax')))"
    )
    modules = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120).split()
    assert len(modules) <= 40
    methods = {name.removeprefix("tca_jax.methods.") for name in modules if name.startswith("tca_jax.methods.")}
    assert methods == {"base", "full", "pairs", "regions", "registry"}


def test_every_public_name_is_there_and_listed():
    for name in tca_jax.__all__:
        assert getattr(tca_jax, name) is not None
    assert set(tca_jax.__all__) | {"__version__"} <= set(dir(tca_jax))
    assert inspect.isfunction(inspect.unwrap(tca_jax.calibrate))
    assert inspect.ismodule(tca_jax.diagnostics)


@pytest.mark.parametrize("name", ["lab", "calibration", "methods", "models", "pallas_kernels"])
def test_submodules_are_attributes(name):
    program = f"import tca_jax; print(tca_jax.{name}.__name__)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == f"tca_jax.{name}"


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="module 'tca_jax' has no attribute 'calibrte'"):
        _ = tca_jax.calibrte


def test_type_checkers_see_the_names_that_users_do():
    tree = ast.parse(Path(tca_jax.__file__).with_suffix(".pyi").read_text())
    seen = {alias.asname for line in tree.body if isinstance(line, ast.ImportFrom) for alias in line.names}
    assert seen == set(tca_jax.__all__)
