"""Probe scores against the float64 oracle: what each row drops of a probe's far attention, weighted by need."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison, qkv, regions, unchecked

from tca_jax.calibration import far_attention
from tca_jax.calibration.far_attention import dropped_by_row
from tca_jax.calibration.probe_attention import SeenText, attend_probe, known_attention
from tca_jax.calibration.probing import probe_scores, worst_dropped
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, num_candidates=4, reserve=5, observation=6, spread=3)
LENGTHS = np.array([90, 61, 40], np.int32)
PROBES = np.array([17, 8, 20], np.int32)  # the last text has 20 tokens and no ranked block


def inputs(heads: int = 4, kv_heads: int = 2, seed: int = 0):
    q, k, v = qkv(seed, 3, 96, heads, kv_heads, 16)
    weights = np.random.default_rng(seed).exponential(size=(3, 96)).astype(np.float32)
    return q, k, v, weights


def expected_scores(q, k, weights, config) -> np.ndarray:
    rows = config.num_candidates + 1
    scores = np.full((len(q), k.shape[2], rows), np.nan)
    for text, head, q64, k64, _ in regions(q, k, k, LENGTHS):
        start = LENGTHS[text] - PROBES[text]
        for row in range(rows):
            kept, margin = oracle.select(q64[:start][-config.observation :], k64[:start], row, config)
            assert margin > 1e-5  # else float32 may choose another token
            weight = weights[text, : LENGTHS[text]].astype(np.float64)
            scores[text, head, row] = oracle.probe_score(q64, k64, start, weight, kept, config)
    return scores


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (7, 1)])
@pytest.mark.parametrize("reserve", [0, 5])
def test_scores_are_those_of_the_oracle(heads, kv_heads, reserve):
    config = TCAConfig(block_size=8, window=16, num_candidates=4, reserve=reserve, observation=6, spread=3)
    q, k, _, weights = inputs(heads, kv_heads, seed=heads)
    scores = probe_scores(poison(q, LENGTHS), poison(k, LENGTHS), LENGTHS, PROBES, weights, config)
    expected = expected_scores(q, k, weights, config)
    np.testing.assert_allclose(scores, expected, atol=2e-6)
    assert np.ptp(expected[0, :, :-1]) > 0.05  # rows differ, so their order is tested too


def test_dense_rows_and_texts_without_ranked_blocks_score_exactly_one():
    q, k, _, weights = inputs()
    scores = np.asarray(probe_scores(q, k, LENGTHS, PROBES, weights, CONFIG))
    np.testing.assert_array_equal(scores[..., -1], 1)
    np.testing.assert_array_equal(scores[2], 1)
    assert (scores[:2, :, 0] < 1).all()


def test_only_queries_of_the_probe_count_and_only_by_their_share_of_the_need():
    q, k, _, weights = inputs()
    scores = probe_scores(q, k, LENGTHS, PROBES, weights, CONFIG)
    outside = np.arange(96) < (LENGTHS - PROBES)[:, None]
    outside |= np.arange(96) >= LENGTHS[:, None]
    np.testing.assert_array_equal(probe_scores(q, k, LENGTHS, PROBES, np.where(outside, 7, weights), CONFIG), scores)
    np.testing.assert_allclose(probe_scores(q, k, LENGTHS, PROBES, 3 * weights, CONFIG), scores, atol=1e-6)
    one = np.zeros_like(weights)
    one[:, 88] = 1
    alone = probe_scores(q, k, LENGTHS, PROBES, one, CONFIG)
    np.testing.assert_array_equal(alone[1:], 1)  # no need at all
    assert not np.allclose(alone[0], scores[0], atol=1e-3)


def test_lengths_and_probes_may_be_traced_and_padding_does_not_matter():
    q, k, _, weights = inputs()
    scores = probe_scores(q, k, LENGTHS, PROBES, weights, CONFIG)
    traced = jax.jit(lambda lengths, probes: probe_scores(q, k, lengths, probes, weights, CONFIG))(LENGTHS, PROBES)
    np.testing.assert_allclose(traced, scores, atol=1e-6)
    longer = [np.pad(x, [(0, 0), (0, 32), *[(0, 0)] * (x.ndim - 2)]) for x in (q, k, weights)]
    np.testing.assert_allclose(probe_scores(*longer[:2], LENGTHS, PROBES, longer[2], CONFIG), scores, atol=1e-6)


def test_no_array_grows_with_the_square_of_the_length():
    def largest(length: int) -> int:
        q, k = (jnp.zeros((1, length, heads, 8)) for heads in (2, 1))
        lengths = jnp.array([length])
        jaxpr = jax.make_jaxpr(lambda q, k: dropped_by_row(q, k, lengths - 64, lengths, CONFIG, 64))(q, k).jaxpr
        return max(sizes(jaxpr))

    assert largest(2**16) <= 2.1 * largest(2**15)


def sizes(jaxpr) -> set[int]:
    found = set()
    for equation in jaxpr.eqns:
        found |= {math.prod(getattr(out.aval, "shape", ())) for out in equation.outvars}
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                found |= sizes(getattr(inner, "jaxpr", inner))
    return found


def probe_arguments(text: int, everything: bool = False):
    """What `attend_probe` takes for one of the texts: a padded probe, and the text with what is seen of it."""
    q, k, v, _ = inputs()
    start, most = int(LENGTHS[text] - PROBES[text]), 24
    behind = [np.zeros((most, *x.shape[2:]), np.float32) for x in (q, k, v)]
    for part, x in zip(behind, (q, k, v), strict=True):
        part[: PROBES[text]] = x[text, start : LENGTHS[text]]
    before = [np.where((np.arange(96) < start)[:, None, None], x[text], 0) for x in (k, v)]
    seen = np.ones((2, 96), bool) if everything else np.random.default_rng(3).random((2, 96)) < 0.5
    return [jnp.asarray(x) for x in behind], SeenText(*map(jnp.asarray, (*before, seen)), jnp.int32(start))


def probe_attention(text: int, seen: np.ndarray | None) -> np.ndarray:
    """The same in float64, an entry a query of the probe."""
    q, k, v, _ = inputs()
    length = int(LENGTHS[text])
    start = length - int(PROBES[text])
    seen = np.ones((2, length), bool) if seen is None else seen
    expected = np.zeros((int(PROBES[text]), 4, 16))
    for one, head, q64, k64, v64 in regions(q, k, v, LENGTHS):
        if one != text:
            continue
        causal = np.tri(length, dtype=bool)
        kept = causal & (seen[head, :length] | (np.arange(length) >= start))
        for g in range(2):
            logits = q64[:, g] @ k64.T / 4
            expected[:, 2 * head + g] = oracle.softmax(np.where(kept, logits, -np.inf)[start:]) @ v64
    return expected


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("text", [0, 1, 2])
def test_a_probe_attends_to_what_is_seen_of_the_text_and_to_itself(text, everything):
    probe, seen = probe_arguments(text, everything)
    expected = probe_attention(text, None if everything else np.asarray(seen.seen))
    np.testing.assert_allclose(attend_probe(*probe, seen)[: PROBES[text]], expected, atol=2e-5)


@pytest.mark.parametrize("tile", [7, 256])
@pytest.mark.parametrize("text", [0, 1, 2])
def test_slopes_of_a_probes_attention_are_those_of_its_definition(text, tile, monkeypatch):
    probe, seen = probe_arguments(text)
    _, everything = probe_arguments(text, everything=True)
    cotangent = jax.random.normal(jax.random.key(1), probe[0].shape)

    def gated(q, k, v, gates):
        sparse, whole = (attend_probe(q, k, v, of) for of in (seen, everything))
        return sparse + jnp.repeat(gates, 2)[:, None] * (whole - sparse)

    gates = jnp.zeros(2)
    expected_out, expected = jax.vjp(gated, *probe, gates)
    monkeypatch.setattr(far_attention, "_LARGEST_TILE", tile)
    np.testing.assert_allclose(attend_probe(*probe, seen), expected_out, atol=1e-5)
    out, slopes = jax.vjp(known_attention(expected_out, seen), *probe, gates)
    np.testing.assert_array_equal(out, expected_out)
    for got, wanted in zip(slopes(cotangent), expected(cotangent), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert np.abs(slopes(cotangent)[-1]).min() > 0.1


def test_the_worst_queries_are_one_in_a_hundred_of_each_text_and_at_least_one():
    dropped = np.random.default_rng(0).random((2, 3, 250, 4)).astype(np.float32)
    counts = np.array([250, 40])
    dropped[1, :, 40:] = 0
    worst = worst_dropped(jnp.asarray(dropped), jnp.asarray(counts))
    ordered = -np.sort(-dropped, axis=2)
    np.testing.assert_allclose(worst[0], ordered[0, :, :3].mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(worst[1], ordered[1, :, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": np.array([97, 5, 5])}, r"lengths = \[97.*: must lie in \[1, 96\]"),
        ({"num_probe": np.array([0, -1, 0])}, r"num_probe = .*-1.*: must lie in \[0, 95\]"),
        ({"num_probe": np.array([17, 61, 20])}, r"num_probe = \[17, 61, 20\]: must be less than lengths"),
        ({"weights": np.zeros((3, 95), np.float32)}, r"weights has shape \(3, 95\): must be \[B = 3, L = 96\]"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(changes, message):
    q, k, _, weights = inputs()
    arguments = {"q": q, "k": k, "lengths": LENGTHS, "num_probe": PROBES, "weights": weights, "config": CONFIG}
    with pytest.raises(ValueError, match=message):
        unchecked(probe_scores)(**{**arguments, **changes})
