"""Policies that compress a prompt once, against naive float64 oracles, from scores to answers."""

import functools

import compressing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import observed_queries, poison, qkv
from tiny import CONFIG, masked_greedy, random_prompt, tiny_lm

import tca_jax
from tca_jax import methods
from tca_jax.lab.rivals.adakv import AdaKVCache
from tca_jax.lab.rivals.compression import top_tokens
from tca_jax.methods.base import Heads
from tca_jax.models.rope import fixed_frequencies
from tca_jax.pallas_kernels.select_tokens import selection_mask

B, W = 8, 16
GEOMETRY = {"block_size": B, "window": W}
LENGTHS = (5, 24, 61, 96)  # shorter than the window, one ranked block, ragged, whole blocks
FREQUENCIES = fixed_frequencies(CONFIG.head_dim, CONFIG.rope)
PREFERENCES = (1.0, 3.0)

SNAPKV = {"observation": 8, **GEOMETRY}
CAKE = {"preferences": PREFERENCES, "observation": 8, **GEOMETRY}
EXPECTED = {"future": 20, "sinks": 3, **GEOMETRY}
ADAKV = {"kernel": 5, "pooling": "avg", **SNAPKV}
ADAKV_EXPECTED = {"epsilon": 0.0, **EXPECTED}


def snapkv_oracle(q, k, v, kernel=5, pooling="avg"):
    return compressing.snapkv_scores(q, k, 8, kernel, pooling)


def cake_oracle(q, k, v, gamma=200.0, kernel=5):
    return compressing.cake_scores(q, k, 8, kernel, gamma)


def expected_oracle(q, k, v, **options):
    before_rope = np.stack([x @ compressing.rotation(i, FREQUENCIES) for i, x in enumerate(q)])  # R^-1 = R^T
    options = {"future": 20, "sinks": 3, "epsilon": 0.0, **options}
    return compressing.expected_attention_scores(before_rope, k, v, FREQUENCIES, **options)


def keydiff_oracle(q, k, v):
    return compressing.keydiff_scores(k)


def tova_oracle(q, k, v):
    return compressing.tova_scores(q, k)


def h2o_oracle(q, k, v, average=False):
    return compressing.h2o_scores(q, k, average)


MEMBERS = [
    ("snapkv", SNAPKV, {}, snapkv_oracle),
    ("snapkv", SNAPKV, {"kernel": 3, "pooling": "max"}, snapkv_oracle),
    ("cake", CAKE, {}, cake_oracle),
    ("cake", CAKE, {"gamma": 0.5, "kernel": 1}, cake_oracle),
    ("expected-attention", EXPECTED, {}, expected_oracle),
    ("expected-attention", EXPECTED, {"epsilon": 0.02, "sinks": 0}, expected_oracle),
    ("h2o", GEOMETRY, {}, h2o_oracle),
    ("h2o", GEOMETRY, {"average": True}, h2o_oracle),
    ("keydiff", GEOMETRY, {}, keydiff_oracle),
    ("pyramidkv", SNAPKV, {}, snapkv_oracle),
    ("tova", GEOMETRY, {}, tova_oracle),
    ("adakv", ADAKV, {}, snapkv_oracle),
    ("adakv", ADAKV, {"kernel": 3, "pooling": "max", "safeguard": 0.45}, snapkv_oracle),
    ("adakv-expected-attention", ADAKV_EXPECTED, {"epsilon": 0.02}, expected_oracle),
    ("adakv-expected-attention", ADAKV_EXPECTED, {"safeguard": 0.8}, expected_oracle),
]
NAMES = {name: (name, base, oracle) for name, base, _, oracle in reversed(MEMBERS)}


def cache_of(name, options):
    return methods.get(name, **options).for_model(CONFIG.num_layers, FREQUENCIES).cache


def num_kept(policy, scores, layer):
    """Tokens that each head keeps of these scores [H, n]."""
    adaptive = isinstance(policy, AdaKVCache)
    mean = (policy.scored if adaptive else policy).num_kept(layer, scores.shape[1] // B)[-1]
    if adaptive:
        return compressing.adakv_counts(scores, mean, policy.safeguard, policy.protects)
    return [mean] * len(scores)


def kept_by(policy, q, k, v, lengths, layer=1):
    """Scores and marks of what a policy keeps, [B, Hkv, L]."""
    count = policy.num_queries
    queries = q if count is None else observed_queries(q, lengths, count)
    return tuple(map(np.asarray, _select(policy, layer, queries, k, v, np.array(lengths))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _select(policy, layer, *operands):
    selection = policy.select(layer, Heads.all(operands[1].shape[2]), *operands, "xla")
    return selection.scores, selection_mask(selection.scores, selection.budgets, block_size=policy.block_size)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (7, 1)])
@pytest.mark.parametrize(("name", "base", "options", "oracle"), MEMBERS)
def test_selections_equal_the_oracle_in_ragged_batches_of_any_group(name, base, options, oracle, heads, kv_heads):
    q, k, v = qkv(heads, len(LENGTHS), max(LENGTHS), heads, kv_heads, CONFIG.head_dim, scale=0.8)
    policy = cache_of(name, {**base, **options, "share": 0.37})
    scores, marks = kept_by(policy, *(poison(x, LENGTHS) for x in (q, k, v)), LENGTHS)
    for row, length in enumerate(LENGTHS):
        ranked = max(0, length // B - W // B) * B
        assert not marks[row, :, ranked:].any()
        if not ranked:
            continue
        of_scores = {name: value for name, value in options.items() if name != "safeguard"}
        wanted = oracle(*(x[row, :length].astype(np.float64) for x in (q, k, v)), **of_scores)[:, :ranked]
        finite = np.isfinite(wanted)
        np.testing.assert_allclose(scores[row][:, :ranked][finite], wanted[finite], rtol=2e-4, atol=1e-9)
        for head, count in enumerate(num_kept(policy, wanted, layer=1)):
            best = compressing.highest(wanted[head], count, ranked)
            assert set(np.flatnonzero(marks[row, head]).tolist()) == best


@pytest.mark.parametrize("length", [91, 96])  # tiles that pass the end, and tiles that do not
@pytest.mark.parametrize(
    ("name", "base"), [("snapkv", SNAPKV), ("expected-attention", EXPECTED), ("keydiff", GEOMETRY)]
)
def test_tiles_of_a_long_prompt_give_what_one_tile_gives(name, base, length, monkeypatch):
    q, k, v = qkv(3, 1, length, 4, 2, CONFIG.head_dim, scale=0.8)
    policy = cache_of(name, {**base, "share": 0.5})
    whole, _ = kept_by(policy, q, k, v, (length - 2,))
    monkeypatch.setattr("tca_jax.lab.rivals.tiles._TILE", 32)
    _select.clear_cache()
    tiled, _ = kept_by(policy, q, k, v, (length - 2,))
    _select.clear_cache()
    np.testing.assert_allclose(tiled[..., :72], whole[..., :72], rtol=1e-4, atol=1e-9)


def test_a_factor_in_the_rotation_changes_nothing_but_the_queries_length():
    rng = np.random.default_rng(0)
    before, k, v = (rng.standard_normal((64, heads, 16)) for heads in (4, 2, 2))
    factor = 1.3  # YaRN's
    q = np.stack([x @ compressing.rotation(i, FREQUENCIES, factor).T for i, x in enumerate(before)])
    policy = cache_of("expected-attention", {**EXPECTED, "share": 0.5})
    operands = [x[None].astype(np.float32) for x in (q, k, v)]
    scores, _ = kept_by(policy, *operands, (64,))
    wanted = compressing.expected_attention_scores(
        before, k, v, FREQUENCIES, future=20, sinks=3, epsilon=0.0, factor=factor
    )
    np.testing.assert_allclose(scores[0, :, 3:48], wanted[:, 3:48], rtol=2e-4)


@pytest.mark.parametrize("length", [16, 23, 24, 40, 41, 71, 96])
def test_a_capacity_counts_the_window_and_holds_shorter_prompts_whole(length):
    q, k, v = qkv(1, 1, 96, 4, 2, 16)
    policy = cache_of("snapkv", {**SNAPKV, "capacity": 40})
    _, marks = kept_by(policy, q, k, v, (length,))
    ranked = max(0, length // B - W // B) * B
    assert (marks.sum(axis=-1) == min(40 - W, ranked)).all()
    held = marks.sum(axis=-1) + length - ranked
    assert (held == length).all() or (held == 40 + length % B).all()
    assert policy.capacities(0, length) == min(40 - W, ranked)


@pytest.mark.parametrize("share", [0.001, 0.37, 1.0])
def test_a_share_is_of_the_tokens_left_of_the_window(share):
    q, k, v = qkv(1, 1, 96, 4, 2, 16)
    for name, base, _ in NAMES.values():
        policy = cache_of(name, {**base, "share": share})
        if isinstance(policy, AdaKVCache):
            continue  # heads differ, see the oracle's
        counts = [kept_by(policy, q, k, v, (96,), layer)[1].sum(axis=-1) for layer in range(2)]
        assert np.mean(counts) == round(share * 80)
        assert [count.max() for count in counts] == [policy.capacities(layer, 96) for layer in range(2)]


@pytest.mark.parametrize("length", [40, 48, 72])
def test_a_prompt_that_fits_is_held_whole_by_heads_that_share(length):
    q, k, v = qkv(1, 1, 96, 4, 2, 16)
    for budget in ({"capacity": 100}, {"share": 1.0}):
        _, marks = kept_by(cache_of("adakv", {**ADAKV, **budget}), q, k, v, (length,))
        assert (marks.sum(axis=-1) == length // B * B - W).all()


@pytest.mark.parametrize("layers", [1, 2, 7])
@pytest.mark.parametrize("budget", [{"capacity": 150}, {"share": 0.05}, {"share": 0.4}, {"share": 0.9}])
def test_pyramids_have_the_authors_budgets_and_the_mean_that_was_asked_for(budget, layers):
    policy = methods.get("pyramidkv", **budget).for_model(layers, None).cache
    tables = np.array([policy.num_kept(layer, 9) for layer in range(layers)])
    for blocks, mean in enumerate(policy.mean_kept(9)):
        if layers > 1:
            sizes = layers, mean, blocks * policy.block_size, policy.window, policy.beta
            assert tables[:, blocks].tolist() == [
                compressing.pyramidkv_budget(layer, *sizes) for layer in range(layers)
            ]
        assert (np.diff(tables[:, blocks]) <= 0).all()
        assert abs(tables[:, blocks].mean() - mean) <= 0.5


@pytest.mark.parametrize("seed", range(5))
def test_top_tokens_are_exact_with_ties_to_the_lower_position(seed):
    rng = np.random.default_rng(seed)
    scores = rng.choice(np.array([0, 1e-30, 0.25, 0.5, 3e30], np.float32), (4, 3, 50))
    ranked, counts = np.array([50, 33, 0, 20]), rng.integers(0, 45, (4, 3))
    marks = np.asarray(top_tokens(*map(jnp.asarray, (scores, ranked, counts))))
    for row, head in np.ndindex(4, 3):
        best = compressing.highest(scores[row, head], min(counts[row, head], ranked[row]), ranked[row])
        assert set(np.flatnonzero(marks[row, head]).tolist()) == best


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def rules(model, oracle, prompt):
    """What queries see behind a prompt that full attention has read: (layer, KV head, position) -> positions."""
    policy, length = model.method.cache, len(prompt)
    ranked = max(0, length // B - W // B)
    kept = {}
    for layer, inputs in enumerate(compressing.full_attention_inputs(model, prompt)):
        scores = oracle(*inputs) if ranked else np.zeros((CONFIG.num_kv_heads, 0))
        for head, count in enumerate(num_kept(policy, scores[:, : ranked * B], layer)):
            kept[layer, head] = compressing.highest(scores[head], count, ranked * B)
    return lambda layer, head, position: kept[layer, head] | set(range(ranked * B, position + 1))


def everything(layer, head, position):
    return set(range(position + 1))


def check_answers(lm, name, base, oracle, prompts):
    model = lm.with_method(name, share=0.2, **base)
    out = tca_jax.generate(model, prompts, max_new_tokens=30, stop_token_ids=())
    for ids, tokens in zip(prompts, out.tokens, strict=True):
        assert tokens == masked_greedy(lm, ids, 30, rules(model, oracle, ids), visible_in_prompt=everything)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("snapkv", "adakv") else pytest.mark.slow) for name in NAMES],
)
def test_answers_are_those_of_attention_by_masks(lm, name):
    check_answers(lm, *NAMES[name], [random_prompt(5, 5), random_prompt(71, 71)])
