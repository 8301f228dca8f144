"""What importing loads, and that every public name is where users look for it."""

import inspect
import subprocess
import sys

import pytest

import tca_jax

HEAVY = ["jax", "flax", "numpy", "orbax", "matplotlib", "transformers"]


def loaded(statement):
    """Names of the modules that a new interpreter has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120).split())


def test_importing_the_package_loads_no_library():
    assert not loaded("import tca_jax; dir(tca_jax); from tca_jax.cli import main") & set(HEAVY)


def test_generating_loads_few_modules():
    modules = loaded("import tca_jax.engine.generation")
    assert modules & set(HEAVY) == {"jax", "flax", "numpy"}
    assert not any(name.startswith("jax.experimental.pallas") for name in modules)
    assert sum(name.startswith("tca_jax") for name in modules) <= 35
    methods = {name.removeprefix("tca_jax.methods.") for name in modules if name.startswith("tca_jax.methods.")}
    assert methods == {"base", "full", "regions"}


def test_public_names_are_there_and_listed():
    for name in tca_jax.__all__:
        assert getattr(tca_jax, name) is not None
    assert set(tca_jax.__all__) | {"__version__"} <= set(dir(tca_jax))
    assert inspect.isfunction(inspect.unwrap(tca_jax.calibrate))
    with pytest.raises(AttributeError, match="module 'tca_jax' has no attribute 'calibrte'"):
        _ = tca_jax.calibrte
