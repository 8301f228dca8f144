"""Shared test setup: run-time shape checks on every signature of the package, and small caches."""

import gc
import sys

import pytest
from jaxtyping import install_import_hook

# Must run before anything imports the package: every jaxtyping annotation is then checked by beartype.
_hook = install_import_hook("tca_jax", "typecheck.check")
_hook.__enter__()


@pytest.fixture(autouse=True, scope="module")
def no_programs_of_other_modules():
    """A process may map so many pieces of memory (65,530 on Linux): the programs of thousands of tests are too many."""
    yield
    if "jax" not in sys.modules:
        return
    import jax

    if (programs := sys.modules.get("tca_jax.engine.programs")) is not None:
        for program in [each for each in gc.get_objects() if type(each) is programs.Program]:
            program._executables.clear()
    jax.clear_caches()
