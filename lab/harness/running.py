"""Requests in token ids, run in batches and over shared contexts; knows nothing of lm_eval."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tca_jax.engine.contexts import Context, prefill
from tca_jax.engine.generation import generate
from tca_jax.engine.lm import LM
from tca_jax.engine.score import score, score_answers
from tca_jax.lab.harness.options import GenerationOptions
from tca_jax.lab.harness.sharing import batches, filled, shared_prefixes

_ANSWERS = 8  # most answers to a prompt that are scored in one call

#: Token ids.
Tokens = Sequence[int]


@dataclasses.dataclass(frozen=True)
class _Question:
    """A prompt, or what is left of it behind a context, and the places of the requests about it."""

    tokens: Tokens
    places: tuple[int, ...]


@dataclasses.dataclass
class Runner:
    """Runs requests; what it yields comes in the order in which it is known, each with its request's place.

    Attributes:
        lm: The model under its method.
        batch_size: Prompts in one call.
        prefix_reuse: Prompts that share at least so many first tokens are read from one context; 0 for none.
        backend: Kernel backend.
        seed: Of sampled answers.
        kv_cache_bytes: Bytes of the caches of all answers so far.
        full_kv_cache_bytes: The same under full attention.
    """

    lm: LM
    batch_size: int = 1
    prefix_reuse: int = 0
    backend: str = "auto"
    seed: int = 0
    kv_cache_bytes: int = 0
    full_kv_cache_bytes: int = 0
    _sampled: int = 0  # batches of sampled answers so far, each of which draws with a seed of its own

    def score(self, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> Iterator[tuple[int, float, bool]]:
        """Log-likelihood of each answer to its prompt, and whether greedy decoding says it.

        A prompt that several requests are about is read once for up to 8 of them.
        """
        places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, prompt in enumerate(prompts):
            places[tuple(prompt)].append(i)
        for context, questions in self._questions(list(places), [tuple(some) for some in places.values()]):
            kinds: dict[tuple[int, bool], list[_Question]] = defaultdict(list)  # those that one program can score
            for question in questions:
                for start in range(0, len(question.places), _ANSWERS):
                    some = question.places[start : start + _ANSWERS]
                    one_token = all(len(answers[i]) == 1 for i in some)
                    kinds[_power_of_two(len(some)), one_token].append(_Question(question.tokens, some))
            for (times, _), alike in kinds.items():
                yield from self._score(context, alike, answers, times)

    def _score(
        self, context: Context | None, questions: list[_Question], answers: Sequence[Tokens], times: int
    ) -> Iterator[tuple[int, float, bool]]:
        """The same of questions of at most `times` answers each."""
        for batch, rows in self._batches(questions):
            given = [[answers[i] for i in filled(question.places, times)] for question in rows]
            prompts = [question.tokens for question in rows]
            scores = score_answers(self.lm, prompts, given, context=context, backend=self.backend)
            for question, logprobs, greedy in zip(batch, scores.logprobs, scores.greedy, strict=False):
                for place, of_answer, said in zip(question.places, logprobs, greedy, strict=False):
                    yield place, float(of_answer.sum()), said

    def score_ends(self, texts: Sequence[Tokens], counts: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Log-likelihood of the last so many tokens of each text, which is read as one prompt."""
        for batch, rows in self._batches([_Question(text, (i,)) for i, text in enumerate(texts)]):
            logprobs = score(self.lm, [text.tokens for text in rows], backend=self.backend).logprobs
            for text, of_text in zip(batch, logprobs, strict=False):
                (place,) = text.places
                yield place, float(of_text[len(of_text) - counts[place] :].sum())

    def answer(self, prompts: Sequence[Tokens], options: GenerationOptions) -> Iterator[tuple[int, str, Tokens]]:
        """The answer to each prompt, up to a stop string, and its tokens."""
        given: dict[str, Any] = {
            "max_new_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "stop": options.until,
            "stop_token_ids": stop_token_ids(self.lm, options.until),
            "backend": self.backend,
            **dict(options.sampling),
        }
        for context, questions in self._questions(prompts, [(i,) for i in range(len(prompts))]):
            for batch, rows in self._batches(questions):
                seed = (self.seed + self._sampled) % 2**32
                self._sampled += options.temperature > 0
                asked = [question.tokens for question in rows]
                out = generate(self.lm, asked, context=context, seed=seed, **given)
                self.kv_cache_bytes += out.stats.kv_cache_bytes
                self.full_kv_cache_bytes += out.stats.full_kv_cache_bytes
                for question, text, tokens in zip(batch, out.text, out.tokens, strict=False):
                    yield question.places[0], text, tokens

    def _questions(
        self, prompts: Sequence[Tokens], places: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[Context | None, list[_Question]]]:
        """Prompts by the context that they are read from; first those that share one, last those without."""
        alone: list[_Question] = []
        for shared in shared_prefixes(prompts, self.prefix_reuse):
            if shared.length:
                context = prefill(self.lm, prompts[shared.members[0]][: shared.length], backend=self.backend)
                yield context, [_Question(prompts[i][shared.length :], places[i]) for i in shared.members]
            else:
                alone += [_Question(prompts[i], places[i]) for i in shared.members]
        if alone:
            yield None, alone

    def _batches(self, questions: list[_Question]) -> Iterator[tuple[list[_Question], list[_Question]]]:
        """Batches of questions of about one length, each as it is and filled up to the number of rows of the others."""
        rows = min(self.batch_size, len(questions))
        for batch in batches(questions, self.batch_size, key=lambda question: len(question.tokens)):
            yield batch, filled(batch, rows)


def stop_token_ids(lm: LM, until: Sequence[str]) -> tuple[int, ...]:
    """Tokens that end an answer: the model's own, and those of stop strings that are special tokens, which no text
    shows."""
    special = {str(token): i for i, token in lm.tokenizer.added_tokens_decoder.items() if token.special}
    return tuple(dict.fromkeys([*lm.eos_token_ids, *(special[text] for text in until if text in special)]))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
