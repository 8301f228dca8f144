"""The recall suite: the documents, prompts and marks of the shipped model's own evaluation."""

import pytest

from tca_jax.lab.evaluation.recall_tasks import TASKS
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.lab.recall.evaluation import draw_documents
from tca_jax.lab.recall.protocols import chat_answer, chat_document, chat_question, completion
from tca_jax.loading import open_checkpoint

DIGITS = TASKS[0]


@pytest.fixture(scope="module")
def encoder():
    return open_checkpoint("recall-tiny")


def test_prompts_match_the_card(encoder):
    samples = DIGITS.draw(Drawing(encoder, Sources(), 4096, 2, 0))
    for sample, document in zip(samples, draw_documents((0, 2), 2, 4096, "digits"), strict=True):
        question = document.questions[0]

        def encoded(text):
            return encoder.tokenizer(text)["input_ids"]

        assert sample.prompts["prefix"].encode(encoder) == encoded(completion(document.text, question))
        chat = chat_document(document.text) + chat_question(question)
        assert sample.prompts["preamble"].encode(encoder) == encoded(chat)
        read, asked = sample.prompts["late"].encode_apart(encoder)
        assert read == encoded(chat_document(document.text))
        assert read + asked == encoded(chat)
        read, asked = sample.prompts["late-prefix"].encode_apart(encoder)
        assert read + asked == sample.prompts["prefix"].encode(encoder)
        (depth,) = sample.depths
        assert document.text[round(depth * len(document.text)) :].startswith(question.facts[0].line)


def test_exact_answers_are_right(encoder):
    (sample,) = DIGITS.draw(Drawing(encoder, Sources(), 4096, 1, 0))
    question = sample.source
    assert DIGITS.score(sample, chat_answer(question), "late") == (1.0, (True,))
    assert DIGITS.score(sample, f"{question.answer}.", "prefix") == (1.0, (True,))
    assert DIGITS.score(sample, question.answer, "prefix") == (0.0, (False,))
    assert DIGITS.score(sample, f"{question.answer}.", "late-prefix") == (1.0, (True,))


@pytest.mark.parametrize(
    ("length", "message", "enough"),
    [
        (1024, r"^--lengths 1024: recall_digits needs at least 3500 tokens of recall-tiny$", 3500),
        (16000, r"^--lengths 16000: recall_digits needs at most 15936, for answers take up to 448 tokens more", 15936),
    ],
)
def test_lengths_without_room_are_refused(encoder, length, message, enough):
    with pytest.raises(DoesNotFit, match=message):
        DIGITS.draw(Drawing(encoder, Sources(), length, 1, 0, only_check=True))
    assert len(DIGITS.draw(Drawing(encoder, Sources(), enough, 1, 0))) == 1
