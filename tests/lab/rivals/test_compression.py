"""Policies that compress a prompt once, against naive float64 oracles, from scores to answers; CAKE's budgets."""

import functools

import compressing
import jax
import numpy as np
import pytest
from cases import observed_queries, poison, qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import highest
from tiny import CONFIG, random_prompt, tiny_lm

from tca_jax import methods
from tca_jax.lab.rivals.adakv import AdaKVCache
from tca_jax.lab.rivals.cake import layer_budgets, layer_preferences
from tca_jax.methods.base import Heads
from tca_jax.pallas_kernels.select_tokens import selection_mask

B, W = 8, 16
GEOMETRY = {"block_size": B, "window": W}
LENGTHS = (5, 24, 61, 96)  # shorter than the window, one ranked block, ragged, whole blocks

OBSERVED = {"observation": 8}
POOLED = {**OBSERVED, "kernel": 3, "pooling": "max"}
EXPECTED = {"future": 20, "sinks": 3}
PREFERENCES = {"preferences": (1.0, 3.0)}  # of no meaning for scores, as is the safeguard
#: Method, its options, and the scores that these give.
MEMBERS = [
    ("snapkv", OBSERVED, compressing.snapkv_scores),
    ("snapkv", POOLED, compressing.snapkv_scores),
    ("cake", {**PREFERENCES, **OBSERVED}, compressing.cake_scores),
    ("cake", {**PREFERENCES, **OBSERVED, "gamma": 0.5, "kernel": 1}, compressing.cake_scores),
    ("expected-attention", EXPECTED, compressing.expected_attention_scores),
    ("expected-attention", {"future": 20, "epsilon": 0.02, "sinks": 0}, compressing.expected_attention_scores),
    ("h2o", {}, compressing.h2o_scores),
    ("h2o", {"average": True}, compressing.h2o_scores),
    ("keydiff", {}, compressing.keydiff_scores),
    ("pyramidkv", OBSERVED, compressing.snapkv_scores),
    ("tova", {}, compressing.tova_scores),
    ("adakv", {**OBSERVED, "kernel": 5, "pooling": "avg"}, compressing.snapkv_scores),
    ("adakv", {**POOLED, "safeguard": 0.45}, compressing.snapkv_scores),
    ("adakv-expected-attention", {**EXPECTED, "epsilon": 0.02}, compressing.expected_attention_scores),
    ("adakv-expected-attention", {**EXPECTED, "epsilon": 0.0, "safeguard": 0.8}, compressing.expected_attention_scores),
]


def cache_of(name, options):
    return methods.get(name, **GEOMETRY, **options).for_model(CONFIG.num_layers, compressing.FREQUENCIES).cache


def num_kept(policy, scores, layer):
    """Tokens that each head keeps of these scores [H, n]."""
    adaptive = isinstance(policy, AdaKVCache)
    mean = (policy.scored if adaptive else policy).num_kept(layer, scores.shape[1] // B)[-1]
    if adaptive:
        return compressing.adakv_counts(scores, mean, policy.safeguard, policy.protects)
    return [mean] * len(scores)


def kept_by(policy, q, k, v, lengths):
    """Scores and marks of what a policy keeps, [B, Hkv, L]."""
    count = policy.num_queries
    queries = q if count is None else observed_queries(q, lengths, count)
    return tuple(map(np.asarray, _select(policy, queries, k, v, np.array(lengths))))


@functools.partial(jax.jit, static_argnums=0)
def _select(policy, *operands):
    selection = policy.select(1, Heads.all(operands[1].shape[2]), *operands)
    return selection.scores, selection_mask(selection.scores, selection.budgets, block_size=policy.block_size)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (7, 1)])
@pytest.mark.parametrize(("name", "options", "oracle"), MEMBERS)
def test_selections_equal_the_oracle(name, options, oracle, heads, kv_heads):
    q, k, v = qkv(heads, len(LENGTHS), max(LENGTHS), heads, kv_heads, CONFIG.head_dim, scale=0.8)
    policy = cache_of(name, {**options, "share": 0.37})
    used = {name: value for name, value in options.items() if name not in ("safeguard", "preferences")}
    scores, marks = kept_by(policy, *(poison(x, LENGTHS) for x in (q, k, v)), LENGTHS)
    for row, length in enumerate(LENGTHS):
        ranked = max(0, length // B - W // B) * B
        assert not marks[row, :, ranked:].any()
        if not ranked:
            continue
        wanted = oracle(*(x[row, :length].astype(np.float64) for x in (q, k, v)), **used)[:, :ranked]
        finite = np.isfinite(wanted)
        np.testing.assert_allclose(scores[row][:, :ranked][finite], wanted[finite], rtol=2e-4, atol=1e-9)
        for head, count in enumerate(num_kept(policy, wanted, layer=1)):
            assert set(np.flatnonzero(marks[row, head]).tolist()) == highest(wanted[head], count)


def test_a_factor_of_the_rotation_cancels():
    rng = np.random.default_rng(0)
    before, k, v = (rng.standard_normal((64, heads, 16)) for heads in (4, 2, 2))
    q = np.stack([x @ compressing.rotation(i, 1.3).T for i, x in enumerate(before)])  # YaRN's factor
    policy = cache_of("expected-attention", {**EXPECTED, "share": 0.5})
    scores, _ = kept_by(policy, *(x[None].astype(np.float32) for x in (q, k, v)), (64,))
    wanted = compressing.expected_attention_scores(q / 1.3, k, v, **EXPECTED, factor=1.3)
    np.testing.assert_allclose(scores[0, :, 3:48], wanted[:, 3:48], rtol=2e-4)


def test_a_capacity_counts_the_window():
    lengths = (16, 23, 24, 40, 41, 71, 96)
    q, k, v = qkv(1, len(lengths), 96, 4, 2, 16)
    policy = cache_of("snapkv", {**OBSERVED, "capacity": 40})
    marks = kept_by(policy, q, k, v, lengths)[1].sum(axis=-1)
    for row, length in enumerate(lengths):
        ranked = max(0, length // B - W // B) * B
        assert (marks[row] == min(40 - W, ranked)).all()
        assert marks[row, 0] + length - ranked in (length, 40 + length % B)  # shorter prompts are held whole
        assert policy.capacities(0, length) == min(40 - W, ranked)


@pytest.mark.parametrize("layers", [1, 2, 7])
@pytest.mark.parametrize("budget", [{"capacity": 150}, {"share": 0.05}, {"share": 0.4}, {"share": 0.9}])
def test_pyramids_have_the_authors_budgets(budget, layers):
    policy = methods.get("pyramidkv", **budget).for_model(layers, None).cache
    tables = np.array([policy.num_kept(layer, 9) for layer in range(layers)])
    for blocks, mean in enumerate(policy.mean_kept(9)):
        if layers > 1:
            sizes = layers, mean, blocks * policy.block_size, policy.window, policy.beta
            expected = [compressing.pyramidkv_budget(layer, *sizes) for layer in range(layers)]
            assert tables[:, blocks].tolist() == expected
        assert (np.diff(tables[:, blocks]) <= 0).all()
        assert abs(tables[:, blocks].mean() - mean) <= 0.5


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(any), st.integers(0, 500), st.floats(0, 1))
def test_layer_budgets_spend_the_total_by_preference(preferences, most, share):
    total = int(share * most * len(preferences))
    budgets = np.array(layer_budgets(tuple(sorted(preferences, reverse=True)), total, most))
    assert budgets.sum() == total
    assert 0 <= budgets[-1] <= budgets[0] <= most
    assert (np.diff(budgets) <= 0).all()


def test_layer_preferences_equal_the_oracle():
    lm, texts, shares = tiny_lm(), [random_prompt(0, 40), random_prompt(1, 64)], []
    for ids in texts:
        inputs = compressing.full_attention_inputs(lm, ids)
        layers = np.array([compressing.cake_preference(q, k, 8, 1.5, 0.6) for q, k, _ in inputs])
        shares.append(layers / layers.sum())
    found = layer_preferences(lm, texts, observation=8, tau1=1.5, tau2=0.6)
    np.testing.assert_allclose(found, np.mean(shares, axis=0), rtol=2e-3)
    lm.with_method("cake", preferences=found)  # fits the model
