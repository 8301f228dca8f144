"""Pairs of a query and a key that methods say are attended to, against those that attention weighs; and statistics.

Those of block-sparse methods are in lab/rivals/test_block_sparse.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import poison, qkv
from tiny import TCA, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax import methods
from tca_jax.methods.base import Heads
from tca_jax.methods.regions import causal_pairs, selected_pairs, sum_of_counts

LENGTHS, DIM, KV_HEADS = (210, 61), 32, 2
GEOMETRY = {"block_size": 8, "window": 16}
#: Name, options, and whether all pairs are attended to.
CASES = {
    "full": ("full", {}, True),
    "streaming": ("streaming", {"sinks": 11, **GEOMETRY}, False),
    "tca, unequal rows": ("tca", {"candidates": [[0, 9]], "config": TCA}, False),
    "tca, dense": ("tca", {"candidates": TCA.num_candidates, "config": TCA}, True),
    "tca, all local": ("tca", {"candidates": 0, "config": tca_jax.TCAConfig(block_size=8, window=256)}, True),
    "random": ("random", {"share": 0.4, **GEOMETRY}, False),
    "duoattention": ("duoattention", {"gates": [[0.9, 0.1]], "sinks": 3, **GEOMETRY}, False),
    "snapkv": ("snapkv", {"share": 0.3, "observation": 4, **GEOMETRY}, True),
}


def weighed_pairs(attend, q, k, lengths):
    """Pairs that attention gives a weight, [B, Hq]: with values that tell one key from the others, a few at a time."""
    tokens, pairs = k.shape[1], np.zeros((len(lengths), q.shape[2]))
    for first in range(0, tokens, DIM):
        told = np.zeros(k.shape, np.float32)
        told[:, np.arange(first, min(first + DIM, tokens)), :, np.arange(min(DIM, tokens - first))] = 1
        pairs += (np.asarray(attend(q, k, told, lengths).out) > 0).sum(axis=(1, 3))
    return pairs


@pytest.mark.parametrize(("name", "options", "everything"), CASES.values(), ids=CASES)
def test_pairs_are_those_that_attention_weighs(name, options, everything):
    heads = 4 * KV_HEADS
    method, lengths = methods.get(name, **options), jnp.asarray(LENGTHS, jnp.int32)
    q, k, v = qkv(3, len(LENGTHS), max(LENGTHS), heads, KV_HEADS, DIM, 0.8)
    q, k, v = (poison(x, LENGTHS, 1e3) for x in (q, k, v))
    attend = jax.jit(lambda q, k, v, n: method.prefill.attend(0, Heads.all(KV_HEADS), q, k, v, n, None, "xla"))
    attended = attend(q, k, v, lengths)
    expected = weighed_pairs(attend, q, k, lengths).mean(axis=1)
    assert attended.pairs.dtype == jnp.float32
    np.testing.assert_allclose(attended.pairs, expected, rtol=1e-6)
    causal = np.array([n * (n + 1) / 2 for n in LENGTHS])
    assert (expected == causal).all() == everything
    assert expected[0] > 0.05 * causal[0]


def test_pairs_of_a_million_tokens_are_exact():
    lengths, everything = jnp.array([1_000_000, 999_999], jnp.int32), jnp.full((2, 1, 62_500), 16, jnp.int32)
    triangles = [n * (n + 1) / 2 for n in lengths.tolist()]
    np.testing.assert_allclose(causal_pairs(lengths), triangles, rtol=2e-7)
    pairs = selected_pairs(everything, lengths, block_size=16, window=4096)
    np.testing.assert_allclose(pairs[:, 0], triangles, rtol=2e-7)
    counts = np.random.default_rng(0).integers(0, 2**28, (3, 1 << 16))
    np.testing.assert_allclose(sum_of_counts(jnp.asarray(counts, jnp.int32)), counts.sum(axis=1), rtol=2e-7)


PROMPTS = [random_prompt(0, 90), random_prompt(1, 61)]


@pytest.mark.integration
def test_contexts_keep_their_attended_share(tmp_path):
    lm = with_candidates(tiny_lm())
    context = tca_jax.prefill(lm, PROMPTS)
    share = context.stats.attended_share
    assert 0.1 < share < 1
    assert share == pytest.approx(np.mean(tca_jax.score(lm, PROMPTS).attended_share), rel=1e-6)
    more = tca_jax.prefill(lm, [random_prompt(2, 70), random_prompt(3, 9)], context=context)
    assert more.stats.attended_share == share
    assert tca_jax.generate(lm, [[1], [2]], context=more, max_new_tokens=1).stats.attended_share == share
    more.save(tmp_path / "context")
    assert tca_jax.Context.load(tmp_path / "context").stats.attended_share == share
    one = tca_jax.prefill(lm, PROMPTS[0])
    out = tca_jax.generate(lm, [[1], [2], [3]], context=one, max_new_tokens=1)
    assert out.stats.attended_share == one.stats.attended_share == context.attended_share[0]
