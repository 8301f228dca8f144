"""Probes: facts hidden in a text, passages of it, and its end, each read after the text alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tca_jax.calibration import facts
from tca_jax.engine.prompts import Encoder, encode_verbatim, render_chat
from tca_jax.methods.base import num_ranked_blocks
from tca_jax.methods.worth import BLOCK, WINDOW

FOLLOWING = 256  # last tokens of a text that become a probe: any continuation needs what these need
FOLLOW = "follow"  # kind of that probe

# Copies: enough passages that no single one decides, each long enough to be recognised and then foretold.
_COPIES = 4
_COPY_TOKENS = 128
_RECOGNISED = 16  # a passage's first tokens do not say yet which passage it is

_MOST_OF_TEXT = 10  # facts take at most this part of a text, a tenth, so that it stays what it was
_LINE_SEARCH = 200  # tokens in which a line's end is looked for, so that a fact's line cuts none


@dataclasses.dataclass(frozen=True)
class Segment:
    """One probe, read after a text without the other probes."""

    ids: tuple[int, ...]  # its token ids
    answers: tuple[bool, ...]  # of each token, whether it counts: those of answers do, those of questions do not
    kind: str  # "facts", "copy" or "follow"


@dataclasses.dataclass(frozen=True)
class ProbedText:
    """A calibration text and its probes."""

    ids: tuple[int, ...]  # token ids of the text, with facts hidden in it; the selection is made at its end
    segments: tuple[Segment, ...]  # the probes


def probed_texts(
    lm: Encoder, sequences: Sequence[list[int]], *, block_size: int = BLOCK, window: int = WINDOW
) -> list[ProbedText]:
    """Makes the probes of each text; facts need a tokenizer."""
    return [_with_probes(lm, ids, index, block_size, window) for index, ids in enumerate(sequences)]


def _with_probes(lm: Encoder, ids: list[int], index: int, block_size: int, window: int) -> ProbedText:
    """A text with facts in it, which its probes ask for, and passages of it as probes."""
    shortest, most = window + block_size, lm.config.max_context
    size = max(0, min(FOLLOWING, len(ids) - shortest))
    text, end = ids[: len(ids) - size], tuple(ids[len(ids) - size :])
    segments = [Segment(end, (True,) * size, FOLLOW)] if size else []
    rng = np.random.default_rng([0, index, 1])  # no two texts share draws, nor do copies and facts
    encoded = _encode_facts(lm, rng, most - shortest) if lm.tokenizer is not None else []
    longest = max([_COPY_TOKENS, *(len(each.ids) for each in (*segments, *(asked for _, asked in encoded)))])
    text = _without_beginning(text, max(0, len(text) - max(shortest, most - longest)))
    ranked = num_ranked_blocks(len(text), block_size, window) * block_size
    if encoded:
        text, asked = _hide(lm, text, encoded, ranked, rng)
        segments += asked
    segments += _copies(text[:ranked], most - len(text), np.random.default_rng([0, index]))
    return ProbedText(tuple(text), tuple(segments))


def _without_beginning(ids: list[int], tokens: int) -> list[int]:
    """A text without some of its first tokens, but with the very first, which may be the one that begins every text."""
    return [*ids[:1], *ids[1 + tokens :]]


def _encode_facts(lm: Encoder, rng: np.random.Generator, room: int) -> list[tuple[list[list[int]], Segment]]:
    """Of each fact whose probe fits into the room: its lines' tokens, each with a line break, and the probe."""
    chat = getattr(lm.tokenizer, "chat_template", None)
    encoded = []
    for fact in facts.draw_facts(rng):
        question = fact.question if chat else f"Question: {fact.question}\nAnswer:"
        asked = _encode_asked(lm, question, fact.answer, fact.values)
        if len(asked.ids) <= room:
            encoded.append(([encode_verbatim(lm, f"{line}\n", "probes") for line in fact.lines], asked))
    return encoded


def _hide(
    lm: Encoder, text: list[int], encoded: list[tuple[list[list[int]], Segment]], ranked: int, rng: np.random.Generator
) -> tuple[list[int], list[Segment]]:
    """The text, as long as it was, with as many facts as fit in its ranked region, and the probes of these facts."""
    line_break = encode_verbatim(lm, "\n", "probes")
    hidden, probes, taken = list[list[int]](), [], 0
    room = min(len(text) // _MOST_OF_TEXT, ranked - 1)
    for lines, asked in encoded:
        if (needed := taken + sum(len(line_break) + len(line) for line in lines)) <= room:
            hidden += lines
            probes.append(asked)
            taken = needed
    # What the lines take is cut off in front of them: a line put at place p comes to stand in front of p.
    starts = _spread(rng, len(hidden), 1, ranked - taken)
    places = [_line_start(lm, text, 1 + taken + start, ranked) for start in starts]
    out = list(text)
    for place, line in sorted(zip(places, hidden, strict=True), key=lambda each: each[0], reverse=True):
        out[place:place] = line if _ends_line(lm, text[place - 1]) else [*line_break, *line]
    return _without_beginning(out, len(out) - len(text)), probes


def _line_start(lm: Encoder, text: list[int], start: int, end: int) -> int:
    """The first place in [start, end] where a line begins, unless that is far: then `start`."""
    near = range(start, min(start + _LINE_SEARCH, end + 1))
    return next((place for place in near if _ends_line(lm, text[place - 1])), start)


def _ends_line(lm: Encoder, token: int) -> bool:
    return lm.tokenizer.decode([token]).endswith("\n")


def _copies(ranked: list[int], room: int, rng: np.random.Generator) -> list[Segment]:
    """Passages of a text's ranked region, spread over it; none where a passage would end before it is recognised."""
    size = min(_COPY_TOKENS, len(ranked), room)
    if size <= _RECOGNISED:
        return []
    counts = tuple(i >= _RECOGNISED for i in range(size))
    starts = _spread(rng, min(_COPIES, len(ranked) // size), size, len(ranked))
    return [Segment(tuple(ranked[start : start + size]), counts, "copy") for start in starts]


def _spread(rng: np.random.Generator, count: int, size: int, end: int) -> list[int]:
    """Starts of `count` passages in [0, end), one in each of as many equal parts, in an order of their own."""
    part = end // max(count, 1)
    return [i * part + int(rng.integers(max(1, part - size + 1))) for i in rng.permutation(count).tolist()]


def _encode_asked(lm: Encoder, question: str, answer: str, values: Sequence[str]) -> Segment:
    """A question and its answer as turns of the model's chat template, or as lines where it has none."""
    text, before = f"\n{question} {answer}", f"\n{question} "
    if getattr(lm.tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text, before = render_chat(lm, turns, "probes", answered=True), render_chat(lm, turns[:1], "probes")
    start = text.find(answer, len(before)) if text.startswith(before) else text.rfind(answer)
    spans, end = [], start + len(answer)
    for value in reversed(values) if start >= 0 else ():
        place = text.rindex(value, start, end)
        spans.append((place, place + len(value)))
        end = place
    begun = len(text) - len(text.removeprefix(getattr(lm.tokenizer, "bos_token", None) or ""))  # by the text in front
    ids = encode_verbatim(lm, text[begun:], "probes")
    counts = [True] * len(ids)  # all, if the template rewrites the answer or the tokenizer has no offsets
    if spans and getattr(lm.tokenizer, "is_fast", False):
        encoded = lm.tokenizer(text[begun:], verbose=False, add_special_tokens=False, return_offsets_mapping=True)
        offsets = [(a + begun, b + begun) for a, b in encoded["offset_mapping"]]
        counts = [any(a < last and b > first for first, last in spans) for a, b in offsets]
    return Segment(tuple(ids), tuple(counts), "facts")
