"""The HTTP server through OpenAI's own client: its answers are those of `generate`, and what is wrong is named."""

import asyncio
import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import KEY, MODEL, QUESTION, TEMPLATE, Running
from tiny import with_candidates, write_checkpoint

import tca_jax
from tca_jax.engine.contexts import DocumentTemplate
from tca_jax.engine.prompts import encode_verbatim
from tca_jax.serve import Engine, server

BOOK = "The quick brown fox jumps over the lazy dog. " * 4
TOKENS = 12
GREEDY = {"temperature": 0, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("served") / "model", chat_template=TEMPLATE, eos_token_id=[95])


@pytest.fixture(scope="module")
def lm(folder):
    return with_candidates(tca_jax.load(folder), [[0, 5], [9, 13]])


@pytest.fixture(scope="module")
def engine(lm):
    with Engine(lm, max_rows=3, pages=600, answer_tokens=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine):
    settings = {"max_tokens": 400, "max_body": 100_000, "max_waiting": 6}
    with Running(engine, api_keys=("other", KEY), **settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(running):
    with running.client(KEY) as client:
        yield client


@pytest.fixture(scope="module")
def http(running):
    with running.http() as http:
        yield http


def text_of(lm, prompt, context=None):
    return tca_jax.generate(lm, [prompt], context=context, max_new_tokens=TOKENS).text


def test_chats_equal_generate_also_streamed(lm, client):
    out = tca_jax.generate(lm, [QUESTION], max_new_tokens=TOKENS, logprobs=2)
    asked = {"model": MODEL, "messages": QUESTION, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**asked)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (out.text[0], "length")
    assert whole.usage.completion_tokens == TOKENS
    content = whole.choices[0].logprobs.content
    assert [each.logprob for each in content] == pytest.approx(out.logprobs[0], abs=1e-4)
    assert "".join(each.token for each in content) == out.text[0]
    likeliest = [[each.logprob for each in place.top_logprobs] for place in content]
    assert likeliest[0] == pytest.approx([value for _, value in out.top_logprobs[0][0]], abs=1e-4)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == out.text[0]
    assert (chunks[0].choices[0].delta.role, chunks[-2].choices[0].finish_reason) == ("assistant", "length")
    assert (chunks[-2].choices[0].logprobs.content, chunks[-1].usage) == (content, whole.usage)
    stop = out.text[0][3:5]
    (stopped,) = client.chat.completions.create(model=MODEL, messages=QUESTION, stop=[stop], **GREEDY).choices
    assert (stopped.message.content, stopped.finish_reason) == (out.text[0][: out.text[0].index(stop)], "stop")


def test_samples_of_several_prompts_equal_generate(lm, client):
    prompts, options = ["ab ", "The fox"], {"temperature": 0.9, "top_p": 0.9, "seed": 3}
    expected = tca_jax.generate(lm, prompts, max_new_tokens=TOKENS, num_samples=2, top_k=30, **options).text
    asked = {"model": MODEL, "prompt": prompts, "n": 2, "max_tokens": TOKENS, "extra_body": {"top_k": 30}, **options}
    whole = client.completions.create(**asked)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(expected))
    streamed = [""] * 4
    for chunk in client.completions.create(stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


def test_documents_are_uploaded_asked_about_and_deleted(lm, client, http):
    uploaded = http.post("/v1/documents", content=BOOK, headers={"Content-Type": "text/plain; charset=utf-8"})
    assert uploaded.status_code == 201
    document = uploaded.json()["id"]
    again = http.post("/v1/documents", json={"text": BOOK}).json()
    assert (again["id"], again["tokens"]) == (document, len("<user>" + BOOK))
    assert document in [each["id"] for each in http.get("/v1/documents").json()["data"]]
    read = tca_jax.prefill(lm, DocumentTemplate.of(lm).document(lm, BOOK, "text"))
    extra = {"model": MODEL, "extra_body": {"document": document}, **GREEDY}
    (expected,) = text_of(lm, "\n\nWho jumps?</s><assistant>", read)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = [pool.submit(client.chat.completions.create, messages=QUESTION, **extra) for _ in range(3)]
        assert {each.result().choices[0].message.content for each in asked} == {expected}
    usage = asked[0].result().usage
    assert usage.prompt_tokens_details.cached_tokens == again["tokens"]
    for content in (f"{BOOK}\n\nWho jumps?", [{"type": "text", "text": BOOK}, {"type": "text", "text": "Who jumps?"}]):
        held = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], **GREEDY)
        assert (held.choices[0].message.content, held.usage) == (expected, usage)  # the chat begins with the document
    turns = [*QUESTION, {"role": "assistant", "content": "A fox."}, {"role": "user", "content": "Over what?"}]
    (later,) = text_of(lm, "\n\nWho jumps?</s><assistant>A fox.</s><user>Over what?</s><assistant>", read)
    assert client.chat.completions.create(messages=turns, **extra).choices[0].message.content == later
    (completed,) = text_of(lm, " The end", read)
    assert client.completions.create(prompt=" The end", **extra).choices[0].text == completed
    assert http.get(f"/v1/documents/{document}").json()["state"] == "device"
    assert http.delete(f"/v1/documents/{document}").json()["deleted"] is True
    assert http.get(f"/v1/documents/{document}").status_code == 404
    with pytest.raises(openai.NotFoundError, match="unknown document"):
        client.chat.completions.create(messages=QUESTION, **extra)


def test_chat_finds_longest_document_by_tokens(lm, engine, client, http, monkeypatch):
    book, system = BOOK[::-1], {"role": "system", "content": "Be brief."}
    chat = [system, {"role": "user", "content": f"{book}\n\nWho?"}]
    (expected,) = text_of(lm, chat)
    whole = client.chat.completions.create(model=MODEL, messages=chat, **GREEDY)
    assert (whole.choices[0].message.content, whole.usage.prompt_tokens_details.cached_tokens) == (expected, 0)
    for text in (book[:50], book, book + "\n\nWhere"):  # the longest one that is the chat's beginning
        http.post("/v1/documents", json={"text": text, "system": "Be brief."})
    ids = encode_verbatim(lm, f"<system>Be brief.</s><user>{book}")
    (expected,) = text_of(lm, "\n\nWho?</s><assistant>", tca_jax.prefill(lm, ids))
    found = client.chat.completions.create(model=MODEL, messages=chat, **GREEDY)
    assert (found.choices[0].message.content, found.usage.prompt_tokens) == (expected, whole.usage.prompt_tokens)
    assert found.usage.prompt_tokens_details.cached_tokens == len(ids)
    find = engine.prefix_of  # each document is deleted as soon as it is found
    monkeypatch.setattr(engine, "prefix_of", lambda tokens: (d := find(tokens)) and (engine.forget(d.id), d)[1])
    left = client.chat.completions.create(model=MODEL, messages=chat, **GREEDY)
    assert (left.choices[0].message, left.usage) == (whole.choices[0].message, whole.usage)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"top_p": 0}, "top_p", r"top_p = 0.0: must be in \(0, 1\]"),
        ({"n": 7}, "n", "at most 6 may"),
        ({"max_tokens": 401}, "max_tokens", "max_tokens = 401: must be at most 400"),
        ({"min_tokens": 9, "max_tokens": 2}, "min_tokens", "min_tokens = 9: must be at most max_tokens = 2"),
        ({"min_tokens": 401, "max_tokens": None}, "min_tokens", "min_tokens = 401: must be at most 400"),
        ({"response_format": {"type": "json_object"}}, "response_format", "do not work with the tokenizer"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "not valid UTF-8"),
        ({"messages": [{"role": "user", "content": "é " * 4000}]}, "prompt", "4096 positions"),
        ({"document": "../../etc/passwd"}, "document", "unknown document"),
        ({"model": "gpt-4"}, "model", "must be tiny"),
    ],
)
def test_refusals_of_chats_name_the_field(http, fields, param, message):
    body = json.dumps({"messages": QUESTION, "max_tokens": 4, **fields})
    answer = http.post("/v1/chat/completions", content=body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert re.search(message, error["message"]), error["message"]


def test_bounds_of_bodies_keys_and_paths(running, http):
    with running.http("wrong") as stranger:
        for path in ("/v1/models", "/metrics", "/v1/documents"):
            answer = stranger.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert stranger.get("/health").json() == {"status": "ok"}
    with pytest.raises(openai.AuthenticationError, match="API key"):
        running.client("wrong").models.list()
    assert [model.id for model in running.client("other").models.list()] == [MODEL]
    long = b"x" * 100_001
    for body in (long, iter([long])):  # of a known length, and in chunks
        answer = http.post("/v1/documents", content=body, headers={"Content-Type": "text/plain"})
        assert (answer.status_code, "100,000 bytes" in answer.json()["error"]["message"]) == (413, True)
    for method, path, status in (("GET", "/v1/x", 404), ("PUT", "/v1/documents", 405)):
        answer = http.request(method, path)
        assert (answer.status_code, set(answer.json()["error"])) == (status, {"message", "type", "param", "code"})
    for body in (b"{", b"[1]", b'{"messages": [1]}'):
        answer = http.post("/v1/chat/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def rows(http):
    """Answers that wait or are written, by the server's metrics."""
    families = {each.name: each for each in text_string_to_metric_families(http.get("/metrics").text)}
    return {sample.labels["state"]: sample.value for sample in families["tca_jax_rows"].samples}, families


def wait_for_none(engine, http):
    deadline = time.monotonic() + 30
    while sum(rows(http)[0].values()) or not engine.idle(0.1):
        assert time.monotonic() < deadline


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_frees_its_rows(engine, running, http, stream):
    body = {"prompt": "The fox", "max_tokens": 400, "n": 3, "stream": stream, "temperature": 1.0, "min_tokens": 400}
    with running.http() as leaving:
        if stream:
            with leaving.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=body, timeout=0.2)
    wait_for_none(engine, http)
    states, families = rows(http)
    assert set(states) == {"waiting", "running"}
    found = families["tca_jax_answers"].samples
    assert any(each.labels["finish_reason"] == "cancelled" and each.value >= 3 for each in found)
    http.post("/v1/completions", json={"prompt": "The fox", "max_tokens": 3})
    families = rows(http)[1]
    for name in ("time_to_first_token", "time_per_token"):
        counts = [each.value for each in families[f"tca_jax_{name}_seconds"].samples if each.name.endswith("_count")]
        assert counts[0] >= 1
    assert {"device", "host", "disk"} <= {each.labels["state"] for each in families["tca_jax_document_pages"].samples}
    assert sum(each.value for each in families["tca_jax_tokens"].samples if "total" in each.name) > 0


def test_answers_are_bounded_in_number_and_time(engine, running, http):
    body = {"prompt": "The fox", "max_tokens": 300, "n": 4, "stream": True, "min_tokens": 300}
    with running.http() as first, first.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # the connection is closed when nobody holds them
        next(lines)
        refused = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "n": 3})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    wait_for_none(engine, http)
    with Running(engine, timeout=0.05) as impatient, impatient.http() as late:
        assert late.post("/v1/completions", json=body | {"stream": False}).status_code == 504
        asked = {"model": MODEL, "extra_body": {"min_tokens": 300}, **body}
        with pytest.raises(openai.APIError, match=r"more than 0\.05 seconds"):
            list(impatient.client().completions.create(**{k: v for k, v in asked.items() if k != "min_tokens"}))
        busy = threading.Event()
        engine._post(busy.wait)  # as while a program compiles
        assert late.post("/v1/completions", json=body).status_code == 504
    with Running(engine) as ending, ending.http() as last, concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(last.post, "/v1/completions", json=body)
        while not ending.server._metrics.open:
            time.sleep(0.01)
        ending.uvicorn.servers[0].get_loop().call_soon_threadsafe(ending.server.close)
        assert (asked.result().status_code, "shutting down" in asked.result().text) == (503, True)
    busy.set()
    assert engine.idle(30)


def test_clients_that_read_no_more_free_their_rows():
    async def never(*_):
        await asyncio.Event().wait()

    async def events():
        yield b"data: 1"

    answers = mock.Mock(spec=server.Answers)
    stuck = server._Events(events(), answers, 0.01)
    asyncio.run(asyncio.wait_for(stuck({"type": "http", "asgi": {"spec_version": "2.3"}}, never, never), 30))
    answers.close.assert_called_once()


def test_models_without_chat_template_answer_completions(tmp_path):
    lm = tca_jax.load(write_checkpoint(tmp_path, chat_template=None))
    with Engine(lm, max_rows=2, pages=200, answer_tokens=64) as engine, Running(engine) as running:
        with pytest.raises(openai.BadRequestError, match="no chat template; use /v1/completions"):
            running.client().chat.completions.create(model=MODEL, messages=QUESTION, **GREEDY)
        with running.http() as http:
            document = http.post("/v1/documents", json={"text": BOOK}).json()["id"]
            assert http.post("/v1/documents", json={"text": BOOK, "system": "x"}).status_code == 400
            assert http.post("/v1/documents", json={"text": BOOK, "path": "/etc/passwd"}).status_code == 400
        asked = running.client().completions.create(
            model=MODEL, prompt=" The end", extra_body={"document": document}, **GREEDY
        )
        (expected,) = text_of(lm, " The end", tca_jax.prefill(lm, BOOK))
        assert asked.choices[0].text == expected


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_command(folder, tmp_path, number, code):
    args = ["serve", folder, "--port=0", "--pages=600", f"--disk={tmp_path}", "--grace=1", "--model-name=m"]
    command = [sys.executable, "-c", "from tca_jax.cli import main; main()", *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        url = re.fullmatch(r"serving m on (http://127\.0\.0\.1:\d+)/v1\n", line)[1]
        with httpx.Client(base_url=url, timeout=120) as http:
            body = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 3000, "min_tokens": 3000}
            document = http.post("/v1/documents", json={"text": BOOK}).json()["id"]
            body |= {"document": document, "stream": True}
            while not http.get(f"/v1/documents/{document}").json()["stored"]:
                time.sleep(0.05)
            with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                while not re.search('"content":"[^"]', next(lines)):  # its programs have compiled
                    pass
                process.send_signal(number)
                start = time.monotonic()
                *_, last = filter(None, lines)
                assert "the server is shutting down" in last
                assert process.wait(30) == code
        assert "Traceback" not in process.stderr.read()
        assert time.monotonic() - start < 15
    assert {path.name for path in tmp_path.iterdir()} == {document}
    assert {*os.listdir(tmp_path / document)} == {"context", "document.json"}
