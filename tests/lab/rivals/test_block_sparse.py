"""The block-sparse prefill methods against their oracles: which pairs, and what attention over them gives."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from block_lists import attended
from cases import poison, qkv
from sparse_prefill import ORACLES

from tca_jax import methods
from tca_jax.lab.rivals import xattention
from tca_jax.lab.rivals.ranks import covering, highest
from tca_jax.methods.base import Heads

LENGTHS = (290, 40, 128)
HEADS, KV_HEADS, BLOCK = 4, 2, 16
SMALL = {"block_size": BLOCK, "dense_tokens": 48}
KINDS = [["vertical_slash", 20, 60], ["a_shape", 5, 40], ["block_sparse", 8, 1], ["vertical_slash", 37, 130]]


def random_inputs(seed, lengths=LENGTHS, dim=32, scale=1.0):
    return qkv(seed, len(lengths), max(lengths), HEADS, KV_HEADS, dim, scale)


def structured_inputs(seed, lengths=LENGTHS):
    """Sinks, columns that all look at, neighbours, a diagonal far back, and topics by block."""
    n, rng = max(lengths), np.random.default_rng(seed)
    q, k, v = random_inputs(seed, lengths, 32, 0.5)
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


CASES = [
    pytest.param("xattention", {"threshold": 0.7, "stride": 4, **SMALL}, id="xattention"),
    pytest.param("xattention", {"threshold": 0.5, "stride": 16, **SMALL}, id="xattention, a group a block"),
    pytest.param("xattention", {"threshold": 0.6, "stride": 4, "chunk": 64, **SMALL}, id="xattention, two chunks"),
    pytest.param(
        "xattention", {"threshold": [[0.3, 0.9, 0.6, 0.5]], "stride": 4, "chunk": 0, **SMALL}, id="xattention by heads"
    ),
    pytest.param("flexprefill", {"gamma": 0.5, "tau": 0.0, "min_budget": 32, "block_size": BLOCK}, id="flexprefill"),
    pytest.param(
        "flexprefill", {"gamma": 0.7, "tau": 9.0, "min_budget": 16, "block_size": BLOCK}, id="all query-aware"
    ),
    pytest.param(
        "flexprefill", {"gamma": 0.8, "tau": 0.45, "min_budget": 16, "block_size": BLOCK}, id="some query-aware"
    ),
    pytest.param("minference", {"patterns": [KINDS], "blocks": 3, **SMALL}, id="minference"),
    pytest.param(
        "minference", {"patterns": [KINDS[:2] * 2], "scale": 2.0, **SMALL}, id="minference, no block-sparse head"
    ),
    pytest.param("minference", {"scale": 0.01, **SMALL}, id="minference by default"),
]


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


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_method_attends_to_what_its_oracle_says(name, options):
    policy, lengths = methods.get(name, **options).prefill, jnp.asarray(LENGTHS, jnp.int32)
    run = jax.jit(
        lambda q, k, v, n: (
            policy.listed(0, Heads.all(k.shape[2]), q, k, n),
            policy.attend(0, Heads.all(k.shape[2]), q, k, v, n, None, "auto").out,
        )
    )
    for q, k, v in (random_inputs(3), structured_inputs(3)):
        padded = [jnp.asarray(poison(x, LENGTHS, 1e3)) for x in (q, k, v)]
        check(name, options, policy, q, k, v, *run(*padded, lengths))


def check(name, options, policy, q, k, v, listed, out):
    shares = []
    for row, n in enumerate(LENGTHS):
        for head in range(HEADS):
            keys, values = (x[row, :n, head // (HEADS // KV_HEADS)] for x in (k, v))
            wanted = expected_mask(name, options, q[row, :n, head], keys, head)
            masks = [attended(*one, row, head, n, block=policy.block_size, tile=policy.block_size) for one in listed]
            np.testing.assert_array_equal(np.any(masks, axis=0), wanted, err_msg=f"{row}, {head}")
            assert np.sum(masks, axis=0).max() == 1
            shares.append(wanted.sum() / (n * (n + 1) / 2))
            logits = q[row, :n, head].astype(np.float64) @ keys.T.astype(np.float64) / np.sqrt(q.shape[-1])
            some = wanted.any(axis=-1)
            attention = np.zeros(values.shape)
            attention[some] = oracle.softmax(np.where(wanted, logits, -np.inf)[some]) @ values
            np.testing.assert_allclose(out[row, :n, head], attention, atol=3e-5)
        assert not np.any(out[row, n:])
    assert min(shares) < 0.8  # something is left out
    if policy.dense_tokens >= LENGTHS[1]:
        assert shares[HEADS : 2 * HEADS] == [1.0] * HEADS


@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 2048), (4096, 4096), (4097, 8192), (16384, 16384), (16385, 8192), (131072, 2048)]
)
def test_first_chunks_are_those_of_the_authors_code(length, chunk):
    assert xattention.first_chunk(jnp.array([length])).tolist() == [chunk]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xattention", "flexprefill", "minference"])
def test_one_head_after_another_is_the_same(name, monkeypatch):
    q, k, v = map(jnp.asarray, structured_inputs(1))
    options = dict(next(case.values[1] for case in CASES if case.values[0] == name))
    policy, lengths = methods.get(name, **options).prefill, jnp.asarray(LENGTHS, jnp.int32)

    def attend():
        return jax.jit(lambda *x: policy.attend(0, Heads.all(KV_HEADS), *x, None, "auto"))(q, k, v, lengths)

    together = attend()
    monkeypatch.setattr("tca_jax.methods.block_sparse._MOST_SAMPLED", 0)
    check_same(attend(), together)
    monkeypatch.setattr("tca_jax.methods.block_sparse._MOST_BYTES", 0)
    check_same(attend(), together)


def check_same(attended, expected):
    np.testing.assert_allclose(attended.out, expected.out, atol=1e-6)
    np.testing.assert_allclose(attended.pairs, expected.pairs, rtol=1e-6)


def test_chunks_of_scores_do_not_matter(monkeypatch):
    q, k, _ = map(jnp.asarray, random_inputs(5))
    policy, lengths = methods.get("xattention", stride=4, **SMALL).prefill, jnp.asarray(LENGTHS, jnp.int32)
    whole = policy.listed(0, Heads.all(k.shape[2]), q, k, lengths)
    for most in (1, 4000):
        monkeypatch.setattr(xattention, "_MOST_SCORES", most)
        jax.tree.map(np.testing.assert_array_equal, policy.listed(0, Heads.all(k.shape[2]), q, k, lengths), whole)


def test_the_highest_and_the_covering_values_are_those_of_a_sort():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 4, 50)).astype(np.float32)
    values[0, 0, ::3], values[1, 1, 5], values[2] = 0.5, np.inf, np.abs(values[2]) / 30
    among, counts = rng.random((3, 4, 50)) < 0.8, rng.integers(0, 60, (3, 4)).astype(np.int32)
    marked = np.asarray(highest(jnp.asarray(values), jnp.asarray(counts), jnp.asarray(among)))
    shares = rng.dirichlet(np.ones(50), (3, 4)).astype(np.float32)
    shares[0, 0] = 1 / 64  # all tied
    mass = np.array([0.5, -1, 0.9, 0.0], np.float32) * np.ones((3, 1), np.float32)
    covered = {
        reach: np.asarray(covering(jnp.asarray(shares), jnp.asarray(mass), jnp.asarray(among), reach=reach))
        for reach in (True, False)
    }
    for row in np.ndindex(3, 4):
        allowed = np.flatnonzero(among[row])
        order = allowed[np.argsort(-values[row][allowed], kind="stable")]
        assert set(np.flatnonzero(marked[row])) == set(order[: counts[row]])
        order = allowed[np.argsort(-shares[row][allowed], kind="stable")]
        sums = np.cumsum(shares[row][order].astype(np.float64))
        assert set(np.flatnonzero(covered[True][row])) == set(order[np.append(0, sums[:-1]) < mass[row]])
        assert set(np.flatnonzero(covered[False][row])) == set(order[sums <= mass[row]])


PUBLISHED = {
    "0": ["vertical_and_slash", 30, 800, 0.9],
    "1": ["stream_llm", 100, 800, 0.8],
    "2": ["block_sparse", 8, 1, 0.7],
}


def test_published_tables_and_our_own_are_read_alike():
    published = methods.get("minference", patterns=json.loads(json.dumps([PUBLISHED])))
    own = [[["vertical_slash", 30, 800], ["a_shape", 100, 800], ["block_sparse", 8, 1]]]
    assert published == methods.get("minference", patterns=own)
    assert hash(published) == hash(methods.get("minference", patterns=published.prefill.patterns))
