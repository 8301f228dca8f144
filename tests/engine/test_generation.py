"""Generation: against a dense reference, batches, stopping, statistics, compilation counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, UNEQUAL, greedy_reference, random_prompt, with_candidates

import tca_jax
from tca_jax.engine import read, traced
from tca_jax.engine.prompts import bucket_length

QUICK = [(63, UNEQUAL), (63, None), (101, UNEQUAL)]


@pytest.mark.parametrize(
    ("length", "candidates", "kv"),
    [
        *((*case, None) for case in QUICK),
        *(pytest.param(*case, "fp8", marks=pytest.mark.integration) for case in ((15, None), (101, UNEQUAL))),
        *(
            pytest.param(length, candidates, None, marks=pytest.mark.slow)
            for length in (1, 63, 64, 101)
            for candidates in (None, UNEQUAL, [[0] * 2] * 2)
            if (length, candidates) not in QUICK
        ),
    ],
)
def test_greedy_tokens_equal_a_dense_reference(lm, length, candidates, kv):
    model = dataclasses.replace(lm, kv=kv)
    model = model if candidates is None else with_candidates(model, candidates)
    prompt = random_prompt(length, length)
    expected = greedy_reference(model, prompt, 36)  # long enough for several blocks to leave the window
    out = tca_jax.generate(model, prompt, max_new_tokens=36, stop_token_ids=())
    assert out.tokens == [expected]
    assert out.finish_reasons == ["length"]


def test_statistics_count_tokens_bytes_and_time(lm):
    prompts = [random_prompt(0, 100), random_prompt(1, 60)]
    stats, full = (
        tca_jax.generate(each, prompts, max_new_tokens=9).stats for each in (with_candidates(lm, [[0, 0]] * 2), lm)
    )
    assert (stats.prompt_tokens, stats.new_tokens) == ([100, 60], [9, 9])
    assert min(stats.prefill_seconds, stats.seconds_per_token) > 0
    # windows of 3 pages in 2 rows x 2 layers x 2 heads, and 18 pages for 8 to 18 kept tokens of each; float32
    assert stats.kv_cache_bytes == 2 * 4 * CONFIG.head_dim * 8 * (3 * 8 + 18)
    assert stats.kept_share < full.kept_share == 1.0
    assert full.kv_cache_bytes == full.full_kv_cache_bytes


@pytest.mark.integration
def test_numbers_of_one_bucket_compile_once(lm):
    """Lengths, new tokens, seeds, temperatures and names are no parts of programs."""
    model, before = with_candidates(lm, UNEQUAL), traced._generate_tokens._cache_size()
    for n in range(257, 277):
        tokens = np.ones((1, bucket_length(n)), np.int32)
        tca_jax.generate_tokens(model, tokens, np.array([n], np.int32), jax.random.key(0), max_new_tokens=3)
    assert traced._generate_tokens._cache_size() == before + 1
    options = {"temperature": 0.5, "stop_token_ids": (), "max_new_tokens": 250}
    assert tca_jax.generate(model, random_prompt(0, 257), **options).stats.compile_seconds > 0
    options |= {"temperature": 1.5, "max_new_tokens": 9, "seed": 7}
    other = dataclasses.replace(model, name="other")
    assert tca_jax.generate(other, random_prompt(0, 276), **options).stats.compile_seconds == 0


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
    arguments = jnp.array(prompts), jnp.array([120, 120], jnp.int32), jax.random.key(0)
    raw = tca_jax.generate_tokens(lm, *arguments, max_new_tokens=30, stop_tokens=(stop,))
    assert raw[0, first + 1 :].tolist() == [lm.pad_token_id] * (29 - first)


def test_prompts_in_chunks_answer_alike(lm, monkeypatch):
    prompts, options = [random_prompt(4, 150), random_prompt(5, 33)], {"max_new_tokens": 6, "stop_token_ids": ()}
    expected = tca_jax.generate(lm, prompts, **options)
    monkeypatch.setattr("tca_jax.models.decoder._CHUNK_ELEMENTS", 64 * CONFIG.intermediate_size)
    monkeypatch.setattr(read, "_ONE_PROGRAM", 0)
    sizes, run = [], read.Layers._call
    monkeypatch.setattr(read.Layers, "_call", lambda *args, **static: sizes.append(static) or run(*args, **static))
    assert tca_jax.generate(lm, prompts, **options).tokens == expected.tokens
    assert [static["size"] for static in sizes if "size" in static] == [64, 64, 16, 4, 4, 16, 16, 4]


@pytest.mark.parametrize("step", [3, 16, 64])
def test_chunks_hold_tokens_and_little_padding(step):
    for lengths in np.random.default_rng(0).integers(1, 300, (50, 2, 3)):
        columns = bucket_length(int(lengths.max()))
        sizes, chunks = read.chunks_of_tokens(lengths, 3 * columns, columns, step)
        used = (np.arange(columns) < lengths[..., None]).any(axis=0).ravel()
        places = np.concatenate([np.arange(start, start + size) for start, size in chunks])
        computed = np.bincount(places, minlength=used.size)
        assert {size for _, size in chunks} <= set(sizes)
        assert computed.max() == computed[used].min() == 1
        assert computed[~used].sum() <= 6 * (step // 16)  # at both ends of the padding of a row


def test_short_prompts_in_one_program_answer_alike(lm, monkeypatch):
    prompts, options = [random_prompt(4, 40), random_prompt(5, 33)], {"max_new_tokens": 6, "stop_token_ids": ()}
    monkeypatch.setattr(read, "_are_short", lambda *_: False)  # as on a CPU
    expected = tca_jax.generate(lm, prompts, **options)
    monkeypatch.setattr(read, "_are_short", lambda *_: True)  # as on a GPU
    calls = []
    monkeypatch.setattr(read.Layers, "begin", lambda *args, own=read.Layers.begin: calls.append(0) or own(*args))
    found = tca_jax.generate(lm, prompts, **options)
    assert found.tokens == expected.tokens
    assert found.stats.attended_share == expected.stats.attended_share == 1.0
    longer = tca_jax.generate(lm, prompts, **options | {"max_new_tokens": 90}).tokens
    assert ([row[:6] for row in longer], len(calls)) == (expected.tokens, 1)  # traced once
