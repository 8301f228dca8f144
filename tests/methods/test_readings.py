"""Heads that read a prompt in ways of their own: attention and pairs against float64, and what a model then answers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison, qkv
from implementations import INTERPRET, implementation, runs
from reading_oracle import attend_by, read
from tiny import CONFIG, random_prompt, tiny_lm

import tca_jax
from tca_jax import methods
from tca_jax.lab.plots import inspection
from tca_jax.methods.base import Heads
from tca_jax.methods.tca import tca
from tca_jax.pallas_kernels import backends

SMALL = tca_jax.TCAConfig(block_size=8, window=16, reserve=3, observation=6, spread=2, fetch=2, fetch_stride=4)
DENSE = SMALL.num_candidates
READINGS = ["sparse", "blocks", "sparse", "dense"]
ROWS, PREFILL_ROWS = [4, DENSE, 7, 2], [0, 0, 7, 0]
NOISE = 1e-5  # relative gap under which float32 may break a tie differently from float64


def attend(method, q, k, v, lengths, backend="xla"):
    """The first layer's attention and its pairs, as one program."""
    heads = Heads.all(k.shape[2])
    return jax.jit(lambda *x: method.prefill.attend(0, heads, *x, None, backend))(q, k, v, jnp.asarray(lengths))


def check(config, lengths, readings, rows, group, backend="xla", head_dim=64, scale=0.7, atol=2e-5, seed=0):
    """Compares a layer of so many KV heads with the oracle; returns out and pairs."""
    kv_heads, tokens = len(readings), max(lengths)
    q, k, v = (
        poison(x, lengths, 1e4) for x in qkv(seed, len(lengths), tokens, group * kv_heads, kv_heads, head_dim, scale)
    )
    method = tca([ROWS[:kv_heads]], config, [rows], [readings])
    out, pairs = attend(method, q, k, v, lengths, backend)
    for row, length in enumerate(lengths):
        one_q, one_k, one_v = (x[row, :length].astype(np.float64) for x in (q, k, v))
        found = [
            read(one_q[:, head * group : (head + 1) * group], one_k[:, head], readings[head], rows[head], config)
            for head in range(kv_heads)
        ]
        assert min(margin for _, margin in found) > NOISE
        masks = [mask for mask, _ in found]
        np.testing.assert_allclose(out[row, :length], attend_by(masks, one_q, one_k, one_v), atol=atol)
        assert not np.asarray(out[row, length:]).any()
        assert pairs[row] == pytest.approx(np.mean([mask.sum() for mask in masks]), rel=1e-6)
    return out, pairs


@pytest.mark.parametrize(
    ("group", "lengths", "seed"), [(1, (133, 61), 3), (4, (128, 117), 1), (7, (101, 20), 2)], ids=str
)
def test_a_layer_of_all_readings_equals_the_oracle_on_ragged_prompts(group, lengths, seed):
    check(SMALL, np.array(lengths, np.int32), READINGS, PREFILL_ROWS, group, seed=seed)


@pytest.mark.parametrize("stride", [1, 8, 64])
def test_every_stride_of_the_estimate_equals_the_oracle(stride):
    config = dataclasses.replace(SMALL, fetch_stride=stride, fetch=3)
    check(config, np.array([110, 67], np.int32), ["blocks", "sparse"], [0, 0], 2, head_dim=16)


@pytest.mark.parametrize("readings", [["blocks"] * 2, ["dense", "blocks"], ["sparse", "dense"]], ids=str)
def test_a_layer_in_which_nobody_reads_in_some_way_equals_the_oracle(readings):
    check(SMALL, np.array([90, 33], np.int32), readings, [0, 0], 2, head_dim=16)


def test_the_kernels_equal_the_oracle_under_all_readings(monkeypatch):
    if not runs("triton"):
        pytest.skip("needs another GPU")
    if INTERPRET:
        monkeypatch.setattr(backends, "_lacks", lambda backend: None if backend in ("triton", "xla") else "nothing")
        monkeypatch.setattr(backends, "_load", lambda operation, name: implementation(operation, name))
    config = dataclasses.replace(SMALL, block_size=16, window=32, fetch_stride=8)
    check(config, np.array([112, 70], np.int32), READINGS, PREFILL_ROWS, 1, "triton", head_dim=16, atol=2e-4)


def test_fetching_more_blocks_than_there_are_is_exact_attention():
    lengths = np.array([101, 44], np.int32)
    q, k, v = map(jnp.asarray, qkv(0, 2, 101, 4, 2, 16))
    many = dataclasses.replace(SMALL, fetch=100)
    few = dataclasses.replace(SMALL, fetch=SMALL.num_ranked_blocks(104))
    full = attend(methods.get("full"), q, k, v, lengths)
    for config in (many, few):
        out, pairs = attend(tca(0, config, readings="blocks"), q, k, v, lengths)
        np.testing.assert_allclose(out, full.out, atol=1e-5)
        np.testing.assert_array_equal(pairs, full.pairs)


@pytest.mark.parametrize("tokens", [15, 23])
def test_a_prompt_within_the_window_is_read_whole_by_every_head(tokens):
    lengths = np.array([tokens, 9], np.int32)
    _, pairs = check(SMALL, lengths, READINGS, PREFILL_ROWS, 1, head_dim=8)
    np.testing.assert_array_equal(pairs, lengths * (lengths + 1) / 2)


def test_a_window_as_long_as_the_bucket_is_exact_attention_beside_a_longer_row():
    check(SMALL, np.array([77, 23, 24], np.int32), READINGS, PREFILL_ROWS, 1, head_dim=8, seed=5)


# --- a model --------------------------------------------------------------------------------------

#: Every layer has a head of another reading; every cache row is dense, so that later tokens see everything.
MIXED = [["sparse", "blocks"], ["dense", "sparse"]]
FETCHING_LAST = [["sparse", "sparse"], ["blocks", "sparse"]]


def under(lm, readings, candidates=DENSE, prefill=0, config=SMALL):
    return lm.with_method("tca", candidates=candidates, config=config, prefill_candidates=prefill, readings=readings)


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def greedy(lm, prompt, following, new_tokens, readings):
    """Greedy answer and the log probabilities of its tokens and of the prompt's, by masks: what the prompt's queries
    read is the oracle's, all later tokens see everything."""
    n, group = len(prompt), CONFIG.num_heads // CONFIG.num_kv_heads
    tokens = [*prompt, *following]

    def attention(layer, q, k, v, state):
        q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
        masks = []
        for head in range(CONFIG.num_kv_heads):
            mask = np.tri(len(k), dtype=bool)
            own = slice(head * group, (head + 1) * group)
            mask[:n, :n], _ = read(q[:n, own], k[:n, head], readings[layer][head], 0, SMALL)
            masks.append(mask)
        return jnp.asarray(attend_by(masks, q, k, v), jnp.float32)[None], None

    positions = jnp.arange(112)[None]  # the same for all prompts, so that little is compiled
    for _ in range(new_tokens):
        padded = jnp.asarray([tokens + [0] * (112 - len(tokens))])
        hidden, _ = lm.decoder(padded, positions, attention, (None,) * CONFIG.num_layers)
        logits = np.asarray(lm.decoder.logits(hidden[0]), np.float64)
        tokens.append(int(np.argmax(logits[len(tokens) - 1])))
    logprobs = np.log(oracle.softmax(logits))[np.arange(len(tokens) - 1), tokens[1:]]
    start = n + len(following)
    return tokens[start:], logprobs[start - 1 :], logprobs[: n - 1]


@pytest.mark.integration
def test_a_prompt_is_answered_as_its_heads_read_it(lm):
    ids = random_prompt(70, 70)
    out = tca_jax.generate(under(lm, MIXED), ids, max_new_tokens=4, stop_token_ids=(), logprobs=True)
    tokens, logprobs, _ = greedy(lm, ids, [], 4, MIXED)
    assert out.tokens == [tokens]
    np.testing.assert_allclose(out.logprobs[0], logprobs, atol=1e-3)
    assert out.stats.kept_share == 1


@pytest.mark.integration
def test_the_tokens_of_a_text_are_scored_as_its_heads_read_it(lm):
    ids = random_prompt(0, 75)
    scored = tca_jax.score(under(lm, MIXED), ids).logprobs[0]
    np.testing.assert_allclose(scored, greedy(lm, ids, [], 1, MIXED)[2], atol=1e-3)
    assert np.abs(scored - tca_jax.score(lm, ids).logprobs[0]).max() > 0.05


@pytest.mark.integration
def test_questions_behind_a_context_see_all_that_its_heads_keep_however_they_have_read(lm):
    document, part, question = random_prompt(1, 75), random_prompt(2, 19), random_prompt(3, 6)
    model = under(lm, MIXED)
    context = tca_jax.prefill(model, document)
    longer = tca_jax.prefill(model, part, context=context)
    out = tca_jax.generate(model, question, context=longer, max_new_tokens=4, stop_token_ids=())
    assert out.tokens == [greedy(lm, document, [*part, *question], 4, MIXED)[0]]


@pytest.mark.integration
def test_the_last_query_is_computed_from_the_whole_prompt_where_a_head_of_the_last_layer_fetches(lm):
    """Not from the cache: the head keeps next to nothing, and what it fetches is gone behind the prompt."""
    ids, model = random_prompt(7, 96), under(lm, FETCHING_LAST, candidates=0)
    out = tca_jax.generate(model, ids, max_new_tokens=1, stop_token_ids=(), logprobs=True)
    tokens, logprobs, _ = greedy(lm, ids, [], 1, FETCHING_LAST)
    assert out.tokens == [tokens]
    np.testing.assert_allclose(out.logprobs[0], logprobs, atol=1e-3)
    assert out.stats.kept_share < 0.6


@pytest.mark.integration
def test_what_the_first_layer_keeps_is_by_the_cache_row_whatever_the_reading(lm):
    ids, rows = random_prompt(9, 100), [[0, 3]] * 2
    sparse, *others = (
        inspection.kept_tokens(under(lm, readings, rows, None), ids)[0] for readings in ("sparse", "blocks", "dense")
    )
    for other in others:
        np.testing.assert_array_equal(other, sparse)


# --- a mesh ---------------------------------------------------------------------------------------


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("readings", "message"),
    [
        ("far", r"readings = 'far': must be one of \['sparse', 'blocks', 'dense'\]"),
        ([["sparse", "Blocks"]], r"readings\[0\]\[1\] = 'Blocks': must be one of"),
        (["sparse", "blocks"], r"readings has shape \(2,\), dtype <U6: must be names \[layers, H_kv\]"),
        ([[0, 1]], r"readings has shape \(1, 2\), dtype int64: must be names"),
    ],
)
def test_readings_that_are_none_are_named(readings, message):
    with pytest.raises(ValueError, match=message):
        tca.__wrapped__(0, SMALL, readings=readings)


def test_readings_that_are_alike_are_one_reading():
    assert tca(0, SMALL, readings=[["blocks"] * 2] * 3) == tca(0, SMALL, readings="blocks")
    assert tca(0, SMALL, readings=np.full((3, 2), "sparse")) == tca(0, SMALL)
    assert hash(tca([[0, 1]], SMALL, readings=[["blocks", "dense"]])) is not None


def test_a_layer_estimates_once_and_only_where_a_head_fetches():
    q, k, v = map(jnp.asarray, qkv(6, 1, 64, 4, 2, 8))
    method = tca(0, SMALL, readings=[["sparse", "sparse"], ["sparse", "blocks"]])
    for layer, times in ((0, 0), (1, 1)):
        program = str(
            jax.make_jaxpr(
                lambda *x, layer=layer: method.prefill.attend(layer, Heads.all(x[1].shape[2]), *x, None, "xla")
            )(q, k, v, jnp.array([64]))
        )
        assert program.count("name=block_mass") == times
