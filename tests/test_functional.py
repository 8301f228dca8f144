"""The functional core against the float64 oracle: a fuzz, ties, transformations, memory, gradients, bounds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import last_queries, observed_queries, poison, qkv, regions
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tca_jax
from tca_jax.diagnostics import dropped_mass, error_bounds
from tca_jax.functional import attend, calibration_scores, candidate_budgets, select
from tca_jax.methods import gradients
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.selection import block_density
from tca_jax.pallas_kernels.token_scores import token_scores

SMALL = TCAConfig(block_size=8, window=16, num_candidates=4, reserve=0)
DENSE = SMALL.num_candidates

# Static under jit, hence compiled for: (config, batch, tokens, query heads, KV heads, head dim, type).
CASES = [
    (TCAConfig(block_size=8, window=16), 2, 131, 8, 2, 16, jnp.float32),
    (TCAConfig.paper(block_size=16, window=32, num_candidates=5), 1, 200, 7, 1, 8, jnp.float32),
    (TCAConfig(block_size=16, window=16, index="entropy", reserve=24, spread=3), 3, 77, 2, 2, 64, jnp.float32),
    (TCAConfig.paper(block_size=8, window=24, index="entropy", alpha=0.3), 1, 99, 4, 4, 8, jnp.bfloat16),
    (TCAConfig(block_size=8, window=8, density="random", seed=7), 2, 64, 4, 1, 128, jnp.float16),
]
NOISE = 1e-5  # relative gap under which float32 may break a tie differently from float64


@functools.partial(jax.jit, static_argnames="config")
def everything(q, k, v, candidates, lengths, config):
    """All of the core in one compiled function, candidates and lengths traced."""
    places = jnp.maximum(0, lengths[:, None] + jnp.arange(-config.observation, 0))
    last = jnp.take_along_axis(q, places[:, :, None, None], axis=1)
    ranked = config.num_ranked_blocks(lengths)
    density = block_density(token_scores(last[:, -1], k, lengths, block_size=config.block_size), ranked, config)
    return (
        select(last, k, candidates, lengths, config),
        attend(q, k, v, candidates, lengths, config),
        calibration_scores(q, k, lengths, config),
        dropped_mass(q, k, candidates, lengths, config),
        density,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].density}-{case[0].index}-{case[-1].__name__}")
@settings(max_examples=6, deadline=None, database=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.7, 1.5, 3.0]), data=st.data())
def test_core_equals_the_oracle(case, seed, spread, data):
    _check_core(case, seed, spread, data)


@st.composite
def any_case(draw):
    """Any shape and configuration; each is compiled for, hence few examples."""
    block_size = draw(st.sampled_from([2, 8, 16]))
    config = TCAConfig(
        block_size=block_size,
        window=block_size * draw(st.integers(1, 5)),
        num_candidates=draw(st.sampled_from([2, 5, 14])),
        sigma=draw(st.sampled_from([0.3, 1.0, 2.0])),
        alpha=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9])),
        density=draw(st.sampled_from(["concentration", "paper"])),
        index=draw(st.sampled_from(["hhi", "entropy"])),
        criterion=draw(st.sampled_from(["retained_mass", "column_mean"])),
        reserve=draw(st.sampled_from([None, 0, 1, 13, 500])),
        observation=draw(st.sampled_from([1, 5, 64, 200])),
        spread=draw(st.sampled_from([1, 4, 16])),
    )
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 4, 7]))
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 150))
    return config, batch, tokens, kv_heads * group, kv_heads, draw(st.sampled_from([8, 20, 64])), jnp.float32


@pytest.mark.integration
@settings(max_examples=12, deadline=None, database=None)
@given(case=any_case(), seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.7, 1.5, 3.0]), data=st.data())
def test_core_equals_the_oracle_for_any_shape(case, seed, spread, data):
    _check_core(case, seed, spread, data)


def _check_core(case, seed, spread, data):
    config, batch, tokens, heads, kv_heads, head_dim, dtype = case
    lengths = np.array(data.draw(st.lists(st.integers(1, tokens), min_size=batch, max_size=batch)), np.int32)
    rows = st.integers(0, config.num_candidates)
    candidates = np.array(data.draw(st.lists(rows, min_size=kv_heads, max_size=kv_heads)), np.int32)
    # Keys and queries share the spread: the scores grow with its square.
    scale = np.sqrt(spread) / head_dim**0.05
    arrays = [jnp.asarray(x, dtype) for x in qkv(seed, batch, tokens, heads, kv_heads, head_dim, scale)]
    padded = [jnp.asarray(poison(np.asarray(x), lengths), dtype) for x in arrays]
    selected, output, scores, gamma, density = (
        np.asarray(x, np.float32) for x in everything(*padded, candidates, lengths, config)
    )

    exact = 2e-5 if dtype == jnp.float32 else 2e-2
    group = heads // kv_heads
    for row, head, q, k, v in regions(*(np.asarray(x, np.float32) for x in arrays), lengths):
        n, ranked = len(k), config.num_ranked_blocks(len(k))
        drawn = density[row, head, :ranked] if config.density == "random" else None
        choose = functools.partial(oracle.select, q[-config.observation :], k, config=config, densities=drawn)
        kept, margin = choose(candidate=candidates[head])
        assume(margin > NOISE)
        np.testing.assert_array_equal(selected[row, head, :n].astype(bool), kept)
        for g in range(group):
            np.testing.assert_allclose(
                output[row, :n, head * group + g], oracle.attend(q[:, g], k, v, kept, config), atol=exact, rtol=exact
            )
            np.testing.assert_allclose(
                gamma[row, head * group + g, :n], oracle.dropped_mass(q[:, g], k, kept, config), atol=2e-5
            )
        for candidate in range(config.num_candidates + 1):
            kept, margin = choose(candidate=candidate)
            if margin > NOISE:
                expected = oracle.calibration_score(q, k, kept, config)
                np.testing.assert_allclose(scores[row, head, candidate], expected, atol=2e-5)
    past = np.arange(tokens) >= lengths[:, None]
    assert not selected.swapaxes(1, 2)[past].any()
    assert not output[past].any()
    assert not gamma.swapaxes(1, 2)[past].any()


def test_ties_keep_the_lowest_positions_and_blocks():
    k = np.zeros((1, 64, 1, 4), np.float32)
    q_last, lengths = np.ones((1, 1, 4), np.float32), np.array([64], np.int32)
    chosen = np.asarray(select(q_last, k, np.array([1], np.int32), lengths, SMALL))[0, 0, :48].reshape(6, 8)
    np.testing.assert_array_equal(chosen, np.arange(8) < np.asarray(candidate_budgets(SMALL, 6))[1][:, None])


def test_nested_vmap_equals_a_loop():
    q, k, v = map(jnp.asarray, qkv(0, 2, 70, 4, 2, 8))
    lengths, candidates = jnp.array([70, 41]), jnp.array([[0, 2], [DENSE, 1], [3, 3]], jnp.int32)

    def one(q, k, v, candidates, length):
        last = jnp.take(q, length - 1, axis=1)[None]
        operands = k[None], candidates, length[None], SMALL
        return attend(q.swapaxes(0, 1)[None], k[None], v[None], *operands[1:])[0], select(last, *operands)[0]

    run = jax.jit(jax.vmap(jax.vmap(one, (1, 0, 0, None, 0)), (None, None, None, 0, None)))
    out, chosen = run(q.transpose(2, 0, 1, 3), k, v, candidates, lengths)
    run(q.transpose(2, 0, 1, 3), k, v, candidates[::-1], lengths - 20)
    assert run._cache_size() == 1  # neither candidates nor lengths compile again
    for i, row in enumerate(candidates):
        np.testing.assert_allclose(out[i], attend(q, k, v, row, lengths, SMALL), atol=2e-5)
        np.testing.assert_array_equal(chosen[i], select(last_queries(q, lengths), k, row, lengths, SMALL))


def test_memory_stays_near_the_inputs():
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    q, k, v = shape((1, 32768, 8, 64)), shape((1, 32768, 2, 64)), shape((1, 32768, 2, 64))
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    config = TCAConfig(window=512)
    lowered = jax.jit(lambda *args: attend(*args, config)).lower(q, k, v, integers((2,)), integers((1,)))
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 6 * memory.argument_size_in_bytes  # one head's L x L floats would be 43 times


CONFIG = tca_jax.TCAConfig(block_size=8, window=16)
CANDIDATES = np.array([2, 9])


def masked(q, k, v, kept, lengths):
    """The attention by masks, for JAX to differentiate."""
    seen = np.array([[oracle.attended(of_head, CONFIG) for of_head in of_row] for of_row in np.asarray(kept, bool)])
    with jax.default_matmul_precision("highest"):
        out = jax.nn.dot_product_attention(q, k, v, mask=seen.repeat(q.shape[2] // k.shape[2], axis=1))
    return jnp.where((jnp.arange(q.shape[1]) < lengths[:, None])[..., None, None], out, 0)


def inputs(heads, lengths):
    q, k, v = qkv(0, len(lengths), max(lengths) + 3, heads, 2, 16)
    lengths = np.array(lengths)
    kept = tca_jax.select(observed_queries(q, lengths, CONFIG.num_queries), k, CANDIDATES, lengths, CONFIG)
    weight = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
    return (q, k, v), kept, lengths, weight


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        pytest.param(2, [60], marks=pytest.mark.integration),
        (8, [61, 40, 5]),
        pytest.param(14, [33, 64], marks=pytest.mark.integration),
    ],
)
def test_gradients_are_those_of_attention_by_masks(heads, lengths, monkeypatch):
    arrays, kept, lengths, weight = inputs(heads, lengths)
    monkeypatch.setattr(gradients, "_TILE_ELEMENTS", 7 * len(lengths) * heads * arrays[0].shape[1])  # ragged tiles
    jax.clear_caches()

    def loss(q, k, v):
        return jnp.sum(weight * tca_jax.attend(q, k, v, CANDIDATES, lengths, CONFIG))

    def expected(q, k, v):
        return jnp.sum(weight * masked(q, k, v, kept, lengths))

    padded = (poison(x, lengths) for x in arrays)  # padding gets no gradient, and spoils none
    value, actual = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*padded)
    expected_value, expected_gradients = jax.jit(jax.value_and_grad(expected, (0, 1, 2)))(*arrays)
    assert float(value) == pytest.approx(float(expected_value), rel=1e-4)
    for ours, theirs in zip(actual, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
        assert np.abs(theirs).max() > 1e-2


BOUNDED = TCAConfig(block_size=8, window=16, num_candidates=4)
EXACT = TCAConfig(block_size=8, window=96, num_candidates=4)


@settings(max_examples=25, deadline=None, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.5, 2.0, 6.0]),
    outlier=st.sampled_from([0.0, 100.0]),
    candidates=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    lengths=st.lists(st.integers(1, 90), min_size=2, max_size=2),
)
def test_theorem_1_bounds_the_error(seed, spread, outlier, candidates, lengths):
    q, k, v = qkv(seed, 2, 90, 4, 2, 8, spread)
    rng = np.random.default_rng(seed)
    v = rng.standard_normal(v.shape).astype(np.float32)
    v[0, rng.integers(90), 0] += outlier
    k[:, rng.integers(90)] *= 3  # a token that some queries look at and others avoid
    lengths, candidates = np.array(lengths, np.int32), np.array(candidates, np.int32)
    sparse, full = (np.asarray(attend(q, k, v, candidates, lengths, config)) for config in (BOUNDED, EXACT))
    bounds = error_bounds(dropped_mass(q, k, candidates, lengths, BOUNDED), poison(v, lengths), lengths)
    error = np.abs(sparse - full).swapaxes(1, 2)  # [B, Hq, L, d]
    noise = 1e-5 * max(1, outlier)
    assert np.all(error.max(axis=-1) <= np.asarray(bounds.max_norm) + noise)
    assert np.all(error.sum(axis=-1) <= np.asarray(bounds.l1_norm) + 8 * noise)
