"""An engine's answers are those of generate, whatever is in the batch and while documents are read in parts."""

import dataclasses
import functools
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of
from serving import Watched, question
from tiny import CONFIG, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.engine import extend, read
from tca_jax.errors import UserError
from tca_jax.methods.worth import ReadSettings, WorthSettings, by_worth
from tca_jax.serve import Engine
from tca_jax.serve.batch import Batch
from tca_jax.serve.pages import Allocator

DOCUMENTS = [random_prompt(i, length) for i, length in enumerate((101, 77, 90))]
ROOM = 24  # of all answers, so that they share programs
NEVER = {"stop_token_ids": ()}
OPTIONS = [
    {**NEVER, "logprobs": 3},
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


def test_answers_equal_generate_in_any_batch(lm, contexts, engine):
    ids = [engine.read(document) for document in DOCUMENTS]
    asked = [(number % 4, question(number), OPTIONS[number % len(OPTIONS)]) for number in range(9)]
    lengths = [ROOM - 5 * (number % 3) for number in range(9)]
    streams = [
        engine.ask(None if of == 3 else ids[of], prompt, max_new_tokens=length, **options)
        for (of, prompt, options), length in zip(asked, lengths, strict=True)
    ]
    for (of, prompt, options), length, stream in zip(asked, lengths, streams, strict=True):
        out, context = stream.result(120), None if of == 3 else contexts[of]
        own = tca_jax.generate(lm, [prompt], context=context, max_new_tokens=length, **options)
        assert (out.tokens, out.finish_reason) == (own.tokens[0], own.finish_reasons[0])
        if "logprobs" in options:
            np.testing.assert_allclose(out.logprobs, own.logprobs[0], atol=1e-4)
            tokens = [[token for token, _ in place] for place in out.top_logprobs]
            assert tokens == [[token for token, _ in place] for place in own.top_logprobs[0]]
    assert engine.idle(60)


def test_impossible_requests_are_refused(lm):
    with Engine(lm, max_rows=1, pages=8, answer_tokens=32) as engine:
        for message, call in (
            (r"need .* pages: the engine holds 8", lambda: engine.read(random_prompt(0, 3000))),
            ("max_rows", lambda: engine.ask(None, [1, 2], max_new_tokens=3000)),
            ("unknown document 'doc-0'", lambda: engine.ask("doc-0", [1, 2])),
            (str(CONFIG.max_positions), lambda: engine.ask(None, [1, 2], max_new_tokens=CONFIG.max_positions)),
            ("sample = -1", lambda: engine.ask(None, [1, 2], sample=-1)),
            ("max_rows = 0", lambda: Engine(lm, max_rows=0)),
        ):
            with pytest.raises(UserError, match=message):
                call()
    with pytest.raises(UserError, match="the engine is closed"):
        engine.read([1, 2])
    with pytest.raises(UserError, match="2 devices along 'data'"):
        Engine(tca_jax.LM.from_decoder(tiny_lm().decoder, mesh=mesh_of((2, 1))), pages=8)


def test_documents_of_a_method_that_repeats_them():
    lm, document = tca_jax.load("recall-tiny").with_method("kvzip"), random_prompt(0, 700)
    with Engine(lm, max_rows=1, pages=400) as engine:
        out = engine.ask(engine.read(document), [70, 71], max_new_tokens=8, **NEVER).result(120)
    context = tca_jax.prefill(lm, document)
    assert out.tokens == tca_jax.generate(lm, [[70, 71]], context=context, max_new_tokens=8, **NEVER).tokens[0]


@pytest.mark.parametrize("is_slow", [False, True])
def test_answers_by_scored_tokens_equal_generate(monkeypatch, is_slow):
    """Evicted tokens leave means: in documents, questions of several blocks, answers, and what is asked next."""
    fed = []  # blocks by one program, as where calls are slow and a thread has compiled it
    monkeypatch.setattr(extend, "_calls_are_slow", lambda _: is_slow)
    monkeypatch.setattr(extend, "ready", lambda started: fed.append(0) or started.result())
    monkeypatch.setattr("tca_jax.serve.scheduler._PART_SECONDS", 60)  # the blocks of a question share a round
    layers = CONFIG.num_layers
    maps = np.random.default_rng(0).normal(size=(layers, CONFIG.num_kv_heads, CONFIG.hidden_size + 1))
    each = jnp.ones(layers)
    read_settings = ReadSettings(jnp.inf * each, jnp.inf * each, each > 0)
    settings = WorthSettings(jnp.asarray(maps, jnp.float32), 0.5 * each, read_settings, each)
    lm = dataclasses.replace(tiny_lm().with_method(by_worth()), settings=settings)
    document, asked, options = random_prompt(0, 700), random_prompt(1, 300), {"max_new_tokens": 150, **NEVER}
    context = tca_jax.prefill(lm, document)
    with Engine(lm, max_rows=2, pages=200, answer_tokens=500) as engine:
        id_ = engine.read(document)
        questions = (asked, 9), (asked[:5], 2), ([7], 1)  # with log-probabilities of as many tokens
        streams = [engine.ask(id_, tokens, keep=True, logprobs=n, **options) for tokens, n in questions]
        outs = [stream.result(120) for stream in streams]
        for (tokens, n), out in zip(questions, outs, strict=True):
            own = tca_jax.generate(lm, [tokens], context=context, logprobs=n, **options)
            assert out.tokens == own.tokens[0]
            np.testing.assert_allclose(out.top_logprobs, own.top_logprobs[0], atol=1e-4)
        turn = tca_jax.prefill(lm, [[*asked, *outs[0].tokens[:-1]]], context=context)
        again = engine.ask(outs[0].document, [9], **options).result(120)
        assert again.tokens == tca_jax.generate(lm, [[9]], context=turn, **options).tokens[0]
        assert engine.idle(60)
        assert engine.answer_pages.free == engine.answer_pages.total
    assert bool(fed) == is_slow


# Meshes


@pytest.mark.parametrize("part_seconds", [pytest.param(60, marks=pytest.mark.slow), 0])
def test_mesh_answers_equal_one_device(tmp_path, monkeypatch, part_seconds):
    monkeypatch.setattr("tca_jax.serve.scheduler._PART_SECONDS", part_seconds)
    candidates, options = [[0, 5], [9, 13], [14, 2]], {"max_new_tokens": 20, **NEVER}
    lm = tiny_lm(config=dataclasses.replace(CONFIG, num_layers=len(candidates)))
    on_two = tca_jax.LM.from_decoder(lm.decoder, name="tiny", mesh=mesh_of((1, 2)))
    one, two = (with_candidates(each, candidates) for each in (lm, on_two))
    sizes = {"max_rows": 2, "pages": 2 * two.cache_layout(1, 112).num_pages - 1, "answer_tokens": 64}
    with Engine(two, disk=tmp_path, **sizes) as engine:
        ids = [engine.read(document) for document in DOCUMENTS[:2]]
        for id_ in ids:
            engine.wait(id_, 120, stored=True)
        for number in (0, 1, 0):
            context = tca_jax.prefill(one, DOCUMENTS[number])
            kept = engine.ask(ids[number], [3, 4, 5], keep=True, **options).result(120)
            assert kept.tokens == tca_jax.generate(one, [[3, 4, 5]], context=context, **options).tokens[0]
            turn = tca_jax.prefill(one, [[3, 4, 5, *kept.tokens[:-1]]], context=context)
            out = engine.ask(kept.document, [7], **options).result(120)
            assert out.tokens == tca_jax.generate(one, [[7]], context=turn, **options).tokens[0]
    with Engine(two, disk=tmp_path, **sizes) as engine:
        assert engine.ask(ids[0], [3, 4, 5], **options).result(120).tokens == kept.tokens
    with Engine(one, disk=tmp_path, **sizes) as engine:
        assert not engine.documents()  # their heads are elsewhere


LAYERS, PAGES = 3, 400
DOCUMENT = random_prompt(0, 101)
BEGIN, LAYER, AFTER, END = PARTS = ("begin_program", "attend_program", "after_program", "end_program")  # of reading
ANSWER = {"max_new_tokens": 20, "stop_token_ids": ()}
LONG = {"max_new_tokens": 2000, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def layered():
    return with_candidates(tiny_lm(config=dataclasses.replace(CONFIG, num_layers=LAYERS)), [[0, 5], [9, 13], [14, 2]])


@pytest.fixture
def parts(monkeypatch):
    """Documents are read a layer at a time."""
    monkeypatch.setattr("tca_jax.serve.scheduler._PART_SECONDS", 0)
    return Parts(monkeypatch)


class Parts:
    """Programs of parts: callbacks before they compile and run, and the names of those that have run."""

    def __init__(self, monkeypatch):
        self.compiling = self.running = lambda name: None
        self.begun = []
        for name in PARTS:
            hooks = lambda name=name: self.compiling(name), functools.partial(self._run, name)
            monkeypatch.setattr(read, name, Watched(getattr(read, name), *hooks))

    def _run(self, name, *args):
        self.begun.append(name)
        self.running(name)


def engine_of(layered):
    return Engine(layered, max_rows=2, pages=PAGES, answer_tokens=1100)


def wait(engine, holds):
    """Waits for something that the engine's thread brings about."""
    assert engine._wait_until(lambda: bool(holds()), 120)


def free_pages(engine):
    return engine.document_pages.free


def test_answers_take_steps_between_parts(layered, parts):
    counts = []
    with engine_of(layered) as engine:
        other = engine.ask(None, [1, 2, 3], **LONG)
        wait(engine, lambda: other.tokens or other.ended)

        def compiling(name):
            before = len(other.tokens)
            wait(engine, lambda: len(other.tokens) > before)

        def running(name):
            if name == LAYER:
                counts.append(len(other.tokens))

        parts.compiling, parts.running = compiling, running
        parts.begun.clear()
        out = engine.ask(engine.read(DOCUMENT), [7, 8], **ANSWER).result(120)
        assert not other.ended
        other.cancel()
    assert parts.begun == [BEGIN, *[LAYER, AFTER] * (LAYERS - 1), LAYER, END]
    assert all(earlier < later for earlier, later in itertools.pairwise(counts))
    parts.compiling = parts.running = lambda name: None
    context = tca_jax.prefill(layered, DOCUMENT)
    assert out.tokens == tca_jax.generate(layered, [[7, 8]], context=context, **ANSWER).tokens[0]


def test_short_prompts_and_a_long_document_take_turns(layered, parts, monkeypatch):
    monkeypatch.setattr("tca_jax.serve.scheduler._TOGETHER_TOKENS", 64)
    with engine_of(layered) as engine:
        engine._post(functools.partial(time.sleep, 0.5))  # so that both come in one round
        id_, short = engine.read(DOCUMENT), engine.ask(None, DOCUMENT[:9], **ANSWER)
        outs = [each.result(120).tokens for each in (short, engine.ask(id_, [7, 8], **ANSWER))]
    assert parts.begun[: parts.begun.index(END)].count(BEGIN) == 2
    context = tca_jax.prefill(layered, DOCUMENT)
    own = [([7, 8], context), (DOCUMENT[:9], None)]
    assert outs[::-1] == [tca_jax.generate(layered, [x], context=of, **ANSWER).tokens[0] for x, of in own]


def test_answers_take_steps_between_questions(layered, parts, monkeypatch):
    monkeypatch.setattr("tca_jax.engine.extend._PASS_TOKENS", 8)
    fed, own, wait_for = [], Batch.feed_next, Batch.wait
    monkeypatch.setattr(Batch, "feed_next", lambda batch, each: (fed.append(len(each.new)), own(batch, each)))
    monkeypatch.setattr(Batch, "wait", lambda batch: (fed.append(0), wait_for(batch))[1])
    with Engine(layered, max_rows=4, pages=PAGES, answer_tokens=1100) as engine, ThreadPoolExecutor(3) as pool:
        id_ = engine.read(DOCUMENT)
        other = engine.ask(id_, [1], **LONG)
        wait(engine, lambda: other.tokens or other.ended)
        engine._post(functools.partial(time.sleep, 0.5))  # so that the questions come in one round
        list(pool.map(lambda size: engine.ask(id_, [3] * size, **ANSWER).result(120), (40, 2, 2)))
        other.cancel()
    assert not any(piece and after for piece, after in itertools.pairwise(fed))
    _, *pieces = filter(None, fed)
    assert [*sorted(pieces[:3]), *set(pieces[3:])] == [2, 2, 40, 40]  # the long question lets the short ones pass


def test_cancelled_prompts_are_read_no_further(layered, parts):
    compiling, go_on = threading.Event(), threading.Event()
    parts.compiling = lambda name: name == LAYER and (compiling.set(), go_on.wait(120))
    with engine_of(layered) as engine:
        stream = engine.ask(None, DOCUMENT, **ANSWER)
        assert compiling.wait(120)
        assert PAGES - free_pages(engine) == layered.cache_layout(1, 104).num_pages
        stream.cancel()
        assert engine.idle(120)  # no thread waits for the compiler
        go_on.set()
        assert not parts.begun
        assert not engine._documents.all()
        assert free_pages(engine) == PAGES
        assert len(engine.ask(None, DOCUMENT, **ANSWER).result(120).tokens) == ANSWER["max_new_tokens"]


def test_pages_have_uses():
    allocator = Allocator(4, devices=2)
    first = allocator.take([3, 1])
    shared = [numbers[:1] for numbers in first]
    allocator.share(shared)
    allocator.release(first)
    assert allocator.free == 3
    with pytest.raises(ValueError, match="4 pages are needed, 3 of 4 are free"):
        allocator.take(4)
    allocator.release(shared)
    assert [sorted(numbers) for numbers in allocator.take(4)] == [[0, 1, 2, 3]] * 2
