"""Compiled programs: what is compiled once, and how many a process keeps."""

from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from tca_jax import programs
from tca_jax.programs import Program, forget_programs, ready


def double(x, *, times):
    return jnp.sin(x * times).sum() + jnp.cumsum(x)[-1]


@pytest.fixture(autouse=True)
def none_kept(monkeypatch):
    monkeypatch.setattr(programs, "_kept", {})


def compiles(program: Program, size: int, times: int = 2) -> bool:
    """Whether the program had to be compiled for an array of this size."""
    compiled = program.start(jnp.ones(size), times=times)
    assert compiled(jnp.ones(size)).shape == ()
    return compiled.seconds > 0


def test_shapes_and_static_arguments_compile_once():
    one, other = Program(double), Program(double)
    assert compiles(one, 3)
    assert not compiles(one, 3)
    assert compiles(one, 4)
    assert compiles(one, 3, times=5)
    assert compiles(other, 3)
    with jax.default_matmul_precision("highest"):
        assert compiles(one, 3)
    assert not compiles(one, 3)
    forget_programs()
    assert compiles(one, 3)


def test_the_least_recently_used_programs_go(monkeypatch):
    monkeypatch.setattr(programs, "_MOST_ON_CPU", 3)
    one, other = Program(double), Program(double)
    for program, size in ((one, 1), (other, 2), (one, 3), (one, 1), (other, 4)):
        compiles(program, size)
    assert [compiles(one, 1), compiles(one, 3), compiles(other, 4), compiles(other, 2)] == [False] * 3 + [True]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda size: compiles(one, 1 + size % 5), range(40)))
    assert len(programs._kept) == 3


def test_programs_compile_ahead():
    program, x = Program(double), jax.ShapeDtypeStruct((5,), jnp.float32)
    assert program.start(x, times=2).shapes.shape == ()
    assert not compiles(program, 5)  # waits for the thread


def test_a_program_that_compiles_aside_is_ready_once_it_has():
    started = Program(double).start_aside(jnp.ones(6), times=2)
    assert started.result().wait() is ready(started).wait()
    assert ready(Future()) is ready(Program(double).start_aside(jnp.ones(6), times="x")) is None


def test_a_program_that_does_not_compile_is_tried_again(monkeypatch):
    program, broken = Program(double), Future()
    broken.set_exception(RuntimeError("no memory"))
    with monkeypatch.context() as patch:
        patch.setattr(programs._compilers, "submit", lambda *_: broken)
        with pytest.raises(RuntimeError, match="no memory"):
            compiles(program, 5)
    assert compiles(program, 5)
