"""What stands around a document, its questions and their answers: a chat template's text, or line breaks."""

from __future__ import annotations

import dataclasses

from tca_jax.engine.prompts import Encoder, encode_prompt, encode_verbatim, render_chat
from tca_jax.errors import UserError

_DOCUMENT, _QUESTION, _ANSWER, _NEXT = (f"\u2063{name}\u2063" for name in ("document", "question", "answer", "next"))


@dataclasses.dataclass(frozen=True)
class Frame:
    """Text around the parts of a conversation about a document; with a chat template, a user's message holds both
    document and question, so that the document with all before it is read once.

    Attributes:
        before_document: Before the document.
        before_question: Between the document and a question.
        after_question: Between a question and its answer.
        before_next: Between an answer and the next question.
        verbatim: Whether this is all; otherwise the tokenizer puts its own tokens before the document.
    """

    before_document: str
    before_question: str
    after_question: str
    before_next: str
    verbatim: bool

    @classmethod
    def of(cls, lm: Encoder) -> Frame:
        """The frame of a model's chat template; of a model without one, a line break before each question.

        Raises:
            ValueError: the template changes or leaves out what it is given.
        """
        if not getattr(lm.tokenizer, "chat_template", None):
            return cls("", "\n", "", "\n", verbatim=False)
        first = {"role": "user", "content": f"{_DOCUMENT}\n\n{_QUESTION}"}
        chat = [first, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        before, between, after = _split(lm, render_chat(lm, [first], "chat"), _DOCUMENT, _QUESTION)
        *_, following, _ = _split(lm, render_chat(lm, chat, "chat"), _DOCUMENT, _QUESTION, _ANSWER, _NEXT)
        return cls(before, between, after, following, verbatim=True)

    def document(self, lm: Encoder, text: str, argument: str) -> list[int]:
        """Token ids of what is read once.

        Raises:
            ValueError: the document is empty, or the model has no tokenizer; names `argument`.
        """
        if not self.verbatim or not text:
            return encode_prompt(lm, text, argument)
        return encode_verbatim(lm, self.before_document + text, argument)

    def question(self, text: str, *, follows_answer: bool) -> str:
        """What is appended to ask a question."""
        return (self.before_next if follows_answer else self.before_question) + text + self.after_question


def _split(lm: Encoder, text: str, *marks: str) -> list[str]:
    """The parts of a text between marks that come once each, in this order."""
    parts = []
    for mark in marks:
        if text.count(mark) != 1:
            raise UserError(f"the chat template of {lm.name} does not give messages as they are, once and in order")
        part, text = text.split(mark)
        parts.append(part)
    return [*parts, text]
