"""Contexts: one document, many questions; equal to reading everything at once where nothing is dropped; saved."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.engine import extend
from tca_jax.pallas_kernels.kv import CODES, empty, encode

DOCUMENT, QUESTIONS = random_prompt(0, 101), [random_prompt(1, 21), random_prompt(2, 3), random_prompt(3, 12)]
OPTIONS = {"max_new_tokens": 30, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def full():
    return tiny_lm()


@pytest.fixture(scope="module")
def sparse(full):
    return with_candidates(full)


@pytest.fixture(scope="module")
def context(sparse):
    return tca_jax.prefill(sparse, DOCUMENT)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("method", "options", "tokens", "piece"),
    [
        ("full", {}, 12, 2048),
        ("streaming", {"sinks": 4, "window": 16, "block_size": 8}, 43, 16),  # what it keeps does not depend on queries
        ("streaming", {"sinks": 4, "window": 12, "block_size": 1}, 33, 2048),
    ],
)
def test_contexts_equal_one_long_prompt(full, method, options, tokens, piece, monkeypatch):
    monkeypatch.setattr(extend, "_PASS_TOKENS", piece)
    lm, question = full.with_method(method, **options), random_prompt(1, tokens)
    context = tca_jax.prefill(lm, DOCUMENT)
    out, whole = (
        tca_jax.generate(lm, prompt, logprobs=True, context=over, **OPTIONS)
        for prompt, over in ((question, context), (DOCUMENT + question, None))
    )
    assert out.tokens == whole.tokens
    np.testing.assert_allclose(out.logprobs, whole.logprobs, atol=2e-4)
    assert (out.stats.prompt_tokens, out.stats.context_tokens) == ([tokens], [101])
    if method == "full":
        assert out.stats.kept_share == context.stats.kept_share == 1.0
        assert out.stats.kv_cache_bytes == out.stats.full_kv_cache_bytes
        assert context.stats.kv_cache_bytes == context.stats.full_kv_cache_bytes


@pytest.mark.integration
@pytest.mark.parametrize("over", ["nothing", "a context"])
def test_samples_are_rows_of_one_prompt(sparse, context, over):
    options = {"temperature": 1.3, "seed": 5, "context": None if over == "nothing" else context, **OPTIONS}
    samples = tca_jax.generate(sparse, QUESTIONS[:2], num_samples=3, **options)
    rows = tca_jax.generate(sparse, [question for question in QUESTIONS[:2] for _ in range(3)], **options)
    assert samples.tokens == rows.tokens
    assert len({tuple(tokens) for tokens in samples.tokens[:3]}) == 3
    assert samples.stats.prompt_tokens == [21, 3]
    assert samples.stats.kept_share == pytest.approx(rows.stats.kept_share)
    other = tca_jax.generate(sparse, QUESTIONS[:2], num_samples=3, **options | {"seed": 6})
    assert other.tokens != samples.tokens


@pytest.mark.parametrize("document", [None, random_prompt(10, 25)])
def test_repetition_penalty_sees_all_tokens(full, document):
    context, question = document and tca_jax.prefill(full, document), random_prompt(11, 9)
    (out,) = tca_jax.generate(full, question, context=context, max_new_tokens=30, repetition_penalty=1e6).tokens
    assert len(set(out)) == len(out)
    assert not set(out) & {*(document or ()), *question}


@pytest.mark.integration
def test_questions_share_the_documents_pages(full, sparse):
    for lm in (full, sparse):
        context = tca_jax.prefill(lm, random_prompt(4, 300))
        # One new token allocates as much as the others of its bucket, and needs no decoding program.
        one, four = (tca_jax.generate(lm, QUESTIONS[:1] * n, context=context, max_new_tokens=1).stats for n in (1, 4))
        document = context.stats.kv_cache_bytes
        assert document <= context.num_bytes
        assert document <= one.kv_cache_bytes < four.kv_cache_bytes < 4 * document
        if lm is full:
            assert [four.kv_cache_bytes, one.kv_cache_bytes] == [each.full_kv_cache_bytes for each in (four, one)]
        assert one.kept_share == pytest.approx(four.kept_share)


@pytest.mark.integration
def test_a_context_in_host_memory_answers_alike(sparse, context):
    away = context.to_host()
    assert all(isinstance(x, np.ndarray) for x in (away.rows.k, away.rows.pages))
    expected = tca_jax.generate(sparse, QUESTIONS, context=context, **OPTIONS)
    assert tca_jax.generate(sparse, QUESTIONS, context=away, **OPTIONS).tokens == expected.tokens
    assert away.stats == context.stats
    back = away.on(sparse)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves((back.rows, back.tokens, back.lengths)))
    assert jax.tree.map(np.shape, back.rows) == jax.tree.map(np.shape, context.rows)
    assert tca_jax.generate(sparse, QUESTIONS, context=back, **OPTIONS).stats.compile_seconds == 0.0


SAVED = Path(__file__).parent / "saved_context_v4"  # of format 4


@pytest.fixture(scope="module")
def stored() -> tca_jax.Context:
    return tca_jax.Context.load(SAVED)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, CODES])
def test_a_context_comes_back_bit_for_bit(stored, tmp_path, dtype):
    k, v = (encode(jnp.asarray(x), empty(x.shape, dtype)) for x in (stored.rows.k, stored.rows.v))
    saved = dataclasses.replace(stored, rows=dataclasses.replace(stored.rows, k=k, v=v))
    saved.save(tmp_path)
    loaded = tca_jax.Context.load(tmp_path)
    assert (loaded.identity, loaded.window, loaded.shards) == (stored.identity, stored.window, None)
    for mine, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(saved), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert loaded.rows.k.dtype == dtype


@pytest.mark.integration
def test_a_context_of_format_4_answers_alike(stored):
    lm = with_candidates(tiny_lm())
    fresh = tca_jax.prefill(lm, random_prompt(0, 60))
    loaded = dataclasses.replace(
        stored, identity=fresh.identity
    )  # weights drawn elsewhere may differ in their last bits
    out, expected = (tca_jax.generate(lm, [1, 2], context=c, max_new_tokens=8, logprobs=True) for c in (loaded, fresh))
    assert out.tokens == expected.tokens
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format_version=5), r"format_version = 5: .* reads 4; read the document again"),
        (lambda m: m.pop("format_version"), r"format_version = None"),
        (lambda m: m.pop("window"), r"damaged, or of another version of tca_jax: 'window'"),
        (lambda m: m["identity"].update(colour=1), r"damaged, or of another version of tca_jax: .*colour"),
        (lambda m: m["identity"].pop("config"), r"damaged, or of another version of tca_jax: 'config'"),
    ],
)
def test_damaged_and_newer_contexts_are_refused(tmp_path, change, message):
    shutil.copytree(SAVED, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "context_0" / "metadata" / "metadata"
    metadata = json.loads(file.read_text())
    change(metadata)
    file.write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=f"{tmp_path}/context_0: {message}"):
        tca_jax.Context.load(tmp_path)
