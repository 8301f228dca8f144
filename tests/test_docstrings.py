"""Docstrings of public functions: every argument, shapes of arrays, fields, and the source."""

import dataclasses
import importlib
import inspect
import re

import pytest

import tca_jax
from tca_jax import methods
from tca_jax.pallas_kernels.backends import OPERATIONS

#: Functions that implement a part of the method: their docstrings name its equation, section or paper.
FROM_THE_PAPER = {
    "calibrate",
    "calibration_scores",
    "candidate_budgets",
    "select",
    "attend",
    *("block_mass", "column_mass", "observation_scores", "prefill_attention", "reserve_tokens", "token_scores"),
    *("streaming", "tca"),
}


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


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) & FROM_THE_PAPER))
def test_source_of_the_method_is_named(name):
    said = f"{inspect.getdoc(FUNCTIONS[name])} {inspect.getmodule(FUNCTIONS[name]).__doc__}"
    assert re.search(r"Eq\. |docs/method\.md|arXiv|Algorithm \d", said)


@pytest.mark.parametrize("name", [n for module in (tca_jax, methods) for n in module.__all__])
def test_fields_are_described(name):
    value = getattr(tca_jax, name, None) or getattr(methods, name)
    if not (inspect.isclass(value) and dataclasses.is_dataclass(value)):
        return
    text = "\n".join(f"{inspect.getdoc(base)}\n{inspect.getsource(base)}" for base in value.__mro__[:-1])
    fields = [each.name for each in dataclasses.fields(value) if each.name[0] != "_"]
    described = r"^ *{0}: .*#|^ *#.*\n *{0}: |^ *{0}: \S"  # beside the field, above it, or in the docstring
    assert not [name for name in fields if not re.search(described.format(name), text, re.MULTILINE)]
