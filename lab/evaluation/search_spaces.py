"""Options that `eval --tune` searches: the values of each method's options, around its authors' defaults.

Options that set the cost are no part of a space: a trial sets them so that its cost is the others'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

Space = Mapping[str, tuple[Any, ...]]

_OBSERVED: Space = {"observation": (16, 32, 64, 128, 256), "kernel": (1, 5, 7, 15, 31, 63, 127)}
_WINDOWS: Space = {"window": (128, 256, 512)}
_POOLED: Space = {**_OBSERVED, "pooling": ("avg", "max"), **_WINDOWS}
_SAFEGUARDS: Space = {"safeguard": (0.0, 0.1, 0.2, 0.4, 0.7)}
_EXPECTED: Space = {"future": (64, 256, 512, 2048), "sinks": (0, 4, 64), "epsilon": (0.0, 0.01, 0.02, 0.1), **_WINDOWS}

SPACES: Mapping[str, Space] = MappingProxyType(
    {
        "adakv": {**_POOLED, **_SAFEGUARDS},
        "adakv-expected-attention": {**_EXPECTED, **_SAFEGUARDS},
        "cake": {**_OBSERVED, "gamma": (1.0, 5.0, 50.0, 200.0, 500.0), **_WINDOWS},
        "duoattention": {"sinks": (4, 64, 128, 256), "window": (128, 256, 512, 1024), "dense_prefill": (False, True)},
        "expected-attention": _EXPECTED,
        "flexprefill": {
            "tau": (0.0, 0.05, 0.1, 0.2, 0.4),
            "min_budget": (128, 256, 512, 1024, 2048),
            "block_size": (64, 128),
        },
        "h2o": {"average": (False, True), "window": (128, 256, 512, 1024)},
        "keydiff": {"window": (128, 256, 512, 1024)},
        "minference": {"blocks": (25, 50, 100, 200), "block_size": (32, 64, 128)},
        "pyramidkv": {**_POOLED, "beta": (1.0, 5.0, 10.0, 20.0, 40.0)},
        "quest": {"block_size": (16, 32, 64), "window": (16, 32, 64, 128)},
        "random": {"window": (128, 256, 512, 1024, 4096)},
        "snapkv": _POOLED,
        "streaming": {"sinks": (0, 4, 16, 64, 128)},
        "tova": {"window": (128, 256, 512, 1024)},
        "xattention": {"stride": (4, 8, 16, 32), "block_size": (64, 128), "chunk": (None, 0)},
    }
)

#: Option that moves the attended share of a prefill method, and its values from the lowest cost to the highest.
PREFILL_KNOBS: Mapping[str, tuple[str, Sequence[float]]] = MappingProxyType(
    {
        "flexprefill": ("gamma", tuple(i / 64 for i in range(1, 65))),
        "minference": ("scale", tuple(round(2 ** (i / 8), 4) for i in range(-64, 1))),
        "xattention": ("threshold", tuple(i / 64 for i in range(1, 65))),
    }
)
