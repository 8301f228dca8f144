"""Parts of tokens: every device has its part of every chunk, and what is taken of them is what was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from meshes import mesh_of, needs_8_devices

from tca_jax.models.sequence_parallel import TokenParts

CASES = {
    "the chunks end with the tokens": (2, 64, (12, 20)),
    "whole steps and a short chunk": (4, 100, (12, 20, 16)),
    "whole steps, a whole chunk, a short one": (2, 84, (12, 20)),
    "one step, whose last chunk is short": (8, 136, (64, 48, 56)),
}


def chunks(tokens: int, sizes: tuple[int, ...]) -> list[range]:
    """All chunks, one after the other."""
    found, start = [], 0
    while start < tokens:
        for size in sizes:
            if start < tokens:
                found.append(range(start, min(start + size, tokens)))
                start = found[-1].stop
    return found


@pytest.mark.parametrize(("devices", "tokens", "sizes"), CASES.values(), ids=CASES)
def test_each_device_has_its_part_of_every_chunk(devices, tokens, sizes):
    parts = TokenParts("model", devices, tokens, sizes)
    assert parts.even
    for device in range(devices):
        expected = []
        for chunk in chunks(tokens, sizes):
            part = len(chunk) // devices
            expected += chunk[device * part : (device + 1) * part]
        assert parts.of(jnp.array(device)).tolist() == expected


def test_parts_are_even_only_where_all_chunks_divide():
    assert not TokenParts("model", 4, 100, (12, 18)).even
    assert not TokenParts("model", 4, 102, (12, 16)).even


@needs_8_devices
@pytest.mark.parametrize(("devices", "tokens", "sizes"), CASES.values(), ids=CASES)
def test_some_of_all_tokens_are_taken_from_the_devices_that_have_them(devices, tokens, sizes):
    parts = TokenParts("model", devices, tokens, sizes)
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, 3), np.float32)
    places = rng.integers(0, tokens, (2, 7))

    def taken(x: jax.Array, places: jax.Array) -> jax.Array:
        return parts.take(x[parts.of(jax.lax.axis_index("model"))], places)

    everywhere = PartitionSpec()
    run = jax.shard_map(taken, mesh=mesh_of((devices,), ("model",)), in_specs=everywhere, out_specs=everywhere)
    np.testing.assert_array_equal(jax.jit(run)(x, places), x[places])
