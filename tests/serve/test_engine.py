"""An engine's answers are those of `generate`, whatever else is in the batch and wherever documents have been."""

import asyncio
import threading
import time

import numpy as np
import pytest
from tiny import CONFIG, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.errors import UserError
from tca_jax.serve import Engine

DOCUMENTS = [random_prompt(i, length) for i, length in enumerate((101, 77, 90))]
ROOM = 24  # of all answers, so that they share programs
OPTIONS = [
    {"stop_token_ids": (), "logprobs": 3},
    {"temperature": 0.8, "seed": 1, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "stop_token_ids": (3, 5)},
    {"repetition_penalty": 1.4, "temperature": 1.3, "stop_token_ids": (*range(1, 20),), "min_new_tokens": 6},
]


@pytest.fixture(
    scope="module", params=["tca", *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "adakv"))]
)
def lm(request):
    lm = tiny_lm()
    if request.param == "tca":
        return with_candidates(lm, [[0, 5], [9, 13]])
    if request.param == "full":
        return lm
    return lm.with_method("adakv", share=0.4, observation=16, block_size=8, window=16)


@pytest.fixture(scope="module")
def contexts(lm):
    return [tca_jax.prefill(lm, document) for document in DOCUMENTS]


@pytest.fixture(scope="module")
def engine(lm):
    with Engine(lm, max_rows=3, pages=400, answer_tokens=64) as engine:
        yield engine


def question(number):
    return random_prompt(100 + number, 1 + 5 * number % 8)


def test_answers_are_those_of_generate_whatever_else_is_in_the_batch(lm, contexts, engine):
    ids = [engine.read(document) for document in DOCUMENTS]
    asked = [(number % 4, question(number), OPTIONS[number % len(OPTIONS)]) for number in range(9)]
    lengths = [ROOM - 5 * (number % 3) for number in range(9)]
    streams = [
        engine.ask(None if of == 3 else ids[of], prompt, max_new_tokens=length, **options)
        for (of, prompt, options), length in zip(asked, lengths, strict=True)
    ]
    for (of, prompt, options), length, stream in zip(asked, lengths, streams, strict=True):
        out = stream.result(120)
        context = None if of == 3 else contexts[of]
        expected = tca_jax.generate(lm, [prompt], context=context, max_new_tokens=length, **options)
        assert (out.tokens, out.finish_reason) == (expected.tokens[0], expected.finish_reasons[0])
        if "logprobs" in options:
            np.testing.assert_allclose(out.logprobs, expected.logprobs[0], atol=1e-4)
            tokens = [[token for token, _ in place] for place in out.top_logprobs]
            assert tokens == [[token for token, _ in place] for place in expected.top_logprobs[0]]
    assert engine.idle(60)


def test_the_next_step_is_launched_before_one_is_taken_unless_it_needs_what_that_one_says(engine, monkeypatch):
    batch, under_way = engine._scheduler._batch, []
    arrived = batch._arrived

    def noted(said):
        under_way.append(len(batch.launched))
        return arrived(said)

    monkeypatch.setattr(batch, "_arrived", noted)
    for logprobs, most in ((False, 1), (1, 0)):
        under_way.clear()
        out = engine.ask(None, question(1), max_new_tokens=8, stop_token_ids=(), logprobs=logprobs).result(60)
        assert len(out.tokens) == 8
        assert max(under_way) == most
        assert under_way[-1] == 0  # nobody has a further token


def test_a_kept_answer_and_an_appended_text_are_documents(lm, contexts, engine):
    id_ = engine.read(DOCUMENTS[1])
    kept = engine.ask(id_, question(1), max_new_tokens=ROOM, stop_token_ids=(), keep=True).result(60)
    longer = engine.append(id_, random_prompt(7, 30))
    both = {
        kept.document: question(1) + kept.tokens[:-1],
        longer: random_prompt(7, 30),
    }
    for document, tokens in both.items():
        context = tca_jax.prefill(lm, [tokens], context=contexts[1])
        expected = tca_jax.generate(lm, [question(2)], context=context, max_new_tokens=ROOM, stop_token_ids=())
        out = engine.ask(document, question(2), max_new_tokens=ROOM, stop_token_ids=()).result(60)
        assert out.tokens == expected.tokens[0]
        assert engine.document(document).tokens == len(DOCUMENTS[1]) + len(tokens)
    again = engine.ask(id_, question(2), max_new_tokens=ROOM, stop_token_ids=()).result(60)
    expected = tca_jax.generate(lm, [question(2)], context=contexts[1], max_new_tokens=ROOM, stop_token_ids=())
    assert again.tokens == expected.tokens[0]  # what shares pages with a document leaves it as it was


def test_documents_leave_the_device_and_come_back_also_to_another_engine(lm, contexts, tmp_path):
    pages = lm.cache_layout(1, 112).num_pages + 1
    for host_memory in (2**30, 0):
        with Engine(
            lm, max_rows=2, pages=pages, answer_tokens=64, host_memory=host_memory, disk=tmp_path / str(host_memory)
        ) as engine:
            ids = [engine.read(document) for document in DOCUMENTS]
            for id_ in ids:
                engine.wait(id_, 60, stored=True)
            assert [each.state for each in engine.documents()].count("device") < 3
            for number in (0, 1, 2, 0):
                out = engine.ask(ids[number], question(number), max_new_tokens=ROOM, stop_token_ids=()).result(60)
                assert out.tokens == answer(lm, contexts[number], number)
    with Engine(lm, max_rows=2, pages=pages, answer_tokens=64, disk=tmp_path / "0") as engine:
        assert {each.id: (each.state, each.stored) for each in engine.documents()} == dict.fromkeys(ids, ("disk", True))
        out = engine.ask(ids[2], question(2), max_new_tokens=ROOM, stop_token_ids=()).result(60)
        assert out.tokens == answer(lm, contexts[2], 2)
        engine.forget(ids[2])
        with pytest.raises(UserError, match="there is none of this id"):
            engine.ask(ids[2], [1])
    with Engine(lm, max_rows=2, pages=pages, answer_tokens=64, disk=tmp_path / "0") as engine:
        assert {each.id for each in engine.documents()} == {*ids[:2]}


def answer(lm, context, number):
    out = tca_jax.generate(lm, [question(number)], context=context, max_new_tokens=ROOM, stop_token_ids=())
    return out.tokens[0]


def test_threads_and_tasks_may_ask_at_once_and_cancel(lm, contexts, engine):
    id_ = engine.read(DOCUMENTS[0])
    found = {}

    def ask(number):
        found[number] = engine.ask(id_, question(number), max_new_tokens=ROOM, stop_token_ids=()).result(60).tokens

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    cancelled = engine.ask(id_, question(9), max_new_tokens=150, stop_token_ids=())
    for thread in threads:
        thread.start()

    async def ask_too():
        out = await engine.ask(id_, question(5), max_new_tokens=ROOM, stop_token_ids=()).completion()
        return out.tokens

    while not cancelled.tokens:
        time.sleep(0.001)
    cancelled.cancel()
    found[5] = asyncio.run(ask_too())
    for thread in threads:
        thread.join()
    assert found == {number: answer(lm, contexts[0], number) for number in found}
    out = cancelled.result(60)
    assert out.finish_reason == "cancelled"
    assert len(out.tokens) < 150
    assert engine.idle(60)


def test_what_can_never_fit_is_refused_and_what_is_wrong_is_named(lm):
    with Engine(lm, max_rows=1, pages=8, answer_tokens=32) as engine:
        with pytest.raises(UserError, match=r"need .* pages: the engine holds 8"):
            engine.read(random_prompt(0, 3000))
        with pytest.raises(UserError, match="max_rows"):
            engine.ask(None, [1, 2], max_new_tokens=3000)
        with pytest.raises(UserError, match="document = 'doc-0': there is none"):
            engine.ask("doc-0", [1, 2])
        with pytest.raises(UserError, match=str(CONFIG.max_positions)):
            engine.ask(None, [1, 2], max_new_tokens=CONFIG.max_positions)
        with pytest.raises(UserError, match="sample = -1"):
            engine.ask(None, [1, 2], sample=-1)
    with pytest.raises(UserError, match="the engine is closed"):
        engine.read([1, 2])
    with pytest.raises(UserError, match="max_rows = 0"):
        Engine(lm, max_rows=0)


@pytest.mark.slow
def test_a_single_row_answers_as_generate_does(lm, contexts):
    with Engine(lm, max_rows=1, pages=200, answer_tokens=64) as engine:
        id_ = engine.read(DOCUMENTS[0])
        streams = [engine.ask(id_, question(i), max_new_tokens=ROOM, stop_token_ids=()) for i in (1, 2)]
        assert [s.result(60).tokens for s in streams] == [answer(lm, contexts[0], i) for i in (1, 2)]
