"""Requests and answers of the OpenAI protocol; no model is run."""

import json
import re

import pytest
from pydantic import ValidationError
from word_pieces import tokenizer_of_bytes, tokenizer_of_pieces

import tca_jax
from tca_jax.errors import UserError
from tca_jax.loading import open_checkpoint
from tca_jax.serve.protocol import (
    Chat,
    ChatRequest,
    CompletionRequest,
    DocumentRequest,
    RequestError,
    Text,
    generation_config,
    of_error,
    read_request,
)
from tca_jax.serve.streams import Completion

HELLO = [{"role": "user", "content": "Hello"}]
LONG = "x" * 10_000


def json_schema(**fields):
    return {"type": "json_schema", "json_schema": {"name": "a-name", "schema": {}, **fields}}


def read(kind, fields):
    body = json.dumps(fields).replace("Infinity", "1e400").encode()
    return read_request(kind, body, "application/json; charset=utf-8")


def test_defaults_of_the_protocol():
    assert read_request(DocumentRequest, b"a", "text/plain").text == "a"
    assert read(DocumentRequest, {"text": "a", "system": "b"}) == DocumentRequest(text="a", system="b", chat=None)
    wanted = read(ChatRequest, {"messages": HELLO, "stop": None, "n": None, "tools": None, "user": "me"})
    assert (wanted.n, wanted.max_tokens, wanted.default_tokens, wanted.stream) == (1, None, None, False)
    expected = tca_jax.GenerationConfig(max_new_tokens=1, temperature=1.0, seed=wanted.seed)
    assert generation_config(wanted, 1) == expected
    completion = read(CompletionRequest, {"prompt": [[1, 2], [3]], "max_tokens": 1, "logprobs": 0})
    assert (completion.prompt, completion.logprobs, completion.default_tokens) == ([[1, 2], [3]], 0, 16)
    assert read(CompletionRequest, {"prompt": [1, 2]}).prompt == [[1, 2]]
    assert len({read(ChatRequest, {"messages": HELLO}).seed for _ in range(3)}) == 3


def test_fields_of_openai_clients_are_read():
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "tool_calls": None}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO, answer, {"role": "user", "content": parts}]
    given = {"max_completion_tokens": 7, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    wanted = read(ChatRequest, {"messages": messages, "logprobs": True, "top_logprobs": 3, **given})
    read_messages = [each.as_dict() for each in wanted.messages]
    assert [each["role"] for each in read_messages] == ["system", "user", "assistant", "user"]
    assert read_messages[2:] == [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "a\n\nb"}]
    assert (wanted.max_completion_tokens, wanted.top_logprobs, wanted.response_format.schema_of_answer) == (7, 3, None)
    form = json_schema(schema={"enum": [1]}, strict=True, description="One.")
    for given, schema in (({"type": "json_object"}, {"type": "object"}), (form, {"enum": [1]})):
        wanted = read(ChatRequest, {"messages": HELLO, "response_format": given})
        assert wanted.response_format.schema_of_answer == schema


def said(content, **fields):
    return {"messages": [{"role": "user", "content": content, **fields}]}


BASES = {ChatRequest: {"messages": HELLO}, CompletionRequest: {"prompt": "x"}, DocumentRequest: {}}
REFUSED = {
    ChatRequest: (
        ({"messages": []}, r"messages = \[\]: must have at least 1 item"),
        ({"messages": ["x"]}, r'messages\[0\] = "x": must be an object with role, content'),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role = \"tool\": must be 'system', '"),
        (said([{"type": "image_url"}]), r"messages\[0\].content\[0\].type = \"image_url\": must be 'text'"),
        (said(5), r"\[0\].content\[0\].text = 5: must be a valid string"),
        (said("x", tool_calls=[1]), r"messages\[0\].tool_calls = \[1\]: unknown field: must be one of role, content$"),
        ({"top_logprobs": 2}, "top_logprobs = 2: needs logprobs = true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens = 4: differs"),
        ({"stream_options": {"include_usage": True}}, "needs stream = true"),
        ({"stop": ["x"] * 65}, "must have at most 64 items"),
        ({"temperature": float("inf")}, "temperature = Infinity: must be a finite number"),
        ({"n": 65}, "n = 65: must be less than or equal to 64"),
        ({"tools": [{"type": "function"}]}, "tools and functions are not supported"),
        ({"presence_penalty": 0.5}, "must be 0"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema = {}: unknown field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema = null: must be given"),
        ({"response_format": json_schema(name="a b")}, r'json_schema.name = "a b": must match pattern .*\{1,64\}'),
        ({"response_format": json_schema(schema=None)}, "json_schema.schema = null: must be given"),
        ({"response_format": json_schema(file="x")}, "json_schema.file = .*: must be one of name, schema, strict"),
        ({LONG: 1}, "x = 1: unknown field: must be one of .*document, .*response_format$"),
        ({"\ud800": [1] * 10_000}, "unknown field"),
    ),
    CompletionRequest: (
        ({"prompt": []}, "prompt = .*: must be text"),
        ({"prompt": [[1], []]}, "none may be empty"),
        ({"max_tokens": 0}, "max_tokens = 0: must be greater than or equal to 1"),
        ({"best_of": 2}, "best_of = 2: must be n"),
        ({"echo": True}, "echo = true: must be false"),
    ),
    DocumentRequest: (
        ({}, "text = null: must be given"),
        ({"text": ""}, 'text = "": must have at least 1 character'),
        ({"text": "a", "file": "/etc/passwd"}, 'file = "/etc/passwd": unknown field'),
        ({"text": "a", "system": "b", "chat": False}, "leave out chat = false"),
    ),
}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [(kind, BASES[kind] | fields, message) for kind, rows in REFUSED.items() for fields, message in rows],
)
def test_refused_fields_are_named(kind, fields, message):
    with pytest.raises(ValidationError) as raised:
        read(kind, fields)
    body = json.loads(json.dumps(of_error(raised.value).body()))["error"]
    assert re.search(message, body["message"]), body["message"]
    assert len(body["message"]) < 1000
    assert body["param"] is not None


@pytest.mark.parametrize("body", [b"", b"{", b"NaN", b"[" * 100_000, b"\xff", b'{"n": 1' + b"0" * 5000 + b"}"])
def test_invalid_json_is_refused(body):
    with pytest.raises(RequestError, match="not valid JSON"):
        read_request(ChatRequest, body)


def test_errors_name_fields_of_the_protocol():
    error = of_error(UserError("max_new_tokens = 0: must be at least 1"))
    assert (str(error), error.param, error.status) == ("max_tokens = 0: must be at least 1", "max_tokens", 400)
    assert of_error(UserError("the engine is closed")).param is None
    of_schema = of_error(UserError("response_format.json_schema.schema: fails"))
    assert of_schema.param == "response_format.json_schema.schema"


TEXT = "naïve café 日本 🦩 ok"


def completion(tokens, top=1):
    logprobs = [-0.5] * len(tokens)
    likeliest = [[(token, -0.5 - i) for i, token in enumerate([own, *range(own + 1, own + top)])] for own in tokens]
    return Completion(tokens, "length", 1, 0, None, 0.0, 0.0, logprobs, likeliest, TEXT)


def shipped_tokenizer():
    return open_checkpoint("recall-tiny").tokenizer


@pytest.mark.parametrize("make", [tokenizer_of_bytes, tokenizer_of_pieces, shipped_tokenizer])
def test_offsets_and_bytes_of_split_characters(make):
    tokenizer = make()
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    answer = Text("m", tokenizer).logprobs(completion(tokens))
    entries = Chat("m", tokenizer).logprobs(completion(tokens))["content"]
    own = [bytes(entry["bytes"]) for entry in entries]
    text = b"".join(own)
    assert text.decode().lstrip(" ") == TEXT
    starts = [len(b"".join(own[:i])) for i in range(len(own))]
    assert answer["text_offset"] == [len(text[:start].decode(errors="ignore")) for start in starts]
    assert answer["tokens"] == [entry["token"] for entry in entries]
    assert "bytes:\\xf0" in answer["tokens"]


def test_likeliest_byte_fragments_stay_apart():
    (likeliest,) = Text("m", shipped_tokenizer()).logprobs(completion([0xE6], top=4))["top_logprobs"]
    assert likeliest == {f"bytes:\\xe{6 + i}": -0.5 - i for i in range(4)}
