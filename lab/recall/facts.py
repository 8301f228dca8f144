"""Facts: a kind, a key and a value; one line of a document, in several wordings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

_FIVE_LETTERS = """
agile amber azure basic blunt brave brief brisk broad civic clean close crisp daily dense early eager equal fancy fixed
fleet fresh giant glass grand great green happy heavy humid ivory jolly large light lilac lunar major merry minor misty
noble ocean olive pearl plain polar proud quick quiet rapid rough round royal sharp shiny silky small solar solid stone
sunny sweet tidal urban vivid white young
"""
_SIX_LETTERS = """
acacia anchor animal anthem basket beacon beaver branch bridge bronze burrow button cactus candle canvas canyon castle
cavern cheese cherry cinema clover cobalt condor copper coyote cradle dagger desert dragon engine fabric falcon ferret
fiddle forest fossil galaxy garden garnet geyser ginger glider guitar hammer harbor helmet hornet indigo island jacket
jaguar jigsaw jungle kettle kitten ladder lagoon laurel lizard locket magnet mantle marble market meadow meteor mirror
monkey mosaic museum needle nickel nugget orchid osprey oyster palace parrot pebble pencil pepper pickle pigeon pillow
planet poplar potato quarry quartz rabbit radish raisin ribbon rocket saddle salmon school shovel signal silver spider
spring spruce square stable summer sunset symbol temple ticket timber tomato tunnel turnip turtle tuxedo valley velvet
violin walnut walrus window winter zephyr
"""
ADJECTIVES = tuple(_FIVE_LETTERS.split())
NOUNS = tuple(_SIX_LETTERS.split())

#: What values look like, and the kinds of things that have such values.
KINDS: dict[str, tuple[str, ...]] = {
    "digits": ("access code", "locker number", "ticket number", "phone number"),
    "words": ("password", "code name", "watchword", "nickname"),
    "hex": ("checksum", "session key", "commit hash", "license key"),
    "passage": ("passage", "verse", "message", "note"),
}
CODE_DIGITS = 6
HEX_CHARACTERS = 32
PASSAGE_BYTES = 200

_WORDINGS = (
    "The {kind} for {key} is {value}.",
    "Remember that the {kind} of {key} is {value}.",
    "For {key} the {kind} is {value}.",
    "As agreed, the {kind} for {key} is {value}.",
    "{key}: {kind} {value}.",
    "Note on {key}: its {kind} reads {value}.",
    "We gave {key} a {kind}, namely {value}.",
)


@dataclasses.dataclass(frozen=True)
class Fact:
    """One fact."""

    kind: str  # such as "access code", perhaps with an ordinal in front
    key: str  # such as "amber falcon"
    value: str  # ASCII
    wording: int = 0  # number of its wording

    @property
    def line(self) -> str:
        """The comment line in a document, with its line break."""
        return f"# {_WORDINGS[self.wording].format(kind=self.kind, key=self.key, value=self.value)}\n"


def draw_fact(rng: np.random.Generator, kind: str, key: str, value: str) -> Fact:
    """A fact in a random wording."""
    return Fact(kind, key, value, int(rng.integers(len(_WORDINGS))))


def draw_value(rng: np.random.Generator, form: str) -> str:
    """A value of one of the forms of `KINDS`."""
    if form == "digits":
        return f"{rng.integers(10**CODE_DIGITS):0{CODE_DIGITS}d}"
    if form == "hex":
        return rng.bytes(HEX_CHARACTERS // 2).hex()
    if form == "words":
        return f"{one_of(rng, ADJECTIVES)} {one_of(rng, NOUNS)}"
    words = ADJECTIVES + NOUNS
    text = " ".join(words[i] for i in rng.integers(len(words), size=PASSAGE_BYTES // 6).tolist())
    return text[: PASSAGE_BYTES - 1].rstrip().ljust(PASSAGE_BYTES, "s")


def draw_keys(rng: np.random.Generator) -> Iterator[str]:
    """Keys, all different, such as "amber falcon"; nouns do not repeat before all of them were used."""
    adjectives = rng.permutation(len(ADJECTIVES)).tolist()
    nouns = rng.permutation(len(NOUNS)).tolist()
    for turn in range(len(ADJECTIVES)):
        for place, noun in enumerate(nouns):
            yield f"{ADJECTIVES[adjectives[(place + turn) % len(adjectives)]]} {NOUNS[noun]}"


def similar_keys(rng: np.random.Generator, key: str, count: int) -> list[str]:
    """Keys that share a word with `key`, all different."""
    adjective, noun = key.split()
    others = [f"{adjective} {n}" for n in NOUNS if n != noun] + [f"{a} {noun}" for a in ADJECTIVES if a != adjective]
    return [others[i] for i in rng.permutation(len(others))[:count].tolist()]


def one_of(rng: np.random.Generator, words: tuple[str, ...]) -> str:
    """One of some words."""
    return words[int(rng.integers(len(words)))]
