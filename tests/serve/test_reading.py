"""Documents are read a group of layers at a time: answers take steps in between, and while a group compiles."""

import dataclasses
import itertools
import threading

import pytest
from tiny import CONFIG, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.programs import Program
from tca_jax.serve import Engine, programs

LAYERS, PAGES = 3, 400
DOCUMENT = random_prompt(0, 101)
PARTS = ("read_first", "read_more", "read_last")
OPTIONS = {"max_new_tokens": 20, "stop_token_ids": ()}
LONG = {"max_new_tokens": 2000, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def lm():
    return with_candidates(tiny_lm(config=dataclasses.replace(CONFIG, num_layers=LAYERS)), [[0, 5], [9, 13], [14, 2]])


@pytest.fixture
def parts(monkeypatch):
    """Documents are read a layer at a time."""
    monkeypatch.setattr("tca_jax.serve.scheduler._PART_TOKENS", 1)
    return Parts(monkeypatch)


class Parts:
    """Programs of parts: callbacks before they compile and run, and the names of those that have run."""

    def __init__(self, monkeypatch):
        self.compiling = self.running = lambda name: None
        self.begun = []
        for name in {*PARTS, "read"}:
            monkeypatch.setattr(programs, name, WatchedProgram(self, name))


class WatchedProgram(Program):
    def __init__(self, parts, name):
        self.parts, self.name, self.program = parts, name, getattr(programs, name)

    def prepare(self, *args, **static):
        self.parts.compiling(self.name)
        executable, seconds = self.program.prepare(*args, **static)

        def run(*args):
            self.parts.begun.append(self.name)
            self.parts.running(self.name)
            return executable(*args)

        run.out_info = executable.out_info
        return run, seconds


def engine_of(lm):
    return Engine(lm, max_rows=2, pages=PAGES, answer_tokens=1100)


def wait(engine, holds):
    """Waits for something that the engine's thread brings about."""
    assert engine._loop.wait_until(lambda: bool(holds()), 120)


def free_pages(engine):
    return engine._documents.free.free


def test_answers_take_steps_between_parts(lm, parts):
    counts = []
    with engine_of(lm) as engine:
        other = engine.ask(None, [1, 2, 3], **LONG)
        wait(engine, lambda: other.tokens or other.ended)

        def compiling(name):
            before = len(other.tokens)
            wait(engine, lambda: len(other.tokens) > before)

        parts.compiling, parts.running = compiling, lambda name: counts.append(len(other.tokens))
        parts.begun.clear()
        id_ = engine.read(DOCUMENT)
        out = engine.ask(id_, [7, 8], **OPTIONS).result(120)
        assert not other.ended
        other.cancel()
    assert tuple(parts.begun) == PARTS
    assert all(earlier < later for earlier, later in itertools.pairwise(counts))
    context = tca_jax.prefill(lm, DOCUMENT)
    assert out.tokens == tca_jax.generate(lm, [[7, 8]], context=context, **OPTIONS).tokens[0]


def test_cancelled_prompts_are_read_no_further(lm, parts):
    go_on = threading.Event()
    parts.compiling = lambda name: name == "read_more" and go_on.wait(120)
    with engine_of(lm) as engine:
        stream = engine.ask(None, DOCUMENT, **OPTIONS)
        wait(engine, lambda: parts.begun)
        assert PAGES - free_pages(engine) == lm.cache_layout(1, 104).num_pages
        stream.cancel()
        assert engine.idle(120)  # nobody waits for the compiler
        go_on.set()
        assert parts.begun == ["read_first"]
        assert not engine._documents.all()
        assert free_pages(engine) == PAGES
        assert len(engine.ask(None, DOCUMENT, **OPTIONS).result(120).tokens) == OPTIONS["max_new_tokens"]


@pytest.mark.slow
def test_repeated_documents_are_read_at_once(lm, parts):
    with engine_of(lm.with_method("kvzip", share=0.4, chunk=32, block_size=8, window=16)) as engine:
        assert engine.wait(engine.read(DOCUMENT), 120).state == "device"
    assert parts.begun == ["read"]


def test_a_failed_part_fails_its_document(lm, parts):
    def running(name):
        if name == "read_more":
            raise MemoryError("no room for a layer")

    with engine_of(lm) as engine:
        other = engine.ask(None, [1, 2, 3], **OPTIONS)
        other.result(120)
        parts.running = running
        with pytest.raises(MemoryError, match="no room for a layer"):
            engine.wait(engine.read(DOCUMENT), 120)
        with pytest.raises(MemoryError, match="no room for a layer"):
            engine.ask(None, DOCUMENT, **OPTIONS).result(120)
        parts.running = lambda name: None
        assert engine.wait(engine.read(DOCUMENT), 120).state == "device"
        assert engine.idle(120)


def test_an_engine_closes_while_a_document_is_read(lm, parts):
    go_on = threading.Event()
    parts.compiling = lambda name: name == "read_more" and go_on.wait(120)
    engine = engine_of(lm)
    stream = engine.ask(None, DOCUMENT, **OPTIONS)
    wait(engine, lambda: parts.begun)
    engine.close()
    go_on.set()
    assert stream.result(0).finish_reason == "cancelled"
    assert "read_last" not in parts.begun
