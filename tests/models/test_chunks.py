"""Functions of tokens in chunks: results are those of all tokens at once, in the buffers, under `shard_map`, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from meshes import mesh_of

from tca_jax.models.chunks import by_chunks

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
