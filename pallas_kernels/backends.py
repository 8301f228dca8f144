"""Backends: those of each operation with kernels, their device requirements, and the dispatcher.

The implementation of an operation on a backend is the function of the operation's name in the module
`tca_jax.pallas_kernels.<operation>.<backend>`. It is imported when it is chosen and not before, so that a JAX without
what one backend is written in still runs all others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

from tca_jax.errors import Unsupported, require

#: The backends of every operation, best first: the order in which "auto" tries those that the device can run.
OPERATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "block_scores": ("triton", "xla"),
        "causal_attention": ("cudnn",),  # otherwise prefill attention
        "paged_attention": ("triton", "xla"),
        "prefill_attention": ("mosaic", "triton", "xla"),
        "select_tokens": ("triton", "xla"),
    }
)
#: Backends that round to eight bits: "auto" never picks them.
_EIGHT_BITS: Mapping[str, tuple[str, ...]] = MappingProxyType({"prefill_attention": ("mosaic_fp8",)})
#: Every name of a backend, and the major CUDA compute capabilities that it runs on; None runs on any device. The Mosaic
#: kernels use wgmma, the matrix instructions of Hopper alone.
_NEEDS: Mapping[str, range | None] = MappingProxyType(
    {
        "auto": None,
        "cudnn": range(8, 100),
        "mosaic": range(9, 10),
        "mosaic_fp8": range(9, 10),
        "triton": range(8, 100),
        "xla": None,
    }
)
#: What an operation's `backend` argument takes. "auto" is the best backend that the device has and that takes the
#: call; any other name is taken or refused, never replaced. A tuple of names is an order of preference: the first
#: that the operation has at all is meant, and "auto" as the last one fits every operation.
Backend = str | tuple[str, ...]


def check_backend(backend: str) -> None:
    """Raises ValueError unless `backend` is the name of a backend that can run on this device."""
    require(backend in _NEEDS, f"backend = {backend!r}: must be one of {list(_NEEDS)}")
    lack = _lacks(backend)
    require(lack is None, f"backend = {backend!r} {lack}; use 'auto' or 'xla'")


def can_run(backend: str) -> bool:
    """Whether this device runs a named backend."""
    return _lacks(backend) is None


def resolve_backend(backend: str) -> Backend:
    """The backend for several operations: the named one where an operation has it, else "auto".

    Raises:
        ValueError: there is no such backend, or it cannot run on this device.
    """
    check_backend(backend)
    return backend if backend in ("auto", "xla") else (backend, "auto")


def dispatch(operation: str, backend: Backend) -> Callable[..., Any]:
    """Picks an operation's implementation: "auto" picks, and a named backend that cannot run raises.

    Args:
        operation: The operation's name in `OPERATIONS`.
        backend: See `Backend`. "auto" moves on from a backend that cannot be imported, or that raises
            NotImplementedError for the call.

    Returns:
        A function with the implementations' own signature.

    Raises:
        ValueError: the backend is unknown, cannot run on this device, not implemented for this operation, or cannot
            be imported.
    """
    names = (backend,) if isinstance(backend, str) else backend
    known = ("auto", *OPERATIONS[operation], *_EIGHT_BITS.get(operation, ()))
    name = next((name for name in names if name in known), "")
    require(name, f"backend = {backend!r}: {operation} has no such implementation; must be one of {sorted(known)}")
    check_backend(name)
    if name == "auto":
        return lambda *args, **kwargs: _first_able(operation, args, kwargs)
    return _load(operation, name)


def _first_able(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    reasons = []
    for name in filter(can_run, OPERATIONS[operation]):
        try:
            return _load(operation, name)(*args, **kwargs)
        except NotImplementedError as error:
            reasons.append(str(error))
    raise Unsupported(f"{operation}: no backend takes this call: {reasons}")


def _load(operation: str, backend: str) -> Callable[..., Any]:
    """An implementation; NotImplementedError where this JAX cannot import it."""
    try:
        module = importlib.import_module(f"{__package__}.{operation}.{backend}")
    except ImportError as error:
        reason = f"{operation} on {backend} cannot be imported: {error}; use 'auto' or 'xla'"
        raise Unsupported(f"backend = {backend!r}: {reason}") from error
    implementation: Callable[..., Any] = getattr(module, operation)
    return implementation


def _lacks(backend: str) -> str | None:
    """Why the default device cannot run `backend`, or None."""
    needed = _NEEDS[backend]
    if needed is None:
        return None
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability is None:
        return f"needs an NVIDIA GPU, this process runs on {device.platform!r}"
    if int(float(capability)) not in needed:
        versions = f"{needed[0]}.x" if len(needed) == 1 else f"{needed[0]}.0 or newer"
        return f"needs compute capability {versions}, this GPU ({device.device_kind}) has {capability}"
    return None
