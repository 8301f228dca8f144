"""Projections: in chunks of tokens as all at once, under `shard_map`, too; those of a single row."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import operations
from jax.sharding import PartitionSpec
from meshes import mesh_of

from tca_jax.models import projections
from tca_jax.models.projections import by_chunks, dot_general

needs_4_devices = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")

#: 33 tokens: one chunk, equal chunks and a rest, unequal chunks that end in the first or in a later chunk of a step.
SIZES = [(33,), (8,), (11,), (5, 7, 6), (14, 18), (16, 16)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("fresh", [True, False])
def test_results_are_those_of_all_tokens_at_once(sizes: tuple[int, ...], fresh: bool) -> None:
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.integers(-99, 99, shape), jnp.float32) for shape in ((3, 11, 4), (3, 11)))
    seen: list[int] = []

    def function(old: jax.Array | None, x: jax.Array, y: jax.Array) -> jax.Array:
        seen.append(y.size)
        return x * y[..., None] + (0 if old is None else old)

    old = None if fresh else 2 * x
    got = jax.jit(lambda *args: by_chunks(function, sizes, *args))(old, x, y)
    np.testing.assert_array_equal(got, x * y[..., None] + (0 if fresh else 2 * x))
    assert max(seen) <= max(sizes)


@needs_4_devices
def test_results_may_vary_over_mesh_axes_that_no_input_varies_over() -> None:
    """Such as queries of a device's own heads, where derivatives are taken over a mesh."""
    x, weights = jnp.arange(24.0).reshape(2, 6, 2), jnp.arange(8.0)
    split = PartitionSpec("model")

    def on_device(x: jax.Array, weights: jax.Array) -> jax.Array:
        varying = by_chunks(lambda _, x: x * weights[:, None].sum(), (4,), None, x)
        return jax.lax.psum(varying, "model")

    mesh = mesh_of((4,), ("model",))
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(PartitionSpec(), split), out_specs=PartitionSpec())
    np.testing.assert_array_equal(jax.jit(run)(x, weights), x * weights.sum())


DIMENSIONS = {
    "a row": ((1, 1, 24), (24, 3, 16), (((2,), (0,)), ((), ()))),
    "rows": ((1, 5, 24), (24, 3, 16), (((2,), (0,)), ((), ()))),
    "rows of a batch": ((3, 1, 24), (24, 16), (((2,), (0,)), ((), ()))),
    "a vector": ((24,), (24, 16), (((0,), (0,)), ((), ()))),
    "weights the other way": ((1, 24), (16, 24), (((1,), (1,)), ((), ()))),
    "a column": ((24, 1), (24, 16), (((0,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("case", DIMENSIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_is_the_product(case, dtype):
    of_lhs, of_rhs, dimensions = DIMENSIONS[case]
    keys = jax.random.split(jax.random.key(len(case)))
    lhs, rhs = jax.random.normal(keys[0], of_lhs, dtype), jax.random.normal(keys[1], of_rhs, dtype)
    wanted = jax.lax.dot_general(lhs, rhs, dimensions, preferred_element_type=jnp.float32)
    got = jax.jit(lambda *args: dot_general(*args, dimensions, preferred_element_type=jnp.float32))(lhs, rhs)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def rows_multiplied(platform, of_lhs, of_rhs):
    """Rows of the one product in what is compiled for a platform."""
    arguments = jax.ShapeDtypeStruct(of_lhs, jnp.bfloat16), jax.ShapeDtypeStruct(of_rhs, jnp.bfloat16)
    traced = jax.jit(lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ())))).trace(*arguments)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    (rows,) = re.findall(r"dot_general .*: \(tensor<(\d+)x", text)
    return int(rows)


def test_a_row_times_few_weights_is_two_rows_on_a_gpu_only():
    assert rows_multiplied("cuda", (1, 64), (64, 32)) == 2
    assert rows_multiplied("cpu", (1, 64), (64, 32)) == 1
    assert rows_multiplied("cuda", (3, 64), (64, 32)) == 3
    assert rows_multiplied("cuda", (1, 4096), (4096, 4096)) == 1  # a matrix product as it is


@pytest.mark.parametrize("case", ["a row", "weights the other way", "a column"])
def test_of_two_rows_one_comes_back(case, monkeypatch):
    """The branch for GPUs, run here."""
    of_lhs, of_rhs, dimensions = DIMENSIONS[case]
    keys = jax.random.split(jax.random.key(0))
    lhs, rhs = jax.random.normal(keys[0], of_lhs), jax.random.normal(keys[1], of_rhs)
    monkeypatch.setattr(projections.jax.lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
    got = dot_general(lhs, rhs, dimensions)
    wanted = jax.lax.dot_general(lhs, rhs, dimensions)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU; XLA does otherwise on a CPU")
def test_no_product_of_a_row_is_written_to_memory():
    few = 2048, 4096
    x, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 1, few[0]), few))

    def projected(x, weights):
        return jnp.tanh(dot_general(jnp.tanh(x), weights, (((2,), (0,)), ((), ()))))

    assert operations(jax.jit(projected).lower(x, weights).compile().as_text(), {few}) == {"parameter"}
