"""Compiled programs, kept by the shapes they were compiled for, so that compile time is never counted as run time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax

from tca_jax.engine.mesh import OverMesh

_MOST_PROGRAMS = 128  # kept of each function; an octave of prompt lengths has eight


class Program:
    """A function compiled ahead of time, once for each combination of argument shapes and static arguments.

    Args:
        function: What to compile; its keyword arguments are static. Its first argument is the model, over whose mesh
            it runs if it is an `OverMesh`.
        donate: Positions of arguments whose buffers the program may overwrite.
    """

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> None:
        self._function = function
        self._donate = donate
        self._executables: dict[Hashable, Any] = {}

    def prepare(self, *args: Any, **static: Any) -> tuple[Callable[..., Any], float]:
        """Compiles for these arguments unless that was done before.

        Arrays may be given as their shapes (`results_of`): nothing runs here.

        Returns:
            The executable, to be called with the same positional arguments, and the seconds that compiling took
            (0.0 when nothing was compiled).
        """
        if isinstance(self._function, OverMesh) and args[0].mesh is not None:
            with jax.set_mesh(args[0].mesh):  # the caller's may be another one, or have axes of another type
                executable, seconds = self._prepare(args[0], *self._function.place(args[0], args[1:]), **static)
            return _Placing(executable, self._function), seconds
        return self._prepare(*args, **static)

    def _prepare(self, *args: Any, **static: Any) -> tuple[Callable[..., Any], float]:
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        key = (structure, shapes, tuple(sorted(static.items())))
        if key in self._executables:
            self._executables[key] = self._executables.pop(key)  # now the youngest
            return self._executables[key], 0.0
        start = time.perf_counter()
        jitted = jax.jit(self._function, static_argnames=tuple(static), donate_argnums=self._donate)
        executable = jitted.lower(*args, **static).compile()
        self._executables[key] = executable
        if len(self._executables) > _MOST_PROGRAMS:
            del self._executables[next(iter(self._executables))]  # the one that was not used for longest
        return executable, time.perf_counter() - start


class _Placing:
    """An executable over a mesh that puts its arguments where they belong."""

    def __init__(self, executable: Any, function: OverMesh) -> None:
        self._executable, self._function = executable, function
        self.out_info = executable.out_info

    def memory_analysis(self) -> Any:
        """What the executable says of the memory that it needs on a device."""
        return self._executable.memory_analysis()

    def __call__(self, lm: Any, *args: Any) -> Any:
        with jax.set_mesh(lm.mesh):
            return self._executable(lm, *self._function.place(lm, args))


def results_of(executable: Any) -> Any:
    """What an executable will return, as shapes: arguments for which the program that follows it can be prepared."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:  # without the layout in memory, which is the compiler's affair
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)

    return jax.tree.map(shape, executable.out_info)


def enable_compilation_cache() -> None:
    """Turns JAX's persistent compilation cache on, unless the user has configured one or switched it off.

    `JAX_COMPILATION_CACHE_DIR` (or `jax.config`) chooses another folder, `JAX_ENABLE_COMPILATION_CACHE=false` none.
    """
    configured: Any = jax.config  # its options are attributes that type checkers do not know
    if configured.jax_compilation_cache_dir is None and configured.jax_enable_compilation_cache:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "tca_jax" / "jax"))
