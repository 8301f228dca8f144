"""`GenerationConfig`, the declaration of all options of an answer. Importing it loads no JAX."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from tca_jax.errors import (
    UserTypeError,
    check_integer,
    check_seed,
    is_finite_number,
    require,
    require_name,
    require_type,
)

if TYPE_CHECKING:
    from tca_jax.engine.sampling import Sampling

#: Options of `Sampling`: the allowed numbers, as a condition and in words.
_ALLOWED: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, "a number of at least 0 (0 is greedy)"),
    "top_k": (lambda x: x >= 1 and x == int(x), "an integer of at least 1"),
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "min_p": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "repetition_penalty": (lambda x: x > 0, "a positive number"),
}


def check_sampling(name: str, value: Any) -> None:
    """Raises ValueError unless a number is allowed for this option of sampling."""
    holds, words = _ALLOWED[name]
    require(is_finite_number(value) and holds(float(value)), f"{name} = {value!r}: must be {words}")


class GenerationOptions(TypedDict, total=False):
    """The fields of `GenerationConfig` as keywords, for type checkers."""

    max_new_tokens: int
    min_new_tokens: int
    num_samples: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int] | None
    logprobs: bool | int


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """How answers are drawn and where they end. `generate` and `stream` take it, or its fields as keywords.

    Attributes:
        max_new_tokens: Most tokens of an answer.
        min_new_tokens: Least tokens of an answer. Before them no stop token is drawn, and no stop string ends it.
        num_samples: Answers to each prompt, which is read once. Answer j to prompt i is entry `i * num_samples + j`.
            Greedy ones are equal.
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the k best tokens.
        top_p: Keep the smallest set of tokens whose probability reaches p.
        min_p: Keep tokens at least this share as probable as the best.
        repetition_penalty: Above 1 discourages tokens of the prompt and the answer.
        seed: Seed of the draws, in [0, 2^32). An answer's draws depend on the seed and its place alone.
        stop: Strings that end an answer. They are cut from the text.
        stop_token_ids: Tokens that end an answer. None takes the model's own, () none.
        logprobs: Whether to return log-probabilities. A number also returns as many of the likeliest tokens at each
            place (`Output.top_logprobs`).

    Raises:
        ValueError: a value is not allowed; names the field.
        TypeError: a value is of a wrong type.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    num_samples: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] | None = None
    logprobs: bool | int = False

    def __post_init__(self) -> None:
        for name, least in {"max_new_tokens": 1, "min_new_tokens": 0, "num_samples": 1}.items():
            check_integer(name, getattr(self, name), at_least=least)
        check_seed("seed", self.seed)
        allowed = f"must be at most max_new_tokens = {self.max_new_tokens}"
        require(self.min_new_tokens <= self.max_new_tokens, f"min_new_tokens = {self.min_new_tokens}: {allowed}")
        held: dict[str, Any] = {"stop": _stop_strings(self.stop), "stop_token_ids": check_stop_ids(self.stop_token_ids)}
        held |= {name: int(getattr(self, name)) for name in ("max_new_tokens", "min_new_tokens", "num_samples", "seed")}
        held |= {name: _number(name, getattr(self, name)) for name in _ALLOWED}
        for name, value in held.items():
            object.__setattr__(self, name, value)
        known = isinstance(self.logprobs, bool) or (isinstance(self.logprobs, numbers.Integral) and self.logprobs >= 1)
        require(known, f"logprobs = {self.logprobs!r}: must be True, False, or a positive number of tokens")

    @classmethod
    def of(cls, config: Any, options: Mapping[str, Any]) -> GenerationConfig:
        """`config`, or the default where it is None, with options in place of its fields. ValueError or TypeError."""
        for name in options:
            require_name(f"unknown option {name!r}", name, cls.__dataclass_fields__, UserTypeError)
        config = cls() if config is None else config
        require_type("config", config, cls, "a GenerationConfig, or None")
        return dataclasses.replace(config, **options)

    def for_model(self, lm: Any) -> GenerationConfig:
        """The same with the model's own stop tokens in place of None. ValueError where a field is not allowed."""
        vocabulary = lm.config.vocab_size
        text = not self.stop or lm.tokenizer is not None
        require(text, f"stop: {lm.name} was loaded without a tokenizer; use stop_token_ids")
        for token in self.stop_token_ids or ():
            allowed = f"must be token ids of {lm.name}, in [0, {vocabulary})"
            require(0 <= token < vocabulary, f"stop_token_ids holds {token!r}: {allowed}")
        allowed = f"must be True, False, or a number of tokens from 1 to {vocabulary}"
        require(self.logprobs <= vocabulary, f"logprobs = {self.logprobs!r}: {allowed}")
        return dataclasses.replace(self, stop_token_ids=lm.eos_token_ids) if self.stop_token_ids is None else self

    @functools.cached_property
    def sampling(self) -> Sampling:
        """The numbers that the device gets."""
        from tca_jax.engine.sampling import Sampling

        return Sampling(**{name: getattr(self, name) for name in _ALLOWED})

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens beside each token's log-probability; None without log-probabilities."""
        if isinstance(self.logprobs, bool):
            return 0 if self.logprobs else None
        return int(self.logprobs)


def option_help() -> dict[str, str]:
    """The first sentence of each field's description."""
    attributes = inspect.cleandoc(GenerationConfig.__doc__ or "").partition("Raises:")[0]
    sentences = re.findall(r"^    (\w+): (.+?)\.(?:\s|$)", attributes, re.MULTILINE | re.DOTALL)
    return {name: " ".join(sentence.split()) + "." for name, sentence in sentences}


def _number(name: str, value: Any) -> int | float | None:
    """A number of Python. Arrays of one number, of NumPy or JAX, are taken as that number."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    known = value is None or isinstance(value, numbers.Real)
    require(known, f"{name} = {value!r}: must be a number, or None", UserTypeError)
    if value is not None:
        check_sampling(name, value)
    return value


def _stop_strings(stop: Any) -> tuple[str, ...]:
    known = isinstance(stop, str | Sequence | set | frozenset | None)
    require(known, f"stop = {stop!r}: must be a string or a sequence of strings", UserTypeError)
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    require(all(isinstance(s, str) and s for s in strings), f"stop = {list(strings)!r}: must be non-empty strings")
    return strings


def check_stop_ids(ids: Any, name: str = "stop_token_ids") -> tuple[int, ...] | None:
    """Token ids as integers; raises UserError where they are none."""
    if ids is None:
        return None
    require(isinstance(ids, Iterable), f"{name} = {ids!r}: must be a sequence of token ids, or None", UserTypeError)
    ids = tuple(ids.tolist() if hasattr(ids, "tolist") else ids)
    for token in ids:
        known = isinstance(token, numbers.Integral) and not isinstance(token, bool)
        require(known, f"{name} holds {token!r}: must be token ids")
    return tuple(map(int, ids))
