"""What the devices of a mesh tell each other of the residual stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from meshes import mesh_of

from tca_jax.models import parallel


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("tokens", "operation"), [(1, "all-reduce"), (16, "all-reduce"), (17, "all-gather")])
def test_the_width_is_joined_exactly_by_what_is_faster(monkeypatch, tokens, operation, dtype):
    whole = jax.random.normal(jax.random.key(tokens), (1, tokens, 24), dtype)
    whole = whole.at[:, 0, :2].set(jnp.array([jnp.inf, -jnp.inf], dtype))  # zeros of others do not touch them
    monkeypatch.setattr(parallel, "_SMALL_SUM", 16 * 24 * whole.dtype.itemsize)
    split = PartitionSpec(None, None, "model")

    def joined(part: jax.Array) -> jax.Array:
        return parallel.join_width(part, "model")

    # Each device returns the whole: side by side, as many copies as devices.
    run = jax.jit(jax.shard_map(joined, mesh=mesh_of((4,), ("model",)), in_specs=split, out_specs=split))
    np.testing.assert_array_equal(run(whole), jnp.tile(whole, 4))
    assert operation in run.lower(whole).compile().as_text()
