"""Compiled programs, kept by the shapes they were compiled for, so that compile time is never counted as run time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

# Programs that a process keeps. XLA maps hundreds of pieces of memory for each program of a CPU, and Linux allows a
# process 65,530.
_MOST_PROGRAMS, _MOST_ON_CPU = 512, 128

# XLA takes a pool that a program overwrites for two, and would compute parts twice to save memory that is not used.
_ON_GPU: Mapping[str, Any] = MappingProxyType({"xla_disable_hlo_passes": "rematerialization"})
#: For steps of decoding: a CUDA graph runs kernels beside each other that do not need each other, as the writes of keys
#: and of values, for which XLA gives each its own memory.
STEP: Mapping[str, Any] = MappingProxyType({**_ON_GPU, "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"})
# Products by cuBLAS alone, sums by one emitter, or XLA would compile and time several kernels for each.
_UNTIMED = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_experimental_enable_fusion_autotuner": False}
#: For layers of many tokens: no CUDA graphs, since to update one with other addresses takes as long as launches.
MANY_TOKENS: Mapping[str, Any] = MappingProxyType({**_ON_GPU, "xla_gpu_graph_min_graph_size": 2**30, **_UNTIMED})
OPTIONS: Any = jax.config  # its attributes are unknown to type checkers
_kept: dict[_Key, Compiled] = {}  # least recently used first
_compilers = ThreadPoolExecutor(4, thread_name_prefix="tca-jax-compile")
_lock = threading.Lock()  # several threads may compile at once


class _Key(tuple[Hashable, ...]):
    """A tuple whose hash is computed once: that of a model's static parts takes long."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def signature(args: Any) -> _Key:
    """Structure, shapes and shardings of arguments, which a program is compiled for."""
    leaves, structure = jax.tree.flatten(args)
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
    on_mesh = (None if isinstance(sharding, SingleDeviceSharding) else sharding for sharding in shardings)
    return _Key((structure, tuple(zip(map(jax.typeof, leaves), on_mesh, strict=True))))


class Program:
    """A function, compiled for argument shapes, static arguments, JAX's default device and precision of products."""

    def __init__(
        self,
        # Its keyword arguments are static. If it has a method `place`, it runs over the mesh of its first argument, a
        # model, and `place(lm, args)` puts the others there (`engine.mesh.OverMesh`).
        function: Callable[..., Any],
        donate: tuple[int, ...] = (),  # positions of arguments whose buffers the program may overwrite
        *,
        on_gpu: Mapping[str, Any] = _ON_GPU,  # XLA's options there
    ) -> None:
        self.function, self._donate, self._on_gpu = function, donate, on_gpu

    def start(self, *args: Any, **static: Any) -> Compiled:
        """The program for arguments, or for their shapes, which a thread may still be compiling."""
        place = getattr(self.function, "place", None)
        if place is None or args[0].mesh is None:
            return self._start(args, static, None)
        with jax.set_mesh(args[0].mesh):  # the caller's may be another one, or have axes of another type
            return self._start((args[0], *place(args[0], args[1:])), static, place)

    def start_aside(self, *args: Any, **static: Any) -> Future[Compiled]:
        """`start` by a thread, for one device; arguments that are consumed meanwhile are given as shapes."""
        return _compilers.submit(self.start, *args, **static)

    def run(self, *args: Any, **static: Any) -> Any:
        """Calls the program, which is compiled first unless that was done before."""
        return self.start(*args, **static)(*args)

    def _key(self, args: Sequence[Any], static: Mapping[str, Any]) -> _Key:
        model = getattr(args[0], "signature", None)  # kept by a model
        own = signature(args) if model is None else signature(args[1:])
        chosen = OPTIONS.jax_default_matmul_precision, OPTIONS.jax_default_device
        return _Key((self, model, own, tuple(sorted(static.items())), *chosen))

    def _lower(self, args: Sequence[Any], static: Mapping[str, Any]) -> Any:
        function = functools.partial(self.function)  # JAX keeps what it compiled as long as the function lives
        options = dict(self._on_gpu) if jax.default_backend() == "gpu" else None
        jitted = jax.jit(function, static_argnames=tuple(static), donate_argnums=self._donate, compiler_options=options)
        return jitted.lower(*args, **static)

    def _start(self, args: Sequence[Any], static: Mapping[str, Any], place: Any) -> Compiled:
        key, begun = self._key(args, static), time.perf_counter()
        with _lock:
            known = _kept.pop(key, None)
            if known is not None and not (known.compiling.done() and known.compiling.exception()):
                _kept[key] = known
                return known
        lowered = self._lower(args, static)
        compiled = Compiled(place, shapes_of(lowered.out_info), _compilers.submit(lowered.compile))
        if place is not None:  # processes that share a mesh compile the same programs in the same order
            compiled.wait()
        with _lock:
            _kept[key] = compiled
            while len(_kept) > (_MOST_ON_CPU if jax.default_backend() == "cpu" else _MOST_PROGRAMS):
                del _kept[next(iter(_kept))]
        return dataclasses.replace(compiled, seconds=time.perf_counter() - begun)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program for arguments of some shapes, which a thread may still be compiling."""

    place: Callable[..., tuple[Any, ...]] | None  # as `OverMesh.place`; None for one device
    shapes: Any  # of its results: the next program can be started for them
    compiling: Future[Any]
    seconds: float = 0.0  # of tracing, where `start` did not find the program

    def wait(self) -> Any:
        """Waits until it has been compiled, and returns the executable."""
        try:
            return self.compiling.result()
        except KeyboardInterrupt:
            forget_programs()  # those that wait for a thread would delay the end of the process
            raise

    def __call__(self, *args: Any) -> Any:
        executable = self.wait()
        try:
            return executable(*args)
        except ValueError:
            if self.place is None:
                raise
            # Some are on other devices. To look each time would take longer than the call.
            with jax.set_mesh(args[0].mesh):
                return executable(args[0], *self.place(args[0], args[1:]))


def ready(started: Future[Compiled]) -> Compiled | None:
    """A program of `start_aside` that has been compiled; None before, and after an error."""
    with contextlib.suppress(Exception):
        started.result(0).compiling.result(0)
        return started.result()
    return None


def forget_programs() -> None:
    """Drops all programs; each is compiled again when it is next needed."""
    with _lock:
        for program in _kept.values():
            program.compiling.cancel()
        _kept.clear()


def shapes_of(arrays: Any) -> Any:
    """Shapes of arrays, without their layouts in memory."""
    like = jax.ShapeDtypeStruct
    return jax.tree.map(lambda x: like(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type), arrays)
