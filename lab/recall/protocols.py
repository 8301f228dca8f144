"""Protocols: prompts of a question, and the answers that count as right.

"prefix": the prompt ends with the question and the answer's first words (RULER's way). "preamble": a chat; the model
answers with words of its own first. "late": the same chat, but the question comes to a context that was read without
it.
"""

from __future__ import annotations

from tca_jax.errors import require_name
from tca_jax.lab.recall.tasks import Question

PROTOCOLS = ("prefix", "preamble", "late")
#: Of evaluations alone: as "late", but the answer's first words come with the question, as kvpress asks.
LATE_PREFIX = "late-prefix"
EVALUATION_PROTOCOLS = (*PROTOCOLS, LATE_PREFIX)
#: Where the document is read without the question, and where the answer's first words are given.
READ_FIRST, WITH_LEAD = ("late", LATE_PREFIX), ("prefix", LATE_PREFIX)

#: With what an answer in a chat begins.
PREAMBLES = (
    "I have read the whole text to find this.",
    "Let me look for that in the text above.",
    "This is what the text says about it.",
    "Sure, I went through the text for you.",
    "There is a line about this in the text.",
    "I found one place that speaks of it.",
)


def completion(text: str, question: Question) -> str:
    """The prompt of "prefix": a plain text that the model continues."""
    return f"{text}{asked(question)}{question.lead}"


def asked(question: Question) -> str:
    """The question, between a text and an answer without a chat."""
    return f"\n\nQuestion: {question.text}\nAnswer: "


def is_correct(question: Question, text: str, protocol: str) -> bool:
    """Whether a model's continuation is exactly the answer, in a chat after a preamble."""
    require_name(f"protocol = {protocol!r}", protocol, PROTOCOLS)
    if protocol == "prefix":
        return text == f"{question.answer}."
    before = text.removesuffix(question.sentence)
    # A first attempt that was wrong is no preamble.
    return before != text and question.lead not in before and len(before) <= 2 * max(map(len, PREAMBLES))
