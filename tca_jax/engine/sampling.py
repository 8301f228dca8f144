"""Choosing the next token from logits: greedy, temperature, top-k, top-p, min-p and repetition penalty."""

from __future__ import annotations

import dataclasses
import numbers
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from tca_jax.engine.generation_config import check_sampling

_SMALLEST = float(np.finfo(np.float32).tiny)  # positive float32 that is not flushed to zero
_LARGEST_INT = 2**31 - 1  # of a program; more than any vocabulary
#: Numbers that change nothing.
_OFF = {"temperature": 0.0, "top_k": _LARGEST_INT, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}

Scalar = float | Shaped[Array | np.ndarray, "*B"] | None


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn; greedy by default. As a pytree its numbers are data, so that another temperature runs the
    same compiled program; what is off is None, and no part of the program. Rows that are drawn in different ways have
    arrays `[B]`, where what is off is 0, 1 or, of `top_k`, any number as large as the vocabulary.

    Attributes:
        temperature: Divides the logits, at least 0. 0 is greedy, the highest logit, and is held as None.
        top_k: Keep the k highest logits, >= 1.
        top_p: Keep the smallest set of tokens whose probability reaches p, in (0, 1]; 1 is held as None.
        min_p: Keep tokens at least this share as probable as the best, in [0, 1]; 0 is held as None.
        repetition_penalty: Divides positive and multiplies negative logits of tokens already in the prompt or the
            answer (arXiv 1909.05858), > 0; 1 is held as None.

    Raises:
        ValueError: a number is known, and not allowed; names it.
    """

    temperature: Scalar = None
    top_k: int | Shaped[Array | np.ndarray, "*B"] | None = None
    top_p: Scalar = None
    min_p: Scalar = None
    repetition_penalty: Scalar = None

    def __post_init__(self) -> None:
        """Traced numbers, and whatever else a transformation puts here, are not looked at."""
        for name in self.__dataclass_fields__:
            value: Any = getattr(self, name)
            if not isinstance(value, numbers.Real | str | bytes | np.bool_):
                continue
            check_sampling(name, value)
            number = float(value)
            held = int(min(number, _LARGEST_INT)) if name == "top_k" else number
            object.__setattr__(self, name, None if held == _OFF[name] else held)
        if self.temperature is not None and isinstance(self.temperature, float) and self.temperature < _SMALLEST:
            object.__setattr__(self, "temperature", None)  # float32 would make it 0, and logits infinite
        if self.temperature is None:  # greedy: no filter changes which logit is the highest
            for name in ("top_k", "top_p", "min_p"):
                object.__setattr__(self, name, None)

    @classmethod
    def of_rows(cls, rows: Sequence[Sampling]) -> Sampling:
        """Numbers of each row, in arrays."""
        held = {name: [getattr(row, name) for row in rows] for name in _OFF}
        numbers = {name: [_OFF[name] if x is None else x for x in of_rows] for name, of_rows in held.items()}
        return cls(**{name: np.asarray(x, np.int32 if name == "top_k" else np.float32) for name, x in numbers.items()})


def sample(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"] | None,  # None: greedy
    sampling: Sampling,
    seen: Bool[Array, "B V"] | None = None,  # tokens of prompt and answer, for the penalty
) -> Int[Array, " B"]:
    """One token a row, as Hugging Face transformers draw: repetition penalty, temperature, top-k, top-p, min-p."""
    penalty, temperature = _of_rows(sampling.repetition_penalty), _of_rows(sampling.temperature)
    if penalty is not None:
        assert seen is not None
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if temperature is None or keys is None:
        return best
    greedy = temperature == 0
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)  # at most 0: a small temperature overflows to -inf alone
    logits = filter_logits(logits / jnp.where(greedy, 1, temperature), sampling)
    drawn = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    return jnp.where(greedy.reshape(-1), best, drawn)


def _of_rows(number: Scalar) -> Any:
    """A number for each row's logits: a scalar, or `[B, 1]`; None where it is off."""
    return None if number is None else jnp.expand_dims(jnp.asarray(number), axis=-1)


def filter_logits(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Sets the logits that top-k, top-p and min-p rule out to -inf; the best token always stays."""
    top_k, top_p, min_p = map(_of_rows, (sampling.top_k, sampling.top_p, sampling.min_p))
    if top_k is not None or top_p is not None:
        ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        keep = jnp.ones(ordered.shape, bool)
        if top_k is not None:
            keep = jnp.broadcast_to(jnp.arange(ordered.shape[-1]) < top_k, ordered.shape)
        if top_p is not None:
            probabilities = jax.nn.softmax(jnp.where(keep, ordered, -jnp.inf), axis=-1)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            # In float32 a tiny p could otherwise keep none, and one of 1 not all.
            keep &= (before < top_p).at[:, 0].set(True) | (top_p == 1)
        lowest = jnp.min(jnp.where(keep, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    if min_p is not None:
        best = jnp.max(logits, axis=-1, keepdims=True)
        logits = jnp.where(logits >= best + jnp.log(min_p), logits, -jnp.inf)
    return logits


def pairs(ids: np.ndarray, logprobs: np.ndarray, count: int) -> list[list[tuple[int, float]]]:
    """Pairs (token id, log-probability) at the first `count` positions."""
    both = zip(ids[:count].tolist(), logprobs[:count].tolist(), strict=True)
    return [list(zip(*of_position, strict=True)) for of_position in both]
