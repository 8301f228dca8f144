"""Requests and answers of the OpenAI protocol; no model is run."""

import functools
import json

import pytest
import word_pieces

import tca_jax
from tca_jax.errors import UserError
from tca_jax.serve.protocol import (
    Chat,
    DocumentRequest,
    RequestError,
    Text,
    chat_request,
    completion_request,
    document_request,
    of_user_error,
    parse_json,
)
from tca_jax.serve.streams import Completion

HELLO = [{"role": "user", "content": "Hello"}]


def json_schema(**fields):
    return {"type": "json_schema", "json_schema": {"name": "a-name", "schema": {}, **fields}}


def upload(fields):
    return document_request("application/json; charset=utf-8", json.dumps(fields).encode())


def test_defaults_of_the_protocol():
    assert document_request("text/plain", b"a").text == "a"
    assert upload({"text": "a", "system": "b"}) == DocumentRequest("a", "b", None)
    wanted = chat_request({"messages": HELLO, "stop": None, "n": None, "tools": None, "user": "me"}, 512)
    assert (wanted.answering.n, wanted.answering.max_tokens, wanted.answering.default_tokens) == (1, None, 512)
    assert (wanted.answering.options["temperature"], wanted.answering.options["stop"]) == (1.0, ())
    assert (wanted.answering.logprobs, wanted.answering.stream) == (None, False)
    completion = completion_request({"prompt": [[1, 2], [3]], "max_tokens": 1, "logprobs": 0})
    assert (completion.prompts, completion.answering.logprobs, completion.answering.default_tokens) == (
        [[1, 2], [3]],
        0,
        16,
    )
    assert completion_request({"prompt": [1, 2]}).prompts == [[1, 2]]
    seeds = {chat_request({"messages": HELLO}, 1).answering.options["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_fields_of_openai_clients_are_read():
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "tool_calls": None}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO, answer, {"role": "user", "content": parts}]
    given = {"max_completion_tokens": 7, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    wanted = chat_request({"messages": messages, "logprobs": True, "top_logprobs": 3, **given}, 1)
    assert [each["role"] for each in wanted.messages] == ["system", "user", "assistant", "user"]
    assert wanted.messages[2:] == [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "a\n\nb"}]
    assert (wanted.answering.max_tokens, wanted.answering.logprobs, wanted.schema) == (7, 3, None)
    for form, schema in (
        ({"type": "json_object"}, {"type": "object"}),
        (json_schema(schema={"enum": [1]}, strict=True, description="One."), {"enum": [1]}),
    ):
        assert chat_request({"messages": HELLO, "response_format": form}, 1).schema == schema


CHAT = functools.partial(chat_request, default_tokens=1)
REFUSED = [
    *(
        (CHAT, {"messages": HELLO, **fields}, message)
        for fields, message in (
            ({"messages": []}, "messages = .*: must be a list of messages"),
            ({"messages": [{"role": "tool", "content": "x"}]}, r'messages\[0\].role = "tool": must be one of'),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type text"),
            ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, 'has "tool_calls"'),
            ({"top_logprobs": 2}, "needs logprobs = true"),
            ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
            ({"stream": 1}, "stream = 1: must be true or false"),
            ({"stream_options": {"include_usage": True}}, "needs stream = true"),
            ({"stop": ["x"] * 65}, "at most 64 strings"),
            ({"temperature": -1}, "temperature = -1: must be a number of at least 0"),
            ({"temperature": float("1e400")}, "temperature = Infinity"),
            ({"n": 65}, "n = 65: must be an integer from 1 to 64"),
            ({"tools": [{"type": "function"}]}, "tools are not supported"),
            ({"presence_penalty": 0.5}, "must be 0"),
            ({"seed": -1}, "seed = -1: must be an integer from 0 to 4294967295"),
            ({"logit_bias": {"5": 1}}, "must be empty"),
            ({"document": ["x"]}, "must be a string"),
            ({"response_format": {"type": "text", "schema": {}}}, "response_format = .*: must be"),
            (
                {"response_format": json_schema(strict=1)},
                "response_format.json_schema.strict = 1: must be true or false",
            ),
            ({"response_format": json_schema(name="a b")}, 'json_schema.name = "a b": must be 1 to 64 letters'),
            ({"response_format": json_schema(schema=None)}, "json_schema.schema = null: must be an object"),
            ({"response_format": json_schema(file="x")}, "json_schema = .*: must be an object with name, schema"),
            ({"x" * 10_000: 1}, "is no field of this request"),
        )
    ),
    *(
        (completion_request, {"prompt": "x", **fields}, message)
        for fields, message in (
            ({"prompt": []}, "prompt = .*: must be text"),
            ({"prompt": [[1], []]}, "none may be empty"),
            ({"max_tokens": 0}, "max_tokens = 0: must be an integer from 1"),
            ({"echo": True}, "echo = true: must be false"),
        )
    ),
    *(
        (upload, fields, message)
        for fields, message in (
            ({}, "text: must be given"),
            ({"text": "a", "file": "/etc/passwd"}, '"file" is no field'),
            ({"text": "a", "system": "b", "chat": False}, "leave out chat = false"),
        )
    ),
]


@pytest.mark.parametrize(("read", "fields", "message"), REFUSED)
def test_refused_fields_are_named(read, fields, message):
    with pytest.raises(RequestError, match=message) as raised:
        read(fields)
    assert len(str(raised.value)) < 1000
    assert raised.value.body()["error"]["param"] is not None


@pytest.mark.parametrize("body", [b"", b"{", b"NaN", b"[" * 100_000, b"\xff", b'{"n": 1' + b"0" * 5000 + b"}"])
def test_invalid_json_is_refused(body):
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_json(body)


def test_errors_name_fields_of_the_protocol():
    told = of_user_error(UserError("max_new_tokens = 0: must be an integer of at least 1"))
    assert (str(told), told.param, told.status) == (
        "max_tokens = 0: must be an integer of at least 1",
        "max_tokens",
        400,
    )
    assert of_user_error(UserError("the engine is closed")).param is None
    of_schema = of_user_error(UserError("response_format.json_schema.schema: fails"))
    assert of_schema.param == "response_format.json_schema.schema"


# Answers

TEXT = "naïve café 日本 🦩 ok"


def completion(tokens, top=1):
    logprobs = [-0.5] * len(tokens)
    likeliest = [[(token, -0.5 - i) for i, token in enumerate([own, *range(own + 1, own + top)])] for own in tokens]
    return Completion(tokens, "length", 1, 0, None, 0.0, 0.0, logprobs, likeliest, TEXT)


@pytest.fixture(scope="module", params=["bytes", "pieces", "shipped"])
def tokenizer(request, tmp_path_factory):
    if request.param == "shipped":
        return tca_jax.load("recall-tiny").tokenizer
    write = {"bytes": word_pieces.write_with_bytes, "pieces": word_pieces.write_with_pieces}[request.param]
    return tca_jax.load(write(tmp_path_factory.mktemp("model"))).tokenizer


def test_offsets_and_bytes_of_split_characters(tokenizer):
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
    tokenizer = tca_jax.load("recall-tiny").tokenizer
    (likeliest,) = Text("m", tokenizer).logprobs(completion([0xE6], top=4))["top_logprobs"]
    assert likeliest == {f"bytes:\\xe{6 + i}": -0.5 - i for i in range(4)}
