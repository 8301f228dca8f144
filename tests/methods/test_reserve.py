"""The reserve and the two rows of a head: selection against the float64 oracle, prefixes, capacities, presets."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import last_queries, observed_queries, qkv, regions
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import kept_tokens, read_layer

import tca_jax
from tca_jax import methods
from tca_jax.engine.cache import CacheLayout
from tca_jax.methods.base import Heads
from tca_jax.methods.candidates import budget_count_table
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.selection import block_budgets, block_density, row_budgets, score_prompt
from tca_jax.pallas_kernels.select_tokens import selection_mask
from tca_jax.pallas_kernels.token_scores import token_scores

CONFIG = TCAConfig(block_size=8, window=16, reserve=9, observation=6, spread=3)
DENSE = CONFIG.num_candidates
NOISE = 1e-5  # relative gap under which float32 may break a tie differently from float64


def masks(method, q, k, lengths, config):
    """What the cache keeps and what prompt queries attend to, bool [B, Hkv, L] each."""
    queries = jnp.asarray(observed_queries(q, lengths, config.num_queries))
    selection = method.cache.select(
        0, Heads.all(k.shape[2]), queries, jnp.asarray(k), jnp.asarray(k), jnp.asarray(lengths), "xla"
    )
    return [
        np.asarray(selection_mask(part.scores, part.budgets, block_size=config.block_size))
        for part in (selection, selection.for_prefill)
    ]


@pytest.mark.parametrize("density", ["concentration", "paper", "random"])
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (4, 2), (7, 1)])
def test_selection_of_both_rows_equals_the_oracle_on_ragged_prompts(group, kv_heads, density):
    config = dataclasses.replace(CONFIG, density=density)
    lengths = np.array([101, 4, 53], np.int32)
    q, k, v = qkv(group, 3, 101, group * kv_heads, kv_heads, 8, 1.0)
    cache, prefill = [DENSE, 3, 7][:kv_heads], [2, 3, 0][:kv_heads]
    kept, read = masks(methods.configured(config, [cache], prefill_candidates=[prefill]), q, k, lengths, config)
    drawn = None
    if density == "random":
        ranked = config.num_ranked_blocks(jnp.asarray(lengths))
        last = jnp.asarray(last_queries(q, lengths))
        drawn = np.asarray(
            block_density(token_scores(last, jnp.asarray(k), jnp.asarray(lengths), block_size=8), ranked, config)
        )
    checked = 0
    for row, head, queries, keys, _ in regions(q, k, v, lengths):
        n = len(keys)
        densities = None if drawn is None else drawn[row, head, : config.num_ranked_blocks(n)]
        arguments = (queries[-config.observation :], keys)
        expected, margin = oracle.select(*arguments, cache[head], config, densities, prefill_candidate=prefill[head])
        sparse, sparse_margin = oracle.select(*arguments, prefill[head], config, densities)
        if min(margin, sparse_margin) > NOISE:
            np.testing.assert_array_equal(kept[row, head, :n], expected)
            np.testing.assert_array_equal(read[row, head, :n], sparse)
            checked += n > config.window + 8
    assert checked >= kv_heads
    assert not (read & ~kept).any()
    assert not kept[np.arange(101) >= lengths[:, None, None] + np.zeros((3, kv_heads, 1))].any()


@settings(max_examples=25, deadline=None, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 160), min_size=2, max_size=2),
    rows=st.lists(st.integers(0, DENSE), min_size=4, max_size=4),
    reserve=st.sampled_from([1, 9, 70]),
)
def test_no_prompt_keeps_more_than_its_capacity_and_prefill_reads_a_part_of_what_is_kept(seed, lengths, rows, reserve):
    config = dataclasses.replace(CONFIG, reserve=reserve)
    method = methods.configured(config, [rows[:2]], prefill_candidates=[rows[2:]])
    q, k, _ = qkv(seed, 2, 160, 2, 2, 8, 2.0)
    kept, read = masks(method, q, k, np.array(lengths, np.int32), config)
    assert not (read & ~kept).any()
    for longest in (max(lengths), 160):
        capacities = method.cache.capacities(0, longest)
        of_prefill = method.cache.prefill_capacities(0, longest) or capacities
        assert (kept.sum(axis=-1) <= capacities).all()
        assert (read.sum(axis=-1) <= of_prefill).all()
        assert max(capacities) <= config.num_ranked_blocks(longest) * 8


def test_a_reserve_of_more_than_all_ranked_tokens_keeps_them_all():
    config = dataclasses.replace(CONFIG, reserve=1000)
    q, k, _ = qkv(0, 2, 77, 2, 1, 8)
    lengths = np.array([77, 30], np.int32)
    kept, _ = masks(methods.configured(config, [[0]]), q, k, lengths, config)
    ranked = 8 * config.num_ranked_blocks(lengths)
    np.testing.assert_array_equal(kept[:, 0], np.arange(77) < ranked[:, None])
    assert methods.configured(config, [[0]]).cache.capacities(0, 77) == (56,)


def test_the_reserve_crosses_blocks_and_follows_what_the_last_queries_look_at():
    # One token of block 1 is looked at by an earlier query alone: it and its followers stay, the budgets know nothing.
    config = TCAConfig(block_size=8, window=8, num_candidates=2, sigma=0.05, reserve=4, observation=3, spread=4)
    q, k = np.zeros((1, 64, 1, 4), np.float32), np.zeros((1, 64, 1, 4), np.float32)
    k[0, 14, 0], q[0, 61, 0] = 4.0, 4.0
    lengths, row = np.array([64], np.int32), np.zeros(1, np.int32)
    observed = np.asarray(tca_jax.select(q[:, 61:], k, row, lengths, config))[0, 0]
    alone = np.asarray(tca_jax.select(q[:, 63], k, row, lengths, config))[0, 0]
    assert observed[14:18].all()
    assert observed.sum() == 7 + 2  # one of each block, and what the reserve adds in blocks 1 and 2: 2 tokens each
    assert alone[:4].all()  # one query that looks nowhere: ties go to the lowest positions
    assert alone.sum() == 6 + 4


def test_queries_before_a_short_prompt_and_more_than_are_observed_do_not_count():
    q, k, _ = qkv(3, 2, 60, 4, 2, 8)
    config = dataclasses.replace(CONFIG, observation=40)
    lengths, rows = np.array([60, 33], np.int32), np.array([1, 4], np.int32)
    exact = tca_jax.select(observed_queries(q, lengths, 40), k, rows, lengths, config)
    more = tca_jax.select(observed_queries(q, lengths, 60), k, rows, lengths, config)
    np.testing.assert_array_equal(exact, more)
    alone = tca_jax.select(q[1:, :33], k[1:, :33], rows, lengths[1:], config)
    np.testing.assert_array_equal(exact[1:, :, :33], alone)


def test_one_query_chooses_the_reserve_alone():
    q, k, _ = qkv(4, 2, 60, 4, 2, 8)
    lengths, rows = np.array([60, 33], np.int32), np.array([1, 4], np.int32)
    one = dataclasses.replace(CONFIG, observation=1)
    given_one = tca_jax.select(last_queries(q, lengths), k, rows, lengths, CONFIG)
    np.testing.assert_array_equal(given_one, tca_jax.select(observed_queries(q, lengths, 6), k, rows, lengths, one))
    with pytest.raises(ValueError, match=r"q_last has shape \(2, 0, 4, 8\): must hold at least one query"):
        tca_jax.select(q[:, :0], k, rows, lengths, CONFIG)


@pytest.mark.parametrize("config", [TCAConfig.paper(block_size=8, window=16), TCAConfig(8, 16, reserve=0)])
def test_without_a_reserve_scores_and_budgets_are_bit_for_bit_those_of_the_budgets_alone(config):
    q, k, _ = map(jnp.asarray, qkv(5, 2, 90, 4, 2, 8))
    lengths, rows = jnp.array([90, 41]), jnp.array([3, 8])
    scored = token_scores(jnp.asarray(last_queries(np.asarray(q), [90, 41])), k, lengths, block_size=8)
    ranked = config.num_ranked_blocks(lengths)
    counts = jnp.asarray(budget_count_table(config, 9))[ranked[:, None], rows]
    expected = block_budgets(block_density(scored, ranked, config), ranked, counts)
    cache = methods.configured(config, [rows.tolist()], prefill_candidates=[rows.tolist()]).cache
    queries = jnp.asarray(observed_queries(np.asarray(q), [90, 41], cache.num_queries))
    assert queries.shape[1] == 1
    selection = cache.select(0, Heads.all(k.shape[2]), queries, k, k, lengths, "xla")
    np.testing.assert_array_equal(selection.scores, scored.scores)
    np.testing.assert_array_equal(selection.budgets, expected)
    assert selection.prefill_budgets is None


@pytest.mark.parametrize(
    ("reserve", "prefill", "passes", "observed", "pools"),
    [
        (0, [3, 3], 1, 0, 1),  # as it was before there was a reserve
        (4, [3, 3], 1, 1, 1),
        (4, [3, 1], 1, 1, 2),
    ],
)
def test_a_layer_scores_its_prompt_once_and_has_a_second_buffer_only_where_rows_differ(
    reserve, prefill, passes, observed, pools
):
    config = dataclasses.replace(CONFIG, reserve=reserve)
    method = methods.configured(config, [[3, 3]], prefill_candidates=[prefill])
    q, k, v = map(jnp.asarray, qkv(6, 1, 64, 4, 2, 8))
    layout = CacheLayout.plan(method.cache, 1, 2, 1, 64, 8)

    def run(q, k, v, lengths):
        return read_layer(method, layout, lengths, (q, k, v), "xla")

    program = str(jax.make_jaxpr(run)(q, k, v, jnp.array([64])))
    calls = collections.Counter(re.findall(r"name=(\w+)", program))
    names = ("token_scores", "observation_scores", "select_tokens")
    assert [calls[name] for name in names] == [passes, observed, pools]


def test_prompts_attend_to_the_prefill_row_and_leave_the_cache_row_behind():
    lengths = np.array([96, 70, 19], np.int32)
    q, k, v = qkv(7, 3, 96, 4, 2, 8)
    method = methods.configured(CONFIG, [[DENSE, 5]], prefill_candidates=[[1, 5]])
    layout = CacheLayout.plan(method.cache, 1, 2, 3, 96, 8)
    read = jax.jit(functools.partial(read_layer, method, layout), static_argnames="last_query")
    (out, pairs), cache = read(lengths, (q, k, v))
    expected = tca_jax.attend(q, k, v, jnp.array([1, 5]), jnp.asarray(lengths), CONFIG)
    np.testing.assert_array_equal(out, expected)
    queries = observed_queries(q, lengths, CONFIG.num_queries)
    kept = np.asarray(tca_jax.select(queries, k, jnp.array([DENSE, 5]), jnp.asarray(lengths), CONFIG))
    for row, head in np.ndindex(3, 2):
        np.testing.assert_array_equal(kept_tokens(cache, row, head)[0], k[row, kept[row, head], head])
    given = queries, k, v
    tail, _ = read(lengths, given, last_query=True)
    np.testing.assert_array_equal(tail.pairs, pairs)
    last = np.asarray(expected)[np.arange(3), lengths - 1]
    np.testing.assert_allclose(tail.out[:, -1], last, atol=1e-5)
    dense = np.asarray(tca_jax.attend(q, k, v, jnp.array([DENSE, 5]), jnp.asarray(lengths), CONFIG))
    assert np.abs(dense[0, 95, :2] - last[0, :2]).max() > 1e-2  # the cache row would have answered otherwise


def test_rows_that_are_equal_are_one_row():
    one = methods.configured(CONFIG, [[1, 2]])
    assert methods.configured(CONFIG, [[1, 2]], prefill_candidates=np.array([[1, 2]])) == one
    assert one.cache.prefill_capacities(0, 100) is None
    two = methods.configured(CONFIG, [[1, 2], [3, 4]], prefill_candidates=[[1, 2], [3, 3]]).cache
    assert two.prefill_capacities(0, 100) is None
    assert two.prefill_rows(0, 2) is None
    assert two.prefill_capacities(1, 100) is not None
    np.testing.assert_array_equal(two.prefill_rows(1, 2), [3, 3])
    np.testing.assert_array_equal(two.rows(1, 2), [3, 4])


def test_prefill_rows_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"prefill_candidates\[0\]\[1\] = 15: must lie in \[0, 14\]"):
        methods.configured(CONFIG, [[1, 2]], prefill_candidates=[[1, 15]])
    with pytest.raises(ValueError, match=r"prefill_candidates has 1 layers of 3 KV heads: must be 1 of 2"):
        methods.configured(CONFIG, [[1, 2]], prefill_candidates=[[1, 2, 3]]).validate_for(1, 2)


def test_prompts_that_fit_the_window_have_no_reserve():
    q, k, _ = map(jnp.asarray, qkv(8, 2, 23, 4, 2, 8))
    scores = score_prompt(q[:, -6:], k, jnp.array([23, 5]), CONFIG)
    assert scores.reserved is None
    assert not row_budgets(scores, jnp.array([0, DENSE]), jnp.array([23, 5]), CONFIG).any()
