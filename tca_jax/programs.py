"""Compiled programs, kept by the shapes they were compiled for, so that compile time is never counted as run time."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax

# Programs that a process keeps. XLA maps hundreds of pieces of memory for each program of a CPU, and Linux allows a
# process 65,530.
_MOST_PROGRAMS, _MOST_ON_CPU = 512, 128

_OPTIONS: Any = jax.config  # its attributes are unknown to type checkers
_kept: dict[tuple[Hashable, ...], Any] = {}  # least recently used first
_lock = threading.Lock()  # several threads may compile at once


class Program:
    """A function compiled ahead of time, once for each combination of argument shapes, static arguments and
    `jax_default_matmul_precision`.

    Args:
        function: What to compile; its keyword arguments are static. If it has a method `place`, its first argument is a
            model, over whose mesh it runs, and `place(lm, args)` puts the others there (`engine.mesh.OverMesh`).
        donate: Positions of arguments whose buffers the program may overwrite.
    """

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> None:
        self.function, self._donate = function, donate

    def prepare(self, *args: Any, **static: Any) -> tuple[Callable[..., Any], float]:
        """Compiles for these arguments, or for their shapes (`results_of`), unless that was done before.

        Returns:
            The executable, to be called with the same positional arguments, and the seconds that compiling took
            (0.0 when nothing was compiled).
        """
        place = getattr(self.function, "place", None)
        if place is not None and args[0].mesh is not None:
            with jax.set_mesh(args[0].mesh):  # the caller's may be another one, or have axes of another type
                executable, seconds = self._prepare(args[0], *place(args[0], args[1:]), **static)
            return _Placing(executable, place), seconds
        return self._prepare(*args, **static)

    def run(self, *args: Any, **static: Any) -> Any:
        """Calls the executable, which is compiled first unless that was done before."""
        return self.prepare(*args, **static)[0](*args)

    def _prepare(self, *args: Any, **static: Any) -> tuple[Callable[..., Any], float]:
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        key = (self, structure, shapes, tuple(sorted(static.items())), _OPTIONS.jax_default_matmul_precision)
        with _lock:
            if (executable := _kept.pop(key, None)) is not None:
                _kept[key] = executable
                return executable, 0.0
        start = time.perf_counter()
        function = functools.partial(self.function)  # JAX keeps what it compiled as long as the function lives
        jitted = jax.jit(function, static_argnames=tuple(static), donate_argnums=self._donate)
        executable = jitted.lower(*args, **static).compile()
        seconds = time.perf_counter() - start
        with _lock:
            _kept[key] = executable
            while len(_kept) > (_MOST_ON_CPU if jax.default_backend() == "cpu" else _MOST_PROGRAMS):
                del _kept[next(iter(_kept))]
        return executable, seconds


def forget_programs() -> None:
    """Drops all programs; each is compiled again when it is next needed."""
    with _lock:
        _kept.clear()


class _Placing:
    """An executable over a mesh that puts its arguments where they belong."""

    def __init__(self, executable: Any, place: Callable[..., tuple[Any, ...]]) -> None:
        self._executable, self._place = executable, place
        self.out_info = executable.out_info

    def as_text(self) -> str:
        return self._executable.as_text()

    def memory_analysis(self) -> Any:
        return self._executable.memory_analysis()

    def __call__(self, lm: Any, *args: Any) -> Any:
        with jax.set_mesh(lm.mesh):
            return self._executable(lm, *self._place(lm, args))


def results_of(executable: Any) -> Any:
    """Shapes of an executable's results, for which the next program can be prepared."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:  # without the layout in memory, which is the compiler's affair
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)

    return jax.tree.map(shape, executable.out_info)


def enable_compilation_cache() -> None:
    """Turns JAX's persistent compilation cache on, unless the user's environment or `jax.config` chose one or none."""
    if _OPTIONS.jax_compilation_cache_dir is None and _OPTIONS.jax_enable_compilation_cache:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "tca_jax" / "jax"))
