"""Probes: questions about a calibration text whose answers are far back in it, each read after the text alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from tca_jax.calibration import facts
from tca_jax.engine.prompts import Encoder, Prompt, decode_utf8, encode_prompt, encode_verbatim, render_chat
from tca_jax.errors import require
from tca_jax.methods.config import TCAConfig

Kind = Literal["facts", "copy"]
#: (question, answer) of one text, as text or as token ids.
Pairs = Sequence[tuple[Prompt, Prompt]]
#: What `calibrate` takes: a kind, several, pairs for each text, or None for facts and copies.
Probes = Kind | Sequence[Kind] | Sequence[Pairs] | None

#: Last tokens of a text that become a probe: any continuation needs what these need, whatever is asked.
FOLLOWING = 256
#: Kind of that probe.
FOLLOW = "follow"

# Copies: enough passages that no single one decides, each long enough to be recognised and then foretold.
_COPIES = 4
_COPY_TOKENS = 128
_RECOGNISED = 16  # a passage's first tokens do not say yet which passage it is

_MOST_OF_TEXT = 10  # facts take at most this part of a text, a tenth, so that it stays what it was
_LINE_SEARCH = 200  # tokens in which a line's end is looked for, so that a fact's line cuts none

_PARTS = ("question", "answer")
_ALLOWED = "'facts', 'copy', a list of these, a list of (question, answer) pairs for each text, or None"


@dataclasses.dataclass(frozen=True)
class Segment:
    """One probe, read after a text without the other probes."""

    ids: tuple[int, ...]  # its token ids
    # Of each token, whether it counts: tokens of answers do, tokens of questions do not.
    answers: tuple[bool, ...]
    kind: str  # "facts", "copy", "pairs" or "follow"


@dataclasses.dataclass(frozen=True)
class ProbedText:
    """A calibration text and its probes."""

    ids: tuple[int, ...]  # token ids of the text, with facts hidden in it; the selection is made at its end
    segments: tuple[Segment, ...]  # the probes


def probe_kinds(probes: Any) -> tuple[str, ...]:
    """Which probes are made beside the text's own end: some of "facts" and "copy", or "pairs" alone."""
    if probes is None:
        return get_args(Kind)
    named = [probes] if isinstance(probes, str) else probes
    is_list = isinstance(probes, Sequence) and not isinstance(probes, bytes)
    if is_list and not any(isinstance(each, str) for each in named):
        return ("pairs",)
    are_kinds = is_list and all(isinstance(each, str) and each in get_args(Kind) for each in named)
    require(are_kinds, f"probes = {probes!r}: must be {_ALLOWED}")
    return tuple(dict.fromkeys(named))


def probed_texts(
    lm: Encoder, sequences: Sequence[list[int]], probes: Any, config: TCAConfig, names: Sequence[str] | None = None
) -> list[ProbedText]:
    """Makes the probes of each text.

    Raises:
        ValueError: facts are asked for and there is no tokenizer; pairs are not one non-empty list for each text, hold
            what is not allowed as text, or pass the model's positions.
        TypeError: a pair is no pair, or holds neither text nor token ids.
    """
    kinds = probe_kinds(probes)
    if kinds == ("pairs",):
        return _with_pairs(lm, sequences, probes, config, names or [f"texts[{i}]" for i in range(len(sequences))])
    if "facts" in kinds and probes is not None:
        _require_tokenizer(lm, f"probes = {probes!r}")
    return [_with_own(lm, ids, kinds, config, i) for i, ids in enumerate(sequences)]


def _with_own(lm: Encoder, ids: list[int], kinds: tuple[str, ...], config: TCAConfig, index: int) -> ProbedText:
    """A text with facts in it, which its probes ask for, and passages of it as probes."""
    text, segments = _split_end(ids, config)
    shortest, most = config.window + config.block_size, lm.config.max_context
    seed = [config.seed, index]  # no two texts share draws, nor do copies and facts
    rng = np.random.default_rng([*seed, 1])
    encoded = _encode_facts(lm, rng, most - shortest) if "facts" in kinds and lm.tokenizer is not None else []
    longest = max([len(segment.ids) for segment in (*segments, *(asked for _, asked in encoded))], default=0)
    longest = max(longest, _COPY_TOKENS if "copy" in kinds else 0)
    text = _without_beginning(text, max(0, len(text) - max(shortest, most - longest)))
    ranked = config.num_ranked_blocks(len(text)) * config.block_size
    if encoded:
        text, asked = _hide(lm, text, encoded, ranked, rng)
        segments += asked
    if "copy" in kinds:
        segments += _copies(text[:ranked], most - len(text), np.random.default_rng(seed))
    return ProbedText(tuple(text), tuple(segments))


def _split_end(ids: list[int], config: TCAConfig) -> tuple[list[int], list[Segment]]:
    """A text without its end, and the end as a probe; one ranked block stays."""
    size = max(0, min(FOLLOWING, len(ids) - config.window - config.block_size))
    text, end = ids[: len(ids) - size], tuple(ids[len(ids) - size :])
    return text, [Segment(end, (True,) * size, FOLLOW)] if size else []


def _without_beginning(ids: list[int], tokens: int) -> list[int]:
    """A text without some of its first tokens, but with the very first, which may be the one that begins every text."""
    return [*ids[:1], *ids[1 + tokens :]]


def _encode_facts(lm: Encoder, rng: np.random.Generator, room: int) -> list[tuple[list[list[int]], Segment]]:
    """Of each fact whose probe fits into the room: its lines' tokens, each with a line break, and the probe."""
    chat = getattr(lm.tokenizer, "chat_template", None)
    encoded = []
    for fact in facts.draw_facts(rng):
        question = fact.question if chat else f"Question: {fact.question}\nAnswer:"
        asked = _encode_asked(lm, question, fact.answer, "facts", "probes", counted=fact.values)
        if len(asked.ids) <= room:
            encoded.append(([encode_verbatim(lm, f"{line}\n", "probes") for line in fact.lines], asked))
    return encoded


def _hide(
    lm: Encoder, text: list[int], encoded: list[tuple[list[list[int]], Segment]], ranked: int, rng: np.random.Generator
) -> tuple[list[int], list[Segment]]:
    """Hides as many facts as fit in the text's ranked region, and cuts as many tokens off its beginning.

    Returns:
        The text, as long as it was, and the probes of the facts in it.
    """
    line_break = encode_verbatim(lm, "\n", "probes")
    hidden, probes, taken = list[list[int]](), [], 0
    room = min(len(text) // _MOST_OF_TEXT, ranked - 1)
    for lines, asked in encoded:
        if (needed := taken + sum(len(line_break) + len(line) for line in lines)) <= room:
            hidden += lines
            probes.append(asked)
            taken = needed
    # What the lines take is cut off in front of them: a line put at place p comes to stand in front of p.
    places = [
        _line_start(lm, text, 1 + taken + start, ranked) for start in _spread(rng, len(hidden), 1, ranked - taken)
    ]
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


def _with_pairs(
    lm: Encoder, sequences: Sequence[list[int]], probes: Any, config: TCAConfig, names: Sequence[str]
) -> list[ProbedText]:
    """Texts with the user's pairs as probes."""
    must = f"must have one for each of {len(sequences)} texts"
    require(len(probes) == len(sequences), f"probes has {len(probes)} lists of pairs: {must}")
    pairs = [_encode_pairs(lm, of_text, f"probes[{i}]") for i, of_text in enumerate(probes)]
    texts = [_split_end(ids, config) for ids in sequences]
    for name, (text, _), asked in zip(names, texts, pairs, strict=True):
        longest, most = max(len(segment.ids) for segment in asked), lm.config.max_context
        given = f"{name} has {len(text)} tokens without its end, its longest pair {longest}"
        fits = len(text) + longest <= most
        require(fits, f"{given}: model {lm.name!r} has {most} positions; cut the text")
    return [ProbedText(tuple(text), (*end, *asked)) for (text, end), asked in zip(texts, pairs, strict=True)]


def _encode_pairs(lm: Encoder, pairs: Any, name: str) -> list[Segment]:
    """One text's pairs, each a probe of its own."""
    are_pairs = _is_list(pairs) and all(_is_list(pair) and len(pair) == len(_PARTS) for pair in pairs)
    are_text = {isinstance(part, str | bytes) for pair in pairs for part in pair} if are_pairs else set()
    fits = len(are_text) == 1 and all(len(part) for pair in pairs for part in pair)
    must = "must be a list of (question, answer) pairs, at least one, all text or all token ids, none empty"
    require(fits, f"{name}: {must}")
    if are_text == {False}:
        parts = [
            [encode_prompt(lm, part, f"{name}[{i}] ({what})") for part, what in zip(pair, _PARTS, strict=True)]
            for i, pair in enumerate(pairs)
        ]
        return [Segment((*q, *a), (False,) * len(q) + (True,) * len(a), "pairs") for q, a in parts]
    _require_tokenizer(lm, name)
    turns = [[decode_utf8(part, f"{name}[{i}]") for part in pair] for i, pair in enumerate(pairs)]
    return [_encode_asked(lm, question, answer, "pairs", name) for question, answer in turns]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _require_tokenizer(lm: Encoder, name: str) -> None:
    remedy = "pass pairs of token ids, or 'copy'"
    require(lm.tokenizer is not None, f"{name}: {lm.name} was loaded without a tokenizer; {remedy}")


def _encode_asked(
    lm: Encoder, question: str, answer: str, kind: str, name: str, counted: Sequence[str] = ()
) -> Segment:
    """A question and its answer as turns of the model's chat template, or as lines where it has none.

    Tokens count that reach into the answer, or into its last parts where those are `counted`; all do where the
    template rewrites it or the tokenizer tells no characters.
    """
    text, before = f"\n{question} {answer}", f"\n{question} "
    if getattr(lm.tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text, before = render_chat(lm, turns, name, answered=True), render_chat(lm, turns[:1], name)
    told = answer.strip() or answer  # templates may strip what they render
    start = text.find(told, len(before)) if text.startswith(before) else text.rfind(told)
    spans, end = [], start + len(told)
    for part in reversed(counted or [told]) if start >= 0 else ():
        place = text.rindex(part, start, end)
        spans.append((place, place + len(part)))
        end = place
    begun = len(text) - len(text.removeprefix(getattr(lm.tokenizer, "bos_token", None) or ""))  # by the text in front
    ids = encode_verbatim(lm, text[begun:], name)
    counts = [True] * len(ids)
    if spans and getattr(lm.tokenizer, "is_fast", False):
        encoded = lm.tokenizer(text[begun:], verbose=False, add_special_tokens=False, return_offsets_mapping=True)
        offsets = [(a + begun, b + begun) for a, b in encoded["offset_mapping"]]
        counts = [any(a < last and b > first for first, last in spans) for a, b in offsets]
    return Segment(tuple(ids), tuple(counts), kind)
