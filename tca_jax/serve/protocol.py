"""Requests of the OpenAI protocol: what is allowed in them, checked by hand, and errors in the protocol's form."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tca_jax.errors import UserError
from tca_jax.serve.loop import EngineEnded

MOST_SAMPLES = 64  # answers to a prompt
MOST_PROMPTS = 256  # of a completion request
MOST_STOPS = 64  # stop strings of a request
MOST_TOP = 20  # likeliest tokens beside each token
_SEEDS = 2**32
_LARGEST = 2**31 - 1
_COMPLETION_TOKENS = 16  # of an answer where `max_tokens` is not given: the protocol's own number


class RequestError(UserError):
    """What a client is told in the protocol's form.

    Attributes:
        status: HTTP status.
        param: Field that is wrong; None if it is none.
        code: Word for programs.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON of the error."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


#: The engine's names of fields that have another one in the protocol.
_RENAMED = MappingProxyType({"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "texts[0]": "prompt"})


def of_user_error(error: UserError) -> RequestError:
    """An error of the library as one of the request, which names the field by its name in the protocol."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineEnded):
        return RequestError(str(error), status=503)
    message = str(error)
    for ours, theirs in _RENAMED.items():
        message = message.replace(ours, theirs)
    named = re.match(r"([a-z_]+)[a-z_.]*(?<!\.)", message)
    param = named[0] if named and named[1] in _ALL_FIELDS else None
    return RequestError(message, param=param)


@dataclasses.dataclass(frozen=True)
class Answering:
    """What requests for chats and for completions have in common.

    Attributes:
        model: Name of the model; None for whichever is served.
        document: Id of a document that the request is about.
        n: Answers to each prompt.
        stream: Whether the answer comes as server-sent events.
        include_usage: Whether the last event counts tokens.
        max_tokens: Most tokens of an answer; None for `default_tokens`, or less where the model has no more positions.
        default_tokens: See `max_tokens`.
        logprobs: None, or how many of the likeliest tokens are wanted beside the log-probability of each token.
        options: Other arguments of `Engine.ask`.
    """

    model: str | None
    document: str | None
    n: int
    stream: bool
    include_usage: bool
    max_tokens: int | None
    default_tokens: int
    logprobs: int | None
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """Body of `/v1/chat/completions`.

    Attributes:
        answering: How the chat is answered.
        messages: With "role" and "content", both text.
        schema: JSON Schema of the answer; None for any text.
    """

    answering: Answering
    messages: list[dict[str, str]]
    schema: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """Body of `/v1/completions`.

    Attributes:
        answering: How prompts are answered.
        prompts: Text or token ids.
    """

    answering: Answering
    prompts: list[str | list[int]]


@dataclasses.dataclass(frozen=True)
class DocumentRequest:
    """Body of `POST /v1/documents`.

    Attributes:
        text: The document.
        system: System message before it, for chats.
        chat: Whether it is read as the beginning of a user's message; None where the model has a chat template.
    """

    text: str
    system: str | None = None
    chat: bool | None = None


#: Fields of the protocol that change no answer here.
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
_Allowed = Mapping[str, tuple[Callable[[Any], bool], str]]


def _nothing(value: Any) -> bool:
    return value in (False, [], {}, "")


#: Fields of the protocol of which one value is allowed: the one that changes nothing.
_ONLY: _Allowed = MappingProxyType(
    {
        "presence_penalty": (lambda x: x == 0, "0; repetition_penalty is there"),
        "frequency_penalty": (lambda x: x == 0, "0; repetition_penalty is there"),
        "logit_bias": (_nothing, "empty"),
    }
)
_ONLY_CHAT: _Allowed = MappingProxyType(
    {
        **_ONLY,
        "tools": (_nothing, "empty: tools are not supported"),
        "functions": (_nothing, "empty: functions are not supported"),
        "tool_choice": (lambda x: x in ("none", "auto"), "none or auto: tools are not supported"),
        "function_call": (lambda x: x in ("none", "auto"), "none or auto: functions are not supported"),
        "modalities": (lambda x: x == ["text"], '["text"]'),
        "audio": (_nothing, "left out: there is text alone"),
        "prediction": (_nothing, "left out: it is not supported"),
        "web_search_options": (_nothing, "left out: it is not supported"),
    }
)
_ONLY_COMPLETION: _Allowed = MappingProxyType(
    {
        **_ONLY,
        "suffix": (_nothing, "left out: it is not supported"),
        "echo": (_nothing, "false: tca_jax.score returns the log-probabilities of a prompt"),
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
    """The JSON of a body.

    Raises:
        RequestError: it is none.
    """
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def chat_request(body: Any, default_tokens: int) -> ChatRequest:
    """Reads the body of a chat.

    Raises:
        RequestError: a field is not allowed; names it.
    """
    fields = _Fields(body, _CHAT_FIELDS, _ONLY_CHAT)
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, most=MOST_TOP)
    if top and not wanted:
        raise RequestError(f"top_logprobs = {top}: needs logprobs = true", param="top_logprobs")
    named = [name for name in ("max_completion_tokens", "max_tokens") if fields.has(name)]
    most = fields.integer(named[0], least=1, most=_LARGEST) if named else None
    if len(named) == 2 and most != fields.integer("max_tokens", least=1, most=_LARGEST):
        raise RequestError("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
    answering = fields.answering(most, default_tokens, (top or 0) if wanted else None)
    return ChatRequest(answering, _messages(fields.value("messages")), _schema(fields.value("response_format")))


def completion_request(body: Any) -> CompletionRequest:
    """Reads the body of a completion.

    Raises:
        RequestError: a field is not allowed; names it.
    """
    fields = _Fields(body, _COMPLETION_FIELDS, _ONLY_COMPLETION)
    most = fields.integer("max_tokens", least=1, most=_LARGEST)
    logprobs = None if fields.value("logprobs") is False else fields.integer("logprobs", most=MOST_TOP)
    answering = fields.answering(most, _COMPLETION_TOKENS, logprobs)
    if (best := fields.integer("best_of", answering.n)) != answering.n:
        raise RequestError(f"best_of = {best}: must be n = {answering.n}; answers are not ranked", param="best_of")
    return CompletionRequest(answering, _prompts(fields.value("prompt")))


def document_request(body: Any) -> DocumentRequest:
    """Reads the body of an upload in JSON.

    Raises:
        RequestError: a field is not allowed; names it.
    """
    fields = _Fields(body, _DOCUMENT_FIELDS, {})
    text, chat = fields.text("text"), fields.flag("chat") if fields.has("chat") else None
    if not text:
        raise RequestError("text: must be given, and not be empty", param="text")
    system = fields.text("system")
    if system is not None and chat is False:
        raise RequestError("system: is for chats; leave out chat = false", param="system")
    return DocumentRequest(text, system, chat)


class _Fields:
    """A JSON object whose fields are known; those that are null count as left out."""

    def __init__(self, body: Any, known: frozenset[str], only: _Allowed) -> None:
        if not isinstance(body, dict):
            raise RequestError(f"the body is {_kind(body)}: must be a JSON object")
        self._fields = {name: value for name, value in body.items() if value is not None}
        for name, value in self._fields.items():
            if name in only:
                allowed, words = only[name]
                if not allowed(value):
                    raise RequestError(f"{name} = {_shown(value)}: must be {words}", param=name, code="unsupported")
            elif name not in known and name not in _IGNORED:
                raise RequestError(
                    f"{_shown(name)} is no field of this request: those are {', '.join(sorted(known))}",
                    param=name[:100],
                    code="unknown_parameter",
                )

    def has(self, name: str) -> bool:
        """Whether a field is given."""
        return name in self._fields

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
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
            raise RequestError(f"{name} = {_shown(value)}: must be an integer from {least} to {most}", param=name)
        return value

    def number(self, name: str, default: float | None, least: float, most: float = math.inf) -> float | None:
        """A field that is a finite number."""
        value = self._fields.get(name, default)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
        if not good or not least <= value <= most:
            allowed = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
            raise RequestError(f"{name} = {_shown(value)}: must be a number {allowed}", param=name)
        return float(value)

    def answering(self, max_tokens: int | None, default_tokens: int, logprobs: int | None) -> Answering:
        """What both kinds of requests have."""
        stream = self.flag("stream")
        seed = self.integer("seed", most=_SEEDS - 1)
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
        if not stream:
            raise RequestError("stream_options: needs stream = true", param="stream_options")
        known = {"include_usage", "include_obfuscation"}
        if not set(options) <= known or not all(isinstance(value, bool) for value in options.values()):
            raise RequestError('stream_options: must be {"include_usage": true or false}', param="stream_options")
        return options.get("include_usage", False)

    def _stop(self) -> tuple[str, ...]:
        stop = self._fields.get("stop", [])
        strings = [stop] if isinstance(stop, str) else stop
        good = isinstance(strings, list) and len(strings) <= MOST_STOPS
        if not good or not all(isinstance(each, str) and 0 < len(each) <= 1000 for each in strings):
            raise RequestError(
                f"stop = {_shown(stop)}: must be a string or at most {MOST_STOPS} strings, of 1 to 1000 characters",
                param="stop",
            )
        return tuple(strings)

    def _of_type(self, name: str, kind: type, words: str) -> Any:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, kind):
            raise RequestError(f"{name} = {_shown(value)}: must be {words}", param=name)
        return value


#: Where a chat has the schema of its answer.
SCHEMA = "response_format.json_schema.schema"


def _schema(form: Any) -> dict[str, Any] | None:
    """The JSON Schema of an answer, from `response_format`; None for any text."""
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or form == {"type": "text"}:
        return None
    if form == {"type": "json_object"}:
        return {"type": "object"}
    if kind != "json_schema" or set(form) != {"type", "json_schema"}:
        raise RequestError(
            f'response_format = {_shown(form)}: must be {{"type": "text"}}, {{"type": "json_object"}}, or '
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}',
            param="response_format",
        )
    given, where = form["json_schema"], "response_format.json_schema"
    if not isinstance(given, dict) or not set(given) <= {"name", "description", "schema", "strict"}:
        raise RequestError(f"{where}: must be an object with name, schema, description, strict", param=where)
    allowed: Sequence[tuple[str, Callable[[Any], bool], str]] = (
        ("name", lambda x: isinstance(x, str) and bool(re.fullmatch("[a-zA-Z0-9_-]{1,64}", x)), _NAME),
        ("schema", lambda x: isinstance(x, dict), "an object, a JSON Schema"),
        ("description", lambda x: isinstance(x, str | None), "a string"),
        ("strict", lambda x: isinstance(x, bool | None), "true or false"),
    )
    for name, holds, words in allowed:
        if not holds(given.get(name)):
            raise RequestError(f"{where}.{name} = {_shown(given.get(name))}: must be {words}", param=f"{where}.{name}")
    return given["schema"]


_NAME = "1 to 64 letters, digits, underscores and hyphens"
_ROLES = MappingProxyType({"system": "system", "developer": "system", "user": "user", "assistant": "assistant"})


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise RequestError("messages: must be a list of messages, at least one", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _message(message: Any, name: str) -> dict[str, str]:
    """A message of text: parts of one become paragraphs, and nothing but role and content is left."""
    if not isinstance(message, dict):
        raise RequestError(f"{name} is {_kind(message)}: must be an object with role and content", param="messages")
    if message.get("role") not in list(_ROLES):  # a list: a role may be no key
        raise RequestError(
            f"{name}.role = {_shown(message.get('role'))}: must be one of {', '.join(_ROLES)}", param="messages"
        )
    for other, value in message.items():
        if other not in ("role", "content", "name") and value is not None and not _nothing(value):
            raise RequestError(f"{name} has {_shown(other)}: must have role and content", param="messages")
    content = message.get("content")
    if isinstance(content, list) and content:
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        content = "\n\n".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise RequestError(f"{name}.content: must be text, or a list of parts of type text", param="messages")
    return {"role": _ROLES[message["role"]], "content": content}


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or _are_ids(value):
        return [value]
    several = isinstance(value, list) and 0 < len(value) <= MOST_PROMPTS
    if several and all(isinstance(each, str) or _are_ids(each) for each in value):
        return value
    raise RequestError(
        f"prompt: must be text, token ids, or a list of 1 to {MOST_PROMPTS} of those; none may be empty", param="prompt"
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(each) is int for each in value)


def _shown(value: Any) -> str:
    """A value of a request, in a message."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _kind(value: Any) -> str:
    kinds: Sequence[tuple[type, str]] = ((dict, "an object"), (list, "a list"), (str, "a string"), (bool, "a boolean"))
    return next((words for kind, words in kinds if isinstance(value, kind)), "null" if value is None else "a number")
