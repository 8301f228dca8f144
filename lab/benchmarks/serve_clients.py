"""Clients of a soaked engine: what they ask, what `generate` answers to it, and what has come of it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

import tca_jax
from tca_jax.engine.contexts import Context
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import bucket_length
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.watching import Watched
from tca_jax.serve import Engine
from tca_jax.serve.streams import Stream

_QUESTIONS, _PROMPTS = 3, 4
_QUESTION_TOKENS, _APPENDED_TOKENS = 40, 150
_ROOM = 24  # tokens of an answer
_THINKING = 0.02  # mean seconds between an answer and the next request of a client
_SECONDS = 120.0  # most that an answer may take: then it is lost
_GONE = "there is none of this id", "is no longer there", "is in use"  # what another client's forgetting may lead to

#: Greedy answers, and those to which all else applies: programs are compiled for each of the two.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"stop_token_ids": ()},
    {
        "temperature": 0.9,
        "seed": 1,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "stop_token_ids": (3, 5),
    },
)

OUTCOMES = ("equal", "cancelled", "forgotten meanwhile", "not kept", "other answers", "errors")
FAILURES = OUTCOMES[-2:]
Outcome = Literal["equal", "cancelled", "forgotten meanwhile", "not kept", "other answers", "errors"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question with one right answer.

    Attributes:
        document: Number of the document; None for a prompt of its own.
        question: Number of the question, or of the prompt.
        options: Number of the options.
        behind: What was appended to the document before: nothing, a text, or a first question and its answer.
    """

    document: int | None
    question: int
    options: int
    behind: Literal["nothing", "text", "turn"] = "nothing"


class References:
    """A fixed set of documents, prompts and questions, and what `generate` answers; each answer is computed once.

    Args:
        lm: The model.
        documents: How many documents there are.
        tokens: Of the longest; all have one bucket.
        seed: Of their tokens.
        backend: Kernel backend.
    """

    def __init__(self, lm: LM, documents: int, tokens: int, seed: int, backend: str) -> None:
        self.lm, self._backend, self._random = lm, backend, np.random.default_rng(seed)
        self.documents = [self._draw(*_bucket(tokens)) for _ in range(documents)]
        self.questions = [self._draw(1, _QUESTION_TOKENS) for _ in range(_QUESTIONS)]
        self.prompts = [self._draw(*_bucket(tokens // 3)) for _ in range(_PROMPTS)]
        self.text = self._draw(_APPENDED_TOKENS, _APPENDED_TOKENS)
        self.contexts = [tca_jax.prefill(lm, each, backend=backend) for each in self.documents]
        self.most_own_tokens = _APPENDED_TOKENS + _QUESTION_TOKENS + _ROOM
        self._answers: dict[Asked, list[int]] = {}
        self._lock = threading.RLock()

    @property
    def document_bytes(self) -> int:
        """Of the largest document's keys and values."""
        return max(int(each.stats.kv_cache_bytes) for each in self.contexts)

    def answer(self, asked: Asked) -> list[int]:
        """The tokens of an answer."""
        with self._lock:
            if asked not in self._answers:
                options = {"max_new_tokens": _ROOM, "backend": self._backend, **_OPTIONS[asked.options]}
                context = self._context(asked)
                prompt = (self.prompts if context is None else self.questions)[asked.question]
                self._answers[asked] = tca_jax.generate(self.lm, [prompt], context=context, **options).tokens[0]
            return self._answers[asked]

    def turn(self, document: int) -> list[int]:
        """The first question about a document and its answer, less the last token, as a kept answer leaves them."""
        return self.questions[0] + self.answer(Asked(document, 0, 0))[:-1]

    def _context(self, asked: Asked) -> Context | None:
        if asked.document is None:
            return None
        context = self.contexts[asked.document]
        if asked.behind == "nothing":
            return context
        more = self.text if asked.behind == "text" else self.turn(asked.document)
        return tca_jax.prefill(self.lm, [more], context=context, backend=self._backend)

    def _draw(self, least: int, most: int) -> list[int]:
        count = int(self._random.integers(least, most + 1))
        return self._random.integers(1, self.lm.config.vocab_size, count).tolist()


class Tallies:
    """What came of requests, by their kinds. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.outcomes = {kind: collections.Counter[str]() for kind in KINDS}
        self.first_token_seconds: list[float] = []
        self.new_tokens = 0

    @property
    def requests(self) -> int:
        """How many have ended."""
        return sum(sum(of.values()) for of in self.outcomes.values())

    def note(self, kind: str, outcome: Outcome) -> None:
        """One that has ended."""
        with self._lock:
            self.outcomes[kind][outcome] += 1

    def note_times(self, first_token: float, new_tokens: int) -> None:
        """Of an answer that is whole."""
        with self._lock:
            self.first_token_seconds.append(first_token)
            self.new_tokens += new_tokens

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A table."""
        return [
            {"kind": kind, "requests": sum(of.values()), **{name: of[name] for name in OUTCOMES}}
            for kind, of in self.outcomes.items()
        ]


class Client(threading.Thread):
    """Asks one thing after the other until `stop`.

    Args:
        engine: The engine.
        references: What is asked, and the right answers.
        tallies: Told of each outcome.
        seed: Of what is asked.
    """

    def __init__(self, engine: Engine, references: References, tallies: Tallies, seed: int) -> None:
        super().__init__(daemon=True)
        self._engine, self._references, self._tallies = engine, references, tallies
        self._random, self._stopping = random.Random(seed), threading.Event()

    def stop(self) -> None:
        """Has it ask nothing more."""
        self._stopping.set()

    def run(self) -> None:
        """Until `stop`."""
        while not self._stopping.wait(self._random.expovariate(1 / _THINKING)):
            (kind,) = self._random.choices(list(KINDS), [weight for weight, _ in KINDS.values()])
            self.request(kind)

    def request(self, kind: str) -> None:
        """One request of a kind."""
        self._tallies.note(kind, self._outcome(KINDS[kind][1]))

    def _outcome(self, request: Callable[[Client], Outcome]) -> Outcome:
        try:
            return request(self)
        except UserError as error:
            if any(text in str(error) for text in _GONE):
                return "forgotten meanwhile"
            traceback.print_exc()
        except Exception:  # the soak goes on, and fails in the end
            traceback.print_exc()
        return "errors"

    # Kinds of requests

    def question(self) -> Outcome:
        """A question about a document."""
        asked = self._drawn()
        return self._checked(asked, self._ask(self._read(asked), asked))

    def prompt(self) -> Outcome:
        """A prompt of its own."""
        asked = Asked(None, self._random.randrange(_PROMPTS), self._random.randrange(len(_OPTIONS)))
        return self._checked(asked, self._ask(None, asked))

    def cancelled(self) -> Outcome:
        """A question that is cancelled at some token, or before it is looked at."""
        asked = dataclasses.replace(self._drawn(), options=0)
        stream = self._ask(self._read(asked), asked)
        if count := self._random.randrange(_ROOM // 2):
            Watched(stream).wait(count, _SECONDS)
        stream.cancel()
        tokens = stream.result(_SECONDS).tokens
        return "cancelled" if self._references.answer(asked)[: len(tokens)] == tokens else self._other(asked, tokens)

    def chat(self) -> Outcome:
        """A question whose answer is kept, another one behind it, and the end of both."""
        asked = dataclasses.replace(self._drawn(), behind="turn")
        first = Asked(asked.document, 0, 0)
        stream = self._ask(self._read(asked), first, keep=True)
        if (outcome := self._checked(first, stream)) != "equal":
            return outcome
        kept = stream.result().document
        return "not kept" if kept is None else self._asked_once(kept, asked)

    def append(self) -> Outcome:
        """A question behind a text that is appended to a document."""
        asked = dataclasses.replace(self._drawn(), behind="text")
        return self._asked_once(self._engine.append(self._read(asked), self._references.text), asked)

    def forget(self) -> Outcome:
        """A document is dropped, whatever the others do with it; the next request reads it again."""
        self._engine.forget(self._read(self._drawn()))
        return "equal"

    # Inside

    def _drawn(self) -> Asked:
        document, question, options = map(
            self._random.randrange, (len(self._references.documents), _QUESTIONS, len(_OPTIONS))
        )
        return Asked(document, question, options)

    def _read(self, asked: Asked) -> str:
        assert asked.document is not None
        return self._engine.read(self._references.documents[asked.document])

    def _ask(self, document: str | None, asked: Asked, *, keep: bool = False) -> Stream:
        prompts = self._references.prompts if document is None else self._references.questions
        options = {"max_new_tokens": _ROOM, **_OPTIONS[asked.options]}
        return self._engine.ask(document, prompts[asked.question], keep=keep, **options)

    def _asked_once(self, document: str, asked: Asked) -> Outcome:
        """A question about a document that is dropped then, unless others use it."""
        outcome = self._checked(asked, self._ask(document, asked))
        self._engine.forget(document)
        return outcome

    def _checked(self, asked: Asked, stream: Stream) -> Outcome:
        out = stream.result(_SECONDS)
        self._tallies.note_times(out.seconds_to_first_token, len(out.tokens))
        return "equal" if self._references.answer(asked) == out.tokens else self._other(asked, out.tokens)

    def _other(self, asked: Asked, tokens: list[int]) -> Outcome:
        expected = self._references.answer(asked)
        print(f"another answer: {asked}: {tokens} instead of {expected}", file=sys.stderr, flush=True)
        return "other answers"


#: How often each kind is drawn, and what it does.
KINDS: dict[str, tuple[float, Callable[[Client], Outcome]]] = {
    "question": (8, Client.question),
    "prompt": (3, Client.prompt),
    "cancelled": (3, Client.cancelled),
    "chat": (2, Client.chat),
    "append": (2, Client.append),
    "forget": (0.5, Client.forget),
}


@functools.cache
def _bucket(tokens: int) -> tuple[int, int]:
    """Least and most tokens of a bucket."""
    most = bucket_length(tokens)
    return next((n + 1 for n in range(most, 0, -1) if bucket_length(n) < most), 1), most
