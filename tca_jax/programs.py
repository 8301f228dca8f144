"""Compiled programs, kept by the shapes they were compiled for, so that compile time is never counted as run time.

A process may map only so many pieces of memory (65,530 on Linux). XLA's compiler for CPUs maps hundreds for each
program, and takes tens of megabytes. So the programs that were not used for longest are dropped in time.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import jax

_MOST_PROGRAMS = 512  # kept of all functions; an octave has eight prompt lengths, a long prompt one for each layer
_MOST_BYTES = 4 * 2**30  # of all together: their code, and what the process grew by while they were compiled
_SHARE_OF_MAPS = 2  # all together map at most half of what the system allows

_OPTIONS: Any = jax.config  # they are attributes that type checkers do not know
_MAPS, _PAGES = Path("/proc/self/maps"), Path("/proc/self/statm")
_ALLOWED_MAPS = Path("/proc/sys/vm/max_map_count")


class _Kept(NamedTuple):
    """A program, the bytes that it takes, and the pieces of memory that the process maps for it."""

    executable: Any
    nbytes: int
    maps: int


#: All programs of the process, those that were not used for longest first: by a reference to the `Program`, and what
#: they were compiled for.
_kept: dict[tuple[Hashable, ...], _Kept] = {}
_lock = threading.RLock()  # several threads may compile at once; the garbage collector may call `_forget` anywhere


class Program:
    """A function compiled ahead of time, once for each combination of argument shapes, static arguments and
    `jax_default_matmul_precision`.

    Args:
        function: What to compile; its keyword arguments are static. If it has a method `place`, its first argument is a
            model, over whose mesh it runs, and `place(lm, args)` puts the others there (`engine.mesh.OverMesh`).
        donate: Positions of arguments whose buffers the program may overwrite.
    """

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> None:
        self._function = function
        self._donate = donate
        weakref.finalize(self, _forget, weakref.ref(self))

    def prepare(self, *args: Any, **static: Any) -> tuple[Callable[..., Any], float]:
        """Compiles for these arguments unless that was done before.

        Arrays may be given as their shapes (`results_of`): nothing runs here.

        Returns:
            The executable, to be called with the same positional arguments, and the seconds that compiling took
            (0.0 when nothing was compiled).
        """
        place = getattr(self._function, "place", None)
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
        precision = _OPTIONS.jax_default_matmul_precision
        key = (weakref.ref(self), structure, shapes, tuple(sorted(static.items())), precision)
        with _lock:
            if (kept := _kept.pop(key, None)) is not None:
                _kept[key] = kept  # now the youngest
                return kept.executable, 0.0
        start, nbytes, maps = time.perf_counter(), resident_bytes(), num_maps()
        # JAX keeps what it has compiled as long as the function lives: this one lives as long as its program.
        function = functools.partial(self._function)
        jitted = jax.jit(function, static_argnames=tuple(static), donate_argnums=self._donate)
        executable = jitted.lower(*args, **static).compile()
        seconds = time.perf_counter() - start
        code = getattr(executable.memory_analysis(), "generated_code_size_in_bytes", 0)
        kept = _Kept(executable, code + max(0, resident_bytes() - nbytes), max(0, num_maps() - maps))
        with _lock:
            _kept[key] = kept
            while len(_kept) > 1 and _are_many():
                _kept.pop(next(iter(_kept)), None)
        return executable, seconds


def forget_programs() -> None:
    """Drops all programs; each is compiled anew when it is next needed."""
    with _lock:
        _kept.clear()


def _forget(program: Hashable) -> None:
    """Drops what was compiled of a `Program` that is gone, by the reference to it."""
    with _lock:
        for key in [key for key in list(_kept) if key[0] is program]:
            _kept.pop(key, None)


def num_programs() -> int:
    """Programs that the process keeps."""
    return len(_kept)


def num_maps() -> int:
    """Pieces of memory that this process maps; 0 where the system does not say."""
    try:
        return _MAPS.read_bytes().count(b"\n")
    except OSError:
        return 0


def _are_many() -> bool:
    """Whether the programs that are kept are more than a process should have."""
    kept = list(_kept.values())
    if len(kept) > _MOST_PROGRAMS or sum(each.nbytes for each in kept) > _MOST_BYTES:
        return True
    try:
        allowed = int(_ALLOWED_MAPS.read_text())
    except (OSError, ValueError):
        return False
    return sum(each.maps for each in kept) > allowed / _SHARE_OF_MAPS


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        return int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


class _Placing:
    """An executable over a mesh that puts its arguments where they belong."""

    def __init__(self, executable: Any, place: Callable[..., tuple[Any, ...]]) -> None:
        self._executable, self._place = executable, place
        self.out_info = executable.out_info

    def as_text(self) -> str:
        """The compiled program."""
        return self._executable.as_text()

    def memory_analysis(self) -> Any:
        """What the executable says of the memory that it needs on a device."""
        return self._executable.memory_analysis()

    def __call__(self, lm: Any, *args: Any) -> Any:
        with jax.set_mesh(lm.mesh):
            return self._executable(lm, *self._place(lm, args))


def results_of(executable: Any) -> Any:
    """What an executable will return, as shapes: arguments for which the program that follows it can be prepared."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:  # without the layout in memory, which is the compiler's affair
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)

    return jax.tree.map(shape, executable.out_info)


def enable_compilation_cache() -> None:
    """Turns JAX's persistent compilation cache on, unless the user has configured one or switched it off.

    `JAX_COMPILATION_CACHE_DIR` (or `jax.config`) chooses another folder, `JAX_ENABLE_COMPILATION_CACHE=false` none.
    """
    if _OPTIONS.jax_compilation_cache_dir is None and _OPTIONS.jax_enable_compilation_cache:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "tca_jax" / "jax"))
