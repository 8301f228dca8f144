"""How much memory there is, for what can be refused before it is tried."""

from __future__ import annotations

import os

import jax

from tca_jax.errors import UserError


def memory_bytes() -> int | None:
    """Bytes that the default device may take, the host's for the CPU; None where nobody says."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not know these names
        return None


def require_room(kv_cache_bytes: int, what: str) -> None:
    """Raises ValueError if a KV cache is larger than all of the device's memory; `what` says what it is for."""
    limit = memory_bytes()
    if limit is not None and kv_cache_bytes > limit:
        raise UserError(f"{what} need {kv_cache_bytes / 1e9:,.1f} GB of KV cache: the device has {limit / 1e9:,.1f} GB")
