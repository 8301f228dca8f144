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


def sections(function):
    """A docstring's text by the heading that it stands under; "" for what stands first."""
    text = inspect.getdoc(function) or ""
    parts = re.split(r"^(Args|Returns|Yields|Raises|Warns|Attributes):$", text, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def is_array(annotation):
    return "Array" in str(annotation) and "Callable" not in str(annotation)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_describes_arguments_and_shapes(name):
    function = FUNCTIONS[name]
    text = sections(function)
    said = re.findall(r"^ {4}\*{0,2}(\w+): ", text.get("Args", ""), re.MULTILINE)
    assert text[""].strip(), "no docstring"
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")]
    if "Args" in text or ("." not in name and len(parameters) > 2):
        missing = [each.name for each in parameters if each.name not in said and f"`{each.name}`" not in str(text)]
        assert not missing, "arguments that are not described"
    whole = " ".join(text.values())
    shapeless = [each.name for each in parameters if is_array(each.annotation) and not re.search(r"\[.*\]", whole)]
    assert not shapeless, "arrays without a shape"
