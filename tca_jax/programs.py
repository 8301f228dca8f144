"""Compiled programs, kept by the shapes they were compiled for, so that compile time is never counted as run time."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

# Programs that a process keeps. XLA maps hundreds of pieces of memory for each program of a CPU, and Linux allows a
# process 65,530.
_MOST_PROGRAMS, _MOST_ON_CPU = 512, 128

_NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**30}  # launches in a graph, at least
_OPTIONS: Any = jax.config  # its attributes are unknown to type checkers
_kept: dict[_Key, Any] = {}  # least recently used first
_compiling: dict[_Key, Future[Any]] = {}
_compilers = ThreadPoolExecutor(4, thread_name_prefix="tca-jax-compile")
_lock = threading.Lock()  # several threads may compile at once


class _Key(tuple[Hashable, ...]):
    """A tuple whose hash is computed once: that of a model's static parts takes long."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class Program:
    """A function compiled ahead of time, once for each combination of argument shapes, static arguments and
    `jax_default_matmul_precision`.

    Args:
        function: What to compile; its keyword arguments are static. If it has a method `place`, its first argument is a
            model, over whose mesh it runs, and `place(lm, args)` puts the others there (`engine.mesh.OverMesh`).
        donate: Positions of arguments whose buffers the program may overwrite.
        one_layer: Whether it is called with another layer's weights each time. XLA then does not record its launches in
            CUDA graphs: to update a graph with other addresses takes longer than the launches.
    """

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...] = (), *, one_layer: bool = False) -> None:
        self.function, self._donate, self._one_layer = function, donate, one_layer

    def prepare(
        self, *args: Any, then: Callable[[Any], None] | None = None, **static: Any
    ) -> tuple[Callable[..., Any], float]:
        """Compiles for these arguments, or for their shapes (`results_of`), unless that was done before.

        `then` gets the shapes of the results before the program compiles: it has threads compile what follows.

        Returns:
            The executable, to be called with the same positional arguments, and the seconds that compiling took
            (0.0 when nothing was compiled).
        """
        place = getattr(self.function, "place", None)
        if place is not None and args[0].mesh is not None:
            with jax.set_mesh(args[0].mesh):  # the caller's may be another one, or have axes of another type
                executable, seconds = self._prepare((args[0], *place(args[0], args[1:])), static, then)
            return _Placing(executable, place), seconds
        return self._prepare(args, static, then)

    def run(self, *args: Any, **static: Any) -> Any:
        """Calls the executable, which is compiled first unless that was done before."""
        return self.prepare(*args, **static)[0](*args)

    def compile_ahead(self, *args: Any, **static: Any) -> Any:
        """Traces the function for these arguments, or shapes, and has a thread compile it; `prepare` waits for it.

        Returns:
            Shapes of its results; None if it has been compiled.
        """
        key = self._key(args, static)
        with _lock:
            if key in _kept:
                return None
        lowered = self._lower(args, static)
        with _lock:
            if key not in _kept and key not in _compiling:
                _compiling[key] = _compilers.submit(_compile, key, lowered)
        return results_of(lowered)

    def _key(self, args: Sequence[Any], static: Mapping[str, Any]) -> _Key:
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((jax.typeof(leaf), _sharding(leaf)) for leaf in leaves)
        options = tuple(sorted(static.items())), _OPTIONS.jax_default_matmul_precision
        return _Key((self, structure, shapes, *options))

    def _lower(self, args: Sequence[Any], static: Mapping[str, Any]) -> Any:
        function = functools.partial(self.function)  # JAX keeps what it compiled as long as the function lives
        options = _NO_GRAPHS if self._one_layer and jax.default_backend() == "gpu" else None
        jitted = jax.jit(function, static_argnames=tuple(static), donate_argnums=self._donate, compiler_options=options)
        return jitted.lower(*args, **static)

    def _prepare(
        self, args: Sequence[Any], static: Mapping[str, Any], then: Callable[[Any], None] | None
    ) -> tuple[Callable[..., Any], float]:
        key, start = self._key(args, static), time.perf_counter()
        with _lock:
            if (executable := _kept.pop(key, None)) is not None:
                _kept[key] = executable
                return executable, 0.0
            ahead = _compiling.get(key)
        try:
            if ahead is None:
                lowered = self._lower(args, static)
                if then is not None:
                    then(results_of(lowered))
                executable = _compile(key, lowered)
            else:
                executable = ahead.result()
        except KeyboardInterrupt:
            forget_programs()  # those that wait for a thread would delay the end of the process
            raise
        return executable, time.perf_counter() - start


def _compile(key: _Key, lowered: Any) -> Any:
    try:
        executable = lowered.compile()
        with _lock:
            _kept[key] = executable
            while len(_kept) > (_MOST_ON_CPU if jax.default_backend() == "cpu" else _MOST_PROGRAMS):
                del _kept[next(iter(_kept))]
        return executable
    finally:
        with _lock:
            _compiling.pop(key, None)


def _sharding(leaf: Any) -> Any:
    """Of an array on a mesh; None for one on a single device, and for its shape."""
    sharding = getattr(leaf, "sharding", None)
    return None if isinstance(sharding, SingleDeviceSharding) else sharding


def forget_programs() -> None:
    """Drops all programs; each is compiled again when it is next needed."""
    with _lock:
        for waiting in _compiling.values():
            waiting.cancel()
        _kept.clear()
        _compiling.clear()


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
    """Shapes of the results of an executable, or of a lowered program: the next one can be prepared for them."""
    return shapes_of(executable.out_info)


def shapes_of(arrays: Any) -> Any:
    """Shapes of arrays, without their layouts in memory."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)

    return jax.tree.map(shape, arrays)


def enable_compilation_cache() -> None:
    """Turns JAX's persistent compilation cache on, unless the user's environment or `jax.config` chose one or none."""
    if _OPTIONS.jax_compilation_cache_dir is None and _OPTIONS.jax_enable_compilation_cache:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "tca_jax" / "jax"))
