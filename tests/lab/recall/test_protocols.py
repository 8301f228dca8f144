"""Protocols: what a model is given under each, and which of its answers count."""

import re

import pytest

from tca_jax.lab.recall.facts import Fact
from tca_jax.lab.recall.protocols import PREAMBLES, PROTOCOLS, chat_document, chat_question, completion, is_correct
from tca_jax.lab.recall.tasks import Question
from tca_jax.loading import checkpoint_folder

LEAD = "The access code for amber falcon is "
QUESTION = Question(
    "digits", (Fact("access code", "amber falcon", "482913"),), "Find the access code of amber falcon.", LEAD, "482913"
)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint_folder("recall-tiny"))


def test_a_completion_ends_with_the_answers_first_words():
    expected = f"Some text.\n\nQuestion: Find the access code of amber falcon.\nAnswer: {LEAD}"
    assert completion("Some text.", QUESTION) == expected


def test_a_chat_is_what_the_shipped_template_renders(tokenizer):
    messages = [{"role": "user", "content": f"Some text.\n\n{QUESTION.text}"}]
    chat = chat_document("Some text.") + chat_question(QUESTION)
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.bos_token + chat == rendered
    assert tokenizer(chat)["input_ids"] == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_a_document_and_a_question_give_the_ids_of_the_whole_chat_when_read_apart(tokenizer):
    document, question = chat_document("Some text."), chat_question(QUESTION)
    apart = tokenizer(document)["input_ids"] + tokenizer(question, add_special_tokens=False)["input_ids"]
    assert apart == tokenizer(document + question)["input_ids"]
    eos, assistant = 257, 260
    assert apart[-2:] == [eos, assistant]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("482913.", True),
        ("482913", False),
        ("482914.", False),
        ("4829130.", False),
        (" 482913.", False),
        ("482913. And", False),
        (f"{LEAD}482913.", False),
        ("", False),
    ],
)
def test_a_completion_is_right_if_it_is_the_value_and_a_full_stop(text, right):
    assert is_correct(QUESTION, text, "prefix") is right


@pytest.mark.parametrize("protocol", ["preamble", "late"])
@pytest.mark.parametrize(
    ("text", "right"),
    [
        *((f"{preamble} {LEAD}482913.", True) for preamble in PREAMBLES),
        (f"{LEAD}482913.", True),
        (f"{PREAMBLES[0]} {LEAD}482914.", False),
        (f"{PREAMBLES[0]} {LEAD}482913", False),
        (f"{PREAMBLES[0]} {LEAD}482913. It was there.", False),
        (f"{LEAD}111111. {LEAD}482913.", False),
        (f"{PREAMBLES[0]} 482913.", False),
        (f"{PREAMBLES[0] * 4} {LEAD}482913.", False),
        ("", False),
    ],
)
def test_an_answer_in_a_chat_is_right_if_it_ends_with_the_only_sentence_of_its_kind(text, right, protocol):
    assert is_correct(QUESTION, text, protocol) is right


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ValueError, match=re.escape(f"protocol = 'ruler': must be one of {list(PROTOCOLS)}")):
        is_correct(QUESTION, "482913.", "ruler")
