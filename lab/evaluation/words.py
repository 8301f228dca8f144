"""Words for keys and lists: those of the package `wonderwords`, as in RULER, or a few hundred of our own."""

from __future__ import annotations

import dataclasses
import functools
import random

from tca_jax.errors import UserError
from tca_jax.lab.recall.facts import ADJECTIVES, NOUNS


@dataclasses.dataclass(frozen=True)
class Words:
    """Lists of English words, sorted, without repetition.

    Attributes:
        adjectives: Adjectives.
        nouns: Nouns.
        verbs: Verbs; may be empty.
        origin: Where they come from.
        substitute: Whether RULER takes others.
    """

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    origin: str
    substitute: bool

    @functools.cached_property
    def singles(self) -> tuple[str, ...]:
        """All words."""
        return tuple(sorted({*self.adjectives, *self.nouns, *self.verbs}))

    def draw_pair(self, rng: random.Random) -> str:
        """A key such as "amber-falcon"."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"

    def draw_distinct(self, rng: random.Random, count: int) -> list[str]:
        """Different words; pairs of them where there are not so many.

        Raises:
            ValueError: there are not so many pairs either.
        """
        if count <= len(self.singles):
            return rng.sample(self.singles, count)
        pairs = len(self.adjectives) * len(self.nouns)
        if count > pairs:
            raise UserError(f"a list of {count} different words: {self.origin} makes {pairs}")
        nouns = len(self.nouns)
        return [f"{self.adjectives[i // nouns]}-{self.nouns[i % nouns]}" for i in rng.sample(range(pairs), count)]


@functools.cache
def load_words() -> Words:
    """The words of `wonderwords` where it is installed, otherwise our own."""
    try:
        import wonderwords
    except ImportError:
        origin = f"tca_jax's own {len(ADJECTIVES) + len(NOUNS)} words (wonderwords is not installed)"
        return Words(tuple(sorted(ADJECTIVES)), tuple(sorted(NOUNS)), (), origin, substitute=True)
    from importlib.metadata import version

    lists = wonderwords.RandomWord()
    adjectives, nouns, verbs = (
        tuple(sorted(set(lists.filter(include_categories=[kind])))) for kind in ("adjective", "noun", "verb")
    )
    return Words(adjectives, nouns, verbs, f"wonderwords {version('wonderwords')}", substitute=False)
