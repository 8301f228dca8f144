"""Answers in the OpenAI protocol: whole, and as the chunks of a stream."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from tca_jax.serve.engine import DocumentInfo
from tca_jax.serve.streams import Completion

Json = dict[str, Any]
#: The byte of each character of byte-level vocabularies: printable ones are themselves, others follow behind 255.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted(set(range(256)) - {*_PRINTABLE})
_BYTES = {chr(x): x for x in _PRINTABLE} | {chr(256 + i): x for i, x in enumerate(_OTHERS)}


class Chat:
    """An answer of `/v1/chat/completions`.

    Args:
        model: Its name.
        tokenizer: The model's.
    """

    _prefix, _whole, _chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._id, self._created = f"{self._prefix}-{uuid.uuid4().hex}", int(time.time())

    def whole(self, completions: Sequence[Completion], usage: Json) -> Json:
        """The response of a request without a stream."""
        choices = [self._choice(index, each) for index, each in enumerate(completions)]
        return self._of(self._whole, choices) | {"usage": usage}

    def begin(self, index: int) -> Json | None:
        """What stands before the first piece of a choice."""
        return self._piece(index, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, text: str) -> Json:
        """A chunk with more text."""
        return self._piece(index, {"delta": {"content": text}})

    def end(self, index: int, completion: Completion) -> Json:
        """The last chunk of a choice. The log-probabilities of all of its tokens are here."""
        return self._piece(index, {"delta": {}, "logprobs": self.logprobs(completion)}, completion.finish_reason)

    def usage(self, usage: Json) -> Json:
        """The last chunk of a stream that counts tokens."""
        return self._of(self._chunk, []) | {"usage": usage}

    def logprobs(self, completion: Completion) -> Json | None:
        """Log-probabilities of an answer's tokens; None unless they are wanted."""
        if completion.logprobs is None:
            return None
        top = completion.top_logprobs or [[]] * len(completion.tokens)
        content = [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(*each) for each in likeliest]}
            for token, logprob, likeliest in zip(completion.tokens, completion.logprobs, top, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        own = token_bytes(self._tokenizer, token)
        return {"token": shown_token(own), "logprob": logprob, "bytes": list(own)}

    def _choice(self, index: int, completion: Completion) -> Json:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(completion),
            "finish_reason": completion.finish_reason,
        }

    def _piece(self, index: int, fields: Json, finish_reason: str | None = None) -> Json:
        choice = {"index": index, "logprobs": None, **fields, "finish_reason": finish_reason}
        return self._of(self._chunk, [choice])

    def _of(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
            "choices": choices,
        }


class Text(Chat):
    """An answer of `/v1/completions`."""

    _prefix, _whole, _chunk = "cmpl", "text_completion", "text_completion"

    def begin(self, index: int) -> Json | None:
        return None

    def piece(self, index: int, text: str) -> Json:
        return self._piece(index, {"text": text})

    def end(self, index: int, completion: Completion) -> Json:
        return self._piece(index, {"text": "", "logprobs": self.logprobs(completion)}, completion.finish_reason)

    def logprobs(self, completion: Completion) -> Json | None:
        if completion.logprobs is None:
            return None
        own = [token_bytes(self._tokenizer, token) for token in completion.tokens]
        likeliest: list[dict[str, float]] = []
        for pairs in zip(completion.tokens, completion.logprobs, completion.top_logprobs or [], strict=False):
            by_text: dict[str, float] = {}
            # The token itself is one of them, with the same number in both places. Of equal texts the likelier.
            for token, value in [pairs[:2], *(pair for pair in pairs[2] if pair[0] != pairs[0])]:
                text = shown_token(token_bytes(self._tokenizer, token))
                by_text[text] = max(value, by_text.get(text, value))
            likeliest.append(by_text)
        return {
            "tokens": list(map(shown_token, own)),
            "token_logprobs": completion.logprobs,
            "top_logprobs": likeliest if completion.top_logprobs else None,
            "text_offset": text_offsets(own),
        }

    def _choice(self, index: int, completion: Completion) -> Json:
        return {
            "index": index,
            "text": completion.text,
            "logprobs": self.logprobs(completion),
            "finish_reason": completion.finish_reason,
        }


def usage_of(prompts: Sequence[tuple[int, int]], new_tokens: int) -> Json:
    """Counts of tokens: of prompts, which of those a document had been read for, and new ones.

    Args:
        prompts: Of each prompt its tokens behind a document, and the document's.
        new_tokens: Of all answers.
    """
    cached = sum(held for _, held in prompts)
    read = sum(own for own, _ in prompts) + cached
    return {
        "prompt_tokens": read,
        "completion_tokens": new_tokens,
        "total_tokens": read + new_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of a token, of which a character may need several tokens."""
    if token in tokenizer.all_special_ids:
        return tokenizer.decode([token]).encode()
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if "ByteLevel" in repr(decoder) and all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # SentencePiece's fallback
        return bytes.fromhex(byte[1])
    return piece.replace("\u2581", " ").encode()


def shown_token(own: bytes) -> str:
    """A token's text; a part of a character is "bytes:" and its bytes, as in OpenAI's answers."""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def text_offsets(tokens: Sequence[bytes]) -> list[int]:
    """Index of the character of the text that each token begins with, or continues."""
    offsets, begun = [], 0
    for own in tokens:
        continues = own[:1] > b"\x7f" and own[0] < 0xC0
        offsets.append(begun - continues)
        begun += sum(not 0x80 <= byte < 0xC0 for byte in own)
    return offsets


def document_json(info: DocumentInfo) -> Json:
    """What a client is told of a document."""
    return {
        "id": info.id,
        "object": "document",
        "tokens": info.tokens,
        "state": info.state,
        "stored": info.stored,
        "bytes": info.num_bytes,
        "attended_share": info.attended_share,
        "created_at": int(info.created),
        "error": info.error,
    }
