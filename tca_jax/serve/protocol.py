"""The OpenAI protocol: requests, checked by hand, answers, and errors."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tca_jax.errors import UserError, explaining
from tca_jax.serve.engine import DocumentInfo, DocumentInUse, EngineEnded, UnknownDocument
from tca_jax.serve.streams import Completion

Json = dict[str, Any]
MOST_SAMPLES = 64  # answers to a prompt
MOST_PROMPTS = 256  # of a completion request
MOST_STOPS = 64  # stop strings of a request
MOST_TOP = 20  # likeliest tokens beside each token
_SEEDS = 2**32
_LARGEST = 2**31 - 1
_COMPLETION_TOKENS = 16  # of an answer where `max_tokens` is not given: the protocol's own number


class RequestError(UserError):
    """An error in the protocol's form: HTTP status, the field that is wrong, a code for programs."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> Json:
        """The JSON of the error."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def require_field(known: Any, param: str | None, message: str, *, status: int = 400, code: str | None = None) -> None:
    """Raises RequestError, which names a field, unless it is known."""
    if not known:
        raise RequestError(message, param=param, status=status, code=code)


def _must(known: Any, name: str, value: Any, words: str, code: str | None = None) -> None:
    require_field(known, name.partition("[")[0], f"{name} = {_shown(value)}: must be {words}", code=code)


#: Status, field and code of the engine's own errors.
_STATUS: Mapping[type[UserError], tuple[int, str | None, str | None]] = MappingProxyType(
    {
        EngineEnded: (503, None, None),
        UnknownDocument: (404, "document", "document_not_found"),
        DocumentInUse: (409, None, "document_in_use"),
    }
)
#: The engine's names of fields that have another one in the protocol.
_RENAMED = MappingProxyType({"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"})


def of_user_error(error: UserError) -> RequestError:
    """An error of the library as one of the request, with the protocol's name of the field."""
    if isinstance(error, RequestError):
        return error
    for kind, (status, param, code) in _STATUS.items():
        if isinstance(error, kind):
            return RequestError(str(error), status=status, param=param, code=code)
    message = str(error)
    for ours, theirs in _RENAMED.items():
        message = message.replace(ours, theirs)
    named = re.match(r"([a-z_]+)[a-z_.]*(?<!\.)", message)
    return RequestError(message, param=named[0] if named and named[1] in _ALL_FIELDS else None)


# Requests


@dataclasses.dataclass(frozen=True)
class Answering:
    """Fields that chats and completions share."""

    model: str | None  # None for the one that is served
    document: str | None  # id
    n: int  # answers to each prompt
    stream: bool
    include_usage: bool  # in the last event of a stream
    max_tokens: int | None  # None for `default_tokens`, or less where the model has no more positions
    default_tokens: int
    logprobs: int | None  # None, or the number of likeliest tokens beside the log-probability of each token
    options: Mapping[str, Any]  # others of `Engine.ask`


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """Body of `/v1/chat/completions`."""

    answering: Answering
    messages: list[dict[str, str]]  # role and content
    schema: Json | None  # JSON Schema of the answer; None for any text


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """Body of `/v1/completions`."""

    answering: Answering
    prompts: list[str | list[int]]  # text or token ids


@dataclasses.dataclass(frozen=True)
class DocumentRequest:
    """Body of `POST /v1/documents`."""

    text: str
    system: str | None = None  # message before it, for chats
    chat: bool | None = None  # whether it begins a user's message; None where the model has a chat template


#: Fields of the protocol that change no answer here.
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
_Allowed = Mapping[str, tuple[tuple[Any, ...], str]]
_EMPTY: tuple[Any, ...] = (False, [], {}, "")
#: Fields of the protocol of which only values that change nothing are allowed.
_ONLY: _Allowed = MappingProxyType(
    {
        "presence_penalty": ((0,), "0; repetition_penalty is there"),
        "frequency_penalty": ((0,), "0; repetition_penalty is there"),
        "logit_bias": (_EMPTY, "empty"),
    }
)
_ONLY_CHAT: _Allowed = MappingProxyType(
    {
        **_ONLY,
        "tools": (_EMPTY, "empty: tools are not supported"),
        "functions": (_EMPTY, "empty: functions are not supported"),
        "tool_choice": (("none", "auto"), "none or auto: tools are not supported"),
        "function_call": (("none", "auto"), "none or auto: functions are not supported"),
        "modalities": ((["text"],), '["text"]'),
    }
)
_ONLY_COMPLETION: _Allowed = MappingProxyType(
    {
        **_ONLY,
        "suffix": (_EMPTY, "left out: it is not supported"),
        "echo": (_EMPTY, "false: tca_jax.score returns the log-probabilities of a prompt"),
    }
)
_SHARED_FIELDS = frozenset(
    {"model", "document", "n", "stream", "stream_options", "seed", "max_tokens", "min_tokens", "stop", "temperature"}
) | {"top_p", "top_k", "min_p", "repetition_penalty", "logprobs"}
_CHAT_FIELDS = _SHARED_FIELDS | {"messages", "max_completion_tokens", "top_logprobs", "response_format"}
_COMPLETION_FIELDS = _SHARED_FIELDS | {"prompt", "best_of"}
_DOCUMENT_FIELDS = frozenset({"text", "system", "chat"})
_ALL_FIELDS = _CHAT_FIELDS | _COMPLETION_FIELDS | _DOCUMENT_FIELDS


def parse_json(body: bytes) -> Any:
    """The JSON of a body. RequestError if it is none."""
    none: dict[str, Any] = {}  # JSON has neither NaN nor Infinity
    with explaining("the body is not valid JSON", ValueError, LookupError, RecursionError, error=RequestError):
        return json.loads(body, parse_constant=none.__getitem__)


def chat_request(body: Any, default_tokens: int) -> ChatRequest:
    """Reads the body of a chat. RequestError names the field that is not allowed."""
    fields = _Fields(body, _CHAT_FIELDS, _ONLY_CHAT)
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, most=MOST_TOP)
    require_field(wanted or not top, "top_logprobs", f"top_logprobs = {top}: needs logprobs = true")
    named = [name for name in ("max_completion_tokens", "max_tokens") if fields.value(name) is not None]
    limits = [fields.integer(name, least=1) for name in named]
    differ = "max_tokens and max_completion_tokens differ: give one of them"
    require_field(len({*limits}) < 2, "max_tokens", differ)
    answering = fields.answering(limits[0] if limits else None, default_tokens, (top or 0) if wanted else None)
    return ChatRequest(answering, _messages(fields.value("messages")), _schema(fields.value("response_format")))


def completion_request(body: Any) -> CompletionRequest:
    """Reads the body of a completion. RequestError names the field that is not allowed."""
    fields = _Fields(body, _COMPLETION_FIELDS, _ONLY_COMPLETION)
    logprobs = None if fields.value("logprobs") is False else fields.integer("logprobs", most=MOST_TOP)
    answering = fields.answering(fields.integer("max_tokens", least=1), _COMPLETION_TOKENS, logprobs)
    best = fields.integer("best_of", answering.n)
    _must(best == answering.n, "best_of", best, f"n = {answering.n}; answers are not ranked")
    return CompletionRequest(answering, _prompts(fields.value("prompt")))


def document_request(content_type: str, body: bytes) -> DocumentRequest:
    """Reads an upload, text or JSON. RequestError names the field that is not allowed."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "text/plain":
        with explaining("the body is not valid UTF-8 text", UnicodeDecodeError, error=RequestError):
            return DocumentRequest(body.decode("utf-8"))
    if kind != "application/json":
        raise RequestError(f"Content-Type = {json.dumps(kind)}: must be text/plain, or application/json", status=415)
    fields = _Fields(parse_json(body), _DOCUMENT_FIELDS, {})
    text, chat = fields.text("text"), None if fields.value("chat") is None else fields.flag("chat")
    require_field(text, "text", "text: must be given, and not be empty")
    system = fields.text("system")
    require_field(system is None or chat is not False, "system", "system: is for chats; leave out chat = false")
    return DocumentRequest(text or "", system, chat)


class _Fields:
    """A JSON object whose fields are known; those that are null count as left out."""

    def __init__(self, body: Any, known: frozenset[str], only: _Allowed) -> None:
        if not isinstance(body, dict):
            raise RequestError(f"the body is {_shown(body)}: must be a JSON object")
        self._fields = {name: value for name, value in body.items() if value is not None}
        for name, value in self._fields.items():
            if name in only:
                allowed, words = only[name]
                _must(value in allowed, name, value, words, "unsupported")
            else:
                text = f"{_shown(name)} is no field of this request: those are {', '.join(sorted(known))}"
                require_field(name in known | _IGNORED, name[:100], text, code="unknown_parameter")

    def value(self, name: str) -> Any:
        """A field's value; None where it is left out."""
        return self._fields.get(name)

    def text(self, name: str) -> str | None:
        """A field that is text."""
        return self._of_type(name, str, "a string")

    def flag(self, name: str) -> bool:
        """A field that is true or false; false where it is left out."""
        return bool(self._of_type(name, bool, "true or false"))

    def integer(self, name: str, default: int | None = None, *, least: int = 0, most: int = _LARGEST) -> int | None:
        """A field that is an integer."""
        value = self._fields.get(name, default)
        known = value is None or (type(value) is int and least <= value <= most)
        _must(known, name, value, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: float | None, least: float, most: float = math.inf) -> float | None:
        """A field that is a finite number."""
        value = self._fields.get(name, default)
        if value is None:
            return None
        allowed = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
        known = type(value) in (int, float) and abs(value) < 1e300 and least <= value <= most
        _must(known, name, value, f"a number {allowed}")
        return float(value)

    def answering(self, max_tokens: int | None, default_tokens: int, logprobs: int | None) -> Answering:
        """Fields that both kinds of requests have."""
        stream, seed = self.flag("stream"), self.integer("seed", most=_SEEDS - 1)
        options = {
            "min_new_tokens": self.integer("min_tokens", 0),
            "seed": secrets.randbelow(_SEEDS) if seed is None else seed,
            "stop": self._stop(),
            "temperature": self.number("temperature", 1.0, 0),
            "top_p": self.number("top_p", None, 0, 1),
            "top_k": self.integer("top_k", least=1),
            "min_p": self.number("min_p", None, 0, 1),
            "repetition_penalty": self.number("repetition_penalty", None, 0),
        }
        return Answering(
            model=self.text("model"),
            document=self.text("document"),
            n=self.integer("n", 1, least=1, most=MOST_SAMPLES) or 1,
            stream=stream,
            include_usage=self._include_usage(stream),
            max_tokens=max_tokens,
            default_tokens=default_tokens,
            logprobs=logprobs,
            options=options,
        )

    def _include_usage(self, stream: bool) -> bool:
        options = self._of_type("stream_options", dict, "an object")
        if options is None:
            return False
        require_field(stream, "stream_options", "stream_options: needs stream = true")
        flags = {"include_usage", "include_obfuscation"}
        known = set(options) <= flags and all(isinstance(value, bool) for value in options.values())
        _must(known, "stream_options", options, '{"include_usage": true or false}')
        return options.get("include_usage", False)

    def _stop(self) -> tuple[str, ...]:
        stop = self._fields.get("stop", [])
        strings = [stop] if isinstance(stop, str) else stop
        several = isinstance(strings, list) and len(strings) <= MOST_STOPS
        known = several and all(isinstance(each, str) and 0 < len(each) <= 1000 for each in strings)
        _must(known, "stop", stop, f"a string or at most {MOST_STOPS} strings, of 1 to 1000 characters")
        return tuple(strings)

    def _of_type(self, name: str, kind: type, words: str) -> Any:
        value = self._fields.get(name)
        _must(isinstance(value, kind | None), name, value, words)
        return value


#: The field of a chat with the schema of its answer.
SCHEMA = "response_format.json_schema.schema"


def _schema(form: Any) -> Json | None:
    """The JSON Schema of an answer, from `response_format`; None for any text."""
    if form is None or form == {"type": "text"}:
        return None
    if form == {"type": "json_object"}:
        return {"type": "object"}
    known = isinstance(form, dict) and form.get("type") == "json_schema" and set(form) == {"type", "json_schema"}
    schemas = '{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
    _must(known, "response_format", form, f'{{"type": "text"}}, {{"type": "json_object"}}, or {schemas}')
    given, where = form["json_schema"], "response_format.json_schema"
    known = isinstance(given, dict) and set(given) <= {"name", "description", "schema", "strict"}
    _must(known, where, given, "an object with name, schema, description, strict")
    name, schema, strict = given.get("name"), given.get("schema"), given.get("strict")
    known = isinstance(name, str) and re.fullmatch("[a-zA-Z0-9_-]{1,64}", name)
    _must(known, f"{where}.name", name, "1 to 64 letters, digits, underscores and hyphens")
    _must(isinstance(schema, dict), SCHEMA, schema, "an object, a JSON Schema")
    _must(isinstance(strict, bool | None), f"{where}.strict", strict, "true or false")
    return schema


_ROLES = MappingProxyType({"system": "system", "developer": "system", "user": "user", "assistant": "assistant"})


def _messages(value: Any) -> list[dict[str, str]]:
    _must(isinstance(value, list) and value, "messages", value, "a list of messages, at least one")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _message(message: Any, name: str) -> dict[str, str]:
    """A message of text: parts become paragraphs, and nothing but role and content is left."""
    _must(isinstance(message, dict), name, message, "an object with role and content")
    role, content = message.get("role"), message.get("content")
    _must(role in list(_ROLES), f"{name}.role", role, f"one of {', '.join(_ROLES)}")  # a list: roles may be unhashable
    for other, value in message.items():
        known = other in ("role", "content", "name") or value is None or value in _EMPTY
        require_field(known, "messages", f"{name} has {_shown(other)}: must have role and content")
    if isinstance(content, list) and content:
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        content = "\n\n".join(texts) if len(texts) == len(content) else None
    _must(isinstance(content, str), f"{name}.content", message.get("content"), "text, or a list of parts of type text")
    return {"role": _ROLES[role], "content": content}


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or _are_ids(value):
        return [value]
    several = isinstance(value, list) and 0 < len(value) <= MOST_PROMPTS
    known = several and all(isinstance(each, str) or _are_ids(each) for each in value)
    _must(known, "prompt", value, f"text, token ids, or a list of 1 to {MOST_PROMPTS} of those; none may be empty")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(each) is int for each in value)


def _shown(value: Any) -> str:
    """A value of a request, in a message."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


class Chat:
    """An answer of `/v1/chat/completions`."""

    _prefix, _object, _chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._id, self._created = f"{self._prefix}-{uuid.uuid4().hex}", int(time.time())

    def response(self, completions: Sequence[Completion], usage: Json) -> Json:
        """The response of a request without a stream."""
        choices = [
            {"index": i, **self._content(each), "logprobs": self.logprobs(each), "finish_reason": each.finish_reason}
            for i, each in enumerate(completions)
        ]
        return self._of(self._object, choices) | {"usage": usage}

    def begin(self, index: int) -> Json | None:
        """The event before the first piece of a choice."""
        return self._piece(index, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, text: str) -> Json:
        """An event with more text."""
        return self._piece(index, {"delta": {"content": text}})

    def end(self, index: int, completion: Completion) -> Json:
        """The last event of a choice, with the log-probabilities of all of its tokens."""
        return self._piece(index, {"delta": {}, "logprobs": self.logprobs(completion)}, completion.finish_reason)

    def usage(self, usage: Json) -> Json:
        """The last event of a stream that counts tokens."""
        return self._of(self._chunk, []) | {"usage": usage}

    def logprobs(self, completion: Completion) -> Json | None:
        """Log-probabilities of an answer's tokens; None unless they are requested."""
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

    def _content(self, completion: Completion) -> Json:
        return {"message": {"role": "assistant", "content": completion.text, "refusal": None}}

    def _piece(self, index: int, fields: Json, finish_reason: str | None = None) -> Json:
        return self._of(self._chunk, [{"index": index, "logprobs": None, **fields, "finish_reason": finish_reason}])

    def _of(self, kind: str, choices: list[Json]) -> Json:
        fields = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**fields, "system_fingerprint": None, "choices": choices}


class Text(Chat):
    """An answer of `/v1/completions`."""

    _prefix, _object, _chunk = "cmpl", "text_completion", "text_completion"

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
        special = self._tokenizer.all_special_ids  # not in the text
        shown = [b"" if token in special else each for token, each in zip(completion.tokens, own, strict=True)]
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
            "text_offset": text_offsets(shown),
        }

    def _content(self, completion: Completion) -> Json:
        return {"text": completion.text}


def usage(cached: int, prompt: int, new: int) -> Json:
    """Counts of tokens: of prompts with their documents, `cached` of which were documents, and of answers."""
    total = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return {**total, "prompt_tokens_details": {"cached_tokens": cached}}


#: The byte of each character of byte-level vocabularies: printable ones are themselves, others follow after 255.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted(set(range(256)) - {*_PRINTABLE})
_BYTES = {chr(x): x for x in _PRINTABLE} | {chr(256 + i): x for i, x in enumerate(_OTHERS)}


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of a token; a character may need several tokens."""
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
        offsets.append(begun - (0x80 <= own[0] < 0xC0 if own else False))
        begun += sum(not 0x80 <= byte < 0xC0 for byte in own)
    return offsets


def document_json(info: DocumentInfo) -> Json:
    """A document as clients see it."""
    fields = {"id": info.id, "object": "document", "tokens": info.tokens, "state": info.state, "stored": info.stored}
    rest = {"bytes": info.num_bytes, "attended_share": info.attended_share, "created_at": int(info.created)}
    return {**fields, **rest, "error": info.error}
