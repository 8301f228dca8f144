"""Prompts to token ids, tokens to text, and padding."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import write_checkpoint
from word_pieces import tokenizer_of_bytes, tokenizer_of_pieces

from tca_jax.engine.contexts import DocumentTemplate, encode_appended
from tca_jax.engine.prompts import (
    bucket_length,
    decode_continuation,
    encode_continuation,
    encode_prompt,
    encode_prompts,
    encode_verbatim,
    pad_tokens,
    render_chat,
)
from tca_jax.loading import open_checkpoint

USER = {"role": "user", "content": "hello"}


def encoder(tokenizer):
    config = types.SimpleNamespace(vocab_size=len(tokenizer))
    return types.SimpleNamespace(name="words", tokenizer=tokenizer, config=config)


@pytest.fixture(scope="module")
def bytes_():
    return encoder(tokenizer_of_bytes())


@pytest.fixture(scope="module")
def pieces():
    return encoder(tokenizer_of_pieces())


def encoded(text: str) -> list[int]:
    """By the tiny model's tokenizer: a character is a token."""
    return [ord(char) - 32 for char in text]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("abc", [encoded("abc")]),
        ((b"abc", "d"), [encoded("abc"), encoded("d")]),
        ([[USER], "x"], [encoded("hello"), encoded("x")]),
        ([USER, USER], [encoded("hellohello")]),
        ((np.int64(5), 6), [[5, 6]]),
        (range(3), [[0, 1, 2]]),
        (jnp.array([5, 6]), [[5, 6]]),
        (np.array([[5, 6], [7, 8]], np.uint8), [[5, 6], [7, 8]]),
        ([[5], np.array([6]), "x"], [[5], [6], encoded("x")]),
    ],
)
def test_prompts_of_any_kind_are_encoded(written, prompts, expected):
    ids = encode_prompts(written, prompts)
    assert ids == expected
    assert {type(i) for row in ids for i in row} == {int}


def test_messages_may_hold_parts_or_tool_calls(tmp_path):
    template = "{% for m in messages %}{{ m['content'][0]['text'] if m['content'] else 'called' }}{% endfor %}"
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, chat_template=template))
    assert encode_prompt(checkpoint, [parts, call]) == encoded("hicalled")


def test_buckets_hold_every_length():
    for length in [*range(128, 5000), 2**17 - 1, 2**17, 2**17 + 1, 10**6]:
        bucket = bucket_length(length)
        assert length <= bucket <= length + length / 4
        assert bucket_length(bucket) == bucket
    assert len({bucket_length(length) for length in range(1, 2**20, 37)}) < 60


def test_padding_is_on_the_right():
    tokens, lengths = pad_tokens([[1, 2, 3], [4] * 130], pad_token_id=9)
    assert (tokens.dtype, lengths.dtype) == (np.int32, np.int32)
    assert tokens.shape == (2, bucket_length(130))
    assert lengths.tolist() == [3, 130]
    assert tokens[0].tolist() == [1, 2, 3] + [9] * (tokens.shape[1] - 3)
    assert tokens[1].tolist() == [4] * 130 + [9] * (tokens.shape[1] - 130)


@pytest.mark.parametrize("name", ["bytes_", "pieces"])
@pytest.mark.parametrize("text", [" grass is green.", "grass", "s", "\n\nWho is here?", " é 🦩", " <s>"])
def test_a_continuation_is_tokenized_as_in_one_text(name, text, request):
    lm = request.getfixturevalue(name)
    held = encode_prompt(lm, "The sky is blue. The special magic number")
    appended = encode_appended(lm, text, lambda: held)
    assert held + appended == encode_prompt(lm, "The sky is blue. The special magic number" + text)
    assert decode_continuation(lm, appended, special=True) == text


@pytest.mark.parametrize("name", ["bytes_", "pieces"])
def test_a_token_over_the_boundary_is_split(name, request):
    lm = request.getfixturevalue(name)
    held = encode_prompt(lm, "The gra")
    appended = encode_continuation(lm, "ss", held)
    assert held + appended != encode_prompt(lm, "The grass")
    assert lm.tokenizer.decode(held + appended, skip_special_tokens=True) == "The grass"


def test_texts_of_tokens_keep_their_spaces(pieces):
    ids = encode_prompt(pieces, "Who is here? The sky")
    assert "".join(decode_continuation(pieces, [token], special=True) for token in ids[1:]) == " Who is here? The sky"
    assert decode_continuation(pieces, ids[:1], special=True) == "<s>"
    assert decode_continuation(pieces, ids[1:]) == " Who is here? The sky"
    ids = encode_continuation(pieces, "日本語.", ids)  # of bytes, but the last one
    assert [decode_continuation(pieces, ids[:n], special=True) for n in (3, 8, 10)] == ["日", "日本\ufffd", "日本語."]


def test_a_chat_continues_a_context_by_its_text(bytes_):
    """A token of the whole chat spans the end of the context."""
    rendered = render_chat(bytes_, [{"role": "user", "content": "The grass is"}], "chat")
    held = encode_verbatim(bytes_, rendered[: rendered.index("ss is")])
    appended = encode_appended(bytes_, [{"role": "user", "content": "The grass is"}], lambda: held)
    assert bytes_.tokenizer.decode(held + appended) == rendered
    with pytest.raises(ValueError, match="prompt is a chat that does not continue the context"):
        encode_appended(bytes_, [{"role": "user", "content": "The sky"}], lambda: held)


@pytest.mark.parametrize("name", ["bytes_", "pieces"])
def test_document_templates_give_the_whole_chat(name, request):
    """The template of bytes_ strips white space from messages, the other does not."""
    lm = request.getfixturevalue(name)
    frame = DocumentTemplate.of(lm)
    assert frame.trims == (name == "bytes_")
    document, question, answer, following = " \nThe sky.\n", " Who? \n", "I", " \nWhy? "
    read = lm.tokenizer.decode(frame.document(lm, document, "text"))
    asked = read.replace("<s> ", "<s>") + frame.question(question, follows_answer=False)
    chat = [{"role": "user", "content": f"{document}\n\n{question}"}]
    assert asked == render_chat(lm, chat, "chat")
    chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": following}]
    said = " I" if name == "pieces" else "I"
    assert asked + said + frame.question(following, follows_answer=True) == render_chat(lm, chat, "chat")
