"""The backends' implementations of an operation, as a machine can run them: Triton in interpret mode without a GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.pallas_kernels.backends import OPERATIONS, can_run

#: Whether Triton's kernels are interpreted here.
INTERPRET = jax.default_backend() != "gpu"


def implementation(operation: str, backend: str, *, interpret: bool = INTERPRET) -> Callable[..., Any]:
    """The function of one backend; `interpret` matters to Triton alone."""
    function = getattr(importlib.import_module(f"tca_jax.pallas_kernels.{operation}.{backend}"), operation)
    return functools.partial(function, interpret=True) if interpret and backend == "triton" else function


def runs(backend: str) -> bool:
    """Whether this machine runs a backend in any way."""
    return can_run(backend) or (INTERPRET and backend == "triton")


def on_every_backend(operation: str) -> pytest.MarkDecorator:
    """Runs a test, which takes a `backend`, on every one that the operation has."""
    names = OPERATIONS[operation]
    skip = {name: pytest.mark.skipif(not runs(name), reason="needs another GPU") for name in names}
    return pytest.mark.parametrize("backend", [pytest.param(name, marks=mark) for name, mark in skip.items()])


def unused(backend: str) -> float:
    """What stands where an implementation must not look; finite for Mosaic, which multiplies whole tiles by zeros."""
    return 1e4 if backend.startswith("mosaic") else np.nan


#: Marks tests of real sizes: interpret mode takes too long.
gpu = pytest.mark.skipif(INTERPRET, reason="needs an NVIDIA GPU; interpret mode takes too long at this size")
#: Largest difference from float64, of outputs that are weighted means of values of about 1.
TOLERANCE = {jnp.float32: 2e-5, jnp.float16: 4e-3, jnp.bfloat16: 3e-2}


def check_output(actual, expected, lengths, tolerance=None):
    """Compares attention outputs `[B, L, Hq, d]` with float64; rows past their length must be zero."""
    tolerance = tolerance or TOLERANCE[actual.dtype.type]
    actual = np.asarray(actual, np.float64)
    np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)
    for row, length in enumerate(lengths):
        assert not np.any(actual[row, length:])
