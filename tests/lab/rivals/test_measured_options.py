"""What is measured of a model for other methods: MInference's patterns against float64, CAKE's preferences."""

import json

import compressing
import jax.numpy as jnp
import numpy as np
import pytest
from cases import qkv, unchecked
from oracle import probabilities
from sparse_prefill import best, diagonal, last_rows
from tiny import random_prompt, tiny_lm

from tca_jax import methods
from tca_jax.lab.rivals.cake import layer_preferences, published_temperatures
from tca_jax.lab.rivals.minference import HeadPattern
from tca_jax.lab.rivals.pattern_search import pattern_scores, search_patterns

CANDIDATES = (
    HeadPattern("a_shape", 7, 60),
    HeadPattern("vertical_slash", 40, 55),
    HeadPattern("block_sparse", 8, 1),
)


def kept(q, k, candidate, first):
    """Mass that one head keeps under a candidate."""
    n, mask = len(q), np.zeros((len(q), len(q)), bool)
    if candidate.kind == "block_sparse":
        count = -(-n // 32)
        means = [np.array([x[j * 32 : (j + 1) * 32].sum(axis=0) for j in range(count)]) for x in (q, k)]
        for tile, row in enumerate(means[0] @ means[1].T):
            for j in best(row[: tile + 1], count // 8):
                mask[tile * 32 : (tile + 1) * 32, j * 32 : (j + 1) * 32] = True
    else:
        columns, diagonals = set(range(candidate.columns)), set(range(candidate.diagonals + 1))
        if candidate.kind == "vertical_slash":
            attention = last_rows(q, k, 64)
            sums = attention.sum(axis=0), np.array([diagonal(attention, o) for o in range(n)])
            sums[0][:30], sums[1][:30] = np.inf, np.inf
            columns, diagonals = best(sums[0], candidate.columns), best(sums[1], candidate.diagonals)
        mask[:, sorted(columns)] = True
        for o in diagonals:
            mask[np.arange(o, n), np.arange(n - o)] = True
    return (probabilities(q, k) * mask).sum(axis=-1)[first:].mean()


def test_a_score_is_the_mass_that_a_pattern_keeps():
    q, k, _ = qkv(0, 1, 290, 4, 2, 16)
    scores = pattern_scores(jnp.asarray(q), jnp.asarray(k), jnp.array([270]), CANDIDATES, 130)
    for head in range(4):
        queries, keys = (x[0, :270, h].astype(np.float64) for x, h in ((q, head), (k, head // 2)))
        expected = [kept(queries, keys, candidate, 130) for candidate in CANDIDATES]
        np.testing.assert_allclose(scores[0, head], expected, atol=1e-4)


def test_a_search_finds_the_best_candidate_of_every_head_and_its_table_is_one_of_plain_values():
    lm, steps = tiny_lm(), []
    everything = HeadPattern("a_shape", 200, 200)
    found = search_patterns(
        lm,
        random_prompt(0, 180),
        candidates=(*CANDIDATES, everything),
        first_query=100,
        progress=lambda *x: steps.append(x),
    )
    assert steps == [(0, 2), (1, 2), (2, 2)]
    assert [len(layer) for layer in found] == [4, 4]
    assert all(
        entry[:3] == [*everything] and entry[3] == pytest.approx(1, abs=1e-5) for layer in found for entry in layer
    )
    method = methods.get("minference", patterns=json.loads(json.dumps(found)))
    assert method.prefill.patterns == ((everything,) * 4,) * 2
    assert lm.with_method(method).method is method


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ([1] * 100, {"first_query": 100}, "text has 100 tokens: must have more than first_query = 100"),
        ([1] * 100, {"first_query": -1}, "first_query = -1: must be an integer of at least 0"),
        ([[1] * 10, [2] * 10], {"first_query": 0}, "text holds 2 texts: must be one"),
        ([1] * 100, {"first_query": 0, "candidates": ()}, "candidates = .*: must hold at least one pattern"),
    ],
)
def test_what_cannot_be_searched_is_refused(text, options, message):
    with pytest.raises(ValueError, match=message):
        unchecked(search_patterns)(tiny_lm(), text, **options)


def test_preferences_are_the_mean_share_of_each_layer_over_texts():
    lm = tiny_lm()
    texts = [random_prompt(0, 40), random_prompt(1, 64)]
    shares = []
    for ids in texts:
        inputs = compressing.full_attention_inputs(lm, ids)
        layers = np.array([compressing.cake_preference(q, k, 8, 1.5, 0.6) for q, k, _ in inputs])
        shares.append(layers / layers.sum())
    found = layer_preferences(lm, texts, observation=8, tau1=1.5, tau2=0.6)
    np.testing.assert_allclose(found, np.mean(shares, axis=0), rtol=2e-3)
    assert found.sum() == pytest.approx(1)
    lm.with_method("cake", preferences=found)  # fits the model


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([[1] * 9], {"observation": 9}, r"texts\[0\] has 9 tokens: must have more than observation = 9"),
        ([[1] * 5000], {}, r"texts\[0\] has 5000 tokens: .* at most the 4096 positions"),
        ([[1] * 40], {"observation": 1}, r"observation = 1: must be an integer of at least 2"),
        ([[1] * 40], {"tau1": 0}, r"tau1 = 0: must lie in \(0, 100\]"),
        ([[]], {}, r"texts\[0\]"),
    ],
)
def test_what_preferences_cannot_be_measured_on_is_named(texts, options, message):
    with pytest.raises(ValueError, match=message):
        layer_preferences(tiny_lm(), texts, **options)


@pytest.mark.parametrize(
    ("model", "capacity", "expected"),
    [
        ("llama3.1-8b-instruct", 1024, (1.6, 0.4)),
        ("meta-llama/Llama-3.1-8B-Instruct", 300, (1.6, 0.6)),
        ("Qwen/Qwen2.5-7B-Instruct", 2048, (1.5, 0.6)),
        ("qwen2.5-7b", 1024, (1.0, 1.0)),
    ],
)
def test_temperatures_are_the_published_ones_of_the_authors_models(model, capacity, expected):
    assert published_temperatures(model, capacity) == dict(zip(("tau1", "tau2"), expected, strict=True))
