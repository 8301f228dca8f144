"""The OpenAI protocol: requests, responses, and errors."""

from __future__ import annotations

import codecs
import itertools
import json
import logging
import re
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from tca_jax.engine.generation_config import GenerationConfig
from tca_jax.engine.prompts import shown_token, token_bytes
from tca_jax.errors import UserError, explaining
from tca_jax.serve.constraints import NoGrammars
from tca_jax.serve.engine import DocumentInUse, EngineEnded, UnknownDocument
from tca_jax.serve.streams import Completion

Json = dict[str, Any]
MOST_PROMPTS = 256  # of a completion request
_log = logging.getLogger(__name__)


class RequestError(UserError):
    """An error in the protocol's form: HTTP status, the field that is wrong, a code for programs."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> Json:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def require_field(known: Any, param: str | None, message: str, *, status: int = 400, code: str | None = None) -> None:
    """Raises RequestError, which names a field, unless it is known."""
    if not known:
        raise RequestError(message, param=param, status=status, code=code)


# Requests


_EMPTY: tuple[Any, ...] = (None, False, [], {}, "")
_NO_CHOICE = ("must be none or auto: tools and functions are not supported", "none", "auto")
#: Fields of OpenAI's that are not supported: an error, and the values that are allowed.
_UNSUPPORTED: Json = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ("must be 0; repetition_penalty is there", 0)),
    "logit_bias": ("must be empty", *_EMPTY),
    **dict.fromkeys(("tools", "functions"), ("must be empty: tools and functions are not supported", *_EMPTY)),
    **dict.fromkeys(("tool_choice", "function_call"), _NO_CHOICE),
    "modalities": ('must be ["text"]', ["text"]),
    "suffix": ("must be left out: it is not supported", *_EMPTY),
    "echo": ("must be false: tca_jax.score returns log-probabilities of a prompt", *_EMPTY),
}
#: Fields that change no answer.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}


class _Fields(BaseModel):
    """A JSON object. Fields that are null count as left out."""

    model_config = {"strict": True, "frozen": True, "allow_inf_nan": False}
    ignored: ClassVar[Collection[str]] = ()  # fields that change nothing
    ignored_values: ClassVar[tuple[Any, ...]] = (None,)  # of unknown fields

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Json:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        if not isinstance(body, dict):
            raise PydanticCustomError("value_error", f"must be an object with {', '.join(known)}")
        for name in body.keys() - {*known, *cls.ignored}:
            if body[name] not in cls.ignored_values:
                kind, words, allowed = "unknown_parameter", f"unknown field: must be one of {', '.join(known)}", ()
                if issubclass(cls, AnswerRequest) and name in _UNSUPPORTED:
                    kind, (words, *allowed) = "unsupported", _UNSUPPORTED[name]
                if body[name] not in allowed:
                    raise PydanticCustomError(kind, words, {"field": name.encode(errors="replace").decode()})
        return {name: body[name] for name in known if body.get(name) is not None}


def _where(holds: Callable[[Any, Json], Any], words: str) -> AfterValidator:
    """Allows the values of a field for which a condition of it and the fields before it holds."""

    def check(value: Any, info: Any) -> Any:
        if not holds(value, info.data):
            raise PydanticCustomError("value_error", words)
        return value

    return AfterValidator(check)


_Tokens = Annotated[int, Field(ge=1)]
_Logprobs = Annotated[int, Field(ge=0, le=20)]  # likeliest tokens beside each token
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_Stops = Annotated[list[_Stop], BeforeValidator(lambda x: x if isinstance(x, list) else [x])]
_in_streams = _where(lambda _, given: given.get("stream"), "needs stream = true")
_agreeing = _where(lambda most, given: given.get("max_tokens") in (None, most), "differs from max_tokens: give one")


class StreamOptions(_Fields):
    """Stream contents beside the answers."""

    include_usage: bool = False  # in the last event
    include_obfuscation: bool = False  # changes nothing


class AnswerRequest(_Fields):
    """Fields that chats and completions share. `GenerationConfig` checks the bounds of its fields."""

    ignored = _IGNORED
    default_tokens: ClassVar[int | None] = None  # of an answer without `max_tokens`; None for the server's own number

    model: str | None = None  # None for the one that is served
    document: str | None = None  # id
    n: int = Field(1, ge=1, le=64)  # answers to each prompt
    stream: bool = False
    stream_options: Annotated[StreamOptions, _in_streams] = StreamOptions()
    max_tokens: _Tokens | None = None
    max_completion_tokens: Annotated[_Tokens | None, _agreeing] = None
    min_tokens: int = 0
    stop: _Stops = Field([], max_length=64, fail_fast=True)
    seed: int = Field(default_factory=lambda: secrets.randbelow(2**32))
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Part(BaseModel, strict=True):
    """A paragraph of a message."""

    type: Literal["text"]
    text: str


class Message(_Fields):
    """A message of a chat. Answers that clients send back have more fields, which are empty."""

    ignored, ignored_values = ("name",), _EMPTY

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[Part],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(lambda x: x if isinstance(x, list) else [{"type": "text", "text": x}]),
    ]

    def as_dict(self) -> dict[str, str]:
        """The message for a chat template."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n\n".join(part.text for part in self.content)}


class JsonSchema(_Fields):
    """A named JSON Schema."""

    ignored = ("description",)

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    of: Json = Field(alias="schema")
    strict: bool = False  # changes nothing: every answer is constrained


class ResponseFormat(_Fields):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[
        JsonSchema | None,
        _where(
            lambda schema, given: (schema is None) == (given.get("type") != "json_schema"),
            "must be given if type is json_schema, and only then",
        ),
        Field(validate_default=True),
    ] = None

    @property
    def schema_of_answer(self) -> Json | None:
        """JSON Schema of the answer; None for any text."""
        if self.json_schema is not None:
            return self.json_schema.of
        return {"type": "object"} if self.type == "json_object" else None


class ChatRequest(AnswerRequest):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    logprobs: bool = False
    top_logprobs: Annotated[
        _Logprobs, _where(lambda top, given: not top or given.get("logprobs"), "needs logprobs = true")
    ] = 0
    response_format: ResponseFormat = ResponseFormat(type="text")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(each) is int for each in value)


def _prompts(value: Any) -> list[Any]:
    prompts = [value] if isinstance(value, str) or _are_ids(value) else value
    several = isinstance(prompts, list) and 0 < len(prompts) <= MOST_PROMPTS
    if not several or not all(isinstance(each, str) or _are_ids(each) for each in prompts):
        words = f"must be text, token ids, or a list of 1 to {MOST_PROMPTS} of those; none may be empty"
        raise PydanticCustomError("value_error", words)
    return prompts


class CompletionRequest(AnswerRequest):
    """Body of `/v1/completions`."""

    default_tokens = 16

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]  # each text or token ids
    logprobs: Annotated[_Logprobs | None, BeforeValidator(lambda value: None if value is False else value)] = None
    best_of: Annotated[
        int | None, _where(lambda best, given: best == given.get("n", best), "must be n; answers are not ranked")
    ] = None


class DocumentRequest(_Fields):
    """Body of `POST /v1/documents`."""

    text: str = Field(min_length=1)
    chat: bool | None = None  # whether it begins a user's message; None where the model has a chat template
    system: Annotated[
        str | None,  # message before it, for chats
        _where(lambda _, given: given.get("chat") is not False, "is for chats; leave out chat = false"),
    ] = None


def generation_config(request: ChatRequest | CompletionRequest, max_new_tokens: int) -> GenerationConfig:
    """How the answers to a request are drawn. ValueError where a field is not allowed."""
    top = request.top_logprobs if isinstance(request, ChatRequest) else request.logprobs
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        min_new_tokens=request.min_tokens,
        logprobs=top or (request.logprobs is not None and request.logprobs is not False),
        **request.model_dump(include=GenerationConfig.__dataclass_fields__.keys() - {"logprobs"}),
    )


_Request = TypeVar("_Request", bound=BaseModel)


def read_request(kind: type[_Request], body: bytes, content_type: str = "application/json") -> _Request:
    """Reads JSON, or the text of a document. ValueError where it is not allowed: see `of_error`."""
    media = content_type.partition(";")[0].strip().lower()
    if media == "text/plain":
        with explaining("the body is not valid UTF-8 text", UnicodeDecodeError, error=RequestError):
            fields: Any = {"text": body.decode("utf-8")}
    else:
        must = f"Content-Type = {json.dumps(media)}: must be text/plain, or application/json"
        require_field(media == "application/json", None, must, status=415)
        none: Json = {}  # JSON has neither NaN nor Infinity
        with explaining("the body is not valid JSON", ValueError, LookupError, RecursionError, error=RequestError):
            fields = json.loads(body, parse_constant=none.__getitem__)
    return kind.model_validate(fields)


# Errors

#: Status, field and code of errors of the library.
_ERRORS: dict[type[UserError], tuple[int, str | None, str | None]] = {
    EngineEnded: (503, None, None),
    UnknownDocument: (404, "document", "document_not_found"),
    DocumentInUse: (409, None, "document_in_use"),
    NoGrammars: (400, "response_format", "unsupported"),
}
_NAMES = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *DocumentRequest.model_fields}


def of_error(error: Exception) -> RequestError:
    """The error that a client gets, with the protocol's name of the field; one that is not the client's is logged."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValidationError):
        return _of_validation_error(error)
    if not isinstance(error, UserError):
        _log.error("a request failed", exc_info=error)
        return RequestError(f"the request failed: {type(error).__name__}; the server's log says why", status=500)
    for kind, (status, param, code) in _ERRORS.items():
        if isinstance(error, kind):
            return RequestError(str(error), status=status, param=param, code=code)
    message = re.sub("(max|min)_new_tokens", r"\1_tokens", str(error))
    named = re.match(r"([a-z_]+)[a-z_.]*(?<!\.)", message)
    return RequestError(message, param=named[0] if named and named[1] in _NAMES else None)


def _of_validation_error(error: ValidationError) -> RequestError:
    """The first wrong field of a request, with its value and allowed values."""
    first = error.errors(include_url=False)[0]
    code, path, value, words = first["type"], list(first["loc"]), first["input"], first["msg"]
    if field := first.get("ctx", {}).get("field"):
        path.append(field)
    if field or code == "missing":
        value = value.get(path[-1])
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:101] or "the body"
    shown = json.dumps(value)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    words = "must be given" if code == "missing" else re.sub("^[A-Z][a-z]+ should", "must", words)
    known = code if code in ("unknown_parameter", "unsupported") else None
    return RequestError(f"{name} = {shown}: {words}", param=name.partition("[")[0] if path else None, code=known)


# Responses


class Chat:
    """The response to a chat."""

    _prefix, _object, _chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._id, self._created = f"{self._prefix}-{uuid.uuid4().hex}", int(time.time())

    def response(self, completions: Sequence[Completion], usage: Json) -> Json:
        """The response without a stream."""
        choices = [self._choice(i, self._answer(each.text), each) for i, each in enumerate(completions)]
        return {**self._of(self._object, *choices), "usage": usage}

    def begin(self, choices: int) -> list[Json]:
        """The events before the text of all choices."""
        fields = {"delta": {"role": "assistant", "content": ""}}
        return [self._of(self._chunk, self._choice(index, fields)) for index in range(choices)]

    def event(self, index: int, piece: str | Completion) -> Json:
        """The event of more text, or of the end of a choice with the log-probabilities of all of its tokens."""
        end, text = (piece, "") if isinstance(piece, Completion) else (None, piece)
        return self._of(self._chunk, self._choice(index, self._delta(text), end))

    def usage(self, usage: Json) -> Json:
        """The last event of a stream that counts tokens."""
        return {**self._of(self._chunk), "usage": usage}

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

    def _answer(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _choice(self, index: int, fields: Json, end: Completion | None = None) -> Json:
        ended = {"logprobs": end and self.logprobs(end), "finish_reason": end and end.finish_reason}
        return {"index": index, **fields, **ended}

    def _of(self, kind: str, *choices: Json) -> Json:
        fields = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**fields, "system_fingerprint": None, "choices": choices}


class Text(Chat):
    """The response to a completion request."""

    _prefix, _object, _chunk = "cmpl", "text_completion", "text_completion"

    def begin(self, choices: int) -> list[Json]:
        return []

    def logprobs(self, completion: Completion) -> Json | None:
        if completion.logprobs is None:
            return None
        own, top = [token_bytes(self._tokenizer, token) for token in completion.tokens], completion.top_logprobs
        special, decoder = self._tokenizer.all_special_ids, codecs.getincrementaldecoder("utf-8")("replace")
        visible = (b"" if token in special else each for token, each in zip(completion.tokens, own, strict=True))
        complete = itertools.accumulate((len(decoder.decode(each)) for each in visible), initial=0)  # characters
        likeliest = []  # with the place's own, by text; of equal texts the likelier
        for token, logprob, others in zip(completion.tokens, completion.logprobs, top or (), strict=bool(top)):
            ascending = sorted([(token, logprob), *others], key=lambda pair: pair[1])
            likeliest.append({shown_token(token_bytes(self._tokenizer, each)): value for each, value in ascending})
        return {
            "tokens": list(map(shown_token, own)),
            "token_logprobs": completion.logprobs,
            "top_logprobs": likeliest or None,
            "text_offset": list(complete)[:-1],
        }

    def _answer(self, text: str) -> Json:
        return {"text": text}

    _delta = _answer
