"""Answers in the protocol's form; no model is run."""

import pytest
import word_pieces

import tca_jax
from tca_jax.serve.responses import Chat, Text
from tca_jax.serve.streams import Completion

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
