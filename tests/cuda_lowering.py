"""Lowering for an NVIDIA GPU on a host without one: catches most of what breaks a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton

#: The GPU that is lowered for.
TARGET = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")


def abstract_mesh(**axes: int) -> jax.sharding.AbstractMesh:
    """A mesh of such GPUs."""
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types, abstract_device=TARGET)


def lowered_for_cuda(function: Callable[..., Any], *avals: Any) -> str:
    """The program that a function becomes on such a GPU; verifies its Triton kernels, as XLA does."""
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        lowered = jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",))
    program = lowered.compiler_ir()
    triton.register_dialect(program.context)

    def verify(operation: Any) -> Any:
        if "xla.gpu.triton" in str(operation.attributes.get("call_target_name")):
            kernel = ir.StringAttr(operation.attributes["mhlo.backend_config"]["ir"])
            ir.Module.parse(kernel.value_bytes, program.context)
        return ir.WalkResult.ADVANCE

    program.operation.walk(verify)
    return lowered.as_text()


def kernels(backend: str, function: Callable[..., Any], *avals: Any) -> int:
    """Lowers a function for CUDA and counts the kernels of a backend that it launches."""
    target = {"triton": "__gpu$xla.gpu.triton", "cudnn": "__cudnn"}.get(backend, "mosaic_gpu")
    return lowered_for_cuda(function, *avals).count(f"custom_call @{target}")
