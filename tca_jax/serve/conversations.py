"""Chats and prompts as token ids: about a named document, or about the document that they begin with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tca_jax.engine.prompts import DocumentTemplate, encode_prompt, encode_verbatim, render_chat
from tca_jax.errors import UserError
from tca_jax.serve.engine import Engine
from tca_jax.serve.protocol import DocumentRequest, RequestError

Messages = Sequence[dict[str, str]]
_DOCUMENT = "\u2063document\u2063"  # stands for a document while a chat is rendered
_BETWEEN = "\n\n"  # a document and its question


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A prompt for an engine."""

    document: str | None  # id; None for none
    tokens: list[int]  # after the document
    document_tokens: int = 0


class Conversations:
    """Encodes documents, chats and prompts for the model of an engine. Thread-safe.

    A document is the beginning of the first user's message, so that a chat over it equals the chat that contains it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lm = engine, engine.lm

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(getattr(self._lm.tokenizer, "chat_template", None))

    def upload(self, request: DocumentRequest) -> str:
        """Reads a document; returns its id at once.

        Raises:
            ValueError: the document is too long, or the model has no chat template for it.
        """
        chat = self.has_template if request.chat is None else request.chat
        if (chat or request.system is not None) and not self.has_template:
            raise self._no_template("system" if request.system is not None else "chat")
        if not chat:
            return self._engine.read(encode_prompt(self._lm, request.text, "text"))
        template = DocumentTemplate.of(self._lm, request.system)
        return self._engine.read(template.document(self._lm, request.text, "text"))

    def chat(self, messages: Messages, document: str | None) -> EncodedPrompt:
        """Encodes a chat, about a named document or about the longest document whose tokens it begins with.

        Raises:
            ValueError: the model's template refuses the chat, or the document is unknown.
        """
        if not self.has_template:
            raise self._no_template("messages")
        if document is None:
            tokens = encode_prompt(self._lm, list(messages), "messages")
            found = self._engine.prefix_of(tokens)
            return (
                EncodedPrompt(None, tokens) if found is None else EncodedPrompt(found[0], tokens[found[1] :], found[1])
            )
        if messages[0]["role"] != "user":
            raise RequestError(
                f"messages[0].role = {messages[0]['role']}: must be user in a chat over a document; a system "
                "message stands before the document: give it as system when the document is uploaded",
                param="messages",
            )
        first = {**messages[0], "content": _DOCUMENT + _BETWEEN + messages[0]["content"]}
        _, *after = render_chat(self._lm, [first, *messages[1:]], "messages").split(_DOCUMENT)
        if len(after) != 1:
            raise RequestError(
                f"messages: the chat template of {self._lm.name} changes messages: no document can be a part",
                param="messages",
            )
        return self._append(document, after[0])

    def complete(self, prompt: str | list[int], document: str | None) -> EncodedPrompt:
        """Encodes a prompt: alone, or appended to a document."""
        if document is None or not isinstance(prompt, str):
            tokens = encode_prompt(self._lm, prompt, "prompt")
            return EncodedPrompt(document, tokens, 0 if document is None else self._length(document))
        return self._append(document, prompt)

    def _append(self, document: str, text: str) -> EncodedPrompt:
        length, tokens = self._length(document), encode_verbatim(self._lm, text, "prompt") if text else []
        if not tokens:
            raise RequestError("prompt is empty: at least one token is needed", param="prompt")
        return EncodedPrompt(document, tokens, length)

    def _length(self, document: str) -> int:
        try:
            return self._engine.document(document).tokens
        except UserError as error:
            raise RequestError(str(error), param="document", status=404, code="document_not_found") from None

    def _no_template(self, param: str) -> RequestError:
        return RequestError(
            f"{param}: {self._lm.name} has no chat template; use /v1/completions, and documents with chat = false",
            param=param,
        )
