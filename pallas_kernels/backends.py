"""Backends: which exist, what each needs of the device, and the one dispatcher of all operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

Backend = str | tuple[str, ...]
#: Major CUDA compute capabilities that a backend runs on; None runs on any device. Best first: the order "auto" tries.
#: The Mosaic kernels use wgmma, the matrix instructions of Hopper alone.
_NEEDS: Mapping[str, range | None] = MappingProxyType(
    {"cudnn": range(8, 100), "mosaic": range(9, 10), "triton": range(8, 100), "xla": None}
)
#: Every value of a `backend` argument.
BACKENDS = ("auto", *_NEEDS)


def validate_backend(backend: str) -> None:
    """Raises ValueError unless `backend` is one of `BACKENDS`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: must be one of {list(BACKENDS)}")


#: Operations that a backend has kernels for; "xla" has all.
_OPERATIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "cudnn": frozenset({"causal_attention"}),
        "mosaic": frozenset({"causal_attention", "column_mass", "prefill_attention"}),
        "triton": frozenset(
            {
                "causal_attention",
                "column_mass",
                "decode_attention",
                "prefill_attention",
                "select_tokens",
                "token_scores",
            }
        ),
    }
)


def check_backend(backend: str) -> None:
    """Raises ValueError unless `backend` is one of `BACKENDS` that can run on this device."""
    validate_backend(backend)
    lack = None if backend == "auto" else _lacks(backend)
    if lack is not None:
        raise ValueError(f"backend = {backend!r} {lack}; use 'auto' or 'xla'")


def can_run(backend: str) -> bool:
    """Whether this device runs a named backend.

    Raises:
        ValueError: there is no such backend.
    """
    validate_backend(backend)
    return backend == "auto" or _lacks(backend) is None


def backend_for(operation: str, backend: str) -> str:
    """What a named backend means for one operation of a whole: itself where it has a kernel, else "auto"."""
    return backend if backend in ("auto", "xla") or operation in _OPERATIONS[backend] else "auto"


def whole(backend: str) -> Any:
    check_backend(backend)
    return backend if backend in ("auto", "xla") else (backend, "auto")


def dispatch(operation: str, backend: Any, implementations: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Picks an operation's implementation.

    Args:
        operation: The operation's name, for messages.
        backend: "auto" tries the backends that the device can run, best first, and moves on from one that
            raises NotImplementedError; a named backend is taken or refused, never replaced.
        implementations: Backend name -> function. All take the same arguments.

    Returns:
        A function with the implementations' own signature.

    Raises:
        ValueError: the backend is unknown, not implemented for this operation, or cannot run on this device.
    """
    if isinstance(backend, tuple):
        backend = backend_for(operation, backend[0])
    check_backend(backend)
    if backend == "auto":
        usable = [impl for name, impl in _in_order(implementations) if can_run(name)]
        return lambda *args, **kwargs: _first_able(operation, usable, args, kwargs)
    if backend not in implementations:
        raise ValueError(
            f"backend = {backend!r}: {operation} has no such implementation; must be 'auto' or one of "
            f"{sorted(implementations)}"
        )
    return implementations[backend]


def _in_order(implementations: Mapping[str, Callable[..., Any]]) -> list[tuple[str, Callable[..., Any]]]:
    return [(name, implementations[name]) for name in _NEEDS if name in implementations]


def _first_able(operation: str, usable: list[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    reasons = []
    for implementation in usable:
        try:
            return implementation(*args, **kwargs)
        except NotImplementedError as error:
            reasons.append(str(error))
    raise NotImplementedError(f"{operation}: no backend takes this call: {reasons}")


def _lacks(backend: str) -> str | None:
    """What the default device lacks to run `backend`, or None."""
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
