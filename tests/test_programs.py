"""Compiled programs: what is compiled once, and how many a process keeps."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from tca_jax import programs
from tca_jax.programs import Program, forget_programs


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


def test_shapes_and_static_arguments_compile_once():
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


def test_the_least_recently_used_programs_go(monkeypatch):
    monkeypatch.setattr(programs, "_MOST_ON_CPU", 3)
    one, other = Program(double), Program(double)
    for program, size in ((one, 1), (other, 2), (one, 3), (one, 1), (other, 4)):
        prepare(program, size)
    assert [prepare(one, 1), prepare(one, 3), prepare(other, 4)] == [0, 0, 0]
    assert prepare(other, 2) > 0
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda size: prepare(one, 1 + size % 5), range(40)))
    assert len(programs._kept) == 3


def test_programs_compile_ahead():
    program, x = Program(double), jax.ShapeDtypeStruct((5,), jnp.float32)
    assert program.compile_ahead(x, times=2).shape == ()
    prepare(program, 5)  # waits for the thread
    assert program.compile_ahead(x, times=2) is None
    assert prepare(program, 5) == 0
