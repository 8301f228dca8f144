"""tca_jax: training-free context-adaptive attention (TCA, arXiv 2512.09238) for long-context LLM inference in JAX.

Importing it loads no library but `lazy_loader`: a name or a submodule is imported when it is first used (PEP 562). The
names stand in `__init__.pyi`.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import Any

import lazy_loader as _lazy_loader

_public_name, _list_names, __all__ = _lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """A public name, a submodule or the version, at its first use; from then on an ordinary attribute."""
    value: Any
    if name in __all__:
        value = _public_name(name)
    elif name == "__version__":
        from importlib.metadata import version

        value = version("tca-jax")
    elif not name.startswith("_") and _find_spec(f"{__name__}.{name}"):
        value = _import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_list_names(), "__version__"})
