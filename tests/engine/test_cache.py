"""The KV cache: static layout, ring and pool contents, eviction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax import methods
from tca_jax.engine.cache import LayerCache, decode_layer, prefill_layer, rows_with_leaving_block
from tca_jax.engine.layouts import CacheLayout
from tca_jax.methods.candidates import eviction_budgets

CONFIG = tca_jax.TCAConfig(block_size=8, window=16)
DENSE = CONFIG.num_candidates


def method_of(candidates, config=CONFIG):
    return methods.configured(config, [candidates])


def plan(candidates, batch, prompt_tokens, new_tokens, config=CONFIG):
    """The layout of a layer under given budget rows."""
    cache = method_of(candidates, config).cache
    return CacheLayout.plan(cache, 0, len(candidates), batch, prompt_tokens, new_tokens)


def _qkv(seed, batch, tokens, heads=4, kv_heads=2, d=16):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(batch, tokens, h, d)), jnp.float32) for h in (heads, kv_heads, kv_heads))


def test_regions_are_aligned_disjoint_and_fill_the_pool():
    layout = plan((0, 7, DENSE), 3, 1000, 50)
    starts = layout.regions.offsets.ravel()
    ends = starts + np.tile(layout.regions.capacities, 3)
    assert np.all(starts % 128 == 0)
    np.testing.assert_array_equal(starts[1:], ends[:-1])
    assert ends[-1] == layout.regions.pool_tokens
    assert layout.regions.capacities[0] < layout.regions.capacities[1] < layout.regions.capacities[2]


def test_a_head_costs_what_its_candidate_keeps():
    sparse = plan((0, 0), 1, 4096, 1)
    dense = plan((DENSE, DENSE), 1, 4096, 1)
    assert dense.num_bytes(64, jnp.bfloat16) / sparse.num_bytes(64, jnp.bfloat16) > 4
    blocks = CONFIG.num_ranked_blocks(4096)
    kept = int(tca_jax.candidate_budgets(CONFIG, blocks)[0].sum())
    assert sum(sparse.regions.capacities) < 2 * (kept + 128 + blocks)


def test_short_prompts_have_a_short_ring_and_no_regions():
    layout = plan((3, 3), 2, 300, 20, tca_jax.TCAConfig())
    assert layout.ring_tokens == 384
    assert layout.regions.capacities == (0, 0)


def test_offsets_of_a_million_tokens_pass_two_to_the_31_elements_but_not_rows():
    layout = plan((14,) * 8, 4, 2**20, 4096, tca_jax.TCAConfig())
    last = int(layout.regions.offsets.max())
    assert last * 128 > 2**31  # element offsets need 64 bits, hence int64 on the host and 64-bit indexing in kernels
    assert last < 2**31
    assert np.all(np.diff(layout.regions.offsets.ravel()) > 0)
    assert layout.num_bytes(128, jnp.bfloat16) > 2**31


def test_a_pool_that_int32_rows_cannot_address_is_an_error():
    with pytest.raises(ValueError, match=r"a batch of 512 needs a KV pool of \d+ tokens per layer"):
        plan((14,) * 8, 512, 2**20, 1, tca_jax.TCAConfig())


@pytest.mark.parametrize("length", [5, 40, 71, 72])
def test_ring_and_pool_hold_the_local_and_the_selected_tokens(length):
    q, k, v = _qkv(0, 1, 72)
    candidates = (0, 9)
    layout = plan(candidates, 1, 72, 30)
    lengths = jnp.array([length], jnp.int32)
    _, cache = prefill_layer(method_of(candidates), 0, q, k, v, lengths, layout)
    edge = 8 * CONFIG.num_ranked_blocks(length)
    for position in range(edge, length):
        slot = position % layout.ring_tokens
        np.testing.assert_array_equal(cache.ring.k[0, :, slot], k[0, position])
        np.testing.assert_array_equal(cache.ring.v[0, :, slot], v[0, position])
    mask = np.asarray(tca_jax.select(q[:, max(0, length - 64) : length], k, jnp.array(candidates), lengths, CONFIG))[0]
    for head in range(2):
        start, kept = int(cache.pool.offsets[0, head]), int(cache.pool.lengths[0, head])
        chosen = np.flatnonzero(mask[head])
        assert kept == len(chosen)
        np.testing.assert_array_equal(cache.pool.k[start : start + kept], k[0, chosen, head])
        np.testing.assert_array_equal(cache.pool.v[start : start + kept], v[0, chosen, head])


def _decode(method, cache: LayerCache, keys, values, queries, first, prompt_lengths, steps):
    step = jax.jit(decode_layer, static_argnums=(0, 1))
    for t in range(steps):
        position = first + t
        leaving = rows_with_leaving_block(cache.layout, position, prompt_lengths)
        _, cache = step(
            method, 0, queries[:, t : t + 1], keys[:, t : t + 1], values[:, t : t + 1], cache, position, leaving
        )
    return cache


def test_each_block_that_leaves_the_window_leaves_its_budget_and_rows_do_so_on_their_own():
    lengths = jnp.array([64, 59], jnp.int32)
    q, k, v = _qkv(1, 2, 64)
    new_q, new_k, new_v = _qkv(2, 2, 30)
    candidates = (4, DENSE)
    layout = plan(candidates, 2, 64, 31)
    _, cache = prefill_layer(method_of(candidates), 0, q, k, v, lengths, layout)
    assert not np.asarray(cache.growth.lengths).any()
    budgets = np.asarray(eviction_budgets(CONFIG))[list(candidates)]
    for steps in (1, 5, 6, 8, 9, 13, 14, 30):
        after = _decode(method_of(candidates), cache, new_k, new_v, new_q, lengths, lengths, steps)
        last = np.asarray(lengths) + steps - 1  # the newest fed position
        blocks_left = last // 8 - np.asarray(lengths) // 8
        np.testing.assert_array_equal(after.growth.lengths, blocks_left[:, None] * budgets)
        for now, then in zip(after.pool, cache.pool, strict=True):
            np.testing.assert_array_equal(now, then)


def test_evicted_tokens_are_copied_in_order_of_position():
    lengths = jnp.array([64], jnp.int32)
    q, k, v = _qkv(3, 1, 64)
    new = _qkv(4, 1, 17)
    candidates = (DENSE, DENSE)
    layout = plan(candidates, 1, 64, 18)
    _, cache = prefill_layer(method_of(candidates), 0, q, k, v, lengths, layout)
    after = _decode(method_of(candidates), cache, new[1], new[2], new[0], lengths, lengths, 17)
    for head in range(2):
        for pool, tokens in ((after.pool, k[0, :48, head]), (after.growth, k[0, 48:64, head])):
            start, kept = int(pool.offsets[0, head]), int(pool.lengths[0, head])
            assert kept == len(tokens)
            np.testing.assert_array_equal(pool.k[start : start + kept], tokens)


def test_nothing_is_allocated_for_blocks_of_which_nothing_is_kept():
    class Forgetful(Greedy):
        def growth(self, layer, prompt_tokens, new_tokens):
            return 0

    assert CacheLayout.plan(Forgetful(), 0, 2, 1, 64, 40).growth is None
    assert plan((4, DENSE), 1, 64, 1).growth is None  # the only new token is never fed
    assert plan((4, DENSE), 1, 64, 10).growth.capacities == (128, 128)


def test_rows_that_answer_the_same_prompt_share_its_pool_and_grow_on_their_own():
    lengths = jnp.array([64, 59], jnp.int32)
    candidates = (4, DENSE)
    layout = plan(candidates, 2, 64, 31)
    _, cache = prefill_layer(method_of(candidates), 0, *_qkv(1, 2, 64), lengths, layout)
    new = _qkv(2, 2, 12)
    fed = _decode(method_of(candidates), cache, new[1], new[2], new[0], lengths, lengths, 12)
    rows = fed.repeat_rows(3)
    assert rows.pool.k is fed.pool.k
    np.testing.assert_array_equal(rows.pool.offsets, np.repeat(fed.pool.offsets, 3, axis=0))
    assert rows.layout.num_bytes(16, jnp.float32) == sum(
        2 * x.nbytes for x in (rows.pool.k, rows.growth.k, rows.ring.k)
    )
    for row in range(6):
        for head in range(2):
            mine, theirs = (
                pool.k[pool.offsets[r, head] :][: pool.lengths[r, head]]
                for pool, r in ((rows.growth, row), (fed.growth, row // 3))
            )
            assert len(mine) > 0
            np.testing.assert_array_equal(mine, theirs)
    assert len(np.unique(rows.growth.offsets)) == 12


class Greedy(methods.CachePolicy):
    """Keeps more than it has named."""

    block_size, window = 8, 16

    def capacities(self, layer, prompt_tokens):
        return 130

    def growth(self, layer, prompt_tokens, new_tokens):
        return 9

    def select(self, layer, heads, q, k, v, lengths, backend):
        batch, tokens, kv_heads, _ = k.shape
        budgets = jnp.where(jnp.arange(tokens // 8) < self.num_ranked_blocks(lengths)[:, None, None], 8, 0)
        budgets = jnp.broadcast_to(budgets, (batch, kv_heads, tokens // 8)).astype(jnp.int32)
        return methods.Selection(jnp.ones((batch, kv_heads, tokens), jnp.float32), budgets)

    def evict(self, layer, heads, attention, blocks):
        return methods.Selection(attention.mean(axis=2), jnp.full((*attention.shape[:2], 1), 8, jnp.int32))


def test_a_policy_that_keeps_more_than_its_capacity_spoils_no_other_region():
    method = methods.Method("greedy", methods.SparsePrefill(Greedy()), Greedy())
    layout = CacheLayout.plan(Greedy(), 0, 2, 1, 400, 140)
    assert (layout.regions.capacities, layout.growth.capacities) == ((256, 256), (128, 128))
    lengths = jnp.array([400], jnp.int32)
    q, k, v = _qkv(5, 1, 400)
    _, cache = prefill_layer(method, 0, q, k, v, lengths, layout)
    new = _qkv(6, 1, 139)
    after = _decode(method, cache, new[1], new[2], new[0], lengths, lengths, 139)  # 17 blocks leave
    assert after.pool.lengths.tolist() == [[256, 256]]
    assert after.growth.lengths.tolist() == [[128, 128]]
    for head in range(2):
        np.testing.assert_array_equal(after.pool.k[256 * head : 256 * (head + 1)], k[0, :256, head])
        left = jnp.concatenate([k[0, 384:400, head], new[1][0, :112, head]])
        np.testing.assert_array_equal(after.growth.k[128 * head : 128 * (head + 1)], left)


def test_what_is_reported_as_kept_is_what_the_cache_holds():
    lm = tiny_lm().with_method(methods.Method("greedy", methods.SparsePrefill(Greedy()), Greedy()))
    kept = tca_jax.kept_tokens(lm, random_prompt(0, 400))
    assert (kept[..., : 400 - 16].sum(axis=-1) == 256).all()
    with pytest.raises(ValueError, match=r"prompt has 5000 tokens: tiny has 4096 positions"):
        tca_jax.kept_tokens(lm, random_prompt(0, 5000))


def test_a_window_that_blocks_are_not_ranked_by_is_refused():
    class Wider(Greedy):
        def local_window(self, total_tokens):
            return 32

    with pytest.raises(ValueError, match=r"Wider.local_window\(420\) = 32, but its num_ranked_blocks\(400\) is 48"):
        CacheLayout.plan(Wider(), 0, 2, 1, 400, 20)


def test_numbers_of_numpy_are_capacities():
    class Counted(Greedy):
        def capacities(self, layer, prompt_tokens):
            return np.int64(4)

    assert CacheLayout.plan(Counted(), 0, 2, 1, 400, 20).regions.capacities == (128, 128)
