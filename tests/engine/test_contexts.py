"""Contexts: one document, many questions; equal to reading everything at once where nothing is dropped."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TCA, DenseReference, random_prompt, tiny_lm, with_candidates, write_checkpoint

import tca_jax
from tca_jax.engine import request as request_module
from tca_jax.engine.prompts import require_positions

DENSE = TCA.num_candidates
UNEQUAL = [[0, 6], [DENSE, 3]]
DOCUMENT, QUESTIONS = random_prompt(0, 101), [random_prompt(1, 21), random_prompt(2, 3), random_prompt(3, 12)]
OPTIONS = {"max_new_tokens": 30, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def full():
    return tiny_lm()


@pytest.fixture(scope="module")
def sparse(full):
    return with_candidates(full, UNEQUAL)


@pytest.fixture(scope="module")
def context(sparse):
    return tca_jax.prefill(sparse, DOCUMENT)


def reference(lm, document, appended, new_tokens):
    """Greedy answer to tokens that are fed one by one behind a document."""
    dense = DenseReference(lm, document)
    logits, tokens = dense.logits, list(document)
    for token in appended:
        logits = dense.step(token, len(tokens))
        tokens.append(token)
    for _ in range(new_tokens):
        tokens.append(int(np.argmax(logits)))
        logits = dense.step(tokens[-1], len(tokens) - 1)
    return tokens[-new_tokens:]


@pytest.mark.integration
def test_questions_equal_tokens_fed_one_by_one(sparse, context):
    out = tca_jax.generate(sparse, QUESTIONS, context=context, **OPTIONS)
    for question, tokens in zip(QUESTIONS, out.tokens, strict=True):
        assert tokens == reference(sparse, DOCUMENT, question, 30)
    assert out.stats.prompt_tokens == [21, 3, 12]
    assert out.stats.context_tokens == [101] * 3


@pytest.mark.integration
def test_full_attention_equals_one_long_prompt(full):
    context = tca_jax.prefill(full, random_prompt(4, 300))
    out = tca_jax.generate(full, QUESTIONS, context=context, logprobs=True, **OPTIONS)
    whole = [random_prompt(4, 300) + question for question in QUESTIONS]
    expected = tca_jax.generate(full, whole, logprobs=True, **OPTIONS)
    assert out.tokens == expected.tokens
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=2e-4)
    assert out.stats.kept_share == context.stats.kept_share == 1.0
    assert out.stats.kv_cache_bytes == out.stats.full_kv_cache_bytes
    assert context.stats.kv_cache_bytes == context.stats.full_kv_cache_bytes


@pytest.mark.integration
def test_questions_share_the_documents_pages(full, sparse):
    for lm in (full, sparse):
        context = tca_jax.prefill(lm, random_prompt(4, 300))
        # One new token allocates as much as the others of its bucket, and needs no decoding program.
        one, four = (tca_jax.generate(lm, QUESTIONS[:1] * n, context=context, max_new_tokens=1).stats for n in (1, 4))
        document = context.stats.kv_cache_bytes
        assert document == context.cache.k.nbytes + context.cache.v.nbytes
        assert four.kv_cache_bytes - document == 4 * (one.kv_cache_bytes - document)
        assert one.kept_share == pytest.approx(four.kept_share)


@pytest.mark.integration
def test_a_context_is_never_consumed(sparse, context, monkeypatch):
    states = []
    advance = request_module.Request.advance
    monkeypatch.setattr(
        request_module.Request, "advance", lambda self, state, n: states.append(state) or advance(self, state, n)
    )
    for _ in range(2):
        tca_jax.generate(sparse, QUESTIONS, context=context, **OPTIONS)
    assert not any(state.cache.k.shape == context.cache.k.shape for state in states)
    assert not any(x.is_deleted() for x in jax.tree.leaves(context) if isinstance(x, jax.Array))


@pytest.mark.integration
def test_appending_in_parts_is_appending_at_once(sparse, context):
    before = jax.tree.map(np.asarray, context)
    grown = context
    for part in (QUESTIONS[0], QUESTIONS[1], random_prompt(5, 40)):
        grown = tca_jax.prefill(sparse, part, context=grown)
    appended = QUESTIONS[0] + QUESTIONS[1] + random_prompt(5, 40)
    assert grown.token_ids() == DOCUMENT + appended
    assert grown.stats.tokens == [101 + 64]
    out = tca_jax.generate(sparse, QUESTIONS[2], context=grown, **OPTIONS)
    assert out.tokens == [reference(sparse, DOCUMENT, appended + QUESTIONS[2], 30)]
    jax.tree.map(np.testing.assert_array_equal, context, before)


@pytest.mark.integration
def test_a_batch_of_contexts_is_each_of_them(sparse):
    documents = [random_prompt(6, 77), random_prompt(7, 9), random_prompt(8, 64)]
    context = tca_jax.prefill(sparse, documents)
    assert context.batch == 3
    out = tca_jax.generate(sparse, QUESTIONS, context=context, **OPTIONS)
    for document, question, tokens in zip(documents, QUESTIONS, out.tokens, strict=True):
        assert tokens == reference(sparse, document, question, 30)
    grown = tca_jax.prefill(sparse, QUESTIONS, context=context)
    more = tca_jax.generate(sparse, [[5]] * 3, context=grown, **OPTIONS)
    for document, question, tokens in zip(documents, QUESTIONS, more.tokens, strict=True):
        assert tokens == reference(sparse, document, [*question, 5], 30)


@pytest.mark.integration
def test_samples_of_questions_share_the_document(sparse, context):
    options = {"temperature": 1.3, "seed": 5, **OPTIONS}
    samples = tca_jax.generate(sparse, QUESTIONS, context=context, num_samples=2, **options)
    rows = tca_jax.generate(sparse, [q for q in QUESTIONS for _ in range(2)], context=context, **options)
    assert samples.tokens == rows.tokens
    assert samples.stats.kv_cache_bytes == rows.stats.kv_cache_bytes


def test_repetition_penalty_sees_the_document(full):
    document, question = random_prompt(10, 25), random_prompt(11, 9)
    context = tca_jax.prefill(full, document)
    (out,) = tca_jax.generate(full, question, context=context, max_new_tokens=20, repetition_penalty=1e6).tokens
    assert len(set(out)) == len(out)
    assert not set(out) & set(document + question)


def test_the_same_shapes_compile_once(sparse, context):
    tca_jax.generate(sparse, QUESTIONS[1], context=context, **OPTIONS)
    other = tca_jax.prefill(sparse, random_prompt(9, 103))
    stats = tca_jax.generate(sparse, [5], context=other, **OPTIONS).stats  # to the end of a block, too
    assert stats.compile_seconds == other.stats.compile_seconds == 0.0


def test_a_context_is_a_pytree(context):
    leaves, structure = jax.tree.flatten(context)
    again = jax.tree.unflatten(structure, leaves)
    assert again.token_ids() == DOCUMENT
    assert jax.eval_shape(lambda c: c, context).tokens.shape == context.tokens.shape
    assert repr(context) == "Context(101 tokens, 'tiny' under 'tca')"


@pytest.mark.integration
@pytest.mark.parametrize(("window", "block_size", "question"), [(16, 8, 21), (12, 1, 33)])
def test_streaming_equals_one_long_prompt(full, window, block_size, question):
    lm = full.with_method("streaming", sinks=4, window=window, block_size=block_size)
    context, question = tca_jax.prefill(lm, DOCUMENT), random_prompt(1, question)
    out = tca_jax.generate(lm, question, context=context, **OPTIONS)
    whole = tca_jax.generate(lm, DOCUMENT + question, **OPTIONS)
    assert out.tokens == whole.tokens  # what streaming keeps does not depend on the queries


@pytest.mark.integration
def test_a_context_in_host_memory_answers_alike(sparse, context):
    away = context.to_host()
    assert all(isinstance(x, np.ndarray) for x in (away.cache.k, *away.cache.tables))
    expected = tca_jax.generate(sparse, QUESTIONS, context=context, **OPTIONS)
    assert tca_jax.generate(sparse, QUESTIONS, context=away, **OPTIONS).tokens == expected.tokens
    assert away.stats == context.stats
    back = away.on(sparse)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves((back.cache, back.tokens, back.lengths)))
    assert jax.tree.map(jnp.shape, back.cache) == jax.tree.map(jnp.shape, context.cache)
    assert tca_jax.generate(sparse, QUESTIONS, context=back, **OPTIONS).stats.compile_seconds == 0.0


@pytest.mark.integration
def test_documents_of_a_bucket_share_programs(sparse):
    documents = [tca_jax.prefill(sparse, random_prompt(tokens, tokens)) for tokens in (131, 139)]  # their pages run out
    longer = [tca_jax.prefill(sparse, QUESTIONS[0], context=document) for document in documents]
    assert longer[0].layout.kept_pages != documents[0].layout.kept_pages
    assert longer[0].layout == longer[1].layout
    assert longer[1].stats.compile_seconds == 0.0


# --- what is refused ------------------------------------------------------------------------------

generate, prefill = inspect.unwrap(tca_jax.generate), inspect.unwrap(tca_jax.prefill)


def test_contexts_of_other_models_are_refused(full, sparse, context):
    other = dataclasses.replace(with_candidates(tiny_lm(seed=1), UNEQUAL), name="other")
    for call in (generate, prefill):
        with pytest.raises(ValueError, match=r"context was made by model 'tiny', whose weights .* of 'other'"):
            call(other, [1, 2], context=context)
        with pytest.raises(ValueError, match=r"made under method 'tca', and 'tiny' runs under 'full'"):
            call(full, [1, 2], context=context)
        with pytest.raises(ValueError, match=r"method 'tca' with other options or budgets, and 'tiny' runs under"):
            call(with_candidates(full, [[0, 0], [0, 0]]), [1, 2], context=context)
        with pytest.raises(TypeError, match=r"context is of type str: must be a Context, from tca_jax.prefill"):
            call(sparse, [1, 2], context="context")


def test_another_number_of_prompts_than_rows_is_refused(sparse, context):
    two = tca_jax.prefill(sparse, [[1], [2]], context=context)
    with pytest.raises(ValueError, match=r"prompts has 3 entries: must have 2, one for each row of the context"):
        generate(sparse, QUESTIONS, context=two)


def test_positions_past_the_models_are_refused(full):
    require_positions("prompt", 50, 46, full, context_tokens=4000)  # all 4,096
    context = tca_jax.prefill(full, random_prompt(0, 4000))
    with pytest.raises(
        ValueError, match=r"prompts\[0\] has 50 tokens behind a context of 4000; with max_new_tokens = 47 that is 4097"
    ):
        generate(full, [1] * 50, context=context, max_new_tokens=47)
    with pytest.raises(ValueError, match=r"prompts\[0\] has 97 tokens behind a context of 4000, and tiny has 4096"):
        prefill(full, [1] * 97, context=context)
    with pytest.raises(ValueError, match=r"prompts\[0\] has 4097 tokens, and tiny has 4096 positions"):
        prefill(full, [1] * 4097)


# --- text and chats -------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tca_jax.load(write_checkpoint(tmp_path_factory.mktemp("contexts") / "tiny", chat_template=TEMPLATE))


def test_text_is_appended_without_a_token_before_it(written):
    class Starting:
        """A tokenizer that puts a token before text unless it is told not to."""

        def __init__(self, inner):
            self.inner = inner

        def __call__(self, text, add_special_tokens=True, **options):
            ids = self.inner(text, **options)["input_ids"]
            return {"input_ids": [95, *ids] if add_special_tokens else ids}

        def decode(self, *args, **options):
            return self.inner.decode(*args, **options)

    lm = dataclasses.replace(written, tokenizer=Starting(written.tokenizer))
    context = tca_jax.prefill(lm, "one two")
    grown = tca_jax.prefill(lm, " three", context=context)
    assert grown.token_ids() == lm.tokenizer("one two three")["input_ids"]
    assert grown.token_ids()[0] == 95


def test_a_chat_goes_on_from_what_the_context_holds(written):
    first = [{"role": "user", "content": "hello"}]
    context = tca_jax.prefill(written, first)
    said = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why"}]
    options = {"max_new_tokens": 5, "stop_token_ids": ()}
    out = tca_jax.generate(written, said, context=context, **options)
    assert out.stats.prompt_tokens == [len("yes<user>why<assistant>")]
    with pytest.raises(ValueError, match=r"prompts\[0\] is a chat that does not continue the context"):
        generate(written, [{"role": "user", "content": "why"}], context=context)


@pytest.mark.integration
def test_nan_behind_a_context_names_its_weight(sparse, context):
    flat = jax.tree.map(lambda x: x, sparse.params)
    broken = dataclasses.replace(sparse, params=jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), flat))
    forged = dataclasses.replace(
        context, identity=dataclasses.replace(context.identity, fingerprint=broken.fingerprint)
    )
    with pytest.raises(ValueError, match=r"tiny computes NaN or infinity for prompts\[0\]: the weight"):
        generate(broken, QUESTIONS[0], context=forged, max_new_tokens=2)
