"""Compiled programs: what is kept of them, and that a long-lived process does not drown in them."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tca_jax import programs
from tca_jax.programs import Program, forget_programs, num_maps

LINUX = Path("/proc/self/maps").exists()


def double(x, *, times):
    return jnp.sin(x * times).sum() + jnp.cumsum(x)[-1]


@pytest.fixture(autouse=True)
def none_kept(monkeypatch):
    monkeypatch.setattr(programs, "_kept", {})


def prepare(program: Program, size: int, times: int = 2) -> float:
    """Seconds that compiling took."""
    executable, seconds = program.prepare(jnp.ones(size), times=times)
    assert executable(jnp.ones(size)).shape == ()
    return seconds


def test_a_program_is_compiled_once_for_shapes_and_static_arguments():
    one, other = Program(double), Program(double)
    assert prepare(one, 3) > 0
    assert prepare(one, 3) == 0
    assert prepare(one, 4) > 0
    assert prepare(one, 3, times=5) > 0
    assert prepare(other, 3) > 0
    with jax.default_matmul_precision("highest"):
        assert prepare(one, 3) > 0
    assert prepare(one, 3) == 0
    forget_programs()
    assert prepare(one, 3) > 0


def test_the_programs_that_were_not_used_for_longest_go_first(monkeypatch):
    monkeypatch.setattr(programs, "_MOST_PROGRAMS", 3)
    one, other = Program(double), Program(double)
    for program, size in ((one, 1), (other, 2), (one, 3), (one, 1), (other, 4)):
        prepare(program, size)
    assert [prepare(one, 1), prepare(one, 3), prepare(other, 4)] == [0, 0, 0]
    assert prepare(other, 2) > 0


def test_programs_are_bounded_by_their_bytes(monkeypatch):
    monkeypatch.setattr(programs, "_MOST_BYTES", -1)
    program = Program(double)
    prepare(program, 1)
    assert prepare(program, 1) == 0  # the last one stays, whatever it takes
    prepare(program, 2)
    assert prepare(program, 1) > 0


def test_programs_of_a_function_that_is_gone_are_gone():
    one, other = Program(double), Program(double)
    prepare(one, 1)
    prepare(other, 1)
    del one
    gc.collect()
    assert programs.num_programs() == 1
    assert prepare(other, 1) == 0


def test_threads_may_prepare_at_once(monkeypatch):
    monkeypatch.setattr(programs, "_MOST_PROGRAMS", 3)
    program = Program(double)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda size: prepare(program, 1 + size % 5), range(40)))
    assert programs.num_programs() == 3


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="only Linux says what a process maps")
def test_a_process_of_many_shapes_maps_no_more_and_no_more(monkeypatch, tmp_path):
    program = Program(double)

    def prepared(size: int) -> int:
        program.prepare(jax.ShapeDtypeStruct((size,), jnp.float32), times=2)
        return num_maps()

    first = prepared(101)
    prepared(102)
    each = next(reversed(programs._kept.values())).maps
    assert each > 0
    unbounded = [prepared(size) for size in range(103, 115)]
    assert unbounded[-1] - first > 6 * each  # what is tested happens
    allowed = tmp_path / "max_map_count"
    allowed.write_text(str(programs._SHARE_OF_MAPS * 6 * each))
    monkeypatch.setattr(programs, "_ALLOWED_MAPS", allowed)
    bounded = [prepared(size) for size in range(115, 165)]
    assert 2 <= programs.num_programs() <= 12
    assert max(bounded[20:]) < first + 20 * each
