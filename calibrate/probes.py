"""Probes: passages behind a calibration text that a model answers from far back in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool

from tca_jax.engine.prompts import Encoder, Prompt, decode_utf8, encode_prompt, encode_verbatim, render_chat
from tca_jax.methods.config import TCAConfig

#: (question, answer) of one text, as text or as token ids.
Pairs = Sequence[tuple[Prompt, Prompt]]
#: What `calibrate` takes: a kind, pairs for each text, or None for no probes.
Probes = Literal["copy", "text"] | Sequence[Pairs] | None

# Copies: enough passages that no single one decides, each long enough to be recognised and then foretold.
_COPIES = 8
_COPY_TOKENS = 128

_ALLOWED = "'copy', 'text', a list of (question, answer) pairs for each text, or None"


@dataclasses.dataclass(frozen=True)
class ProbedText:
    """A calibration text and its probe, as one sequence.

    Attributes:
        ids: Token ids of both.
        text_tokens: Tokens whose calibration scores are measured; the text's end.
        probe_start: First token of the probe, where the selection is made; `len(ids)` where there is no probe.
        answers: Which of the probe's tokens count, those of answers: nobody asks a model to foretell a question. None
            where all do.
    """

    ids: list[int]
    text_tokens: int
    probe_start: int
    answers: tuple[bool, ...] | None = None

    @property
    def num_probe(self) -> int:
        """Tokens of the probe."""
        return len(self.ids) - self.probe_start

    @property
    def counted(self) -> Bool[np.ndarray, " queries"]:
        """Of each of the probe's queries but the last, which foretells nothing: whether its next token counts."""
        return np.ones(self.num_probe, bool)[1:] if self.answers is None else np.array(self.answers, bool)[1:]


def probe_kind(probes: Any) -> str | None:
    """ "copy", "text", "pairs" or None.

    Raises:
        ValueError: it is another string.
        TypeError: it is neither a string, nor a sequence, nor None.
    """
    if probes is None or (isinstance(probes, str) and probes in ("copy", "text")):
        return probes
    if isinstance(probes, str):
        raise ValueError(f"probes = {probes!r}: must be {_ALLOWED}")
    if not isinstance(probes, Sequence):
        raise TypeError(f"probes is of type {type(probes).__name__}: must be {_ALLOWED}")
    return "pairs"


def probed_texts(
    lm: Encoder, sequences: Sequence[list[int]], probes: Any, config: TCAConfig, names: Sequence[str] | None = None
) -> list[ProbedText]:
    """Puts a probe behind each text.

    Args:
        lm: The model whose tokenizer, chat template and positions apply.
        sequences: Token ids of each text, at least window + block_size of them.
        probes: As `calibrate` takes them; checked here.
        config: The method's hyperparameters; `seed` places the copies.
        names: Of the texts in messages; "texts[0]" and so on by default.

    Raises:
        ValueError: pairs are not one non-empty list for each text, hold what is not allowed as text, or pass the
            model's positions.
        TypeError: a pair is no pair, or holds neither text nor token ids.
    """
    kind = probe_kind(probes)
    names = names or [f"texts[{i}]" for i in range(len(sequences))]
    if kind is None:
        return [ProbedText(ids, len(ids), len(ids)) for ids in sequences]
    if kind == "copy":
        return [_copied(ids, lm.config.max_context, config, i) for i, ids in enumerate(sequences)]
    if kind == "text":
        return [_last_quarter(ids, config) for ids in sequences]
    if len(probes) != len(sequences):
        raise ValueError(f"probes has {len(probes)} lists of pairs: must have one for each of {len(sequences)} texts")
    pairs = [_encode_pairs(lm, of_text, f"probes[{i}]") for i, of_text in enumerate(probes)]
    for name, ids, (probe, _) in zip(names, sequences, pairs, strict=True):
        if len(ids) + len(probe) > lm.config.max_context:
            raise ValueError(
                f"{name} has {len(ids)} tokens, its pairs {len(probe)}: model {lm.name!r} has "
                f"{lm.config.max_context} positions; cut the text"
            )
    return [
        ProbedText(ids + probe, len(ids), len(ids), answers)
        for ids, (probe, answers) in zip(sequences, pairs, strict=True)
    ]


def _copied(ids: list[int], max_context: int, config: TCAConfig, index: int) -> ProbedText:
    """Passages of the text's ranked region again, spread over it, in an order that the text does not have.

    A text that fills the model's positions loses as many of its last tokens as the probe needs.
    """
    shortest = config.window + config.block_size  # with one ranked block
    size, count = _copies(config.num_ranked_blocks(len(ids)) * config.block_size, max_context - shortest)
    text = ids[: max(shortest, min(len(ids), max_context - size * count))]
    ranked = config.num_ranked_blocks(len(text)) * config.block_size
    size, count = _copies(ranked, max_context - len(text))
    # The seed may be any integer, NumPy takes none below 0; texts must not share the places of their passages.
    rng = np.random.default_rng([config.seed % 2**32, index])
    stratum = ranked // max(count, 1)
    starts = [i * stratum + int(rng.integers(stratum - size + 1)) for i in rng.permutation(count)]
    probe = [token for start in starts for token in text[start : start + size]]
    return ProbedText(text + probe, len(text), len(text))


def _copies(ranked_tokens: int, room: int) -> tuple[int, int]:
    """Tokens of a passage and how many passages there are, so that all fit into the room."""
    size = min(_COPY_TOKENS, ranked_tokens, room)
    return size, min(_COPIES, ranked_tokens // size, room // size) if size else 0


def _last_quarter(ids: list[int], config: TCAConfig) -> ProbedText:
    """The text's own last quarter, or what there is of it behind one ranked block."""
    start = max(len(ids) - len(ids) // 4, min(len(ids), config.window + config.block_size))
    return ProbedText(ids, len(ids), start)


def _encode_pairs(lm: Encoder, pairs: Any, name: str) -> tuple[list[int], tuple[bool, ...]]:
    """Token ids of one text's pairs, one after the other, and which of them are answers."""
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Sequence):
        raise TypeError(f"{name} is of type {type(pairs).__name__}: must be a list of (question, answer) pairs")
    if not pairs:
        raise ValueError(f"{name} is empty: at least one (question, answer) pair is needed for each text")
    for i, pair in enumerate(pairs):
        if isinstance(pair, str | bytes | Mapping) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"{name}[{i}] = {pair!r}: must be a pair (question, answer)")
    texts = [isinstance(part, str | bytes) for pair in pairs for part in pair]
    if not any(texts):
        parts = [
            (encode_prompt(lm, part, f"{name}[{i}] ({what})"), what == "answer")
            for i, pair in enumerate(pairs)
            for part, what in zip(pair, ("question", "answer"), strict=True)
        ]
        ids = [token for part, _ in parts for token in part]
        return ids, tuple(answer for part, answer in parts for _ in part)
    if not all(texts):
        raise TypeError(f"{name} holds text and token ids: must be one or the other throughout")
    turns = [tuple(_text(part, f"{name}[{i}]") for part in pair) for i, pair in enumerate(pairs)]
    if lm.tokenizer is None:
        raise ValueError(
            f"{name}: {lm.name} was loaded without a tokenizer, so text cannot be used; pass pairs of token ids"
        )
    rendered, spans = _render(lm, turns, name)
    ids = encode_verbatim(lm, rendered, name)
    return ids, _inside(lm, rendered, spans, len(ids))


def _text(part: str | bytes, name: str) -> str:
    text = decode_utf8(part, name)
    if not text:
        raise ValueError(f"{name} holds an empty question or answer")
    return text


def _render(lm: Encoder, turns: Sequence[tuple[str, ...]], name: str) -> tuple[str, list[tuple[int, int]]]:
    """The pairs as turns of the model's chat template, or as lines where it has none, and where their answers lie."""
    if not getattr(lm.tokenizer, "chat_template", None):
        text, spans = "", []
        for question, answer in turns:
            text += f"\n{question} "
            spans.append((len(text), len(text) + len(answer) + 1))
            text += f"{answer}\n"
        return text, spans
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    rendered = render_chat(lm, messages, name, answered=True)
    spans = []
    for end in range(2, len(messages) + 1, 2):
        question = render_chat(lm, messages[: end - 1], name)
        answer = render_chat(lm, messages[:end], name, answered=True)
        if not (rendered.startswith(question) and rendered.startswith(answer)):
            spans = [(0, len(rendered))]  # a template that rewrites what came before: all counts
            break
        spans.append((len(question), len(answer)))
    begun = len(rendered) - len(rendered.removeprefix(getattr(lm.tokenizer, "bos_token", None) or ""))
    return rendered[begun:], [(start - begun, end - begun) for start, end in spans]  # the text has begun already


def _inside(lm: Encoder, text: str, spans: Sequence[tuple[int, int]], tokens: int) -> tuple[bool, ...]:
    """Which tokens of a text reach into one of the spans of characters; all where the tokenizer does not say."""
    if not getattr(lm.tokenizer, "is_fast", False):
        return (True,) * tokens
    encoded = lm.tokenizer(text, verbose=False, add_special_tokens=False, return_offsets_mapping=True)
    return tuple(any(a < end and b > start for start, end in spans) for a, b in encoded["offset_mapping"])
