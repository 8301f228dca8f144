"""Generation: against a dense reference, batches, stopping, streaming, statistics, compilation counts."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, TCA, greedy_reference, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.engine.prompts import bucket_length

DENSE = TCA.num_candidates
UNEQUAL = [[0, 6], [DENSE, 3]]
QUICK = [(63, UNEQUAL), (63, None), (101, UNEQUAL)]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.mark.parametrize(
    ("length", "candidates"),
    [
        pytest.param(length, candidates, marks=[] if (length, candidates) in QUICK else pytest.mark.slow)
        for length in (1, 63, 64, 101)
        for candidates in (None, UNEQUAL, [[0] * 2] * 2)
    ],
)
def test_greedy_tokens_equal_a_dense_reference(lm, length, candidates):
    model = lm if candidates is None else with_candidates(lm, candidates)
    prompt = random_prompt(length, length)
    expected, _ = greedy_reference(model, prompt, 36)  # long enough for several blocks to leave the window
    out = tca_jax.generate(model, prompt, max_new_tokens=36, stop_token_ids=())
    assert out.tokens == [expected]
    assert out.finish_reasons == ["length"]


def test_ragged_batches_answer_as_alone(lm):
    model = with_candidates(lm, UNEQUAL)
    prompts = [random_prompt(i, length) for i, length in enumerate((7, 90, 96, 12))]  # in two buckets, one of them full
    together = tca_jax.generate(model, prompts, max_new_tokens=20)
    for prompt, tokens in zip(prompts, together.tokens, strict=True):
        assert tca_jax.generate(model, prompt, max_new_tokens=20).tokens == [tokens]


def test_sparse_heads_change_the_answer(lm):
    prompts = [random_prompt(i, 200) for i in range(2)]
    sparse = tca_jax.generate(with_candidates(lm, [[0, 0], [0, 0]]), prompts, max_new_tokens=30)
    full = tca_jax.generate(lm, prompts, max_new_tokens=30)
    assert sparse.tokens != full.tokens
    assert sparse.stats.kept_share < 0.5
    assert sparse.stats.kv_cache_bytes < sparse.stats.full_kv_cache_bytes
    assert full.stats.kept_share == 1.0
    assert full.stats.kv_cache_bytes == full.stats.full_kv_cache_bytes


@pytest.mark.integration
def test_twenty_lengths_of_one_bucket_compile_once(lm):
    model = with_candidates(lm, UNEQUAL)
    lengths = [n for n in range(257, 277) if bucket_length(n) == 288]
    assert len(lengths) == 20
    compiled = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    run = tca_jax.generate_tokens
    tokens = np.ones((1, 288), np.int32)
    for n in lengths:
        out = run(model, tokens, np.array([n], np.int32), jax.random.key(0), max_new_tokens=3)
        out.block_until_ready()
    assert sum("generate_tokens" in str(name) for name in compiled) == 1, compiled

    jax.monitoring.unregister_event_duration_listener(listen)

    stats = [tca_jax.generate(model, random_prompt(n, n), max_new_tokens=3).stats for n in lengths[:3]]
    assert stats[0].compile_seconds > 0.0
    assert [s.compile_seconds for s in stats[1:]] == [0.0, 0.0]


@pytest.mark.integration
def test_generate_tokens_inside_the_callers_jit(lm):
    model = with_candidates(lm, UNEQUAL)
    prompts = [random_prompt(1, 50), random_prompt(2, 31)]
    padded = np.full((2, 64), 96, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def mine(model, tokens, lengths):
        return tca_jax.generate_tokens(model, tokens, lengths, jax.random.key(0), max_new_tokens=12) + 0

    out = mine(model, padded, np.array([50, 31], np.int32))
    assert out.tolist() == tca_jax.generate(model, prompts, max_new_tokens=12).tokens


def test_a_stop_token_ends_its_row_alone(lm):
    prompts = [random_prompt(3, 120), random_prompt(4, 120)]
    free = tca_jax.generate(lm, prompts, max_new_tokens=30)
    stop = free.tokens[0][5]
    first = free.tokens[0].index(stop)
    out = tca_jax.generate(lm, prompts, max_new_tokens=30, stop_token_ids=[stop])
    assert out.tokens[0] == free.tokens[0][: first + 1]
    assert out.finish_reasons[0] == "stop"
    if stop not in free.tokens[1]:
        assert out.tokens[1] == free.tokens[1]
    raw = tca_jax.generate_tokens(
        lm,
        jnp.array(prompts),
        jnp.array([120, 120], jnp.int32),
        jax.random.key(0),
        max_new_tokens=30,
        stop_tokens=(stop,),
    )
    assert raw[0, first + 1 :].tolist() == [lm.pad_token_id] * (29 - first)


def test_seeds_repeat_and_differ(lm):
    prompt = random_prompt(9, 30)
    options = {"max_new_tokens": 30, "temperature": 1.5, "top_p": 0.95}
    a, b, c = (tca_jax.generate(lm, prompt, seed=seed, **options).tokens for seed in (1, 1, 2))
    assert a == b
    assert a != c


def test_repetition_penalty_sees_prompt_and_answer(lm):
    prompt = random_prompt(10, 30)
    out = tca_jax.generate(lm, prompt, max_new_tokens=30, repetition_penalty=1e6).tokens[0]
    assert len(set(out)) == len(out)
    assert not set(out) & set(prompt)


def test_statistics_count_tokens_bytes_and_time(lm):
    model = with_candidates(lm, [[0, 0], [0, 0]])
    stats = tca_jax.generate(model, [random_prompt(0, 100), random_prompt(1, 60)], max_new_tokens=9).stats
    assert stats.prompt_tokens == [100, 60]
    assert stats.new_tokens == [9, 9]
    assert stats.prefill_seconds > 0
    assert stats.seconds_per_token > 0
    # a window of w + b = 24 tokens and 128 tokens kept in each head, K and V, float32, 2 layers x 2 rows x 2 heads
    assert stats.kv_cache_bytes == 2 * 4 * CONFIG.head_dim * (24 + 128) * 8


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("text", {}, r"prompts\[0\]: tiny was loaded without a tokenizer, so text cannot be used; pass token ids"),
        ([1, 2], {"stop": "x"}, r"stop: tiny was loaded without a tokenizer; use stop_token_ids"),
        ([1] * 4000, {"max_new_tokens": 97}, r"prompts\[0\] has 4000 tokens; .* 4097, and tiny has 4096 positions"),
        ([1, 2], {"backend": "cuda"}, r"backend = 'cuda'"),
    ],
)
def test_bad_requests_are_named(lm, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(tca_jax.generate)(lm, prompt, **options)


@pytest.mark.parametrize(
    ("tokens", "lengths", "options", "error", "message"),
    [
        (np.ones((1, 24), int), np.array([99]), {}, ValueError, r"lengths = \[99\]: must lie in \[1, 24\]"),
        (np.ones((1, 4096), int), np.array([4094]), {}, ValueError, r"lengths = \[4094\]: must lie in \[1, 4093\]"),
        (np.ones((1, 0), int), np.array([1]), {}, ValueError, r"an empty prompt; at least one token is needed"),
        (np.ones((2, 8), int), np.array([8]), {}, ValueError, r"lengths has shape \(1,\): must be \[B = 2\]"),
        (np.ones((1, 8)), np.array([8]), {}, TypeError, r"tokens has dtype float32: must be integers"),
    ],
)
def test_bad_arrays_are_named(lm, tokens, lengths, options, error, message):
    generate_tokens = inspect.unwrap(tca_jax.generate_tokens)
    with pytest.raises(error, match=message):
        generate_tokens(lm, tokens, lengths, jax.random.key(0), **{"max_new_tokens": 3, **options})


def test_names_and_temperatures_compile_nothing(lm):
    prompt, options = random_prompt(9, 30), {"max_new_tokens": 30, "temperature": 0.5}
    tca_jax.generate(lm, prompt, **options)
    other = dataclasses.replace(lm, name="other")
    assert tca_jax.generate(other, prompt, **options | {"temperature": 0.9}, seed=3).stats.compile_seconds == 0.0


def test_text_needs_a_tokenizer(lm):
    out = tca_jax.generate(lm, random_prompt(9, 30), max_new_tokens=30)
    assert len(out.tokens[0]) == 30
    with pytest.raises(ValueError, match=r"without a tokenizer; use out.tokens"):
        _ = out.text
    with pytest.raises(ValueError, match="without a tokenizer"):
        tca_jax.stream(lm, [1, 2, 3])
