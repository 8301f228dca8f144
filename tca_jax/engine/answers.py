"""How answers are drawn and where they end: options, checked, and what tokens that were drawn say."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import decode_tokens
from tca_jax.engine.sampling import Sampling
from tca_jax.errors import UserError, UserTypeError, check_integer, check_seed


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """How an answer is drawn and where it ends. The names are those of `generation.generate`'s options, but for two.

    Attributes:
        max_new_tokens: Most tokens it may have.
        min_new_tokens: Nothing ends it before so many.
        sampling: How a token is drawn.
        seed: Of the draws.
        stop: Strings that end it.
        stop_tokens: Tokens that end it.
        logprobs: None, or how many of the likeliest tokens are wanted beside the log-probability of each token.
    """

    max_new_tokens: int
    min_new_tokens: int
    sampling: Sampling
    seed: int
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    logprobs: int | None

    @classmethod
    def create(
        cls,
        lm: LM,
        *,
        max_new_tokens: Any,
        min_new_tokens: Any = 0,
        sampling: Sampling,
        seed: Any,
        stop: Any,
        stop_token_ids: Any,
        logprobs: Any = False,
    ) -> AnswerOptions:
        """Checks them, types included.

        Raises:
            ValueError: an option is not allowed; names it.
            TypeError: one is of a wrong type.
        """
        check_integer("max_new_tokens", max_new_tokens, at_least=1)
        check_integer("min_new_tokens", min_new_tokens, at_least=0)
        check_seed("seed", seed)
        if min_new_tokens > max_new_tokens:
            raise UserError(f"min_new_tokens = {min_new_tokens}: must be at most max_new_tokens = {max_new_tokens}")
        return cls(
            max_new_tokens=int(max_new_tokens),
            min_new_tokens=int(min_new_tokens),
            sampling=sampling.checked(),
            seed=int(seed),
            stop=_stop_strings(lm, stop),
            stop_tokens=lm.eos_token_ids if stop_token_ids is None else _stop_tokens(lm, stop_token_ids),
            logprobs=_num_logprobs(lm, logprobs),
        )


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a row has said so far, cut at its stop token or stop string."""

    tokens: list[int]
    text: str | None
    stopped: bool


@dataclasses.dataclass
class AnswerReader:
    """Reads one answer again and again while it grows.

    Attributes:
        lm: The model, whose tokenizer makes text of tokens.
        stop: Strings that end an answer.
        stop_tokens: Tokens that do.
        min_new_tokens: Nothing ends an answer before so many tokens.
    """

    lm: LM
    stop: Sequence[str]
    stop_tokens: Sequence[int]
    min_new_tokens: int
    _ended: Answer | None = None
    _looked: int = 0  # tokens that hold no stop string

    def read(self, tokens: list[int]) -> Answer:
        """The answer that these tokens are, all that were drawn so far; once it has ended, it stays as it is."""
        if self._ended is not None:
            return self._ended
        end = next(
            (i for i, token in enumerate(tokens) if token in self.stop_tokens and i >= self.min_new_tokens), None
        )
        answer = self._cut_at_stop_string(tokens if end is None else tokens[: end + 1])
        if end is not None or answer.stopped:
            answer = self._ended = dataclasses.replace(answer, stopped=True)
        return answer

    def _cut_at_stop_string(self, tokens: list[int]) -> Answer:
        """The tokens up to the one that completes a stop string first, and the text in front of that string.

        Which one is first does not depend on how often somebody looks.
        """
        if self.lm.tokenizer is None:
            return Answer(tokens, None, False)
        text = decode_tokens(self.lm, tokens)
        # A stop string that is complete before `min_new_tokens` tokens are there ends nothing. A character of several
        # tokens may not be complete then; it is not counted.
        early = len(decode_tokens(self.lm, tokens[: self.min_new_tokens]).rstrip("\ufffd")) if self.stop else 0
        if self._stop_place(text, early) is None:
            self._looked = len(tokens)
            return Answer(tokens, text, False)
        for count in range(self._looked + 1, len(tokens) + 1):
            said = decode_tokens(self.lm, tokens[:count])
            place = self._stop_place(said, early)
            if place is not None:
                return Answer(tokens[:count], said[:place], True)
        raise AssertionError("the whole text holds a stop string, so some part of it does")

    def _stop_place(self, text: str, early: int) -> int | None:
        """Where the earliest stop string begins that ends behind the first `early` characters; None without any."""
        places = (text.find(s, max(0, early - len(s) + 1)) for s in self.stop)
        return min((place for place in places if place >= 0), default=None)


def certain_characters(answer: Answer, stop: Sequence[str], *, finished: bool) -> int:
    """Characters of an answer's text that stay, whatever comes: no part of a character, or of a stop string."""
    text = answer.text or ""
    if finished or answer.stopped:
        return len(text)
    return len(text.rstrip("\ufffd")) - (max(map(len, stop), default=1) - 1)


def _num_logprobs(lm: LM, logprobs: Any) -> int | None:
    """How many of the likeliest tokens are wanted beside each new one; None where no log-probability is.

    Raises:
        ValueError: it is neither True nor False, nor a number of tokens that there are.
    """
    if isinstance(logprobs, bool):
        return 0 if logprobs else None
    most = lm.config.vocab_size
    if not isinstance(logprobs, numbers.Integral) or not 1 <= int(logprobs) <= most:
        raise UserError(f"logprobs = {logprobs!r}: must be True, False, or a number of tokens from 1 to {most}")
    return int(logprobs)


def _stop_strings(lm: LM, stop: Any) -> tuple[str, ...]:
    if not isinstance(stop, str | Sequence | set | frozenset | None):
        raise UserTypeError(f"stop = {stop!r}: must be a string or a sequence of strings")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not isinstance(s, str) or not s for s in strings):
        raise UserError(f"stop = {list(strings)!r}: must be non-empty strings")
    if strings and lm.tokenizer is None:
        raise UserError(f"stop: {lm.name} was loaded without a tokenizer; use stop_token_ids")
    return strings


def _stop_tokens(lm: LM, ids: Any) -> tuple[int, ...]:
    try:
        ids = tuple(ids)
    except TypeError:
        raise UserTypeError(f"stop_token_ids = {ids!r}: must be a sequence of token ids, or None") from None
    vocabulary = lm.config.vocab_size
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral) or not 0 <= int(token) < vocabulary:
            raise UserError(f"stop_token_ids holds {token!r}: must be token ids of {lm.name}, in [0, {vocabulary})")
    return tuple(int(token) for token in ids)
