"""From what users pass as prompts (strings, chats, token ids; one or a batch) to token ids, and back to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tca_jax.models.config import ModelConfig

Chat = Sequence[Mapping[str, Any]]
Prompt = str | bytes | Chat | Sequence[int] | np.ndarray


@runtime_checkable
class Encoder(Protocol):
    """What encoding needs: a loaded `LM`, or a `Checkpoint` whose weights are yet to be read."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Any: ...


def encode_prompts(lm: Encoder, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
    """Token ids of one prompt or of a batch.

    Args:
        lm: The model whose tokenizer and vocabulary apply.
        prompts: A string, a chat (messages with "role" and "content", rendered by the tokenizer's chat template),
            token ids, or a sequence of those.

    Returns:
        One non-empty list of ids a prompt.

    Raises:
        ValueError: an empty prompt, text without a tokenizer, text that is not UTF-8, a chat without a template, an id
            outside the vocabulary.
        TypeError: something that is no prompt.
    """
    batch = [prompts] if _is_single(prompts) else list(prompts)
    if not batch:
        raise ValueError("prompts is empty: at least one prompt is needed")
    return [encode_prompt(lm, prompt, f"prompts[{i}]") for i, prompt in enumerate(batch)]


def encode_prompt(lm: Encoder, prompt: Any, argument: str = "prompt") -> list[int]:
    """Token ids of one prompt; `argument` is its name in messages."""
    if isinstance(prompt, str | bytes):
        ids = _tokenizer(lm, argument)(_utf8(prompt, argument))["input_ids"] if len(prompt) else []
    elif _is_chat(prompt):
        ids = _encode_chat(lm, prompt, argument)
    else:
        ids = _check_ids(lm, prompt, argument)
    if not len(ids):
        raise ValueError(f"{argument} is empty: a prompt needs at least one token")
    return [int(i) for i in ids]


def decode_tokens(lm: Encoder, tokens: Sequence[int]) -> str:
    """Text of token ids, without special tokens."""
    return _tokenizer(lm, "text").decode(list(tokens), skip_special_tokens=True)


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str | bytes) or _is_chat(prompts):
        return True
    if isinstance(prompts, np.ndarray) or hasattr(prompts, "__jax_array__") or hasattr(prompts, "ndim"):
        return prompts.ndim == 1
    if not isinstance(prompts, Sequence):
        raise TypeError(
            f"prompts is a {type(prompts).__name__}: must be text, a chat, token ids, or a sequence of those"
        )
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)


def _tokenizer(lm: Encoder, argument: str) -> Any:
    if lm.tokenizer is None:
        raise ValueError(
            f"{argument}: {lm.name} was loaded without a tokenizer, so text cannot be used; pass token ids"
        )
    return lm.tokenizer


def _utf8(text: str | bytes, argument: str) -> str:
    try:
        return text.decode("utf-8") if isinstance(text, bytes) else text.encode("utf-8").decode("utf-8")
    except UnicodeError as error:
        raise ValueError(f"{argument} is not valid UTF-8 text: {error}") from None


def _encode_chat(lm: Encoder, chat: Chat, argument: str) -> list[int]:
    tokenizer = _tokenizer(lm, argument)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{argument} is a chat, but {lm.name} has no chat template; pass text or token ids")
    for i, message in enumerate(chat):
        missing = {"role", "content"} - set(message)
        if missing:
            raise ValueError(f"{argument}[{i}] has no {sorted(missing)}: a message is a mapping with role and content")
    rendered = tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=False)
    return tokenizer(_utf8(rendered, argument), add_special_tokens=False)["input_ids"]  # the template has written them


def _check_ids(lm: Encoder, prompt: Any, argument: str) -> list[int]:
    try:
        ids = np.asarray(prompt)
    except ValueError:
        ids = np.asarray(None)
    if ids.size and (ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer)):
        raise TypeError(f"{argument} is {type(prompt).__name__}: must be text, a chat, or a flat sequence of token ids")
    vocabulary = lm.config.vocab_size
    outside = ids[(ids < 0) | (ids >= vocabulary)] if ids.size else ids
    if outside.size:
        raise ValueError(f"{argument} holds token id {int(outside[0])}: ids of {lm.name} lie in [0, {vocabulary})")
    return ids.tolist()
