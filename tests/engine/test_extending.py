"""Appending: equal to feeding the same tokens one by one, whatever the edges, and to one long prompt."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TCA, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax import methods
from tca_jax.engine import extend as extending
from tca_jax.engine.answers import scores_of_appended
from tca_jax.engine.cache import decode_layer, prefill_layer, rows_with_leaving_block
from tca_jax.engine.extend import AppendedColumns, align, extend, extend_layer, num_columns, open_caches
from tca_jax.engine.layouts import CacheLayout
from tca_jax.engine.read import read_prompts

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
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


@functools.cache
def read(name: str, prompts: tuple[int, ...]):
    """A layer's cache behind prompts of these lengths, with room for 64 more tokens."""
    method, padded = METHODS[name], 48
    layout = CacheLayout.plan(method.cache, 0, 2, len(prompts), padded, None)
    cache = prefill_layer(method, 0, *qkv(1, len(prompts), padded), jnp.array(prompts, jnp.int32), layout)[1]
    return cache.with_growth(cache.layout.with_growth(method.cache, 0, 64).growth)


_extend_layer = jax.jit(extend_layer, static_argnums=(0, 1))


@functools.partial(jax.jit, static_argnums=0)
def one_by_one(method, cache, new, starts, prompt_lengths, lengths):
    """Feeds rows' tokens through decoding, a row that has no more keeping its cache; outputs `[B, T, Hq, d]`."""

    def step(cache, inputs):
        t, *token = inputs
        positions = starts + t
        leaving = rows_with_leaving_block(cache.layout, positions, prompt_lengths) & (t < lengths)
        out, after = decode_layer(method, 0, *(x[:, None] for x in token), cache, positions, leaving)
        keep = (t < lengths)[:, None, None, None]
        ring = jax.tree.map(lambda old, new: jnp.where(keep, new, old), cache.ring, after.ring)
        return dataclasses.replace(after, ring=ring), out[:, 0]

    steps = (jnp.arange(new[0].shape[1]), *(jnp.swapaxes(x, 0, 1) for x in new))
    cache, outs = jax.lax.scan(step, cache, steps)
    return jnp.swapaxes(outs, 0, 1), cache


def appended(name, prompts, starts, lengths, new, cache=None):
    """The same through `extend_layer`: outputs of each row's tokens, and the cache."""
    cache = cache or read(name, prompts)
    columns = num_columns(max(s % B + n for s, n in zip(starts, lengths, strict=True)), B)
    firsts = jnp.array(starts, jnp.int32) // B * B
    where = AppendedColumns(firsts, *(jnp.array(x, jnp.int32) for x in (starts, np.add(starts, lengths), prompts)))
    aligned = [np.zeros((len(starts), columns, *x.shape[2:]), np.float32) for x in new]
    for to, x in zip(aligned, new, strict=True):
        for row, (start, n) in enumerate(zip(starts, lengths, strict=True)):
            to[row, start % B : start % B + n] = x[row, :n]
    out, cache = _extend_layer(METHODS[name], 0, *map(jnp.asarray, aligned), cache, where)
    return [out[row, s % B : s % B + n] for row, (s, n) in enumerate(zip(starts, lengths, strict=True))], cache


def check_same_cache(cache, expected, ends):
    for row, end in enumerate(ends):
        positions = np.arange(max(0, (end - 1) // B * B - W), end)
        for x, y in zip(cache.ring, expected.ring, strict=True):
            slots = positions % cache.layout.ring_tokens
            np.testing.assert_array_equal(x[row][:, slots], y[row][:, slots])
    if expected.growth is None:
        assert cache.growth is None
        return
    np.testing.assert_array_equal(cache.growth.lengths, expected.growth.lengths)
    np.testing.assert_array_equal(cache.growth.k, expected.growth.k)
    np.testing.assert_array_equal(cache.growth.v, expected.growth.v)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [
        ((5, 13), (1, 2)),  # the window is not full
        ((40, 48), (1, 24)),  # from block edges: prefill has dealt with the first block that leaves
        ((39, 47), (2, 17)),  # one token before an edge
        ((33, 7), (24, 23)),  # a window that fills up on the way; whole blocks from within a block
        ((46, 21), (24, 0)),  # a row without a token
    ],
)
def test_appended_tokens_attend_and_leave_as_if_they_were_fed_one_by_one(name, prompts, lengths):
    new = qkv(2, 2, 24)
    starts = jnp.array(prompts, jnp.int32)
    expected, fed = one_by_one(METHODS[name], read(name, prompts), new, starts, starts, jnp.array(lengths))
    outs, cache = appended(name, prompts, prompts, lengths, new)
    for row, out in enumerate(outs):
        np.testing.assert_allclose(out, expected[row, : lengths[row]], atol=2e-5)
    check_same_cache(cache, fed, np.add(prompts, lengths))


def test_blocks_leave_in_what_was_compared():
    lengths = jnp.array([24, 23])
    starts = jnp.array([33, 7], jnp.int32)
    _, fed = one_by_one(METHODS["tca"], read("tca", (33, 7)), qkv(2, 2, 24), starts, starts, lengths)
    assert (np.asarray(fed.growth.lengths) > 0).tolist() == [[True, True], [True, True]]


@pytest.mark.parametrize("cut", [1, 7, 8, 15])
def test_where_tokens_are_cut_into_calls_does_not_matter(cut):
    prompts = (40, 21)
    new = qkv(3, 2, 24)
    whole, expected = appended("tca", prompts, prompts, (24, 24), new)
    first, cache = appended("tca", prompts, prompts, (cut, cut), new)
    starts = tuple(np.add(prompts, cut).tolist())
    rest, cache = appended("tca", prompts, starts, (24 - cut,) * 2, [x[:, cut:] for x in new], cache)
    for row in range(2):
        np.testing.assert_allclose(jnp.concatenate([first[row], rest[row]]), whole[row], atol=1e-5)
    check_same_cache(cache, expected, np.add(prompts, 24))


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def opened(model, prompts, fed):
    """Caches of a context of these prompts, with room for some more tokens."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    layouts = model.cache_layouts(*tokens.shape, None)
    logits, caches, _ = read_prompts(model, jnp.asarray(tokens), jnp.asarray(lengths), layouts, backend="xla")
    return logits, open_caches(model, caches, len(prompts), fed), jnp.asarray(lengths)


@pytest.mark.parametrize("piece", [8, 24, 2048])
def test_with_dense_heads_appended_tokens_have_the_log_probabilities_of_one_long_prompt(lm, piece, monkeypatch):
    monkeypatch.setattr(extending, "_PIECE_TOKENS", piece)
    model = with_candidates(lm, [[DENSE, DENSE]] * 2)
    prompts, more = [random_prompt(0, 61), random_prompt(1, 40)], [random_prompt(2, 43), random_prompt(3, 20)]
    _, caches, starts = opened(model, prompts, 64)
    padded = np.zeros((2, 43), np.int32)
    for row, ids in zip(padded, more, strict=True):
        row[: len(ids)] = ids
    tokens = jnp.asarray(align(padded, np.asarray(starts), block_size=B, columns=num_columns(43 + 5, B)))
    lengths = jnp.array([43, 20], jnp.int32)

    @jax.jit
    def run(lm, caches, tokens, starts, lengths):
        result = extend(lm, caches, tokens, starts, lengths, starts, keep_hidden=True)
        return result, scores_of_appended(lm, result.hidden, tokens, starts, lengths)

    result, scores = run(model, caches, tokens, starts, lengths)
    for row, (prompt, ids) in enumerate(zip(prompts, more, strict=True)):
        (expected,) = tca_jax.score(lm, prompt + ids).logprobs
        first = len(prompt) % B
        got = np.asarray(scores.logprobs[row])
        np.testing.assert_allclose(got[first : first + len(ids) - 1], expected[len(prompt) :], atol=2e-4)
        assert (np.delete(got, np.arange(first, first + len(ids) - 1)) == 0).all()
        follow = jax.nn.log_softmax(result.logits[row])
        (after,) = tca_jax.score(lm, [*prompt, *ids, 5]).logprobs
        np.testing.assert_allclose(follow[5], after[-1], atol=2e-4)


def test_columns_are_few_blocks_for_short_questions_and_whole_pieces_for_long_ones():
    assert {num_columns(n, 128) for n in range(1, 129)} == {128}
    assert num_columns(127 + 128, 128) == 256
    assert num_columns(10_000, 128) % 2048 == 0
    for n in range(1, 40_000, 97):
        assert n <= num_columns(n, 128) <= max(1.13 * n + 128, n + 2048)
