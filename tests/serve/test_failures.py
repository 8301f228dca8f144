"""What fails in an engine fails what it concerns: nobody waits for ever, no page leaks, no document is lost."""

import asyncio
import concurrent.futures
import contextlib
import errno
import json
import os
import shutil

import httpx
import jax
import numpy as np
import pytest
from serving import Watched
from tiny import random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.engine import extend, read
from tca_jax.errors import UserError
from tca_jax.serve import Engine, documents
from tca_jax.serve import pages as serve_pages
from tca_jax.serve.server import Server, Settings
from tca_jax.serve.streams import Stream

SECONDS = 120  # that nothing here takes: what waits for ever fails
NOT_FINITE = 96  # the token whose embedding is NaN


def prompt_of(seed, length):
    return [min(token, NOT_FINITE - 1) for token in random_prompt(seed, length)]


A, B, C = (prompt_of(seed, length) for seed, length in enumerate((45, 40, 42)))
QUESTION, MORE = [3, 4, 5], prompt_of(7, 9)
TOKENS = 10
OPTIONS = {"max_new_tokens": TOKENS, "stop_token_ids": ()}
SIZES = {"max_rows": 2, "answer_tokens": 64}


@pytest.fixture(scope="module")
def lm():
    lm = tiny_lm()
    embedding = lm.params["embedding"]
    embedding[...] = embedding[...].at[NOT_FINITE].set(np.nan)
    return with_candidates(lm, [[0, 5], [9, 13]])


@pytest.fixture(scope="module")
def pages(lm):
    """Pages that the longest document may need."""
    return lm.cache_layout(1, 48).num_pages


@pytest.fixture(scope="module")
def expected(lm):
    """What `generate` answers to the question behind a document that was read in parts."""
    known = {}

    def answer(*parts):
        key = tuple(map(tuple, parts))
        if key not in known:
            context = tca_jax.prefill(lm, parts[0]) if parts else None
            for part in parts[1:]:
                context = tca_jax.prefill(lm, [part], context=context)
            known[key] = tca_jax.generate(lm, [QUESTION], context=context, **OPTIONS).tokens[0]
        return known[key]

    return answer


@contextlib.contextmanager
def engine_of(lm, pages, **options):
    """An engine that is idle in the end, and whose pages are all given back."""
    with Engine(lm, pages=pages, **{**SIZES, **options}) as engine:
        yield engine
        assert engine.idle(SECONDS)
        assert engine.answer_pages.free == engine.answer_pages.total
        for document in engine.documents():
            engine.forget(document.id)
        engine._post(lambda: engine._documents.make_room(engine.document_pages.total)).result()  # prompts leave
        assert engine.document_pages.free == engine.document_pages.total


def fails_once(program, consumed):
    """The program, which fails at its first call and has consumed what was given to it then."""

    def running(*given):
        if not watched.failed:
            watched.failed = True
            for x in jax.tree.leaves([given[place] for place in consumed]):
                x.delete()
            raise RuntimeError("out of memory")

    watched = Watched(program, running=running)
    watched.failed = False
    return watched


def ends(stream):
    """The tokens of an answer, or how it failed."""
    try:
        return stream.result(SECONDS).tokens
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("module", "name", "consumed"),
    [
        (read, "begin_program", ()),
        (read, "attend_program", (6,)),
        (serve_pages, "add", ()),
        (serve_pages, "add", (1,)),
        (extend, "_feed_program", (3,)),
        (serve_pages, "admit", (1,)),
        (serve_pages, "step", ()),
        (serve_pages, "step", (1,)),
        (serve_pages, "row", ()),
        (serve_pages, "put", (1,)),
    ],
)
def test_failed_programs_fail_their_answers_alone(lm, pages, expected, monkeypatch, module, name, consumed):
    with engine_of(lm, 3 * pages) as engine:
        document = engine.read(A)
        engine.wait(document, SECONDS)
        failing = fails_once(getattr(module, name), consumed)
        monkeypatch.setattr(module, name, failing)
        for again in (False, True):
            streams = [engine.ask(each, QUESTION, **OPTIONS) for each in (document, document, None)]
            keeping = engine.ask(document, QUESTION, keep=True, **OPTIONS)
            outs = [ends(each) for each in [*streams, keeping]]
            right = [expected(A), expected(A), expected(), expected(A)]
            for out, tokens in zip(outs, right, strict=True):
                assert out == tokens or (out == "out of memory" and not again)
            assert again or any(out == "out of memory" for out in outs)
            assert failing.failed
        following = engine.ask(keeping.document, QUESTION, **OPTIONS).result(SECONDS)
        assert following.tokens == expected(A, QUESTION + right[0][:-1])


def test_lost_documents_are_read_again_in_parts(lm, pages, expected, monkeypatch):
    with engine_of(lm, 3 * pages) as engine:
        longer = engine.append(engine.read(A), MORE)
        engine.wait(longer, SECONDS)
        monkeypatch.setattr(read, "attend_program", fails_once(read.attend_program, (6,)))
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.wait(engine.read(B), SECONDS)
        assert engine.ask(longer, QUESTION, **OPTIONS).result(SECONDS).tokens == expected(A, MORE)
        assert engine.wait(engine.read(B), SECONDS).state == "device"  # what failed may be read again


def test_infinite_logits_fail_their_request_alone(lm, pages, expected):
    bad = [*A[:20], NOT_FINITE, *A[21:]]
    with engine_of(lm, 3 * pages) as engine:
        documents = engine.read(bad), engine.read(A)
        assert engine.wait(documents[1], SECONDS).state == "device"
        right = engine.ask(documents[1], QUESTION, **OPTIONS)
        wrong = [
            engine.ask(documents[1], [NOT_FINITE], **OPTIONS),
            engine.ask(None, [3, NOT_FINITE], **OPTIONS),
            engine.ask(documents[0], QUESTION, **OPTIONS),
        ]
        longer = engine.append(documents[1], [NOT_FINITE])
        context = tca_jax.prefill(lm, A)
        with pytest.raises(UserError) as of_generate:
            tca_jax.generate(lm, [[NOT_FINITE]], context=context, **OPTIONS)
        with pytest.raises(UserError) as of_engine:
            wrong[0].result(SECONDS)
        assert str(of_engine.value) == str(of_generate.value)
        for fails in (lambda: wrong[1].result(SECONDS), lambda: wrong[2].result(SECONDS), lambda: engine.wait(longer)):
            with pytest.raises(UserError, match="NaN or infinity"):
                fails()
        assert right.result(SECONDS).tokens == expected(A)
        states = [engine.document(each).state for each in (*documents, longer)]
        assert states == ["failed", "device", "failed"]


def test_damaged_documents_fail_until_uploaded_again(lm, pages, expected, tmp_path, caplog):
    texts, sizes = (A, B, C), {"pages": 3 * pages, "disk": tmp_path, **SIZES}
    with Engine(lm, **sizes) as engine:
        ids = [engine.read(each) for each in texts]
        for each in ids:
            engine.wait(each, SECONDS, stored=True)
    fields = json.loads((tmp_path / ids[2] / "document.json").read_text())
    bad = ["", "{", "[" * 100_000, "{}", json.dumps({**fields, "tokens": ["a"]}), json.dumps({**fields, "parts": [1]})]
    *damaged, renamed, left, other = (tmp_path / f"doc-{number:024x}" for number in range(len(bad) + 3))
    for folder, text in zip(damaged, bad, strict=True):
        folder.mkdir()
        (folder / "document.json").write_text(text)
    shutil.copytree(tmp_path / ids[2], renamed)
    (left / "context").mkdir(parents=True)
    users = [tmp_path / "doc-drafts" / "thesis.txt", other / "notes.txt"]
    for file in users:
        file.parent.mkdir()
        file.touch()
    with Engine(lm, **sizes) as engine:
        assert {each.id: each.stored for each in engine.documents()} == dict.fromkeys(ids, True)
        assert [left.exists(), *(file.exists() for file in users)] == [False, True, True]
        assert len(caplog.records) == len(bad)
        for file in (tmp_path / ids[0] / "context").rglob("*"):
            if file.is_file() and file.stat().st_size > 100:
                os.truncate(file, file.stat().st_size // 2)
        shutil.rmtree(tmp_path / ids[1])
        for id_, tokens in zip(ids[:2], texts, strict=False):
            caplog.clear()
            with pytest.raises(UserError, match="damaged on disk; upload it again"):
                engine.ask(id_, QUESTION, **OPTIONS).result(SECONDS)
            assert [each.getMessage().split(":")[0] for each in caplog.records] == [f"ignoring damaged document {id_}"]
            assert not engine.document(id_).stored
            assert engine.read(tokens) == id_
            assert engine.wait(id_, SECONDS, stored=True).stored
    with Engine(lm, **sizes) as engine:
        longer = engine.append(ids[0], MORE)  # nothing else was read here
        assert engine.ask(longer, QUESTION, **OPTIONS).result(SECONDS).tokens == expected(A, MORE)
        for id_, tokens in zip(ids, texts, strict=True):
            assert engine.ask(id_, QUESTION, **OPTIONS).result(SECONDS).tokens == expected(tokens)


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disks_leave_documents_where_they_are(lm, pages, expected, tmp_path, monkeypatch):
    bounded = engine_of(lm, 3 * pages, disk=tmp_path / "bounded", disk_bytes=1)
    with bounded as engine, pytest.raises(OSError, match="does not fit"):
        engine.wait(engine.read(A), SECONDS, stored=True)
    with engine_of(lm, 3 * pages, disk=tmp_path / "full", host_memory=0) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(tca_jax.Context, "save", full)
            document = engine.read(A)
            with pytest.raises(OSError, match="No space left"):
                engine.wait(document, SECONDS, stored=True)
        info = engine.document(document)
        assert (info.state, info.stored, "No space left" in str(info.problem)) == ("device", False, True)
        assert engine.ask(document, QUESTION, **OPTIONS).result(SECONDS).tokens == expected(A)
        other = engine.read(B)
        assert engine.wait(other, SECONDS, stored=True).stored
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", full)
            with pytest.raises(OSError, match="No space left"):
                engine.forget(other)
        assert engine.document(other).stored
    assert not list((tmp_path / "full").iterdir())


def test_failed_moves_fail_their_request_alone(lm, pages, expected, tmp_path, monkeypatch):
    for shelf in (None, tmp_path):
        with engine_of(lm, pages, disk=shelf) as engine:
            document = engine.read(A)
            engine.wait(document, SECONDS, stored=True)
            for where, name, failing in (
                (serve_pages, "place_pages", fails_once(serve_pages.place_pages, ())),
                (documents, "_to_device", full),
            ):
                engine._post(lambda engine=engine: engine._documents.make_room(engine.document_pages.total)).result()
                assert engine.document(document).state == "host"
                with monkeypatch.context() as patch:
                    patch.setattr(where, name, failing)
                    stream = engine.ask(document, QUESTION, **OPTIONS)
                    with pytest.raises((RuntimeError, OSError), match=r"out of memory|No space left"):
                        stream.result(SECONDS)
                assert engine.ask(document, QUESTION, **OPTIONS).result(SECONDS).tokens == expected(A)


def test_documents_without_room_fail(lm, pages, expected):
    """Others stay on the device where they are: host memory has no room."""
    with engine_of(lm, pages + 1, host_memory=0) as engine:
        document, other = engine.read(A), engine.read(B)
        with pytest.raises(UserError, match="delete some"):
            engine.wait(other, SECONDS)
        assert engine.ask(document, QUESTION, **OPTIONS).result(SECONDS).tokens == expected(A)


def test_appends_do_not_wait_for_each_other():
    with engine_of(tiny_lm(), 12) as engine:  # they have 4 pages each, and need 8 more
        known = [engine.wait(engine.read(tokens), SECONDS) for tokens in (A, B)]
        engine._post(lambda: engine._documents.make_room(engine.document_pages.total)).result()
        assert all(sum(x.nbytes for x in jax.tree.leaves(each.chunks)) == each.num_bytes for each in known)
        more = [(each.tokens + MORE, (*each.parts, len(MORE))) for each in known]
        for document in engine._post(lambda: [engine._found(*each) for each in more]).result():  # both at once
            engine.wait(document.id, SECONDS)


def test_appended_documents_beyond_the_pool_are_refused(lm):
    with engine_of(lm, lm.cache_layout(1, 16).num_pages, answer_tokens=256) as engine:
        document = engine.read(prompt_of(3, 12))
        with pytest.raises(UserError, match=r"212 tokens need .* pages: the engine holds"):
            engine.append(document, prompt_of(4, 200))


def test_a_failed_engine_says_so(written, monkeypatch):
    engine = Engine(written, pages=100, **SIZES)
    server = Server(engine, Settings("tiny"))
    monkeypatch.setattr(engine._scheduler, "_read_on", lambda seconds: False)
    waiting = engine.read("a document")
    stream, failed = engine.ask(waiting, QUESTION, **OPTIONS), "the engine has failed: MemoryError: none is left"

    def step(is_called):
        raise MemoryError("none is left")

    async def ask():
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            before = await http.get("/health")
            with concurrent.futures.ThreadPoolExecutor() as threads:
                waits = threads.submit(engine.wait, waiting, SECONDS)
                monkeypatch.setattr(engine._scheduler, "step", step)
                engine._post(lambda: None).result()
                with pytest.raises(UserError, match=failed):
                    waits.result(SECONDS)
            answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            return before, *[await http.get(path) for path in ("/health", "/metrics")], answer

    before, health, metrics, answer = asyncio.run(ask())
    for call in (
        lambda: stream.result(SECONDS),
        lambda: engine.ask(waiting, QUESTION, **OPTIONS),
        lambda: engine.read("another"),
        lambda: engine.idle(SECONDS),
    ):
        with pytest.raises(UserError, match=failed):
            call()
    assert isinstance(engine.failure.__cause__, MemoryError)
    stream.cancel()
    server.close()
    engine.close()
    engine.close()
    assert engine._pool.arrays is None  # their memory is free, though answers name the engine
    assert (before.status_code, health.status_code, answer.status_code) == (200, 503, 503)
    assert health.json()["error"] == answer.json()["error"]["message"]
    assert "tca_jax_engine_failed 1.0" in metrics.text


def stream_of(lm, cancel=lambda stream: None, **options):
    config = tca_jax.GenerationConfig(**{"max_new_tokens": 9, "stop_token_ids": (), **options})
    return Stream(lm, config, cancel, False, (0, 0))


def test_the_first_end_of_a_stream_stands(written):
    cancelled = []
    stream = stream_of(written, cancelled.append, stop=("l",))
    stream.add(written.tokenizer.encode("hello"), [], [])
    for _ in range(3):
        assert stream.result(SECONDS).text == "he"
    assert cancelled == [stream]
    stream.end("cancelled", "doc-1")
    stream.end(UserError("too late"))
    stream.end("length")
    out = stream.result(SECONDS)
    assert (out.finish_reason, out.document) == ("stop", "doc-1")
    with Engine(written, pages=99) as engine, pytest.raises(UserError, match=r"stop = \('l',\) with keep"):
        engine.ask(None, "hello", keep=True, stop="l")
    failed = stream_of(written)
    failed.end(UserError("wrong"))
    failed.end("length")
    for _ in range(2):
        with pytest.raises(UserError, match="wrong"):
            failed.result(SECONDS)
