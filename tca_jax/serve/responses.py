"""Answers in the OpenAI protocol: whole, and as the chunks of a stream."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from tca_jax.engine.prompts import token_text
from tca_jax.serve.engine import DocumentInfo
from tca_jax.serve.streams import Completion

Json = dict[str, Any]
_INCOMPLETE = "\ufffd"  # what a part of a character is decoded to


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
        text = token_text(self._tokenizer, token)
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if _INCOMPLETE in text else list(text.encode()),
        }

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
        return self.token_logprobs(completion.tokens, [*completion.logprobs], completion.top_logprobs or [])

    def token_logprobs(
        self, tokens: list[int], logprobs: Sequence[float | None], top: Sequence[Sequence[tuple[int, float]]]
    ) -> Json:
        """Log-probabilities of tokens.

        Args:
            tokens: Their ids.
            logprobs: Of each; None where nothing is before it.
            top: At the position of each the likeliest ones; empty where they are not wanted.
        """
        texts = [token_text(self._tokenizer, token) for token in tokens]
        likeliest: list[dict[str, float] | None] = []
        for token, logprob, pairs in zip(tokens, logprobs, top, strict=False):
            if logprob is None:
                likeliest.append(None)
                continue
            by_text: dict[str, float] = {}
            # The token itself is one of them, with the same number in both places. Of two that read alike the likelier.
            for other, value in [(token, logprob), *(pair for pair in pairs if pair[0] != token)]:
                text = token_text(self._tokenizer, other)
                by_text[text] = max(value, by_text.get(text, value))
            likeliest.append(by_text)
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": likeliest if top else None,
            "text_offset": [0, *itertools.accumulate(map(len, texts))][: len(texts)],
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
