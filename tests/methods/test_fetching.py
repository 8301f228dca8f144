"""Which key blocks a tile of queries fetches: the choice by mass, the lists, and that nothing later changes it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import poison, qkv

from tca_jax.methods.config import TCAConfig
from tca_jax.methods.fetching import attend_blocks, fetch_lists, fetched_blocks, fetched_blocks_of
from tca_jax.pallas_kernels.block_mass import block_mass

CONFIG = TCAConfig(block_size=8, window=16, fetch=3, fetch_stride=4)
WINDOW = CONFIG.window // CONFIG.block_size
LENGTHS = np.array([133, 70], np.int32)


def of_tiles(blocks):
    """Sets of fetched blocks, tile by tile, of one head."""
    return [{int(j) for j in tile if j >= 0} for tile in blocks]


def test_the_blocks_of_the_highest_mass_left_of_the_window_are_fetched_the_nearest_first():
    mass = np.random.default_rng(0).random((2, 3, 11, 11)).astype(np.float32)
    found = np.asarray(fetched_blocks(jnp.asarray(mass), CONFIG))
    assert found.shape == (2, 3, 11, 3)
    assert found.dtype == np.int32
    for row, head, tile in np.ndindex(2, 3, 11):
        left = mass[row, head, tile, : max(0, tile - WINDOW)]
        best = np.sort(np.argsort(-left)[:3])[::-1]
        np.testing.assert_array_equal(found[row, head, tile], [*best, *[-1] * (3 - len(best))])


def test_ties_go_to_the_lower_block_and_blocks_without_mass_are_fetched_last():
    mass = np.zeros((1, 1, 9, 9), np.float32)
    mass[0, 0, 7, [4, 2, 6]] = 1.0, 1.0, 9.0  # block 6 is in the window
    mass[0, 0, 8] = 1.0
    found = of_tiles(np.asarray(fetched_blocks(jnp.asarray(mass), CONFIG))[0, 0])
    assert found[7] == {4, 2, 0}
    assert found[8] == {0, 1, 2}
    assert found[:4] == [set(), set(), set(), {0}]


def test_fewer_tiles_than_blocks_to_fetch_have_room_for_as_many_as_there_are():
    found = fetched_blocks(jnp.ones((1, 1, 2, 2), jnp.float32), CONFIG)
    np.testing.assert_array_equal(found, np.full((1, 1, 2, 2), -1))


def lists_of(q, k, lengths=LENGTHS, config=CONFIG):
    return fetch_lists(jnp.asarray(q), jnp.asarray(k), jnp.asarray(lengths), config, "xla")


def test_lists_hold_the_window_and_then_the_fetched_blocks_alike_in_a_group():
    q, k, _ = qkv(0, 2, 133, 4, 2, 16)
    distances, counts = map(np.asarray, lists_of(q, k))
    fetched = np.asarray(fetched_blocks_of(*map(jnp.asarray, (q, k, LENGTHS)), CONFIG, "xla"))
    assert distances.shape == (2, 4, 17, WINDOW + 1 + CONFIG.fetch)
    for row, head, tile in np.ndindex(2, 4, 17):
        local = [tile - i for i in range(WINDOW + 1) if tile >= i]
        far = [j for j in fetched[row, head // 2, tile] if j >= 0]
        assert counts[row, head, tile] == len(local) + len(far)
        blocks = tile + 1 - distances[row, head, tile, : counts[row, head, tile]] / 8
        assert blocks.tolist() == [*local, *far]
        assert len(far) == min(CONFIG.fetch, max(0, tile - WINDOW))
        assert (np.diff(blocks) < 0).all()


def test_blocks_are_fetched_by_the_estimated_mass_where_there_are_more_than_are_fetched():
    q, k, _ = (jnp.asarray(x) for x in qkv(1, 2, 133, 4, 2, 16))
    mass = block_mass(q, k, jnp.asarray(LENGTHS), block_size=8, stride=4, backend="xla")
    found = fetched_blocks_of(q, k, jnp.asarray(LENGTHS), CONFIG, "xla")
    np.testing.assert_array_equal(found, fetched_blocks(mass, CONFIG))
    least = CONFIG.num_ranked_blocks(136)
    for fetch, config in ((fetch, dataclasses.replace(CONFIG, fetch=fetch)) for fetch in (least, least + 9)):
        everything = np.asarray(fetched_blocks_of(q, k, jnp.asarray(LENGTHS), config, "xla"))
        assert of_tiles(everything[0, 0]) == [set(range(max(0, tile - WINDOW))) for tile in range(17)], fetch


def test_a_stride_longer_than_a_block_samples_its_last_query():
    q, k, _ = qkv(2, 2, 133, 4, 2, 16)
    one, more = (lists_of(q, k, config=dataclasses.replace(CONFIG, fetch_stride=stride)) for stride in (8, 128))
    np.testing.assert_array_equal(one.distances, more.distances)


@pytest.mark.parametrize("length", [72, 75])
def test_nothing_behind_a_tile_changes_what_it_fetches_or_what_its_queries_read(length):
    q, k, v = qkv(3, 1, 133, 4, 2, 16)
    lengths = np.array([133], np.int32)
    other_q, other_k, other_v = (poison(x, [length], 50.0) for x in (q, k, v))
    tiles = length // 8  # whole ones
    before, after = lists_of(q, k, lengths), lists_of(other_q, other_k, lengths)
    np.testing.assert_array_equal(after.distances[:, :, :tiles], before.distances[:, :, :tiles])
    assert not np.array_equal(after.distances, before.distances)
    outs = [
        np.asarray(attend_blocks(*map(jnp.asarray, (*x, lengths)), CONFIG, "xla")[0])
        for x in ((q, k, v), (other_q, other_k, other_v))
    ]
    np.testing.assert_array_equal(outs[1][:, : tiles * 8], outs[0][:, : tiles * 8])


def test_what_lies_past_a_length_matters_to_nothing():
    q, k, v = qkv(4, 2, 133, 4, 2, 16)
    runs = [
        attend_blocks(*(jnp.asarray(poison(x, LENGTHS, value)) for x in (q, k, v)), jnp.asarray(LENGTHS), CONFIG, "xla")
        for value in (0.0, 1e4)
    ]
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    np.testing.assert_array_equal(runs[0][1], runs[1][1])
    alone = lists_of(q[1:, :70], k[1:, :70], LENGTHS[1:])
    together = lists_of(q, k)
    np.testing.assert_array_equal(together.counts[1:, :, :9], alone.counts)
    np.testing.assert_array_equal(together.distances[1:, :, :9], alone.distances)
