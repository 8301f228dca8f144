"""Encoding of prompts (strings, chats, token ids; one or a batch) as padded token ids, and decoding to text."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from tca_jax.errors import UserError, UserTypeError, explaining, require
from tca_jax.models.config import ModelConfig
from tca_jax.pallas_kernels.numerics import round_up

_SMALLEST = 16
_TAIL = 64  # tokens before a text that are tokenized again together with it
_CHECKED = 8  # of these, the last ones must come out as they were


def bucket_length(length: int, smallest: int = _SMALLEST) -> int:
    """Smallest bucket that holds `length` tokens, at least 1: a multiple of `smallest`, a power of two.

    Four buckets an octave: a service that sees every length up to a million compiles for about sixty.
    """
    return round_up(length, max(smallest, 1 << max(0, length.bit_length() - 3)))


Chat = Sequence[Mapping[str, Any]]
Prompt = str | bytes | Chat | Sequence[int | np.integer] | np.ndarray

_ALLOWED = "text, a chat (a list of messages), token ids, or a list of those"


@runtime_checkable
class Encoder(Protocol):
    """A model for encoding: a loaded `LM`, or a `Checkpoint` whose weights are not read yet."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Any: ...


def encode_prompts(lm: Encoder, prompts: Any, argument: str = "prompts") -> list[list[int]]:
    """Token ids, at least one, of one prompt or of each of a batch; ValueError or TypeError, which names `argument`."""
    batch = [prompts] if is_single(prompts, argument) else list(prompts)
    require(batch, f"{argument} is empty: at least one is needed")
    return [encode_prompt(lm, prompt, f"{argument}[{i}]") for i, prompt in enumerate(batch)]


def encode_prompt(lm: Encoder, prompt: Any, argument: str = "prompt") -> list[int]:
    """Token ids of one prompt; `argument` is its name in messages."""
    if isinstance(prompt, str | bytes):
        ids = _tokenize(lm, decode_utf8(prompt, argument), argument) if len(prompt) else []
    elif is_chat(prompt):
        # The template has written the special tokens.
        ids = encode_verbatim(lm, render_chat(lm, prompt, argument), argument)
    else:
        ids = _check_ids(lm, prompt, argument)
    require(ids, f"{argument} is empty: at least one token is needed")
    return ids


def encode_verbatim(lm: Encoder, text: str | bytes, argument: str = "prompt") -> list[int]:
    """Token ids of text and of nothing else: no special token is put before it."""
    return _tokenize(lm, decode_utf8(text, argument), argument, add_special_tokens=False)


def encode_continuation(lm: Encoder, text: str | bytes, held: Sequence[int], argument: str = "prompt") -> list[int]:
    """Token ids of text after the tokens `held`: as in one text of both, or of the text alone if a token spans both."""
    text, tail = decode_utf8(text, argument), list(held[-_TAIL:])
    befores = [(_tokenizer(lm, argument).decode(tail), tail[-_CHECKED:])] if tail else []
    for before, end in [*befores, ("\n", [])]:
        first = _tokenize(lm, before, argument, add_special_tokens=False)
        both = _tokenize(lm, before + text, argument, add_special_tokens=False)
        split = len(first)
        if first[split - len(end) :] == end and both[:split] == first and len(both) > split:
            return both[split:]
    ids = encode_verbatim(lm, text, argument)
    require(ids, f"{argument} is empty: at least one token is needed")
    return ids


def require_positions(
    name: str, prompt_tokens: int, max_new_tokens: int, lm: Encoder, *, context_tokens: int = 0
) -> None:
    """Raises ValueError if a prompt leaves no positions for its answer; `name` is the prompt's in the message."""
    needed, most = context_tokens + prompt_tokens + max_new_tokens, lm.config.max_context
    behind = f" behind a context of {context_tokens}" if context_tokens else ""
    answer = f"; with max_new_tokens = {max_new_tokens} that is {needed}" if max_new_tokens else ""
    has = f"{name} has {prompt_tokens} tokens{behind}{answer}"
    remedy = "shorten the text" + (" or lower max_new_tokens" if max_new_tokens else "")
    require(needed <= most, f"{has}, and {lm.name} has {most} positions: {remedy}")


def decode_continuation(lm: Encoder, tokens: Sequence[int], *, special: bool = False) -> str:
    """Text of tokens that follow others; `special` ones are included or left out."""
    tokenizer = _tokenizer(lm, "text")
    anchor, before, values = _anchor(tokenizer)

    def decode(ids: Iterable[int]) -> str:
        return tokenizer.decode([*anchor, *ids], skip_special_tokens=not special)[len(before) :]

    if "\ufffd" not in (text := decode(tokens)) or not values:
        return text
    # `tokenizers` replaces all bytes of a run where one character is not complete.
    shown = tokens if special else [token for token in tokens if token not in tokenizer.all_special_ids]
    runs = itertools.groupby(shown, values.__contains__)
    return "".join(bytes(values[i] for i in run).decode(errors="replace") if own else decode(run) for own, run in runs)


@functools.lru_cache(maxsize=8)
def _anchor(tokenizer: Any) -> tuple[tuple[int, ...], str, dict[int, int]]:
    """Tokens of a letter to put before others, since SentencePiece drops a first space; their text; values of bytes."""
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    vocabulary: Any = getattr(tokenizer, "get_vocab", dict)()
    values = {vocabulary.get(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return tuple(ids), tokenizer.decode(ids), values if len(values) == 256 else {}


@functools.lru_cache(maxsize=2**18)
def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of a token; a character may need several tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    values = {character: byte for byte, character in bytes_to_unicode().items()}
    if token in tokenizer.all_special_ids:
        return tokenizer.decode([token]).encode()
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if "ByteLevel" in repr(decoder) and all(character in values for character in piece):
        return bytes(values[character] for character in piece)
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # SentencePiece's fallback
        return bytes.fromhex(byte[1])
    return piece.replace("\u2581", " ").encode()


def shown_token(own: bytes) -> str:
    """A token's text; a part of a character is "bytes:" and its bytes, as in OpenAI's answers."""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def pad_tokens(
    sequences: Sequence[Sequence[int]], pad_token_id: int = 0, columns: int | None = None
) -> tuple[Int32[np.ndarray, "B L"], Int32[np.ndarray, " B"]]:
    """Sequences, right-padded to `columns` or to the bucket of the longest, and their lengths."""
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    tokens = np.full((len(sequences), columns or bucket_length(int(lengths.max()))), pad_token_id, np.int32)
    for row, ids in zip(tokens, sequences, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths


def is_single(prompts: Any, argument: str = "prompts") -> bool:
    """Whether it is one prompt and not a batch of them."""
    if isinstance(prompts, str | bytes) or is_chat(prompts):
        return True
    if getattr(prompts, "ndim", 0):  # an array of any library
        return prompts.ndim == 1
    require(isinstance(prompts, Sequence), f"{argument} is {_kind(prompts)}: must be {_ALLOWED}", UserTypeError)
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer)


def is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)


def _kind(value: Any) -> str:
    if getattr(value, "ndim", 0):
        return f"an array {list(value.shape)} of {value.dtype}"
    return "None" if value is None else f"of type {type(value).__name__}"


def require_tokenizer(argument: str, name: str, needs: Any, remedy: str) -> Any:
    """`needs`: the tokenizer, or an object that needs one. Raises ValueError if it is None."""
    require(needs is not None, f"{argument}: {name} was loaded without a tokenizer; {remedy}")
    return needs


def _tokenizer(lm: Encoder, argument: str) -> Any:
    return require_tokenizer(argument, lm.name, lm.tokenizer, "pass token ids")


def _tokenize(lm: Encoder, text: str, argument: str, **options: Any) -> list[int]:
    tokenizer = _tokenizer(lm, argument)
    with explaining(f"{argument}: the tokenizer of {lm.name} does not take this text"):
        # verbose: it would warn of texts longer than its own limit, not the model's. Lengths are checked later.
        ids = tokenizer(text, verbose=False, **options)["input_ids"]
    return check_token_ids(lm, ids, f"{argument}: the tokenizer of {lm.name} makes of this text")


def decode_utf8(text: str | bytes, argument: str) -> str:
    """Text, from bytes or not; ValueError, which names `argument`, where it is not UTF-8."""
    with explaining(f"{argument} is not valid UTF-8 text", UnicodeError):
        return text.decode("utf-8") if isinstance(text, bytes) else text.encode("utf-8").decode("utf-8")


def render_chat(lm: Encoder, chat: Chat, argument: str, *, answered: bool = False) -> str:
    """The text that the model's template makes of a chat: up to where an answer begins, or all if it is `answered`."""
    tokenizer = _tokenizer(lm, argument)
    template = getattr(tokenizer, "chat_template", None)
    require(template, f"{argument} is a chat, but {lm.name} has no chat template; pass text or token ids")
    for i, message in enumerate(chat):
        _check_message(message, f"{argument}[{i}]")
    with explaining(f"{argument}: the chat template of {lm.name} does not take this chat"):
        rendered = tokenizer.apply_chat_template(list(chat), add_generation_prompt=not answered, tokenize=False)
    return decode_utf8(rendered, argument)


def _check_message(message: Mapping[str, Any], argument: str) -> None:
    """Raises unless it has a role, and a content that templates know: text, or a list of parts."""
    missing = {"role", "content"} - set(message)
    require(not missing, f"{argument} has no {sorted(missing)}: a message is a mapping with role and content")
    role, content = message["role"], message["content"]
    require(isinstance(role, str), f"{argument}['role'] = {role!r}: must be a string", UserTypeError)
    parts = isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content)
    no_text = content is None and bool(message.get("tool_calls"))
    known = isinstance(content, str) or (parts and not isinstance(content, bytes)) or no_text
    allowed = "must be a string, or a list of parts"
    require(known, f"{argument}['content'] is {_kind(content)}: {allowed}", UserTypeError)


def _check_ids(lm: Encoder, prompt: Any, argument: str) -> list[int]:
    if getattr(prompt, "ndim", None) is not None:
        flat = prompt.ndim == 1 and (not len(prompt) or np.issubdtype(prompt.dtype, np.integer))
        ids = np.asarray(prompt).tolist() if flat else []
    else:
        flat = isinstance(prompt, Sequence) and not isinstance(prompt, bytearray | memoryview)
        ids = list(prompt) if flat else []
    others = [kind.__name__ for kind in set(map(type, ids)) if kind is bool or not issubclass(kind, int | np.integer)]
    wrong = f"{argument} is {_kind(prompt)}: must be text, a chat, or a flat sequence of integer token ids"
    require(flat and not others, wrong + "".join(f", and it holds {kind}" for kind in others), UserTypeError)
    return check_token_ids(lm, list(map(int, ids)), f"{argument} holds")


def check_token_ids(lm: Encoder, ids: list[int], source: str) -> list[int]:
    """The ids. Raises ValueError, which begins with `source`, if one is outside the vocabulary."""
    vocabulary = lm.config.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        outside = next(i for i in ids if not 0 <= i < vocabulary)
        raise UserError(f"{source} token id {outside}: ids of {lm.name} lie in [0, {vocabulary})")
    return ids


_TEXT = "\u2063text\u2063"  # stands for the user's text while a chat is rendered


@dataclasses.dataclass(frozen=True)
class TokenizerWording:
    """How a model is asked for something, in the ids of its tokenizer: a `methods.base.Wording`."""

    lm: Encoder

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(encode_verbatim(self.lm, text, "text"))

    def around_text(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The chat template's tokens before the user's text and after it; without one, the tokenizer's and a break."""
        if not getattr(self.lm.tokenizer, "chat_template", None):
            return tuple(self.lm.tokenizer("")["input_ids"]), self.ids("\n")
        rendered = render_chat(self.lm, [{"role": "user", "content": _TEXT}], "chat")
        before, after = split_at(self.lm, rendered, _TEXT)
        return self.ids(before), self.ids(after)

    def before_answer(self) -> tuple[int, ...]:
        return self.around_text()[1]


def split_at(lm: Encoder, text: str, *marks: str) -> list[str]:
    """The parts of a text between marks that come once each, in this order."""
    parts = []
    for mark in marks:
        once = text.count(mark) == 1
        require(once, f"the chat template of {lm.name} does not give messages as they are, once and in order")
        part, text = text.split(mark)
        parts.append(part)
    return [*parts, text]
