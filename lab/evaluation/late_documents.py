"""Documents of real text with facts to be asked for later, and documents whose end repeats their first half."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int32

from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import TokenizerWording, encode_verbatim, render_chat
from tca_jax.errors import UserError
from tca_jax.lab.evaluation.texts import KINDS, Half, draw
from tca_jax.lab.recall.facts import ADJECTIVES, NOUNS

ROW = 160  # tokens of a question and its answer, padded
FREE_END = 1_300  # tokens at a document's end without facts: more than a window of 1,024 and its block
_CHARACTERS = 12  # of text that are drawn for each token of a document
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


@dataclasses.dataclass(frozen=True)
class LateFact:
    """A fact of one line, and the question for its value."""

    line: str
    question: str
    opening: str  # first words of the answer
    value: str


@dataclasses.dataclass(frozen=True)
class LateDocument:
    """A document that is read without its questions, and rows that are teacher-forced after it."""

    ids: list[int]  # after the chat template's opening
    rows: Int32[np.ndarray, "Q n"]  # questions with their answers, `[Q, ROW]`
    counted: Float32[np.ndarray, "Q n"]  # 1 at the token before each token of an answer
    kinds: tuple[Literal["fact", "copy", "next"], ...]  # of each row


def late_facts(rng: np.random.Generator, count: int) -> Iterator[LateFact]:
    """Facts of six kinds, in turn. Every second name shares a word with the preceding one."""
    adjectives, nouns = rng.permutation(ADJECTIVES).tolist(), rng.permutation(NOUNS).tolist()
    for i in range(count):
        name = f"{adjectives[i // 2]} {nouns[i]}"
        digits = "".join(map(str, rng.integers(0, 10, 12)))
        drawn = f"{ADJECTIVES[rng.integers(len(ADJECTIVES))]} {NOUNS[rng.integers(len(NOUNS))]}"
        yield (
            _fact(f"The access code for {name} is", digits[:6], "the code", f"What is the access code for {name}?"),
            _fact(f"The fingerprint of {name} is", rng.bytes(8).hex(), "it", f"What is the fingerprint of {name}?"),
            _fact(f"The code name of {name} is", drawn, "it", f"What is the code name of {name}?"),
            _fact(f"The motto of {name} is:", str(rng.choice(_MOTTOS)), "it", f"What is the motto of {name}?"),
            _fact(
                f"The three lockers of {name} are",
                ", ".join(digits[at : at + 4] for at in (0, 4, 8)),
                "the numbers, separated by commas",
                f"What are the three lockers of {name}?",
            ),
            _fact(
                f"The parcel for {name} was sent to",
                str(rng.choice(_CITIES)),
                "the city",
                f"To which city was the parcel for {name} sent?",
            ),
        )[i % 6]


def _fact(opening: str, value: str, what: str, question: str) -> LateFact:
    return LateFact(f"{opening} {value}.", f"{question} Answer with only {what}.", opening, value)


def late_document(
    lm: LM, seed: int, tokens: int, half: Half = "test", folder: Path | None = None, facts: int = 12, copies: int = 4
) -> LateDocument:
    """A document of `tokens` with facts on lines of their own, and the questions that are asked later.

    Even seeds are of source code, odd ones of manuals. Facts are of six kinds in turn, none within the last `FREE_END`
    tokens; `copies` passages are asked for word for word.
    """
    if tokens + ROW > lm.config.max_context:
        raise UserError(
            f"tokens = {tokens}: must be at most {lm.config.max_context - ROW}, so that questions fit after it"
        )
    if tokens < 2 * FREE_END:
        raise UserError(f"tokens = {tokens}: must be at least {2 * FREE_END}, so that facts stand outside a window")
    rng = np.random.default_rng(seed)
    opening, closing = chat_frame(lm)
    text = draw(rng, KINDS[seed % len(KINDS)], half, _CHARACTERS * tokens, folder)
    known = list(late_facts(rng, facts))
    hidden = [encode_verbatim(lm, fact.line + "\n") for fact in known]
    body, following = _lines(lm, text, tokens - len(opening) - sum(map(len, hidden)))
    ends = np.cumsum([len(line) for line in body])
    last = int(np.searchsorted(ends, ends[-1] - FREE_END))
    for place, number in zip(
        sorted(rng.integers(1, max(2, last), facts), reverse=True), rng.permutation(facts), strict=True
    ):
        body.insert(int(place), hidden[number])
    ids = [*opening, *(token for line in body for token in line)]
    asked: list[tuple[Any, list[int], list[int]]] = [
        ("fact", _question(lm, fact.question, closing, fact.opening), encode_verbatim(lm, f" {fact.value}"))
        for fact in known
    ]
    for _ in range(copies):
        start = int(rng.integers(len(opening) + 50, len(ids) - FREE_END))
        shown = ids[start : start + _COPY_SHOWN]
        request = encode_verbatim(lm, "\n\nContinue, word for word, the passage of the document that begins with: ")
        answer = ids[start + _COPY_SHOWN : start + _COPY_SHOWN + _COPY_ASKED]
        asked.append(("copy", [*request, *shown, *closing], answer))
    asked.append(("next", following[:1], following[1:ROW]))
    rows, counted = np.zeros((len(asked), ROW), np.int32), np.zeros((len(asked), ROW), np.float32)
    for i, (kind, question, answer) in enumerate(asked):
        if len(question) + len(answer) > ROW:
            raise UserError(f"a {kind} and its answer have {len(question) + len(answer)} tokens: at most {ROW} fit")
        row = [*question, *answer]
        rows[i, : len(row)] = row
        counted[i, len(question) - 1 : len(row) - 1] = 1
    return LateDocument(ids, rows, counted, tuple(kind for kind, *_ in asked))


def chat_frame(lm: LM) -> tuple[list[int], list[int]]:
    """Tokens before a user's text, and between it and the answer; only a line break without a chat template."""
    if not getattr(lm.tokenizer, "chat_template", None):
        return [], encode_verbatim(lm, "\n")
    mark = "THE-TEXT"
    opening, _ = render_chat(lm, [{"role": "user", "content": mark}], "chat").split(mark)
    return encode_verbatim(lm, opening), list(TokenizerWording(lm).before_answer())


def _question(lm: LM, question: str, closing: Sequence[int], opening: str) -> list[int]:
    return [*encode_verbatim(lm, f"\n\n{question}"), *closing, *encode_verbatim(lm, opening)]


def _lines(lm: LM, text: str, tokens: int) -> tuple[list[list[int]], list[int]]:
    """Lines of a text with `tokens` in all, the last one cut, and the tokens that follow."""
    encoded = [encode_verbatim(lm, line) for line in text.splitlines(keepends=True)]
    ends = np.cumsum([len(line) for line in encoded])
    last = int(np.searchsorted(ends, tokens))
    if last >= len(encoded):
        raise UserError(f"the text has {ends[-1]} tokens: {tokens} are needed")
    cut = len(encoded[last]) - int(ends[last] - tokens)
    following = [*encoded[last][cut:], *(token for line in encoded[last + 1 : last + 200] for token in line)]
    return [*encoded[:last], encoded[last][:cut]], following


@dataclasses.dataclass(frozen=True)
class RepeatingDocument:
    """A text whose last third repeats passages and facts of its first half."""

    ids: list[int]
    weights: Float32[np.ndarray, "3 n"]  # of the next token's loss: plain tokens, far copies, far facts; each sums to 1


def repeating_document(
    lm: LM, seed: int, tokens: int, half: Half = "test", folder: Path | None = None, repeats: int = 8
) -> RepeatingDocument:
    """A text with `repeats` facts and passages of 64 tokens in its first half that return in its last third.

    Of a passage, tokens from the 17th on count as a far copy. Plain tokens count from the first quarter on.
    """
    if tokens < 1_000:
        raise UserError(f"tokens = {tokens}: must be at least 1,000, so that passages return later")
    rng = np.random.default_rng(seed)
    text = draw(rng, KINDS[seed % len(KINDS)], half, _CHARACTERS * tokens, folder)
    base = iter(encode_verbatim(lm, text))
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
            copy[len(ids) + 15 : len(ids) + 63] = 1
            ids.extend(ids[at : at + 64])
        else:
            shown = encode_verbatim(lm, f"\nAs noted above, the code of {names[item - repeats]} is")
            answer = encode_verbatim(lm, f" {values[item - repeats]}")
            fact[len(ids) + len(shown) - 1 : len(ids) + len(shown) + len(answer) - 1] = 1
            ids.extend([*shown, *answer, *encode_verbatim(lm, ".\n")])
    if len(ids) > tokens:
        raise UserError(f"tokens = {tokens}: {repeats} passages and facts need at least {len(ids)}")
    fill(tokens)
    if len(ids) < tokens:
        raise UserError(f"the text has {len(ids)} tokens: {tokens} are needed")
    plain = np.zeros(tokens)
    plain[tokens // 4 :] = 1
    plain[(copy + fact) > 0] = 0
    weights = np.stack([plain, copy, fact])[:, : tokens - 1]
    return RepeatingDocument(ids[:tokens], (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32))


def calibration_texts(lm: LM, count: int, tokens: int, folder: Path | None = None) -> list[list[int]]:
    """Texts of the calibration half, of both kinds in turn, as token ids."""
    texts = []
    for seed in range(count):
        rng = np.random.default_rng(1_000 + seed)
        text = draw(rng, KINDS[seed % len(KINDS)], "calibration", _CHARACTERS * tokens, folder)
        texts.append(encode_verbatim(lm, text)[:tokens])
    return texts
