"""Lowering for an NVIDIA GPU on a host without one: catches most of what breaks a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

#: The GPU that is lowered for.
TARGET = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")


def abstract_mesh(**axes: int) -> jax.sharding.AbstractMesh:
    """A mesh of such GPUs."""
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types, abstract_device=TARGET)


def triton_kernels(function: Callable[..., Any], *avals: Any) -> int:
    """Lowers a function for CUDA and counts the Triton kernels that it launches."""
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        lowered = jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("__gpu$xla.gpu.triton")
