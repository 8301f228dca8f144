"""The backends' implementations of an operation, as a machine can run them: Triton in interpret mode without a GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import pytest

from tca_jax.pallas_kernels.backends import OPERATIONS, can_run

#: Whether Triton's kernels are interpreted here.
INTERPRET = jax.default_backend() != "gpu"


def implementation(operation: str, backend: str, *, interpret: bool = INTERPRET) -> Callable[..., Any]:
    """The function of one backend; `interpret` matters to Triton alone."""
    module = importlib.import_module(f"tca_jax.pallas_kernels.{operation}.{backend}")
    function = getattr(module, operation)
    return functools.partial(function, interpret=True) if interpret and backend == "triton" else function


def runs(backend: str) -> bool:
    """Whether this machine runs a backend in any way."""
    return can_run(backend) or (INTERPRET and backend == "triton")


def on_every_backend(operation: str, *, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Runs a test, which takes a `backend`, on every one that the operation has, but those that take other operands."""
    names = [name for name in OPERATIONS[operation] if name not in but]
    skip = {name: pytest.mark.skipif(not runs(name), reason="needs another GPU") for name in names}
    return pytest.mark.parametrize("backend", [pytest.param(name, marks=mark) for name, mark in skip.items()])
