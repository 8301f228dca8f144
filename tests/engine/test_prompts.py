"""Prompts: what users may pass, what is refused and how it is named, and padding to buckets."""

import dataclasses
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_lm, write_checkpoint
from transformers import AutoTokenizer

from tca_jax.engine.prompts import bucket_length, encode_appended, encode_prompt, encode_prompts, pad_tokens

USER = {"role": "user", "content": "hello"}


def lm_with(folder, chat_template=None):
    """The tiny model with a tokenizer of a character a token: `ord(char) - 32`."""
    return tiny_lm(tokenizer=AutoTokenizer.from_pretrained(write_checkpoint(folder, chat_template=chat_template)))


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return lm_with(
        tmp_path_factory.mktemp("model"),
        "{% for m in messages %}{% if m['role'] == 'robot' %}{{ raise_exception('no\nrobots') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}",
    )


def encoded(text: str) -> list[int]:
    return [ord(char) - 32 for char in text]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("abc", [encoded("abc")]),
        (b"abc", [encoded("abc")]),
        (("abc", b"d"), [encoded("abc"), encoded("d")]),
        ([USER], [encoded("hello")]),
        ([[USER], "x"], [encoded("hello"), encoded("x")]),
        ([USER, USER], [encoded("hellohello")]),
        ([5, 6], [[5, 6]]),
        ((np.int64(5), 6), [[5, 6]]),
        (range(3), [[0, 1, 2]]),
        (np.array([5, 6]), [[5, 6]]),
        (jnp.array([5, 6]), [[5, 6]]),
        (np.array([[5, 6], [7, 8]], np.uint8), [[5, 6], [7, 8]]),
        ([[5], np.array([6]), "x"], [[5], [6], encoded("x")]),
    ],
)
def test_one_prompt_or_a_batch_of_any_kinds_is_encoded(lm, prompts, expected):
    ids = encode_prompts(lm, prompts)
    assert ids == expected
    assert {type(i) for row in ids for i in row} == {int}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, r"texts is None: must be text, a chat \(a list of messages\), token ids, or a list of those"),
        (USER, "texts is of type dict: must be"),
        (3, "texts is of type int: must be"),
        ({1, 2}, "texts is of type set: must be"),
        ((i for i in [1, 2]), "texts is of type generator: must be"),
        (np.array(3), "texts is of type ndarray: must be"),
        (bytearray(b"abc"), r"texts\[0\] is of type bytearray: must be"),
        ([(i for i in [1, 2])], r"texts\[0\] is of type generator: must be"),
        (["x", None], r"texts\[1\] is None: must be"),
        ([USER, "x"], r"texts\[0\] is of type dict: must be"),
        ([[1, "x"]], r"texts\[0\] is of type list: .* holds str"),
        ([1, 2.5], r"texts\[0\] is of type list: .* integer token ids, and it holds float"),
        ([1, True], r"texts\[0\] is of type list: .* holds bool"),
        ([True, False], r"texts\[0\] is of type list: .* holds bool"),
        (np.array([True]), r"texts\[0\] is an array \[1\] of bool"),
        (np.array([1.0]), r"texts\[0\] is an array \[1\] of float64"),
        (np.ones((1, 2, 3), int), r"texts\[0\] is an array \[2, 3\] of int64"),
    ],
)
def test_what_is_no_prompt_is_a_type_error_that_names_it(lm, prompts, message):
    with pytest.raises(TypeError, match=message):
        encode_prompts(lm, prompts, "texts")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty: at least one is needed"),
        (np.ones((0, 4), int), "prompts is empty"),
        ("", r"prompts\[0\] is empty: at least one token is needed"),
        (["x", []], r"prompts\[1\] is empty: at least one token is needed"),
        ([97], r"prompts\[0\] holds token id 97: ids of tiny lie in \[0, 97\)"),
        ([1, -1], r"prompts\[0\] holds token id -1"),
        ([1, 2**70], r"prompts\[0\] holds token id 1180591620717411303424"),
        (np.array([2**64 - 1], np.uint64), r"prompts\[0\] holds token id 18446744073709551615"),
        (["x", "\ud800"], r"prompts\[1\] is not valid UTF-8 text"),
        (b"\xff", r"prompts\[0\] is not valid UTF-8 text"),
        ([{"content": "x"}], r"prompts\[0\]\[0\] has no \['role'\]"),
        ([[USER, {"role": "user"}]], r"prompts\[0\]\[1\] has no \['content'\]"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(lm, prompts, message):
    with pytest.raises(ValueError, match=message):
        encode_prompts(lm, prompts)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": 3, "content": "x"}, r"prompt\[0\]\['role'\] = 3: must be a string"),
        (
            {"role": "user", "content": 3},
            r"prompt\[0\]\['content'\] is of type int: must be a string, or a list of parts",
        ),
        ({"role": "user", "content": b"x"}, r"prompt\[0\]\['content'\] is of type bytes"),
        ({"role": "user", "content": None}, r"prompt\[0\]\['content'\] is None"),
        ({"role": "user", "content": ["x"]}, r"prompt\[0\]\['content'\] is of type list"),
    ],
)
def test_a_message_of_a_wrong_type_is_named(lm, message, error):
    with pytest.raises(TypeError, match=error):
        encode_prompt(lm, [message])


def test_a_message_may_have_parts_or_calls_of_tools_instead_of_text(tmp_path):
    lm = lm_with(
        tmp_path, "{% for m in messages %}{{ m['content'][0]['text'] if m['content'] else 'called' }}{% endfor %}"
    )
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    assert encode_prompt(lm, [parts, call]) == encoded("hicalled")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ messages[9]['content'] + 1 }}", "list object has no element 9"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_template_that_raises_is_one_line_with_the_prompt_and_its_message(tmp_path, template, reason):
    lm = lm_with(tmp_path, template)
    with pytest.raises(
        ValueError, match=rf"prompts\[1\]: the chat template of tiny does not take this chat: .*{reason}"
    ) as error:
        encode_prompts(lm, ["x", [USER]])
    assert "\n" not in str(error.value)


def test_a_text_longer_than_the_tokenizers_own_limit_is_no_warning(lm, caplog):
    lm.tokenizer.model_max_length = 10
    logger = logging.getLogger("transformers")
    propagates, logger.propagate = logger.propagate, True
    try:
        assert len(encode_prompt(lm, "x" * 50)) == 50
        assert len(encode_prompt(lm, [{"role": "user", "content": "x" * 50}])) == 50
        assert not caplog.records
        lm.tokenizer("x" * 50)
        assert "indexing errors" in caplog.text  # what is not said above
    finally:
        logger.propagate = propagates


def test_sequences_are_padded_on_the_right_to_the_bucket_of_the_longest():
    tokens, lengths = pad_tokens([[1, 2, 3], [4] * 130], pad_token_id=9)
    assert (tokens.dtype, lengths.dtype) == (np.int32, np.int32)
    assert tokens.shape == (2, bucket_length(130))
    assert lengths.tolist() == [3, 130]
    assert tokens[0].tolist() == [1, 2, 3] + [9] * (tokens.shape[1] - 3)
    assert tokens[1].tolist() == [4] * 130 + [9] * (tokens.shape[1] - 130)


def test_appended_text_of_which_the_tokenizer_makes_nothing_is_refused(lm):
    silent = dataclasses.replace(lm, tokenizer=lambda text, **_: {"input_ids": []})
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty: the tokenizer of 'tiny' makes no token of ' '"):
        encode_appended(silent, " ", 1, lambda row: [], "prompts")
