"""Products of a single row: as `jax.lax.dot_general` gives them, and two rows of one on an NVIDIA GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import operations

from tca_jax.models import matmul
from tca_jax.models.matmul import dot_general

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
    monkeypatch.setattr(matmul.jax.lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
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
