"""What a soak has seen: requests by method, memory, what was compiled and how long it took, and what is wrong."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from tca_jax.engine.lm import LM
from tca_jax.lab.benchmarks.soak_requests import Shape

_DEVICE_SLACK, _HOST_SLACK = 2**24, 2**27  # bytes that may come on top: an allocator's rounding, the host's heap

#: JAX's names of what it takes to make a program, by the columns of the table.
_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "s tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "s lowering",
    "/jax/core/compile/backend_compile_duration": "s in XLA",
}
_TRACED, _COMPILED = "s tracing", "s in XLA"


@dataclasses.dataclass
class Tally:
    """What happened under one method."""

    requests: int = 0
    repeats: int = 0
    new_tokens: int = 0
    programs: set[Hashable] = dataclasses.field(default_factory=set)
    compiled_again: int = 0
    mismatches: int = 0
    errors: int = 0

    @property
    def failed(self) -> int:
        return self.compiled_again + self.mismatches + self.errors

    def row(self, label: str) -> dict[str, Any]:
        """Its row of the table; the last three columns are failures."""
        return {
            "method": label,
            "requests": self.requests,
            "of them repeats": self.repeats,
            "new tokens": self.new_tokens,
            "distinct programs": len(self.programs),
            "compiled again": self.compiled_again,
            "other answers": self.mismatches,
            "errors": self.errors,
        }


class Compilations:
    """Counts what XLA compiles in this process, whoever asks for it, and the time that it takes."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = dict.fromkeys(_STAGES.values(), 0.0)
        self.by_program = collections.defaultdict[str, float](float)  # seconds of lowering and XLA; traces are nested
        self._lock = threading.Lock()  # threads compile side by side
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **of_event: Any) -> None:
        if (stage := _STAGES.get(event)) is not None:
            with self._lock:
                self.seconds[stage] += duration_secs
                if stage != _TRACED:
                    self.by_program[of_event.get("fun_name", "")] += duration_secs
                self.count += stage == _COMPILED

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)


class Phases:
    """The seconds of a run's phases, and of what was compiled in each."""

    def __init__(self, compilations: Compilations) -> None:
        self._compilations = compilations
        self.rows: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start, count = time.monotonic(), self._compilations.count
        before = dict(self._compilations.seconds)
        try:
            yield
        finally:
            now = self._compilations
            spent = {stage: now.seconds[stage] - before[stage] for stage in before}
            seconds = time.monotonic() - start
            self.rows.append({"phase": phase, "s": seconds, "programs compiled": now.count - count, **spent})


def memory() -> tuple[int, bool]:
    """Bytes in use of the device, or of the process where the device does not say; whether it is the device's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_in_use" in stats:
        return int(stats["bytes_in_use"]), True
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096, False


def live_bytes() -> int:
    """Bytes of all arrays that something refers to."""
    return sum(array.nbytes for array in jax.live_arrays())


def measurement(at: str, of_programs: int) -> dict[str, Any]:
    """The memory that is held, garbage apart; `of_programs` bytes of it are those of programs compiled later."""
    gc.collect()
    held, on_device = memory()
    return {
        "at": at,
        f"MB of the {'device' if on_device else 'process'}": held / 1e6,
        "of them for programs compiled later": of_programs / 1e6,
        "MB of live arrays": live_bytes() / 1e6,
    }


def leaks(measured: Sequence[dict[str, Any]]) -> list[str]:
    """What has grown beyond the slack between the last two of three measurements; nothing before there are three."""
    if len(measured) < 3:
        return []
    (_, warm, end), found = measured, []
    _, held, later, live = warm
    slack = (_DEVICE_SLACK if "device" in held else _HOST_SLACK) / 1e6
    grown = end[held] - end[later] - warm[held]
    if grown > slack:
        found.append(f"{held} grew by {grown:,.1f}")
    if end[live] > warm[live] * 1.001 + 0.1:
        found.append(f"{live} grew from {warm[live]:,.2f} to {end[live]:,.2f}")
    return found


def describe_extent(
    requests: int, generations: int, why: str, shapes: Sequence[Shape], dropped: Sequence[Shape]
) -> str:
    """How many of the generations have run, of how many shapes, and `why` these are not all."""
    text = f"{requests} generations"
    if requests < generations:
        text = f"{requests} of the {generations} generations asked for, as {why}"
    text += f"; {len(shapes)} shapes of requests"
    if dropped:
        text += f", without the {len(dropped)} whose turn had not come in time ({'; '.join(map(str, dropped))})"
    return text


def describe(lm: LM, extent: str, seconds: float, failures: Sequence[str]) -> str:
    """What ran, what the columns mean, and what came of it."""
    came = "; ".join(failures) or "nothing failed"
    return (
        f"{lm.name}, {extent}, {seconds:,.0f} s in all: {came}. A shape is a method, a length, a batch, samples and "
        "settings, half of them over contexts; lengths and numbers are random within each. `distinct programs` "
        "counts the combinations that may compile; `compiled again` the requests for which something was compiled "
        "though their combination had run before; `other answers` the repeats whose tokens were not those of the first "
        "time, sampled ones too, which have a seed. Memory must not grow between the last two measurements, but for "
        "programs that are new. Seconds of tracing, lowering and XLA are those of all threads together."
    )
