"""The block-sparse prefill methods against their oracles in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison, qkv
from sparse_prefill import ORACLES

from tca_jax import methods
from tca_jax.lab.rivals.scores import covering, highest
from tca_jax.methods.base import Heads

LENGTHS = (290, 40, 128)
HEADS, KV_HEADS, BLOCK = 4, 2, 16
N = jnp.asarray(LENGTHS, jnp.int32)
SMALL = {"block_size": BLOCK, "dense_tokens": 48}
KINDS = [["vertical_slash", 20, 60], ["a_shape", 5, 40], ["block_sparse", 8, 1], ["vertical_slash", 37, 130]]


def random_inputs(seed, scale=1.0):
    return qkv(seed, len(LENGTHS), max(LENGTHS), HEADS, KV_HEADS, 32, scale)


def structured_inputs(seed):
    """Sinks, columns that all look at, neighbours, a diagonal far back, and topics by block."""
    n, rng = max(LENGTHS), np.random.default_rng(seed)
    q, k, v = random_inputs(seed, 0.5)
    places = np.arange(n)
    waves = np.stack([f(places * w) for w in (0.05, 0.3, 1.1) for f in (np.cos, np.sin)], axis=1)
    shifted = np.roll(waves, 55, axis=0)
    topics = rng.standard_normal((n // BLOCK + 1, 6))[rng.integers(0, 4, n // BLOCK + 1)][places // BLOCK]
    q[..., :6] += 3 * waves[:, None]
    k[..., :6] += np.where(np.arange(KV_HEADS)[:, None] == 0, 1.5 * waves[:, None], 1.5 * shifted[:, None])
    q[:, :, :2, 6:12] += 2 * topics[:, None]
    k[..., 6:12] += 2 * topics[:, None]
    q[..., 12] += 4
    k[:, [0, 1, 77, 110], :, 12] += 4
    return q.astype(np.float32), k.astype(np.float32), v


FLEX = {"block_size": BLOCK, "min_budget": 16}
#: Method and options by name.
CASES = {
    "xattention": ("xattention", {"threshold": 0.7, "stride": 4, **SMALL}),
    "xattention, two chunks": ("xattention", {"threshold": 0.6, "stride": 4, "chunk": 64, **SMALL}),
    "xattention by heads": ("xattention", {"threshold": [[0.3, 0.9, 0.6, 0.5]], "stride": BLOCK, "chunk": 0, **SMALL}),
    "flexprefill": ("flexprefill", {"gamma": 0.5, "tau": 0.0, **FLEX, "min_budget": 32}),
    "some query-aware": ("flexprefill", {"gamma": 0.8, "tau": 0.45, **FLEX}),
    "minference": ("minference", {"patterns": [KINDS], "blocks": 3, **SMALL}),
    "minference by default": ("minference", {"scale": 0.01, **SMALL}),
}


def expected_mask(name, options, q, k, head):
    """The oracle's mask of one query head; q and k [n, d] of the row."""
    options, n = dict(options), len(q)
    block = options.pop("block_size")
    if n <= options.pop("dense_tokens", 0):
        return np.tri(n, dtype=bool)
    if isinstance(options.get("threshold"), list):
        options["threshold"] = options["threshold"][0][head]
    if name == "minference":
        scale = options.pop("scale", 1.0)
        kind, columns, diagonals = options.pop("patterns", [[["vertical_slash", 1000, 6096]] * HEADS])[0][head]
        options |= {"kind": kind, "columns": int(scale * columns), "diagonals": int(scale * diagonals)}
    return ORACLES[name](q.astype(np.float64), k.astype(np.float64), block=block, **options)


@pytest.mark.parametrize("case", CASES)
def test_methods_attend_to_the_oracles_pairs(case):
    name, options = CASES[case]
    policy, heads = methods.get(name, **options).prefill, Heads.all(KV_HEADS)
    run = jax.jit(lambda q, k, v: policy.attend(0, heads, q, k, v, N, None, "auto"))
    for q, k, v in (random_inputs(3), structured_inputs(3)):
        out, pairs = run(*(jnp.asarray(poison(x, LENGTHS, 1e3)) for x in (q, k, v)))
        counted, shares = [], []
        for (row, n), head in itertools.product(enumerate(LENGTHS), range(HEADS)):
            keys, values = (x[row, :n, head // (HEADS // KV_HEADS)] for x in (k, v))
            wanted = expected_mask(name, options, q[row, :n, head], keys, head)
            counted.append(wanted.sum())
            shares.append(wanted.sum() / (n * (n + 1) / 2))
            logits = q[row, :n, head].astype(np.float64) @ keys.T.astype(np.float64) / np.sqrt(q.shape[-1])
            attention = oracle.softmax(np.where(wanted, logits, -np.inf)) @ values
            np.testing.assert_allclose(out[row, :n, head], attention, atol=3e-5, err_msg=f"{row}, {head}")
            assert not np.any(out[row, n:])
        np.testing.assert_allclose(pairs, np.reshape(counted, (-1, HEADS)).mean(axis=1), rtol=1e-6)
        assert min(shares) < 0.8  # something is left out
        if policy.dense_tokens >= LENGTHS[1]:
            assert shares[HEADS : 2 * HEADS] == [1.0] * HEADS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xattention", "flexprefill", "minference"])
def test_one_head_after_another_is_the_same(name, monkeypatch):
    q, k, v = map(jnp.asarray, structured_inputs(1))
    policy = methods.get(name, **CASES[name][1]).prefill

    def attend():
        return jax.jit(lambda *x: policy.attend(0, Heads.all(KV_HEADS), *x, N, None, "auto"))(q, k, v)

    together = attend()
    monkeypatch.setattr("tca_jax.methods.block_sparse._MOST_ENTRIES", 0)
    found = attend()
    np.testing.assert_allclose(found.out, together.out, atol=1e-6)
    np.testing.assert_allclose(found.pairs, together.pairs, rtol=1e-6)


def test_highest_and_covering_values_are_a_sorts():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 4, 50)).astype(np.float32)
    values[0, 0, ::3], values[1, 1, 5], values[2] = 0.5, np.inf, np.abs(values[2]) / 30
    values[0, 1:3] = rng.choice(np.array([0, 1e-30, 0.25, 3e30], np.float32), (2, 50))
    among, counts = rng.random((3, 4, 50)) < 0.8, rng.integers(0, 60, (3, 4)).astype(np.int32)
    marked = np.asarray(highest(jnp.asarray(values), jnp.asarray(counts), jnp.asarray(among)))
    shares = rng.dirichlet(np.ones(50), (3, 4)).astype(np.float32)
    shares[0, 0] = 1 / 64  # all tied
    mass = np.array([0.5, -1, 0.9, 0.0], np.float32) * np.ones((3, 1), np.float32)
    cover = functools.partial(covering, jnp.asarray(shares), jnp.asarray(mass), jnp.asarray(among))
    covered = {reach: np.asarray(cover(reach=reach)) for reach in (True, False)}
    for row in np.ndindex(3, 4):
        allowed = np.flatnonzero(among[row])
        order = allowed[np.argsort(-values[row][allowed], kind="stable")]
        assert set(np.flatnonzero(marked[row])) == set(order[: counts[row]])
        order = allowed[np.argsort(-shares[row][allowed], kind="stable")]
        sums = np.cumsum(shares[row][order].astype(np.float64))
        assert set(np.flatnonzero(covered[True][row])) == set(order[np.append(0, sums[:-1]) < mass[row]])
        assert set(np.flatnonzero(covered[False][row])) == set(order[sums <= mass[row]])
