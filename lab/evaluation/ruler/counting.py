"""RULER's aggregation: the most common words of a numbered list, and of a coded text."""

from __future__ import annotations

import math
import random
import string

from tca_jax.lab.evaluation.ruler.fitting import draw_fitted
from tca_jax.lab.evaluation.samples import Drawing, Sample, asked_with_lead
from tca_jax.lab.evaluation.words import Words

_COMMON_DOCUMENT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}"
)
_COMMON_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_COMMON_LEAD = " Answer: The top 10 words that appear most often in the list are:"
_COMMON = 10
#: Below this length words are repeated less often, (common, others); the first pair is the example's.
_SHORT = 4096
_REPEATS_SHORT, _REPEATS = ((3, 1), (6, 1)), ((10, 3), (30, 3))
_EXAMPLE_WORDS_SHORT, _EXAMPLE_WORDS = 20, 40

_CODED_DOCUMENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}"
)
_CODED_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
_CODED_LEAD = " Answer: According to the coded text above, the three most frequently appeared words are:"
_CODED_LETTERS = 6
_ZETA_2 = math.pi**2 / 6  # normalises frequencies that fall with the square of the rank


def draw_common_words(drawing: Drawing, name: str, new_tokens: int) -> list[Sample]:
    """Samples of "cwe"; see `draw_fitted`."""
    words, short = drawing.sources.words, drawing.length < _SHORT
    example_repeats, repeats = _REPEATS_SHORT if short else _REPEATS
    example_words = _EXAMPLE_WORDS_SHORT if short else _EXAMPLE_WORDS

    def make(rng: random.Random, size: int, index: int) -> Sample:
        context, answer = _numbered(rng, words, example_words, *example_repeats)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(answer, start=1))
        example = f"{_COMMON_DOCUMENT.format(context=context)}{_COMMON_QUESTION}{_COMMON_LEAD} {numbered}\n"
        context, answer = _numbered(rng, words, size, *repeats)
        document = example + _COMMON_DOCUMENT.format(context=context)
        return Sample(asked_with_lead(document, _COMMON_QUESTION, _COMMON_LEAD), tuple(answer))

    return draw_fitted(drawing, name, make, new_tokens=new_tokens, least=_COMMON + 1)


def _numbered(rng: random.Random, words: Words, count: int, repeats: int, other_repeats: int) -> tuple[str, list[str]]:
    """A list of `count` different words, each repeated, and the ten that are most common."""
    drawn = words.draw_distinct(rng, count)
    common, others = drawn[:_COMMON], drawn[_COMMON:]
    listed = common * repeats + others * other_repeats
    rng.shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1)), common


def draw_frequent_words(drawing: Drawing, name: str, new_tokens: int) -> list[Sample]:
    """Samples of "fwe"; see `draw_fitted`."""
    vocabulary_size = max(6, (drawing.length - new_tokens) // 50)
    least = next(n for n in range(1, 1000) if _counts(n, 5)[3] > _counts(n, 5)[4] > 0)

    def make(rng: random.Random, size: int, index: int) -> Sample:
        words: set[str] = set()
        while len(words) < vocabulary_size:
            words.add("".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS)))
        vocabulary = rng.sample(sorted(words), vocabulary_size)
        vocabulary[0] = "..."  # the most frequent one is noise
        counted = zip(vocabulary, _counts(size, vocabulary_size), strict=True)
        text = [word for word, count in counted for _ in range(count)]
        rng.shuffle(text)
        document = _CODED_DOCUMENT.format(context=" ".join(text))
        return Sample(asked_with_lead(document, _CODED_QUESTION, _CODED_LEAD), tuple(vocabulary[1:4]))

    return draw_fitted(drawing, name, make, new_tokens=new_tokens, least=least)


def _counts(words: int, vocabulary_size: int) -> list[int]:
    """How often each word of a vocabulary stands in a text of about so many words."""
    return [int(words / (rank**2 * _ZETA_2)) for rank in range(1, vocabulary_size + 1)]
