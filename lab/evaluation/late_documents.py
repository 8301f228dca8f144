"""Documents of real text with facts to be asked for later, and documents whose end repeats their first half."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32

from tca_jax.calibration.repetition import chat_frame
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import encode_verbatim
from tca_jax.errors import require
from tca_jax.lab.evaluation.texts import KINDS, Half, draw
from tca_jax.lab.recall.facts import ADJECTIVES, NOUNS

ROW = 160  # most tokens of a question and its answer
FREE_END = 1_300  # tokens at a document's end without facts: more than a window of 1,024 and its block
_CHARACTERS = 12  # of text that are drawn for each token of a document
_HIDDEN, _COPIES = 12, 4  # facts and passages of a document that is asked later
_COPY_SHOWN, _COPY_ASKED = 24, 48  # tokens of a passage
_CITIES = """
Antwerp Bergen Cordoba Dublin Esbjerg Florence Granada Hamburg Innsbruck Krakow Lisbon Malmo Nantes Oslo Porto Riga
Salzburg Turin Utrecht Vilnius
""".split()  # noqa: SIM905
_MOTTOS = (
    "we measure twice and cut only once",
    "every door opens for those who wait",
    "the river remembers what the bridge forgets",
    "small lamps make the longest roads shorter",
    "no storm lasts longer than our patience",
    "seven keys and one honest lock suffice",
)


#: First words of a fact's line and of its answer, what to answer with, and the question.
_FACTS = (
    ("The access code for {} is", "the code", "What is the access code for {}?"),
    ("The fingerprint of {} is", "it", "What is the fingerprint of {}?"),
    ("The code name of {} is", "it", "What is the code name of {}?"),
    ("The motto of {} is:", "it", "What is the motto of {}?"),
    ("The three lockers of {} are", "the numbers, separated by commas", "What are the three lockers of {}?"),
    ("The parcel for {} was sent to", "the city", "To which city was the parcel for {} sent?"),
)


class LateFact(NamedTuple):
    """A fact of one line, and the question for its value."""

    line: str
    question: str
    opening: str  # first words of the answer
    value: str


class LateQuestion(NamedTuple):
    """A question about a document, and its right answer, as token ids."""

    kind: Literal["fact", "copy", "next"]
    question: list[int]
    answer: list[int]


class LateDocument(NamedTuple):
    """A document that is read without its questions."""

    ids: list[int]  # after the chat template's opening
    asked: list[LateQuestion]


def late_facts(rng: np.random.Generator, count: int) -> Iterator[LateFact]:
    """Facts of six kinds, in turn. Every second name shares a word with the preceding one."""
    adjectives, nouns = rng.permutation(ADJECTIVES).tolist(), rng.permutation(NOUNS).tolist()
    for i in range(count):
        digits = "".join(map(str, rng.integers(0, 10, 12)))
        words = f"{ADJECTIVES[rng.integers(len(ADJECTIVES))]} {NOUNS[rng.integers(len(NOUNS))]}"
        fingerprint, motto, city = rng.bytes(8).hex(), str(rng.choice(_MOTTOS)), str(rng.choice(_CITIES))
        lockers = ", ".join(digits[at : at + 4] for at in (0, 4, 8))
        value = (digits[:6], fingerprint, words, motto, lockers, city)[i % 6]
        opening, wanted, question = (part.format(f"{adjectives[i // 2]} {nouns[i]}") for part in _FACTS[i % 6])
        yield LateFact(f"{opening} {value}.", f"{question} Answer with only {wanted}.", opening, value)


def late_document(lm: LM, seed: int, tokens: int, folder: Path | None = None) -> LateDocument:
    """A document of `tokens` with facts of six kinds before the last `FREE_END` ones, and the questions asked later."""
    most = lm.config.max_context - ROW
    require(tokens <= most, f"tokens = {tokens}: must be at most {most}, so that questions fit after it")
    far = tokens >= 2 * FREE_END
    require(far, f"tokens = {tokens}: must be at least {2 * FREE_END}, so that facts stand outside a window")
    rng = np.random.default_rng(seed)
    opening, closing = chat_frame(lm)
    text = draw_text(rng, seed, "test", tokens, folder)
    known = list(late_facts(rng, _HIDDEN))
    hidden = [encode_verbatim(lm, fact.line + "\n") for fact in known]
    body, following = _lines(lm, text, tokens - len(opening) - sum(map(len, hidden)))
    ends = np.cumsum([len(line) for line in body])
    last = int(np.searchsorted(ends, ends[-1] - FREE_END))
    places = sorted(rng.integers(1, max(2, last), _HIDDEN), reverse=True)
    for place, number in zip(places, rng.permutation(_HIDDEN), strict=True):
        body.insert(int(place), hidden[number])
    ids = [*opening, *(token for line in body for token in line)]
    asked = list[LateQuestion]()
    for fact in known:
        question = [*encode_verbatim(lm, f"\n\n{fact.question}"), *closing, *encode_verbatim(lm, fact.opening)]
        asked.append(LateQuestion("fact", question, encode_verbatim(lm, f" {fact.value}")))
    request = encode_verbatim(lm, "\n\nContinue, word for word, the passage of the document that begins with: ")
    for _ in range(_COPIES):
        start = int(rng.integers(len(opening) + 50, len(ids) - FREE_END))
        shown, end = ids[start : start + _COPY_SHOWN], start + _COPY_SHOWN + _COPY_ASKED
        asked.append(LateQuestion("copy", [*request, *shown, *closing], ids[start + _COPY_SHOWN : end]))
    return LateDocument(ids, [*asked, LateQuestion("next", following[:1], following[1:ROW])])


def _lines(lm: LM, text: str, tokens: int) -> tuple[list[list[int]], list[int]]:
    """Lines of a text with `tokens` in all, the last one cut, and the tokens that follow."""
    encoded = [encode_verbatim(lm, line) for line in text.splitlines(keepends=True)]
    ends = np.cumsum([len(line) for line in encoded])
    last = int(np.searchsorted(ends, tokens))
    require(last < len(encoded), f"the text has {ends[-1]} tokens: {tokens} are needed")
    cut = len(encoded[last]) - int(ends[last] - tokens)
    following = [*encoded[last][cut:], *(token for line in encoded[last + 1 : last + 200] for token in line)]
    return [*encoded[:last], encoded[last][:cut]], following


@dataclasses.dataclass(frozen=True)
class RepeatingDocument:
    """A text whose last third repeats passages and facts of its first half."""

    ids: list[int]
    weights: Float32[np.ndarray, "3 n"]  # of the next token's loss: plain tokens, far copies, far facts; each sums to 1


def repeating_document(
    lm: LM, seed: int, tokens: int, folder: Path | None = None, repeats: int = 8
) -> RepeatingDocument:
    """A text with `repeats` facts and passages of 64 tokens in its first half that return in its last third."""
    require(tokens >= 1_000, f"tokens = {tokens}: must be at least 1,000, so that passages return later")
    rng = np.random.default_rng(seed)
    base = iter(encode_verbatim(lm, draw_text(rng, seed, "test", tokens, folder)))
    names = list(dict.fromkeys(f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in range(4 * repeats)))[:repeats]
    values = [
        f"{rng.integers(10**6):06d}" if i % 2 else f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        for i in range(repeats)
    ]
    ids: list[int] = []

    def fill(end: int) -> None:
        ids.extend(token for token, _ in zip(base, range(end - len(ids)), strict=False))

    for place, name, value in zip(sorted(rng.integers(64, tokens // 2 - 300, repeats)), names, values, strict=True):
        fill(int(place))
        ids.extend(encode_verbatim(lm, f"\nThe code of {name} is {value}.\n"))
    start = 2 * tokens // 3
    copy, fact = np.zeros(tokens), np.zeros(tokens)
    for i, item in enumerate(rng.permutation(2 * repeats).tolist()):
        fill(start + i * (tokens - start - 100) // (2 * repeats))
        if item < repeats:
            at = int(rng.integers(300, tokens // 2 - 100))
            copy[len(ids) + 15 : len(ids) + 63] = 1  # the next tokens are the passage's from the 17th on
            ids.extend(ids[at : at + 64])
        else:
            shown = encode_verbatim(lm, f"\nAs noted above, the code of {names[item - repeats]} is")
            answer = encode_verbatim(lm, f" {values[item - repeats]}")
            fact[len(ids) + len(shown) - 1 : len(ids) + len(shown) + len(answer) - 1] = 1
            ids.extend([*shown, *answer, *encode_verbatim(lm, ".\n")])
    require(len(ids) <= tokens, f"tokens = {tokens}: {repeats} passages and facts need at least {len(ids)}")
    fill(tokens)
    require(len(ids) == tokens, f"the text has {len(ids)} tokens: {tokens} are needed")
    plain = np.zeros(tokens)
    plain[tokens // 4 :] = 1
    plain[(copy + fact) > 0] = 0
    weights = np.stack([plain, copy, fact])[:, : tokens - 1]
    return RepeatingDocument(ids, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32))


def calibration_texts(lm: LM, count: int, tokens: int, folder: Path | None = None) -> list[list[int]]:
    """Texts of the calibration half, of both kinds in turn, as token ids."""
    rngs = (np.random.default_rng(1_000 + seed) for seed in range(count))
    texts = (draw_text(rng, seed, "calibration", tokens, folder) for seed, rng in enumerate(rngs))
    return [encode_verbatim(lm, text)[:tokens] for text in texts]


def draw_text(rng: np.random.Generator, seed: int, half: Half, tokens: int, folder: Path | None) -> str:
    """More text than `tokens`: of even seeds source code, of odd ones a manual."""
    return draw(rng, KINDS[seed % len(KINDS)], half, _CHARACTERS * tokens, folder)
