"""Appending: equal to feeding the same tokens one by one, whatever the edges, and to one long prompt."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import kept_tokens, local_tokens, read_layer
from tiny import TCA, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax import methods
from tca_jax.engine import extend as extend_module
from tca_jax.engine.cache import CacheLayout, shared_and_own
from tca_jax.engine.decode import decode_layer
from tca_jax.engine.extend import AppendedColumns, align, extend, extend_layer, num_columns, rows_with_leaving_block
from tca_jax.engine.read import read_prompts
from tca_jax.engine.score import scores_of_appended
from tca_jax.methods.base import Heads

B, W = 8, 16
DENSE = TCA.num_candidates
METHODS = {
    "tca": methods.configured(TCA, [[4, DENSE]]),
    "streaming": methods.get("streaming", sinks=12, window=W, block_size=B),
    "random": methods.get("random", share=0.4, window=W, block_size=B),
}


def qkv(seed, batch, tokens, heads=4, kv_heads=2, d=16):
    rng = np.random.default_rng(seed)
    shapes = [(batch, tokens, h, d) for h in (heads, kv_heads, kv_heads)]
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


HEADS = Heads.all(2)


@functools.cache
def read(name: str, prompts: tuple[int, ...]):
    """A layer's cache behind prompts of these lengths, and that of up to 64 tokens that follow."""
    return _read(name, np.array(prompts, np.int32), qkv(1, len(prompts), 48))


@functools.partial(jax.jit, static_argnums=0)
def _read(name, lengths, qkv):
    method, sizes = METHODS[name], (1, 2, len(lengths), 48)
    _, cache = read_layer(method, CacheLayout.plan(method.cache, *sizes, 0), lengths, qkv)
    return shared_and_own(cache, CacheLayout.plan_following(method.cache, *sizes, 64), lengths)


@functools.partial(jax.jit, static_argnums=0)
def _extend_layer(name, q, k, v, shared, cache, where):
    return extend_layer(METHODS[name].cache, 0, HEADS, q, k, v, shared, cache, where)


@functools.partial(jax.jit, static_argnums=0)
def one_by_one(name, shared, cache, new, starts, prompt_lengths, lengths):
    """Feeds rows' tokens through decoding, a row that has no more keeping its cache; outputs `[B, T, Hq, d]`."""
    policy = METHODS[name].cache

    def step(cache, inputs):
        t, *token = inputs
        token, fed = [x[:, None] for x in token], t < lengths
        positions = jnp.where(fed, starts + t, starts + lengths)  # past its end a row writes where nobody looks
        leaving = rows_with_leaving_block(policy, positions, prompt_lengths) & fed
        out, after = decode_layer(policy, 0, HEADS, *token, shared, cache, positions, leaving)
        return after, out[:, 0]

    steps = (jnp.arange(new[0].shape[1]), *(jnp.swapaxes(x, 0, 1) for x in new))
    cache, outs = jax.lax.scan(step, cache, steps)
    return jnp.swapaxes(outs, 0, 1), cache


def appended(name, prompts, starts, lengths, new, caches=None):
    """The same through `extend_layer`: outputs of each row's tokens, and the cache."""
    shared, cache = caches or read(name, prompts)
    columns = num_columns(max(s % B + n for s, n in zip(starts, lengths, strict=True)), B)
    firsts = np.array(starts, np.int32) // B * B
    where = AppendedColumns(firsts, *(np.array(x, np.int32) for x in (starts, np.add(starts, lengths), prompts)))
    aligned = [np.zeros((len(starts), columns, *x.shape[2:]), np.float32) for x in new]
    for to, x in zip(aligned, new, strict=True):
        for row, (start, n) in enumerate(zip(starts, lengths, strict=True)):
            to[row, start % B : start % B + n] = x[row, :n]
    out, cache = _extend_layer(name, *aligned, shared, cache, where)
    return [
        np.asarray(out)[row, s % B : s % B + n] for row, (s, n) in enumerate(zip(starts, lengths, strict=True))
    ], cache


def check_same_cache(cache, expected, ends):
    """What later queries can see is the same: the rows' own part of their windows, and what was kept."""
    np.testing.assert_array_equal(cache.kept[0], expected.kept[0])
    for row, end in enumerate(ends):
        positions = np.arange(max(int(cache.start[row]), (end - 1) // B * B - W), end)
        np.testing.assert_array_equal(*(local_tokens(each, row, positions) for each in (cache, expected)))
        for head in range(2):
            np.testing.assert_array_equal(*(kept_tokens(each, row, head) for each in (cache, expected)))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [
        pytest.param((5, 13), (1, 2), marks=pytest.mark.integration),  # the window is not full
        ((5, 13), (17, 2)),  # one fills up on the way
        ((40, 48), (1, 24)),  # from block edges: prefill has dealt with the first block that leaves
        ((39, 47), (2, 17)),  # one token before an edge
        ((33, 7), (24, 23)),  # a window that fills up on the way; whole blocks from within a block
        ((46, 21), (24, 0)),  # a row without a token
    ],
)
def test_appended_tokens_equal_tokens_fed_singly(name, prompts, lengths):
    new = qkv(2, 2, 24)
    starts = np.array(prompts, np.int32)
    most = [x[:, : max(lengths)] for x in new]
    expected, fed = one_by_one(name, *read(name, prompts), most, starts, starts, np.array(lengths))
    outs, cache = appended(name, prompts, prompts, lengths, new)
    for row, out in enumerate(outs):
        np.testing.assert_allclose(out, np.asarray(expected)[row, : lengths[row]], atol=2e-5)
    check_same_cache(cache, fed, np.add(prompts, lengths))


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def opened(model, prompts, fed):
    """The cache of these prompts, and that of some more tokens."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    args = jnp.asarray(tokens), jnp.asarray(lengths)
    _, cache, *_ = read_prompts(model, *args, model.cache_layout(*tokens.shape), backend="xla")
    return shared_and_own(cache, model.following_layout(*tokens.shape, fed), args[1]), args[1]


@pytest.mark.parametrize("piece", [8, 24, 2048])
@pytest.mark.integration
def test_dense_heads_equal_one_long_prompt(lm, piece, monkeypatch):
    monkeypatch.setattr(extend_module, "_PIECE_TOKENS", piece)
    model = with_candidates(lm, [[DENSE, DENSE]] * 2)
    prompts, more = [random_prompt(0, 61), random_prompt(1, 40)], [random_prompt(2, 43), random_prompt(3, 20)]
    (shared, own), starts = opened(model, prompts, 64)
    padded = np.zeros((2, 43), np.int32)
    for row, ids in zip(padded, more, strict=True):
        row[: len(ids)] = ids
    tokens = jnp.asarray(align(padded, np.asarray(starts), block_size=B, columns=num_columns(43 + 5, B)))
    lengths = jnp.array([43, 20], jnp.int32)

    @jax.jit
    def run(lm, shared, own, tokens, starts, lengths):
        result = extend(lm, shared, own, tokens, starts, lengths, starts, keep_hidden=True)
        return result, scores_of_appended(lm, result.hidden, tokens, starts, lengths)

    result, scores = run(model, shared, own, tokens, starts, lengths)
    for row, (prompt, ids) in enumerate(zip(prompts, more, strict=True)):
        (expected,) = tca_jax.score(lm, prompt + ids).logprobs
        first = len(prompt) % B
        got = np.asarray(scores.logprobs[row])
        np.testing.assert_allclose(got[first : first + len(ids) - 1], expected[len(prompt) :], atol=2e-4)
        assert (np.delete(got, np.arange(first, first + len(ids) - 1)) == 0).all()
        follow = jax.nn.log_softmax(result.logits[row])
        (after,) = tca_jax.score(lm, [*prompt, *ids, 5]).logprobs
        np.testing.assert_allclose(follow[5], after[-1], atol=2e-4)


def test_columns_are_blocks_or_whole_pieces():
    assert {num_columns(n, 128) for n in range(1, 129)} == {128}
    assert num_columns(127 + 128, 128) == 256
    assert num_columns(10_000, 128) % 2048 == 0
    for n in range(1, 40_000, 97):
        assert n <= num_columns(n, 128) <= max(1.13 * n + 128, n + 2048)
