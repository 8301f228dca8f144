"""RULER's needles in a haystack: sentences with magic values for keys, in noise, in essays or among other needles."""

from __future__ import annotations

import dataclasses
import random
import re
import uuid
from collections.abc import Sequence

from tca_jax.lab.evaluation.ruler.fitting import draw_fitted
from tca_jax.lab.evaluation.samples import Drawing, Sample, asked_with_lead

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DOCUMENT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}"
)
_QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
_LEAD = " The special magic {kind} for {query} mentioned in the provided text are"
#: Where needles may stand in an essay, in percent of its sentences.
_DEPTHS = tuple(round(100 * i / 39) for i in range(40))
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+")


@dataclasses.dataclass(frozen=True)
class Needles:
    """One of RULER's eight tasks.

    Attributes:
        name: Its name.
        haystack: "noise", "essay" or "needle".
        keys: What keys are: "words" or "uuids".
        values: What values are: "numbers" or "uuids".
        num_keys: Keys with needles.
        num_values: Needles of each key.
        num_queries: Keys that are asked for.
    """

    name: str
    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    @property
    def needs(self) -> tuple[str, ...]:
        """Sources."""
        words = ("words",) if self.keys == "words" else ()
        return (*words, "essays") if self.haystack == "essay" else words

    def draw(self, drawing: Drawing, new_tokens: int) -> list[Sample]:
        """Samples; see `draw_fitted`."""
        essay = drawing.sources.essay_words if self.haystack == "essay" else []

        def make(rng: random.Random, size: int, index: int) -> Sample:
            return self._make(rng, size, drawing, essay)

        least = 1 if self.haystack == "essay" else self.num_needles
        return draw_fitted(drawing, self.name, make, new_tokens=new_tokens, least=least)

    @property
    def num_needles(self) -> int:
        """Needles in a haystack."""
        return max(self.num_keys, self.num_queries) * self.num_values

    def _make(self, rng: random.Random, size: int, drawing: Drawing, essay: Sequence[str]) -> Sample:
        def draw(kind: str) -> str:
            if kind == "words":
                return drawing.sources.words.draw_pair(rng)
            if kind == "numbers":
                return str(rng.randint(10**6, 10**7 - 1))
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))

        def needle(key: str, value: str) -> str:
            return _NEEDLE.format(kind=self.values, key=key, value=value)

        keys = [draw(self.keys) for _ in range(max(self.num_keys, self.num_queries))]
        values = [[draw(self.values) for _ in range(self.num_values)] for _ in keys]
        needles = [needle(key, value) for key, of_key in zip(keys, values, strict=True) for value in of_key]
        rng.shuffle(needles)
        if self.haystack == "essay":
            context = _hide_in_essay(rng, needles, essay, size)
        elif self.haystack == "noise":
            context = _hide_in_lines(rng, needles, [_NOISE] * size)
        else:
            context = _hide_in_lines(rng, needles, [needle(draw(self.keys), draw(self.values)) for _ in range(size)])
        asked = rng.sample(range(len(keys)), self.num_queries)
        return self._ask(context, [keys[i] for i in asked], [value for i in asked for value in values[i]])

    def _ask(self, context: str, keys: list[str], answers: list[str]) -> Sample:
        query = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
        parts, kind = [_DOCUMENT, _QUESTION, _LEAD], self.values
        if len(answers) == 1:
            parts, kind = list(map(_singular, parts)), kind[:-1]
        document, question, lead = (part.format(kind=kind, query=query, context=context) for part in parts)
        depths = tuple(document.find(answer) / len(document) for answer in answers)
        return Sample(asked_with_lead(document, question, lead), tuple(answers), depths)


def _singular(template: str) -> str:
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _hide_in_lines(rng: random.Random, needles: list[str], lines: list[str]) -> str:
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _hide_in_essay(rng: random.Random, needles: list[str], essay: Sequence[str], size: int) -> str:
    """Needles between the sentences of the essay's first `size` words; it is repeated where it is shorter."""
    words = [*essay] * -(-size // len(essay)) if size > len(essay) else essay
    sentences = _SENTENCE_END.split(" ".join(words[:size]).strip())
    places = sorted(int(len(sentences) * depth / 100) for depth in rng.sample(_DEPTHS, len(needles)))
    edges = [0, *places, len(sentences)]
    parts = []
    for i, needle in enumerate([*needles, None]):
        parts.append(" ".join(sentences[edges[i] : edges[i + 1]]))
        if needle is not None:
            parts.append(needle)
    return " ".join(parts)
