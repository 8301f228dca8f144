"""Chats over documents: which part of a chat is a document, and what the model's template puts around it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from tca_jax.engine.prompts import DocumentTemplate, encode_prompt, encode_verbatim, render_chat
from tca_jax.errors import UserError
from tca_jax.serve.document import document_id
from tca_jax.serve.engine import Engine
from tca_jax.serve.protocol import DocumentRequest, RequestError

Messages = Sequence[dict[str, str]]
_DOCUMENT = "\u2063document\u2063"  # stands for a document while a chat is rendered
_BETWEEN = "\n\n"  # a document and the question behind it
_HEAD = 64  # characters of a document that are compared before all of it is hashed


@dataclasses.dataclass(frozen=True)
class Asked:
    """What an engine is asked.

    Attributes:
        document: Id of the document; None for none.
        prompt: What follows it.
        document_tokens: Tokens of the document.
    """

    document: str | None
    prompt: list[int]
    document_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class _Text:
    """What is remembered of a document's text."""

    head: str
    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> _Text:
        return cls(text[:_HEAD], len(text), _digest(text))

    def begins(self, content: str) -> bool:
        """Whether a message begins with the document, and goes on behind it."""
        if not content.startswith(self.head) or not content[self.length :].startswith("\n"):
            return False
        return _digest(content[: self.length]) == self.digest


class Conversations:
    """Reads documents and chats as an engine's model is to see them. Threads may call it at any time.

    A document is the beginning of the first user's message, so that a chat over it is the chat that holds it.

    Args:
        engine: Its model needs a tokenizer.
        recognize_tokens: A chat's first user's message is split at its last empty line where it has at least so many
            tokens before it: what is before is a document. 0 recognizes none.
        most_recognized: Documents of that kind that are kept; the one that was not asked about for longest is dropped.
    """

    def __init__(self, engine: Engine, recognize_tokens: int, most_recognized: int) -> None:
        self._engine, self._lm = engine, engine.lm
        self._least, self._most = recognize_tokens, most_recognized
        self._texts: dict[str, _Text] = {}  # of documents that were uploaded
        self._recognized: OrderedDict[str, None] = OrderedDict()  # least recently asked about first
        self._lock = threading.Lock()

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(getattr(self._lm.tokenizer, "chat_template", None))

    def upload(self, request: DocumentRequest) -> str:
        """Reads a document; returns its id at once.

        Raises:
            ValueError: it is not allowed, or too long.
        """
        ids, chat = self._uploaded(request)
        document = self._engine.read(ids)
        with self._lock:
            self._recognized.pop(document, None)
            if chat:
                self._texts[document] = _Text.of(request.text)
        return document

    def id_of_upload(self, request: DocumentRequest) -> str:
        """The id of a document, which is not read: the same from every engine of a model. ValueError as in `upload`."""
        return self._id(self._uploaded(request)[0])

    def id_of_chat(self, messages: Messages) -> str | None:
        """The id of the document that a chat holds, which is not read; None where it is read as a whole."""
        with contextlib.suppress(RequestError):
            if self.has_template and (held := self._held(messages)) is not None:
                return self._id(held[0])
        return None

    def _id(self, ids: list[int]) -> str:
        return document_id(self._lm, ids, (len(ids),), named=True)

    def _uploaded(self, request: DocumentRequest) -> tuple[list[int], bool]:
        """The tokens of a document, and whether it is part of chats."""
        chat = self.has_template if request.chat is None else request.chat
        if (chat or request.system is not None) and not self.has_template:
            raise self._no_template("system" if request.system is not None else "chat")
        if chat:
            return DocumentTemplate.of(self._lm, request.system).document(self._lm, request.text, "text"), True
        return encode_prompt(self._lm, request.text, "text"), False

    def forget(self, document: str) -> None:
        """Drops a document. ValueError if there is none of this id, or it is in use."""
        self._engine.forget(document)
        with self._lock:
            self._recognized.pop(document, None)
            self._texts.pop(document, None)

    def ask(self, messages: Messages, document: str | None) -> Asked:
        """What a chat asks, about a document that it names or holds.

        Raises:
            ValueError: the model's template does not take the chat, or there is no such document.
        """
        if not self.has_template:
            raise self._no_template("messages")
        if document is not None:
            if messages[0]["role"] != "user":
                raise RequestError(
                    f"messages[0].role = {messages[0]['role']}: must be user in a chat over a document; a system "
                    "message stands before the document: give it as system when the document is uploaded",
                    param="messages",
                )
            _, after = self._around(messages, 0, _BETWEEN + messages[0]["content"])
            return self._behind(document, after)
        with contextlib.suppress(RequestError):  # a template that changes messages: the chat is read as a whole
            if (held := self._held(messages)) is not None:
                ids, after = held
                return self._behind(self._read(ids), after)
        return Asked(None, encode_prompt(self._lm, list(messages), "messages"))

    def _held(self, messages: Messages) -> tuple[list[int], str] | None:
        """Tokens of the document that a chat holds, and the text behind it; None where it holds none.

        Raises:
            RequestError: the model's template changes messages.
        """
        first = 1 if messages[0]["role"] == "system" and len(messages) > 1 else 0
        content = messages[first]["content"]
        length = self._document_length(content) if messages[first]["role"] == "user" else 0
        if not length:
            return None
        before, after = self._around(messages, first, content[length:])
        ids = encode_verbatim(self._lm, before + content[:length], "messages")
        return (ids, after) if len(ids) >= self._least or self._is_uploaded(content[:length]) else None

    def complete(self, prompt: str | list[int], document: str | None) -> Asked:
        """What a prompt asks: as it is, or behind a document."""
        if document is None or not isinstance(prompt, str):
            ids = encode_prompt(self._lm, prompt, "prompt")
            return Asked(document, ids, 0 if document is None else self._tokens(document))
        return self._behind(document, prompt)

    def _behind(self, document: str, text: str) -> Asked:
        tokens, ids = self._tokens(document), encode_verbatim(self._lm, text, "prompt") if text else []
        if not ids:
            raise RequestError("prompt is empty: at least one token is needed", param="prompt")
        return Asked(document, ids, tokens)

    def _tokens(self, document: str) -> int:
        try:
            return self._engine.document(document).tokens
        except UserError as error:
            raise RequestError(str(error), param="document", status=404, code="document_not_found") from None

    def _around(self, messages: Messages, index: int, rest: str) -> tuple[str, str]:
        """Text before and behind a document with which a message begins; `rest` is the message behind it."""
        message = {**messages[index], "content": _DOCUMENT + rest}
        chat = [*messages[:index], message, *messages[index + 1 :]]
        before, *behind = render_chat(self._lm, chat, "messages").split(_DOCUMENT)
        if len(behind) != 1:
            raise RequestError(
                f"messages: the chat template of {self._lm.name} does not give them as they are, so no document can "
                "be a part of them",
                param="messages",
            )
        return before, behind[0]

    def _document_length(self, content: str) -> int:
        """Characters of a message that are a document: the longest that was uploaded, or up to its last empty line."""
        if not self._least:
            return 0
        with self._lock:
            texts = list(self._texts.values())
        if known := [text.length for text in texts if text.begins(content)]:
            return max(known)
        length = content.rfind(_BETWEEN)
        return length if length >= self._least else 0  # tokens are no shorter than a character

    def _is_uploaded(self, text: str) -> bool:
        with self._lock:
            return _Text.of(text) in self._texts.values()

    def _read(self, ids: list[int]) -> str:
        """Reads a document that a chat holds, and drops one that nobody asked about for long."""
        document = self._engine.read(ids)
        with self._lock:
            if document in self._texts:
                return document
            self._recognized[document] = None
            self._recognized.move_to_end(document)
            for old in list(self._recognized)[: -self._most]:
                with contextlib.suppress(UserError, OSError):  # it is in use, or gone, or cannot be removed from disk
                    self._engine.forget(old)
                    del self._recognized[old]
        return document

    def _no_template(self, param: str) -> RequestError:
        return RequestError(
            f"{param}: {self._lm.name} has no chat template; use /v1/completions, and documents with chat = false",
            param=param,
        )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
