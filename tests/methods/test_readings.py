"""Heads that read a prompt in ways of their own: attention and pairs against float64, and what a model then answers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison, qkv
from reading_oracle import attend_by, read
from tiny import CONFIG, random_prompt, tiny_lm

import tca_jax
from tca_jax import methods
from tca_jax.methods.base import Heads
from tca_jax.methods.fetching import fetched_blocks
from tca_jax.methods.tca import tca

SMALL = tca_jax.TCAConfig(block_size=8, window=16, reserve=3, observation=6, spread=2, fetch=2, fetch_stride=4)
DENSE = SMALL.num_candidates
READINGS = ["sparse", "blocks", "sparse", "dense"]
ROWS, PREFILL_ROWS = [4, DENSE, 7, 2], [0, 0, 7, 0]
FETCHING = tca_jax.TCAConfig(block_size=8, window=16, fetch=3, fetch_stride=4)
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


ALL = {"readings": READINGS, "rows": PREFILL_ROWS}


@pytest.mark.parametrize(
    ("lengths", "fields", "options"),
    [
        ((133, 61), {}, {**ALL, "group": 1, "seed": 3}),
        ((128, 117), {}, {**ALL, "group": 4, "seed": 1}),
        ((101, 20), {}, {**ALL, "group": 7, "seed": 2}),
        ((77, 23, 24), {}, {**ALL, "head_dim": 8, "seed": 5}),  # a window as long as the bucket beside a longer row
        *(
            ((110, 67), {"fetch_stride": stride, "fetch": 3}, {"readings": ["blocks", "sparse"]})
            for stride in (1, 8, 64)
        ),
        *(
            ((90, 33), {}, {"readings": readings})
            for readings in (["blocks"] * 2, ["dense", "blocks"], ["sparse", "dense"])
        ),
        ((15, 9), {}, {**ALL, "head_dim": 8}),
        ((23, 9), {}, {**ALL, "head_dim": 8}),
    ],
)
def test_layers_of_all_readings_equal_the_oracle(lengths, fields, options):
    options = {"rows": [0, 0], "group": 1 if "rows" in options else 2, "head_dim": 16, **options}
    _, pairs = check(dataclasses.replace(SMALL, **fields), np.array(lengths, np.int32), **options)
    if max(lengths) < SMALL.window + SMALL.block_size:  # within the window
        np.testing.assert_array_equal(pairs, [n * (n + 1) / 2 for n in lengths])


def test_fetching_all_blocks_is_exact_attention():
    lengths = np.array([101, 44], np.int32)
    q, k, v = map(jnp.asarray, qkv(0, 2, 101, 4, 2, 16))
    many = dataclasses.replace(SMALL, fetch=100)
    few = dataclasses.replace(SMALL, fetch=SMALL.num_ranked_blocks(104))
    full = attend(methods.get("full"), q, k, v, lengths)
    for config in (many, few):
        out, pairs = attend(tca(0, config, readings="blocks"), q, k, v, lengths)
        np.testing.assert_allclose(out, full.out, atol=1e-5)
        np.testing.assert_array_equal(pairs, full.pairs)


def test_tied_blocks_are_fetched_in_order():
    mass = np.zeros((1, 1, 9, 9), np.float32)
    mass[0, 0, 7, [4, 2, 6]] = 1.0, 1.0, 9.0  # block 6 is in the window
    mass[0, 0, 8] = 1.0
    found = [{*map(int, tile)} - {-1} for tile in fetched_blocks(jnp.asarray(mass), FETCHING)[0, 0]]
    assert found[7] == {4, 2, 0}
    assert found[8] == {0, 1, 2}
    assert found[:4] == [set(), set(), set(), {0}]


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
def test_prompts_are_read_as_their_heads_read(lm):
    """Its answer and the scores of its own tokens."""
    ids, model = random_prompt(70, 70), under(lm, MIXED)
    out = tca_jax.generate(model, ids, max_new_tokens=4, stop_token_ids=(), logprobs=True)
    tokens, logprobs, inside = greedy(lm, ids, [], 4, MIXED)
    assert out.tokens == [tokens]
    np.testing.assert_allclose(out.logprobs[0], logprobs, atol=1e-3)
    assert out.stats.kept_share == 1
    scored = tca_jax.score(model, ids).logprobs[0]
    np.testing.assert_allclose(scored, inside, atol=1e-3)
    assert np.abs(scored - tca_jax.score(lm, ids).logprobs[0]).max() > 0.05


@pytest.mark.integration
def test_questions_see_all_that_heads_keep(lm):
    document, part, question = random_prompt(1, 75), random_prompt(2, 19), random_prompt(3, 6)
    model = under(lm, MIXED)
    context = tca_jax.prefill(model, document)
    longer = tca_jax.prefill(model, part, context=context)
    out = tca_jax.generate(model, question, context=longer, max_new_tokens=4, stop_token_ids=())
    assert out.tokens == [greedy(lm, document, [*part, *question], 4, MIXED)[0]]


@pytest.mark.integration
def test_last_layer_fetches_from_the_whole_prompt(lm):
    """Not from the cache: the head keeps next to nothing, and what it fetches is gone behind the prompt."""
    ids, model = random_prompt(7, 96), under(lm, FETCHING_LAST, candidates=0)
    out = tca_jax.generate(model, ids, max_new_tokens=1, stop_token_ids=(), logprobs=True)
    tokens, logprobs, _ = greedy(lm, ids, [], 1, FETCHING_LAST)
    assert out.tokens == [tokens]
    np.testing.assert_allclose(out.logprobs[0], logprobs, atol=1e-3)
    assert out.stats.kept_share < 0.6
