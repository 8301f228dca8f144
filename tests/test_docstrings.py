"""Docstrings of public functions: every argument, shapes of arrays, fields, and the source."""

import importlib
import inspect
import re

import pytest

import tca_jax
from tca_jax import methods
from tca_jax.pallas_kernels.backends import OPERATIONS


def public_functions():
    """Public functions, the public methods of public classes, operations and factories of methods, by their names."""
    found = {}
    for module in (tca_jax, methods):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                members = {f"{name}.{each}": vars(value)[each] for each in vars(value) if not each.startswith("_")}
                found |= {each: getattr(member, "__func__", member) for each, member in members.items()}
            found[name] = value
    for name in OPERATIONS:
        found[name] = getattr(importlib.import_module(f"tca_jax.pallas_kernels.{name}"), name)
    for name in ("full", "streaming", "tca"):
        found[name] = getattr(importlib.import_module(f"tca_jax.methods.{name}"), name)
    functions = {name: inspect.unwrap(value) for name, value in found.items()}
    functions = {name: value for name, value in functions.items() if inspect.isfunction(value)}
    # A method without a docstring of its own is described where the interface declares it.
    return {name: value for name, value in functions.items() if "." not in name or value.__doc__}


FUNCTIONS = public_functions()
assert {"generate", "LM.with_method", "paged_attention", "tca", "register"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_describes_arguments_and_shapes(name):
    text, function = inspect.getdoc(FUNCTIONS[name]), FUNCTIONS[name]
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")]
    if "Args:" in text or ("." not in name and len(parameters) > 2):
        named = [re.search(rf"^ +\*{{0,2}}{each.name}: |`{each.name}`", text, re.MULTILINE) for each in parameters]
        assert all(named), "arguments that are not described"
    arrays = [each for each in parameters if "Array" in str(each.annotation) and "Callable" not in str(each.annotation)]
    assert not arrays or re.search(r"\[.*\]", text), "arrays without a shape"
