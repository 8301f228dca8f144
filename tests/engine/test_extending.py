"""Appending: equal to decoding the same tokens, whatever the edges."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import kept_tokens, local_tokens
from tiny import TCA, random_prompt, tiny_lm

from tca_jax import methods
from tca_jax.engine.decode import Steps, begin, row_keys
from tca_jax.engine.extend import align, feed, num_columns
from tca_jax.engine.read import Calls, read
from tca_jax.engine.sampling import Sampling

B, W = 8, 16
LONGEST, FED = 48, 24  # tokens of a prompt, and after it
DENSE = TCA.num_candidates
METHODS = {
    "tca": methods.configured(TCA, [[4, DENSE]] * 2),
    "streaming": methods.get("streaming", sinks=12, window=W, block_size=B),
    "random": methods.get("random", share=0.4, window=W, block_size=B),
}
MORE = np.array([random_prompt(seed, FED) for seed in (8, 9)], np.int32)


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def opened(lm, prompts, fed):
    """Prompts in rows with pages for `fed` tokens more, and logits after them."""
    tokens = np.zeros((len(prompts), max(LONGEST, *map(len, prompts))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    layout = lm.cache_layout(*tokens.shape, fed)
    found = read(lm, jnp.asarray(tokens), lengths, lengths + fed, layout, Calls(), backend="xla")
    return found.rows, found.logits


def append(lm, rows, tokens, starts, lengths):
    """Rows with right-padded tokens, and log-probabilities `[R, n, V]` after each of these."""
    starts, lengths = (np.asarray(x, np.int32) for x in (starts, lengths))
    aligned = align(tokens, starts, block_size=B, columns=num_columns(FED + B, B))
    result = feed(lm, rows, *map(jnp.asarray, (aligned, starts, lengths)), Calls(), keep_hidden=True, backend="xla")
    places = starts[:, None] % B + np.arange(tokens.shape[1])
    hidden = jnp.take_along_axis(result.hidden, places[..., None], axis=1)
    return result, jax.nn.log_softmax(lm.decoder.logits(hidden))


@functools.partial(jax.jit, static_argnames="method")
def decode(lm, method, rows, logits, tokens, starts, lengths):
    """The same in steps of decoding, which are made to feed these tokens; log-probabilities in descending order."""
    lm = dataclasses.replace(lm, method=method)
    steps, (count, vocabulary) = Steps(lm, lengths + 1, Sampling(), None, "xla"), logits.shape
    rest = row_keys(jax.random.key(0), count), None, Sampling(), jnp.zeros(0, jnp.int32)
    state = begin(lm, rows, logits, starts, None, *rest, new_tokens=FED + 1, logprobs=vocabulary)

    def step(state, token):
        return steps.take(dataclasses.replace(state, last=token), None, steps.leaving(state)), None

    state, _ = jax.lax.scan(step, state, tokens.T)
    return state.cache, state.top[1][:, 1:]


def check_same_rows(rows, expected, ends):
    """What later queries can see is the same."""
    np.testing.assert_array_equal(rows.kept, expected.kept)
    np.testing.assert_array_equal(rows.start, expected.start)
    np.testing.assert_array_equal(rows.length, ends)
    for layer, row in np.ndindex(rows.kept.shape[:2]):
        positions = np.arange(int(rows.start[row]), ends[row])
        both = [local_tokens(each, row, positions, layer) for each in (rows, expected)]
        np.testing.assert_allclose(*both, atol=1e-4)
        for head in range(rows.kept.shape[2]):
            np.testing.assert_allclose(*(kept_tokens(each, row, head, layer) for each in (rows, expected)), atol=1e-4)


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
def test_appended_tokens_equal_decoded_ones(lm, name, prompts, lengths):
    model = lm.with_method(METHODS[name])
    rows, logits = opened(model, [random_prompt(seed, n) for seed, n in enumerate(prompts)], FED)
    starts, counts, ends = jnp.array(prompts), jnp.array(lengths), np.add(prompts, lengths)
    expected, values = decode(model.for_programs(), model.method, rows, logits, jnp.asarray(MORE), starts, counts)
    result, logprobs = append(model, rows, MORE, prompts, lengths)
    check_same_rows(result.rows, expected, ends)
    for row, n in enumerate(lengths):
        found = np.sort(np.asarray(logprobs)[row, :n])[:, ::-1]
        np.testing.assert_allclose(found, np.asarray(values)[row, :n], atol=2e-4)
        if n:
            np.testing.assert_allclose(jax.nn.log_softmax(result.logits[row]), logprobs[row, n - 1], atol=1e-5)


def test_columns_are_blocks_or_whole_pieces():
    assert {num_columns(n, 128) for n in range(1, 129)} == {128}
    assert num_columns(127 + 128, 128) == 256
    assert num_columns(10_000, 128) % 2048 == 0
    for n in range(1, 40_000, 97):
        assert n <= num_columns(n, 128) <= max(1.13 * n + 128, n + 2048)
