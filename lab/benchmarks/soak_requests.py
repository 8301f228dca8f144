"""What a soak asks: requests of many shapes, under every method, and how one is compiled and answered."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Generator, Hashable
from typing import Any

import tca_jax
from tca_jax import methods
from tca_jax.engine.contexts import Context
from tca_jax.engine.lm import LM
from tca_jax.engine.request import Request
from tca_jax.engine.sampling import Sampling

_PAIRS = 2  # of methods, joined by "+"


@dataclasses.dataclass(frozen=True)
class Shape:
    """All of a request that programs are compiled for.

    Attributes:
        method: Label of the attention method.
        tokens: Bucket of the prompts, or of the document that a context holds.
        prompts: Prompts at once.
        samples: Answers to each.
        room: Bucket of the answers.
        settings: Options of `generate` that are on.
        context: Whether a document is read first, and questions are asked of it.
        appended: Whether more is appended to the document before.
    """

    method: str
    tokens: int
    prompts: int
    samples: int
    room: int
    settings: frozenset[str]
    context: bool = False
    appended: bool = False

    @property
    def document(self) -> tuple[str, int]:
        """What its context has read, if it is over one: all documents of a length are the same."""
        return self.method, self.tokens

    def __str__(self) -> str:
        read = "appended context" if self.appended else "context" if self.context else "prompts"
        return f"{self.method}, {read} of {self.tokens}"


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request: its shape, and the seed that all else is drawn from."""

    shape: Shape
    seed: int


@dataclasses.dataclass(frozen=True)
class Question:
    """A request as `generate` takes it.

    Attributes:
        lm: The model under the request's method.
        prompts: Token ids.
        context: What the model has read before.
        samples: Answers to a prompt.
        options: All else.
        key: What its programs depend on.
    """

    lm: LM
    prompts: list[list[int]]
    context: Context | None
    samples: int
    options: dict[str, Any]
    key: Hashable

    def compile(self) -> None:
        """Compiles its programs, and runs nothing."""
        options = {"stop": ()} | self.options
        sampling = {each.name: options.pop(each.name) for each in dataclasses.fields(Sampling) if each.name in options}
        Request.create(
            self.lm, self.prompts, self.context, num_samples=self.samples, sampling=Sampling(**sampling), **options
        ).compile()

    def answer(self, streamed: bool) -> list[list[int]]:
        """Its answers, as a stream where that is asked for and streams know the options."""
        if streamed and self.lm.tokenizer is not None and self.samples == 1 and "logprobs" not in self.options:
            return drain(tca_jax.stream(self.lm, self.prompts, context=self.context, **self.options)).tokens
        out = tca_jax.generate(self.lm, self.prompts, context=self.context, num_samples=self.samples, **self.options)
        return out.tokens


def drain(pieces: Generator[Any, None, tca_jax.Output]) -> tca_jax.Output:
    """What a stream returns at its end."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            out: tca_jax.Output = end.value
            return out


def models_under(lm: LM, window: int, rng: random.Random) -> dict[str, LM]:
    """The model under every registered method that needs no calibration, under its profile, and under some pairs."""
    found, options = {}, {}
    for name in methods.names():
        # The window is an option, or one of a configuration, or there is none; a method that asks for more is left out.
        for given in ({"window": window}, {"config": tca_jax.TCAConfig(window=window)}, {}):
            try:
                found[name], options[name] = lm.with_method(name, **given), given
                break
            except ValueError:
                continue
    pairs = list(itertools.permutations(found, 2))
    for prefill, cache in rng.sample(pairs, min(_PAIRS, len(pairs))):
        name = f"{prefill}+{cache}"
        found[name] = lm.with_method(name, **{part: options[part] for part in (prefill, cache)})
    if lm.method.name not in ("full", *found):
        found["profile"] = lm
    return found
